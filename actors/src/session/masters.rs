//! Masters made anew from parameters that were written from outside (SPEC G4).

use std::sync::Arc;

use gatherflow_kernels::{Cause, Failure, FailureKind};

use super::start::{cast_masters, parameter_hashes};
use super::{Driver, Session};
use crate::action::Edge;
use crate::control::Agreement;

impl Session {
    /// Makes the f32 masters of the owned 16-bit parameters anew from the parameters, which must have the same bits on every
    /// rank that holds them; f32 parameters are their own masters. Moments and step counts stay. Every rank must call it, between the same two
    /// steps. Returns what ranks disagree about, the same on each; the masters are then as they were.
    ///
    /// # Errors
    /// A lease of a parameter that somebody writes, a rank that does not come within the deadline of collectives, or the first
    /// cause after a failure.
    pub fn reload_masters(&self) -> Result<Option<String>, Cause> {
        // All gathers of the newest version are over, and so is every Adam before them.
        self.all_ready()?;
        let (device, lowering, streams) = (self.hands.device.as_ref(), &self.hands.lowering, self.hands.streams);
        if self.plan.ranks() > 1 && self.config.driver == Driver::Actors {
            let lines = parameter_hashes("parameters", &self.plan, lowering, device)
                .map_err(|e| self.ended(&Arc::new(Failure::new(FailureKind::Device, self.rank(), e.to_string()))))?;
            let difference = self.agree(lines, "reload its masters")?;
            if difference.is_some() {
                return Ok(difference);
            }
        }
        let failed = |e| self.ended(&self.hands.failure(&e));
        let written = device.record(streams.executor);
        self.hands.wait(streams.optimizer, Edge::E3, &written).map_err(failed)?;
        let cast = cast_masters(&self.plan, lowering, streams, device).map_err(failed)?;
        // The next write from outside comes after this read.
        self.wait_event(Edge::E3, &cast)?;
        Ok(None)
    }

    /// Waits until every rank has come to do something, and returns what they disagree about, the same on each.
    ///
    /// # Errors
    /// A rank that does not come within the deadline of collectives, or the first cause after a failure.
    pub(super) fn agree(&self, lines: Agreement, to_do: &str) -> Result<Option<String>, Cause> {
        let limit = self.config.deadlines.collective;
        let late = |rank: usize| {
            format!(
                "rank {rank} did not {to_do} within {} s (deadline `collective`): every rank must, between the same two steps",
                limit.as_secs_f64()
            )
        };
        self.hands.control.compare(lines, limit, &late).map_err(|cause| self.ended(&cause))
    }
}
