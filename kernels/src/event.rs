//! Events: points in a stream. Pending, done, or failed with the first cause.
//!
//! An event ends once. Whoever waits spins a bounded while, then parks. [`Event::when`] calls back on the thread that ends
//! the event. An event that is already done carries no allocation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock;
use crate::error::Cause;

/// How an event stands.
#[derive(Clone, Debug)]
pub enum EventStatus {
    /// The work before it is not over.
    Pending,
    /// The work before it is done.
    Done,
    /// The work before it failed, or the device was poisoned.
    Failed(Cause),
}

/// Called once when an event ends.
pub type Notify = Box<dyn FnOnce(Result<(), Cause>) + Send>;

/// A point in a stream. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Event {
    id: u64,
    signal: Option<Arc<Signal>>,
}

/// The end of an event that only its device may call.
#[derive(Debug)]
pub struct Completer(Arc<Signal>);

#[derive(Debug)]
struct Signal {
    state: AtomicU8,
    over_ns: AtomicU64,
    ended: Mutex<Ended>,
    changed: Condvar,
}

#[derive(Default)]
struct Ended {
    cause: Option<Cause>,
    parked: usize,
    notify: Vec<Notify>,
}

impl std::fmt::Debug for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ended").field("cause", &self.cause).field("notify", &self.notify.len()).finish_non_exhaustive()
    }
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// Polls before parking. On a machine with few cores a longer spin takes time from the thread it waits for.
const SPINS: u32 = 64;

impl Event {
    /// An event that is done. `id` is what logs call it.
    pub fn done(id: u64) -> Self {
        Self { id, signal: None }
    }

    /// A pending event and the handle that ends it.
    pub fn pending(id: u64) -> (Self, Completer) {
        let signal = Arc::new(Signal {
            state: AtomicU8::new(PENDING),
            over_ns: AtomicU64::new(0),
            ended: Mutex::new(Ended::default()),
            changed: Condvar::new(),
        });
        (Self { id, signal: Some(signal.clone()) }, Completer(signal))
    }

    /// The number that logs call it by; unique per device where the device logs, else 0.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether the work before it is done (not failed). One atomic load at most.
    pub fn is_done(&self) -> bool {
        self.signal.as_ref().is_none_or(|s| s.state.load(Ordering::Acquire) == DONE)
    }

    /// When the work before a done event was over, on the clock of [`crate::clock`]; 0 where nobody said. A thread may have
    /// woken later to end the event.
    pub fn over_ns(&self) -> u64 {
        self.signal.as_ref().map_or(0, |s| s.over_ns.load(Ordering::Acquire))
    }

    /// How it stands.
    pub fn status(&self) -> EventStatus {
        match &self.signal {
            None => EventStatus::Done,
            Some(s) => match s.state.load(Ordering::Acquire) {
                PENDING => EventStatus::Pending,
                DONE => EventStatus::Done,
                _ => EventStatus::Failed(s.cause()),
            },
        }
    }

    /// Waits at most `limit`: spins a bounded while, then parks. `None` if the limit passed first.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<(), Cause>> {
        let Some(signal) = &self.signal else { return Some(Ok(())) };
        for _ in 0..SPINS {
            match signal.state.load(Ordering::Acquire) {
                PENDING => std::hint::spin_loop(),
                _ => break,
            }
        }
        let deadline = clock::deadline(limit);
        let mut ended = signal.ended.lock();
        loop {
            match signal.state.load(Ordering::Acquire) {
                PENDING => {
                    ended.parked += 1;
                    let timed_out = signal.changed.wait_until(&mut ended, deadline).timed_out();
                    ended.parked -= 1;
                    if timed_out && signal.state.load(Ordering::Acquire) == PENDING {
                        return None;
                    }
                }
                DONE => return Some(Ok(())),
                _ => return Some(Err(ended.cause.clone().unwrap_or_else(no_cause))),
            }
        }
    }

    /// Calls `notify` when the event ends: at once on this thread if it already has, else on the thread that ends it.
    pub fn when(&self, notify: Notify) {
        let Some(signal) = &self.signal else { return notify(Ok(())) };
        let mut ended = signal.ended.lock();
        match signal.state.load(Ordering::Acquire) {
            PENDING => ended.notify.push(notify),
            DONE => {
                drop(ended);
                notify(Ok(()));
            }
            _ => {
                let cause = ended.cause.clone().unwrap_or_else(no_cause);
                drop(ended);
                notify(Err(cause));
            }
        }
    }
}

impl Completer {
    /// Ends the event as done. Later ends of the same event change nothing.
    pub fn complete(&self) {
        self.0.end(&Ok(()));
    }

    /// As [`Completer::complete`], and says when the work was over.
    pub fn complete_at(&self, over_ns: u64) {
        self.0.over_ns.store(over_ns, Ordering::Release);
        self.complete();
    }

    /// Ends the event as failed. Later ends of the same event change nothing.
    pub fn fail(&self, cause: &Cause) {
        self.0.end(&Err(cause.clone()));
    }
}

impl Signal {
    fn end(&self, result: &Result<(), Cause>) {
        let notify = {
            let mut ended = self.ended.lock();
            if self.state.load(Ordering::Relaxed) != PENDING {
                return;
            }
            if let Err(cause) = result {
                ended.cause = Some(cause.clone());
            }
            self.state.store(if result.is_ok() { DONE } else { FAILED }, Ordering::Release);
            if ended.parked > 0 {
                self.changed.notify_all();
            }
            std::mem::take(&mut ended.notify)
        };
        for notify in notify {
            notify(result.clone());
        }
    }

    fn cause(&self) -> Cause {
        self.ended.lock().cause.clone().unwrap_or_else(no_cause)
    }
}

/// A failed event always has a cause; this stands in where that is not visible to the types.
fn no_cause() -> Cause {
    Arc::new(crate::error::Failure::new(crate::error::FailureKind::Device, 0, "an event failed without a cause"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Failure, FailureKind};

    #[test]
    fn a_waiter_on_another_thread_wakes_when_the_event_completes() {
        let (event, completer) = Event::pending(1);
        assert!(!event.is_done());
        let waiter = {
            let event = event.clone();
            std::thread::spawn(move || event.wait_for(Duration::from_secs(20)))
        };
        std::thread::sleep(Duration::from_millis(5));
        completer.complete();
        assert!(matches!(waiter.join().expect("waiter"), Some(Ok(()))));
        assert!(event.is_done());
    }

    #[test]
    fn the_first_end_wins_and_every_waiter_gets_its_cause() {
        let (event, completer) = Event::pending(1);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        event.when(Box::new(move |r| sink.lock().push(r)));
        let cause = Arc::new(Failure::new(FailureKind::RankLost, 3, "gone"));
        completer.fail(&cause);
        completer.complete();
        assert!(!event.is_done());
        assert_eq!(event.wait_for(Duration::ZERO), Some(Err(cause.clone())));
        let sink = seen.clone();
        event.when(Box::new(move |r| sink.lock().push(r)));
        assert_eq!(*seen.lock(), vec![Err(cause.clone()), Err(cause)]);
    }

    #[test]
    fn a_wait_ends_at_its_limit() {
        let (event, _completer) = Event::pending(1);
        assert!(event.wait_for(Duration::from_millis(1)).is_none());
    }
}
