//! What can be wrong with saved state, each naming the thing and what to do about it.

/// Saved state that does not go together, or not with this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// Nothing to merge.
    #[error("there is no part to merge: give the state of every rank")]
    NoParts,
    /// Parts that are not of one state.
    #[error(
        "the parts are not of one state: {what} is {first} in the first and {other} in number {number}; take the state of \
         every rank after the same step of one job"
    )]
    PartsDisagree {
        /// What they disagree about.
        what: String,
        /// What the first part has.
        first: String,
        /// Another part, counted from 0.
        number: usize,
        /// What that has.
        other: String,
    },
    /// Elements that nobody has.
    #[error("elements {start}..{end} of {tensor} are missing: merge the states of all ranks")]
    Missing {
        /// Which parameter.
        tensor: String,
        /// The first element.
        start: usize,
        /// One past the last.
        end: usize,
    },
    /// Elements that two pieces have.
    #[error("elements {start}..{end} of {tensor} are there twice: merge the state of each rank once")]
    Twice {
        /// Which parameter.
        tensor: String,
        /// The first element.
        start: usize,
        /// One past the last.
        end: usize,
    },
    /// The same parameter again.
    #[error("{tensor} is listed twice")]
    ListedTwice {
        /// Which parameter.
        tensor: String,
    },
    /// A piece whose parts do not fit each other, or the parameter.
    #[error(
        "a piece of {tensor} from element {start} does not fit: {lengths:?} masters and moments of {numel} elements in all"
    )]
    BadPiece {
        /// Which parameter.
        tensor: String,
        /// Where the piece starts.
        start: usize,
        /// Its masters, first and second moments.
        lengths: [usize; 3],
        /// Elements of the parameter.
        numel: usize,
    },
    /// A count beyond what training can reach: going on from it would overflow.
    #[error("{what} is {count}: nothing has taken so many steps")]
    BadCount {
        /// The number of steps, or the step count of which group.
        what: String,
        /// What it is.
        count: u64,
    },
    /// A value that Adam never leaves.
    #[error("the {what} of element {element} of {tensor} is {value}: the state is damaged, or of a run that diverged")]
    BadValue {
        /// Which parameter.
        tensor: String,
        /// Which of its elements.
        element: usize,
        /// Master, first or second moment.
        what: &'static str,
        /// What it is.
        value: String,
    },
    /// A loss scaler that cannot be.
    #[error("the loss scale is {scale}: it must be finite and above 0")]
    BadScale {
        /// The scale, in words.
        scale: String,
    },
    /// The model trains something else.
    #[error(
        "the model trains no parameter `{name}`, but the state has one: load it into the model that it was taken from"
    )]
    Unknown {
        /// Which parameter.
        name: String,
    },
    /// The model trains something more.
    #[error(
        "the model trains `{name}`, of which the state has nothing: load the state into the model that it was taken from"
    )]
    Untrained {
        /// Which parameter.
        name: String,
    },
    /// Another shape.
    #[error("{tensor} has shape {state:?} in the state and {model:?} in the model")]
    Shape {
        /// Which parameter.
        tensor: String,
        /// In the state.
        state: Vec<usize>,
        /// In the model.
        model: Vec<usize>,
    },
    /// Another optimizer group.
    #[error(
        "{tensor} is in optimizer group {state} in the state and {model} in the model: step counts belong to groups"
    )]
    Group {
        /// Which parameter.
        tensor: String,
        /// In the state.
        state: usize,
        /// In the model.
        model: usize,
    },
    /// More groups, or fewer.
    #[error("the state has {state} optimizer groups and the model {model}")]
    Groups {
        /// In the state.
        state: usize,
        /// In the model.
        model: usize,
    },
    /// Experts or tensor-parallel parameters divided in another way: nobody can say which is whose.
    #[error(
        "`{name}` comes in parts ({state}) in the state and in others ({model}) here: keep the number of model-parallel ranks \
         and of groups of experts"
    )]
    Parts {
        /// Which parameter.
        name: String,
        /// In the state.
        state: String,
        /// In this job.
        model: String,
    },
}
