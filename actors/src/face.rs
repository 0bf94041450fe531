//! The face that the actors turn to the executor: readiness as atomics, and a place to park.
//!
//! Readiness of a bucket is one atomic version; the event behind it is fetched only by who has not waited for it yet. The
//! executor leaves its demand in one atomic and wakes the pre-hook only if that said that it waits. Everything else is a
//! bounded spin, then a park with a deadline; publishers look at one counter before they take a lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::task::Waker;
use std::time::Duration;

use gatherflow_kernels::{
    Cause, Event, Failure, FailureKind,
    clock::{deadline, now_ns},
};
use parking_lot::{Condvar, Mutex};

use crate::action::{Publication, StepOutcome};
use crate::patience::Patience;
use crate::plan::BucketId;

/// One fact about a bucket: the version it holds for, and the event behind it.
#[derive(Debug)]
pub struct Fact {
    version: AtomicU64,
    event: Mutex<Event>,
    /// Threads parked until it holds.
    parked: AtomicUsize,
}

impl Fact {
    fn new(event: Event) -> Self {
        Self { version: AtomicU64::new(0), event: Mutex::new(event), parked: AtomicUsize::new(0) }
    }

    fn set(&self, version: u64, event: Event) {
        let mut slot = self.event.lock();
        *slot = event;
        self.version.store(version, Ordering::SeqCst);
    }

    /// Whether the fact holds for `version`, and the event behind it.
    pub fn at(&self, version: u64) -> Option<Event> {
        if self.version.load(Ordering::SeqCst) < version {
            return None;
        }
        Some(self.event.lock().clone())
    }
}

#[derive(Debug)]
struct BucketFace {
    ready: Fact,
    free: Fact,
}

/// Packs a version and a count so that one atomic maximum orders them.
fn pack(version: u64, count: u32) -> u64 {
    version << 32 | u64::from(count)
}

fn unpack(packed: u64) -> (u64, u32) {
    (packed >> 32, packed as u32)
}

/// What actors and executor share.
#[derive(Debug)]
pub struct Face {
    rank: usize,
    buckets: Box<[BucketFace]>,
    judged: Fact,
    demand: AtomicU64,
    waited: AtomicU64,
    wants_demand: AtomicBool,
    outcomes: Mutex<VecDeque<Arc<StepOutcome>>>,
    finished_steps: AtomicU64,
    skipped_steps: AtomicU64,
    peak_ahead_bytes: AtomicU64,
    cause: OnceLock<Cause>,
    /// Threads parked until a step is finished.
    parked: AtomicUsize,
    /// Wakers in the lot: any change calls them.
    wakers: AtomicUsize,
    /// Facts published since somebody had to be woken.
    put_off: AtomicUsize,
    lot: Mutex<Vec<Waker>>,
    changed: Condvar,
    /// Of whoever waits in [`Face::wait_until`].
    patience: Patience,
}

/// How many facts are published at most before those who wait for the first are woken.
const PUT_OFF: usize = 8;

/// How many outcomes are kept for handles that are asked late.
const OUTCOMES_KEPT: usize = 1024;

impl Face {
    /// The face of `buckets` buckets at version 0, all behind `started`.
    pub fn new(rank: usize, buckets: usize, started: &Event) -> Self {
        let bucket = || BucketFace { ready: Fact::new(started.clone()), free: Fact::new(started.clone()) };
        Self {
            rank,
            buckets: (0..buckets).map(|_| bucket()).collect(),
            judged: Fact::new(started.clone()),
            demand: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            wants_demand: AtomicBool::new(false),
            outcomes: Mutex::new(VecDeque::new()),
            finished_steps: AtomicU64::new(0),
            skipped_steps: AtomicU64::new(0),
            peak_ahead_bytes: AtomicU64::new(0),
            cause: OnceLock::new(),
            parked: AtomicUsize::new(0),
            wakers: AtomicUsize::new(0),
            put_off: AtomicUsize::new(0),
            lot: Mutex::new(Vec::new()),
            changed: Condvar::new(),
            patience: Patience::default(),
        }
    }

    /// Readiness of a bucket's parameters.
    pub fn ready(&self, bucket: BucketId) -> &Fact {
        &self.buckets[bucket.0 as usize].ready
    }

    /// Whether a bucket's gradients may be written.
    pub fn free(&self, bucket: BucketId) -> &Fact {
        &self.buckets[bucket.0 as usize].free
    }

    /// How many steps have their verdict enqueued, where the device decides skips.
    pub fn judged(&self) -> &Fact {
        &self.judged
    }

    /// Carries out what a machine published. Facts wake nobody before [`Face::wake_for_facts`], or before there are several.
    pub fn publish(&self, publication: Publication) {
        match publication {
            Publication::Ready { bucket, version, event } => self.settle(self.ready(bucket), version, event),
            Publication::GradientsFree { bucket, version, event } => self.settle(self.free(bucket), version, event),
            Publication::Judged { steps, event } => self.settle(&self.judged, steps, event),
            Publication::Outcome(outcome) => {
                let mut outcomes = self.outcomes.lock();
                if outcomes.len() == OUTCOMES_KEPT {
                    outcomes.pop_front();
                }
                self.skipped_steps.fetch_add(u64::from(!outcome.report.updated), Ordering::Relaxed);
                self.finished_steps.store(outcome.step + 1, Ordering::SeqCst);
                outcomes.push_back(outcome);
                drop(outcomes);
                if self.awaited(&self.parked) {
                    self.wake_all();
                }
            }
            Publication::PeakAhead(bytes) => {
                self.peak_ahead_bytes.fetch_max(bytes, Ordering::Relaxed);
            }
        }
    }

    fn settle(&self, fact: &Fact, version: u64, event: Event) {
        fact.set(version, event);
        let put_off = self.put_off.load(Ordering::Relaxed);
        if put_off >= PUT_OFF {
            self.wake_all();
        } else if put_off > 0 || self.awaited(&fact.parked) {
            self.put_off.store(put_off + 1, Ordering::Relaxed);
        }
    }

    /// Wakes whoever waits for a fact that was published. Whoever runs the machines calls it when there is nothing else to do:
    /// credits let several buckets go at once, and an executor that is woken for the first would park again for the next.
    pub fn wake_for_facts(&self) {
        if self.put_off.load(Ordering::Relaxed) > 0 {
            self.wake_all();
        }
    }

    /// Ends every wait, now and later, with this cause. The first call wins.
    pub fn fail(&self, cause: &Cause) {
        let _ = self.cause.set(cause.clone());
        self.wake_all();
    }

    /// The first cause, once there is one.
    pub fn failed(&self) -> Option<&Cause> {
        self.cause.get()
    }

    /// Whether a thread is parked for this change, or a waker is there: a step has two changes per bucket, and an executor that
    /// waits for the outcome must not be woken for each.
    fn awaited(&self, parked: &AtomicUsize) -> bool {
        // Either this sees who has parked, or who parks sees what was published.
        fence(Ordering::SeqCst);
        parked.load(Ordering::SeqCst) > 0 || self.wakers.load(Ordering::SeqCst) > 0
    }

    fn wake_all(&self) {
        self.put_off.store(0, Ordering::Relaxed);
        let mut lot = self.lot.lock();
        self.changed.notify_all();
        let wakers = std::mem::take(&mut *lot);
        self.wakers.store(0, Ordering::SeqCst);
        drop(lot);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Leaves a waker that is called at the next change. Check the condition again afterwards.
    pub fn park_waker(&self, waker: &Waker) {
        let mut lot = self.lot.lock();
        if !lot.iter().any(|other| other.will_wake(waker)) {
            lot.push(waker.clone());
            self.wakers.store(lot.len(), Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// Waits until a fact holds for `version`, at most `limit`; gives the event behind it.
    ///
    /// # Errors
    /// As [`Face::wait_for_steps`].
    pub fn wait_for_fact(
        &self,
        fact: &Fact,
        version: u64,
        limit: Duration,
        what: &dyn Fn() -> String,
    ) -> Result<Event, Cause> {
        self.wait_until(&fact.parked, limit, what, || fact.at(version))
    }

    /// Waits until so many steps have a known outcome, at most `limit`.
    ///
    /// # Errors
    /// The first cause once there is one; a deadline failure naming `what` after the limit.
    pub fn wait_for_steps(&self, steps: u64, limit: Duration, what: &dyn Fn() -> String) -> Result<(), Cause> {
        self.wait_until(&self.parked, limit, what, || (self.finished_steps() >= steps).then_some(()))
    }

    /// Spins a bounded while, then parks. `parked` is what the change that it waits for looks at.
    fn wait_until<T>(
        &self,
        parked: &AtomicUsize,
        limit: Duration,
        what: &dyn Fn() -> String,
        condition: impl Fn() -> Option<T>,
    ) -> Result<T, Cause> {
        if let Some(value) = self.patience.look(&condition) {
            return Ok(value);
        }
        let from_ns = now_ns();
        let end = deadline(limit);
        let mut lot = self.lot.lock();
        parked.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let result = loop {
            if let Some(value) = condition() {
                break Ok(value);
            }
            if let Some(cause) = self.failed() {
                break Err(cause.clone());
            }
            if self.changed.wait_until(&mut lot, end).timed_out() {
                let message = format!("waited {:.1} s for {}", limit.as_secs_f64(), what());
                break condition().ok_or_else(|| Arc::new(Failure::new(FailureKind::Deadline, self.rank, message)));
            }
        };
        parked.fetch_sub(1, Ordering::SeqCst);
        drop(lot);
        self.patience.parked(from_ns);
        result
    }

    /// Raises the demand.
    pub fn raise_demand(&self, version: u64, demanded: u32) {
        let packed = pack(version, demanded);
        if self.demand.load(Ordering::Relaxed) < packed {
            self.demand.fetch_max(packed, Ordering::SeqCst);
        }
    }

    /// Chain mode: raises the count of waits that ended.
    pub fn raise_waited(&self, version: u64, waited: u32) {
        self.waited.fetch_max(pack(version, waited), Ordering::SeqCst);
    }

    /// Whether the pre-hook waits for demand and nobody has told it yet: whoever gets `true` must tell it what was raised.
    /// On its turn it looks at the newest demand, so what is raised until then needs no message.
    pub fn take_wants_demand(&self) -> bool {
        self.wants_demand.load(Ordering::SeqCst) && self.wants_demand.swap(false, Ordering::SeqCst)
    }

    /// The pre-hook's shell says whether demand must wake it, then looks at the demand once more.
    pub fn set_wants_demand(&self, wants: bool) {
        self.wants_demand.store(wants, Ordering::SeqCst);
    }

    /// `(version, demanded gathers)` of the newest demand.
    pub fn demand(&self) -> (u64, u32) {
        unpack(self.demand.load(Ordering::SeqCst))
    }

    /// `(version, waits)` of the newest wait that ended in chain mode.
    pub fn waited(&self) -> (u64, u32) {
        unpack(self.waited.load(Ordering::SeqCst))
    }

    /// The outcome of a step, once it is known and while it is kept.
    pub fn outcome(&self, step: u64) -> Option<Arc<StepOutcome>> {
        let outcomes = self.outcomes.lock();
        let first = outcomes.front()?.step;
        outcomes.get(usize::try_from(step.checked_sub(first)?).ok()?).cloned()
    }

    /// How many steps have a known outcome.
    pub fn finished_steps(&self) -> u64 {
        self.finished_steps.load(Ordering::SeqCst)
    }

    /// How many of them were skipped.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps.load(Ordering::Relaxed)
    }

    /// Most bytes ever gathered ahead of demand.
    pub fn peak_ahead_bytes(&self) -> u64 {
        self.peak_ahead_bytes.load(Ordering::Relaxed)
    }
}
