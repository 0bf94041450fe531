//! Fused Adam and `AdamW` over one shard, in one pass.
//!
//! Devices call [`adam`] once per run of elements of one optimizer group. Averaging, unscaling and clipping are one factor on
//! the gradient, so a step reads each gradient here once. With 16-bit gradient and parameter an element moves 28 bytes:
//! gradient, master and both moments in; master, both moments and the parameter out.
//!
//! Invariant: every operation is one f32 rounding in the order of SPEC T1, no fused multiply-add, on every instruction set
//! ([`crate::isa`]). Skipping is the caller's: this pass always writes.
#![allow(clippy::inline_always)] // see `isa`

use crate::dtype::Element;
use crate::isa::{self, Body, Isa};

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
    /// Decoupled weight decay (`AdamW`); otherwise it is added to the gradient.
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

/// One Adam step over a run of elements (SPEC T1). `factor` multiplies every gradient first.
///
/// # Panics
/// If the slices differ in length.
pub fn adam<G: Element, P: Element>(row: &AdamRow, factor: f32, slices: AdamSlices<'_, G, P>) {
    adam_on(Isa::widest(), row, factor, slices);
}

/// [`adam`] on a given instruction set: the same bits.
///
/// # Panics
/// If the slices differ in length.
pub fn adam_on<G: Element, P: Element>(isa: Isa, row: &AdamRow, factor: f32, slices: AdamSlices<'_, G, P>) {
    let AdamSlices { grad, master, exp_avg, exp_avg_sq, param } = slices;
    let numel = grad.len();
    let lengths = [master.len(), exp_avg.len(), exp_avg_sq.len(), param.as_ref().map_or(numel, |p| p.len())];
    assert!(lengths.iter().all(|&len| len == numel), "Adam over {numel} gradients got slices of {lengths:?} elements");
    let pass = Pass { row, factor, grad, master, exp_avg, exp_avg_sq };
    // Loops without the terms that are off: a branch in the loop would be taken for every vector.
    match (param, row.decoupled) {
        (Some(param), true) => isa::run(isa, WithParam::<_, _, true> { pass, param }),
        (Some(param), false) => isa::run(isa, WithParam::<_, _, false> { pass, param }),
        (None, true) => isa::run(isa, MasterOnly::<_, true> { pass }),
        (None, false) => isa::run(isa, MasterOnly::<_, false> { pass }),
    }
}

struct Pass<'a, G> {
    row: &'a AdamRow,
    factor: f32,
    grad: &'a [G],
    master: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
}

struct WithParam<'a, G, P, const DECOUPLED: bool> {
    pass: Pass<'a, G>,
    param: &'a mut [P],
}

struct MasterOnly<'a, G, const DECOUPLED: bool> {
    pass: Pass<'a, G>,
}

impl<G: Element, P: Element, const DECOUPLED: bool> Body for WithParam<'_, G, P, DECOUPLED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Pass { row, factor, grad, master, exp_avg, exp_avg_sq } = self.pass;
        with_param::<G, P, DECOUPLED>(*row, factor, grad, master, exp_avg, exp_avg_sq, self.param);
    }
}

impl<G: Element, const DECOUPLED: bool> Body for MasterOnly<'_, G, DECOUPLED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Pass { row, factor, grad, master, exp_avg, exp_avg_sq } = self.pass;
        master_only::<G, DECOUPLED>(*row, factor, grad, master, exp_avg, exp_avg_sq);
    }
}

// Slices as arguments of their own, not as fields: so the compiler knows that they do not overlap.
#[inline(always)]
fn with_param<G: Element, P: Element, const DECOUPLED: bool>(
    row: AdamRow,
    factor: f32,
    grad: &[G],
    master: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    param: &mut [P],
) {
    let numel = grad.len();
    // One length for all, so that no access in the loop needs a check.
    let (master, exp_avg) = (&mut master[..numel], &mut exp_avg[..numel]);
    let (exp_avg_sq, param) = (&mut exp_avg_sq[..numel], &mut param[..numel]);
    for i in 0..numel {
        let g = grad[i].to_f32() * factor;
        let (p, m, v) = element::<DECOUPLED>(&row, g, master[i], exp_avg[i], exp_avg_sq[i]);
        (master[i], exp_avg[i], exp_avg_sq[i]) = (p, m, v);
        param[i] = P::from_f32(p);
    }
}

#[inline(always)]
fn master_only<G: Element, const DECOUPLED: bool>(
    row: AdamRow,
    factor: f32,
    grad: &[G],
    master: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
) {
    let numel = grad.len();
    let (master, exp_avg, exp_avg_sq) = (&mut master[..numel], &mut exp_avg[..numel], &mut exp_avg_sq[..numel]);
    for i in 0..numel {
        let g = grad[i].to_f32() * factor;
        (master[i], exp_avg[i], exp_avg_sq[i]) = element::<DECOUPLED>(&row, g, master[i], exp_avg[i], exp_avg_sq[i]);
    }
}

/// New parameter and moments of one element: SPEC T1, one f32 rounding for each operation, in the order written there.
#[inline(always)]
fn element<const DECOUPLED: bool>(row: &AdamRow, g: f32, p: f32, m: f32, v: f32) -> (f32, f32, f32) {
    let g = if DECOUPLED { g } else { g + row.weight_decay * p };
    let m = row.beta1 * m + row.one_minus_beta1 * g;
    let v = row.beta2 * v + row.one_minus_beta2 * (g * g);
    let update = (m / row.bias1) / ((v / row.bias2).sqrt() + row.eps);
    let update = if DECOUPLED { update + row.weight_decay * p } else { update };
    (p - row.lr * update, m, v)
}
