//! What the executor calls: demand and waiting, gradients, `step` and outcomes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use gatherflow_kernels::{Cause, Event, EventStatus, Failure, FailureKind, Mark, clock};

use super::{Session, StepRequest};
use crate::action::{Edge, Letter, StepOutcome};
use crate::bucket::BucketMsg;
use crate::control::ControlMsg;
use crate::face::Fact;
use crate::optimizer::{CloseBucket, OptimizerMsg, Skip, StepStart};
use crate::plan::{BucketId, ParamId, Position, Storage, UnitId};
use crate::prehook::{FirstGather, Overlap, PreHookMsg};

impl Session {
    /// Enters a unit: demands the gathers up to its last bucket, and lets the executor's stream wait for its buckets.
    /// Returns once those gathers are issued; on the CPU once they are done. A few atomic loads when nothing is to be
    /// waited for.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn enter(&self, unit: UnitId) -> Result<(), Cause> {
        let version = self.steps();
        let face = &self.units[unit.0 as usize];
        self.check()?;
        self.progress();
        if face.seen.load(Ordering::Acquire) > version {
            return Ok(());
        }
        self.open_gathers(version, true);
        self.demand(version, face.demand, face.buckets.iter().copied())?;
        face.seen.store(version + 1, Ordering::Release);
        Ok(())
    }

    /// The executor zeroes its gradients: where the first gathers wait for that, they start now.
    pub fn zeroed(&self) {
        if self.config.first_gather == FirstGather::ZeroGrad {
            self.open_gathers(self.steps(), false);
        }
    }

    /// Lets the gathers of a version start, unless that went with its step or was said already.
    fn open_gathers(&self, version: u64, by_entry: bool) {
        let waits = self.config.first_gather != FirstGather::Step && self.config.overlap != Overlap::None;
        if waits && self.opened.fetch_max(version, Ordering::AcqRel) < version {
            self.post.post(Letter::PreHook(PreHookMsg::Open { version, by_entry }));
        }
    }

    /// Demands one parameter and waits for it, from anywhere and in any order (rule V2).
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn param_ready(&self, param: ParamId) -> Result<(), Cause> {
        self.check()?;
        let Some(bucket) = self.plan.bucket_of(param) else { return Ok(()) };
        let version = self.steps();
        let side = &self.buckets[bucket.0 as usize];
        if side.seen.load(Ordering::Acquire) > version {
            return Ok(());
        }
        self.progress();
        self.demand(version, side.demand, std::iter::once(bucket))
    }

    /// Demands one parameter; ready once its gather is done, so that [`Session::param_ready`] will not wait.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn poll_ready(&self, param: ParamId, waker: &Waker) -> Poll<Result<(), Cause>> {
        let Some(bucket) = self.plan.bucket_of(param) else { return Poll::Ready(self.check()) };
        let version = self.steps();
        let demanded = self.buckets[bucket.0 as usize].demand;
        self.face.raise_demand(version, demanded);
        self.face.park_waker(waker);
        if let Err(cause) = self.check() {
            return Poll::Ready(Err(cause));
        }
        let Some(event) = self.face.ready(bucket).at(version) else {
            self.ask(version, demanded);
            self.post.post(Letter::PreHook(PreHookMsg::Awaited { version, demanded }));
            return Poll::Pending;
        };
        match event.status() {
            EventStatus::Done => return Poll::Ready(Ok(())),
            EventStatus::Failed(cause) => return Poll::Ready(Err(self.ended(&cause))),
            EventStatus::Pending => {}
        }
        self.ask(version, demanded);
        let waker = waker.clone();
        self.hands.device.when(&event, Box::new(move |_| waker.wake()));
        Poll::Pending
    }

    /// Demands the gathers up to the unit's last bucket and waits for nothing. In mode window they start after what the
    /// executor's stream has reached, in mode chain at once, not one by one.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn prefetch(&self, unit: UnitId) -> Result<(), Cause> {
        self.check()?;
        self.progress();
        let version = self.steps();
        let face = &self.units[unit.0 as usize];
        let there = |bucket: &BucketId| self.face.ready(*bucket).at(version).is_some_and(|event| event.is_done());
        if self.config.overlap == Overlap::None || face.buckets.iter().all(there) {
            return Ok(());
        }
        self.begin_gathers(version, face.demand);
        Ok(())
    }

    /// Demands the first gathers and waits for none of them: a chain goes on for them too.
    fn begin_gathers(&self, version: u64, demanded: u32) {
        self.hands.device.mark(self.executor(), Mark::Demanded { version, demanded });
        self.face.raise_demand(version, demanded);
        self.ask(version, demanded);
        if self.config.overlap == Overlap::Chain {
            self.post.post(Letter::PreHook(PreHookMsg::Awaited { version, demanded }));
        }
    }

    /// Demands and awaits all pending gathers (SPEC P4).
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn all_ready(&self) -> Result<(), Cause> {
        self.check()?;
        self.progress();
        let version = self.steps();
        let total = self.plan.gather_order().len() as u32;
        self.post.post(Letter::PreHook(PreHookMsg::Drain { version }));
        self.announce(version, total);
        self.await_all(version)?;
        self.note_chain(version, total);
        Ok(())
    }

    /// Waits for all buckets. Gathers are issued in order, so once the last one is, the host need not be woken for each.
    fn await_all(&self, version: u64) -> Result<(), Cause> {
        let Some(last) = self.plan.gather_order().last() else { return Ok(()) };
        let fact = self.face.ready(*last);
        if fact.at(version).is_none() {
            let from = clock::now_ns();
            let what = || format!("all gathers at version {version} to be issued");
            self.await_fact(fact, version, &what)?;
            self.recorder.waited(from, None);
        }
        self.plan.gather_order().iter().try_for_each(|bucket| self.await_bucket(*bucket, version, None).map(drop))
    }

    fn announce(&self, version: u64, demanded: u32) {
        if self.plan.ranks() > 1 && demanded > 0 {
            let from = self.rank();
            self.hands.control.tell_others(&ControlMsg::Demand { from, version, demanded });
        }
    }

    /// Tells the pre-hook of a demand that waits; where there are peers it tells them (rule O4).
    fn ask(&self, version: u64, demanded: u32) {
        let told = self.face.take_wants_demand();
        if told || self.plan.ranks() > 1 {
            self.post.post(Letter::PreHook(PreHookMsg::Demand { version, demanded, announce: true }));
        }
    }

    fn demand(&self, version: u64, demanded: u32, buckets: impl Iterator<Item = BucketId>) -> Result<(), Cause> {
        let (device, executor) = (&self.hands.device, self.hands.streams.executor);
        device.mark(executor, Mark::Demanded { version, demanded });
        self.face.raise_demand(version, demanded);
        if self.config.overlap == Overlap::Chain {
            self.follow_chain(version, demanded)?;
        }
        let mut asked = false;
        for bucket in buckets {
            asked |= self.await_bucket(bucket, version, Some(demanded))?;
        }
        if !asked && self.config.overlap == Overlap::Window && self.face.take_wants_demand() {
            self.post.post(Letter::PreHook(PreHookMsg::Demand { version, demanded, announce: false }));
        }
        Ok(())
    }

    /// Chain: waits for one gather after the other, and lets the next one start after each wait.
    fn follow_chain(&self, version: u64, demanded: u32) -> Result<(), Cause> {
        let mut chain = self.chain.lock();
        if chain.0 < version {
            *chain = (version, 0);
        }
        while chain.0 == version && chain.1 < demanded {
            let bucket = self.plan.gather_order()[chain.1 as usize];
            self.await_bucket(bucket, version, Some(chain.1 + 1))?;
            let position = chain.1;
            chain.1 += 1;
            self.hands.device.mark(self.executor(), Mark::WaitEnded { version, position });
            self.face.raise_waited(version, chain.1);
            if self.face.take_wants_demand() {
                self.post.post(Letter::PreHook(PreHookMsg::WaitEnded { version, waited: chain.1 }));
            }
        }
        Ok(())
    }

    fn note_chain(&self, version: u64, waited: u32) {
        let mut chain = self.chain.lock();
        if chain.0 <= version {
            *chain = (version, waited.max(if chain.0 == version { chain.1 } else { 0 }));
        }
    }

    /// Lets the executor's stream wait for a bucket at `version`. Asks the pre-hook (and through it the peers) for the
    /// first `ask` gathers if there is something to wait for, and then returns `true`.
    fn await_bucket(&self, bucket: BucketId, version: u64, ask: Option<u32>) -> Result<bool, Cause> {
        let side = &self.buckets[bucket.0 as usize];
        if side.seen.load(Ordering::Acquire) > version {
            return Ok(false);
        }
        let mut asked = false;
        let fact = self.face.ready(bucket);
        if let Some(event) = fact.at(version).filter(Event::is_done) {
            self.wait_event(Edge::E5, &event)?;
        } else {
            if let Some(demanded) = ask {
                self.ask(version, demanded);
                asked = true;
            }
            let from = clock::now_ns();
            let what = || format!("the gather of bucket {} at version {version} to be issued", bucket.0);
            let event = self.await_fact(fact, version, &what)?;
            self.wait_event(Edge::E5, &event)?;
            self.recorder.waited(from, Some(bucket));
        }
        side.seen.store(version + 1, Ordering::Release);
        Ok(asked)
    }

    fn await_fact(&self, fact: &Fact, version: u64, what: &dyn Fn() -> String) -> Result<Event, Cause> {
        self.patiently(|| self.face.wait_for_fact(fact, version, self.backstop(), what))
    }

    fn await_steps(&self, steps: u64, what: &dyn Fn() -> String) -> Result<(), Cause> {
        self.patiently(|| self.face.wait_for_steps(steps, self.backstop(), what))
    }

    /// Waits again where the backstop passed but nothing has failed, and some rank has said that it would take longer.
    fn patiently<T>(&self, wait: impl Fn() -> Result<T, Cause>) -> Result<T, Cause> {
        loop {
            match wait() {
                Err(_) if self.face.failed().is_none() && self.somebody_was_busy() => {}
                result => return result.map_err(|cause| self.ended(&cause)),
            }
        }
    }

    /// Why a wait ended: the first cause. One that only this thread has seen so far ends everything on every rank.
    pub(super) fn ended(&self, cause: &Cause) -> Cause {
        self.face.failed().cloned().unwrap_or_else(|| self.hands.fail(cause))
    }

    pub(super) fn wait_event(&self, edge: Edge, event: &Event) -> Result<(), Cause> {
        let waited = self.hands.wait(self.hands.streams.executor, edge, event);
        // What the device says may be an effect.
        waited.map_err(|error| self.ended(&self.hands.failure(&error)))
    }

    /// Lets the executor's stream wait until a parameter's gradient may be written for this step (edge E6). Frozen
    /// parameters have none. With storage `shared` the bucket's gather comes before that, so this demands it.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn gradient_free(&self, param: ParamId) -> Result<(), Cause> {
        self.check()?;
        let Some(bucket) = self.plan.bucket_of(param) else { return Ok(()) };
        let step = self.steps();
        let side = &self.buckets[bucket.0 as usize];
        if side.free.load(Ordering::Acquire) > step {
            return Ok(());
        }
        let fact = self.face.free(bucket);
        if let Some(event) = fact.at(step).filter(Event::is_done) {
            self.wait_event(Edge::E6, &event)?;
        } else {
            let from = clock::now_ns();
            let what = || format!("the gradients of bucket {} to be free for step {step}", bucket.0);
            if self.plan.storage() == Storage::Shared && fact.at(step).is_none() {
                self.begin_gathers(step, side.demand);
            }
            let event = self.await_fact(fact, step, &what)?;
            self.wait_event(Edge::E6, &event)?;
            self.recorder.waited(from, None);
        }
        side.free.store(step + 1, Ordering::Release);
        Ok(())
    }

    /// The last gradient write of a parameter in this step is enqueued; `event` is behind it. Call it once per parameter and
    /// step.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn gradient_complete(&self, param: ParamId, event: Event) -> Result<(), Cause> {
        self.check()?;
        self.progress();
        let Some(bucket) = self.plan.bucket_of(param) else { return Ok(()) };
        self.buckets[bucket.0 as usize].reported.fetch_add(1, Ordering::AcqRel);
        let step = self.steps();
        self.post.post(Letter::Bucket(bucket, BucketMsg::GradientComplete { step, event }));
        Ok(())
    }

    /// Ends the step: what nobody wrote counts as zero, the remaining reduces are issued, and the update follows. Returns the
    /// number of this step. Blocks while `steps_in_flight` outcomes are unknown, and without gather overlap until all
    /// gathers are done.
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn step(&self, request: StepRequest) -> Result<u64, Cause> {
        self.check()?;
        self.progress();
        let step = self.steps();
        let allowed = u64::from(self.config.steps_in_flight.max(1));
        if step - self.face.finished_steps().min(step) >= allowed {
            let from = clock::now_ns();
            let what = || format!("the outcome of step {}", step - allowed);
            self.await_steps(step + 1 - allowed, &what)?;
            self.recorder.waited(from, None);
        }
        if self.plan.storage() == Storage::Shared {
            self.flush_unwritten(step, &request);
        }
        let readers: Arc<[Event]> = Arc::from([self.hands.device.record(self.executor())]);
        let close = self.unreported(&request);
        let scale_read = self.scale_read.lock().take();
        let start = StepStart { step, lrs: request.lrs, host: request.host, close, readers, scale_read };
        self.post.post(Letter::Optimizer(OptimizerMsg::Step(Box::new(start))));
        self.steps.store(step + 1, Ordering::Release);
        if self.config.overlap == Overlap::None {
            // Peers may overlap, and hold gathers back (rule O4).
            self.announce(step + 1, self.plan.gather_order().len() as u32);
            self.await_all(step + 1)?;
        }
        self.recorder.boundary(step, self.hands.device.as_ref());
        Ok(step)
    }

    /// What nobody wrote is zeroed behind its gather, which nobody may have asked for: the reduces of this step come behind all
    /// gathers before it, so they go now.
    fn flush_unwritten(&self, step: u64, request: &StepRequest) {
        let mut buckets = request.unwritten.iter().filter_map(|param| self.plan.bucket_of(*param));
        if buckets.any(|bucket| self.face.free(bucket).at(step).is_none()) {
            self.post.post(Letter::PreHook(PreHookMsg::Drain { version: step }));
            self.announce(step, self.plan.gather_order().len() as u32);
        }
    }

    /// The buckets that still wait for something, in reduce order, with what to do about it.
    fn unreported(&self, request: &StepRequest) -> Vec<CloseBucket> {
        let mut zero: Vec<Vec<ParamId>> = vec![Vec::new(); self.buckets.len()];
        let mut writes: Vec<Vec<Event>> = vec![Vec::new(); self.buckets.len()];
        for param in &request.unwritten {
            if let Some(bucket) = self.plan.bucket_of(*param) {
                zero[bucket.0 as usize].push(*param);
            }
        }
        for (param, event) in &request.unfinished {
            if let Some(bucket) = self.plan.bucket_of(*param) {
                writes[bucket.0 as usize].push(event.clone());
            }
        }
        let mut close = Vec::new();
        for bucket in self.plan.reduce_order() {
            let index = bucket.0 as usize;
            let side = &self.buckets[index];
            let complete = side.reported.swap(0, Ordering::AcqRel) == side.members;
            if !complete || !self.config.overlap_grad_reduce {
                let (zero, writes) = (std::mem::take(&mut zero[index]), std::mem::take(&mut writes[index]));
                close.push(CloseBucket { bucket, zero, writes });
            }
        }
        close
    }

    /// The loss scale of the step to come: the loaded one, if that was the last that happened. Otherwise, where the host decides skips, it waits for the outcome of the last step; where the
    /// device does, it reads the scalar there, once the executor's stream has reached the verdict (edge E7).
    ///
    /// # Errors
    /// The first cause after a failure.
    pub fn loss_scale(&self) -> Result<f32, Cause> {
        self.check()?;
        let steps = self.steps();
        if let Some((_, scale)) = self.loaded_scale.lock().filter(|(loaded, _)| *loaded == steps) {
            return Ok(scale);
        }
        if self.config.skip == Skip::Host && steps > 0 {
            return Ok(self.outcome(steps - 1)?.report.next_loss_scale);
        }
        self.progress();
        let from = clock::now_ns();
        let what = || format!("the verdict of step {} to be enqueued", steps.saturating_sub(1));
        let judged = self.await_fact(self.face.judged(), steps, &what)?;
        let waits = !judged.is_done();
        self.wait_event(Edge::E2, &judged)?;
        if waits {
            self.recorder.waited(from, None);
        }
        Ok(self.read_scalars()?.scale)
    }

    /// Waits for the outcome of a step.
    ///
    /// # Errors
    /// The first cause after a failure; an error for a step that was never taken or whose outcome is no longer kept.
    pub fn outcome(&self, step: u64) -> Result<Arc<StepOutcome>, Cause> {
        if let Some(outcome) = self.face.outcome(step) {
            return Ok(outcome);
        }
        if step >= self.steps() {
            return Err(self.no_outcome(step));
        }
        // It may have become known since the look above: then this does not wait.
        let from = clock::now_ns();
        let what = || format!("the outcome of step {step}");
        let finished = self.await_steps(step + 1, &what);
        self.recorder.waited(from, None);
        finished?;
        self.face.outcome(step).ok_or_else(|| self.no_outcome(step))
    }

    fn no_outcome(&self, step: u64) -> Cause {
        let message = format!(
            "there is no outcome of step {step}: {} steps were taken, and only the newest outcomes are kept",
            self.steps()
        );
        Arc::new(Failure::new(FailureKind::Misuse, self.rank(), message).at_step(step))
    }

    /// The outcome of a step, if it is known.
    ///
    /// # Errors
    /// As [`Session::outcome`].
    pub fn poll_outcome(&self, step: u64, waker: &Waker) -> Poll<Result<Arc<StepOutcome>, Cause>> {
        self.face.park_waker(waker);
        // Asked before the look: it may become known between the two.
        let known = step < self.face.finished_steps();
        if let Some(outcome) = self.face.outcome(step) {
            return Poll::Ready(Ok(outcome));
        }
        if step >= self.steps() || known {
            return Poll::Ready(Err(self.no_outcome(step)));
        }
        match self.check() {
            Err(cause) => Poll::Ready(Err(cause)),
            Ok(()) => Poll::Pending,
        }
    }

    /// The place of a parameter in the gather order; `None` if it is frozen.
    pub fn position(&self, param: ParamId) -> Option<Position> {
        self.plan.bucket_of(param).map(|bucket| self.plan.position(bucket))
    }
}
