//! What became of a step: [`StepHandle`], to wait for or to await, and the [`Outcome`].
//!
//! A verdict against one step (non-finite, abandoned or missing gradients) is an error on **every** rank, naming rank and
//! parameter; the step was skipped everywhere and the engine stays usable (rule F1).

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use crate::actors::{ParamId, PlanRank, Spoiled, StepOutcome};
use crate::error::{Error, ErrorKind};
use crate::shared::Shared;

/// What became of a step (SPEC T8).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The step: the number of `step` calls before it.
    pub step: u64,
    /// Parameters were updated; `false` if the step was skipped on every rank.
    pub updated: bool,
    /// Norm of the averaged, unscaled, unclipped gradients over all ranks; `None` if skipped.
    pub grad_norm: Option<f64>,
    /// Number of zero gradient elements over all ranks; `None` if skipped.
    pub zeros: Option<u64>,
    /// The loss scale that this step's gradients carried.
    pub loss_scale: f32,
    /// The learning rate used, per group.
    pub learning_rates: Vec<f64>,
    /// Some rank asked to stop: see [`Engine::request_stop`](crate::Engine::request_stop).
    pub stop: bool,
}

/// A step on its way. Wait with [`StepHandle::outcome`], or `.await` it.
#[derive(Clone, Debug)]
#[must_use = "a step's errors are told by its outcome"]
pub struct StepHandle {
    shared: Weak<Shared>,
    step: u64,
}

impl StepHandle {
    pub(crate) fn new(shared: &Arc<Shared>, step: u64) -> Self {
        Self { shared: Arc::downgrade(shared), step }
    }

    /// The step: the number of `step` calls before it.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Waits for the outcome, at most as long as the deadlines allow.
    ///
    /// # Errors
    /// Not fatal: [`ErrorKind::NonFinite`], [`ErrorKind::Abandoned`], [`ErrorKind::Unused`], [`ErrorKind::NoWeight`],
    /// [`ErrorKind::LearningRates`]: the step was skipped on every rank; [`ErrorKind::Misuse`]: it is one of the newest 1024 no more. Fatal: the first cause.
    pub fn outcome(&self) -> Result<Outcome, Error> {
        let shared = self.shared.upgrade().ok_or_else(Error::closed)?;
        judge(&shared, self.step, &*shared.session.outcome(self.step)?)
    }
}

impl Future for StepHandle {
    type Output = Result<Outcome, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(shared) = self.shared.upgrade() else { return Poll::Ready(Err(Error::closed())) };
        shared.session.poll_outcome(self.step, context.waker()).map(|outcome| judge(&shared, self.step, &*outcome?))
    }
}

/// The outcome, or the policy's verdict on the step as an error.
fn judge(shared: &Shared, step: u64, outcome: &StepOutcome) -> Result<Outcome, Error> {
    let report = &outcome.report;
    let error = |kind, rank: usize, param: Option<u32>, message: &str| {
        let error = Error::new(kind, message).on_rank(rank).at_step(step);
        let plan = shared.session.plan().on(PlanRank(rank));
        match param.and_then(|p| plan.params().get(ParamId(p).index())) {
            Some(param) => error.of_parameter(&*param.name),
            None => error,
        }
    };
    if let Some((rank, spoiled)) = report.spoiled {
        return Err(match spoiled {
            Spoiled::Abandoned { param } => error(
                ErrorKind::Abandoned,
                rank,
                Some(param),
                "its gradient was abandoned (a guard was dropped without complete, or a panic left backward); every rank skipped the step",
            ),
            Spoiled::Unused { param } => error(
                ErrorKind::Unused,
                rank,
                Some(param),
                "it got no gradient in this step and the configuration says unused = \"error\"; every rank skipped the step",
            ),
            Spoiled::NonFinite { param } => {
                let message = "its gradient on this rank was not finite before it was reduced (check_for_nan_in_grad); every rank skipped the step";
                let error = error(ErrorKind::NonFinite, rank, Some(param), message);
                match shared.session.plan().on(PlanRank(rank)).bucket_of(ParamId(param)) {
                    Some(bucket) => error.in_bucket(bucket.0),
                    None => error,
                }
            }
            _ => error(ErrorKind::Abandoned, rank, None, "the rank spoiled the step; every rank skipped it"),
        });
    }
    if report.no_weight {
        let message = "every rank gave weight 0 to a weighted average, or so little that its inverse is no f32; every rank skipped the step";
        return Err(error(ErrorKind::NoWeight, shared.rank, None, message));
    }
    if let Some(rank) = report.unlike {
        let message = "its learning rates differ from rank 0's: give set_lr the same value, or a function that gives the same, on every rank; every rank skipped the step";
        return Err(error(ErrorKind::LearningRates, rank, None, message));
    }
    if let Some((rank, param)) = report.nonfinite.filter(|_| report.nonfinite_is_error) {
        let message = "its gradient, summed over ranks and owned by this one, is not finite, or above 2^63 once averaged and clipped, and the configuration says on_nonfinite = \"error\"; every rank skipped the step";
        return Err(error(ErrorKind::NonFinite, rank, Some(param), message));
    }
    if report.stop {
        shared.stop.told(step);
    }
    Ok(Outcome {
        step,
        updated: report.updated,
        grad_norm: report.grad_norm,
        zeros: report.zeros,
        loss_scale: report.loss_scale,
        learning_rates: outcome.lrs.clone(),
        stop: report.stop,
    })
}
