//! One microbatch through one chunk: forward and backward, with guards that borrow it.
//!
//! A [`Pass`] is `Sync`: several threads may enter units of it. Entering a unit whose parameters are there costs an id
//! check, an atomic version check and, in the last microbatch, one counter; nothing is allocated. It fails where an id is
//! not one of this chunk's, where backward outnumbers forward, and with the first cause after a fatal failure.

use crate::actors::{Element, ParamId, UnitId};
use crate::error::Error;
use crate::guard::{Grad, Read};
use crate::model::ChunkId;
use crate::shared::Shared;

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forward and backward.
    Train,
    /// Forward only; legal at any time between steps, in mid-accumulation too.
    Eval,
}

/// One microbatch through one chunk. See [`Engine::pass`](crate::Engine::pass).
///
/// It borrows the engine, so `step` waits until it is gone:
///
/// ```compile_fail,E0502
/// # fn f(mut engine: gatherflow::Engine, chunk: gatherflow::ChunkId) -> Result<(), gatherflow::Error> {
/// let pass = engine.pass(chunk, 0, true, gatherflow::Mode::Train)?;
/// engine.step()?;
/// drop(pass);
/// # Ok(()) }
/// ```
///
/// and it cannot outlive it:
///
/// ```compile_fail,E0597
/// # fn f(make: impl Fn() -> gatherflow::Engine, chunk: gatherflow::ChunkId) -> Result<(), gatherflow::Error> {
/// let pass = {
///     let engine = make();
///     engine.pass(chunk, 0, true, gatherflow::Mode::Train)?
/// };
/// pass.mode();
/// # Ok(()) }
/// ```
///
/// nor go to a thread that may (a scoped one it can go to; [`OwnedPass`](crate::OwnedPass) can go anywhere):
///
/// ```compile_fail,E0597
/// # fn f(engine: gatherflow::Engine, chunk: gatherflow::ChunkId, unit: gatherflow::UnitId) -> Result<(), gatherflow::Error> {
/// let pass = engine.pass(chunk, 0, true, gatherflow::Mode::Train)?;
/// std::thread::spawn(move || drop(pass.enter(unit)));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pass<'e> {
    shared: &'e Shared,
    chunk: ChunkId,
    mode: Mode,
    counts: bool,
}

impl<'e> Pass<'e> {
    pub(crate) fn new(
        shared: &'e Shared,
        chunk: ChunkId,
        microbatch: usize,
        last: bool,
        mode: Mode,
    ) -> Result<Self, Error> {
        let counts = begin(shared, chunk, microbatch, last, mode)?;
        Ok(Self { shared, chunk, mode, counts })
    }

    /// What it is for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Enters a unit in forward: waits until its parameters are there.
    ///
    /// # Errors
    /// A unit of another chunk, or the first cause of a fatal failure.
    pub fn enter(&self, unit: UnitId) -> Result<UnitGuard<'_>, Error> {
        self.shared.enter(self.chunk, unit, self.counts)?;
        Ok(UnitGuard { shared: self.shared, unit })
    }

    /// Enters a unit again to recompute its activations for backward; this does not count as a use of its parameters.
    ///
    /// # Errors
    /// As [`Pass::enter`].
    pub fn reenter(&self, unit: UnitId) -> Result<UnitGuard<'_>, Error> {
        self.shared.enter(self.chunk, unit, false)?;
        Ok(UnitGuard { shared: self.shared, unit })
    }

    /// Enters a unit in backward. Dropping what is returned, or [`Back::leave`], is leaving it; but where a panic drops it,
    /// every rank skips the step, as with a gradient guard that is dropped without `complete`.
    ///
    /// # Errors
    /// A unit of another chunk, a pass for evaluation, or more backwards than forwards in the last microbatch.
    pub fn backward(&self, unit: UnitId) -> Result<Back<'_>, Error> {
        check_trains(self.shared, self.mode)?;
        self.shared.begin_backward(self.chunk, unit, self.counts)?;
        Ok(Back { shared: self.shared, unit, counts: self.counts, left: false })
    }

    /// Reads a parameter outside its units: waits until it is there.
    ///
    /// # Errors
    /// An unknown id, another dtype, or the first cause of a fatal failure.
    pub fn read<T: Element>(&self, param: ParamId) -> Result<Read<'_, T>, Error> {
        self.shared.param(param)?;
        self.shared.session.param_ready(param)?;
        Read::new(self.shared, param)
    }
}

/// Begins a pass. Whether it counts uses: only the last microbatch of a training step does.
pub(crate) fn begin(shared: &Shared, chunk: ChunkId, microbatch: usize, last: bool, mode: Mode) -> Result<bool, Error> {
    shared.check_open()?;
    tracing::trace!(target: "gatherflow::pass", rank = shared.rank, step = shared.steps(), chunk = chunk.0, microbatch, last, ?mode);
    if chunk.0 as usize >= shared.model.chunk_count() {
        return Err(Error::misuse(format!("there is no chunk {}: use the ids that registration returned", chunk.0))
            .on_rank(shared.rank));
    }
    shared.check_alive()?;
    if mode == Mode::Eval {
        return Ok(false);
    }
    shared.check_not_swapped()?;
    if !shared.gradients.begin_pass(chunk.0 as usize, last) {
        return Err(Error::misuse(format!(
            "chunk {} has had its last microbatch of this step: call step before training on microbatch {microbatch}",
            chunk.0
        ))
        .on_rank(shared.rank)
        .at_step(shared.steps()));
    }
    Ok(last)
}

pub(crate) fn check_trains(shared: &Shared, mode: Mode) -> Result<(), Error> {
    if mode == Mode::Train {
        return Ok(());
    }
    Err(Error::misuse("this pass is for evaluation and has no backward: ask for a pass with Mode::Train")
        .on_rank(shared.rank))
}

/// A unit that forward has entered.
#[derive(Debug)]
pub struct UnitGuard<'p> {
    shared: &'p Shared,
    unit: UnitId,
}

impl UnitGuard<'_> {
    /// A parameter of this unit, in its own dtype.
    ///
    /// # Errors
    /// A parameter that the unit was not registered with, or another dtype.
    pub fn read<T: Element>(&self, param: ParamId) -> Result<Read<'_, T>, Error> {
        check_member(self.shared, self.unit, param)?;
        Read::new(self.shared, param)
    }
}

/// A unit that backward has entered. Dropping it is leaving the unit: gradients that are complete by that go on their way.
/// A panic through it spoils the step. An early return (`?`) does not, and what it did not write counts as zero: do not call
/// `step` after it.
#[derive(Debug)]
pub struct Back<'p> {
    shared: &'p Shared,
    unit: UnitId,
    counts: bool,
    left: bool,
}

impl Back<'_> {
    /// A parameter of this unit, in its own dtype.
    ///
    /// # Errors
    /// As [`UnitGuard::read`], and the first cause of a fatal failure.
    pub fn read<T: Element>(&self, param: ParamId) -> Result<Read<'_, T>, Error> {
        check_member(self.shared, self.unit, param)?;
        self.shared.session.param_ready(param)?;
        Read::new(self.shared, param)
    }

    /// The gradient of a parameter of this unit. The first write of a step overwrites, later ones accumulate
    /// ([`Grad::mode`]).
    ///
    /// # Errors
    /// A parameter that the unit was not registered with, that is frozen, has another gradient dtype, or whose gradient
    /// is being written already; the first cause of a fatal failure.
    pub fn grad<T: Element>(&self, param: ParamId) -> Result<Grad<'_, T>, Error> {
        check_member(self.shared, self.unit, param)?;
        Grad::new(self.shared, param, false)
    }

    /// As [`Back::grad`], for sparse writers: always to be accumulated into, zeroed before the first write of a step.
    ///
    /// # Errors
    /// As [`Back::grad`].
    pub fn grad_zeroed<T: Element>(&self, param: ParamId) -> Result<Grad<'_, T>, Error> {
        check_member(self.shared, self.unit, param)?;
        Grad::new(self.shared, param, true)
    }

    /// Leaves the unit; dropping does the same but cannot tell a failure.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn leave(mut self) -> Result<(), Error> {
        self.left = true;
        self.shared.left(self.unit, self.counts)
    }
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        if std::thread::panicking() {
            self.shared.abandon_unit(self.unit);
        } else {
            // A failure here is fatal and meets the caller's next call.
            let _ = self.shared.left(self.unit, self.counts);
        }
    }
}

fn check_member(shared: &Shared, unit: UnitId, param: ParamId) -> Result<(), Error> {
    let info = shared.param(param)?;
    if info.units.contains(&unit) {
        return Ok(());
    }
    let unit = &shared.model.units[unit.index()].name;
    Err(Error::misuse(format!(
        "unit `{unit}` was not registered with it: add it with use_param, or read it through the pass"
    ))
    .on_rank(shared.rank)
    .of_parameter(&*info.name))
}
