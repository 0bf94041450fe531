//! What an engine, its passes and its owned handles share on one rank.
//!
//! It turns ids into memory and keeps rule V3 where types cannot: a count of live guards per parameter, and the number of
//! the step they belong to. Guards hold leases; the count is what lets `step` refuse, naming the parameter, instead of
//! meeting a held lease. Reads and writes are told to the device (`access`) for its checker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::actors::{
    Access, AccessMode, BufRange, DType, Device, Element, FailureKind, Lease, ParamId, Session, Spoiled, StreamId,
    UnitId,
};
use crate::error::Error;
use crate::gradients::{Gradients, Refused};
use crate::guard::WriteMode;
use crate::model::{ChunkId, Model, ParamInfo, UnitInfo};
use crate::stop::Wish;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) session: Arc<Session>,
    pub(crate) model: Model,
    pub(crate) gradients: Gradients,
    device: Arc<dyn Device>,
    executor: StreamId,
    param_ranges: Box<[BufRange]>,
    grad_ranges: Box<[Option<BufRange>]>,
    live: Box<[AtomicU32]>,
    steps: AtomicU64,
    closed: AtomicBool,
    /// Parameters from outside are in the engine's memory.
    swapped: AtomicBool,
    pub(crate) stop: Wish,
}

impl Shared {
    pub(crate) fn new(rank: usize, session: Arc<Session>, model: Model) -> Self {
        let ids = || model.params().iter().map(|p| p.id);
        Self {
            rank,
            gradients: Gradients::new(model.params().len(), model.units.len(), model.chunk_count()),
            device: session.device().clone(),
            executor: session.executor(),
            param_ranges: ids().map(|id| session.param_range(id)).collect(),
            grad_ranges: ids().map(|id| session.grad_range(id)).collect(),
            live: ids().map(|_| AtomicU32::new(0)).collect(),
            steps: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            swapped: AtomicBool::new(false),
            stop: Wish::default(),
            session,
            model,
        }
    }

    /// The number of `step` calls so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if !self.closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        // The end of the actors is one too.
        let first = self.session.failed().filter(|cause| cause.kind != FailureKind::Closed);
        Err(first.map_or_else(|| Error::closed().on_rank(self.rank), Error::from))
    }

    /// The first cause, once there is one: also for calls that ask nothing of the actors.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        self.session.failed().map_or(Ok(()), |cause| Err(cause.into()))
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(crate) fn set_swapped(&self, swapped: bool) {
        self.swapped.store(swapped, Ordering::SeqCst);
    }

    /// Nothing trains on parameters that are not the trained ones.
    pub(crate) fn check_not_swapped(&self) -> Result<(), Error> {
        if self.swapped.load(Ordering::SeqCst) {
            let message = "other parameters are swapped in: drop what swap_params returned, or call restore_params";
            return Err(Error::misuse(message).on_rank(self.rank));
        }
        Ok(())
    }

    pub(crate) fn param(&self, param: ParamId) -> Result<&ParamInfo, Error> {
        self.model.params().get(param.index()).ok_or_else(|| {
            Error::misuse(format!("there is no parameter {}: use the ids that registration returned", param.0))
                .on_rank(self.rank)
        })
    }

    /// The unit, if it is one of this chunk.
    pub(crate) fn unit_of(&self, chunk: ChunkId, unit: UnitId) -> Result<&UnitInfo, Error> {
        match self.model.units.get(unit.index()) {
            Some(info) if info.chunk == chunk => Ok(info),
            other => Err(self.wrong_unit(chunk, unit, other)),
        }
    }

    #[cold]
    fn wrong_unit(&self, chunk: ChunkId, unit: UnitId, info: Option<&UnitInfo>) -> Error {
        Error::misuse(match info {
            Some(info) => {
                format!("unit `{}` is in chunk {}, but this pass is of chunk {}", info.name, info.chunk.0, chunk.0)
            }
            None => format!("there is no unit {}: use the ids that registration returned", unit.0),
        })
        .on_rank(self.rank)
    }

    /// Waits until the parameters of the unit are there, and counts the entry where that matters.
    pub(crate) fn enter(&self, chunk: ChunkId, unit: UnitId, counts: bool) -> Result<(), Error> {
        self.unit_of(chunk, unit)?;
        self.session.enter(unit)?;
        if counts {
            self.gradients.entered(unit);
        }
        Ok(())
    }

    pub(crate) fn begin_backward(&self, chunk: ChunkId, unit: UnitId, counts: bool) -> Result<(), Error> {
        let info = self.unit_of(chunk, unit)?;
        if counts && !self.gradients.backward(unit) {
            return Err(Error::misuse(format!(
                "backward of unit `{}` more often than forward entered it in the last microbatch (recomputation uses reenter)",
                info.name
            ))
            .on_rank(self.rank));
        }
        Ok(())
    }

    /// Backward has left the unit: parameters that are complete by that go on their way.
    pub(crate) fn left(&self, unit: UnitId, counts: bool) -> Result<(), Error> {
        if !counts {
            return Ok(());
        }
        self.gradients.left(unit);
        let mut first_error = Ok(());
        for param in &self.model.units[unit.index()].params {
            first_error = first_error.and(self.tell_if_complete(*param));
        }
        first_error
    }

    fn tell_if_complete(&self, param: ParamId) -> Result<(), Error> {
        let units = &self.model.params()[param.index()].units;
        match self.gradients.take_complete(param, units) {
            Some(event) => Ok(self.session.gradient_complete(param, event)?),
            None => Ok(()),
        }
    }

    pub(crate) fn check_dtype<T: Element>(&self, info: &ParamInfo, what: &str, dtype: DType) -> Result<(), Error> {
        if dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::misuse(format!("the {what} is {dtype}, but was asked for as {}", T::DTYPE))
            .on_rank(self.rank)
            .of_parameter(&*info.name))
    }

    /// Counts a guard of the parameter until the returned value is dropped.
    pub(crate) fn hold<S: std::ops::Deref<Target = Self>>(this: S, param: ParamId) -> Live<S> {
        this.live[param.index()].fetch_add(1, Ordering::SeqCst);
        Live { shared: this, param }
    }

    /// A read lease of a parameter that is ready.
    pub(crate) fn lease_param<T: Element>(&self, param: ParamId) -> Result<Lease, Error> {
        let info = self.param(param)?;
        self.check_dtype::<T>(info, "parameter", info.dtype)?;
        self.lease_bytes(param)
    }

    /// A read lease of a parameter that is ready, of any dtype.
    pub(crate) fn lease_bytes(&self, param: ParamId) -> Result<Lease, Error> {
        let access = Access { range: self.param_ranges[param.index()], mode: AccessMode::Read };
        self.lease(self.param(param)?, access)
    }

    /// A write lease of a parameter that is ready and that nobody reads.
    pub(crate) fn lease_to_write(&self, param: ParamId) -> Result<Lease, Error> {
        let access = Access { range: self.param_ranges[param.index()], mode: AccessMode::Write };
        self.lease(self.param(param)?, access)
    }

    /// Begins a write of a gradient: waits until its memory is free, leases it, prepares it.
    pub(crate) fn begin_write<T: Element>(&self, param: ParamId, zeroed: bool) -> Result<(Lease, WriteMode), Error> {
        self.check_not_swapped()?;
        let info = self.param(param)?;
        let name = || info.name.as_str();
        let Some(range) = self.grad_ranges[param.index()] else {
            return Err(Error::misuse("a frozen parameter has no gradient").on_rank(self.rank).of_parameter(name()));
        };
        self.check_dtype::<T>(info, "gradient", info.grad_dtype())?;
        let first = self.gradients.begin(param).map_err(|refused| {
            Error::misuse(match refused {
                Refused::GuardAlive => "a gradient guard of it is alive: complete it before asking for another",
                Refused::Complete => {
                    "its gradient is complete: in the last microbatch, backward has left every unit that uses it as often as \
                     forward had entered it. Let forward enter all of them, of every chunk, before backward leaves the last \
                     one, and let backward of earlier microbatches come before"
                }
            })
            .on_rank(self.rank)
            .of_parameter(name())
        })?;
        let lease =
            self.prepare::<T>(info, range, first, zeroed).inspect_err(|_| self.gradients.cancel(param, first))?;
        Ok((lease, if first && !zeroed { WriteMode::Overwrite } else { WriteMode::Accumulate }))
    }

    fn prepare<T: Element>(
        &self,
        info: &ParamInfo,
        range: BufRange,
        first: bool,
        zeroed: bool,
    ) -> Result<Lease, Error> {
        if first {
            self.session.gradient_free(info.id)?;
        }
        let mut lease = self.lease(info, Access { range, mode: AccessMode::Write })?;
        let memory = lease.as_mut_slice::<T>().map_err(|e| self.lease_error(info, &e))?;
        if first && zeroed {
            memory.fill(T::from_f32(0.0));
        } else if first && cfg!(debug_assertions) {
            memory.fill(T::from_f32(f32::NAN));
        }
        Ok(lease)
    }

    /// A write has ended, its lease is given back.
    pub(crate) fn end_write(&self, param: ParamId) -> Result<(), Error> {
        self.gradients.end(param, self.device.record(self.executor));
        self.tell_if_complete(param)
    }

    /// A guard was dropped without `complete`.
    pub(crate) fn abandon_write(&self, param: ParamId) {
        tracing::warn!(
            target: "gatherflow::gradients",
            rank = self.rank,
            step = self.steps(),
            bucket = self.session.plan().bucket_of(param).map(|bucket| bucket.0),
            param = %self.model.params()[param.index()].name,
            "a gradient was abandoned; every rank will skip this step"
        );
        self.gradients.spoil(Spoiled::Abandoned { param: param.0 });
        // A failure here is fatal and meets the caller's next call.
        let _ = self.end_write(param);
    }

    /// A panic goes through the unit's backward, whatever of its gradients is written by now.
    pub(crate) fn abandon_unit(&self, unit: UnitId) {
        let unit = &self.model.units[unit.index()];
        tracing::warn!(
            target: "gatherflow::gradients",
            rank = self.rank,
            step = self.steps(),
            unit = %unit.name,
            "a panic left backward; every rank will skip this step"
        );
        let trainable = unit.params.iter().find(|param| self.model.params()[param.index()].options.trainable);
        // Without one the step is spoiled all the same, by no name.
        self.gradients.spoil(Spoiled::Abandoned { param: trainable.map_or(u32::MAX, |param| param.0) });
    }

    /// A panic goes through a pass of this chunk: as [`Shared::abandon_unit`], for a unit that backward has not left. Uses are
    /// counted in the last microbatch; of an earlier one, any unit may be such.
    pub(crate) fn abandon_pass(&self, chunk: ChunkId, counts: bool) {
        let units = self.model.units.iter().enumerate().filter(|(_, unit)| unit.chunk == chunk);
        let mut ids = units.map(|(index, _)| UnitId::from_index(index));
        if let Some(unit) = ids.find(|unit| !counts || self.gradients.is_entered(*unit)) {
            self.abandon_unit(unit);
        }
    }

    fn lease(&self, info: &ParamInfo, access: Access) -> Result<Lease, Error> {
        self.device.access(self.executor, access);
        self.device.lease(access.range, access.mode).map_err(|e| self.lease_error(info, &e))
    }

    #[cold]
    pub(crate) fn lease_error(&self, info: &ParamInfo, error: &crate::actors::LeaseError) -> Error {
        Error::misuse(error.to_string()).on_rank(self.rank).of_parameter(&*info.name)
    }

    /// Ends the step for all guards: those that are asked for from now on belong to the next one.
    ///
    /// # Errors
    /// Names a parameter with a live guard; the step then goes on.
    pub(crate) fn end_guards(&self) -> Result<(), Error> {
        self.steps.fetch_add(1, Ordering::SeqCst);
        self.check_no_guards("step").inspect_err(|_| {
            self.steps.fetch_sub(1, Ordering::SeqCst);
        })
    }

    pub(crate) fn check_no_guards(&self, what: &str) -> Result<(), Error> {
        match self.live.iter().position(|live| live.load(Ordering::SeqCst) > 0) {
            None => Ok(()),
            Some(index) => Err(Error::misuse(format!("a guard of it is alive: drop it before {what}"))
                .on_rank(self.rank)
                .of_parameter(&*self.model.params()[index].name)),
        }
    }
}

/// A counted guard.
#[derive(Debug)]
pub(crate) struct Live<S: std::ops::Deref<Target = Shared>> {
    pub(crate) shared: S,
    pub(crate) param: ParamId,
}

impl<S: std::ops::Deref<Target = Shared>> Drop for Live<S> {
    fn drop(&mut self) {
        self.shared.live[self.param.index()].fetch_sub(1, Ordering::SeqCst);
    }
}
