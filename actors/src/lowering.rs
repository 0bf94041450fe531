//! From names to memory: what each [`Op`] and each collective means over this rank's buffers.
//!
//! Owns the allocations of the plan. Everything per bucket is worked out once, so lowering an operation copies a few ranges.

use std::collections::HashMap;
use std::sync::Arc;

use gatherflow_kernels::norm::{NormPiece, Partial};
use gatherflow_kernels::verdict::{RankRecord, Report, Scalars, ScalerRule, VerdictRule};
use gatherflow_kernels::work::{Adam, AdamSegment, Add, Cast, Copy, Fill, FindNonFinite, Fold, NormPartials, Verdict};
use gatherflow_kernels::{
    BufRange, Buffer, Collective, CollectiveKey, CollectiveKind, CollectiveOp, DType, Device, DeviceError, Members,
    Work,
};

use crate::action::Op;
use crate::plan::{BucketId, Home, ParamId, Plan, Purpose, Rank, Storage};
use crate::sequence::{WireBucket, WireStaged};

/// The memory of one bucket on this rank.
#[derive(Clone, Debug)]
pub struct BucketMemory {
    /// All its parameters, as the model reads them.
    pub params: BufRange,
    /// This rank's shard of them.
    pub param_shard: BufRange,
    /// What Adam writes and the gather sends: that shard, or a staging shard (SPEC P5). From the start it has the bytes that
    /// this rank's shard is to have.
    pub send: BufRange,
    /// Where the gather lands: in the parameters themselves, or at the front of the gradients (SPEC P5).
    pub landing: BufRange,
    /// Their element type.
    pub dtype: DType,
    /// All its gradients.
    pub grads: BufRange,
    /// Their element type.
    pub grad_dtype: DType,
    /// This rank's reduced gradients, f32; in place where gradients are f32.
    pub reduced: BufRange,
    /// f32 masters; the parameters themselves where those are f32.
    pub master: BufRange,
    /// First moments.
    pub exp_avg: BufRange,
    /// Second moments.
    pub exp_avg_sq: BufRange,
    partial: BufRange,
    ratio: f64,
    group: u32,
    sums: [u32; 2],
    pieces: Arc<[NormPiece]>,
    whole_pieces: Arc<[NormPiece]>,
    segments: Arc<[AdamSegment]>,
}

/// All memory of one rank, and the rules of its steps.
#[derive(Debug)]
pub struct Lowering {
    plan: Arc<Plan>,
    /// By kind of division: this rank's part of it.
    members: Vec<Members>,
    buckets: Vec<BucketMemory>,
    params: Vec<BufRange>,
    grads: Vec<Option<BufRange>>,
    partials: BufRange,
    records: BufRange,
    own_record: BufRange,
    scalars: BufRange,
    rule: VerdictRule,
    scaler: ScalerRule,
    report: Report,
    buffers: HashMap<Purpose, Buffer>,
}

impl Lowering {
    /// Allocates everything that [`Plan::memory`] lists.
    ///
    /// # Errors
    /// What the device says of an allocation.
    pub fn new(
        plan: &Arc<Plan>,
        rank: usize,
        device: &dyn Device,
        rule: VerdictRule,
        scaler: ScalerRule,
    ) -> Result<Self, DeviceError> {
        let mut buffers: HashMap<Purpose, Buffer> = HashMap::new();
        for allocation in plan.memory().allocations {
            buffers.insert(allocation.purpose, device.alloc(allocation.bytes, &allocation.cells)?);
        }
        let buffer = |purpose: Purpose| {
            buffers.get(&purpose).copied().ok_or_else(|| DeviceError::BadWork {
                work: "allocation",
                reason: format!("the plan lists no memory for the {purpose}"),
            })
        };
        let partials = buffer(Purpose::Partials)?;
        let records = buffer(Purpose::Records)?;
        let slot = |whole: Buffer, index: usize, bytes: usize| whole.range(index * bytes, (index + 1) * bytes);

        let mut buckets = Vec::with_capacity(plan.buckets().len());
        for bucket in plan.buckets() {
            let (index, home) = (bucket.buffer, plan.buffer(bucket.buffer));
            let shard = plan.shard(Rank(rank), bucket.id);
            let bytes_of = |dtype: DType, start: usize, end: usize| (start * dtype.bytes(), end * dtype.bytes());
            let range = |purpose, dtype, start, end| {
                let (start, end) = bytes_of(dtype, start, end);
                buffer(purpose).map(|whole: Buffer| whole.range(start, end))
            };
            let owned = (bucket.shard_start, bucket.shard_start + bucket.shard_numel);
            let own = |purpose| range(purpose, DType::F32, owned.0, owned.1);
            let params = range(Purpose::Params(index), home.dtype, bucket.range.start, bucket.range.end)?;
            let param_shard = range(Purpose::Params(index), home.dtype, shard.start, shard.end)?;
            let grads = range(Purpose::Grads(index), home.grad_dtype, bucket.range.start, bucket.range.end)?;
            let shared = plan.storage() == Storage::Shared;
            buckets.push(BucketMemory {
                params,
                param_shard,
                send: if shared && home.dtype != DType::F32 {
                    range(Purpose::Staging(index), home.dtype, owned.0, owned.1)?
                } else {
                    param_shard
                },
                landing: if shared { BufRange { end: grads.start + params.bytes(), ..grads } } else { params },
                dtype: home.dtype,
                grads,
                grad_dtype: home.grad_dtype,
                reduced: if home.grad_dtype == DType::F32 {
                    range(Purpose::Grads(index), DType::F32, shard.start, shard.end)?
                } else {
                    own(Purpose::Reduced(index))?
                },
                master: if home.dtype == DType::F32 { param_shard } else { own(Purpose::Master(index))? },
                exp_avg: own(Purpose::ExpAvg(index))?,
                exp_avg_sq: own(Purpose::ExpAvgSq(index))?,
                partial: slot(partials, bucket.id.0 as usize, Partial::BYTES),
                ratio: plan.gradient_ratio(bucket.id),
                group: plan.reduce_group(bucket.id),
                sums: plan.sum_groups(bucket.id),
                pieces: plan.norm_pieces(Rank(rank), bucket.id).into(),
                whole_pieces: plan.bucket_pieces(bucket.id).into(),
                segments: plan.adam_segments(Rank(rank), bucket.id).into(),
            });
        }
        let mut params = Vec::with_capacity(plan.params().len());
        let mut grads = Vec::with_capacity(plan.params().len());
        for param in plan.params() {
            let range = param.home.range();
            let bytes = |dtype: DType| (range.start * dtype.bytes(), range.end * dtype.bytes());
            let (start, end) = bytes(param.dtype);
            match param.home {
                Home::Bucket { buffer: index, .. } => {
                    params.push(buffer(Purpose::Params(index))?.range(start, end));
                    let (start, end) = bytes(param.grad_dtype);
                    grads.push(Some(buffer(Purpose::Grads(index))?.range(start, end)));
                }
                Home::Frozen { buffer: index, .. } => {
                    params.push(buffer(Purpose::Frozen(index))?.range(start, end));
                    grads.push(None);
                }
            }
        }
        Ok(Self {
            plan: plan.clone(),
            members: plan.divisions(Rank(rank)),
            buckets,
            params,
            grads,
            partials: partials.whole(),
            records: records.whole(),
            own_record: slot(records, rank, RankRecord::BYTES),
            scalars: buffer(Purpose::Scalars)?.range(0, Scalars::BYTES),
            rule,
            scaler,
            report: Report::new(),
            buffers,
        })
    }

    /// The memory of a bucket.
    pub fn bucket(&self, bucket: BucketId) -> &BucketMemory {
        &self.buckets[bucket.0 as usize]
    }

    /// The whole allocation for a purpose.
    pub fn allocation(&self, purpose: Purpose) -> Option<BufRange> {
        self.buffers.get(&purpose).map(Buffer::whole)
    }

    /// A parameter's own memory.
    pub fn param(&self, param: ParamId) -> BufRange {
        self.params[param.0 as usize]
    }

    /// A parameter's gradient; `None` if it is frozen.
    pub fn grad(&self, param: ParamId) -> Option<BufRange> {
        self.grads[param.0 as usize]
    }

    /// The step's scalars.
    pub fn scalars(&self) -> BufRange {
        self.scalars
    }

    /// Where the verdict leaves its report.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// What ranks compare of each bucket's collectives.
    pub fn wire(&self) -> Vec<WireBucket> {
        let wire = |b: &BucketMemory| WireBucket {
            reduce_bytes: b.grads.bytes() as u64,
            reduce_dtype: b.grad_dtype,
            gather_bytes: b.params.bytes() as u64,
            gather_dtype: b.dtype,
            shard_bytes: b.reduced.bytes() as u64,
            group: b.group,
            sums: b.sums,
        };
        self.buckets.iter().map(wire).collect()
    }

    /// Bytes of the small all-gather.
    pub fn small_bytes(&self) -> u64 {
        self.records.bytes() as u64
    }

    /// The work that an operation means, in stream order.
    pub fn lower(&self, op: &Op, push: &mut dyn FnMut(Work)) {
        match op {
            Op::ZeroGradients { params, .. } => {
                for param in params {
                    if let Some(dst) = self.grad(*param) {
                        let dtype = self.plan.param(*param).grad_dtype;
                        push(Work::Fill(Fill { dst, dtype, value: 0.0 }));
                    }
                }
            }
            Op::ZeroBucket { bucket } => push(self.zero_bucket(*bucket)),
            Op::FindNonFinite { bucket } => {
                let memory = self.bucket(*bucket);
                push(Work::FindNonFinite(FindNonFinite {
                    grad: memory.grads,
                    dtype: memory.grad_dtype,
                    pieces: memory.whole_pieces.clone(),
                    out: memory.partial.sub(Partial::SHARD_BYTES, Partial::BYTES),
                }));
            }
            Op::SumCopies { set } => {
                let mut shards = self.plan.copies()[*set].iter().map(|bucket| self.bucket(*bucket).reduced);
                let Some(sum) = shards.next() else { return };
                shards.for_each(|part| push(Work::Add(Add { part, sum })));
            }
            Op::SpreadCopies { set } => {
                let mut shards = self.plan.copies()[*set].iter().map(|bucket| self.bucket(*bucket).reduced);
                let Some(src) = shards.next() else { return };
                shards.for_each(|dst| push(Work::Copy(Copy { src, dst })));
            }
            Op::NormPartials { bucket } => {
                let memory = self.bucket(*bucket);
                push(Work::NormPartials(NormPartials {
                    grad: memory.reduced,
                    norm: self.rule.norm,
                    pieces: memory.pieces.clone(),
                    ratio: memory.ratio,
                    out: memory.partial.sub(0, Partial::SHARD_BYTES),
                }));
            }
            Op::Fold { host } => {
                push(Work::Fold(Fold { partials: self.partials, host: *host, out: self.own_record }));
            }
            Op::Verdict { step } => push(Work::Verdict(Verdict {
                records: self.records,
                rule: self.rule,
                scaler: self.scaler,
                scalars: self.scalars,
                report: self.report.clone(),
                step: *step,
            })),
            Op::Adam { bucket, rows } => {
                let memory = self.bucket(*bucket);
                push(Work::Adam(Adam {
                    grad: memory.reduced,
                    grad_dtype: DType::F32,
                    master: memory.master,
                    exp_avg: memory.exp_avg,
                    exp_avg_sq: memory.exp_avg_sq,
                    param: (memory.dtype != DType::F32).then_some((memory.send, memory.dtype)),
                    scalars: self.scalars,
                    ratio: memory.ratio,
                    segments: memory.segments.clone(),
                    rows: rows.clone(),
                }));
            }
        }
    }

    /// The collective behind a key of the sequence.
    pub fn collective(&self, key: CollectiveKey) -> Collective {
        let op = match key.kind {
            CollectiveKind::Reduce => {
                let memory = self.bucket(BucketId(key.bucket));
                CollectiveOp::ReduceScatter { send: memory.grads, dtype: memory.grad_dtype, recv: memory.reduced }
            }
            CollectiveKind::Sum => CollectiveOp::AllReduce { range: self.bucket(BucketId(key.bucket)).reduced },
            CollectiveKind::StagedSum if let Some(bucket) = self.staged_bucket(key.bucket) => {
                CollectiveOp::AllReduce { range: self.bucket(bucket).reduced }
            }
            CollectiveKind::Gather => {
                let memory = self.bucket(BucketId(key.bucket));
                CollectiveOp::AllGather { send: memory.send, recv: memory.landing }
            }
            _ => CollectiveOp::AllGather { send: self.own_record, recv: self.records },
        };
        Collective::new(key, self.members(key.group).clone(), op)
    }

    /// The ranks of this rank's own part of a division.
    pub fn members(&self, division: u32) -> &Members {
        &self.members[self.plan.kind(division)]
    }

    /// The bucket of this rank's first copy of a weight that other pipeline stages have too.
    fn staged_bucket(&self, weight: u32) -> Option<BucketId> {
        self.plan.staged_here().find(|(number, _)| *number == weight as usize).map(|(_, bucket)| bucket)
    }

    /// What ranks compare of the sums over pipeline stages, by weight.
    pub fn staged_wire(&self) -> Vec<WireStaged> {
        let wire = |(weight, bucket): (usize, BucketId)| WireStaged {
            weight: weight as u32,
            shard_bytes: self.bucket(bucket).reduced.bytes() as u64,
            group: self.plan.staged_group(weight),
        };
        self.plan.staged_here().map(wire).collect()
    }

    /// What belongs to a collective and follows it on its stream: a gather that landed in gradient memory is copied out to the
    /// model, and leaves zeros (SPEC P5).
    pub fn follow_up(&self, key: CollectiveKey) -> Option<[Work; 2]> {
        if key.kind != CollectiveKind::Gather || self.plan.storage() == Storage::Views {
            return None;
        }
        let bucket = BucketId(key.bucket);
        let memory = self.bucket(bucket);
        Some([Work::Copy(Copy { src: memory.landing, dst: memory.params }), self.zero_bucket(bucket)])
    }

    /// All gradients of a bucket, padding included.
    fn zero_bucket(&self, bucket: BucketId) -> Work {
        let memory = self.bucket(bucket);
        Work::Fill(Fill { dst: memory.grads, dtype: memory.grad_dtype, value: 0.0 })
    }

    /// Brings a bucket's master and staging shard in line with its parameters.
    pub fn follow_params(&self, bucket: BucketId, push: &mut dyn FnMut(Work)) {
        let memory = self.bucket(bucket);
        if memory.dtype != DType::F32 {
            let (from, to) = (memory.dtype, DType::F32);
            push(Work::Cast(Cast { src: memory.param_shard, from, dst: memory.master, to }));
        }
        if let Some(work) = self.stage_params(bucket) {
            push(work);
        }
    }

    /// Brings a bucket's staging shard in line with its parameters, where it has one.
    pub fn stage_params(&self, bucket: BucketId) -> Option<Work> {
        let memory = self.bucket(bucket);
        (memory.send != memory.param_shard).then_some(Work::Copy(Copy { src: memory.param_shard, dst: memory.send }))
    }
}
