//! From partial norms to the step's verdict: what one rank sends (a record), what all ranks compute from all records (the
//! scalars that Adam reads), and what the host is told (the report).
//!
//! Every rank computes the same bits from the same records: partials are f64, combined in plan order, then rank order
//! (rule S1). Formulas: SPEC rows T2, T2a, T3, T5, T6.
//!
//! | step | function |
//! | --- | --- |
//! | shards of one rank to its record | [`fold`] |
//! | records of all ranks to scalars and report | [`judge`] |
//! | the loss scaler's move inside `judge` | `scaler` |
//! | records and scalars in device memory | `bytes` |
//!
//! All are pure and cannot fail: a rank that sends nonsense spoils the step, on every rank alike.

mod bytes;
mod judge;
mod scaler;

pub use judge::{fold, judge};

use std::sync::Arc;

use parking_lot::Mutex;

use crate::norm::NormType;

/// What only the host of a rank knows when it calls `step`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostVerdict {
    /// Why this rank spoils the step, if it does.
    pub spoiled: Option<Spoiled>,
    /// This rank's weight (token count) for weighted averaging.
    pub weight: f64,
    /// This rank was asked to stop.
    pub stop: bool,
    /// A hash of what all hosts must have set alike for this step: learning rates.
    pub alike: u64,
}

/// Why a rank spoils a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Spoiled {
    /// A gradient guard of this parameter was dropped without `complete`, or a panic left the backward of its unit.
    Abandoned {
        /// The parameter's number in the plan.
        param: u32,
    },
    /// This trainable parameter got no gradient and the configuration calls that an error.
    Unused {
        /// The parameter's number in the plan.
        param: u32,
    },
    /// This rank's own gradient of the parameter was not finite before it was reduced, and that was looked for (SPEC T9). No
    /// host knows it: the device finds it.
    NonFinite {
        /// The parameter's number in the plan.
        param: u32,
    },
}

/// What one rank sends in the small all-gather: [`RankRecord::BYTES`] bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankRecord {
    /// Sum of powers of the reduced gradients as they came off the wire: neither averaged nor unscaled nor clipped.
    pub sum_powers: f64,
    /// Largest absolute value, for the inf norm.
    pub max_abs: f64,
    /// Number of zero elements.
    pub zeros: u64,
    /// First parameter with a non-finite gradient.
    pub nonfinite: Option<u32>,
    /// Largest absolute value that this rank's Adam reads, whether the norm counts it or not, times its bucket's ratio.
    pub largest: f64,
    /// The parameter that has it.
    pub largest_in: u32,
    /// The host's part, and what the device found that spoils the step.
    pub host: HostVerdict,
}

/// Averaging of the gradients over ranks (SPEC T2).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Average {
    /// Divide by the number of ranks.
    Ranks(usize),
    /// Divide by the sum of the ranks' weights.
    Weight,
}

/// What to do about non-finite gradients where there is no loss scaler (SPEC T6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnNonFinite {
    /// Skip the step.
    Skip,
    /// Skip the step and return an error that names rank and parameter.
    Error,
}

/// Averaging, clipping and policies of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VerdictRule {
    /// How gradients are averaged.
    pub average: Average,
    /// Which norm of the gradients is taken, clipped by and told.
    pub norm: NormType,
    /// Largest gradient norm; 0 turns clipping off.
    pub max_norm: f64,
    /// What to do about non-finite gradients.
    pub on_nonfinite: OnNonFinite,
}

/// The loss scaler (SPEC T5, T6).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ScalerRule {
    /// No loss scale.
    None,
    /// The scale never moves.
    Constant {
        /// The scale.
        scale: f32,
    },
    /// The scale grows while gradients stay finite and backs off when they do not.
    Dynamic {
        /// The first scale.
        initial: f32,
        /// The smallest scale.
        min: f32,
        /// Factor on growth.
        growth: f32,
        /// Factor on back-off.
        backoff: f32,
        /// Good steps before growth.
        interval: u32,
        /// Bad steps before back-off; refilled by growth only.
        hysteresis: i32,
    },
}

/// The scalars of a step on the device: [`Scalars::BYTES`] bytes, read by Adam, updated by the verdict.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Multiply every gradient by this: average, unscale and clip in one, formed in f64. Adam rounds it to f32, once.
    pub factor: f64,
    /// Adam does nothing.
    pub skip: bool,
    /// The loss scale of the *next* step.
    pub scale: f32,
    /// Good steps since the last growth or bad step.
    pub growth_counter: u32,
    /// Bad steps left before back-off.
    pub hysteresis: i32,
    /// How many steps were updated, the one judged last included: it picks among [`crate::adam::AdamRows`].
    pub updates: u64,
}

/// What the host is told of a step.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // independent facts, each told under its name
pub struct StepReport {
    /// Parameters were updated.
    pub updated: bool,
    /// Norm of the averaged, unscaled, unclipped gradients; `None` if skipped.
    pub grad_norm: Option<f64>,
    /// Number of zero gradient elements; `None` if skipped.
    pub zeros: Option<u64>,
    /// The loss scale this step's gradients carried.
    pub loss_scale: f32,
    /// The loss scale of the next step.
    pub next_loss_scale: f32,
    /// First rank and parameter with a non-finite gradient; without one, with a gradient too large for Adam ([`judge`]).
    pub nonfinite: Option<(usize, u32)>,
    /// First rank that spoiled the step, and why.
    pub spoiled: Option<(usize, Spoiled)>,
    /// Non-finite gradients are an error by policy.
    pub nonfinite_is_error: bool,
    /// Weighted averaging was asked for and all ranks gave weight 0.
    pub no_weight: bool,
    /// The first rank whose host has set for this step what rank 0's has not ([`HostVerdict::alike`]).
    pub unlike: Option<usize>,
    /// Some rank was asked to stop.
    pub stop: bool,
}

/// The slots in which a device leaves each [`StepReport`] before it ends the event behind that step's verdict. There are as many
/// as verdicts that nobody has looked at.
#[derive(Clone, Debug, Default)]
pub struct Report(Arc<Mutex<Vec<(u64, StepReport)>>>);

impl Report {
    /// No report yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Leaves the report of a step.
    pub fn put(&self, step: u64, report: StepReport) {
        self.0.lock().push((step, report));
    }

    /// Takes the report of a step, once the device has left it.
    pub fn take(&self, step: u64) -> Option<StepReport> {
        let mut reports = self.0.lock();
        let at = reports.iter().position(|(number, _)| *number == step)?;
        Some(reports.swap_remove(at).1)
    }
}
