//! Parameters written from outside, between steps, and masters that follow them (SPEC G4).

use super::Engine;
use super::start::{ParamMut, param_memory};
use crate::actors::ParamId;
use crate::error::Error;

impl Engine {
    /// Writes a parameter from outside: weights to fine-tune from, say. Waits until this version of it is there. Write the same
    /// on every rank, of every pipeline stage that has a copy (other copies on this rank follow by themselves), then call
    /// [`Engine::reload_masters`] on every rank; without it the next step puts a 16-bit parameter back to what its master says.
    ///
    /// # Errors
    /// An unknown id, a live owned guard, by the name of its parameter, a closed engine, or the first cause of a fatal failure.
    pub fn write_param(&mut self, param: ParamId, write: impl FnOnce(ParamMut<'_>)) -> Result<(), Error> {
        self.shared.check_open()?;
        self.shared.check_not_swapped()?;
        let info = self.shared.param(param)?;
        self.shared.check_no_guards("write_param")?;
        self.shared.session.param_ready(param)?;
        let mut lease = self.shared.lease_to_write(param)?;
        write(param_memory(info.dtype, &mut lease).map_err(|e| self.shared.lease_error(info, &e))?);
        for copy in self.plan().copies_of(param).filter(|copy| *copy != param) {
            self.shared.session.param_ready(copy)?;
            let mut other = self.shared.lease_to_write(copy)?;
            let bytes = other.as_mut_bytes().map_err(|e| self.shared.lease_error(info, &e))?;
            bytes.copy_from_slice(lease.as_bytes());
        }
        Ok(())
    }

    /// Makes the optimizer's f32 masters anew from the parameters, after [`Engine::write_param`]. Moments and step counts stay.
    /// Every rank must call it between the same two steps: ranks compare a hash of all parameters first.
    ///
    /// # Errors
    /// Parameters that differ between ranks: the same error on every rank, no master has changed, and the engine stays usable.
    /// A live owned guard, by the name of its parameter. A rank that does not call it, or the first cause of a fatal failure.
    pub fn reload_masters(&mut self) -> Result<(), Error> {
        self.shared.check_open()?;
        self.shared.check_not_swapped()?;
        self.shared.check_no_guards("reload_masters")?;
        match self.shared.session.reload_masters()? {
            None => Ok(()),
            Some(difference) => Err(Error::misuse(format!(
                "the parameters differ between ranks: {difference}; write the same on every rank, then reload the masters"
            ))
            .on_rank(self.rank())
            .at_step(self.steps())),
        }
    }
}
