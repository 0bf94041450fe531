//! A synthetic job: a small model of mixed dtypes and groups, and a deterministic executor for it.
//!
//! Every gradient element is a function of rank, step, microbatch, visit, parameter and element, **and of the weight read**,
//! so a stale weight changes everything after it. The same functions drive the engine ([`Trainer`]) and the serial
//! reference ([`serial`]); the trainer compares each read, loss and outcome with the reference while it runs, and all
//! state at the end, bit for bit.
//!
//! | file | idea |
//! | --- | --- |
//! | `net` | the model: units, parameters, groups |
//! | `sight` | what a rank sees in one step, from any thread |
//! | `pipeline` | several chunks' passes open at once |
//! | `resume` | jobs that are interrupted, and go on from a state |
//! | `trainer` | one rank of the engine, compared with the reference as it goes |
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, missing_debug_implementations, clippy::unwrap_used)]
#![allow(clippy::missing_panics_doc)]

mod net;
mod pipeline;
mod resume;
mod sight;
mod trainer;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gatherflow::{
    Across, Config, Credits, DType, FirstGather, Internals, Layout, Link, NormType, Overlap, ParamId, ParamInfo, Plan,
    ScalerKind, Skip, State, Storage, SumOver,
};

pub use net::Net;
pub use pipeline::Beside;
pub use resume::bits;
pub use trainer::{Finished, Trainer};

use crate::reference::{Hyper, Scaler, Serial, Verdict, View, Weight, rounded};

/// Which units forward enters, in order, in each microbatch of a step; backward goes the other way.
pub type Program = dyn Fn(u64, usize) -> Vec<Vec<usize>> + Sync;

/// What is trained, and how; the same for every [`Setting`].
pub struct Job<'a> {
    pub net: &'a Net,
    pub ranks: usize,
    /// How many ranks share a copy of the model.
    pub model_parallel: usize,
    pub steps: u64,
    /// Step and rank to microbatches.
    pub program: &'a (dyn Fn(u64, usize) -> Vec<Vec<usize>> + Sync),
    /// Whether the first gradient of the first unit that the rank enters in this step overflows.
    pub overflow: fn(u64, usize) -> bool,
    /// The same for the steps and ranks in this list.
    pub overflows: &'a [(u64, usize)],
    /// The steps and ranks in which the first gradient that the rank would write is abandoned.
    pub abandons: &'a [(u64, usize)],
    /// After which steps which parameter is written from outside ([`Net::rewritten`]), by its number.
    pub writes: &'a [(u64, usize)],
    /// An updated step may leave all parameters as they are: nothing has a gradient, or too little of one.
    pub may_stand_still: bool,
    pub scaler: Option<Scaler>,
    /// Step and copy of the model to its weight in the average; all alike, if none.
    pub weight: Option<fn(u64, usize) -> f64>,
    pub adam_w: bool,
    pub layout: Layout,
    pub norm: NormType,
    pub max_norm: f64,
    /// Of the parameters that have none of their own.
    pub grad_dtype: DType,
    pub bucket_size: usize,
    /// Learning rate of the groups that have none of their own.
    pub lr: f64,
    /// Learning rates that the first group takes, each from the step on before which it is set ([`decayed`]).
    pub rates: &'a [(u64, f64)],
}

/// The learning rate at t of one that is set for the first group, which falls with the updated steps.
pub fn decayed(rate: f64, t: u64) -> f64 {
    rate / (1.0 + t as f64 / 5.0)
}

/// What must not change a bit.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // dimensions of their own
pub struct Setting {
    pub overlap: Overlap,
    pub storage: Storage,
    /// Read in mode window only.
    pub credits: Credits,
    /// Read in mode window only.
    pub credits_bytes: Option<u64>,
    /// Not read in mode none.
    pub first_gather: FirstGather,
    /// 0: every bucket by itself.
    pub gather_group_bytes: usize,
    pub overlap_grad_reduce: bool,
    pub skip: Skip,
    /// Not read where the job has a scaler. With it, a step with a gradient that is not finite is an error.
    pub check_for_nan_in_grad: bool,
    pub issue_on_thread: bool,
    pub steps_in_flight: u32,
    /// Gradients of a unit are written by two threads at once.
    pub two_writers: bool,
    /// How late each verdict is on the device.
    pub verdict_delay: Duration,
    /// How long forward stays in each unit.
    pub pause: Duration,
    pub link: Option<Link>,
}

impl Setting {
    pub fn of(overlap: Overlap) -> Self {
        Self {
            overlap,
            storage: Storage::Views,
            credits: Credits::Buckets(3),
            credits_bytes: None,
            first_gather: FirstGather::Step,
            gather_group_bytes: 0,
            overlap_grad_reduce: true,
            skip: Skip::Host,
            check_for_nan_in_grad: false,
            issue_on_thread: false,
            steps_in_flight: 2,
            two_writers: false,
            verdict_delay: Duration::ZERO,
            pause: Duration::ZERO,
            link: None,
        }
    }

    pub fn window(credits: Credits) -> Self {
        Self { credits, ..Self::of(Overlap::Window) }
    }

    /// The steps of a job whose buckets are gathered: where the device decides, skipped ones too.
    pub fn gathered_steps(&self, updated: u64, steps: u64) -> u64 {
        if self.skip == Skip::Host { updated } else { steps }
    }

    /// None, chain, and window with little, some and unlimited credit.
    pub fn modes() -> [Self; 5] {
        [
            Self::of(Overlap::None),
            Self::of(Overlap::Chain),
            Self::window(Credits::Buckets(1)),
            Self::window(Credits::Buckets(3)),
            Self::window(Credits::Unlimited),
        ]
    }

    /// Each of [`Setting::modes`] in each storage.
    pub fn modes_and_storages() -> impl Iterator<Item = Self> {
        let stored = |mode| [Storage::Views, Storage::Shared].map(|storage| Self { storage, ..mode });
        Self::modes().into_iter().flat_map(stored)
    }
}

impl<'a> Job<'a> {
    /// Plain f32 and bf16 without a scaler, nothing overflows.
    pub fn new(
        net: &'a Net,
        ranks: usize,
        steps: u64,
        program: &'a (dyn Fn(u64, usize) -> Vec<Vec<usize>> + Sync),
    ) -> Self {
        Self {
            net,
            ranks,
            model_parallel: 1,
            steps,
            program,
            overflow: |_, _| false,
            overflows: &[],
            abandons: &[],
            writes: &[],
            may_stand_still: false,
            scaler: None,
            weight: None,
            adam_w: true,
            layout: Layout::Standard,
            norm: NormType::default(),
            max_norm: 2.0,
            grad_dtype: DType::F32,
            bucket_size: 128,
            lr: 0.02,
            rates: &[],
        }
    }

    /// What is set for the first group before a step.
    fn rate_at(&self, step: u64) -> Option<f64> {
        self.rates.iter().find(|(at, _)| *at == step).map(|(_, rate)| *rate)
    }

    fn overflows_at(&self, step: u64, rank: usize) -> bool {
        (self.overflow)(step, rank) || self.overflows.contains(&(step, rank))
    }

    /// Whether a rank abandons a gradient in this step: it has to write one.
    fn abandons_at(&self, step: u64, rank: usize) -> bool {
        let program = (self.program)(step, rank - rank % self.model_parallel);
        let writes = program.iter().flatten().any(|unit| self.net.written(*unit).next().is_some());
        writes && self.abandons.contains(&(step, rank))
    }

    /// The parameter that is written from outside after a step.
    fn written_after(&self, step: u64) -> Option<&ParamInfo> {
        let (_, param) = self.writes.iter().find(|(at, _)| *at == step)?;
        self.net.params().get(*param)
    }

    fn is_spoiled(&self, step: u64) -> bool {
        (0..self.ranks).any(|rank| self.abandons_at(step, rank))
    }

    pub fn config(&self, setting: &Setting) -> Config {
        let config = Config::new()
            .deadlines(Duration::from_secs(20))
            .check_order_every(1)
            .bucket_size(self.bucket_size)
            .layout(self.layout)
            .lr(self.lr)
            .max_norm(self.max_norm)
            .norm_type(self.norm)
            .adam_w(self.adam_w)
            .overlap(setting.overlap)
            .storage(setting.storage)
            .overlap_grad_reduce(setting.overlap_grad_reduce)
            .skip(setting.skip)
            .steps_in_flight(setting.steps_in_flight);
        let config = if self.model_parallel > 1 { config.model_parallel(self.model_parallel) } else { config };
        let config = if self.weight.is_some() { config.average_by_weight(true) } else { config };
        let config = if setting.overlap == Overlap::Window { config.credits(setting.credits) } else { config };
        let config = match setting.gather_group_bytes {
            0 => config,
            bytes => config.gather_group_bytes(bytes),
        };
        let config = match self.scaler {
            None if setting.check_for_nan_in_grad => config.check_for_nan_in_grad(true),
            _ => config,
        };
        let config = match self.grad_dtype {
            DType::F32 => config,
            dtype => config.grad_dtype(dtype),
        };
        let config = match setting.overlap {
            Overlap::None => config,
            _ => config.first_gather(setting.first_gather),
        };
        let config = match setting.credits_bytes {
            Some(bytes) => config.credits_bytes(bytes),
            None => config,
        };
        let config = match setting.link {
            Some(link) if self.ranks > 1 => config.emulate(link),
            _ => config,
        };
        match self.scaler {
            None => config,
            Some(scaler) if scaler.constant => {
                config.scaler(ScalerKind::Constant).scaler_scale(f64::from(scaler.scale))
            }
            Some(scaler) => config
                .scaler(ScalerKind::Dynamic)
                .scaler_initial(f64::from(scaler.scale))
                .scaler_interval(scaler.growth_interval)
                .scaler_hysteresis(scaler.full_hysteresis as u32),
        }
    }

    /// Runs the job on threads, one per rank, and returns what `run` makes of each.
    pub fn on_ranks<T: Send>(
        &self,
        expected: &Expected,
        setting: &Setting,
        run: impl Fn(Trainer<'_>) -> T + Sync,
    ) -> Vec<T> {
        self.on_ranks_with(expected, setting, |_| Internals::default(), run)
    }

    /// As [`Job::on_ranks`], with faults and delays per rank.
    pub fn on_ranks_with<T: Send>(
        &self,
        expected: &Expected,
        setting: &Setting,
        internals: impl Fn(usize) -> Internals,
        run: impl Fn(Trainer<'_>) -> T + Sync,
    ) -> Vec<T> {
        let ranks = gatherflow::Ranks::with_config(self.ranks, &self.config(setting)).unwrap();
        let run = &run;
        std::thread::scope(|scope| {
            let start = |rank: gatherflow::Rank| {
                let internals = internals(rank.rank());
                scope.spawn(move || run(Trainer::start(rank, self, setting, internals, expected)))
            };
            let threads: Vec<_> = ranks.into_iter().map(start).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    /// Trains to the end on every rank.
    #[allow(clippy::redundant_closure_for_method_calls)] // the method is of one lifetime, the closure of any
    pub fn train(&self, expected: &Expected, setting: &Setting) -> Vec<Finished> {
        self.on_ranks(expected, setting, |trainer| trainer.train_to_the_end())
    }
}

/// What the serial reference says of a job.
pub struct Expected {
    /// Of rank 0: by version, then parameter.
    pub weights: Vec<Vec<Vec<f32>>>,
    /// By version, then view of the reference.
    views: Vec<Vec<Vec<Vec<f32>>>>,
    /// By rank: its view.
    view_of: Vec<usize>,
    /// By step, then rank.
    pub losses: Vec<Vec<f64>>,
    pub verdicts: Vec<Verdict>,
    /// At the end, by view.
    state: Vec<View>,
}

impl Expected {
    /// A parameter as a rank holds it.
    pub fn on_rank(&self, rank: usize, version: u64, param: ParamId) -> &[f32] {
        &self.views[version as usize][self.view_of[rank]][param.index()]
    }

    /// A parameter and its optimizer state at the end, as a rank holds them.
    pub fn state_on(&self, rank: usize, param: ParamId) -> &Weight {
        &self.state[self.view_of[rank]].weights[param.index()]
    }

    /// Whether two ranks hold the same parameters.
    pub fn alike(&self, one: usize, other: usize) -> bool {
        self.view_of[one] == self.view_of[other]
    }

    pub fn updated_steps(&self) -> u64 {
        self.verdicts.iter().filter(|v| v.updated).count() as u64
    }
}

/// Runs a job serially.
pub fn serial(job: &Job<'_>) -> Expected {
    serial_from(job, &State::default())
}

/// Runs serially what is left of a job after a state, all of it after an empty one. The reference knows nothing of the steps before.
pub fn serial_from(job: &Job<'_>, state: &State) -> Expected {
    let net = job.net;
    let plan = net.model.plan(job.ranks, &job.config(&Setting::of(Overlap::None))).unwrap();
    let weights = |rank: usize| {
        let weight = |p: &ParamInfo| {
            let (variant, _) = start_of(&plan, rank, p.id);
            // Copies start from the values of the first one.
            let first = plan.copies_of(p.id).next().unwrap_or(p.id);
            let initial: Vec<f32> = (0..p.numel).map(|i| Net::initial(variant, first, i)).collect();
            let mut weight = Weight::new(p.id, p.dtype, p.options.group.0 as usize, p.options.trainable, &initial);
            if let Some(saved) = state.tensors.iter().find(|tensor| tensor.name == p.name) {
                let piece = &saved.pieces[0];
                weight.param = piece.master.iter().map(|m| rounded(p.dtype, *m)).collect();
                weight.master.clone_from(&piece.master);
                weight.exp_avg.clone_from(&piece.exp_avg);
                weight.exp_avg_sq.clone_from(&piece.exp_avg_sq);
            }
            weight
        };
        net.params().iter().map(weight).collect()
    };
    let groups: Vec<Hyper> = net.hyper(job.lr, job.adam_w);
    let mut optimizer = Serial::new(plan.clone(), weights, groups, job.max_norm, job.scaler).by_norm(job.norm);
    optimizer.t = state.groups.first().map_or(0, |group| group.t);
    let view_of = (0..job.ranks).map(|rank| {
        let is_its = |view: &View| std::ptr::eq(view.weights.as_slice(), optimizer.weights(rank));
        optimizer.views.iter().position(is_its).unwrap()
    });
    let view_of = view_of.collect();
    let snapshot = |optimizer: &Serial| {
        let of_view = |view: &View| view.weights.iter().map(|w| w.param.clone()).collect::<Vec<_>>();
        optimizer.views.iter().map(of_view).collect::<Vec<_>>()
    };
    let before = state.steps as usize;
    let (mut versions, mut losses) = (vec![snapshot(&optimizer); before + 1], vec![Vec::new(); before]);
    let mut verdicts = vec![Verdict::default(); before];
    for step in state.steps..job.steps {
        let scale = optimizer.loss_scale();
        let ranks = (0..job.ranks).map(|rank| serial_rank(job, &plan, optimizer.weights(rank), step, rank, scale));
        let (of_step, gradients): (Vec<f64>, Vec<_>) = ranks.unzip();
        losses.push(of_step);
        if let Some(rate) = job.rate_at(step) {
            optimizer.set_lr(0, move |t| decayed(rate, t));
        }
        let copies = 0..job.ranks / job.model_parallel;
        let weight = copies.map(|copy| job.weight.map_or(1.0, |w| w(step, copy))).sum();
        let verdict = if job.is_spoiled(step) { optimizer.spoiled() } else { optimizer.step(&gradients, weight) };
        let mut weights = snapshot(&optimizer);
        let changed = weights != versions[step as usize];
        assert!(verdict.updated || !changed, "a skipped step changes nothing");
        assert!(
            changed || !verdict.updated || job.may_stand_still,
            "a reference that stands still would prove nothing"
        );
        if let Some(param) = job.written_after(step) {
            let values: Vec<f32> = (0..param.numel).map(|i| Net::rewritten(step, i)).collect();
            optimizer.write(param.id, &values);
            weights = snapshot(&optimizer);
        }
        verdicts.push(verdict);
        versions.push(weights);
    }
    let weights = versions.iter().map(|views| views[0].clone()).collect();
    Expected { weights, views: versions, view_of, losses, verdicts, state: optimizer.views }
}

/// One rank's loss and summed gradients of a step.
fn serial_rank(
    job: &Job<'_>,
    plan: &Plan,
    weights: &[Weight],
    step: u64,
    rank: usize,
    scale: f32,
) -> (f64, Vec<Vec<f32>>) {
    let net = job.net;
    let mut loss = 0.0;
    let mut sums: Vec<Option<Vec<f32>>> = vec![None; weights.len()];
    let mut overflows = job.overflows_at(step, rank);
    for (microbatch, units) in (job.program)(step, data_rank(plan, rank)).iter().enumerate() {
        for unit in units {
            for param in &net.units[*unit].params {
                loss += Net::loss(*param, &weights[param.index()].param);
            }
        }
        for (visit, unit) in units.iter().enumerate().rev() {
            for param in net.written(*unit) {
                let values = &weights[param.index()].param;
                let at = At { rank: noise_of(plan, rank, param), step, microbatch, visit };
                let new = net.gradient(at, param, values, scale, std::mem::take(&mut overflows));
                let dtype = net.params()[param.index()].options.grad_dtype.unwrap_or(job.grad_dtype);
                let sum = &mut sums[param.index()];
                let before = sum.take().or_else(|| net.is_sparse(param).then(|| vec![0.0; new.len()]));
                *sum = Some(match before {
                    None => new.iter().map(|g| rounded(dtype, *g)).collect(),
                    Some(old) => old.iter().zip(&new).map(|(sum, g)| rounded(dtype, sum + g)).collect(),
                });
            }
        }
    }
    let zeros = |w: &Weight| vec![0.0; w.param.len()];
    (loss, sums.into_iter().zip(weights).map(|(sum, w)| sum.unwrap_or_else(|| zeros(w))).collect())
}

/// The first of the ranks that see the same data as this one.
pub fn data_rank(plan: &Plan, rank: usize) -> usize {
    rank - rank % plan.model_parallel()
}

/// The rank whose noise a parameter's gradient has: what model-parallel ranks hold alike gets the same gradient on each.
pub fn noise_of(plan: &Plan, rank: usize, param: ParamId) -> usize {
    let param = plan.param(param);
    let own = param.tensor_parallel || param.sum_over == SumOver::ModelParallel;
    if own { rank } else { data_rank(plan, rank) }
}

/// Which initial values a rank has of a parameter, and whether others take them from it.
pub fn start_of(plan: &Plan, rank: usize, param: ParamId) -> (u64, bool) {
    let param = plan.param(param);
    let (part, at) = (rank % plan.model_parallel(), rank / plan.model_parallel());
    let group = &plan.shard_groups()[param.shard_group];
    let experts = param.shard_group > 0 && group.across == Across::Experts;
    let (own, first) = if experts { (at / group.ranks, at % group.ranks) } else { (0, at) };
    let part = if param.tensor_parallel { part } else { 0 };
    ((own * plan.model_parallel() + part) as u64, first == 0)
}

/// Where in a step a gradient is made.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub rank: usize,
    pub step: u64,
    pub microbatch: usize,
    pub visit: usize,
}

/// Numbers in [-1, 1): splitmix64 over the words.
pub fn random(words: &[u64]) -> f32 {
    (random_bits(words) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

pub fn random_bits(words: &[u64]) -> u64 {
    words.iter().fold(0, |state: u64, word| {
        let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// The first `n` numbers in an order that only `words` decide.
pub fn shuffled(n: usize, words: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|i| random_bits(&[words, &[*i as u64]].concat()));
    order
}

/// Waits until `condition` holds, at most 20 s.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited 20 s for {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A barrier outside the engine, with a deadline.
pub struct Meeting {
    ranks: usize,
    came: AtomicUsize,
}

impl Meeting {
    pub fn of(ranks: usize) -> Self {
        Self { ranks, came: AtomicUsize::new(0) }
    }

    /// Returns once every rank has come as often as this one.
    pub fn meet(&self) {
        let round = self.came.fetch_add(1, Ordering::SeqCst) / self.ranks + 1;
        wait_until("the other ranks to meet", || self.came.load(Ordering::SeqCst) >= round * self.ranks);
    }
}
