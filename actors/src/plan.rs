//! The plan: the whole static layout of one model on the ranks of a job, and the order of all collectives of a step.
//!
//! It is pure data made once, from a [`PlanInput`], without devices: [`Plan::new`] is a function of its input, so ranks
//! with equal inputs have equal plans (they compare [`Plan::summary`] at start-up). Everybody reads it: the runtime
//! allocates what [`Plan::memory`] lists, the actors take buckets, positions and demands from it, kernels get their
//! pieces through [`Plan::norm_pieces`] and [`Plan::adam_segments`].
//!
//! | file | idea | rules |
//! | --- | --- | --- |
//! | `input`, `check`, `error` | the model as registered, and what is refused | fault 9 |
//! | `ids`, `range` | newtypes, half-open ranges | L1 |
//! | `groups` | how the ranks are divided: data-parallel, model-parallel, shard groups | L2, T2a |
//! | `copies` | copies of one weight, whose reduced shards are summed | T0 |
//! | `stages` | what concerns several pipeline stages | O1, T0 |
//! | `layout` | buffers, buckets, padding, frozen parameters | L2-L5, L8, L10 |
//! | `order` | places, gather order, what each unit needs | L9, O1, C1 |
//! | `calls` | gathers that are issued together | C1 |
//! | `owned` | a rank's pieces in four coordinates | L6, L7, T2a |
//! | `memory` | allocations and their cells, in each storage | P5 |
//! | `summary` | what ranks compare at start-up | O2 |
//! | `describe` | what `gatherflow plan` prints | K1 |
//!
//! Invariants: a parameter is in exactly one bucket or frozen; the shards of all ranks tile every bucket (L8); the reduce
//! order is the exact reverse of the gather order (O1). It fails only in [`Plan::new`], with a [`PlanError`] that names
//! the thing. Making it costs O(parameters + buckets) (L11), reading it one index. Accessors by id panic on ids of
//! another plan, as indexing does.

mod calls;
mod check;
mod copies;
mod cost;
mod describe;
mod error;
mod groups;
mod ids;
mod input;
mod layout;
mod memory;
mod order;
mod owned;
mod range;
mod stages;
mod summary;

use std::collections::HashSet;
use std::sync::Arc;

use gatherflow_kernels::DType;

pub use error::PlanError;
pub use groups::{Across, JOB, ShardGroupPlan, ShardGroupSpec};
pub use ids::{BucketId, BufferIndex, FrozenIndex, ParamId, Position, Rank, UnitId, Version};
pub use input::{Alignment, Bucketing, ChunkSpec, ParamSpec, Pipeline, PlanInput, Storage, SumOver, UnitSpec};
pub use layout::{BucketPlan, BufferPlan, FrozenPlan, Home, PARAM_ALIGN};
pub use memory::{Allocation, Memory, Purpose};
pub use order::UnitPlan;
pub use owned::OwnedPiece;
pub use range::Range;
pub use stages::{Numbers, StagedWeight};
pub use summary::Summary;

/// A parameter and where it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub struct ParamPlan {
    /// Its number: registration order.
    pub id: ParamId,
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements.
    pub numel: usize,
    /// Its element type.
    pub dtype: DType,
    /// The element type of its gradient.
    pub grad_dtype: DType,
    /// Its optimizer group.
    pub group: usize,
    /// Whether it is trained; frozen parameters are in no bucket.
    pub trainable: bool,
    /// Whether it is the first copy of a shared weight, or no copy (SPEC T2a).
    pub first_copy: bool,
    /// Whether it has a bucket of its own (SPEC L10).
    pub shared_embedding: bool,
    /// Whether each model-parallel rank of the stage holds another part of it.
    pub tensor_parallel: bool,
    /// The weight it is a copy of.
    pub shared: Option<String>,
    /// The number of its shard group.
    pub shard_group: usize,
    /// Over which ranks its gradient is summed beyond the average.
    pub sum_over: SumOver,
    /// The chunk in which it was registered.
    pub chunk: usize,
    /// Where it lives.
    pub home: Home,
    /// The units that use it, in forward order; at least one.
    pub units: Vec<UnitId>,
}

/// The whole static layout. See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    ranks: usize,
    model_parallel: usize,
    pipeline: Pipeline,
    shard_groups: Vec<ShardGroupPlan>,
    groups: usize,
    bucketing: Bucketing,
    alignment: Alignment,
    storage: Storage,
    bucket_size: usize,
    chunk_starts: Vec<usize>,
    params: Vec<ParamPlan>,
    units: Vec<UnitPlan>,
    buffers: Vec<BufferPlan>,
    buckets: Vec<BucketPlan>,
    frozen: Vec<FrozenPlan>,
    order: Vec<BucketId>,
    call_ends: Vec<u32>,
    copies: Vec<Vec<BucketId>>,
    /// Of all stages, once joined.
    stages: Arc<[Arc<Plan>]>,
    staged: Vec<StagedWeight>,
    call_bytes: usize,
}

impl Plan {
    /// Lays out a model.
    ///
    /// # Errors
    /// [`PlanError`], each naming the parameter, unit or number that is wrong and what to do. No trainable parameter at
    /// all is no error (rule O3): the plan then has no buckets.
    pub fn new(input: &PlanInput) -> Result<Self, PlanError> {
        check::check(input)?;
        let (mut units, users) = order::uses(input);
        let mut layout = layout::lay_out(input);
        let order = order::order(&mut layout, &mut units, &users);
        let mut seen = HashSet::new();
        let specs = input.params.iter().zip(&layout.homes).zip(users).enumerate();
        let params = specs.map(|(index, ((spec, &home), units))| {
            cost::tick();
            let first_copy = spec.shared.as_ref().is_none_or(|shared| seen.insert(shared));
            ParamPlan {
                id: ParamId::from_index(index),
                name: spec.name.clone(),
                shape: spec.shape.clone(),
                numel: layout::numel(spec),
                dtype: spec.dtype,
                grad_dtype: spec.grad_dtype,
                group: spec.group,
                trainable: spec.trainable,
                first_copy,
                shared_embedding: layout.alone[index],
                tensor_parallel: spec.tensor_parallel,
                shared: spec.shared.clone(),
                shard_group: spec.shard_group,
                sum_over: spec.sum_over,
                chunk: spec.chunk,
                home,
                units,
            }
        });
        let params: Vec<ParamPlan> = params.collect();
        let chunk_starts = std::iter::once(0).chain(input.chunks.iter().scan(0, |at, chunk| {
            *at += chunk.units.len();
            Some(*at)
        }));
        Ok(Self {
            copies: copies::sets(&params, |_| false),
            stages: Arc::new([]),
            staged: Vec::new(),
            ranks: input.ranks,
            model_parallel: input.model_parallel,
            pipeline: input.pipeline,
            shard_groups: layout.shard_groups,
            groups: input.groups,
            bucketing: input.bucketing,
            alignment: input.alignment,
            storage: input.storage,
            bucket_size: layout.bucket_size,
            chunk_starts: chunk_starts.collect(),
            params,
            units,
            buffers: layout.buffers,
            buckets: layout.buckets,
            frozen: layout.frozen,
            order,
            call_ends: Vec::new(),
            call_bytes: 0,
        }
        .with_gather_calls(0))
    }

    /// The number of ranks of the job.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of optimizer groups.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Where parameters start and buckets end.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Where gathered parameters land.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Number of model chunks.
    pub fn chunks(&self) -> usize {
        self.chunk_starts.len() - 1
    }

    /// A bucket closed once it held this many elements; `usize::MAX` for [`Bucketing::Whole`].
    pub fn bucket_size(&self) -> usize {
        self.bucket_size
    }

    /// Buffers of trainable parameters, by number.
    pub fn buffers(&self) -> &[BufferPlan] {
        &self.buffers
    }

    /// One buffer.
    pub fn buffer(&self, index: BufferIndex) -> &BufferPlan {
        &self.buffers[index.index()]
    }

    /// Buckets of all buffers, by number.
    pub fn buckets(&self) -> &[BucketPlan] {
        &self.buckets
    }

    /// One bucket.
    pub fn bucket(&self, id: BucketId) -> &BucketPlan {
        &self.buckets[id.index()]
    }

    /// Buffers of frozen parameters, by number.
    pub fn frozen(&self) -> &[FrozenPlan] {
        &self.frozen
    }

    /// Parameters, trainable and frozen, by number.
    pub fn params(&self) -> &[ParamPlan] {
        &self.params
    }

    /// One parameter.
    pub fn param(&self, id: ParamId) -> &ParamPlan {
        &self.params[id.index()]
    }

    /// Units of all chunks in forward order.
    pub fn units(&self) -> &[UnitPlan] {
        &self.units
    }

    /// One unit.
    pub fn unit(&self, id: UnitId) -> &UnitPlan {
        &self.units[id.index()]
    }

    /// The units of a chunk in forward order; none where there is no such chunk.
    pub fn units_of(&self, chunk: usize) -> &[UnitPlan] {
        match (self.chunk_starts.get(chunk), self.chunk_starts.get(chunk + 1)) {
            (Some(&start), Some(&end)) => &self.units[start..end],
            _ => &[],
        }
    }

    /// The gather order: by place ascending, ties by buffer, then bucket (SPEC L9).
    pub fn gather_order(&self) -> &[BucketId] {
        &self.order
    }

    /// The reduce order: the exact reverse of the gather order (rule O1).
    pub fn reduce_order(&self) -> impl DoubleEndedIterator<Item = BucketId> + ExactSizeIterator + '_ {
        self.order.iter().rev().copied()
    }

    /// A bucket's position in the gather order.
    pub fn position(&self, bucket: BucketId) -> Position {
        self.bucket(bucket).position
    }

    /// Where a bucket's shard begins in what a rank owns of its buffer, in elements.
    pub fn shard_start(&self, bucket: BucketId) -> usize {
        self.bucket(bucket).shard_start
    }

    /// The bucket of a parameter, unless it is frozen.
    pub fn bucket_of(&self, param: ParamId) -> Option<BucketId> {
        self.param(param).home.bucket()
    }
}
