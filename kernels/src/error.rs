//! Errors of this crate, and [`Failure`]: the one cloneable description of what went wrong first.

use std::sync::Arc;

use crate::buffer::BufRange;
use crate::device::{AccessMode, StreamId};

/// What kind of thing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// Work on a device failed.
    Device,
    /// A collective failed.
    Collective,
    /// Ranks disagree about the order or the shape of collectives (rule O2).
    OrderMismatch,
    /// A rank left, died or fell silent.
    RankLost,
    /// A wait passed its deadline.
    Deadline,
    /// An actor panicked or received a message its state does not allow.
    Actor,
    /// Ranks disagree about model or configuration at start-up.
    StartUp,
    /// The engine was closed.
    Closed,
    /// Something was asked for that is not there. Nothing has failed.
    Misuse,
}

/// The first cause of a failure, as every waiter on every rank gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What kind of thing failed.
    pub kind: FailureKind,
    /// The rank on which it failed.
    pub rank: usize,
    /// The step (number of `step` calls before it), where there is one.
    pub step: Option<u64>,
    /// The bucket, where there is one.
    pub bucket: Option<u32>,
    /// What happened and what to do about it.
    pub message: String,
}

/// A shared first cause.
pub type Cause = Arc<Failure>;

impl Failure {
    /// A failure on `rank` with no step or bucket.
    pub fn new(kind: FailureKind, rank: usize, message: impl Into<String>) -> Self {
        Self { kind, rank, step: None, bucket: None, message: message.into() }
    }

    /// Names the step.
    #[must_use]
    pub fn at_step(mut self, step: u64) -> Self {
        self.step = Some(step);
        self
    }

    /// Names the bucket.
    #[must_use]
    pub fn in_bucket(mut self, bucket: u32) -> Self {
        self.bucket = Some(bucket);
        self
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        if let Some(bucket) = self.bucket {
            write!(f, ", bucket {bucket}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for Failure {}

/// A host slice was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Someone holds a conflicting lease, or work runs on the range.
    #[error("{range} is in use: a {wanted:?} lease was asked for while it is held for {held}")]
    Conflict {
        /// What was asked for.
        range: BufRange,
        /// How it was asked for.
        wanted: AccessMode,
        /// Who holds it: `reading` or `writing`.
        held: &'static str,
    },
    /// The range is not inside its buffer, or the buffer does not exist.
    #[error("{range} is outside its buffer")]
    OutOfBounds {
        /// What was asked for.
        range: BufRange,
    },
    /// Length or start do not fit the element type.
    #[error("{range} cannot be seen as elements of {element_bytes} bytes")]
    Misaligned {
        /// What was asked for.
        range: BufRange,
        /// Size of the element type.
        element_bytes: usize,
    },
}

/// A collective failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Ranks brought different collectives under one sequence number.
    #[error("collective {seq}: rank {rank} issued {mine} but rank {peer} issued {theirs}")]
    Mismatch {
        /// The sequence number.
        seq: u64,
        /// This rank.
        rank: usize,
        /// What this rank issued.
        mine: String,
        /// The other rank.
        peer: usize,
        /// What the other rank issued.
        theirs: String,
    },
    /// The transport was aborted; the cause says why.
    #[error("aborted: {0}")]
    Aborted(Cause),
    /// The ranges do not fit the operation.
    #[error("collective {seq}: {reason}")]
    Shape {
        /// The sequence number.
        seq: u64,
        /// What does not fit.
        reason: String,
    },
}

/// A device refused or failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The name in the configuration is not a device or transport of this build.
    #[error("unknown {what} {name:?}; this build has {known}")]
    Unknown {
        /// `device` or `transport`.
        what: &'static str,
        /// The name that was given.
        name: String,
        /// The names there are.
        known: &'static str,
    },
    /// The allocation failed.
    #[error("cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
    },
    /// Cells of an allocation must be ascending and end at its length.
    #[error("the cells of an allocation of {bytes} bytes are not ascending up to its length")]
    BadCells {
        /// The length of the allocation.
        bytes: usize,
    },
    /// No such stream on this device.
    #[error("no stream {0:?} on this device")]
    NoStream(StreamId),
    /// A collective was given to `enqueue`; only the communicator's handle may issue one.
    #[error("collectives are issued through the communicator only")]
    CollectiveOutsideComm,
    /// A range was in use or out of bounds.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// There is no such local world, or no such rank in it.
    #[error(transparent)]
    World(#[from] crate::local::WorldError),
    /// The work does not fit its ranges.
    #[error("{work}: {reason}")]
    BadWork {
        /// The work's name.
        work: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// A thread of the device could not be started.
    #[error("cannot start a stream thread: {reason}")]
    Thread {
        /// What the system said.
        reason: String,
    },
    /// A wait passed its limit.
    #[error("an event did not complete within {limit_ms} ms")]
    WaitLimit {
        /// The limit.
        limit_ms: u64,
    },
    /// The device was poisoned; the cause says why.
    #[error("{0}")]
    Poisoned(Cause),
}
