//! The engine: one rank's model, optimizer state and communication, as its executor sees them.
//!
//! It owns the session with the actors and lends passes. `&mut self` on [`Engine::step`] is what makes rule V3 a matter of
//! types: no guard can live across it. Everything that waits parks with a deadline and never blocks a runtime's executor
//! by `block_on`, so it is legal inside an async runtime. After a fatal failure every call returns the first cause.

mod start;
mod state;
mod swap;
mod write;

use std::cell::Cell;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::actors::{Average, Busy, Element, Fnv};
use crate::actors::{
    Counters, HostVerdict, ParamId, Pipeline, Plan, PlanRank, Session, Spoiled, StepRequest, StepTimes, UnitId,
};
use crate::config::{Config, ScalerKind, Unused};
use crate::error::Error;
use crate::gradients::Refused;
use crate::guard::Read;
use crate::lr::{Lr, usable};
use crate::model::{ChunkId, GroupId, ParamInfo};
use crate::outcome::StepHandle;
use crate::owned::OwnedPass;
use crate::pass::{Mode, Pass};
use crate::report::Report;
use crate::shared::Shared;
use crate::stop::StopFlag;

pub use start::{Internals, ParamMut};
pub use swap::Swapped;

/// One rank of a training job. See the [crate](crate) for a whole program.
///
/// It can move to another thread, but two threads cannot share it:
///
/// ```compile_fail,E0277
/// fn needs_sync<T: Sync>() {}
/// needs_sync::<gatherflow::Engine>();
/// ```
///
/// (`needs_sync::<gatherflow::Pass<'static>>()` and `needs_send::<gatherflow::Engine>()` do compile:)
///
/// ```
/// fn needs_sync<T: Sync>() {}
/// fn needs_send<T: Send>() {}
/// needs_sync::<gatherflow::Pass<'static>>();
/// needs_send::<gatherflow::Engine>();
/// ```
///
/// Nor is there a second handle to it:
///
/// ```compile_fail,E0599
/// fn two(engine: gatherflow::Engine) -> (gatherflow::Engine, gatherflow::Engine) {
///     (engine.clone(), engine)
/// }
/// ```
///
/// What goes to which thread, and what waits, is on one page: `docs/THREADS.md` in the repository.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    config: Config,
    lrs: Vec<Lr>,
    weight: f64,
    /// The first step whose outcome was not looked at yet.
    unknown_from: u64,
    /// Updated steps per group, as far as outcomes are known.
    known_t: Vec<u64>,
    times: Vec<StepTimes>,
    /// Steps behind the state that was loaded, and the number of `step` calls before that.
    resumed: (u64, u64),
    /// The trained parameters' bytes, in registration order, while others are swapped in.
    kept: Option<Vec<Box<[u8]>>>,
    not_sync: PhantomData<Cell<()>>,
}

impl Engine {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.plan().ranks()
    }

    /// This rank's number among those that share its copy of the model, and how many they are (`model_parallel`).
    pub fn model_parallel(&self) -> (usize, usize) {
        (self.plan().model_parallel_rank(PlanRank(self.rank())), self.plan().model_parallel())
    }

    /// This rank's pipeline stage, and how many there are (`pipeline_parallel`).
    pub fn pipeline_parallel(&self) -> (usize, usize) {
        let Pipeline { stage, stages } = self.plan().pipeline();
        (stage, stages)
    }

    /// This rank's number among those that train the same part of the model on other data, and how many they are.
    pub fn data_parallel(&self) -> (usize, usize) {
        (self.plan().data_parallel_rank(PlanRank(self.rank())), self.plan().data_parallel())
    }

    /// The number of `step` calls so far.
    pub fn steps(&self) -> u64 {
        self.shared.steps()
    }

    /// The layout and the order of collectives.
    pub fn plan(&self) -> &Plan {
        self.shared.session.plan()
    }

    /// The parameters in registration order.
    pub fn params(&self) -> &[ParamInfo] {
        self.shared.model.params()
    }

    /// What this rank runs under the engine; for tests and tools.
    #[doc(hidden)]
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// One microbatch through one chunk. `microbatch` numbers it in errors; `last` says that it is the step's last one of
    /// this chunk, so that complete gradients go on their way during its backward. [`Mode::Eval`] has no backward.
    ///
    /// # Errors
    /// An unknown chunk, a training pass after the last one of this step, a closed or failed engine.
    pub fn pass(&self, chunk: ChunkId, microbatch: usize, last: bool, mode: Mode) -> Result<Pass<'_>, Error> {
        Pass::new(&self.shared, chunk, microbatch, last, mode)
    }

    /// As [`Engine::pass`], for adapters that need `'static`: checked at run time instead.
    ///
    /// # Errors
    /// As [`Engine::pass`].
    pub fn owned_pass(&self, chunk: ChunkId, microbatch: usize, last: bool, mode: Mode) -> Result<OwnedPass, Error> {
        OwnedPass::new(&self.shared, chunk, microbatch, last, mode)
    }

    /// Sets the learning rate of a group, from the next step on. Its multiplier still applies. Call it alike on every rank: each
    /// rank updates its own part of every parameter. A step for which ranks have set different values, or schedules that differ at the
    /// number of steps so far + 1 ([`State::steps`](crate::State::steps) counted in), is skipped on all of them, with an error that
    /// names one ([`ErrorKind::LearningRates`](crate::ErrorKind::LearningRates)).
    ///
    /// # Errors
    /// An unknown group, or a value that is negative or not finite.
    pub fn set_lr(&mut self, group: GroupId, lr: impl Into<Lr>) -> Result<(), Error> {
        let lr = lr.into();
        if let Lr::Value(value) = lr
            && !usable(value)
        {
            return Err(Error::misuse(format!("a learning rate of {value}: it must be finite and not negative")));
        }
        match self.lrs.get_mut(group.0 as usize) {
            Some(slot) => *slot = lr,
            None => return Err(Error::misuse(format!("there is no group {}: use the ids of registration", group.0))),
        }
        Ok(())
    }

    /// This rank's weight (its token count, say) in the average of the next steps, until set again, with `average = "weight"`.
    /// 0 is legal on some ranks. Of ranks that share a copy of the model the first one's counts. The null device hears no weight.
    ///
    /// # Errors
    /// Another way of averaging, or a weight that is negative or not finite.
    pub fn set_weight(&mut self, weight: f64) -> Result<(), Error> {
        if self.config.average != Average::Weight && self.config.device_name() != "null" {
            return Err(Error::misuse("weights are only read with `average = \"weight\"` in the configuration"));
        }
        if !usable(weight) {
            return Err(Error::misuse(format!("a weight of {weight}: it must be finite and not negative")));
        }
        self.weight = weight;
        Ok(())
    }

    /// Asks all ranks to stop: the outcome of the next step says so on every rank. Where that outcome is an error, the steps
    /// after it carry the wish on, until this rank has looked at an outcome that told it.
    pub fn request_stop(&self) {
        self.shared.stop.flag.request();
    }

    /// The same wish as a handle, for other threads and signal handlers.
    pub fn stop_flag(&self) -> StopFlag {
        self.shared.stop.flag.clone()
    }

    /// Declares this rank busy, with an evaluation or a checkpoint, say, until what is returned is dropped. Peers that wait
    /// for it in a collective warn every minute, with rank and reason, instead of failing by `deadlines.collective_s`; they
    /// fail once `limit` has passed too. A rank whose process is dead is still found, by `deadlines.silence_s`.
    ///
    /// ```no_run
    /// # fn f(engine: &gatherflow::Engine) {
    /// let busy = engine.busy("saves a checkpoint", std::time::Duration::from_secs(3600));
    /// // Write files, evaluate.
    /// drop(busy);
    /// # }
    /// ```
    pub fn busy(&self, reason: impl Into<String>, limit: Duration) -> Busy {
        self.shared.session.busy(reason, limit)
    }

    /// The loss scale that the next backward must carry; 1 without a scaler. With the dynamic scaler it waits for the
    /// outcome of the last step, or with `skip = "device"` until the device has judged that step.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn loss_scale(&self) -> Result<f32, Error> {
        Ok(match self.config.scaler {
            ScalerKind::None => 1.0,
            ScalerKind::Constant => self.config.scale as f32,
            ScalerKind::Dynamic => self.shared.session.loss_scale()?,
        })
    }

    /// Takes a step: reduces what is left to reduce, updates this rank's shards, gathers the parameters (before it
    /// returns with `overlap = "none"`, under the next forward otherwise). It blocks only while `steps_in_flight`
    /// outcomes are unknown.
    ///
    /// # Errors
    /// A live owned guard, by the name of its parameter; a learning rate that is not usable; parameters that are swapped; a
    /// closed engine; the first cause of a fatal failure. What happened to the step itself is told by its [outcome](StepHandle::outcome).
    pub fn step(&mut self) -> Result<StepHandle, Error> {
        self.shared.check_open()?;
        self.shared.check_not_swapped()?;
        self.look_at_outcomes()?;
        let possible = self.steps() - self.unknown_from + 1;
        let rows = self.lrs.iter().zip(&self.shared.model.groups).zip(&self.known_t).enumerate();
        let lrs = rows
            .map(|(index, ((lr, group), t))| lr.row(group.lr_multiplier, t + 1, possible, index))
            .collect::<Result<_, _>>()?;
        let alike = self.rates_hash();
        self.shared.end_guards()?;

        let gradients = &self.shared.gradients;
        let leftovers = gradients.leftovers(|p| self.params()[p.index()].options.trainable);
        if self.config.unused == Unused::Error
            && let Some(param) = leftovers.unwritten.first()
        {
            gradients.spoil(Spoiled::Unused { param: param.0 });
        }
        let number = self.unknown_from + possible - 1;
        let stop = self.shared.stop.carry(number);
        // The ranks that share a copy of the model have the same data: it weighs once.
        let weight = if self.model_parallel().0 == 0 { self.weight } else { 0.0 };
        let host = HostVerdict { spoiled: gradients.spoiled(), weight, stop, alike };
        gradients.reset();
        tracing::debug!(
            target: "gatherflow::engine",
            rank = self.shared.rank,
            step = number,
            unwritten = leftovers.unwritten.len(),
            unfinished = leftovers.unfinished.len(),
            "step"
        );
        let step = self.shared.session.step(StepRequest {
            lrs,
            host,
            unwritten: leftovers.unwritten,
            unfinished: leftovers.unfinished,
        })?;
        Ok(StepHandle::new(&self.shared, step))
    }

    /// A hash of the learning rates, which must be alike on all ranks. Ranks may know of different outcomes, so schedules are asked
    /// for the t that this step would have if all before it had been updated. Where some were skipped that is ahead of the real t,
    /// and what differs is found early.
    fn rates_hash(&self) -> u64 {
        let t = self.steps_of_the_job().saturating_add(1);
        let mut hash = Fnv::new();
        hash.words(self.lrs.iter().map(|lr| lr.at(t).to_bits()));
        hash.finish()
    }

    /// Steps since training began, those behind a loaded state included.
    fn steps_of_the_job(&self) -> u64 {
        self.resumed.0.saturating_add(self.steps() - self.resumed.1)
    }

    /// Brings t up to what is known, without waiting.
    fn look_at_outcomes(&mut self) -> Result<(), Error> {
        let session = &self.shared.session;
        while self.unknown_from < session.finished_steps() {
            if session.outcome(self.unknown_from)?.report.updated {
                self.known_t.iter_mut().for_each(|t| *t += 1);
            }
            self.unknown_from += 1;
        }
        Ok(())
    }

    /// Forgets the gradients written so far in this step, so that the next write overwrites. Never needed, and repeatable.
    /// An abandoned gradient is forgotten too, and the step can be begun anew, unless its last microbatch has begun.
    /// With `first_gather = "zero_grad"` the gathers of the newest parameters start here.
    ///
    /// # Errors
    /// By name, a gradient that is being written, or that backward of the last microbatch has completed; the first cause of a fatal
    /// failure. This is stricter than SPEC P9, which allows it until the step's first reduce is issued: a complete gradient is
    /// reported to its bucket at once, and no report is taken back, whether the reduce begins then, waits for other gradients of the
    /// bucket or, without `overlap_grad_reduce`, for `step`.
    pub fn zero_grad(&mut self) -> Result<(), Error> {
        self.shared.check_open()?;
        self.shared.check_alive()?;
        let forgotten = self.shared.gradients.forget_writes().map_err(|(param, refused)| {
            Error::misuse(match refused {
                Refused::GuardAlive => "a gradient guard of it is alive: complete it before zero_grad",
                Refused::Complete => {
                    "backward of the last microbatch has completed its gradient, which now counts in this step: call zero_grad \
                     before that backward, or not at all"
                }
            })
                .on_rank(self.rank())
                .of_parameter(&*self.params()[param.index()].name)
        });
        forgotten.inspect(|()| self.shared.session.zeroed())
    }

    /// Demands and awaits all pending gathers: evaluation, checkpoints and reads of everything are then free of waits.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    #[doc(alias = "finish_param_sync")]
    pub fn ensure_params_ready(&self) -> Result<(), Error> {
        self.shared.check_open()?;
        Ok(self.shared.session.all_ready()?)
    }

    /// Demands and awaits the pending gathers of one chunk.
    ///
    /// # Errors
    /// An unknown chunk, or the first cause of a fatal failure.
    #[doc(alias = "finish_param_sync")]
    pub fn ensure_chunk_ready(&self, chunk: ChunkId) -> Result<(), Error> {
        let pass = self.pass(chunk, 0, false, Mode::Eval)?;
        let units = self.shared.model.units.iter().enumerate().filter(|(_, unit)| unit.chunk == chunk);
        for (index, _) in units {
            pass.reenter(UnitId::from_index(index))?;
        }
        Ok(())
    }

    /// Begins the gathers that a unit needs, and those before them in gather order, on all ranks; waits for nothing. For an
    /// executor that knows early where forward goes next: entering the unit later then waits less, or not at all. It counts as
    /// demand, so credits (overlap window) reach beyond it, and in overlap chain it lets several gathers run at once. Nothing
    /// happens where the parameters are there already.
    ///
    /// # Errors
    /// An unknown unit, a closed engine, or the first cause of a fatal failure.
    pub fn prefetch(&self, unit: UnitId) -> Result<(), Error> {
        self.shared.check_open()?;
        if unit.index() >= self.shared.model.units.len() {
            let message = format!("there is no unit {}: use the ids that registration returned", unit.0);
            return Err(Error::misuse(message).on_rank(self.rank()));
        }
        Ok(self.shared.session.prefetch(unit)?)
    }

    /// Reads a parameter at any time: waits until it is there.
    ///
    /// # Errors
    /// An unknown id, another dtype, or the first cause of a fatal failure.
    pub fn read<T: Element>(&self, param: ParamId) -> Result<Read<'_, T>, Error> {
        self.shared.check_open()?;
        self.shared.param(param)?;
        self.shared.session.param_ready(param)?;
        Read::new(&self.shared, param)
    }

    /// Is ready when the parameter can be read without waiting.
    pub fn ready(&self, param: ParamId) -> Ready<'_> {
        Ready { shared: &self.shared, param }
    }

    /// A hash (FNV-1a, 64 bits) of all parameters' bytes in registration order. Equal on all ranks that hold the same ones.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn params_hash(&self) -> Result<u64, Error> {
        self.ensure_params_ready()?;
        let mut hash = Fnv::new();
        for info in self.params() {
            let lease = self.shared.lease_bytes(info.id)?;
            hash.bytes(lease.as_bytes());
        }
        Ok(hash.finish())
    }

    /// Totals of this rank: gathers, reduces, skipped steps, bytes gathered ahead of demand at most.
    pub fn counters(&self) -> Counters {
        self.shared.session.counters()
    }

    /// Times of the finished steps so far, as in [`Engine::times`], summed up.
    pub fn report(&mut self) -> Report {
        Report::of(self.times())
    }

    /// Times of the finished steps so far, of the last 100 000 (fewer where these waited for over a million buckets). Call this (or
    /// [`Engine::report`]) at least every 128 steps to have all of them: of steps that nobody asked about, only the newest 128 to
    /// 256 are kept.
    pub fn times(&mut self) -> &[StepTimes] {
        const KEPT: usize = 100_000;
        const WAITS_KEPT: usize = 1_000_000;
        self.times.extend(self.shared.session.take_times());
        let mut waits = 0;
        let newest = self.times.iter().rev().take(KEPT);
        let kept = newest.take_while(|times| {
            waits += times.waited.len();
            waits <= WAITS_KEPT
        });
        let surplus = self.times.len() - kept.count();
        self.times.drain(..surplus);
        &self.times
    }

    /// Ends the run: waits for all pending gathers and tells the other ranks. Repeatable: it then says the same again.
    /// Outcomes, times and counters can still be read; everything else returns
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed), or the first cause where there was one.
    ///
    /// # Errors
    /// A live owned guard, by the name of its parameter, or the first cause of a fatal failure.
    pub fn close(&mut self) -> Result<(), Error> {
        if !self.shared.is_closed() {
            self.shared.check_no_guards("close")?;
            self.shared.close();
        }
        Ok(self.shared.session.close()?)
    }
}

impl Drop for Engine {
    /// Owned guards and handles may live on elsewhere; the run ends here all the same.
    fn drop(&mut self) {
        self.shared.close();
        self.shared.session.abandon();
    }
}

/// See [`Engine::ready`].
#[derive(Debug)]
pub struct Ready<'e> {
    shared: &'e Shared,
    param: ParamId,
}

impl Future for Ready<'_> {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = self.shared.check_open().and_then(|()| self.shared.param(self.param)) {
            return Poll::Ready(Err(error));
        }
        self.shared.session.poll_ready(self.param, context.waker()).map_err(Error::from)
    }
}
