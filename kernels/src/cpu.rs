//! The CPU device: streams are threads.
//!
//! The executor's stream is whoever calls: work enqueued on it runs inline, waiting on it parks the caller, an event
//! recorded on it is already done. Optimizer, reduce and gather each have one thread (`stream`), started when first
//! asked for, that takes its queue in order. Work holds the cells of memory it touches ([`crate::lease`]), so what it
//! does can never alias a lease; `execute` says what each kind of work does.
//!
//! The first failure (work that fails or panics, a wait on a failed event, [`Device::poison`]) fails the device: every
//! open event ends with its cause at once, also behind an item that is stuck, the transport is aborted, and nothing runs
//! any more (F1).
//!
//! Dropping the device lets the streams finish for a short while; then it ends what is still open as closed, and leaves
//! behind a thread that is stuck in foreign code, together with the memory it may touch.
//!
//! Cost per call: enqueue and wait are one channel send, record a lock, a send and the event's allocation, or nothing
//! where the stream is idle.

mod execute;
mod inject;
mod state;
mod stream;

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::buffer::{BufRange, Buffer};
use crate::clock::now_ns;
use crate::collective::{Collective, IssueRight, Transport};
use crate::device::{Access, AccessMode, Device, Mark, Span, StreamId, StreamKind};
use crate::error::{Cause, DeviceError, FailureKind, LeaseError};
use crate::event::{Event, Notify};
use crate::lease::Lease;
use crate::work::Work;
pub use inject::{BeforeWork, Inject};
use state::{LANES, State};
use stream::{Item, Stream};

/// How long a drop waits for the streams to finish, and then again for them to give up.
const GRACE: Duration = Duration::from_millis(500);

const EXECUTOR: StreamId = StreamId(0);

/// A device whose streams are threads of this process.
#[derive(Debug)]
pub struct CpuDevice {
    state: Arc<State>,
    streams: [OnceLock<Stream>; LANES],
    starting: Mutex<()>,
    wait_limit: Duration,
}

impl CpuDevice {
    /// A device over a transport. A host thread parks at most `wait_limit` on one event. Threads start with the first
    /// [`Device::stream`] that needs them.
    pub fn open(
        transport: Arc<dyn Transport>,
        wait_limit: Duration,
        before_work: Option<BeforeWork>,
    ) -> Arc<dyn Device> {
        Arc::new(Self {
            state: Arc::new(State::new(transport, before_work)),
            streams: Default::default(),
            starting: Mutex::default(),
            wait_limit,
        })
    }

    /// The lane's index and thread.
    fn lane(&self, on: StreamId) -> Result<(usize, &Stream), DeviceError> {
        let lane = (on.0 as usize).wrapping_sub(1);
        let stream = self.streams.get(lane).and_then(OnceLock::get);
        Ok((lane, stream.ok_or(DeviceError::NoStream(on))?))
    }

    fn send(&self, on: StreamId, item: Item) -> Result<(), DeviceError> {
        self.state.check()?;
        let (lane, stream) = self.lane(on)?;
        self.state.lanes[lane].outstanding.fetch_add(1, Ordering::Relaxed);
        stream.send(item);
        Ok(())
    }

    fn submit(&self, on: StreamId, work: Work) -> Result<(), DeviceError> {
        if on == EXECUTOR {
            return self.state.run(None, &work, now_ns()).map(drop);
        }
        self.send(on, Item::Work(work, now_ns()))
    }

    fn try_record(&self, on: StreamId) -> Result<Event, DeviceError> {
        if on == EXECUTOR {
            self.state.check()?;
            return Ok(Event::done(0));
        }
        let (index, stream) = self.lane(on)?;
        let lane = &self.state.lanes[index];
        if lane.is_idle() {
            self.state.check()?;
            return Ok(Event::done(0));
        }
        // Under the lock: the order of open events is that of the queue, and poison, which sets the cause before it
        // takes the lock, misses none.
        let mut open = lane.open.lock();
        self.state.check()?;
        let (event, completer) = Event::pending(0);
        open.push_back(completer);
        lane.outstanding.fetch_add(1, Ordering::Relaxed);
        stream.send(Item::Complete);
        Ok(event)
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn alloc(&self, bytes: usize, cells: &[usize]) -> Result<Buffer, DeviceError> {
        self.state.arena.alloc(bytes, cells)
    }

    fn allocated_bytes(&self) -> usize {
        self.state.arena.allocated_bytes()
    }

    fn stream(&self, kind: StreamKind) -> Result<StreamId, DeviceError> {
        let (lane, name) = match kind {
            StreamKind::Executor => return Ok(EXECUTOR),
            StreamKind::Optimizer => (0, "optimizer"),
            StreamKind::Reduce => (1, "reduce"),
            StreamKind::Gather => (2, "gather"),
        };
        let _starting = self.starting.lock();
        if self.streams[lane].get().is_none() {
            let name = format!("gf-{name}-{}", self.state.transport.rank());
            let stream = Stream::start(&self.state, lane, name)?;
            // Nobody else sets it: the lock is held.
            let _ = self.streams[lane].set(stream);
        }
        Ok(StreamId(lane as u32 + 1))
    }

    fn enqueue(&self, on: StreamId, work: Work) -> Result<(), DeviceError> {
        if matches!(work, Work::Collective(_)) {
            return Err(DeviceError::CollectiveOutsideComm);
        }
        self.submit(on, work)
    }

    fn enqueue_collective(&self, on: StreamId, collective: Collective, _: &IssueRight) -> Result<(), DeviceError> {
        self.submit(on, Work::Collective(collective))
    }

    fn record(&self, on: StreamId) -> Event {
        self.try_record(on).unwrap_or_else(|error| {
            let cause = match error {
                DeviceError::Poisoned(cause) => cause,
                error => Arc::new(self.state.failure(FailureKind::Device, error.to_string())),
            };
            let (event, completer) = Event::pending(0);
            completer.fail(&cause);
            event
        })
    }

    fn wait(&self, on: StreamId, event: &Event) -> Result<(), DeviceError> {
        if on != EXECUTOR {
            return if event.is_done() { self.lane(on).map(|_| ()) } else { self.send(on, Item::Wait(event.clone())) };
        }
        match event.wait_for(self.wait_limit) {
            Some(result) => result.map_err(DeviceError::Poisoned),
            None => Err(DeviceError::WaitLimit { limit_ms: self.wait_limit.as_millis() as u64 }),
        }
    }

    fn when(&self, event: &Event, notify: Notify) {
        event.when(notify);
    }

    fn access(&self, _: StreamId, _: Access) {}

    fn mark(&self, _: StreamId, _: Mark) {}

    fn lease(&self, range: BufRange, mode: AccessMode) -> Result<Lease, LeaseError> {
        self.state.arena.lease(range, mode)
    }

    fn poison(&self, cause: Cause) {
        self.state.poison(&cause);
    }

    fn failed(&self) -> Option<Cause> {
        self.state.failed().cloned()
    }

    fn begun(&self, on: StreamId) -> u64 {
        self.lane(on).map_or(u64::MAX, |(lane, _)| self.state.lanes[lane].begun.load(Ordering::Acquire))
    }

    fn drain_spans(&self, into: &mut Vec<Span>) {
        self.state.drain_spans(into);
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        let closing: Vec<_> = self.streams.iter_mut().filter_map(OnceLock::take).map(Stream::close).collect();
        let deadline = Instant::now() + GRACE;
        let late: Vec<_> = closing.into_iter().filter_map(|stream| stream.join_until(deadline).err()).collect();
        if late.is_empty() {
            return;
        }
        let message = "the device was closed while work was under way";
        self.state.poison(&Arc::new(self.state.failure(FailureKind::Closed, message)));
        let deadline = Instant::now() + GRACE;
        let stuck = late.into_iter().filter_map(|stream| stream.join_until(deadline).err()).count();
        if stuck > 0 {
            let rank = self.state.transport.rank();
            tracing::warn!(target: "gatherflow::cpu", rank, stuck, "stream threads are stuck and left behind");
        }
    }
}

#[cfg(test)]
mod tests;
