//! The one error that a user of the engine meets: cloneable, with fields rather than text.
//!
//! Three sorts, told apart by [`ErrorKind`]: something the caller did (configuration, model, misuse), a verdict on one step
//! (the step was skipped on **every** rank, and the engine stays usable, rule F1), and the fatal kinds after which every
//! call returns the first cause.

use std::sync::Arc;

use crate::actors::{Cause, FailureKind};
use crate::config::ConfigError;
use crate::model::ModelError;
use crate::state::{StateError, StateFileError};

/// What sort of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The configuration was refused.
    Config,
    /// The model was refused.
    Model,
    /// A call that the state of the engine does not allow, or an id that does not exist. Nothing was changed.
    Misuse,
    /// Saved state was refused, by this rank or by another one, or a file of it could not be written or read. Nothing was
    /// changed on any rank.
    State,
    /// The step was skipped on every rank: a gradient was not finite and the policy is `on_nonfinite = "error"`, or it was so
    /// before the reduction and `check_for_nan_in_grad` looked.
    NonFinite,
    /// The step was skipped on every rank: a gradient guard was dropped without `complete`, or a panic left backward.
    Abandoned,
    /// The step was skipped on every rank: a parameter got no gradient and the policy is `unused = "error"`.
    Unused,
    /// The step was skipped on every rank: averaging by weight, and every rank gave weight 0, or nearly so.
    NoWeight,
    /// The step was skipped on every rank: ranks had set different learning rates, or schedules that give different ones.
    LearningRates,
    /// A device failed. Fatal.
    Device,
    /// A collective failed. Fatal.
    Collective,
    /// Ranks disagree about the order of collectives (rule O2). Fatal.
    OrderMismatch,
    /// A rank left, died or fell silent. Fatal.
    RankLost,
    /// A wait passed its deadline. Fatal.
    Deadline,
    /// An actor failed. Fatal.
    Actor,
    /// Ranks disagree about the model or the configuration. Fatal.
    StartUp,
    /// The engine was closed, or dropped while a handle of it lived on. Fatal.
    Closed,
}

/// What went wrong, where, and what to do about it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Error(Arc<Parts>);

#[derive(Clone, Debug)]
struct Parts {
    kind: ErrorKind,
    rank: Option<usize>,
    step: Option<u64>,
    bucket: Option<u32>,
    parameter: Option<String>,
    message: String,
    cause: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error without a place.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Parts {
            kind,
            rank: None,
            step: None,
            bucket: None,
            parameter: None,
            message: message.into(),
            cause: None,
        }))
    }

    /// A call that is not allowed here.
    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Misuse, message)
    }

    /// The engine is gone.
    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the engine was closed; make a new one to go on")
    }

    pub(crate) fn on_rank(self, rank: usize) -> Self {
        self.with(|parts| parts.rank = Some(rank))
    }

    pub(crate) fn at_step(self, step: u64) -> Self {
        self.with(|parts| parts.step = Some(step))
    }

    pub(crate) fn in_bucket(self, bucket: u32) -> Self {
        self.with(|parts| parts.bucket = Some(bucket))
    }

    pub(crate) fn of_parameter(self, name: impl Into<String>) -> Self {
        self.with(|parts| parts.parameter = Some(name.into()))
    }

    pub(crate) fn because(self, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.with(|parts| parts.cause = Some(Arc::new(cause)))
    }

    fn with(mut self, change: impl FnOnce(&mut Parts)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// What sort of thing went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The rank on which it went wrong, which need not be this one.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The step: the number of `step` calls before it.
    pub fn step(&self) -> Option<u64> {
        self.0.step
    }

    /// The bucket's number in the plan.
    pub fn bucket(&self) -> Option<u32> {
        self.0.bucket
    }

    /// The parameter's name.
    pub fn parameter(&self) -> Option<&str> {
        self.0.parameter.as_deref()
    }

    /// What happened, without the place.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the engine is of no more use: every later call returns the first cause.
    pub fn is_fatal(&self) -> bool {
        match self.0.kind {
            ErrorKind::Config
            | ErrorKind::Model
            | ErrorKind::Misuse
            | ErrorKind::State
            | ErrorKind::NonFinite
            | ErrorKind::Abandoned
            | ErrorKind::Unused
            | ErrorKind::NoWeight
            | ErrorKind::LearningRates => false,
            ErrorKind::Device
            | ErrorKind::Collective
            | ErrorKind::OrderMismatch
            | ErrorKind::RankLost
            | ErrorKind::Deadline
            | ErrorKind::Actor
            | ErrorKind::StartUp
            | ErrorKind::Closed => true,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = &self.0;
        let mut place = Vec::new();
        place.extend(parts.rank.map(|r| format!("rank {r}")));
        place.extend(parts.step.map(|s| format!("step {s}")));
        place.extend(parts.bucket.map(|b| format!("bucket {b}")));
        place.extend(parts.parameter.as_ref().map(|p| format!("parameter `{p}`")));
        if !place.is_empty() {
            write!(f, "{}: ", place.join(", "))?;
        }
        f.write_str(&parts.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.cause.as_ref().map(|c| &**c as &(dyn std::error::Error + 'static))
    }
}

impl From<Cause> for Error {
    fn from(cause: Cause) -> Self {
        let kind = match cause.kind {
            FailureKind::Collective => ErrorKind::Collective,
            FailureKind::OrderMismatch => ErrorKind::OrderMismatch,
            FailureKind::RankLost => ErrorKind::RankLost,
            FailureKind::Deadline => ErrorKind::Deadline,
            FailureKind::Actor => ErrorKind::Actor,
            FailureKind::StartUp => ErrorKind::StartUp,
            FailureKind::Closed => ErrorKind::Closed,
            FailureKind::Misuse => ErrorKind::Misuse,
            _ => ErrorKind::Device,
        };
        Self::new(kind, cause.message.clone()).with(|parts| {
            parts.rank = Some(cause.rank);
            parts.step = cause.step;
            parts.bucket = cause.bucket;
            parts.cause = Some(cause);
        })
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Self::new(ErrorKind::Config, error.to_string()).because(error)
    }
}

impl From<StateError> for Error {
    fn from(error: StateError) -> Self {
        Self::new(ErrorKind::State, error.to_string()).because(error)
    }
}

impl From<StateFileError> for Error {
    fn from(error: StateFileError) -> Self {
        Self::new(ErrorKind::State, error.to_string()).because(error)
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        Self::new(ErrorKind::Model, error.to_string()).because(error)
    }
}
