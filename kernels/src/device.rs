//! The seam: what a device must be able to do, object-safe.
//!
//! A device interprets [`Work`] on streams. A stream is a FIFO: work enqueued on it runs in order; work on different
//! streams is ordered only by events. [`Device::record`] is the only way to make an event, so every wait points to
//! earlier work and the graph of waits has no cycle.
//!
//! The executor (the user's model code) is a stream too. On the CPU it is the calling thread: waiting on it parks that
//! thread, and an event recorded on it is already done.

use std::sync::Arc;

use crate::buffer::{BufRange, Buffer};
use crate::collective::{Collective, CollectiveKey, IssueRight};
use crate::error::{Cause, DeviceError, LeaseError};
use crate::event::{Event, Notify};
use crate::lease::Lease;
use crate::null::NullLog;
use crate::work::Work;

/// Names a stream of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u32);

/// What a stream is for. Devices keep a pool for each kind and may hand out the same stream twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StreamKind {
    /// The user's model code.
    Executor,
    /// Gradient norms, the verdict and Adam.
    Optimizer,
    /// Gradient reductions, and what belongs to them.
    Reduce,
    /// Parameter gathers.
    Gather,
}

/// How a range is touched. Writing covers read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessMode {
    /// Only read.
    Read,
    /// Written, or read and written.
    Write,
}

/// One access to memory, by work or by the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// What is touched.
    pub range: BufRange,
    /// How.
    pub mode: AccessMode,
}

/// A point in the executor's stream that checkers and profilers want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mark {
    /// The executor demands the first `demanded` gathers (a prefix of the gather order) of parameter `version`.
    Demanded {
        /// The version the executor reads.
        version: u64,
        /// How many gathers of the order it demands.
        demanded: u32,
    },
    /// Chain mode: the executor's wait on the gather at `position` of `version` ended.
    WaitEnded {
        /// The version the executor reads.
        version: u64,
        /// Position in the gather order.
        position: u32,
    },
}

/// When a collective ran on this rank, in nanoseconds of [`crate::clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which collective.
    pub key: CollectiveKey,
    /// When the rank's stream reached it.
    pub reached_ns: u64,
    /// When the transfer began: all ranks had reached it.
    pub begin_ns: u64,
    /// When it was over on this rank.
    pub end_ns: u64,
}

/// A device: it owns memory and streams and interprets [`Work`].
///
/// All methods may be called from any thread. None blocks, except [`Device::wait`] on the executor's stream of a device
/// whose executor is a host thread.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// The name by which configuration asks for this device.
    fn name(&self) -> &'static str;

    /// Allocates `bytes` zeroed bytes. `cells` are the ascending end offsets (bytes; the last is `bytes`) of the ranges
    /// that are leased and checked as one: a lease or work that touches part of a cell holds the whole cell. Empty
    /// means one cell.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::BadCells`].
    fn alloc(&self, bytes: usize, cells: &[usize]) -> Result<Buffer, DeviceError>;

    /// Bytes allocated by [`Device::alloc`] so far.
    fn allocated_bytes(&self) -> usize;

    /// A stream of this kind, from the pool.
    ///
    /// # Errors
    /// [`DeviceError::Thread`] where a stream is a thread that cannot be started.
    fn stream(&self, kind: StreamKind) -> Result<StreamId, DeviceError>;

    /// Appends work to a stream. Work on the executor's stream of a host device runs at once, on the calling thread.
    ///
    /// # Errors
    /// [`DeviceError::CollectiveOutsideComm`] for collectives; [`DeviceError::Poisoned`] after a failure. What goes
    /// wrong while the work runs ends the events behind it as failed.
    fn enqueue(&self, on: StreamId, work: Work) -> Result<(), DeviceError>;

    /// Appends a collective to a stream. Only [`crate::Comm`] can call it: nobody else has the right.
    ///
    /// # Errors
    /// As [`Device::enqueue`].
    fn enqueue_collective(&self, on: StreamId, collective: Collective, right: &IssueRight) -> Result<(), DeviceError>;

    /// An event that is done once everything enqueued on the stream so far is done.
    fn record(&self, on: StreamId) -> Event;

    /// Lets what is enqueued on the stream from now on start only after the event. On the executor's stream of a host
    /// device this parks the calling thread.
    ///
    /// # Errors
    /// On a parked thread: the first cause if the event failed, [`DeviceError::WaitLimit`] after the limit given at
    /// [`crate::open`]. Elsewhere a failed event fails the work behind it instead.
    fn wait(&self, on: StreamId, event: &Event) -> Result<(), DeviceError>;

    /// Calls `notify` when the event is done or failed: at once if it already is, else on a runtime thread of the device.
    fn when(&self, event: &Event, notify: Notify);

    /// The executor tells what it itself reads or writes at this point of its stream (for checkers; free elsewhere).
    fn access(&self, on: StreamId, access: Access);

    /// Marks a point of the executor's stream (for checkers and profilers; free elsewhere).
    fn mark(&self, on: StreamId, mark: Mark);

    /// A checked host slice: the only way to one.
    ///
    /// # Errors
    /// [`LeaseError::Conflict`] while the range is held or worked on.
    fn lease(&self, range: BufRange, mode: AccessMode) -> Result<Lease, LeaseError>;

    /// Ends every open event, and every later one, as failed with this cause, and aborts the transport. The first call
    /// wins.
    fn poison(&self, cause: Cause);

    /// The first cause, once the device has failed or was poisoned.
    fn failed(&self) -> Option<Cause>;

    /// 1 + the sequence number of the newest collective that has begun on this stream (it may still wait for peers);
    /// 0 before the first. A device that cannot tell says `u64::MAX`.
    fn begun(&self, _on: StreamId) -> u64 {
        u64::MAX
    }

    /// Moves the spans of the collectives that ended since the last call into `into`.
    fn drain_spans(&self, into: &mut Vec<Span>);

    /// The log, where the device is one that logs.
    fn log(&self) -> Option<Arc<NullLog>> {
        None
    }
}
