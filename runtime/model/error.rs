//! What can be wrong with a model, each naming the thing and what to do about it.

use crate::actors::PlanError;

/// The model was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The same name again.
    #[error(
        "parameter `{name}` is registered twice, with shapes {first:?} and {second:?}: register it once, and let other units use it with use_param"
    )]
    RegisteredTwice {
        /// The name.
        name: String,
        /// The shape at first.
        first: Vec<usize>,
        /// The shape now.
        second: Vec<usize>,
    },
    /// The same unit name again.
    #[error("unit `{name}` is registered twice: give each unit a name of its own")]
    UnitTwice {
        /// The name.
        name: String,
    },
    /// Copies of one weight must be equal in shape.
    #[error(
        "shapes disagree: `{first}` has {first_shape:?} but `{second}` has {second_shape:?}, and both are copies of `{shared}`"
    )]
    ShapesDisagree {
        /// What they are copies of.
        shared: String,
        /// The copy registered first.
        first: String,
        /// Its shape.
        first_shape: Vec<usize>,
        /// The other copy.
        second: String,
        /// Its shape.
        second_shape: Vec<usize>,
    },
    /// A dimension is 0, or the product does not fit.
    #[error(
        "parameter `{name}` has the impossible shape {shape:?}: every dimension must be at least 1, and the number of elements must fit in 64 bits"
    )]
    BadShape {
        /// Which parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The dtype is none that can be trained.
    #[error("parameter `{name}` has the unsupported dtype `{dtype}`: use f32, bf16 or f16")]
    UnsupportedDType {
        /// Which parameter.
        name: String,
        /// What was given.
        dtype: String,
    },
    /// An id that this model did not give out.
    #[error("there is no {what} {id} in this model; use the ids that its registration returned")]
    Unknown {
        /// `chunk`, `unit`, `parameter`, `group` or `shard group`.
        what: &'static str,
        /// The number.
        id: u32,
    },
    /// Units are numbered in forward order.
    #[error(
        "unit `{unit}` of chunk {chunk} is registered after a unit of chunk {last}: register in forward order, chunk by chunk"
    )]
    OutOfOrder {
        /// Which unit.
        unit: String,
        /// Its chunk.
        chunk: u32,
        /// The chunk registered last.
        last: u32,
    },
    /// A hyperparameter out of range.
    #[error("group {group}: {what} = {value:?} is out of range")]
    BadGroup {
        /// Which group.
        group: u32,
        /// Which hyperparameter.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A model description that is no TOML, or has other fields.
    #[error("the model description cannot be read: {reason}")]
    Description {
        /// What is wrong, with the line.
        reason: String,
    },
    /// The plan refused it.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
