//! A session: one rank's running actors, as the executor's side sees them.
//!
//! Owns the actor thread (or the inline loop), the device and all memory of one rank. The embedding runtime builds its
//! guards on it: entering units, gradients, `step`, outcomes. Every wait here has a deadline and ends with the first cause
//! when something fails. Entering a unit whose buckets are ready is a few atomic loads.

mod executor;
mod masters;
mod start;
mod state;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gatherflow_kernels::verdict::{HostVerdict, ScalerRule, VerdictRule};
use gatherflow_kernels::{BufRange, Cause, Device, Event, Failure, FailureKind, StreamId, clock};
use parking_lot::Mutex;

use crate::action::Edge;
use crate::busy::Busy;
use crate::drill::Drill;
use crate::face::Face;
use crate::hands::{Hands, Post};
use crate::lowering::BucketMemory;
use crate::optimizer::{Group, LrRow, Skip};
use crate::plan::{BucketId, ParamId, Plan};
use crate::prehook::{Credits, FirstGather, Overlap};
use crate::recorder::Recorder;
use crate::shell::ActorThread;
use crate::supervisor::Deadlines;

pub use crate::recorder::StepTimes;
pub use start::Init;
pub use state::{LoadOwned, Resumed, SaveOwned};

/// How equal parameters are ensured at the start (SPEC G5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StartParams {
    /// Rank 0's parameters are broadcast.
    Broadcast,
    /// Every rank's parameters must already have the same bits.
    Check,
}

/// Who runs the machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Driver {
    /// ractor actors on a thread of their own.
    Actors,
    /// A plain loop on the caller's thread: for the null device only.
    Inline,
}

/// What a session needs to know beside the plan.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// How gathers overlap with the forward pass.
    pub overlap: Overlap,
    /// How far gathers may run ahead of demand (window).
    pub credits: Credits,
    /// Where the first gathers of a version may start (chain and window).
    pub first_gather: FirstGather,
    /// Reduce a bucket as soon as its gradients are complete, not at `step`.
    pub overlap_grad_reduce: bool,
    /// Look for gradients of this rank that are not finite before they are reduced (SPEC T9).
    pub check_for_nan_in_grad: bool,
    /// Averaging, clipping and policies.
    pub rule: VerdictRule,
    /// The loss scaler.
    pub scaler: ScalerRule,
    /// Who decides that a step is skipped.
    pub skip: Skip,
    /// The optimizer groups, by number.
    pub groups: Vec<Group>,
    /// `step` blocks while this many outcomes are unknown.
    pub steps_in_flight: u32,
    /// How long to wait for others.
    pub deadlines: Deadlines,
    /// How often to warn of a busy rank that is waited for.
    pub busy_warning: Duration,
    /// Compare the order of collectives every this many steps; 0 is never.
    pub check_order_every: u64,
    /// How equal parameters are ensured.
    pub start_params: StartParams,
    /// What else must be the same on every rank: `(what, value)`.
    pub agree: Vec<(String, String)>,
    /// Who runs the machines.
    pub driver: Driver,
    /// Tests leave out the waits of one edge, to see the checker find it.
    #[doc(hidden)]
    pub dropped_edge: Option<Edge>,
    /// Tests let something go wrong.
    #[doc(hidden)]
    pub drill: Option<Drill>,
}

/// What the executor says with `step`.
#[derive(Clone, Debug, Default)]
pub struct StepRequest {
    /// Learning rates, per group.
    pub lrs: Vec<LrRow>,
    /// What only the host knows.
    pub host: HostVerdict,
    /// Trainable parameters that nobody wrote in this step: their gradients count as zero.
    pub unwritten: Vec<ParamId>,
    /// Parameters that were written but not reported complete, each with the event behind its last write.
    pub unfinished: Vec<(ParamId, Event)>,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Gathers issued.
    pub gathers: u64,
    /// Reduces issued.
    pub reduces: u64,
    /// Steps skipped.
    pub skipped_steps: u64,
    /// Most bytes ever gathered ahead of demand.
    pub peak_ahead_bytes: u64,
    /// Digest of the order of all collectives so far (rule O2).
    pub order_digest: u64,
}

/// Per unit, what entering it needs.
#[derive(Debug)]
struct UnitFace {
    buckets: Box<[BucketId]>,
    demand: u32,
    /// 1 + the version for which the executor has waited.
    seen: AtomicU64,
}

/// Per bucket, what the executor remembers.
#[derive(Debug)]
struct BucketSide {
    demand: u32,
    members: u32,
    /// Parameters reported complete in this step.
    reported: AtomicU32,
    /// 1 + the version for which the executor has waited.
    seen: AtomicU64,
    /// 1 + the step whose gradients the executor may write.
    free: AtomicU64,
}

/// One rank's running actors.
#[derive(Debug)]
pub struct Session {
    plan: Arc<Plan>,
    config: SessionConfig,
    hands: Arc<Hands>,
    face: Arc<Face>,
    post: Arc<dyn Post>,
    actors: Mutex<Option<ActorThread>>,
    units: Box<[UnitFace]>,
    buckets: Box<[BucketSide]>,
    /// Number of `step` calls so far: the version a reader needs.
    steps: AtomicU64,
    /// The newest version whose gathers may start, where that does not go with the step.
    opened: AtomicU64,
    /// Chain mode: `(version, gathers waited for)`.
    chain: Mutex<(u64, u32)>,
    /// Behind the executor's last read of the loss scale since `step`.
    scale_read: Mutex<Option<Event>>,
    /// The loss scale that was loaded, and the number of steps before that.
    loaded_scale: Mutex<Option<(u64, f32)>>,
    recorder: Recorder,
    /// How it was closed.
    closed: OnceLock<Result<(), Cause>>,
}

impl Session {
    /// The plan it runs.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The device it runs on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.hands.device
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.hands.control.rank()
    }

    /// The executor's stream.
    pub fn executor(&self) -> StreamId {
        self.hands.streams.executor
    }

    /// A parameter's own memory.
    pub fn param_range(&self, param: ParamId) -> BufRange {
        self.hands.lowering.param(param)
    }

    /// A parameter's gradient; `None` if it is frozen.
    pub fn grad_range(&self, param: ParamId) -> Option<BufRange> {
        self.hands.lowering.grad(param)
    }

    /// The memory of a bucket on this rank.
    pub fn bucket_memory(&self, bucket: BucketId) -> &BucketMemory {
        self.hands.lowering.bucket(bucket)
    }

    /// Number of `step` calls so far: the version a reader needs.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Acquire)
    }

    /// How many steps have a known outcome.
    pub fn finished_steps(&self) -> u64 {
        self.face.finished_steps()
    }

    /// The first cause, once there is one.
    pub fn failed(&self) -> Option<Cause> {
        self.face.failed().cloned()
    }

    /// Totals since the start.
    pub fn counters(&self) -> Counters {
        let issued = &self.hands.issued;
        Counters {
            gathers: issued.gathers.load(Ordering::Relaxed),
            reduces: issued.reduces.load(Ordering::Relaxed),
            skipped_steps: self.face.skipped_steps(),
            peak_ahead_bytes: self.face.peak_ahead_bytes(),
            order_digest: issued.digest.load(Ordering::Relaxed),
        }
    }

    /// Times of the steps that are over, each once. After [`Session::close`] the last one too.
    pub fn take_times(&self) -> Vec<StepTimes> {
        let all = self.closed.get().is_some();
        self.recorder.take(self.hands.device.as_ref(), all)
    }

    /// The backstop of every wait: the supervisor ends waits earlier, with a better reason.
    fn backstop(&self) -> Duration {
        let deadlines = &self.config.deadlines;
        deadlines.collective.max(deadlines.silence).saturating_mul(4).saturating_add(Duration::from_secs(2))
    }

    /// This rank is busy with something for at most so long, until what is returned is dropped: peers that wait for it warn
    /// instead of failing (rule F1).
    pub fn busy(&self, reason: impl Into<String>, limit: Duration) -> Busy {
        self.hands.control.busy(reason, limit)
    }

    /// Whether any rank is busy, or was so lately that the backstop of a wait must begin anew.
    fn somebody_was_busy(&self) -> bool {
        let (backstop, now) = (self.backstop().as_nanos(), clock::now_ns());
        let backstop = u64::try_from(backstop).unwrap_or(u64::MAX);
        self.hands.control.boards().iter().any(|board| board.busy_within(backstop, now))
    }

    fn check(&self) -> Result<(), Cause> {
        self.face.failed().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    fn progress(&self) {
        self.hands.control.board().progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Flushes: demands all gathers, waits for them and for all outcomes, and ends the actors. Peers wait in it for each
    /// other, so call it on every rank. Repeatable: it then says the same again.
    ///
    /// # Errors
    /// The first cause if something failed; the threads are ended all the same.
    pub fn close(&self) -> Result<(), Cause> {
        if let Some(result) = self.closed.get() {
            return result.clone();
        }
        let result = self.check().and_then(|()| {
            let steps = self.steps();
            if steps > 0 {
                self.outcome(steps - 1)?;
            }
            self.all_ready()
        });
        // Of two threads that close, the first to be done decides.
        let _ = self.closed.set(result.clone());
        self.stop();
        result
    }

    /// Ends the session without a flush, unless it was closed: every wait ends, whoever holds the session, and peers that
    /// wait for this rank learn that it left, and what it will never finish. Issues nothing and never panics.
    pub fn abandon(&self) {
        let rank = self.rank();
        let message = format!("the engine of rank {rank} was dropped without `close`");
        let cause: Cause = Arc::new(Failure::new(FailureKind::Closed, rank, message));
        if self.closed.set(Err(cause.clone())).is_err() {
            return;
        }
        self.hands.stopping.store(true, Ordering::SeqCst);
        self.hands.face.fail(&cause);
        // The actors end first: what the poison does to open events is then nobody's failure.
        self.stop_actors();
        self.hands.device.poison(cause);
        self.hands.abandon();
        self.hands.control.leave();
    }

    fn stop(&self) {
        self.stop_actors();
        self.hands.control.leave();
    }

    fn stop_actors(&self) {
        self.hands.stopping.store(true, Ordering::SeqCst);
        let actors = self.actors.lock().take();
        if let Some(mut actors) = actors {
            actors.stop();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.abandon();
    }
}
