//! What the device's handle and its stream threads share: memory, transport, the first cause, and the open events.
//!
//! Per lane (one per stream thread) the completers of its open events wait in a FIFO beside the queue, so that
//! [`State::poison`] ends them at once, whatever the thread is stuck in. Threads own this, never the handle: dropping the
//! handle is what ends them.
//!
//! This file contains unsafe code: the call of the transport.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::execute::execute;
use super::inject::{BeforeWork, Inject};
use crate::clock::now_ns;
use crate::collective::{Collective, CollectiveKey, CollectiveOp, HostMemory, Transfer, Transport};
use crate::device::Span;
use crate::error::{Cause, CommError, DeviceError, Failure, FailureKind};
use crate::event::Completer;
use crate::lease::{Arena, Holds};
use crate::work::Work;

/// Streams that are threads: optimizer, reduce, gather.
pub(super) const LANES: usize = 3;

/// Spans kept for [`crate::Device::drain_spans`]; without a reader the older half is forgotten.
const MOST_SPANS: usize = 1 << 16;

#[derive(Debug)]
pub(super) struct State {
    pub(super) arena: Arena,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) lanes: [Lane; LANES],
    failed: OnceLock<Cause>,
    spans: Mutex<Vec<Span>>,
    before_work: Option<BeforeWork>,
}

/// One stream thread's side of the events.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// In the order of the queue.
    pub(super) open: Mutex<VecDeque<Completer>>,
    /// Items that were sent and are not yet over.
    pub(super) outstanding: AtomicUsize,
    /// 1 + the sequence number of the newest collective that has begun.
    pub(super) begun: AtomicU64,
}

impl Lane {
    /// Whether everything sent so far is over; what it wrote is then visible to the caller.
    pub(super) fn is_idle(&self) -> bool {
        self.outstanding.load(Ordering::Acquire) == 0
    }
}

impl State {
    pub(super) fn new(transport: Arc<dyn Transport>, before_work: Option<BeforeWork>) -> Self {
        Self {
            arena: Arena::default(),
            transport,
            lanes: Default::default(),
            failed: OnceLock::new(),
            spans: Mutex::default(),
            before_work,
        }
    }

    /// The first cause, once there is one.
    pub(super) fn failed(&self) -> Option<&Cause> {
        self.failed.get()
    }

    /// Refuses what comes after the first cause.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.failed().map_or(Ok(()), |cause| Err(DeviceError::Poisoned(cause.clone())))
    }

    /// Ends every open event with this cause, unless there was one before, and aborts the transport.
    pub(super) fn poison(&self, cause: &Cause) {
        if self.failed.set(cause.clone()).is_err() {
            return;
        }
        tracing::debug!(
            target: "gatherflow::cpu",
            rank = self.transport.rank(),
            step = cause.step,
            bucket = cause.bucket,
            %cause,
            "device poisoned"
        );
        for lane in &self.lanes {
            let open = std::mem::take(&mut *lane.open.lock());
            for completer in open {
                // A callback that panics must not keep the others from hearing.
                let _ = catch_unwind(AssertUnwindSafe(|| completer.fail(cause)));
            }
        }
        self.transport.abort(cause);
    }

    /// Runs work on this thread, which is that of the lane if one is given, and says when it was over. `reached_ns` is when
    /// its turn came. What goes wrong, a panic included, poisons the device.
    pub(super) fn run(&self, lane: Option<&Lane>, work: &Work, reached_ns: u64) -> Result<u64, DeviceError> {
        self.check()?;
        let result = catch_unwind(AssertUnwindSafe(|| self.try_run(lane, work, reached_ns))).unwrap_or_else(|panic| {
            Err(DeviceError::BadWork { work: work.name(), reason: format!("panic: {}", panic_text(&*panic)) })
        });
        if let Err(error) = &result {
            self.poison(&self.cause_of(work, error));
        }
        result
    }

    fn try_run(&self, lane: Option<&Lane>, work: &Work, mut reached_ns: u64) -> Result<u64, DeviceError> {
        match self.before_work.as_ref().map_or(Inject::Nothing, |hook| (hook.0)(work)) {
            Inject::Nothing => {}
            Inject::Delay(time) => {
                std::thread::sleep(time);
                reached_ns = now_ns();
            }
            Inject::Fail(reason) => return Err(DeviceError::BadWork { work: work.name(), reason }),
            Inject::Panic => panic!("injected"),
        }
        self.check()?;
        let mut holds = self.arena.hold_all(work)?;
        match work {
            Work::Collective(collective) => {
                if let Some(lane) = lane {
                    lane.begun.store(collective.key.seq + 1, Ordering::Release);
                }
                self.collective(collective, &holds, reached_ns)
            }
            work => {
                execute(work, &mut holds)?;
                Ok(now_ns())
            }
        }
    }

    fn collective(&self, collective: &Collective, holds: &Holds, reached_ns: u64) -> Result<u64, DeviceError> {
        let (send, recv) = match &collective.op {
            CollectiveOp::AllGather { send, recv } | CollectiveOp::ReduceScatter { send, recv, .. } => (*send, *recv),
            CollectiveOp::AllReduce { range } | CollectiveOp::Broadcast { range, .. } => (*range, *range),
        };
        let memory = HostMemory {
            send: holds.memory(send)?,
            send_bytes: send.bytes(),
            recv: holds.memory(recv)?,
            recv_bytes: recv.bytes(),
        };
        // SAFETY: `holds` keeps both ranges alive and everyone else away from them until it is dropped, after this.
        let transfer = unsafe { self.transport.run(collective, &memory, reached_ns) }?;
        let Transfer { begin_ns, end_ns } = transfer;
        let span = Span { key: collective.key, reached_ns, begin_ns, end_ns };
        let mut spans = self.spans.lock();
        if spans.len() == MOST_SPANS {
            spans.drain(..MOST_SPANS / 2);
        }
        spans.push(span);
        Ok(end_ns)
    }

    pub(super) fn drain_spans(&self, into: &mut Vec<Span>) {
        into.append(&mut self.spans.lock());
    }

    /// A failure on this rank.
    pub(super) fn failure(&self, kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure::new(kind, self.transport.rank(), message)
    }

    fn cause_of(&self, work: &Work, error: &DeviceError) -> Cause {
        let kind = match error {
            DeviceError::Poisoned(first) | DeviceError::Comm(CommError::Aborted(first)) => return first.clone(),
            DeviceError::Comm(CommError::Mismatch { .. }) => FailureKind::OrderMismatch,
            DeviceError::Comm(_) => FailureKind::Collective,
            _ => FailureKind::Device,
        };
        let failure = self.failure(kind, error.to_string());
        Arc::new(match work {
            Work::Collective(collective) => located(failure, &collective.key),
            Work::Verdict(verdict) => failure.at_step(verdict.step),
            _ => failure,
        })
    }
}

/// The failure with the step and bucket of a collective.
fn located(mut failure: Failure, key: &CollectiveKey) -> Failure {
    failure.message = format!("{key} failed: {}", failure.message);
    failure.bucket = key.of_bucket();
    failure.step = key.of_step();
    failure
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
