//! One stream: a thread that takes work, waits and events off a queue, in order.
//!
//! After a failure it still empties its queue, but runs nothing: events behind the failure end with the first cause. A
//! panic never unwinds out of it. It ends when the device's handle is dropped and the queue is empty.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use super::state::{State, panic_text};
use crate::error::{DeviceError, FailureKind};
use crate::event::Event;
use crate::work::Work;

/// How often a stream that waits for an event of *another* device looks whether its own was poisoned.
const LOOK: Duration = Duration::from_millis(50);

/// Something on the queue.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most items are work, and a box would cost each an allocation")]
pub(super) enum Item {
    /// To run, and when it was sent.
    Work(Work, u64),
    /// To wait for.
    Wait(Event),
    /// The oldest open event of the lane is due.
    Complete,
}

/// The handle of a stream thread.
#[derive(Debug)]
pub(super) struct Stream {
    items: Sender<Item>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

/// A stream that takes nothing more.
#[derive(Debug)]
pub(super) struct Closing {
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Stream {
    /// Starts the thread of a lane.
    ///
    /// # Errors
    /// [`DeviceError::Thread`].
    pub(super) fn start(state: &Arc<State>, lane: usize, name: String) -> Result<Self, DeviceError> {
        let (items, queue) = unbounded();
        let (alive, ended) = bounded(0);
        let state = state.clone();
        let body = move || {
            serve(&state, lane, &queue);
            drop(state);
            drop(alive);
        };
        let thread = std::thread::Builder::new().name(name).spawn(body);
        let thread = thread.map_err(|error| DeviceError::Thread { reason: error.to_string() })?;
        Ok(Self { items, ended, thread })
    }

    /// Appends to the queue. The caller has counted the item as outstanding.
    pub(super) fn send(&self, item: Item) {
        // The thread never drops its end before this handle is gone.
        let _ = self.items.send(item);
    }

    /// Closes the queue.
    pub(super) fn close(self) -> Closing {
        Closing { ended: self.ended, thread: self.thread }
    }
}

impl Closing {
    /// Joins the thread if it ends in time, and says whether it did. A thread does not join itself.
    pub(super) fn join_until(self, deadline: Instant) -> Result<(), Self> {
        let own = self.thread.thread().id() == std::thread::current().id();
        if own || matches!(self.ended.recv_deadline(deadline), Err(RecvTimeoutError::Timeout)) {
            return if own { Ok(()) } else { Err(self) };
        }
        let _ = self.thread.join();
        Ok(())
    }
}

fn serve(state: &State, lane: usize, queue: &Receiver<Item>) {
    // When everything taken so far was over. A stream goes on by itself, so the thread's own late waking is not in it.
    let mut over_ns = 0;
    for item in queue {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| take(state, lane, item, &mut over_ns))) {
            let text = format!("panic in the callback of an event: {}", panic_text(&*panic));
            state.poison(&Arc::new(state.failure(FailureKind::Device, text)));
        }
        state.lanes[lane].outstanding.fetch_sub(1, Ordering::Release);
    }
}

fn take(state: &State, lane: usize, item: Item, over_ns: &mut u64) {
    match item {
        // An error has poisoned the device already.
        Item::Work(work, sent_ns) => {
            let reached_ns = sent_ns.max(*over_ns);
            *over_ns = state.run(Some(&state.lanes[lane]), &work, reached_ns).unwrap_or(reached_ns);
        }
        Item::Wait(event) => {
            while state.failed().is_none() {
                match event.wait_for(LOOK) {
                    None => {}
                    Some(Ok(())) => {
                        *over_ns = event.over_ns().max(*over_ns);
                        return;
                    }
                    Some(Err(cause)) => state.poison(&cause),
                }
            }
        }
        Item::Complete => {
            let completer = state.lanes[lane].open.lock().pop_front();
            match (completer, state.failed()) {
                (Some(completer), None) => completer.complete_at(*over_ns),
                (Some(completer), Some(cause)) => completer.fail(cause),
                (None, _) => {}
            }
        }
    }
}
