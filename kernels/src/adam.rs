//! Fused Adam and AdamW over one shard, in one pass.
use crate::dtype::Element;

/// The scalars of one optimizer group at one step (SPEC T1), formed in f64 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamRow {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// `1 - beta1^t`, t counted from 1.
    pub bias1: f32,
    /// `1 - beta2^t`.
    pub bias2: f32,
    /// Decoupled weight decay (AdamW); otherwise it is added to the gradient.
    pub decoupled: bool,
}

impl AdamRow {
    /// The row of step `t` (first is 1).
    #[allow(clippy::too_many_arguments)]
    pub fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, decoupled: bool, t: u64) -> Self {
        let t = i32::try_from(t).unwrap_or(i32::MAX);
        Self {
            lr: lr as f32,
            beta1: betas.0 as f32,
            one_minus_beta1: (1.0 - betas.0) as f32,
            beta2: betas.1 as f32,
            one_minus_beta2: (1.0 - betas.1) as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
            bias1: (1.0 - betas.0.powi(t)) as f32,
            bias2: (1.0 - betas.1.powi(t)) as f32,
            decoupled,
        }
    }
}

/// The memory of one run of elements of one group; all slices have the same length.
#[derive(Debug)]
pub struct AdamSlices<'a, G, P> {
    /// Gradients.
    pub grad: &'a [G],
    /// Master parameters.
    pub master: &'a mut [f32],
    /// First moments.
    pub exp_avg: &'a mut [f32],
    /// Second moments.
    pub exp_avg_sq: &'a mut [f32],
    /// Parameters in their own dtype; `None` where the master is the parameter.
    pub param: Option<&'a mut [P]>,
}

/// One Adam step over a run of elements. `factor` multiplies every gradient first.
pub fn adam<G: Element, P: Element>(row: &AdamRow, factor: f32, slices: AdamSlices<'_, G, P>) {
    let _ = (row, factor, slices);
    unimplemented!()
}
