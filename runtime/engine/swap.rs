//! Parameters swapped in from outside, and back (SPEC P4): evaluate an average of weights, or another policy's, in the
//! engine's own memory.
//!
//! What was there is kept aside, bit for bit; an f32 parameter is its own master, so that is what the optimizer goes on from.
//! Until it is back no step and no gradient is possible: by types while [`Swapped`] lives, by a flag after it was forgotten or
//! could not put everything back.

use super::Engine;
use super::start::{ParamMut, param_memory};
use crate::error::Error;
use crate::model::ParamInfo;

/// The engine while other parameters are in its memory. Dropping it, or [`Swapped::back`], puts the trained ones back.
///
/// ```compile_fail,E0499
/// # fn f(mut engine: gatherflow::Engine) -> Result<(), gatherflow::Error> {
/// let swapped = engine.swap_params(|_, out| out.fill_with(|_| 0.0))?;
/// engine.step()?;
/// drop(swapped);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Swapped<'e>(&'e mut Engine);

impl Engine {
    /// Puts other parameters into the engine's memory, on this rank alone if need be, for evaluation: `write` is called once per
    /// parameter, in registration order, and finds the trained one. Waits until all parameters are there, and keeps them aside
    /// (as many bytes as all parameters have, beside what the plan says). Passes of what is returned are for evaluation.
    ///
    /// ```no_run
    /// # fn f(mut engine: gatherflow::Engine, average: Vec<Vec<f32>>, chunk: gatherflow::ChunkId)
    /// # -> Result<(), gatherflow::Error> {
    /// let swapped = engine.swap_params(|param, out| out.fill_with(|i| average[param.id.index()][i]))?;
    /// let pass = swapped.pass(chunk, 0, false, gatherflow::Mode::Eval)?;
    /// // Evaluate.
    /// drop(pass);
    /// swapped.back()?;
    /// engine.step()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A live owned guard, by the name of its parameter; parameters that are swapped already; a closed engine; the first cause
    /// of a fatal failure.
    pub fn swap_params(&mut self, mut write: impl FnMut(&ParamInfo, ParamMut<'_>)) -> Result<Swapped<'_>, Error> {
        self.shared.check_not_swapped()?;
        self.ensure_params_ready()?;
        // In this order: no owned pass of training reads what is not there any more.
        self.shared.set_swapped(true);
        let guards = self.shared.check_no_guards("swap_params");
        let kept = guards.and_then(|()| self.copies()).inspect_err(|_| self.shared.set_swapped(false))?;
        self.kept = Some(kept);
        // What `write` leaves behind by an error or a panic is put back.
        let swapped = Swapped(self);
        for info in swapped.0.params() {
            let mut lease = swapped.0.shared.lease_to_write(info.id)?;
            write(info, param_memory(info.dtype, &mut lease).map_err(|e| swapped.0.shared.lease_error(info, &e))?);
        }
        Ok(swapped)
    }

    fn copies(&self) -> Result<Vec<Box<[u8]>>, Error> {
        let leases = self.params().iter().map(|info| self.shared.lease_bytes(info.id));
        leases.map(|lease| Ok(lease?.as_bytes().into())).collect()
    }

    /// Puts the trained parameters back, where [`Swapped`] was forgotten or met a live guard. Nothing happens where none are
    /// swapped.
    ///
    /// # Errors
    /// A live owned guard, by the name of its parameter: drop it and call again.
    pub fn restore_params(&mut self) -> Result<(), Error> {
        let Some(kept) = &self.kept else { return Ok(()) };
        self.shared.check_no_guards("putting the trained parameters back")?;
        for (info, bytes) in self.params().iter().zip(kept) {
            let mut lease = self.shared.lease_to_write(info.id)?;
            let memory = lease.as_mut_bytes().map_err(|e| self.shared.lease_error(info, &e))?;
            memory.copy_from_slice(bytes);
        }
        self.kept = None;
        self.shared.set_swapped(false);
        Ok(())
    }
}

impl Swapped<'_> {
    /// Puts the trained parameters back, as dropping it does, and says whether that worked.
    ///
    /// # Errors
    /// As [`Engine::restore_params`]; until that was called with success, the engine refuses to train.
    pub fn back(self) -> Result<(), Error> {
        // The drop that follows finds nothing to do, or tries again and fails alike.
        self.0.restore_params()
    }
}

impl std::ops::Deref for Swapped<'_> {
    type Target = Engine;
    fn deref(&self) -> &Engine {
        self.0
    }
}

impl Drop for Swapped<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.restore_params() {
            tracing::warn!(target: "gatherflow::engine", rank = self.0.rank(), %error, "swapped parameters stay");
        }
    }
}
