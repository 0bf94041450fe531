//! A plain serial Adam over the gradients of all ranks, written from the formulas of SPEC.md and for clarity alone: one
//! thread, whole parameters, no shards, no actors. It takes one thing from the runtime: the plan, since the norm is summed in plan
//! order.
//!
//! Ranks that hold the same parameters share a [`View`]: all of them, unless there are experts or model-parallel ranks.
//!
//! Summation order: a reduction adds the gradients of a group's ranks in rank order in f32 (rule S1), then the groups', then the
//! model-parallel ranks' where those are summed, then the copies' of one weight. The norm adds, in f64, the pieces of each bucket by
//! offset, a rank's buckets in plan order, and the ranks in rank order. A piece is summed by blocks of 4096 elements, each in 16
//! lanes that are added in pairs.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations, clippy::unwrap_used)]
#![allow(clippy::missing_panics_doc)]

use std::sync::Arc;

use gatherflow::{Across, BucketId, DType, NormType, ParamId, Plan, SumOver};
use gatherflow_actors::plan::ShardGroupPlan;
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

/// The dynamic loss scaler (SPEC T5), or the constant one (T6).
#[derive(Clone, Copy, Debug)]
pub struct Scaler {
    pub scale: f32,
    pub growth_interval: u32,
    pub full_hysteresis: i32,
    pub constant: bool,
    growth_counter: u32,
    hysteresis: i32,
}

impl Scaler {
    pub fn new(scale: f32, growth_interval: u32, hysteresis: i32) -> Self {
        let constant = false;
        Self { scale, growth_interval, full_hysteresis: hysteresis, constant, growth_counter: 0, hysteresis }
    }

    pub fn constant(scale: f32) -> Self {
        Self { constant: true, ..Self::new(scale, 1, 1) }
    }

    fn after(&mut self, found_nonfinite: bool) {
        if self.constant {
            return;
        }
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    pub updated: bool,
    pub grad_norm: Option<f64>,
    pub zeros: Option<u64>,
    pub loss_scale: f32,
    pub learning_rates: Vec<f64>,
}

/// The parameters of ranks that hold the same ones, as the first of those ranks sees them.
#[derive(Clone)]
pub struct View {
    pub rank: usize,
    pub weights: Vec<Weight>,
}

/// The optimizer of a whole job.
pub struct Serial {
    plan: Plan,
    pub views: Vec<View>,
    groups: Vec<Hyper>,
    norm: NormType,
    max_norm: f64,
    scaler: Option<Scaler>,
    /// Updated steps.
    pub t: u64,
}

impl Serial {
    /// `weights` are those of a rank.
    pub fn new(
        plan: Plan,
        weights: impl Fn(usize) -> Vec<Weight>,
        groups: Vec<Hyper>,
        max_norm: f64,
        scaler: Option<Scaler>,
    ) -> Self {
        let firsts = (0..plan.ranks()).filter(|rank| first_alike(&plan, *rank) == *rank);
        let views = firsts.map(|rank| View { rank, weights: weights(rank) }).collect();
        Self { plan, views, groups, norm: NormType::default(), max_norm, scaler, t: 0 }
    }

    /// The same with another norm.
    #[must_use]
    pub fn by_norm(self, norm: NormType) -> Self {
        Self { norm, ..self }
    }

    /// Another learning rate from the next step on.
    pub fn set_lr(&mut self, group: usize, lr: impl Fn(u64) -> f64 + Send + Sync + 'static) {
        self.groups[group].lr = Arc::new(lr);
    }

    /// A parameter and its other copies are written from outside, on every rank; all masters are made anew from the parameters.
    pub fn write(&mut self, param: ParamId, values: &[f32]) {
        let copies: Vec<ParamId> = self.plan.copies_of(param).collect();
        for weight in self.views.iter_mut().flat_map(|view| &mut view.weights) {
            if weight.id == param || copies.contains(&weight.id) {
                weight.param = values.iter().map(|x| rounded(weight.dtype, *x)).collect();
            }
            weight.master.clone_from(&weight.param);
        }
    }

    pub fn loss_scale(&self) -> f32 {
        self.scaler.map_or(1.0, |s| s.scale)
    }

    /// The parameters of a rank.
    pub fn weights(&self, rank: usize) -> &[Weight] {
        let first = first_alike(&self.plan, rank);
        &self.views.iter().find(|view| view.rank == first).unwrap().weights
    }

    /// A step that is skipped for another reason than its gradients: the loss scale stands still too.
    pub fn spoiled(&self) -> Verdict {
        // A skipped step uses the rates of the step that it would have been, and t stands still (SPEC T7, T8).
        let learning_rates = self.learning_rates();
        Verdict { updated: false, grad_norm: None, zeros: None, loss_scale: self.loss_scale(), learning_rates }
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.groups.iter().map(|group| (group.lr)(self.t + 1)).collect()
    }

    /// One step from every rank's gradients of every parameter, `[rank][parameter]`, which carry the loss scale; their sum is
    /// divided by `weight`, which without weights is the number of copies of the model.
    pub fn step(&mut self, gradients: &[Vec<Vec<f32>>], weight: f64) -> Verdict {
        let trainable: Vec<bool> = self.views[0].weights.iter().map(|w| w.trainable).collect();
        let params = || (0..trainable.len()).filter(|param| trainable[*param]);
        // By rank, then parameter; empty where frozen.
        let mut reduced = vec![vec![Vec::new(); trainable.len()]; self.plan.ranks()];
        for (rank, param) in (0..self.plan.ranks()).flat_map(|rank| params().map(move |param| (rank, param))) {
            reduced[rank][param] = reduce(&self.plan, gradients, rank, param);
        }
        for reduced in &mut reduced {
            sum_copies(&self.plan, reduced);
        }
        let loss_scale = self.loss_scale();
        let (average, unscale) = (1.0 / weight, 1.0 / f64::from(loss_scale));
        let (norm, zeros) = norm_and_zeros(self.norm, &self.plan, &reduced);
        let norm = norm * average * unscale;
        let clip = if self.max_norm > 0.0 { (self.max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let factor = average * unscale * clip;
        let found_nonfinite = reduced.iter().flatten().flatten().any(|g| !g.is_finite())
            || params().any(|param| is_too_large(&reduced, param, ratio(&self.plan, ParamId(param as u32)) * factor));
        if let Some(scaler) = &mut self.scaler {
            scaler.after(found_nonfinite);
        }
        if found_nonfinite {
            return Verdict { loss_scale, ..self.spoiled() };
        }
        let learning_rates = self.learning_rates();
        self.t += 1;
        for view in &mut self.views {
            for (weight, gradient) in view.weights.iter_mut().zip(&reduced[view.rank]).filter(|(w, _)| w.trainable) {
                let factor = (factor * ratio(&self.plan, weight.id)) as f32;
                adam(&self.groups[weight.group], self.t, factor, gradient, weight);
            }
        }
        Verdict { updated: true, grad_norm: Some(norm), zeros: Some(zeros), loss_scale, learning_rates }
    }
}

/// Whether the second moment could not hold the square of one of a parameter's gradients, or f32 the factor itself (SPEC T6).
fn is_too_large(reduced: &[Vec<Vec<f32>>], param: usize, factor: f64) -> bool {
    let two = |power: i32| 2.0_f64.powi(power);
    factor > two(127)
        || reduced.iter().flat_map(|of_rank| &of_rank[param]).any(|g| f64::from(g.abs()) * factor > two(63))
}

/// Where a rank stands: its part of the model, and its place among those with the same part.
fn place(plan: &Plan, rank: usize) -> (usize, usize) {
    (rank % plan.model_parallel(), rank / plan.model_parallel())
}

fn is_experts(group: &ShardGroupPlan) -> bool {
    group.name.is_some() && group.across == Across::Experts
}

/// The first rank that holds the same parameters: has the same part of the model and the same experts.
fn first_alike(plan: &Plan, rank: usize) -> usize {
    let held = |rank| {
        let (part, at) = place(plan, rank);
        let experts = plan.shard_groups().iter().filter(|group| is_experts(group)).map(|group| at / group.ranks);
        (part, experts.collect::<Vec<_>>())
    };
    (0..=rank).find(|other| held(*other) == held(rank)).unwrap()
}

/// What a parameter's gradients are multiplied by beyond the average over all.
fn ratio(plan: &Plan, param: ParamId) -> f64 {
    let d = plan.ranks() / plan.model_parallel();
    d as f64 / plan.shard_groups()[plan.param(param).shard_group].average_over as f64
}

/// The sum over the ranks of each group, in rank order, and over the groups that hold replicas, in f32.
fn reduce(plan: &Plan, gradients: &[Vec<Vec<f32>>], rank: usize, param: usize) -> Vec<f32> {
    let (sum_over, group) = (plan.params()[param].sum_over, &plan.shard_groups()[plan.params()[param].shard_group]);
    let (part, at) = place(plan, rank);
    let own = at / group.ranks;
    let d = plan.ranks() / plan.model_parallel();
    let groups = if is_experts(group) { own..own + 1 } else { 0..d / group.ranks };
    let of_part = |part: usize| {
        let of_rank = |at: usize| gradients[at * plan.model_parallel() + part][param].clone();
        let of_group = |n: usize| (n * group.ranks..(n + 1) * group.ranks).map(of_rank).reduce(add).unwrap();
        groups.clone().map(of_group).reduce(add).unwrap()
    };
    if sum_over == SumOver::ModelParallel {
        (0..plan.model_parallel()).map(of_part).reduce(add).unwrap()
    } else {
        of_part(part)
    }
}

/// Every trained copy of a weight gets the sum of all, in registration order (SPEC T0).
fn sum_copies(plan: &Plan, reduced: &mut [Vec<f32>]) {
    for param in plan.params().iter().filter(|p| p.trainable && p.shared.is_some() && p.first_copy) {
        let copies = || plan.params().iter().filter(|copy| copy.shared == param.shared).map(|copy| copy.id.index());
        let sum = copies().map(|copy| reduced[copy].clone()).reduce(add).unwrap();
        copies().for_each(|copy| reduced[copy].clone_from(&sum));
    }
}

fn add(mut sum: Vec<f32>, more: Vec<f32>) -> Vec<f32> {
    sum.iter_mut().zip(more).for_each(|(sum, g)| *sum += g);
    sum
}

/// Whether the norm has a parameter from this rank: each logical element once (SPEC T2a).
fn counts(plan: &Plan, rank: usize, param: ParamId) -> bool {
    let (param, (part, at)) = (plan.param(param), place(plan, rank));
    let group = &plan.shard_groups()[param.shard_group];
    param.first_copy && (is_experts(group) || at < group.ranks) && (param.tensor_parallel || part == 0)
}

/// Of the summed gradients; of no use where one of them is not finite.
fn norm_and_zeros(norm: NormType, plan: &Plan, reduced: &[Vec<Vec<f32>>]) -> (f64, u64) {
    let sum = |term: fn(f64, f64) -> f64, p: f64, power: fn(f64, f64) -> f64| sums(plan, reduced, term, p, power);
    match norm {
        NormType::P(1.0) => sum(|g, _| g.abs(), 1.0, |ratio, _| ratio),
        NormType::P(2.0) => {
            let (squares, zeros) = sum(|g, _| g * g, 2.0, |ratio, _| ratio * ratio);
            (squares.sqrt(), zeros)
        }
        NormType::P(p) => {
            let (powers, zeros) = sum(|g, p| libm::pow(g.abs(), p), p, libm::pow);
            (libm::pow(powers, 1.0 / p), zeros)
        }
        _ => {
            let (mut largest, mut zeros) = (0.0_f64, 0);
            for_each_piece(plan, reduced, &mut |_, bucket, piece| {
                let max = piece.iter().fold(0.0_f64, |max, g| f64::from(g.abs()).max(max));
                largest = largest.max(max * ratio(plan, plan.bucket(bucket).params[0]));
                zeros += count_zeros(piece);
            });
            (largest, zeros)
        }
    }
}

fn count_zeros(piece: &[f32]) -> u64 {
    piece.iter().filter(|g| **g == 0.0).count() as u64
}

/// The sum of a term of every counted element, each bucket's times a power of its ratio; and the zeros.
fn sums(
    plan: &Plan,
    reduced: &[Vec<Vec<f32>>],
    term: fn(f64, f64) -> f64,
    p: f64,
    power: fn(f64, f64) -> f64,
) -> (f64, u64) {
    // By rank, then bucket.
    let mut of_bucket = vec![vec![0.0; plan.buckets().len()]; plan.ranks()];
    let mut zeros = 0;
    for_each_piece(plan, reduced, &mut |rank, bucket, piece| {
        of_bucket[rank][bucket.index()] += sum_of_piece(piece, &|g| term(g, p));
        zeros += count_zeros(piece);
    });
    let scaled = |bucket: &BucketId, sum: f64| sum * power(ratio(plan, plan.bucket(*bucket).params[0]), p);
    let of_rank = |sums: &Vec<f64>| plan.buckets().iter().fold(0.0, |own, b| own + scaled(&b.id, sums[b.id.index()]));
    (of_bucket.iter().fold(0.0, |job, sums| job + of_rank(sums)), zeros)
}

/// Calls back with every piece that the norm counts: ranks in order, a rank's buckets in plan order, pieces by offset.
fn for_each_piece(plan: &Plan, reduced: &[Vec<Vec<f32>>], call: &mut dyn FnMut(usize, BucketId, &[f32])) {
    for (rank, reduced) in reduced.iter().enumerate() {
        for bucket in plan.buckets() {
            let d = plan.shard_groups()[plan.buffer(bucket.buffer).shard_group].ranks;
            let (shard, slot) = (bucket.range.len() / d, place(plan, rank).1 % d);
            let (start, end) = (bucket.range.start + slot * shard, bucket.range.start + (slot + 1) * shard);
            for param in bucket.params.iter().filter(|param| counts(plan, rank, **param)) {
                let at = plan.param(*param).home.range();
                let (from, to) = (at.start.max(start), at.end.min(end));
                if from < to {
                    let piece = &reduced[param.index()][from - at.start..to - at.start];
                    call(rank, bucket.id, piece);
                }
            }
        }
    }
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
