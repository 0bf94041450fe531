//! What can be wrong with a model or a cut, each naming the thing and what to do about it.

use gatherflow_kernels::DType;

use super::ids::ParamId;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// d is 0.
    #[error("0 ranks: a plan needs at least one rank")]
    NoRanks,
    /// More of something than ids can number.
    #[error("{count} {what} are too many: at most {most} are supported")]
    TooMany {
        /// Ranks, parameters or units.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// No chunk at all.
    #[error("the model has no units: register at least one chunk with one unit, in forward order")]
    NoUnits,
    /// A chunk without units.
    #[error("chunk {chunk} has no units: register what the executor enters, or leave the chunk out")]
    EmptyChunk {
        /// Which chunk.
        chunk: usize,
    },
    /// Two parameters of one name.
    #[error(
        "parameter `{name}` is registered twice (as {first} and {second}): register it once and list it in every unit that uses it"
    )]
    RegisteredTwice {
        /// The name.
        name: String,
        /// The first registration.
        first: ParamId,
        /// The second one.
        second: ParamId,
    },
    /// No dimensions, or one that is 0.
    #[error(
        "parameter `{name}` has shape {shape:?}, which holds no element: give every dimension at least 1 (a scalar is [1]) or leave it out"
    )]
    EmptyShape {
        /// Which parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The buffers cannot be addressed any more.
    #[error(
        "parameter `{name}` of shape {shape:?} makes the buffers larger than this machine can address: check its shape"
    )]
    TooLarge {
        /// The parameter at which it happens.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A parameter that nobody would ever wait for.
    #[error("parameter `{name}` is used by no unit: list it in every unit that uses it, or leave it out")]
    UsedByNoUnit {
        /// Which parameter.
        name: String,
    },
    /// A unit lists a parameter that was never registered.
    #[error("unit `{unit}` of chunk {chunk} uses {param}, but only {params} are registered: register it first")]
    UnknownParam {
        /// Which unit.
        unit: String,
        /// Its chunk.
        chunk: usize,
        /// What it lists.
        param: ParamId,
        /// How many parameters there are.
        params: usize,
    },
    /// An optimizer group that does not exist.
    #[error("parameter `{name}` is in group {group}, but there are {groups} groups: groups count from 0")]
    GroupOutOfRange {
        /// Which parameter.
        name: String,
        /// Its group.
        group: usize,
        /// How many groups there are.
        groups: usize,
    },
    /// A chunk that does not exist.
    #[error("parameter `{name}` is registered in chunk {chunk}, but there are {chunks} chunks: chunks count from 0")]
    ChunkOutOfRange {
        /// Which parameter.
        name: String,
        /// Its chunk.
        chunk: usize,
        /// How many chunks there are.
        chunks: usize,
    },
    /// A pair of element types that is not supported.
    #[error(
        "parameter `{name}` is {dtype} with {grad_dtype} gradients: use f32 gradients, or gradients of the parameter's own type"
    )]
    DTypes {
        /// Which parameter.
        name: String,
        /// Its element type.
        dtype: DType,
        /// The element type of its gradient.
        grad_dtype: DType,
    },
    /// A parameter that does not fit into the memory of its gradient.
    #[error(
        "parameter `{name}` is {dtype} with {grad_dtype} gradients, but storage `shared` gathers parameters in the memory of \
         their gradients, which is too small for it: give it f32 gradients, or use storage `views`"
    )]
    DoesNotFit {
        /// Which parameter.
        name: String,
        /// Its element type.
        dtype: DType,
        /// The element type of its gradient, which is smaller.
        grad_dtype: DType,
    },
    /// Ranks that cannot be divided into copies of the model.
    #[error(
        "{ranks} ranks cannot share copies of the model by {model_parallel} (`model_parallel`): give a number that divides them"
    )]
    ModelParallel {
        /// How many ranks there are.
        ranks: usize,
        /// How many should share a copy.
        model_parallel: usize,
    },
    /// A pipeline stage that cannot be.
    #[error(
        "stage {stage} of {stages} (`pipeline_parallel`) among {model_parallel} model-parallel ranks: the number of stages must \
         divide theirs, and stages count from 0"
    )]
    Pipeline {
        /// Which stage.
        stage: usize,
        /// How many there should be.
        stages: usize,
        /// How many ranks share a copy of the model.
        model_parallel: usize,
    },
    /// Two parameters of one name that are not one weight.
    #[error(
        "stages {first} and {second} both have a parameter `{name}`: name parameters by their place in the whole model, or mark \
         both as copies of one shared weight"
    )]
    OnTwoStages {
        /// The name.
        name: String,
        /// A stage.
        first: usize,
        /// A later one.
        second: usize,
    },
    /// A shard group that does not exist.
    #[error(
        "parameter `{name}` names shard group {group}, but there are {groups} besides number 0, which is all ranks"
    )]
    ShardGroupOutOfRange {
        /// Which parameter.
        name: String,
        /// The number it names.
        group: usize,
        /// How many groups there are.
        groups: usize,
    },
    /// Two shard groups of one name.
    #[error("shard group `{name}` is declared twice: declare it once and let every parameter name it")]
    ShardGroupTwice {
        /// The name.
        name: String,
    },
    /// A shard group that ranks cannot be divided into.
    #[error("shard group `{name}` of {ranks} ranks: its size must divide the {d} data-parallel ranks")]
    ShardGroupRanks {
        /// Which group.
        name: String,
        /// Its size.
        ranks: usize,
        /// The number of data-parallel ranks.
        d: usize,
    },
    /// An average over no ranks.
    #[error("shard group `{name}` averages over 0 ranks: give at least 1, or leave it out for as many as add up")]
    ShardGroupAverage {
        /// Which group.
        name: String,
    },
    /// Each rank has another part of it, so there is nothing to sum.
    #[error("parameter `{name}` is tensor-parallel and summed over model-parallel ranks: it can be one of the two")]
    SumOverParts {
        /// Which parameter.
        name: String,
    },
    /// Copies of one weight that could not stay equal.
    #[error(
        "parameters `{first}` and `{other}` are copies of shared weight `{shared}` but differ in {what}: make it equal"
    )]
    SharedDiffer {
        /// The name of the shared weight.
        shared: String,
        /// Its first copy.
        first: String,
        /// The copy that differs.
        other: String,
        /// Shape, dtype, group, trainable, shard group, tensor-parallel or what it is summed over.
        what: &'static str,
    },
    /// A bucket size of 0.
    #[error("a bucket size of 0 elements: give at least 1, or leave it out for the default")]
    ZeroBucketSize,
    /// No buckets asked for.
    #[error("0 buckets: give at least 1, or leave the number out for the default bucket size")]
    ZeroBuckets,
    /// Two ranks have planned different models.
    #[error("this rank and rank {rank} disagree about {what}: start all ranks with the same model and configuration")]
    Differs {
        /// The other rank.
        rank: usize,
        /// What is the first thing to differ.
        what: String,
    },
}
