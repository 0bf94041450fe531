//! Collectives as data, the transport that runs them, and the only right to issue them.
//!
//! **Contract.** No rank's memory is touched before that rank has issued the collective; its event means that the output
//! is valid *and* that peers are done with this rank's buffers.

use std::sync::Arc;

use crate::buffer::BufRange;
use crate::device::{Device, StreamId};
use crate::dtype::DType;
use crate::error::{Cause, CommError, DeviceError};
use crate::members::Members;

/// What a collective is for, as ranks compare it (rule O2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// Start-up: rank 0's parameters, or hashes to compare.
    StartUp,
    /// Reduce-scatter of a bucket's gradients.
    Reduce,
    /// The small all-gather of norm partials and verdicts.
    Small,
    /// All-gather of a bucket's parameters.
    Gather,
    /// Sum of a bucket's reduced shard over ranks that hold the same shard.
    Sum,
    /// Sum of the reduced shard of a weight over the pipeline stages that have copies of it.
    StagedSum,
}

/// What ranks must agree on: the entry of the running digest (rule O2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CollectiveKey {
    /// Position in the order in which this rank issues collectives (rule O1), from 0.
    pub seq: u64,
    /// What it is for.
    pub kind: CollectiveKind,
    /// The bucket, or [`CollectiveKey::NO_BUCKET`]; of a sum over stages the number of the weight, which is in another bucket on
    /// each.
    pub bucket: u32,
    /// Bytes of the larger buffer.
    pub bytes: u64,
    /// Element type on the wire.
    pub dtype: DType,
    /// Gather: the version of the gathered parameters. Others: the number of steps before it.
    pub version: u64,
    /// The number of the way in which the ranks are divided: each runs it with its own part of that division. 0: not at all,
    /// all ranks together.
    pub group: u32,
}

impl CollectiveKey {
    /// Stands for "no bucket".
    pub const NO_BUCKET: u32 = u32::MAX;

    /// The bucket it is of, if it is of one.
    pub fn of_bucket(&self) -> Option<u32> {
        Some(self.bucket).filter(|bucket| *bucket != Self::NO_BUCKET && self.kind != CollectiveKind::StagedSum)
    }

    /// The step it is of, if it is of one. The gather of version `k` belongs to the step before it.
    pub fn of_step(&self) -> Option<u64> {
        match self.kind {
            CollectiveKind::Reduce | CollectiveKind::Small | CollectiveKind::Sum | CollectiveKind::StagedSum => {
                Some(self.version)
            }
            CollectiveKind::Gather => self.version.checked_sub(1),
            CollectiveKind::StartUp => None,
        }
    }
}

impl std::fmt::Display for CollectiveKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            CollectiveKind::StartUp => write!(f, "start-up exchange")?,
            CollectiveKind::Reduce => write!(f, "reduce of bucket {}", self.bucket)?,
            CollectiveKind::Small => write!(f, "small all-gather")?,
            CollectiveKind::Gather => write!(f, "gather of bucket {}", self.bucket)?,
            CollectiveKind::Sum => write!(f, "sum of bucket {}", self.bucket)?,
            CollectiveKind::StagedSum => write!(f, "sum over stages of shared weight {}", self.bucket)?,
        }
        if self.group > 0 {
            write!(f, " in group {}", self.group)?;
        }
        write!(f, " (version {}, {} bytes, {})", self.version, self.bytes, self.dtype)
    }
}

/// The operation and its memory on this rank. `d` is the number of members; `slot` is this rank's among them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CollectiveOp {
    /// `recv` (d equal slots) gets every member's `send` in their order. In place: `send` is this rank's slot of `recv`.
    AllGather {
        /// This rank's part.
        send: BufRange,
        /// All parts.
        recv: BufRange,
    },
    /// `recv` (f32) gets the sum over members, in their order and f32, of slot `slot` of every member's `send` (d equal
    /// slots of `dtype`). In place: `dtype` is f32 and `recv` is this rank's slot of `send`.
    ReduceScatter {
        /// All slots.
        send: BufRange,
        /// Element type of `send`.
        dtype: DType,
        /// This rank's sum, f32.
        recv: BufRange,
    },
    /// `range` (f32) gets the sum over members, in their order and f32, of every member's `range`.
    AllReduce {
        /// This rank's part of the sum, then the sum.
        range: BufRange,
    },
    /// `range` gets the bytes of the member in slot `root`.
    Broadcast {
        /// Source on the root, destination elsewhere.
        range: BufRange,
        /// The slot of whose bytes.
        root: usize,
    },
}

/// A collective: what ranks compare, who takes part, and what to do.
#[derive(Clone, Debug)]
pub struct Collective {
    /// What ranks compare.
    pub key: CollectiveKey,
    /// Who takes part; this rank does.
    pub members: Members,
    /// The operation and its memory.
    pub op: CollectiveOp,
    /// The next collective of its stream belongs to the same call, which pays the latency of one.
    pub more: bool,
}

impl Collective {
    /// A collective of all ranks.
    pub fn of_all(key: CollectiveKey, op: CollectiveOp) -> Self {
        Self::new(key, Members::ALL, op)
    }

    /// A collective that is a call of its own.
    pub fn new(key: CollectiveKey, members: Members, op: CollectiveOp) -> Self {
        Self { key, members, op, more: false }
    }
}

/// Proof of the right to issue collectives. Only [`Comm`] holds one.
#[derive(Debug)]
pub struct IssueRight(());

/// The host memory of one collective: `send` and `recv` may overlap (in place), hence raw.
#[derive(Debug)]
pub struct HostMemory {
    /// Start of what this rank offers (the whole range for a broadcast and an all-reduce).
    pub send: *const u8,
    /// Its length in bytes.
    pub send_bytes: usize,
    /// Start of what this rank receives.
    pub recv: *mut u8,
    /// Its length in bytes.
    pub recv_bytes: usize,
}

/// When a transfer ran, on the clock of [`crate::clock`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// All members had reached the collective.
    pub begin_ns: u64,
    /// It was over. Not in the future.
    pub end_ns: u64,
}

/// Runs collectives between ranks. A device is built over one.
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// This rank, `0..world()`.
    fn rank(&self) -> usize;
    /// The number of ranks.
    fn world(&self) -> usize;
    /// Whether *issuing* a collective may block the calling thread (a first connection, say). Where it cannot,
    /// collectives are issued inline, else by the issuing thread.
    fn may_block(&self) -> bool;
    /// Runs one collective to its end, on the calling (stream) thread: when it returns, the output is valid and peers
    /// are done with this rank's memory. `reached_ns` is when the stream had nothing left to do before it; the thread may
    /// have woken later, which a transport that emulates a link does not count.
    ///
    /// # Errors
    /// [`CommError`]; in every case peers no longer touch `memory` afterwards.
    ///
    /// # Safety
    /// `memory` must be valid for its lengths, and nobody else may touch it, until this returns.
    unsafe fn run(&self, collective: &Collective, memory: &HostMemory, reached_ns: u64) -> Result<Transfer, CommError>;
    /// Ends every collective that waits for a peer, now and later, with this cause.
    fn abort(&self, cause: &Cause);
}

/// The communicator's handle: the only right to issue collectives on a device. There is one per [`crate::open`].
#[derive(Debug)]
pub struct Comm {
    device: Arc<dyn Device>,
    right: IssueRight,
    may_block: bool,
    rank: usize,
    world: usize,
}

impl Comm {
    pub(crate) fn new(device: Arc<dyn Device>, may_block: bool, rank: usize, world: usize) -> Self {
        Self { device, right: IssueRight(()), may_block, rank, world }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Whether [`Comm::issue`] may block.
    pub fn may_block(&self) -> bool {
        self.may_block
    }

    /// Appends a collective to a stream. A call of several ([`Collective::more`]) is over when its last one is.
    ///
    /// # Errors
    /// As [`Device::enqueue`].
    pub fn issue(&mut self, on: StreamId, collective: Collective) -> Result<(), DeviceError> {
        self.device.enqueue_collective(on, collective, &self.right)
    }
}
