//! A plain serial Adam over the gradients of d ranks, written from the formulas of SPEC.md and for clarity alone: one thread,
//! whole parameters, no shards, no actors. It takes one thing from the runtime: the plan, since the norm is summed in plan order.
//!
//! Summation order: a reduction adds the ranks' gradients in rank order in f32 (rule S1). The norm adds, in f64, the pieces
//! of each bucket by offset, a rank's buckets in plan order, and the ranks in rank order. A piece is summed by blocks of 4096
//! elements, each in 16 lanes that are added in pairs.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations)]

use std::sync::Arc;

use gatherflow::{DType, NormType, ParamId, Plan};
use half::{bf16, f16};

/// Rounds an f32 to an element type and back.
pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// One parameter and its optimizer state.
#[derive(Clone)]
pub struct Weight {
    pub id: ParamId,
    pub dtype: DType,
    pub group: usize,
    pub trainable: bool,
    /// The parameter, as its dtype can hold it.
    pub param: Vec<f32>,
    pub master: Vec<f32>,
    pub exp_avg: Vec<f32>,
    pub exp_avg_sq: Vec<f32>,
}

impl Weight {
    pub fn new(id: ParamId, dtype: DType, group: usize, trainable: bool, initial: &[f32]) -> Self {
        let param: Vec<f32> = initial.iter().map(|x| rounded(dtype, *x)).collect();
        let zeros = vec![0.0; param.len()];
        Self { id, dtype, group, trainable, master: param.clone(), exp_avg: zeros.clone(), exp_avg_sq: zeros, param }
    }
}

/// An optimizer group.
#[derive(Clone)]
pub struct Hyper {
    /// Learning rate at t, multiplier included.
    pub lr: Arc<dyn Fn(u64) -> f64 + Send + Sync>,
    pub betas: (f64, f64),
    pub eps: f64,
    pub weight_decay: f64,
    pub decoupled: bool,
}

/// The dynamic loss scaler (SPEC T5).
#[derive(Clone, Copy, Debug)]
pub struct Scaler {
    pub scale: f32,
    pub growth_interval: u32,
    pub full_hysteresis: i32,
    growth_counter: u32,
    hysteresis: i32,
}

impl Scaler {
    pub fn new(scale: f32, growth_interval: u32, hysteresis: i32) -> Self {
        Self { scale, growth_interval, full_hysteresis: hysteresis, growth_counter: 0, hysteresis }
    }

    fn after(&mut self, found_nonfinite: bool) {
        if found_nonfinite {
            self.growth_counter = 0;
            self.hysteresis -= 1;
            if self.hysteresis <= 0 {
                self.scale = (self.scale * 0.5).max(1.0);
            }
        } else {
            self.growth_counter += 1;
            if self.growth_counter == self.growth_interval {
                self.growth_counter = 0;
                self.hysteresis = self.full_hysteresis;
                self.scale *= 2.0;
            }
        }
    }
}

/// What a step came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    pub updated: bool,
    pub grad_norm: Option<f64>,
    pub zeros: Option<u64>,
    pub loss_scale: f32,
    pub learning_rates: Vec<f64>,
}

/// The optimizer of a whole job.
pub struct Serial {
    plan: Plan,
    pub weights: Vec<Weight>,
    groups: Vec<Hyper>,
    norm: NormType,
    max_norm: f64,
    scaler: Option<Scaler>,
    /// Updated steps.
    t: u64,
}

impl Serial {
    pub fn new(plan: Plan, weights: Vec<Weight>, groups: Vec<Hyper>, max_norm: f64, scaler: Option<Scaler>) -> Self {
        Self { plan, weights, groups, norm: NormType::default(), max_norm, scaler, t: 0 }
    }

    /// The same with another norm.
    #[must_use]
    pub fn by_norm(self, norm: NormType) -> Self {
        Self { norm, ..self }
    }

    pub fn loss_scale(&self) -> f32 {
        self.scaler.map_or(1.0, |s| s.scale)
    }

    /// One step from every rank's gradients of every parameter, `[rank][parameter]`, which carry the loss scale.
    pub fn step(&mut self, gradients: &[Vec<Vec<f32>>]) -> Verdict {
        let reduced: Vec<Vec<f32>> = (0..self.weights.len()).map(|param| reduce(gradients, param)).collect();
        let trainable = || self.weights.iter().zip(&reduced).filter(|(w, _)| w.trainable);
        let loss_scale = self.loss_scale();
        let found_nonfinite = trainable().any(|(_, gradient)| gradient.iter().any(|g| !g.is_finite()));
        let zeros = trainable().map(|(_, gradient)| gradient.iter().filter(|g| **g == 0.0).count() as u64).sum();
        if let Some(scaler) = &mut self.scaler {
            scaler.after(found_nonfinite);
        }
        // A skipped step uses the rates of the step that it would have been, and t stands still (SPEC T7, T8).
        let learning_rates = self.groups.iter().map(|group| (group.lr)(self.t + 1)).collect();
        if found_nonfinite {
            return Verdict { updated: false, grad_norm: None, zeros: None, loss_scale, learning_rates };
        }
        let (average, unscale) = (1.0 / self.plan.ranks() as f64, 1.0 / f64::from(loss_scale));
        let norm = norm(self.norm, &self.plan, &reduced) * average * unscale;
        let clip = if self.max_norm > 0.0 { (self.max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let factor = (average * unscale * clip) as f32;
        self.t += 1;
        for (weight, gradient) in self.weights.iter_mut().zip(&reduced).filter(|(w, _)| w.trainable) {
            adam(&self.groups[weight.group], self.t, factor, gradient, weight);
        }
        Verdict { updated: true, grad_norm: Some(norm), zeros: Some(zeros), loss_scale, learning_rates }
    }
}

/// The sum over ranks, in rank order, in f32.
fn reduce(gradients: &[Vec<Vec<f32>>], param: usize) -> Vec<f32> {
    let mut sum = gradients[0][param].clone();
    for rank in &gradients[1..] {
        for (sum, g) in sum.iter_mut().zip(&rank[param]) {
            *sum += g;
        }
    }
    sum
}

/// Of the summed gradients, which are all finite.
fn norm(norm: NormType, plan: &Plan, reduced: &[Vec<f32>]) -> f64 {
    match norm {
        NormType::P(1.0) => sum_of(plan, reduced, f64::abs),
        NormType::P(2.0) => sum_of(plan, reduced, |g| g * g).sqrt(),
        NormType::P(p) => libm::pow(sum_of(plan, reduced, |g| libm::pow(g.abs(), p)), 1.0 / p),
        _ => reduced.iter().flatten().fold(0.0, |max, g| f64::from(g.abs()).max(max)),
    }
}

fn sum_of(plan: &Plan, reduced: &[Vec<f32>], term: impl Fn(f64) -> f64) -> f64 {
    let mut job = 0.0;
    for rank in 0..plan.ranks() {
        let mut own = 0.0;
        for bucket in plan.buckets() {
            let shard = bucket.range.len() / plan.ranks();
            let (start, end) = (bucket.range.start + rank * shard, bucket.range.start + (rank + 1) * shard);
            let mut of_bucket = 0.0;
            for param in &bucket.params {
                let at = plan.param(*param).home.range();
                let (from, to) = (at.start.max(start), at.end.min(end));
                if from < to {
                    let piece = &reduced[param.index()][from - at.start..to - at.start];
                    of_bucket += sum_of_piece(piece, &term);
                }
            }
            own += of_bucket;
        }
        job += own;
    }
    job
}

fn sum_of_piece(piece: &[f32], term: &impl Fn(f64) -> f64) -> f64 {
    let mut sum = 0.0;
    for block in piece.chunks(4096) {
        let mut lanes: Vec<f64> = (0..16)
            .map(|lane| block.iter().skip(lane).step_by(16).fold(0.0, |sum, g| sum + term(f64::from(*g))))
            .collect();
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len() / 2);
            lanes.iter_mut().zip(upper).for_each(|(low, high)| *low += high);
        }
        sum += lanes[0];
    }
    sum
}

/// SPEC T1: every operation is one f32 rounding, in the order written there; scalars are formed in f64.
fn adam(group: &Hyper, t: u64, factor: f32, gradient: &[f32], weight: &mut Weight) {
    let (b1, b2) = group.betas;
    let t_power = i32::try_from(t).unwrap_or(i32::MAX);
    let (correction1, correction2) = ((1.0 - b1.powi(t_power)) as f32, (1.0 - b2.powi(t_power)) as f32);
    let (lr, eps, wd) = ((group.lr)(t) as f32, group.eps as f32, group.weight_decay as f32);
    for (i, g) in gradient.iter().enumerate() {
        let p = weight.master[i];
        let mut g = g * factor;
        if !group.decoupled {
            g += wd * p;
        }
        let m = (b1 as f32) * weight.exp_avg[i] + ((1.0 - b1) as f32) * g;
        let v = (b2 as f32) * weight.exp_avg_sq[i] + ((1.0 - b2) as f32) * (g * g);
        let mut update = (m / correction1) / ((v / correction2).sqrt() + eps);
        if group.decoupled {
            update += wd * p;
        }
        weight.exp_avg[i] = m;
        weight.exp_avg_sq[i] = v;
        weight.master[i] = p - lr * update;
        weight.param[i] = rounded(weight.dtype, weight.master[i]);
    }
}
