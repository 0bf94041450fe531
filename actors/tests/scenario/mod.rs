//! A scripted executor: models, forward orders, skips and unused parameters drawn from a seed, run on every rank of the null
//! device by the plain loop.
#![allow(dead_code, unreachable_pub)]

use std::sync::Arc;

use gatherflow_actors::plan::{
    Across, Alignment, Bucketing, ChunkSpec, ParamId, ParamSpec, Pipeline, Plan, PlanInput, Rank, ShardGroupSpec,
    Storage, SumOver, UnitId, UnitSpec,
};
use gatherflow_actors::{
    Credits, Deadlines, Driver, Edge, FirstGather, Group, LrRow, Overlap, Ranks, Seat, Session, SessionConfig, Skip,
    StartParams, StepRequest,
};
use gatherflow_kernels::norm::NormType;
use gatherflow_kernels::null::{Gate, NullLog, Script, updated_report};
use gatherflow_kernels::verdict::{Average, HostVerdict, OnNonFinite, ScalerRule, VerdictRule};
use gatherflow_kernels::{Access, AccessMode, BufferId, Cause, DType, OpenOptions};

/// A small generator with a fixed sequence for each seed.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// The model and how it is divided.
#[derive(Clone, Debug)]
pub struct Shape {
    pub ranks: usize,
    pub model_parallel: usize,
    /// Pipeline stages among those that share a copy of the model; each has a run of the units.
    pub stages: usize,
    /// Per unit, its parameters.
    pub units: Vec<Vec<usize>>,
    pub numel: Vec<usize>,
    pub dtype: Vec<DType>,
    pub trainable: Vec<bool>,
    /// Per parameter, its shard group.
    pub shard_group: Vec<usize>,
    /// Per parameter, the weight it is a copy of.
    pub shared: Vec<Option<usize>>,
    /// Per parameter, whether it is summed over model-parallel ranks.
    pub summed: Vec<bool>,
    /// Ranks of the two shard groups with a d of their own: replicas, experts.
    pub group_ranks: [usize; 2],
    pub bucket_size: usize,
    pub storage: Storage,
}

impl Shape {
    pub fn regular(ranks: usize, units: usize, per_unit: usize, numel: usize, bucket_size: usize) -> Self {
        let params = units * per_unit;
        Self {
            ranks,
            model_parallel: 1,
            stages: 1,
            units: (0..units).map(|u| (u * per_unit..(u + 1) * per_unit).collect()).collect(),
            numel: vec![numel; params],
            dtype: vec![DType::Bf16; params],
            trainable: vec![true; params],
            shard_group: vec![0; params],
            shared: vec![None; params],
            summed: vec![false; params],
            group_ranks: [1; 2],
            bucket_size,
            storage: Storage::Views,
        }
    }

    /// Four copies of the model on two ranks each; every third parameter a replica on two of the four, every third an expert.
    /// Some are summed over model-parallel ranks, some are copies of others.
    pub fn grouped() -> Self {
        let regular = Self::regular(8, 6, 2, 100, 100);
        let params = 0..regular.numel.len();
        let shared = params.clone().map(|i| [0, 1, 3, 4, 7, 9].contains(&i).then_some(i % 3)).collect();
        let summed = params.clone().map(|i| i > 9 || i % 3 == 1).collect();
        let shard_group = params.map(|i| i % 3).collect();
        Self { model_parallel: 2, shard_group, shared, summed, group_ranks: [2; 2], ..regular }
    }

    /// Two copies of the model on four ranks each, two on either of two stages, with copies of four weights: two on both stages,
    /// and one of these twice on the last, in another order.
    pub fn staged() -> Self {
        let regular = Self::regular(8, 6, 2, 100, 100);
        let shared = [0, 1, 9, 9, 3, 3, 1, 9, 0, 0, 9, 9].map(|weight| (weight < 9).then_some(weight));
        let summed = (0..12).map(|i| i == 7).collect();
        Self { model_parallel: 4, stages: 2, shared: shared.into(), summed, ..regular }
    }

    pub fn draw(seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let units = 1 + draw.below(6);
        let (d, model_parallel) = (1 + draw.below(4), [1, 1, 2, 3][draw.below(4)]);
        let divisors: Vec<usize> = (1..=d).filter(|n| d.is_multiple_of(*n)).collect();
        let grouped = draw.chance(50);
        let mut shape = Self {
            ranks: d * model_parallel,
            model_parallel,
            stages: 1,
            shard_group: Vec::new(),
            shared: Vec::new(),
            summed: Vec::new(),
            group_ranks: [0; 2].map(|_| divisors[draw.below(divisors.len())]),
            units: Vec::new(),
            numel: Vec::new(),
            dtype: Vec::new(),
            trainable: Vec::new(),
            bucket_size: [1, 64, 200, 1000, 100_000][draw.below(5)],
            storage: [Storage::Views, Storage::Shared][draw.below(2)],
        };
        for _ in 0..units {
            let mut members = Vec::new();
            for _ in 0..=draw.below(4) {
                members.push(shape.numel.len());
                shape.numel.push([1, 3, 63, 64, 65, 130, 500][draw.below(7)]);
                shape.dtype.push([DType::Bf16, DType::F32, DType::F16][draw.below(3)]);
                shape.trainable.push(!draw.chance(15));
                shape.shard_group.push(if grouped { draw.below(3) } else { 0 });
                shape.shared.push(None);
                shape.summed.push(draw.chance(20));
                if draw.chance(15) {
                    shape.copy(draw.below(shape.numel.len()));
                }
            }
            // A weight that an earlier unit uses too.
            if draw.chance(25) {
                let other = draw.below(shape.numel.len());
                if !members.contains(&other) {
                    members.push(other);
                }
            }
            shape.units.push(members);
        }
        // As many stages as there are units for.
        if draw.chance(40) {
            let stages = [1, 2, 3].into_iter().filter(|n| model_parallel % n == 0 && *n <= units);
            shape.stages = stages.max().unwrap_or(1);
        }
        shape
    }

    /// The newest parameter becomes a copy of another one.
    fn copy(&mut self, other: usize) {
        let newest = self.numel.len() - 1;
        let weight = *self.shared[other].get_or_insert(other);
        self.shared[newest] = Some(weight);
        self.numel[newest] = self.numel[other];
        self.dtype[newest] = self.dtype[other];
        self.trainable[newest] = self.trainable[other];
        self.shard_group[newest] = self.shard_group[other];
        self.summed[newest] = self.summed[other];
    }

    /// The stage of a unit.
    fn stage_of(&self, unit: usize) -> usize {
        unit * self.stages / self.units.len()
    }

    /// The plan of the first stage, or the only one.
    pub fn plan(&self) -> Plan {
        self.plan_of(0)
    }

    /// The plan of a stage, which has the parameters that its units are the first to have.
    fn plan_of(&self, stage: usize) -> Plan {
        let first_user = |param: usize| self.units.iter().position(|unit| unit.contains(&param)).expect("a user");
        let here: Vec<usize> =
            (0..self.numel.len()).filter(|param| self.stage_of(first_user(*param)) == stage).collect();
        let params = here.iter().map(|&i| {
            let mut param = ParamSpec::new(format!("p{i}"), [self.numel[i]], self.dtype[i]);
            param.trainable = self.trainable[i];
            param.shard_group = self.shard_group[i];
            param.shared = self.shared[i].map(|weight| format!("weight {weight}"));
            param.sum_over = if self.summed[i] { SumOver::ModelParallel } else { SumOver::Nothing };
            param
        });
        let unit = |(i, members): (usize, &Vec<usize>)| UnitSpec {
            name: format!("u{i}"),
            params: members
                .iter()
                .filter_map(|p| here.iter().position(|here| here == p))
                .map(ParamId::from_index)
                .collect(),
        };
        let units = self.units.iter().enumerate().filter(|(i, _)| self.stage_of(*i) == stage);
        let group = |name: &str, ranks, across| ShardGroupSpec { name: name.into(), ranks, across, average_over: None };
        let input = PlanInput {
            chunks: vec![ChunkSpec { units: units.map(unit).collect() }],
            ranks: self.ranks,
            params: params.collect(),
            groups: 1,
            bucketing: Bucketing::Size(self.bucket_size),
            alignment: Alignment::default(),
            storage: self.storage,
            model_parallel: self.model_parallel,
            pipeline: Pipeline { stage, stages: self.stages },
            shard_groups: vec![
                group("replicas", self.group_ranks[0], Across::Replicas),
                group("experts", self.group_ranks[1], Across::Experts),
            ],
        };
        Plan::new(&input).expect("a legal model")
    }
}

/// What runs on it.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // dimensions of their own
pub struct Scenario {
    pub shape: Shape,
    pub overlap: Overlap,
    pub credits: u32,
    pub first_gather: FirstGather,
    pub overlap_grad_reduce: bool,
    pub skip: Skip,
    pub check_for_nan_in_grad: bool,
    /// The executor reads the loss scale before backward, and once more after it.
    pub reads_scale: bool,
    pub steps_in_flight: u32,
    pub steps: u64,
    pub skipped: Vec<u64>,
    /// Forward order: registration order if `None`, else another permutation per rank and step.
    pub forward_seed: Option<u64>,
    /// An evaluation between backward and step: reads after the last gradient.
    pub evaluate: bool,
    /// Chance in percent that a parameter gets no gradient in a step.
    pub unused: usize,
    /// Chance in percent that a rank writes the gradients of a step without having entered or read anything.
    pub blind: usize,
    pub dropped_edge: Option<Edge>,
    pub issue_on_thread: bool,
    /// 0: every bucket is gathered by itself.
    pub call_bytes: usize,
    /// What holds verdicts back.
    pub gate: Option<Gate>,
}

/// What a run leaves.
#[derive(Debug)]
pub struct Run {
    pub plan: Arc<Plan>,
    pub logs: Vec<Arc<NullLog>>,
    /// Order digests by rank.
    pub digests: Vec<u64>,
    shard_bytes: Vec<(BufferId, usize)>,
}

impl Run {
    /// The largest shard (or parameter, for gradients) of a buffer in bytes: what one piece of work may touch.
    pub fn shard_bytes(&self, buffer: BufferId) -> usize {
        self.shard_bytes.iter().filter(|(b, _)| *b == buffer).map(|(_, n)| *n).max().unwrap_or(usize::MAX)
    }
}

impl Scenario {
    pub fn plain() -> Self {
        Self {
            shape: Shape::regular(2, 6, 2, 100, 100),
            overlap: Overlap::Window,
            credits: 3,
            first_gather: FirstGather::Step,
            overlap_grad_reduce: true,
            skip: Skip::Host,
            check_for_nan_in_grad: false,
            reads_scale: false,
            steps_in_flight: 2,
            steps: 4,
            skipped: Vec::new(),
            forward_seed: None,
            evaluate: false,
            unused: 0,
            blind: 0,
            dropped_edge: None,
            issue_on_thread: false,
            call_bytes: 0,
            gate: None,
        }
    }

    /// The same with its parameters gathered there.
    pub fn stored(mut self, storage: Storage) -> Self {
        self.shape.storage = storage;
        self
    }

    /// Enough variety that every edge orders something that nothing else orders.
    pub fn thorough() -> Self {
        Self { skipped: vec![1, 3], steps: 6, evaluate: true, unused: 20, ..Self::plain() }
    }

    pub fn draw(shape: Shape, seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let steps = 1 + draw.below(5) as u64;
        Self {
            shape,
            overlap: [Overlap::None, Overlap::Chain, Overlap::Window][draw.below(3)],
            credits: [1, 2, 3, u32::MAX][draw.below(4)],
            overlap_grad_reduce: draw.chance(70),
            steps_in_flight: 1 + draw.below(3) as u32,
            steps,
            skipped: (0..steps).filter(|_| draw.chance(25)).collect(),
            forward_seed: draw.chance(70).then(|| draw.next()),
            evaluate: draw.chance(40),
            unused: [0, 0, 20, 100][draw.below(4)],
            blind: [0, 0, 30, 100][draw.below(4)],
            dropped_edge: None,
            issue_on_thread: false,
            call_bytes: [0, 0, 600, 5_000][draw.below(4)],
            gate: None,
            first_gather: [FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward][draw.below(3)],
            skip: [Skip::Host, Skip::Device][draw.below(2)],
            check_for_nan_in_grad: draw.chance(30),
            reads_scale: draw.chance(50),
        }
    }

    pub fn plan(&self) -> Plan {
        self.shape.plan().with_gather_calls(self.call_bytes)
    }

    /// The plan of each rank, before stages were joined.
    pub fn plans(&self) -> Vec<Arc<Plan>> {
        let of_stage = |stage| Arc::new(self.shape.plan_of(stage).with_gather_calls(self.call_bytes));
        let plans: Vec<_> = (0..self.shape.stages).map(of_stage).collect();
        (0..self.shape.ranks).map(|rank| plans[plans[0].stage_of(Rank(rank))].clone()).collect()
    }

    pub fn config(&self, driver: Driver) -> SessionConfig {
        SessionConfig {
            agree: Vec::new(),
            overlap: self.overlap,
            credits: Credits { buckets: self.credits, bytes: None },
            first_gather: self.first_gather,
            overlap_grad_reduce: self.overlap_grad_reduce,
            rule: VerdictRule {
                norm: NormType::default(),
                average: Average::Ranks(self.shape.ranks),
                max_norm: 1.0,
                on_nonfinite: OnNonFinite::Skip,
            },
            scaler: ScalerRule::None,
            groups: vec![Group::default()],
            skip: self.skip,
            check_for_nan_in_grad: self.check_for_nan_in_grad,
            steps_in_flight: self.steps_in_flight,
            deadlines: Deadlines {
                start_up: std::time::Duration::from_secs(20),
                collective: std::time::Duration::from_secs(20),
                silence: std::time::Duration::from_secs(20),
            },
            busy_warning: gatherflow_actors::busy::WARNING,
            check_order_every: 1,
            start_params: StartParams::Broadcast,
            driver,
            dropped_edge: self.dropped_edge,
            drill: None,
        }
    }

    /// Every rank in turn, by the plain loop, on the null device.
    pub fn run_on_null(&self) -> Run {
        let seats = Ranks::local(self.shape.ranks, None).expect("ranks");
        let plans = self.plans();
        let stages = (0..self.shape.stages).map(|stage| plans.iter().find(|plan| plan.pipeline().stage == stage));
        let stages: Vec<Arc<Plan>> = stages.flatten().cloned().collect();
        let join = |plan: &Arc<Plan>| match self.shape.stages {
            1 => plan.clone(),
            _ => Arc::new(plan.joined(stages.clone()).expect("stages of one model")),
        };
        let plan = join(&plans[0]);
        let mut run = Run { plan, logs: Vec::new(), digests: Vec::new(), shard_bytes: Vec::new() };
        for seat in seats {
            let plan = join(&plans[seat.rank()]);
            let session = self.start(seat, &plan, Driver::Inline, "null");
            if run.shard_bytes.is_empty() {
                run.shard_bytes = shard_bytes(&plan, &session);
            }
            self.execute(&session);
            session.close().expect("close");
            run.digests.push(session.counters().order_digest);
            run.logs.push(session.device().log().expect("the null device logs"));
        }
        run
    }

    pub fn start(&self, seat: Seat, plan: &Arc<Plan>, driver: Driver, device: &str) -> Arc<Session> {
        let skipped = self.skipped.clone();
        let script = Script(Arc::new(move |step| {
            let mut report = updated_report();
            report.updated = !skipped.contains(&step);
            report
        }));
        let options = OpenOptions {
            device: device.into(),
            script: Some(script),
            gate: self.gate.clone(),
            issue_on_thread: self.issue_on_thread,
            ..OpenOptions::default()
        };
        Session::start(seat, plan.clone(), self.config(driver), options, &mut |_, _| Ok(())).expect("start")
    }

    /// How many gathers there are of each bucket: where the device decides, also in skipped steps.
    pub fn gathered_versions(&self) -> usize {
        self.steps as usize - if self.skip == Skip::Host { self.skipped.len() } else { 0 }
    }

    /// One rank's executor.
    pub fn execute(&self, session: &Session) {
        for step in 0..self.steps {
            self.step(session, step, &mut |_| {}).expect("no call fails");
        }
    }

    /// One step of one rank's executor, up to the first call that fails. `before_call` hears how many calls came before.
    pub fn step(&self, session: &Session, step: u64, before_call: &mut dyn FnMut(u64)) -> Result<(), Cause> {
        let mut calls = 0;
        let mut call = || {
            before_call(calls);
            calls += 1;
        };
        let plan = session.plan().clone();
        let rank = session.rank() as u64;
        let touch = |range, mode| session.device().access(session.executor(), Access { range, mode });
        let mut order: Vec<u32> = (0..plan.units().len() as u32).collect();
        if let Some(seed) = self.forward_seed {
            Draw::new(seed ^ (step << 8) ^ rank).shuffle(&mut order);
        }
        let read = |unit: u32, call: &mut dyn FnMut()| {
            call();
            session.enter(UnitId(unit))?;
            for param in &plan.unit(UnitId(unit)).params {
                touch(session.param_range(*param), AccessMode::Read);
            }
            Ok::<(), Cause>(())
        };
        session.zeroed();
        let blind = Draw::new(0xb11d ^ (step << 8) ^ rank).chance(self.blind);
        let forward = if blind { &[][..] } else { &order[..] };
        forward.iter().try_for_each(|unit| read(*unit, &mut call))?;

        if self.reads_scale {
            session.loss_scale()?;
        }
        // The same on every rank: which parameters get no gradient is decided by step alone.
        let mut draw = Draw::new(0xface ^ step);
        let used: Vec<bool> = plan.params().iter().map(|_| !draw.chance(self.unused)).collect();
        let mut uses: Vec<usize> = plan.params().iter().map(|p| p.units.len()).collect();
        for unit in order.iter().rev() {
            for param in &plan.unit(UnitId(*unit)).params {
                let index = param.0 as usize;
                uses[index] -= 1;
                let Some(grad) = session.grad_range(*param) else { continue };
                if !blind {
                    touch(session.param_range(*param), AccessMode::Read);
                }
                if !used[index] {
                    continue;
                }
                call();
                session.gradient_free(*param)?;
                touch(grad, AccessMode::Write);
                if uses[index] == 0 {
                    let event = session.device().record(session.executor());
                    call();
                    session.gradient_complete(*param, event)?;
                }
            }
        }
        if self.evaluate {
            order.iter().try_for_each(|unit| read(*unit, &mut call))?;
        }
        if self.reads_scale {
            session.loss_scale()?;
        }
        let unwritten = plan.params().iter().filter(|p| p.trainable && !used[p.id.0 as usize]).map(|p| p.id);
        let request = StepRequest {
            lrs: vec![LrRow::constant(1e-3)],
            host: HostVerdict::default(),
            unwritten: unwritten.collect(),
            unfinished: Vec::new(),
        };
        call();
        session.step(request).map(drop)
    }
}

fn shard_bytes(plan: &Plan, session: &Session) -> Vec<(BufferId, usize)> {
    let mut list = Vec::new();
    for bucket in plan.buckets() {
        let memory = session.bucket_memory(bucket.id);
        let ranges = [memory.param_shard, memory.reduced, memory.master, memory.exp_avg, memory.exp_avg_sq];
        list.extend(ranges.map(|range| (range.buffer, range.bytes())));
        for param in &bucket.params {
            if let Some(grad) = session.grad_range(*param) {
                list.push((grad.buffer, grad.bytes()));
            }
        }
    }
    list
}
