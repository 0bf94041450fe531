//! The null device: all work completes at once and touches no memory; what was asked for is logged.
//!
//! It owns real host memory (initialisation and read guards lease it as on the cpu device), four streams, one per
//! [`StreamKind`], and the [`NullLog`] that [`crate::check`] reads: every allocation, stream hand-out, piece of work,
//! record, wait, access and mark, in one order per rank. The log's order on one stream is the stream's order, and a record
//! precedes every wait on its event. Collectives do not wait for peers. The verdict of each step comes from a [`Script`] and
//! from nothing else: what hosts say of a step (in a [`HostVerdict`](crate::verdict::HostVerdict): a gradient abandoned or
//! missing, weights, learning rates that differ, a request to stop) is logged with the work and not heard.
//!
//! It fails only when poisoned: events recorded later are failed, enqueueing and waiting return the first cause. It checks
//! no bounds; the checker does. A call costs 2 to 10 ns without the log (40 ns where a large [`Work`] moves) and 50 to 80 ns
//! with it, plus the first touch of the log's memory (200 bytes an entry).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::buffer::{BufRange, Buffer};
use crate::collective::{Collective, IssueRight};
use crate::device::{Access, AccessMode, Device, Mark, Span, StreamId, StreamKind};
use crate::error::{Cause, DeviceError, LeaseError};
use crate::event::{Completer, Event, EventStatus, Notify};
use crate::lease::{Arena, Lease};
use crate::verdict::StepReport;
use crate::work::Work;

/// The verdict of each step, by its number.
#[derive(Clone)]
pub struct Script(pub Arc<dyn Fn(u64) -> StepReport + Send + Sync>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script(..)")
    }
}

/// The verdict of a step that no script decides: updated, gradient norm 0, no zeros, loss scale 1.
pub fn updated_report() -> StepReport {
    StepReport {
        updated: true,
        grad_norm: Some(0.0),
        zeros: Some(0),
        loss_scale: 1.0,
        next_loss_scale: 1.0,
        nonfinite: None,
        spoiled: None,
        nonfinite_is_error: false,
        no_weight: false,
        unlike: None,
        stop: false,
    }
}

/// Holds verdicts back, for tests: the event behind a step's verdict is pending until the step is let through. All other work
/// completes at once all the same.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    through: u64,
    verdicts: Vec<(u64, Completer)>,
}

impl Gate {
    /// Lets the verdicts of the first `steps` steps be known.
    pub fn let_through(&self, steps: u64) {
        let ended: Vec<Completer> = {
            let mut held = self.0.lock();
            held.through = held.through.max(steps);
            held.verdicts.extract_if(.., |(step, _)| *step < steps).map(|(_, completer)| completer).collect()
        };
        // Whoever is notified may look at the gate.
        ended.iter().for_each(Completer::complete);
    }

    fn hold(&self, step: u64, event: u64) -> Event {
        let mut held = self.0.lock();
        if step < held.through {
            return Event::done(event);
        }
        let (event, completer) = Event::pending(event);
        held.verdicts.push((step, completer));
        event
    }

    fn fail(&self, cause: &Cause) {
        let held = std::mem::take(&mut self.0.lock().verdicts);
        for (_, completer) in held {
            completer.fail(cause);
        }
    }
}

/// One line of the log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LogEntry {
    /// Memory was allocated.
    Alloc {
        /// What.
        buffer: Buffer,
    },
    /// A stream was handed out.
    Stream {
        /// Its id.
        id: StreamId,
        /// What it is for.
        kind: StreamKind,
    },
    /// Work was enqueued.
    Enqueue {
        /// On which stream.
        on: StreamId,
        /// What.
        work: Work,
    },
    /// An event was recorded.
    Record {
        /// On which stream.
        on: StreamId,
        /// Its id.
        event: u64,
    },
    /// A stream waits for an event.
    Wait {
        /// Which stream.
        on: StreamId,
        /// For which event.
        event: u64,
    },
    /// The executor touches memory.
    Access {
        /// On which stream.
        on: StreamId,
        /// What and how.
        access: Access,
    },
    /// A mark in the executor's stream.
    Mark {
        /// On which stream.
        on: StreamId,
        /// What.
        mark: Mark,
    },
}

/// The log of one rank.
#[derive(Debug, Default)]
pub struct NullLog {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// In the order of the calls.
    pub entries: Mutex<Vec<LogEntry>>,
}

/// The null device.
#[derive(Debug)]
pub struct NullDevice {
    memory: Arena,
    script: Option<Script>,
    log: Option<Arc<NullLog>>,
    last_event: AtomicU64,
    poison: OnceLock<Cause>,
    gate: Option<Gate>,
    /// Behind the gate: the verdict enqueued last, until its event is recorded.
    judged: Mutex<Option<(StreamId, u64)>>,
}

/// The streams, by id.
const STREAMS: [StreamKind; 4] = [StreamKind::Executor, StreamKind::Optimizer, StreamKind::Reduce, StreamKind::Gather];

impl NullDevice {
    /// Opens it. `script` gives each step's verdict (default: [`updated_report`]). Without `keep_log` only the cost of
    /// the calls remains, and all events are called 0.
    pub fn open(rank: usize, world: usize, script: Option<Script>, keep_log: bool) -> Arc<dyn Device> {
        Self::open_gated(rank, world, script, keep_log, None)
    }

    /// The same, with verdicts that a gate holds back.
    pub fn open_gated(
        rank: usize,
        world: usize,
        script: Option<Script>,
        keep_log: bool,
        gate: Option<Gate>,
    ) -> Arc<dyn Device> {
        Arc::new(Self {
            memory: Arena::default(),
            script,
            log: keep_log.then(|| Arc::new(NullLog { rank, world, entries: Mutex::default() })),
            last_event: AtomicU64::new(0),
            poison: OnceLock::new(),
            gate,
            judged: Mutex::default(),
        })
    }

    fn note(&self, entry: impl FnOnce() -> LogEntry) {
        if let Some(log) = &self.log {
            log.entries.lock().push(entry());
        }
    }

    fn sound(&self) -> Result<(), DeviceError> {
        match self.poison.get() {
            None => Ok(()),
            Some(cause) => Err(DeviceError::Poisoned(cause.clone())),
        }
    }

    /// Poison, then whether the stream exists.
    fn accepts(&self, on: StreamId) -> Result<(), DeviceError> {
        self.sound()?;
        if (on.0 as usize) < STREAMS.len() { Ok(()) } else { Err(DeviceError::NoStream(on)) }
    }
}

impl Device for NullDevice {
    fn name(&self) -> &'static str {
        "null"
    }

    fn alloc(&self, bytes: usize, cells: &[usize]) -> Result<Buffer, DeviceError> {
        let buffer = self.memory.alloc(bytes, cells)?;
        self.note(|| LogEntry::Alloc { buffer });
        Ok(buffer)
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.allocated_bytes()
    }

    fn stream(&self, kind: StreamKind) -> Result<StreamId, DeviceError> {
        let id = StreamId(STREAMS.iter().position(|k| *k == kind).unwrap_or_default() as u32);
        self.note(|| LogEntry::Stream { id, kind });
        Ok(id)
    }

    fn enqueue(&self, on: StreamId, work: Work) -> Result<(), DeviceError> {
        self.accepts(on)?;
        match &work {
            Work::Collective(_) => return Err(DeviceError::CollectiveOutsideComm),
            Work::Verdict(verdict) => {
                let report = self.script.as_ref().map_or_else(updated_report, |script| script.0(verdict.step));
                verdict.report.put(verdict.step, report);
                if self.gate.is_some() {
                    *self.judged.lock() = Some((on, verdict.step));
                }
            }
            _ => {}
        }
        self.note(|| LogEntry::Enqueue { on, work });
        Ok(())
    }

    fn enqueue_collective(&self, on: StreamId, collective: Collective, _: &IssueRight) -> Result<(), DeviceError> {
        self.accepts(on)?;
        self.note(|| LogEntry::Enqueue { on, work: Work::Collective(collective) });
        Ok(())
    }

    fn record(&self, on: StreamId) -> Event {
        let id = match &self.log {
            None => 0,
            Some(log) => {
                let event = self.last_event.fetch_add(1, Ordering::Relaxed) + 1;
                log.entries.lock().push(LogEntry::Record { on, event });
                event
            }
        };
        match (self.poison.get(), &self.gate) {
            (None, None) => Event::done(id),
            (None, Some(gate)) => match self.judged.lock().take_if(|(stream, _)| *stream == on) {
                Some((_, step)) => gate.hold(step, id),
                None => Event::done(id),
            },
            (Some(cause), _) => {
                let (event, completer) = Event::pending(id);
                completer.fail(cause);
                event
            }
        }
    }

    fn wait(&self, on: StreamId, event: &Event) -> Result<(), DeviceError> {
        self.accepts(on)?;
        self.note(|| LogEntry::Wait { on, event: event.id() });
        match event.status() {
            EventStatus::Failed(cause) => Err(DeviceError::Poisoned(cause)),
            EventStatus::Done | EventStatus::Pending => Ok(()),
        }
    }

    fn when(&self, event: &Event, notify: Notify) {
        event.when(notify);
    }

    fn access(&self, on: StreamId, access: Access) {
        self.note(|| LogEntry::Access { on, access });
    }

    fn mark(&self, on: StreamId, mark: Mark) {
        self.note(|| LogEntry::Mark { on, mark });
    }

    fn lease(&self, range: BufRange, mode: AccessMode) -> Result<Lease, LeaseError> {
        self.memory.lease(range, mode)
    }

    fn poison(&self, cause: Cause) {
        // The first cause wins: a second call changes nothing, by intent.
        let _ = self.poison.set(cause);
        if let (Some(gate), Some(first)) = (&self.gate, self.poison.get()) {
            gate.fail(first);
        }
    }

    fn failed(&self) -> Option<Cause> {
        self.poison.get().cloned()
    }

    fn drain_spans(&self, _: &mut Vec<Span>) {}

    fn log(&self) -> Option<Arc<NullLog>> {
        self.log.clone()
    }
}

#[cfg(test)]
mod tests;
