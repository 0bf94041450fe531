//! A drawn job: everything that a property test varies, as one value.
//!
//! A [`Draw`] is plain data and prints in full. What does not fit together (f16 without a loss scale, gradients of a type that
//! the parameter cannot have) is made to fit when the model is built, so that every value is a job and shrinks to another one.
//! To vary one more thing, add a field and a strategy for it in [`draws`], or in `setting` if it must not change a bit.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

use std::time::Duration;

use gatherflow::{
    Across, Credits, DType, FirstGather, Group, GroupId, Layout, Link, NormType, Overlap, ParamOptions, ShardGroup,
    ShardGroupId, Skip, State, Storage, SumOver,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::reference::Scaler;
use crate::synthetic::{Job, Net, Setting, Trainer, random_bits, serial, shuffled};

#[derive(Clone, Debug)]
pub struct Draw {
    /// d: how many copies of the model there are, each of `model_parallel` ranks.
    pub copies: usize,
    pub model_parallel: usize,
    pub shard_groups: Vec<ShardGroupDraw>,
    pub bucket_size: usize,
    pub layout: Layout,
    /// Of parameters that take the default and can have it.
    pub grad_dtype: DType,
    pub adam_w: bool,
    pub norm: NormType,
    pub max_norm: f64,
    pub scaler: Option<Scaler>,
    /// Averages by weights, 0 on some ranks.
    pub weighted: bool,
    /// Beside the three that every model has.
    pub groups: Vec<Group>,
    pub units: Vec<UnitDraw>,
    pub steps: Vec<StepDraw>,
    /// The step before which the state is taken to new engines.
    pub interrupted: Option<Index>,
    /// Every rank closes while outcomes are unknown.
    pub closes_early: bool,
    pub setting: Setting,
}

#[derive(Clone, Debug)]
pub struct ShardGroupDraw {
    /// Of the divisors of d.
    pub ranks: Index,
    pub across: Across,
    pub average_over: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct UnitDraw {
    pub opens_chunk: bool,
    pub params: Vec<ParamDraw>,
    /// Parameters of earlier units of the same chunk or another that this one uses too.
    pub ties: Vec<Index>,
}

#[derive(Clone, Debug)]
pub struct ParamDraw {
    pub numel: usize,
    pub dtype: DType,
    pub gradient: Gradient,
    pub group: Index,
    /// Of those that the job has; the first is that of all ranks.
    pub shard_group: Index,
    pub kind: Kind,
    pub shared_embedding: bool,
    pub tensor_parallel: bool,
    /// Summed over the model-parallel ranks, if it is not tensor-parallel.
    pub summed: bool,
    /// A copy of one of the parameters so far, whose shape and marks it then has.
    pub copy_of: Option<Index>,
}

/// The element type of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// The configuration's.
    Default,
    F32,
    /// The parameter's.
    Own,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    Frozen,
    /// Trainable, and nobody writes its gradient.
    Unused,
    /// Every other element is written, into zeroed memory.
    Sparse,
}

#[derive(Clone, Debug)]
pub struct StepDraw {
    /// 0 is a step without backward.
    pub microbatches: usize,
    /// Ranks differ in the number of microbatches.
    pub uneven: bool,
    pub order: Order,
    pub seed: u64,
    /// The rank on which a gradient is infinite.
    pub overflow: Option<Index>,
    /// The rank that abandons the first gradient it would write.
    pub abandon: Option<Index>,
    pub evaluate: Evaluate,
    pub zero_grad: bool,
    /// Of the units, before forward, and the rank that does so (all, if none).
    pub prefetch: Option<(Index, Option<Index>)>,
    /// The rank that swaps other parameters in and back after the step.
    pub swap: Option<Index>,
    /// The parameter that is written from outside after the step, with masters that follow.
    pub write: Option<Index>,
    /// The learning rate that the first group has from this step on.
    pub lr: Option<f64>,
}

/// How a rank's forward goes through the units; another way on every rank and in every microbatch, but for the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Registration,
    Permuted,
    /// Up to eight visits, some units several times, others not at all.
    Any,
}

/// Where a rank evaluates.
#[derive(Clone, Debug)]
pub struct Evaluate {
    pub before: bool,
    pub between_microbatches: bool,
    pub after: bool,
    /// One rank only.
    pub alone: Option<Index>,
}

impl Draw {
    /// The model, and the default gradient dtype as far as any of its parameters reads it.
    fn net(&self) -> (Net, DType) {
        let mut net = Net::empty();
        let groups = self.groups.iter().fold(3, |_, group| net.group(group.clone()).0 as usize + 1);
        for (number, group) in self.shard_groups.iter().enumerate() {
            let divisors: Vec<usize> = (1..=self.copies).filter(|n| self.copies.is_multiple_of(*n)).collect();
            let (ranks, across, average_over) = (*group.ranks.get(&divisors), group.across, group.average_over);
            net.model.shard_group(ShardGroup { name: format!("group {number}"), ranks, across, average_over });
        }
        let first_copies = self.first_copies();
        let mut default_is_read = false;
        for (number, unit) in self.units.iter().enumerate() {
            if unit.opens_chunk || number == 0 {
                net.chunk();
            }
            net.unit(&format!("unit {number}"));
            let before = net.params().to_vec();
            for (index, drawn) in unit.params.iter().enumerate() {
                let first = first_copies[net.params().len()];
                let param = self.params().nth(first).unwrap();
                let fits = |grad: DType| grad == DType::F32 || grad == param.dtype || param.dtype == DType::F32;
                let grad_dtype = match drawn.gradient {
                    Gradient::Default if fits(self.grad_dtype) => None,
                    Gradient::Own => Some(param.dtype),
                    _ => Some(DType::F32),
                };
                let trainable = param.kind != Kind::Frozen;
                default_is_read |= grad_dtype.is_none() && trainable;
                let options = ParamOptions {
                    group: GroupId(param.group.index(groups) as u32),
                    trainable,
                    grad_dtype,
                    tensor_parallel: param.tensor_parallel,
                    shared_embedding: drawn.shared_embedding,
                    shard_group: ShardGroupId(param.shard_group.index(self.shard_groups.len() + 1) as u32),
                    sum_over: if param.summed && !param.tensor_parallel {
                        SumOver::ModelParallel
                    } else {
                        SumOver::Nothing
                    },
                    shared: (first_copies.iter().filter(|copy| **copy == first).count() > 1)
                        .then(|| format!("weight {first}")),
                };
                let kind = format!("{:?}", if trainable { drawn.kind } else { Kind::Frozen }).to_lowercase();
                net.param(&format!("{number}.{index} {kind}"), param.numel, param.dtype, options);
            }
            let mut tied: Vec<usize> = unit.ties.iter().map(|tie| tie.index(before.len().max(1))).collect();
            tied.sort_unstable();
            tied.dedup();
            tied.iter().filter_map(|tie| before.get(*tie)).for_each(|param| net.use_param(param.id));
        }
        (net, if default_is_read { self.grad_dtype } else { DType::F32 })
    }

    fn params(&self) -> impl Iterator<Item = &ParamDraw> {
        self.units.iter().flat_map(|unit| &unit.params)
    }

    /// By parameter: the first of its copies, itself if it has no earlier one.
    fn first_copies(&self) -> Vec<usize> {
        let mut firsts = Vec::new();
        for (number, param) in self.params().enumerate() {
            let earlier = param.copy_of.filter(|_| number > 0).map(|copy| firsts[copy.index(number)]);
            firsts.push(earlier.unwrap_or(number));
        }
        firsts
    }

    fn ranks(&self) -> usize {
        self.copies * self.model_parallel
    }

    /// f16 comes with a loss scale.
    fn scaler(&self, net: &Net, grad_dtype: DType) -> Option<Scaler> {
        let trainable = || net.params().iter().filter(|p| p.options.trainable);
        let half =
            trainable().any(|p| p.dtype == DType::F16 || p.options.grad_dtype.unwrap_or(grad_dtype) == DType::F16);
        self.scaler.or_else(|| half.then(|| Scaler::new(64.0, 2, 1)))
    }

    /// Storage `shared` where every parameter fits into the memory of its gradient.
    fn setting(&self, net: &Net, grad_dtype: DType) -> Setting {
        let mut trainable = net.params().iter().filter(|p| p.options.trainable);
        let fits = trainable.all(|p| p.dtype.bytes() <= p.options.grad_dtype.unwrap_or(grad_dtype).bytes());
        Setting { storage: if fits { self.setting.storage } else { Storage::Views }, ..self.setting }
    }

    fn program(&self, step: u64, rank: usize, units: usize) -> Vec<Vec<usize>> {
        let draw = &self.steps[step as usize];
        let count = if draw.uneven { (draw.microbatches + rank) % 4 } else { draw.microbatches };
        let microbatch = |number: usize| {
            let words = [draw.seed, rank as u64, number as u64];
            match draw.order {
                Order::Registration => (0..units).collect(),
                Order::Permuted => shuffled(units, &words),
                Order::Any => {
                    let visits = random_bits(&words) % 9;
                    let visit = |i| (random_bits(&[&words[..], &[i]].concat()) % units as u64) as usize;
                    (0..visits).map(visit).collect()
                }
            }
        };
        (0..count).map(microbatch).collect()
    }

    /// Trains the engine and the serial reference, and compares them at every read, loss and outcome, and all state at the end.
    ///
    /// Returns how many steps were updated and how many skipped.
    pub fn check(&self) -> (u64, u64) {
        let (net, grad_dtype) = self.net();
        let program = |step, rank| self.program(step, rank, net.units.len());
        let steps = 0..self.steps.len() as u64;
        let ranks = self.ranks();
        let overflow = |step: u64| Some((step, self.steps[step as usize].overflow?.index(ranks)));
        let overflows: Vec<(u64, usize)> = steps.clone().filter_map(overflow).collect();
        let abandon = |step: u64| Some((step, self.steps[step as usize].abandon?.index(ranks)));
        let abandons: Vec<(u64, usize)> = steps.clone().filter_map(abandon).collect();
        let params = net.params().len().max(1);
        let write = |step: u64| Some((step, self.steps[step as usize].write?.index(params)));
        let writes: Vec<(u64, usize)> = steps.clone().filter_map(write).collect();
        let rates: Vec<(u64, f64)> =
            steps.clone().filter_map(|step| Some((step, self.steps[step as usize].lr?))).collect();
        let job = Job {
            overflows: &overflows,
            abandons: &abandons,
            writes: &writes,
            rates: &rates,
            may_stand_still: true,
            scaler: self.scaler(&net, grad_dtype),
            weight: self
                .weighted
                .then_some(|step, copy| (random_bits(&[step, copy as u64]) % 3 + u64::from(copy == 0)) as f64 / 2.0),
            adam_w: self.adam_w,
            norm: self.norm,
            max_norm: self.max_norm,
            grad_dtype,
            bucket_size: self.bucket_size,
            layout: self.layout,
            model_parallel: self.model_parallel,
            ..Job::new(&net, ranks, steps.end, &program)
        };
        let expected = serial(&job);
        let setting = self.setting(&net, grad_dtype);
        let (before, after) = self.steps.split_at(self.interrupted.map_or(0, |step| step.index(self.steps.len())));
        let train = |mut trainer: Trainer<'_>, steps: &[StepDraw]| {
            for step in steps {
                self.one_step(step, &mut trainer);
            }
            let state = trainer.engine.state().unwrap();
            (state, trainer.finish())
        };
        let interrupted = self.interrupted.map(|_| {
            let parts = job.on_ranks(&expected, &setting, |trainer| train(trainer, before));
            let (parts, finished): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            (State::merge(parts).unwrap(), finished[0].counters.skipped_steps)
        });
        let finished = job.on_ranks(&expected, &setting, |mut trainer| {
            if let Some((state, _)) = &interrupted {
                trainer.load(state);
            }
            let closes = self.closes_early;
            for step in after {
                self.one_step(step, &mut trainer);
            }
            if closes { trainer.close_early() } else { trainer.finish() }
        });
        let replicas = (0..ranks).flat_map(|rank| (0..rank).map(move |other| (other, rank)));
        for (one, other) in replicas.filter(|(one, other)| expected.alike(*one, *other)) {
            assert_eq!(finished[one].hash, finished[other].hash, "ranks {one} and {other} differ: {finished:?}");
        }
        let skipped = finished[0].counters.skipped_steps + interrupted.map_or(0, |(_, skipped)| skipped);
        assert_eq!(skipped, steps.end - expected.updated_steps());
        (expected.updated_steps(), skipped)
    }

    fn one_step(&self, step: &StepDraw, trainer: &mut Trainer<'_>) {
        let evaluates = |trainer: &Trainer<'_>, here: bool| {
            if here && step.evaluate.alone.is_none_or(|rank| rank.index(self.ranks()) == trainer.rank()) {
                trainer.evaluate();
            }
        };
        if step.zero_grad {
            trainer.engine.zero_grad().unwrap();
        }
        evaluates(trainer, step.evaluate.before);
        if let Some((unit, rank)) = step.prefetch
            && rank.is_none_or(|rank| rank.index(self.ranks()) == trainer.rank())
        {
            let units = &trainer.job.net.units;
            trainer.engine.prefetch(units[unit.index(units.len())].id).unwrap();
        }
        trainer.microbatches_with(|trainer| evaluates(trainer, step.evaluate.between_microbatches));
        trainer.step();
        if step.swap.is_some_and(|rank| rank.index(self.ranks()) == trainer.rank()) {
            trainer.engine.swap_params(|_, out| out.fill_with(|_| f32::NAN)).unwrap().back().unwrap();
        }
        evaluates(trainer, step.evaluate.after);
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Any job.
pub fn draws() -> impl Strategy<Value = Draw> {
    let sizes = select(vec![1_usize, 64, 128, 500, 1 << 20]);
    let layout = prop_oneof![2 => Just(Layout::Standard), 1 => Just(Layout::Reference)];
    let ranks = prop_oneof![2 => (1_usize..=8, Just(1_usize)), 1 => (1_usize..=4, 1_usize..=3)];
    let ranks = (ranks, prop_oneof![1 => Just(Vec::new()), 1 => prop::collection::vec(shard_group(), 1..4)]);
    let averages = (any::<bool>(), prop::bool::weighted(0.3));
    let layout = (ranks, sizes, layout, select(DTYPES.to_vec()), averages);
    let norm = prop_oneof![2 => Just(NormType::P(2.0)), 1 => Just(NormType::P(1.0)), 1 => Just(NormType::Inf),
        1 => select(vec![0.1, 0.5, 3.0, 7.0]).prop_map(NormType::P)];
    let norm = (norm, select(vec![2.0, 0.0, 0.01, 1e9]));
    let scale = (0_i32..24, 1_u32..4, 1_i32..3)
        .prop_map(|(scale, interval, hysteresis)| Scaler::new(2.0_f32.powi(scale), interval, hysteresis));
    let groups = prop::collection::vec(group(), 0..3);
    let units = prop::collection::vec(unit(), 1..5);
    let interrupted = prop::option::weighted(0.3, any::<Index>());
    let steps = (prop::collection::vec(step(), 1..5), interrupted, prop::bool::weighted(0.2));
    (layout, (norm, prop::option::of(scale)), groups, units, steps, setting()).prop_map(
        |(layout, ((norm, max_norm), scaler), groups, units, (steps, interrupted, closes_early), setting)| {
            let (ranks, bucket_size, layout, grad_dtype, (adam_w, weighted)) = layout;
            let ((copies, model_parallel), shard_groups) = ranks;
            Draw {
                copies,
                model_parallel,
                shard_groups,
                bucket_size,
                layout,
                grad_dtype,
                adam_w,
                norm,
                max_norm,
                scaler,
                weighted,
                groups,
                units,
                steps,
                interrupted,
                closes_early,
                setting,
            }
        },
    )
}

fn shard_group() -> impl Strategy<Value = ShardGroupDraw> {
    let across = select(vec![Across::Experts, Across::Replicas]);
    (any::<Index>(), across, prop::option::of(1_usize..9)).prop_map(|(ranks, across, average_over)| ShardGroupDraw {
        ranks,
        across,
        average_over,
    })
}

fn group() -> impl Strategy<Value = Group> {
    let betas = prop::option::of((0.0_f64..0.99, 0.0_f64..0.999));
    let rates = (prop::option::of(0.0_f64..0.1), 0.0_f64..2.0);
    (rates, betas, prop::option::of(1e-9_f64..1e-4), prop::option::of(0.0_f64..0.2)).prop_map(
        |((lr, lr_multiplier), betas, eps, weight_decay)| Group { lr, lr_multiplier, betas, eps, weight_decay },
    )
}

fn unit() -> impl Strategy<Value = UnitDraw> {
    let params = prop::collection::vec(param(), 0..4);
    let ties = prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(any::<Index>(), 1..3)];
    (prop::bool::weighted(0.3), params, ties).prop_map(|(opens_chunk, params, ties)| UnitDraw {
        opens_chunk,
        params,
        ties,
    })
}

fn param() -> impl Strategy<Value = ParamDraw> {
    let numel = prop_oneof![3 => select(vec![1_usize, 3, 63, 64, 65]), 2 => 1_usize..200];
    let gradient = select(vec![Gradient::Default, Gradient::F32, Gradient::Own]);
    let kind = prop_oneof![
        5 => Just(Kind::Plain),
        1 => Just(Kind::Frozen),
        1 => Just(Kind::Unused),
        1 => Just(Kind::Sparse),
    ];
    let copy_of = prop::option::weighted(0.2, any::<Index>());
    let marks = (prop::bool::weighted(0.1), any::<bool>(), prop::bool::weighted(0.3), copy_of);
    let groups = (any::<Index>(), any::<Index>());
    (numel, select(DTYPES.to_vec()), gradient, groups, kind, marks).prop_map(
        |(numel, dtype, gradient, (group, shard_group), kind, (shared_embedding, tensor_parallel, summed, copy_of))| {
            ParamDraw {
                numel,
                dtype,
                gradient,
                group,
                shard_group,
                kind,
                shared_embedding,
                tensor_parallel,
                summed,
                copy_of,
            }
        },
    )
}

fn step() -> impl Strategy<Value = StepDraw> {
    let order = select(vec![Order::Registration, Order::Permuted, Order::Any]);
    let overflow = prop_oneof![4 => Just(None), 1 => any::<Index>().prop_map(Some)];
    let bad = (overflow, prop::option::weighted(0.1, any::<Index>()));
    let rarely = || prop::bool::weighted(0.25);
    let evaluate = (rarely(), rarely(), rarely(), prop::option::of(any::<Index>())).prop_map(
        |(before, between_microbatches, after, alone)| Evaluate { before, between_microbatches, after, alone },
    );
    let prefetch = prop::option::weighted(0.3, (any::<Index>(), prop::option::of(any::<Index>())));
    let lr = prop::option::weighted(0.2, 0.0_f64..0.05);
    let write = prop::option::weighted(0.2, any::<Index>());
    let beside = (any::<bool>(), prefetch, prop::option::weighted(0.2, any::<Index>()), (lr, write));
    (0_usize..4, any::<bool>(), order, any::<u64>(), bad, evaluate, beside).prop_map(
        |(
            microbatches,
            uneven,
            order,
            seed,
            (overflow, abandon),
            evaluate,
            (zero_grad, prefetch, swap, (lr, write)),
        )| {
            StepDraw {
                microbatches,
                uneven,
                order,
                seed,
                overflow,
                abandon,
                evaluate,
                zero_grad,
                prefetch,
                swap,
                write,
                lr,
            }
        },
    )
}

/// What must not change a bit.
fn setting() -> impl Strategy<Value = Setting> {
    let overlap = prop_oneof![
        1 => Just(Overlap::None),
        1 => Just(Overlap::Chain),
        3 => Just(Overlap::Window),
    ];
    let credits = prop_oneof![(1_u32..5).prop_map(Credits::Buckets), Just(Credits::Unlimited)];
    let credits_bytes = prop::option::of(1_u64..4000);
    let first_gather = select(vec![FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward]);
    let calls = prop_oneof![2 => Just(0), 1 => 1_usize..4000];
    let storage = select(vec![Storage::Views, Storage::Shared]);
    let gathers = (overlap, storage, credits, credits_bytes, first_gather, calls);
    let (overlap_grad_reduce, issue_on_thread, two_writers) = (any::<bool>(), any::<bool>(), any::<bool>());
    let slow = Link::parse("1gbit,300us").unwrap();
    let link = prop_oneof![4 => Just(None), 1 => Just(Some(slow))];
    let late = prop_oneof![Just(Duration::ZERO), Just(Duration::from_millis(2))];
    let verdicts = (select(vec![Skip::Host, Skip::Device]), any::<bool>(), late);
    (gathers, overlap_grad_reduce, (issue_on_thread, two_writers), verdicts, 1_u32..6, link).prop_map(
        |(gathers, overlap_grad_reduce, (issue_on_thread, two_writers), verdicts, steps_in_flight, link)| {
            let (skip, check_for_nan_in_grad, verdict_delay) = verdicts;
            let (overlap, storage, credits, credits_bytes, first_gather, gather_group_bytes) = gathers;
            Setting {
                storage,
                gather_group_bytes,
                credits,
                credits_bytes: credits_bytes.filter(|_| overlap == Overlap::Window),
                first_gather,
                overlap_grad_reduce,
                skip,
                check_for_nan_in_grad,
                verdict_delay,
                issue_on_thread,
                two_writers,
                steps_in_flight,
                link,
                ..Setting::of(overlap)
            }
        },
    )
}
