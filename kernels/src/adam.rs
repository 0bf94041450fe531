//! Fused Adam and `AdamW` over one shard, in one pass.
//!
//! Devices call [`adam`] once per run of elements of one optimizer group. Averaging, unscaling and clipping are one factor on
//! the gradient, so a step reads each gradient here once. With 16-bit gradient and parameter an element moves 28 bytes:
//! gradient, master and both moments in; master, both moments and the parameter out.
//!
//! The loop waits for memory, not for arithmetic: it asks for lines ahead where it would look ahead too little by itself. Against
//! a triad over as many f32 elements it takes 1.2 times as long on AVX-512 and AVX2 (`benches/ratio.rs`). Stores are ordinary
//! ones: the gather reads the parameters next.
//!
//! Invariant: every operation is one f32 rounding in the order of SPEC T1, no fused multiply-add, on every instruction set
//! ([`crate::isa`]). Skipping is the caller's: this pass always writes.
#![allow(clippy::inline_always)] // see `isa`

use std::sync::Arc;

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

/// The rows of all groups, for each number of updated steps that a step may turn out to make. Where the host does not know the
/// verdicts of the steps before, several are possible; the device knows how many steps were updated, and picks.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamRows {
    first: u64,
    groups: usize,
    rows: Arc<[AdamRow]>,
}

impl AdamRows {
    /// Rows of `groups` groups, one count of updated steps after the other. The first are for the step that is updated as the
    /// `first`th one (first is 1).
    pub fn new(first: u64, groups: usize, rows: impl IntoIterator<Item = AdamRow>) -> Self {
        Self { first, groups, rows: rows.into_iter().collect() }
    }

    /// The number of groups.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// The rows, by group, of the step that is updated as the `updates`th one; `None` if that was not held possible.
    pub fn at(&self, updates: u64) -> Option<&[AdamRow]> {
        let begin = usize::try_from(updates.checked_sub(self.first)?).ok()?.checked_mul(self.groups)?;
        self.rows.get(begin..begin.checked_add(self.groups)?)
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

/// Elements per round of prefetches.
const CHUNK: usize = 64;
/// How many elements ahead to ask for: 2 KiB of f32.
const AHEAD: usize = 512;

#[inline(always)]
fn prefetch_chunk<T>(chunk: &[T; CHUNK]) {
    for at in (0..CHUNK).step_by(64 / size_of::<T>()) {
        isa::prefetch(chunk, AHEAD + at);
    }
}

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
    let (grads, grad_tail) = grad.as_chunks::<CHUNK>();
    let (masters, master_tail) = master.as_chunks_mut::<CHUNK>();
    let (exp_avgs, exp_avg_tail) = exp_avg.as_chunks_mut::<CHUNK>();
    let (exp_avg_sqs, exp_avg_sq_tail) = exp_avg_sq.as_chunks_mut::<CHUNK>();
    let (params, param_tail) = param.as_chunks_mut::<CHUNK>();
    for ((((g, p), m), v), out) in grads.iter().zip(masters).zip(exp_avgs).zip(exp_avg_sqs).zip(params) {
        prefetch_chunk(g);
        prefetch_chunk(p);
        prefetch_chunk(m);
        prefetch_chunk(v);
        prefetch_chunk(out);
        chunk_with_param::<G, P, DECOUPLED>(row, factor, g, p, m, v, out);
    }
    chunk_with_param::<G, P, DECOUPLED>(row, factor, grad_tail, master_tail, exp_avg_tail, exp_avg_sq_tail, param_tail);
}

// Slices as arguments of their own, not as fields: so the compiler knows that they do not overlap.
#[inline(always)]
fn chunk_with_param<G: Element, P: Element, const DECOUPLED: bool>(
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

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // bits are promised
    use super::*;
    use half::bf16;

    fn step(row: &AdamRow, factor: f32, grad: f32, state: [f32; 3]) -> ([f32; 3], bf16) {
        let [mut p, mut m, mut v] = state.map(|x| [x]);
        let mut param = [bf16::ZERO];
        let (master, exp_avg, exp_avg_sq) = (&mut p[..], &mut m[..], &mut v[..]);
        adam(row, factor, AdamSlices { grad: &[grad], master, exp_avg, exp_avg_sq, param: Some(&mut param) });
        ([p[0], m[0], v[0]], param[0])
    }

    #[test]
    fn a_first_step_moves_by_the_learning_rate() {
        // m / bias1 = g and sqrt(v / bias2) = |g|: powers of two, so that every operation is exact.
        let row = AdamRow::new(0.25, (0.5, 0.75), 0.0, 0.0, true, 1);
        assert_eq!(step(&row, 0.5, 8.0, [1.0, 0.0, 0.0]), ([0.75, 2.0, 4.0], bf16::from_f32(0.75)));
    }

    #[test]
    fn decoupled_decay_shrinks_the_parameter_and_coupled_decay_goes_through_the_moments() {
        let decoupled = AdamRow::new(0.25, (0.5, 0.75), 0.0, 0.5, true, 1);
        assert_eq!(step(&decoupled, 1.0, 4.0, [2.0, 0.0, 0.0]).0, [2.0 - 0.25 * (1.0 + 0.5 * 2.0), 2.0, 4.0]);
        let coupled = AdamRow { decoupled: false, ..decoupled };
        // g = 3 + 0.5 * 2 = 4
        assert_eq!(step(&coupled, 1.0, 3.0, [2.0, 0.0, 0.0]).0, [2.0 - 0.25, 2.0, 4.0]);
    }

    #[test]
    fn a_zero_gradient_leaves_fresh_state_where_it_is() {
        let row = AdamRow::new(1e-3, (0.9, 0.999), 1e-8, 0.0, true, 1);
        assert_eq!(step(&row, 1.0, 0.0, [1.5, 0.0, 0.0]).0, [1.5, 0.0, 0.0]);
    }

    #[test]
    fn the_largest_gradient_that_a_verdict_lets_through_keeps_moments_finite() {
        let g = 2.0_f32.powi(63);
        for beta2 in [0.0, 0.9, 0.999, 1.0 - 1e-6, 1.0 - 2e-8, 1.0 - 1e-9] {
            for decoupled in [true, false] {
                let mut state = [1.0, 0.0, 0.0];
                for t in 1..200_000 {
                    let row = AdamRow::new(1e-3, (0.9, beta2), 1e-8, 0.01, decoupled, t);
                    state = step(&row, 1.0, if t % 2 == 0 { g } else { -g }, state).0;
                }
                // What stands still has settled.
                assert!(state.iter().all(|x| x.is_finite()), "{beta2}: {state:?}");
            }
        }
        // Its limit is the square, but for the rounding of many steps; an f32 holds four times as much.
        let close = AdamRow::new(0.0, (0.9, 1.0 - 1e-6), 1e-8, 0.0, true, 1);
        let [_, _, v] = step(&close, 1.0, g, [1.0, 0.0, g * g * 1.5]).0;
        assert!(v < g * g * 1.5, "above the limit the second moment falls: {v}");
    }

    #[test]
    fn bias_corrections_are_formed_in_f64() {
        let row = AdamRow::new(1e-3, (0.9, 0.999), 1e-8, 0.01, true, 3);
        assert_eq!(row.bias2, (1.0 - 0.999_f64.powi(3)) as f32);
        assert_ne!(row.bias2, 1.0 - 0.999_f32.powi(3));
        assert_eq!(row.one_minus_beta2, 0.001);
        assert_eq!(AdamRow::new(1e-3, (0.9, 0.999), 1e-8, 0.01, true, u64::MAX).bias1, 1.0);
    }

    #[test]
    fn the_row_is_that_of_the_count_of_updated_steps_and_there_is_none_for_what_was_not_possible() {
        let row = |t| AdamRow::new(t as f64, (0.9, 0.999), 1e-8, 0.0, true, t);
        let rows = AdamRows::new(5, 2, [row(5), row(105), row(6), row(106)]);
        assert_eq!(rows.at(5), Some(&[row(5), row(105)][..]));
        assert_eq!(rows.at(6), Some(&[row(6), row(106)][..]));
        assert_eq!((rows.at(4), rows.at(7), rows.at(u64::MAX)), (None, None, None));
    }

    #[test]
    #[should_panic(expected = "Adam over 2 gradients")]
    fn slices_of_different_length_are_refused() {
        let row = AdamRow::new(1e-3, (0.9, 0.999), 1e-8, 0.0, true, 1);
        let (mut two, mut one, mut other) = ([0.0; 2], [0.0; 1], [0.0; 2]);
        let (master, exp_avg, exp_avg_sq) = (&mut two[..], &mut one[..], &mut other[..]);
        adam::<f32, f32>(&row, 1.0, AdamSlices { grad: &[0.0; 2], master, exp_avg, exp_avg_sq, param: None });
    }
}
