//! The builder: one method per key of [`KEYS`](super::KEYS), each counting as set explicitly (rule K1).
//!
//! Values are checked when the engine starts, or by [`Config::validate`].

use std::time::Duration;

use super::{Config, Credits, Layout, ScalerKind, Unused};
use crate::actors::{Average, DType, FirstGather, Link, NormType, OnNonFinite, Overlap, Skip, StartParams, Storage};

macro_rules! setters {
    ($($(#[$doc:meta])* $key:literal: $name:ident($($arg:ident: $ty:ty),+) $set:expr;)+) => {
        impl Config {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $($arg: $ty),+) -> Self {
                self.explicit.insert($key);
                let set: fn(&mut Self, $($ty),+) = $set;
                set(&mut self, $($arg),+);
                self
            })+
        }
    };
}

setters! {
    /// `ranks`: refuses to start with another number of ranks.
    "ranks": ranks(ranks: usize) |c, v| c.ranks = Some(v);
    /// `model_parallel`: so many adjacent ranks share one copy of the model. Rank r is model-parallel rank r % n; parameters are
    /// divided among the ranks with the same one.
    "model_parallel": model_parallel(ranks: usize) |c, v| c.model_parallel = v;
    /// `pipeline_parallel`: the ranks that share a copy of the model are so many pipeline stages ([`Config::stage_of`]), each with
    /// chunks of its own.
    "pipeline_parallel": pipeline_parallel(stages: usize) |c, v| c.pipeline_parallel = v;
    /// `emulate`: every rank's collectives share a link of this speed.
    "emulate": emulate(link: Link) |c, v| c.emulate = Some(v);
    /// `overlap`: when parameters are gathered (default window).
    "overlap": overlap(overlap: Overlap) |c, v| c.overlap = v;
    /// `credits`: how far gathers run ahead (default 3 buckets; overlap window only).
    "credits": credits(credits: Credits) |c, v| c.credits = v;
    /// `credits_bytes`: how many bytes gathers run ahead, beside the bound of `credits` (overlap window only). A bucket
    /// above it is gathered on demand only.
    "credits_bytes": credits_bytes(bytes: u64) |c, v| c.credits_bytes = Some(v);
    /// `first_gather`: where the first gathers of a version may start (default at the step's end; overlap chain and window).
    "first_gather": first_gather(first: FirstGather) |c, v| c.first_gather = v;
    /// `gather_group_bytes`: gather neighbouring buckets in one call of at most this many bytes (default each by itself).
    "gather_group_bytes": gather_group_bytes(bytes: usize) |c, v| c.gather_group_bytes = v;
    /// `overlap_grad_reduce`: reduce buckets during backward (default true).
    "overlap_grad_reduce": overlap_grad_reduce(on: bool) |c, v| c.overlap_grad_reduce = v;
    /// `skip`: who decides that a step is skipped (default the host).
    "skip": skip(who: Skip) |c, v| c.skip = v;
    /// `grad_dtype` of parameters that do not set their own (default f32): what guards write and what is sent. Sums are f32.
    "grad_dtype": grad_dtype(dtype: DType) |c, v| c.grad_dtype = v;
    /// `bucket_size`, in elements. Not together with `num_buckets`.
    "bucket_size": bucket_size(numel: usize) |c, v| c.bucket_size = Some(v);
    /// `num_buckets`: about this many. Not together with `bucket_size`.
    "num_buckets": num_buckets(buckets: usize) |c, v| c.num_buckets = Some(v);
    /// `layout`: how parameters lie in their buffers (default standard).
    "layout": layout(layout: Layout) |c, v| c.layout = v;
    /// `bandwidth_alignment`: bucket ends at multiples of 65 536 elements (default false).
    "bandwidth_alignment": bandwidth_alignment(on: bool) |c, v| c.bandwidth_alignment = v;
    /// `storage`: where gathered parameters land (default views): in the model's own memory, or in that of the gradients.
    "storage": storage(storage: Storage) |c, v| c.storage = v;
    /// `lr`: learning rate of groups that do not set their own (default 1e-3).
    "lr": lr(lr: f64) |c, v| c.lr = v;
    /// `betas` of groups that do not set their own (default 0.9, 0.999).
    "betas": betas(beta1: f64, beta2: f64) |c, a, b| c.betas = (a, b);
    /// `eps` of groups that do not set their own (default 1e-8).
    "eps": eps(eps: f64) |c, v| c.eps = v;
    /// `weight_decay` of groups that do not set their own (default 0.01).
    "weight_decay": weight_decay(decay: f64) |c, v| c.weight_decay = v;
    /// `adam_w`: decoupled weight decay (default true).
    "adam_w": adam_w(on: bool) |c, v| c.adam_w = v;
    /// `max_norm` of the gradients (default 1.0; 0 turns clipping off).
    "max_norm": max_norm(norm: f64) |c, v| c.max_norm = v;
    /// `norm_type`: which norm of the gradients is told and clipped by (default the 2-norm). An infinite power is the inf norm.
    "norm_type": norm_type(norm: NormType) |c, v| c.norm_type = if v == NormType::P(f64::INFINITY) { NormType::Inf } else { v };
    /// `average = "weight"`: divide by the sum of the ranks' weights, see [`Engine::set_weight`](crate::Engine::set_weight).
    "average": average_by_weight(on: bool) |c, v| c.average = if v { Average::Weight } else { Average::Ranks(1) };
    /// `on_nonfinite`: skip the step (default), or skip it and return an error.
    "on_nonfinite": on_nonfinite(policy: OnNonFinite) |c, v| c.on_nonfinite = v;
    /// `check_for_nan_in_grad`: look at gradients before they are reduced too, and name whose was not finite (default false).
    "check_for_nan_in_grad": check_for_nan_in_grad(on: bool) |c, v| c.check_for_nan_in_grad = v;
    /// `unused`: a parameter without gradient counts as zero (default), or is an error.
    "unused": unused(policy: Unused) |c, v| c.unused = v;
    /// `scaler.kind`: which loss scaler (default none).
    "scaler.kind": scaler(kind: ScalerKind) |c, v| c.scaler = v;
    /// `scaler.scale`: the scale of the constant scaler (default 65 536).
    "scaler.scale": scaler_scale(scale: f64) |c, v| c.scale = v;
    /// `scaler.initial`: the first scale of the dynamic scaler (default 2^32).
    "scaler.initial": scaler_initial(scale: f64) |c, v| c.initial = v;
    /// `scaler.min`: the smallest scale of the dynamic scaler (default 1).
    "scaler.min": scaler_min(scale: f64) |c, v| c.min = v;
    /// `scaler.growth`: factor after `interval` good steps (default 2).
    "scaler.growth": scaler_growth(factor: f64) |c, v| c.growth = v;
    /// `scaler.backoff`: factor after `hysteresis` bad steps (default 0.5).
    "scaler.backoff": scaler_backoff(factor: f64) |c, v| c.backoff = v;
    /// `scaler.interval`: good steps in a row before growth (default 1000).
    "scaler.interval": scaler_interval(steps: u32) |c, v| c.interval = v;
    /// `scaler.hysteresis`: bad steps before back-off (default 2).
    "scaler.hysteresis": scaler_hysteresis(steps: u32) |c, v| c.hysteresis = v;
    /// `steps_in_flight`: step blocks while this many outcomes are unknown, from 1 to 64 (default 2).
    "steps_in_flight": steps_in_flight(steps: u32) |c, v| c.steps_in_flight = v;
    /// `deadlines.start_up_s` (default 600 s).
    "deadlines.start_up_s": start_up_deadline(limit: Duration) |c, v| c.start_up = v;
    /// `deadlines.collective_s` (default 600 s).
    "deadlines.collective_s": collective_deadline(limit: Duration) |c, v| c.collective = v;
    /// `deadlines.silence_s` (default 600 s).
    "deadlines.silence_s": silence_deadline(limit: Duration) |c, v| c.silence = v;
    /// `check_order_every` so many steps (default 100; 0 never).
    "check_order_every": check_order_every(steps: u64) |c, v| c.check_order_every = v;
    /// `start_params`: broadcast rank 0's (default), or check that all agree.
    "start_params": start_params(how: StartParams) |c, v| c.start_params = v;
}

impl Config {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// `device`: `cpu` (default) or `null`.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.explicit.insert("device");
        self.device = name.into();
        self
    }

    /// `transport`: `local` (default).
    #[must_use]
    pub fn transport(mut self, name: impl Into<String>) -> Self {
        self.explicit.insert("transport");
        self.transport = name.into();
        self
    }

    /// All three deadlines at once: tests and drills want short ones.
    #[must_use]
    pub fn deadlines(self, limit: Duration) -> Self {
        self.start_up_deadline(limit).collective_deadline(limit).silence_deadline(limit)
    }

    /// The device, by name: `cpu` or `null`.
    pub fn device_name(&self) -> &str {
        &self.device
    }

    /// The number of ranks that the `ranks` key asks for.
    pub fn configured_ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// How many ranks share one copy of the model.
    pub fn model_parallel_ranks(&self) -> usize {
        self.model_parallel
    }

    /// How many pipeline stages the ranks that share a copy of the model are.
    pub fn pipeline_stages(&self) -> usize {
        self.pipeline_parallel
    }

    /// The pipeline stage of a rank, whose chunks its model has: of the ranks that share a copy of the model, the first
    /// `model_parallel / pipeline_parallel` are stage 0, and so on.
    ///
    /// ```
    /// let config = gatherflow::Config::new().model_parallel(4).pipeline_parallel(2);
    /// assert_eq!([0, 1, 2, 3, 4].map(|rank| config.stage_of(rank)), [0, 0, 1, 1, 0]);
    /// ```
    pub fn stage_of(&self, rank: usize) -> usize {
        let share = self.model_parallel.max(1);
        (rank % share).saturating_mul(self.pipeline_parallel) / share
    }

    /// The overlap mode.
    pub fn overlap_mode(&self) -> Overlap {
        self.overlap
    }

    /// The learning rate of groups that do not set their own.
    pub fn learning_rate(&self) -> f64 {
        self.lr
    }

    /// The emulated link, if there is one.
    pub fn link(&self) -> Option<Link> {
        self.emulate
    }

    /// Whether this key was set, by text or builder, rather than left at its default.
    pub fn is_explicit(&self, key: &str) -> bool {
        self.explicit.contains(key)
    }
}
