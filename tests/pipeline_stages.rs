//! Pipeline stages: ranks that share a copy of the model and hold other chunks of it. What they train must be, bit for bit, what
//! the same chunks come to on a single stage.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use gatherflow::{
    Across, Config, DType, Engine, Error, ErrorKind, Mode, Model, NormType, Outcome, Overlap, ParamMut, ParamOptions,
    Rank, Ranks, ScalerKind, ShardGroup, Skip, StartParams, State, Storage, SumOver, UnitId,
};

/// A parameter in a unit of its own.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // marks of their own
struct P {
    name: &'static str,
    numel: usize,
    dtype: DType,
    shared: Option<&'static str>,
    tensor_parallel: bool,
    trainable: bool,
    experts: bool,
    summed: bool,
}

const fn p(name: &'static str, numel: usize, dtype: DType) -> P {
    let shared = None;
    P { name, numel, dtype, shared, tensor_parallel: false, trainable: true, experts: false, summed: false }
}

const fn copy(name: &'static str, shared: &'static str) -> P {
    P { shared: Some(shared), ..p(name, 70, DType::Bf16) }
}

/// Chunks, one for each stage.
type Chunks = Vec<Vec<P>>;

/// An embedding on the first and the last stage, where it is twice, and a norm on the first two, registered in another order. The
/// stages have other numbers of buckets, and the middle one, if there are three, trains little.
fn chunks(stages: usize) -> Chunks {
    let first = vec![
        copy("embed", "table"),
        p("up", 300, DType::Bf16),
        P { tensor_parallel: true, ..p("column", 130, DType::Bf16) },
        P { summed: true, ..p("sequence norm", 20, DType::F32) },
        p("down", 200, DType::Bf16),
        copy("scale", "scale"),
    ];
    let middle = vec![P { trainable: false, ..p("frozen", 50, DType::F32) }, copy("scale again", "scale")];
    let last = vec![
        P { experts: true, ..p("experts", 90, DType::Bf16) },
        copy("head", "table"),
        p("bias", 3, DType::F32),
        copy("other head", "table"),
    ];
    match stages {
        2 => vec![first, [middle, last].concat()],
        3 => vec![first, middle, last],
        _ => vec![[first, middle, last].concat()],
    }
}

fn noise(words: &[u64]) -> f32 {
    let mixed = words.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |state, word| {
        let mixed = (state ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (mixed >> 32)
    });
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn word(name: &str) -> u64 {
    name.bytes().fold(7, |word, byte| word.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

fn model(chunks: &[Vec<P>], d: usize) -> Model {
    let mut model = Model::new();
    let size = if d.is_multiple_of(2) { d / 2 } else { d };
    let group = ShardGroup { name: "experts".into(), ranks: size, across: Across::Experts, average_over: None };
    let experts = model.shard_group(group);
    for params in chunks {
        let chunk = model.chunk();
        for p in params {
            let unit = model.unit(chunk, p.name).unwrap();
            let mut options = ParamOptions {
                shared: p.shared.map(Into::into),
                tensor_parallel: p.tensor_parallel,
                trainable: p.trainable,
                ..ParamOptions::default()
            };
            if p.experts {
                options.shard_group = experts;
            }
            if p.summed {
                options.sum_over = SumOver::ModelParallel;
            }
            model.param_with(unit, p.name, &[p.numel], p.dtype, options).unwrap();
        }
    }
    model
}

/// What a rank has in the end.
struct Told {
    outcomes: Vec<Outcome>,
    /// By name: the parameter's bits.
    params: BTreeMap<String, Vec<u32>>,
    state: State,
}

#[derive(Clone)]
struct Job {
    d: usize,
    /// Ranks of a stage that share a copy of the model.
    tensor: usize,
    /// Chunks on each stage; those of one stage are all on each rank.
    stages: Vec<Chunks>,
    config: Config,
    steps: u64,
    resume: Option<State>,
}

impl Job {
    fn new(d: usize, tensor: usize, chunks: Chunks, config: Config) -> Self {
        let stages = chunks.into_iter().map(|chunk| vec![chunk]).collect();
        Self { d, tensor, stages, config, steps: 5, resume: None }
    }

    /// The same with all chunks on each rank.
    fn on_one_stage(&self) -> Self {
        Self { stages: vec![self.stages.concat()], ..self.clone() }
    }

    fn config(&self) -> Config {
        let config = self.config.clone();
        match self.stages.len() {
            _ if self.stages.len() * self.tensor == 1 => config,
            1 => config.model_parallel(self.tensor),
            stages => config.model_parallel(stages * self.tensor).pipeline_parallel(stages),
        }
    }

    fn run(&self) -> Vec<Told> {
        self.on_ranks(|rank| self.train(rank).unwrap())
    }

    fn on_ranks<T: Send>(&self, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
        let ranks = Ranks::local(self.d * self.tensor * self.stages.len()).unwrap();
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn start(&self, rank: Rank) -> Result<Engine, Error> {
        let config = self.config();
        let (number, stage) = (rank.rank(), config.stage_of(rank.rank()));
        let model = model(&self.stages[stage], self.d);
        Engine::new(rank, model, config, |info, out: ParamMut<'_>| {
            // Copies start apart, and take what the first has.
            let part = if info.options.tensor_parallel { number % self.tensor } else { 0 };
            out.fill_with(|i| noise(&[word(&info.name), part as u64, i as u64]));
        })
    }

    fn train(&self, rank: Rank) -> Result<Told, Error> {
        let mut engine = self.start(rank)?;
        if let Some(state) = &self.resume {
            engine.load_state(state)?;
        }
        let first = self.resume.as_ref().map_or(0, |state| state.steps);
        let mut outcomes = Vec::new();
        for step in first..self.steps {
            outcomes.push(self.step(&mut engine, step)?);
        }
        let mut params = BTreeMap::new();
        for info in engine.params().to_vec() {
            let bits = match info.dtype {
                DType::Bf16 => engine.read::<gatherflow::bf16>(info.id)?.iter().map(|x| x.to_bits().into()).collect(),
                _ => engine.read::<f32>(info.id)?.iter().map(|x| x.to_bits()).collect(),
            };
            params.insert(info.name, bits);
        }
        let state = engine.state()?;
        engine.close()?;
        Ok(Told { outcomes, params, state })
    }

    fn step(&self, engine: &mut Engine, step: u64) -> Result<Outcome, Error> {
        let scale = engine.loss_scale()?;
        let ((part, parts), (at, _)) = (engine.model_parallel(), engine.data_parallel());
        let (part, parts) = (part % self.tensor, parts / engine.pipeline_parallel().1);
        let params = engine.params().to_vec();
        let chunks: Vec<_> =
            (0..).map_while(|n| params.iter().find(|info| info.chunk.0 == n)).map(|p| p.chunk).collect();
        for chunk in chunks {
            let units = params.iter().enumerate().filter(|(_, info)| info.chunk == chunk);
            let units: Vec<_> = units.map(|(index, info)| (UnitId(index as u32), info)).collect();
            let pass = engine.pass(chunk, 0, true, Mode::Train)?;
            let mut values = Vec::new();
            for (unit, info) in &units {
                let guard = pass.enter(*unit)?;
                values.push(match info.dtype {
                    DType::Bf16 => guard.read::<gatherflow::bf16>(info.id)?.iter().map(|x| x.to_f32()).collect(),
                    _ => guard.read::<f32>(info.id)?.to_vec(),
                });
            }
            for ((unit, info), values) in units.iter().zip(values).rev() {
                let back = pass.backward(*unit)?;
                if info.options.trainable {
                    let mut gradient = back.grad::<f32>(info.id)?;
                    let own = info.options.tensor_parallel || info.options.sum_over == SumOver::ModelParallel;
                    let words = [word(&info.name), step, at as u64, if own { part as u64 } else { 0 }];
                    for (i, (g, value)) in gradient.iter_mut().zip(values).enumerate() {
                        let value: f32 = value;
                        let exact = noise(&[&words[..], &[i as u64]].concat()) + 0.1 * value;
                        // Copies are summed in another order on one stage: of so few bits no order makes a difference.
                        let rounded = if info.options.shared.is_some() { (exact * 64.0).round() / 64.0 } else { exact };
                        *g = rounded * scale / parts as f32;
                    }
                    if step == 1 && at == 0 && info.name == "bias" {
                        gradient[2] = f32::INFINITY;
                    }
                    gradient.complete();
                }
                back.leave()?;
            }
        }
        engine.step()?.outcome()
    }

    /// Runs it in stages and on one, and compares.
    fn check(&self) {
        let (staged, whole) = (self.run(), self.on_one_stage().run());
        let (of_copy, stages) = (self.tensor * self.stages.len(), self.stages.len());
        assert_eq!(whole[0].params.len(), self.stages.iter().flatten().map(Vec::len).sum::<usize>());
        for (rank, told) in staged.iter().enumerate() {
            let alike = &whole[rank / of_copy * self.tensor + rank % self.tensor];
            for (name, bits) in &told.params {
                assert_eq!(bits, &alike.params[name], "{name} on rank {rank} of {stages} stages");
            }
            same_outcomes(&told.outcomes, &alike.outcomes);
            assert_eq!(told.outcomes.iter().filter(|outcome| outcome.updated).count(), 4, "the second step is skipped");
        }
    }
}

fn same_outcomes(one: &[Outcome], other: &[Outcome]) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-12 * b;
        assert!(one.grad_norm.zip(other.grad_norm).is_none_or(near), "{one:?} {other:?}");
        let told = |o: &Outcome| (o.updated, o.grad_norm.is_some(), o.zeros, o.loss_scale.to_bits());
        assert_eq!(told(one), told(other));
    }
}

/// A norm that no order of summation changes, so that clipping has the same bits.
fn config(overlap: Overlap, storage: Storage, skip: Skip) -> Config {
    Config::new()
        .deadlines(Duration::from_secs(20))
        .check_order_every(1)
        .bucket_size(128)
        .norm_type(NormType::Inf)
        .max_norm(0.5)
        .lr(0.01)
        .scaler(ScalerKind::Dynamic)
        .scaler_initial(8.0)
        .scaler_hysteresis(1)
        .overlap(overlap)
        .storage(storage)
        .skip(skip)
}

fn usual() -> Config {
    config(Overlap::Window, Storage::Views, Skip::Host)
}

#[test]
fn stages_train_what_one_stage_trains_in_every_mode_and_storage() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for (storage, skip) in [(Storage::Views, Skip::Host), (Storage::Shared, Skip::Device)] {
            Job::new(2, 1, chunks(3), config(overlap, storage, skip)).check();
        }
    }
}

/// Its ranks have no bucket, and hear of every verdict all the same (rule O3).
#[test]
fn a_stage_with_nothing_to_train_takes_every_step_in_every_mode_and_storage() {
    let mut stages = chunks(3);
    let trained = stages[1].remove(1);
    stages[2].push(trained);
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for storage in [Storage::Views, Storage::Shared] {
            for skip in [Skip::Host, Skip::Device] {
                Job::new(2, 1, stages.clone(), config(overlap, storage, skip)).check();
            }
        }
    }
}

#[test]
fn stages_train_what_one_stage_trains_on_any_number_of_ranks() {
    for (d, tensor, stages) in [(1, 1, 2), (1, 1, 3), (2, 1, 2), (3, 1, 3), (1, 2, 2), (2, 2, 2), (2, 2, 3), (4, 1, 2)]
    {
        Job::new(d, tensor, chunks(stages), usual()).check();
    }
    let grouped = usual().gather_group_bytes(1000).overlap_grad_reduce(false);
    Job::new(2, 1, chunks(3), grouped).check();
}

#[test]
fn the_square_norm_of_all_stages_is_that_of_the_whole_model() {
    let job = Job::new(2, 2, chunks(3), usual().norm_type(NormType::P(2.0)).max_norm(0.0));
    job.check();
}

#[test]
fn copies_on_several_stages_stay_equal() {
    let told = Job { steps: 10, ..Job::new(2, 1, chunks(3), usual()) }.run();
    for copy in told.chunks(3) {
        assert_eq!(copy[0].params["embed"], copy[2].params["head"]);
        assert_eq!(copy[0].params["embed"], copy[2].params["other head"]);
        assert_eq!(copy[0].params["scale"], copy[1].params["scale again"]);
    }
    assert_eq!(told[0].params, told[3].params);
}

#[test]
fn state_goes_on_in_any_number_of_stages() {
    let jobs = [1, 2, 3].map(|stages| Job::new(2, 1, chunks(stages), usual()));
    let ended: Vec<_> = jobs.iter().map(|job| job.run().swap_remove(0)).collect();
    let states = jobs.clone().map(|job| {
        let half = Job { steps: 3, ..job }.run();
        State::merge(half.into_iter().map(|told| told.state)).unwrap()
    });
    for (job, ended) in jobs.iter().zip(&ended) {
        for state in &states {
            let resumed = Job { resume: Some(state.clone()), ..job.clone() }.run().swap_remove(0);
            assert_eq!(resumed.params, ended.params);
            same_outcomes(&resumed.outcomes, &ended.outcomes[3..]);
        }
    }
    let lost = Job { steps: 1, ..jobs[2].clone() }.run().into_iter().map(|told| told.state);
    let error = State::merge(lost.take(2)).unwrap_err().to_string();
    assert!(error.contains("are missing"), "{error}");
}

#[test]
fn a_parameter_of_another_stage_is_named_by_its_own_name() {
    let job = Job::new(1, 1, chunks(2), usual());
    let told = job.on_ranks(|rank| {
        let mut engine = job.start(rank).unwrap();
        let last = engine.pipeline_parallel() == (1, 2);
        if last {
            let info = engine.params().iter().find(|info| info.name == "bias").unwrap().clone();
            let pass = engine.pass(info.chunk, 0, true, Mode::Train).unwrap();
            let unit = UnitId(info.id.0);
            pass.enter(unit).unwrap();
            drop(pass.backward(unit).unwrap().grad::<f32>(info.id).unwrap());
        }
        let told = engine.step().unwrap().outcome().unwrap_err();
        assert!(job.step(&mut engine, 0).unwrap().updated, "it goes on");
        engine.close().unwrap();
        told
    });
    for error in told {
        assert_eq!((error.kind(), error.rank(), error.parameter()), (ErrorKind::Abandoned, Some(1), Some("bias")));
    }
}

#[test]
fn stages_that_do_not_go_together_are_refused_on_every_rank() {
    let refused = |job: &Job| {
        let told = job.on_ranks(|rank| job.start(rank).map(|mut engine| engine.close()).unwrap_err());
        let first = told[0].to_string();
        assert!(told.iter().all(|error| error.kind() == ErrorKind::StartUp && error.to_string() == first), "{told:?}");
        first
    };
    let job = |stages: Chunks| Job::new(1, 1, stages, usual());
    let twice = refused(&job(vec![vec![p("layer", 10, DType::F32)], vec![p("layer", 10, DType::F32)]]));
    assert!(twice.contains("stages 0 and 1 both have a parameter `layer`"), "{twice}");
    let shapes = refused(&job(vec![vec![copy("a", "w")], vec![P { numel: 71, ..copy("b", "w") }]]));
    assert!(shapes.contains("`a` and `b`") && shapes.contains("shape"), "{shapes}");
}

#[test]
fn ranks_that_divide_themselves_in_other_ways_are_refused_on_every_rank() {
    let of = |number: usize| {
        let chunks = if number == 0 { chunks(1) } else { chunks(2)[..1].to_vec() };
        let config = usual().model_parallel(2);
        (model(&chunks, 1), if number == 0 { config } else { config.pipeline_parallel(2) })
    };
    let ranks = Ranks::local(2).unwrap();
    let threads = ranks.into_iter().map(|rank| {
        std::thread::spawn(move || {
            let (model, config) = of(rank.rank());
            Engine::new(rank, model, config, |_, out| out.fill_with(|_| 0.5)).map(drop).unwrap_err()
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        let error = thread.join().unwrap().to_string();
        assert!(error.contains("share a copy of the model = 2, rank 1 has"), "{error}");
        assert!(error.contains("2 in 2 pipeline stages"), "{error}");
    }
}

#[test]
fn copies_that_start_apart_on_two_stages_are_found_by_the_check() {
    let check = usual().start_params(StartParams::Check);
    let job = Job::new(2, 1, vec![vec![copy("embed", "table")], vec![copy("head", "table")]], check);
    let told = job.on_ranks(|rank| job.start(rank).map(|mut engine| engine.close()).unwrap_err().to_string());
    assert!(told.iter().all(|error| error.contains("that ranks 0, 1 share")), "{told:?}");
}

#[test]
fn stages_that_cannot_be_are_refused_by_key() {
    let plan = |config: Config, stage| model(&chunks(2)[..1], 2).plan_stage(stage, 4, &config);
    let two = || usual().model_parallel(2);
    for (config, stage) in [(two().pipeline_parallel(3), 0), (usual().pipeline_parallel(2), 0), (two(), 1)] {
        let error = plan(config, stage).unwrap_err().to_string();
        assert!(error.contains("`pipeline_parallel`"), "{error}");
    }
    assert!(plan(two().pipeline_parallel(0), 0).unwrap_err().to_string().contains("`pipeline_parallel`"));
    let printed = plan(two().pipeline_parallel(2), 1).unwrap().describe();
    assert!(printed.contains("pipeline stage 1 of 2"), "{printed}");
}
