//! Optimizer state taken from a rank and put into it, in the coordinates of parameters (SPEC D1, L7).
//!
//! Both happen between steps, once all outcomes are known and all gathers are done: then nobody but the executor touches
//! masters, moments and the loss scaler. What comes next waits for the executor's stream: Adam as for any read of a parameter
//! (edge E3), the verdict as for a read of the loss scale (edge E7).

use std::sync::Arc;

use gatherflow_kernels::verdict::Scalars;
use gatherflow_kernels::{Access, AccessMode, BufRange, Cause, Failure, FailureKind, Lease, LeaseError};

use super::start::Init;
use super::{Driver, Session};
use crate::action::{Edge, Letter};
use crate::control::Agreement;
use crate::optimizer::OptimizerMsg;
use crate::plan::{OwnedPiece, Rank};

/// What a rank that goes on from saved state takes over beside parameters, masters and moments.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// Updated steps, per group.
    pub t: Vec<u64>,
    /// Of these only scale, growth counter and hysteresis are taken.
    pub scaler: Scalars,
}

/// Gets each piece of a parameter that this rank owns, with its master and its first and second moments.
pub type SaveOwned<'a> = &'a mut dyn FnMut(&OwnedPiece, [&[f32]; 3]);

/// Fills, of each piece of a parameter that this rank owns, its master and its first and second moments.
pub type LoadOwned<'a> = &'a mut dyn FnMut(&OwnedPiece, [&mut [f32]; 3]);

impl Session {
    /// Waits for all outcomes and gathers, then calls back with the state of each owned piece. Returns the scalars after the
    /// last step.
    ///
    /// # Errors
    /// The first cause after a failure, which a lease of memory that somebody writes is too.
    pub fn save_state(&self, save: SaveOwned<'_>) -> Result<Scalars, Cause> {
        self.settle()?;
        for bucket in self.plan.buckets() {
            let memory = self.bucket_memory(bucket.id);
            let lease = |range| self.own_lease(range, AccessMode::Read);
            let leases = [lease(memory.master)?, lease(memory.exp_avg)?, lease(memory.exp_avg_sq)?];
            let [master, first, second] = leases.each_ref().map(|lease| lease.as_slice::<f32>());
            let state = master.and_then(|master| Ok([master, first?, second?])).map_err(|e| self.lost(&e))?;
            for piece in self.plan.owned(Rank(self.rank()), bucket.id) {
                save(&piece, state.map(|values| &values[piece.in_shard.start..piece.in_shard.end]));
            }
        }
        self.read_scalars()
    }

    /// Waits until every rank has come with what it loads, and returns what they disagree about, the same on each. Nothing has
    /// changed by then.
    ///
    /// # Errors
    /// A rank that does not come within the deadline of collectives, or the first cause after a failure.
    pub fn agree_on_state(&self, lines: Agreement) -> Result<Option<String>, Cause> {
        self.settle()?;
        if self.plan.ranks() == 1 || self.config.driver == Driver::Inline {
            return Ok(None);
        }
        self.agree(lines, "load the state")
    }

    /// Goes on from saved state: fills every parameter (frozen ones excepted, which have none) and the state of each owned piece,
    /// and takes over step counts and loss scaler. Every rank must call it, between the same two steps, with the same state
    /// ([`Session::agree_on_state`]).
    ///
    /// # Errors
    /// The first cause after a failure, which a lease of memory that somebody uses is too: state is then half loaded.
    pub fn load_state(&self, resumed: Resumed, params: Init<'_>, load: LoadOwned<'_>) -> Result<(), Cause> {
        self.settle()?;
        for param in self.plan.params().iter().filter(|param| param.trainable) {
            params(param.id, &mut self.own_lease(self.param_range(param.id), AccessMode::Write)?)?;
        }
        for bucket in self.plan.buckets() {
            let memory = self.bucket_memory(bucket.id);
            let lease = |range| self.own_lease(range, AccessMode::Write);
            let mut leases = [lease(memory.master)?, lease(memory.exp_avg)?, lease(memory.exp_avg_sq)?];
            let [master, first, second] = leases.each_mut().map(|lease| lease.as_mut_slice::<f32>());
            let mut state = master.and_then(|master| Ok([master, first?, second?])).map_err(|e| self.lost(&e))?;
            for piece in self.plan.owned(Rank(self.rank()), bucket.id) {
                load(&piece, state.each_mut().map(|values| &mut values[piece.in_shard.start..piece.in_shard.end]));
            }
        }
        self.load_scaler(&resumed.scaler)?;
        self.stage_params()?;
        self.post.post(Letter::Optimizer(OptimizerMsg::Resume { t: resumed.t }));
        Ok(())
    }

    /// All outcomes are known and all gathers are done, and so is every Adam before them.
    fn settle(&self) -> Result<(), Cause> {
        if let Some(last) = self.steps().checked_sub(1) {
            self.outcome(last)?;
        }
        self.all_ready()
    }

    fn load_scaler(&self, scaler: &Scalars) -> Result<(), Cause> {
        let Scalars { scale, growth_counter, hysteresis, .. } = *scaler;
        // How many steps this device has updated stays: Adam's rows count on from there.
        let scalars = Scalars { scale, growth_counter, hysteresis, ..self.read_scalars()? };
        let mut lease = self.own_lease(self.hands.lowering.scalars(), AccessMode::Write)?;
        lease.as_mut_bytes().map_err(|e| self.lost(&e))?.copy_from_slice(&scalars.to_bytes());
        drop(lease);
        *self.scale_read.lock() = Some(self.hands.device.record(self.executor()));
        *self.loaded_scale.lock() = Some((self.steps(), scale));
        Ok(())
    }

    /// What the next gathers send has the loaded parameters too, where that is not in their own memory.
    fn stage_params(&self) -> Result<(), Cause> {
        let (device, streams) = (self.hands.device.as_ref(), self.hands.streams);
        let failed = |e| self.ended(&self.hands.failure(&e));
        let loaded = device.record(streams.executor);
        self.hands.wait(streams.optimizer, Edge::E3, &loaded).map_err(failed)?;
        for bucket in self.plan.buckets() {
            if let Some(work) = self.hands.lowering.stage_params(bucket.id) {
                device.enqueue(streams.optimizer, work).map_err(failed)?;
            }
        }
        self.wait_event(Edge::E3, &device.record(streams.optimizer))
    }

    /// The scalars after the last verdict, which the executor's stream has reached.
    pub(super) fn read_scalars(&self) -> Result<Scalars, Cause> {
        let lease = self.own_lease(self.hands.lowering.scalars(), AccessMode::Read)?;
        let bytes = lease.as_bytes().first_chunk::<{ Scalars::BYTES }>().map(Scalars::from_bytes);
        drop(lease);
        *self.scale_read.lock() = Some(self.hands.device.record(self.executor()));
        bytes.ok_or_else(|| self.ended(&self.device_failure("the step's scalars are too short".into())))
    }

    fn own_lease(&self, range: BufRange, mode: AccessMode) -> Result<Lease, Cause> {
        self.hands.device.access(self.executor(), Access { range, mode });
        self.hands.device.lease(range, mode).map_err(|e| self.lost(&e))
    }

    fn lost(&self, error: &LeaseError) -> Cause {
        self.ended(&self.device_failure(error.to_string()))
    }

    fn device_failure(&self, reason: String) -> Cause {
        Arc::new(Failure::new(FailureKind::Device, self.rank(), reason))
    }
}
