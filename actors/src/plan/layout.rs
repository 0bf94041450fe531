//! Where everything lies: parameters in buffers, buffers cut into buckets (SPEC L2-L5, L10), frozen parameters apart.
//!
//! Input has passed [`super::check`], so nothing here can fail. One pass over the parameters (L11).

use std::collections::HashMap;

use gatherflow_kernels::DType;

use super::cost;
use super::groups::{self, ShardGroupPlan};
use super::ids::{BucketId, BufferIndex, FrozenIndex, ParamId, Position, UnitId};
use super::input::{Alignment, Bucketing, ParamSpec, PlanInput, SumOver};
use super::range::Range;

/// Parameters start at multiples of this many elements, frozen ones always, others by [`Alignment::params`].
pub const PARAM_ALIGN: usize = 64;

/// A flat allocation for all trainable parameters of one (chunk, shard group, parameter dtype, gradient dtype), and one of the
/// same layout for their gradients. Those that are summed over more ranks are apart, since whole shards are summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferPlan {
    /// Its number.
    pub index: BufferIndex,
    /// The chunk whose parameters it holds.
    pub chunk: usize,
    /// The number of the shard group whose ranks share it.
    pub shard_group: usize,
    /// Over which ranks its gradients are summed beyond the average.
    pub sum_over: SumOver,
    /// Element type of the parameters.
    pub dtype: DType,
    /// Element type of the gradients.
    pub grad_dtype: DType,
    /// Elements, padding included: the end of the last bucket.
    pub numel: usize,
    /// Elements that each rank owns: `numel / d`, d being that of the shard group.
    pub owned_numel: usize,
    /// Its parameters by offset: reverse registration order.
    pub params: Vec<ParamId>,
    pub(super) first_bucket: u32,
    pub(super) end_bucket: u32,
}

impl BufferPlan {
    /// Its buckets, by offset.
    pub fn buckets(&self) -> impl DoubleEndedIterator<Item = BucketId> + ExactSizeIterator + use<> {
        (self.first_bucket..self.end_bucket).map(BucketId)
    }
}

/// A contiguous, padded range of a buffer: the atom of ownership, reduce, Adam and gather.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Its number.
    pub id: BucketId,
    /// The buffer it lies in.
    pub buffer: BufferIndex,
    /// Its elements in the buffer, padding at the end included.
    pub range: Range,
    /// Elements up to the end of its last parameter: gaps between parameters count, padding at the end does not. Before a bucket
    /// that one parameter has by itself the gap to that parameter counts here too, as in the reference.
    pub numel_unpadded: usize,
    /// Elements of its parameters alone.
    pub param_numel: usize,
    /// Its parameters by offset.
    pub params: Vec<ParamId>,
    /// Elements that each rank owns of it: `range.len() / d`, d being that of the shard group.
    pub shard_numel: usize,
    /// Where its shard begins in what a rank owns of the buffer (masters, moments, reduced gradients), in elements.
    pub shard_start: usize,
    /// The first unit, in forward order, that uses one of its parameters.
    pub place: UnitId,
    /// Its position in the gather order.
    pub position: Position,
}

impl BucketPlan {
    /// Elements, padding included.
    pub fn numel(&self) -> usize {
        self.range.len()
    }

    /// Elements that belong to no parameter: gaps and the padding at the end.
    pub fn padding(&self) -> usize {
        self.numel() - self.param_numel
    }
}

/// A flat allocation for all frozen parameters of one (chunk, shard group, dtype), in registration order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenPlan {
    /// Its number.
    pub index: FrozenIndex,
    /// The chunk whose parameters it holds.
    pub chunk: usize,
    /// The number of the shard group whose ranks hold the same.
    pub shard_group: usize,
    /// Element type.
    pub dtype: DType,
    /// Elements, a multiple of [`PARAM_ALIGN`].
    pub numel: usize,
    /// Its parameters by offset.
    pub params: Vec<ParamId>,
}

/// Where a parameter lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Trainable: in a bucket.
    Bucket {
        /// Which one.
        bucket: BucketId,
        /// The buffer that the bucket lies in.
        buffer: BufferIndex,
        /// Its elements in the buffer.
        range: Range,
    },
    /// Frozen: in memory that no collective of a step touches.
    Frozen {
        /// Which buffer.
        buffer: FrozenIndex,
        /// Its elements in the buffer.
        range: Range,
    },
}

impl Home {
    /// The parameter's elements in its buffer.
    pub fn range(&self) -> Range {
        match *self {
            Self::Bucket { range, .. } | Self::Frozen { range, .. } => range,
        }
    }

    /// The bucket, unless the parameter is frozen.
    pub fn bucket(&self) -> Option<BucketId> {
        match *self {
            Self::Bucket { bucket, .. } => Some(bucket),
            Self::Frozen { .. } => None,
        }
    }
}

pub(super) struct Layout {
    pub(super) shard_groups: Vec<ShardGroupPlan>,
    pub(super) bucket_size: usize,
    pub(super) buffers: Vec<BufferPlan>,
    pub(super) buckets: Vec<BucketPlan>,
    pub(super) frozen: Vec<FrozenPlan>,
    pub(super) homes: Vec<Home>,
    /// By parameter: whether it has a bucket of its own.
    pub(super) alone: Vec<bool>,
}

/// Bucket ends are multiples of this.
pub(super) fn end_alignment(ranks: usize, alignment: Alignment) -> usize {
    match alignment {
        Alignment::Standard => lcm(ranks, 128),
        Alignment::Bandwidth => lcm(ranks, 1 << 16),
        Alignment::Reference => ranks,
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// SPEC L4.
pub(super) fn bucket_size(input: &PlanInput) -> usize {
    match input.bucketing {
        Bucketing::Default => (input.ranks / input.model_parallel).saturating_mul(1_000_000).max(40_000_000),
        Bucketing::Size(size) => size,
        Bucketing::Count(count) => {
            let trainable = input.params.iter().filter(|p| p.trainable);
            trainable.map(|p| numel(p).next_multiple_of(PARAM_ALIGN)).sum::<usize>().div_ceil(count).max(1)
        }
        Bucketing::Whole => usize::MAX,
    }
}

/// Elements of a checked parameter.
pub(super) fn numel(param: &ParamSpec) -> usize {
    param.shape.iter().product()
}

/// What is left open in buckets here, [`super::order`] fills in.
pub(super) fn lay_out(input: &PlanInput) -> Layout {
    let nowhere = Home::Frozen { buffer: FrozenIndex(0), range: Range::new(0, 0) };
    let mut layout = Layout {
        shard_groups: groups::plan(input.ranks / input.model_parallel, &input.shard_groups),
        bucket_size: bucket_size(input),
        buffers: Vec::new(),
        buckets: Vec::new(),
        frozen: Vec::new(),
        homes: vec![nowhere; input.params.len()],
        alone: alone(&input.params, input.pipeline.stages),
    };
    let mut by_chunk = vec![Vec::new(); input.chunks.len()];
    for (index, param) in input.params.iter().enumerate() {
        by_chunk[param.chunk].push(ParamId::from_index(index));
    }
    for (chunk, params) in by_chunk.iter().enumerate() {
        layout.lay_out_chunk(chunk, params, input);
    }
    for buffer in 0..layout.buffers.len() {
        layout.fill(buffer, input);
    }
    layout
}

/// Who has a bucket of its own: what asks for it, and trained copies of a weight, so that their shards line up. Another
/// pipeline stage may have a copy of any shared one.
fn alone(params: &[ParamSpec], stages: usize) -> Vec<bool> {
    let weight = |param: &'_ ParamSpec| param.shared.as_deref().filter(|_| param.trainable).map(str::to_owned);
    let mut copies: HashMap<String, usize> = HashMap::new();
    for shared in params.iter().filter_map(weight) {
        *copies.entry(shared).or_default() += 1;
    }
    let several = |shared: String| stages > 1 || copies[&shared] > 1;
    params.iter().map(|param| param.shared_embedding || weight(param).is_some_and(several)).collect()
}

impl Layout {
    /// Sorts a chunk's parameters into buffers, both by first registration, and places the frozen ones.
    fn lay_out_chunk(&mut self, chunk: usize, params: &[ParamId], input: &PlanInput) {
        let (first_buffer, first_frozen) = (self.buffers.len(), self.frozen.len());
        for &id in params {
            cost::tick();
            let param = &input.params[id.index()];
            if param.trainable {
                let kind = (param.shard_group, param.sum_over, param.dtype, param.grad_dtype);
                let same = |b: &BufferPlan| (b.shard_group, b.sum_over, b.dtype, b.grad_dtype) == kind;
                let found = self.buffers[first_buffer..].iter().position(same);
                let at = found.map_or(self.buffers.len(), |found| first_buffer + found);
                if at == self.buffers.len() {
                    self.buffers.push(BufferPlan {
                        index: BufferIndex::from_index(at),
                        chunk,
                        shard_group: param.shard_group,
                        sum_over: param.sum_over,
                        dtype: param.dtype,
                        grad_dtype: param.grad_dtype,
                        numel: 0,
                        owned_numel: 0,
                        params: Vec::new(),
                        first_bucket: 0,
                        end_bucket: 0,
                    });
                }
                self.buffers[at].params.push(id);
            } else {
                let kind = (param.shard_group, param.dtype);
                let found = self.frozen[first_frozen..].iter().position(|b| (b.shard_group, b.dtype) == kind);
                let at = found.map_or(self.frozen.len(), |found| first_frozen + found);
                let index = FrozenIndex::from_index(at);
                if at == self.frozen.len() {
                    let (shard_group, dtype) = kind;
                    self.frozen.push(FrozenPlan { index, chunk, shard_group, dtype, numel: 0, params: Vec::new() });
                }
                let buffer = &mut self.frozen[at];
                let range = Range::new(buffer.numel, buffer.numel + numel(param));
                buffer.numel = range.end.next_multiple_of(PARAM_ALIGN);
                buffer.params.push(id);
                self.homes[id.index()] = Home::Frozen { buffer: index, range };
            }
        }
        for buffer in &mut self.buffers[first_buffer..] {
            buffer.params.reverse();
        }
    }

    /// Places one buffer's parameters and cuts it into buckets.
    fn fill(&mut self, at: usize, input: &PlanInput) {
        let ranks = self.shard_groups[self.buffers[at].shard_group].ranks;
        let end_align = end_alignment(ranks, input.alignment);
        let params = std::mem::take(&mut self.buffers[at].params);
        self.buffers[at].first_bucket = self.buckets.len() as u32;
        let mut open = Open { buffer: BufferIndex::from_index(at), ranks, end_align, ..Open::default() };
        for &id in &params {
            cost::tick();
            let param = &input.params[id.index()];
            let start = open.cursor.next_multiple_of(input.alignment.params());
            let alone = self.alone[id.index()];
            if alone && !open.params.is_empty() {
                // The gap before the next parameter still belongs to the bucket that closes here.
                open.cursor = start;
                self.buckets.push(open.close(self.buckets.len()));
            }
            let start = open.cursor.next_multiple_of(input.alignment.params());
            let range = Range::new(start, start + numel(param));
            let bucket = BucketId::from_index(self.buckets.len());
            self.homes[id.index()] = Home::Bucket { bucket, buffer: open.buffer, range };
            open.params.push(id);
            open.param_numel += range.len();
            open.cursor = range.end;
            if alone || open.cursor - open.start >= self.bucket_size {
                self.buckets.push(open.close(self.buckets.len()));
            }
        }
        if !open.params.is_empty() {
            self.buckets.push(open.close(self.buckets.len()));
        }
        let buffer = &mut self.buffers[at];
        buffer.params = params;
        buffer.end_bucket = self.buckets.len() as u32;
        buffer.numel = open.start;
        buffer.owned_numel = buffer.numel / ranks;
    }
}

/// The bucket being filled.
#[derive(Default)]
struct Open {
    buffer: BufferIndex,
    ranks: usize,
    end_align: usize,
    start: usize,
    cursor: usize,
    param_numel: usize,
    params: Vec<ParamId>,
}

impl Open {
    /// Pads the bucket to its end; the next one opens there.
    fn close(&mut self, id: usize) -> BucketPlan {
        let range = Range::new(self.start, self.cursor.next_multiple_of(self.end_align));
        let bucket = BucketPlan {
            id: BucketId::from_index(id),
            buffer: self.buffer,
            range,
            numel_unpadded: self.cursor - self.start,
            param_numel: std::mem::take(&mut self.param_numel),
            params: std::mem::take(&mut self.params),
            shard_numel: range.len() / self.ranks,
            // All bucket ends are multiples of d, so the shards before it are exactly 1/d of what lies before it.
            shard_start: range.start / self.ranks,
            place: UnitId(0),
            position: Position(0),
        };
        (self.start, self.cursor) = (range.end, range.end);
        bucket
    }
}
