//! What a plan is made from: the model as the runtime registered it, and how to cut it.

use gatherflow_kernels::DType;

use super::groups::ShardGroupSpec;
use super::ids::ParamId;
use super::layout::PARAM_ALIGN;

/// Everything a plan depends on. Two ranks with equal inputs have equal plans.
#[derive(Clone, Debug)]
pub struct PlanInput {
    /// The number of ranks of the job.
    pub ranks: usize,
    /// How many adjacent ranks share one copy of the model: d is `ranks / model_parallel`. Those of one pipeline stage register
    /// the same parameters; of a tensor-parallel one each holds another part.
    pub model_parallel: usize,
    /// Which part of the model's layers this is.
    pub pipeline: Pipeline,
    /// Shard groups with a d of their own. Parameters name them from 1 on.
    pub shard_groups: Vec<ShardGroupSpec>,
    /// Model chunks in forward order.
    pub chunks: Vec<ChunkSpec>,
    /// Parameters in registration order, which is forward order. [`ParamId`]s are indices into it.
    pub params: Vec<ParamSpec>,
    /// Number of optimizer groups.
    pub groups: usize,
    /// How buffers are cut into buckets.
    pub bucketing: Bucketing,
    /// Where buckets may end.
    pub alignment: Alignment,
    /// Where gathered parameters land. It does not change the layout.
    pub storage: Storage,
}

/// A pipeline stage: of the ranks that share a copy of the model, each run of `model_parallel / stages` holds other chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Which stage, `0..stages`.
    pub stage: usize,
    /// How many there are; divides the number of model-parallel ranks.
    pub stages: usize,
}

impl Default for Pipeline {
    /// The only stage.
    fn default() -> Self {
        Self { stage: 0, stages: 1 }
    }
}

/// A model chunk: its units in forward order.
#[derive(Clone, Debug, Default)]
pub struct ChunkSpec {
    /// Units in forward order.
    pub units: Vec<UnitSpec>,
}

/// What the executor enters at once.
#[derive(Clone, Debug)]
pub struct UnitSpec {
    /// For reports and errors.
    pub name: String,
    /// The parameters it uses, in any order. Other units may use them too. Repeating one has no effect.
    pub params: Vec<ParamId>,
}

/// One parameter as registered.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)]
pub struct ParamSpec {
    /// Unique among all parameters.
    pub name: String,
    /// At least one dimension, each at least 1 (a scalar is `[1]`).
    pub shape: Vec<usize>,
    /// Element type of the parameter.
    pub dtype: DType,
    /// Element type of its gradient. Unread where the parameter is frozen.
    pub grad_dtype: DType,
    /// Optimizer group, `0..groups`. Unread where the parameter is frozen.
    pub group: usize,
    /// Frozen parameters are in no bucket; they have memory of their own.
    pub trainable: bool,
    /// Gets a bucket of its own (SPEC L10).
    pub shared_embedding: bool,
    /// Each model-parallel rank of a stage holds another part of it, so each counts in the norm (SPEC T2a).
    pub tensor_parallel: bool,
    /// Copies of one weight carry the same name here: where they are trained, their reduced shards are summed. The norm counts
    /// the first (SPEC T0, T2a).
    pub shared: Option<String>,
    /// Over which ranks its gradient is a sum beyond the average (SPEC T0).
    pub sum_over: SumOver,
    /// Which ranks share its shards: 0 all data-parallel ones, else a number of [`PlanInput::shard_groups`], counted from 1.
    pub shard_group: usize,
    /// The chunk in which it was first registered.
    pub chunk: usize,
}

impl ParamSpec {
    /// A trainable parameter of chunk 0 and group 0 with f32 gradients and no marks.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            dtype,
            grad_dtype: DType::F32,
            group: 0,
            trainable: true,
            shared_embedding: false,
            tensor_parallel: false,
            shared: None,
            sum_over: SumOver::Nothing,
            shard_group: 0,
            chunk: 0,
        }
    }
}

/// Over which ranks the gradient of a parameter is summed, not averaged (SPEC T0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SumOver {
    /// Every model-parallel rank of a stage has the whole gradient.
    #[default]
    Nothing,
    /// Each model-parallel rank of a stage has a part of the sum (a norm under sequence parallelism, say).
    ModelParallel,
}

/// How a buffer is cut into buckets. It never depends on mode, stage or chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bucketing {
    /// A bucket size of max(40 000 000, 1 000 000 x d) elements, d being the number of data-parallel ranks.
    #[default]
    Default,
    /// A bucket closes once it holds at least this many elements, alignment gaps counted.
    Size(usize),
    /// The bucket size that gives about this many buckets: the 64-aligned sizes of all parameters, divided by it and
    /// rounded up. Since parameters are never split there may be fewer.
    Count(usize),
    /// One bucket per buffer.
    Whole,
}

/// Where parameters may start and buckets may end (SPEC L5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Alignment {
    /// Parameters at multiples of 64 elements, bucket ends at multiples of lcm(d, 128), d being that of the shard group.
    #[default]
    Standard,
    /// Parameters at multiples of 64 elements, bucket ends at multiples of lcm(d, 128, 65 536), for NCCL's bandwidth.
    Bandwidth,
    /// Parameters one after the other, bucket ends at multiples of d: as Megatron-LM's distributed optimizer of November 2023
    /// lays them out.
    Reference,
}

impl Alignment {
    /// Trainable parameters start at multiples of this many elements.
    pub fn params(self) -> usize {
        match self {
            Self::Standard | Self::Bandwidth => PARAM_ALIGN,
            Self::Reference => 1,
        }
    }
}

/// Where a gather lands (SPEC P5). Both give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Storage {
    /// In the model's parameters, which are views into the buffer that is gathered.
    #[default]
    Views,
    /// In the gradient memory of its bucket, seen in the parameters' dtype. The model's parameters have memory of their own,
    /// to which they are copied, and the gradients are zeroed.
    Shared,
}

impl Storage {
    /// As configurations spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Views => "views",
            Self::Shared => "shared",
        }
    }

    /// The other one.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Views => Self::Shared,
            Self::Shared => Self::Views,
        }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
