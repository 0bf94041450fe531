//! `'static` handles for adapters that cannot borrow: the same pass, checked at run time.
//!
//! An [`OwnedPass`] belongs to one step and is refused by name once that step was taken. Its guards are counted per
//! parameter; `step` returns an error naming the parameter while one lives (rule V3), and likewise while another thread is
//! about to leave a unit. It does not keep the engine alive.
//! A panic through one in mid-pass spoils the step, as one through [`Back`](crate::Back) does.

use std::sync::{Arc, Weak};

use crate::actors::{DType, Element, ParamId, UnitId};
use crate::error::Error;
use crate::guard::{OwnedGrad, OwnedRead};
use crate::model::{ChunkId, ParamInfo};
use crate::pass::{Mode, begin, check_trains};
use crate::shared::{Live, Shared};

/// One microbatch through one chunk, for custom operations that must be `'static`.
#[derive(Clone, Debug)]
pub struct OwnedPass {
    shared: Weak<Shared>,
    chunk: ChunkId,
    microbatch: usize,
    mode: Mode,
    counts: bool,
    step: u64,
}

impl OwnedPass {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        chunk: ChunkId,
        microbatch: usize,
        last: bool,
        mode: Mode,
    ) -> Result<Self, Error> {
        let counts = begin(shared, chunk, microbatch, last, mode)?;
        Ok(Self { shared: Arc::downgrade(shared), chunk, microbatch, mode, counts, step: shared.steps() })
    }

    /// What it is for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Enters a unit in forward: waits until its parameters are there.
    ///
    /// # Errors
    /// A pass of an earlier step, a unit of another chunk, parameters that are swapped unless it is for evaluation, or the
    /// first cause of a fatal failure.
    pub fn enter(&self, unit: UnitId) -> Result<(), Error> {
        let shared = self.current()?;
        shared.enter(self.chunk, unit, false)?;
        if self.counts {
            let _held = self.hold_unit(&shared, unit)?;
            shared.gradients.entered(unit);
        }
        Ok(())
    }

    /// Enters a unit again to recompute its activations for backward; this does not count as a use.
    ///
    /// # Errors
    /// As [`OwnedPass::enter`].
    pub fn reenter(&self, unit: UnitId) -> Result<(), Error> {
        self.current()?.enter(self.chunk, unit, false)
    }

    /// Backward has left the unit: gradients that are complete by that go on their way.
    ///
    /// # Errors
    /// A pass of an earlier step or for evaluation, more leaves than entries in the last microbatch, or the first cause of
    /// a fatal failure.
    pub fn leave(&self, unit: UnitId) -> Result<(), Error> {
        let shared = self.current()?;
        check_trains(&shared, self.mode)?;
        let _held = self.hold_unit(&shared, unit)?;
        shared.begin_backward(self.chunk, unit, self.counts)?;
        shared.left(unit, self.counts)
    }

    /// A parameter, in its own dtype: waits until it is there.
    ///
    /// # Errors
    /// A pass of an earlier step, an unknown id, another dtype, parameters that are swapped unless it is for evaluation, or the
    /// first cause of a fatal failure.
    pub fn read<T: Element>(&self, param: ParamId) -> Result<OwnedRead<T>, Error> {
        let live = self.hold(param)?;
        live.shared.session.param_ready(param)?;
        OwnedRead::new(live)
    }

    /// The element type of a parameter.
    ///
    /// # Errors
    /// An engine that is gone, or an unknown id.
    pub fn dtype(&self, param: ParamId) -> Result<DType, Error> {
        Ok(self.shared.upgrade().ok_or_else(Error::closed)?.param(param)?.dtype)
    }

    /// The element type of a parameter's gradient.
    ///
    /// # Errors
    /// An engine that is gone, or an unknown id.
    pub fn grad_dtype(&self, param: ParamId) -> Result<DType, Error> {
        Ok(self.shared.upgrade().ok_or_else(Error::closed)?.param(param)?.grad_dtype())
    }

    /// A parameter as it was registered.
    ///
    /// # Errors
    /// An engine that is gone, or an unknown id.
    pub fn info(&self, param: ParamId) -> Result<ParamInfo, Error> {
        Ok(self.shared.upgrade().ok_or_else(Error::closed)?.param(param)?.clone())
    }

    /// The gradient of a parameter. The first write of a step overwrites, later ones accumulate ([`OwnedGrad::mode`]).
    ///
    /// # Errors
    /// A pass of an earlier step or for evaluation; a parameter that is frozen, has another gradient dtype, or whose
    /// gradient is being written already; the first cause of a fatal failure.
    pub fn grad<T: Element>(&self, param: ParamId) -> Result<OwnedGrad<T>, Error> {
        self.write(param, false)
    }

    /// As [`OwnedPass::grad`], for sparse writers: always to be accumulated into, zeroed before the first write of a step.
    ///
    /// # Errors
    /// As [`OwnedPass::grad`].
    pub fn grad_zeroed<T: Element>(&self, param: ParamId) -> Result<OwnedGrad<T>, Error> {
        self.write(param, true)
    }

    fn write<T: Element>(&self, param: ParamId, zeroed: bool) -> Result<OwnedGrad<T>, Error> {
        let live = self.hold(param)?;
        check_trains(&live.shared, self.mode)?;
        OwnedGrad::new(live, zeroed)
    }

    /// Counts the guard first and looks at the step (and at swapped parameters) then, so that a concurrent `step` (or
    /// `swap_params`) sees one or the other.
    fn hold(&self, param: ParamId) -> Result<Live<Arc<Shared>>, Error> {
        let shared = self.current()?;
        shared.param(param)?;
        let live = Shared::hold(shared, param);
        self.check_current(&live.shared)?;
        Ok(live)
    }

    /// As [`OwnedPass::hold`], while a use of the unit is counted: one that a concurrent `step` overtook would count in the next
    /// step. Of a unit without parameters nobody asks.
    fn hold_unit<'s>(&self, shared: &'s Shared, unit: UnitId) -> Result<Option<Live<&'s Shared>>, Error> {
        let first = shared.unit_of(self.chunk, unit)?.params.first();
        let live = first.map(|param| Shared::hold(shared, *param));
        self.check_current(shared)?;
        Ok(live)
    }

    fn current(&self) -> Result<Arc<Shared>, Error> {
        let shared = self.shared.upgrade().ok_or_else(Error::closed)?;
        self.check_current(&shared)?;
        Ok(shared)
    }

    fn check_current(&self, shared: &Shared) -> Result<(), Error> {
        if self.mode == Mode::Train {
            shared.check_not_swapped()?;
        }
        self.check_step(shared)
    }

    fn check_step(&self, shared: &Shared) -> Result<(), Error> {
        shared.check_open()?;
        let now = shared.steps();
        if now == self.step {
            return Ok(());
        }
        Err(Error::misuse(format!(
            "this pass of chunk {}, microbatch {}, belongs to step {}, but the engine is at step {now}: ask for a new one",
            self.chunk.0, self.microbatch, self.step
        ))
        .on_rank(shared.rank)
        .at_step(now))
    }
}

impl Drop for OwnedPass {
    fn drop(&mut self) {
        if std::thread::panicking()
            && self.mode == Mode::Train
            && let Some(shared) = self.shared.upgrade()
            && self.check_step(&shared).is_ok()
        {
            shared.abandon_pass(self.chunk, self.counts);
        }
    }
}
