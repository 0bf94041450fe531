//! Copies of one weight on several chunks start equal, stay equal, and get the gradient that one weight used twice would get.
#![allow(clippy::unwrap_used)]

mod small;

use gatherflow::{
    ChunkId, Config, DType, Element, Engine, FirstGather, Mode, Model, Overlap, ParamId, ParamInfo, ParamMut,
    ParamOptions, Rank, Storage, UnitId, WriteMode, bf16,
};
use small::{config, in_modes_and_storages, on_ranks};

const NUMEL: usize = 300;
const STEPS: u64 = 10;

/// A weight used by the first and the last unit, on two chunks: as two copies, or registered once.
struct Tied {
    model: Model,
    /// The unit, and where it finds the weight.
    uses: [(UnitId, ParamId); 2],
}

fn tied(dtype: DType, copies: bool) -> Tied {
    let mut model = Model::new();
    let chunks = [model.chunk(), model.chunk()];
    let shared = || ParamOptions { shared: copies.then(|| "table".into()), ..ParamOptions::default() };
    let first = model.unit(chunks[0], "embed").unwrap();
    let table = model.param_with(first, "table", &[NUMEL], dtype, shared()).unwrap();
    model.param(first, "position", &[70], DType::F32).unwrap();
    let last = model.unit(chunks[1], "head").unwrap();
    model.param(last, "bias", &[9], DType::F32).unwrap();
    let head = if copies { model.param_with(last, "head", &[NUMEL], dtype, shared()).unwrap() } else { table };
    model.use_param(last, head).unwrap();
    Tied { model, uses: [(first, table), (last, head)] }
}

/// What the first copy starts from; the other one takes it from there.
fn init(param: &ParamInfo, out: ParamMut<'_>) {
    out.fill_with(|i| if param.name == "head" { 99.0 } else { (i % 17) as f32 / 16.0 - 0.5 });
}

/// A gradient that depends on the weight, the use, the rank and the step.
fn gradient(weight: f32, element: usize, usage: usize, rank: usize, step: u64) -> f32 {
    let seed = (element * 7 + usage * 31 + rank * 13 + step as usize * 5) % 23;
    weight * [0.5, -0.25][usage] + seed as f32 / 64.0
}

fn values(engine: &Engine, param: ParamId) -> Vec<f32> {
    match engine.params()[param.index()].dtype {
        DType::Bf16 => engine.read::<bf16>(param).unwrap().iter().map(|x| Element::to_f32(*x)).collect(),
        _ => engine.read::<f32>(param).unwrap().to_vec(),
    }
}

/// Trains; returns the bits of the weight, as each use sees it, after each step.
fn train(rank: Rank, config: Config, dtype: DType, copies: bool) -> Vec<[Vec<u32>; 2]> {
    let Tied { model, uses } = tied(dtype, copies);
    let mut engine = Engine::new(rank, model, config, init).unwrap();
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let passes = [0, 1].map(|chunk| engine.pass(ChunkId(chunk), 0, true, Mode::Train).unwrap());
        let weights = [0, 1].map(|usage: usize| {
            passes[usage].enter(uses[usage].0).unwrap();
            values(&engine, uses[usage].1)
        });
        for usage in [1, 0] {
            let (unit, param) = uses[usage];
            let back = passes[usage].backward(unit).unwrap();
            let mut guard = back.grad::<f32>(param).unwrap();
            let overwrite = guard.mode() == WriteMode::Overwrite;
            for (i, (g, w)) in guard.iter_mut().zip(&weights[usage]).enumerate() {
                let new = gradient(*w, i, usage, engine.rank(), step);
                *g = if overwrite { new } else { *g + new };
            }
            guard.complete();
            back.leave().unwrap();
        }
        assert!(engine.step().unwrap().outcome().unwrap().updated);
        seen.push(uses.map(|(_, param)| values(&engine, param).into_iter().map(f32::to_bits).collect()));
    }
    engine.close().unwrap();
    seen
}

#[test]
fn copies_on_two_chunks_are_bit_equal_after_every_one_of_ten_steps_in_every_mode() {
    for (dtype, ranks) in
        [DType::F32, DType::Bf16].into_iter().flat_map(|dtype| (1..=3).map(move |ranks| (dtype, ranks)))
    {
        let mut first: Option<Vec<[Vec<u32>; 2]>> = None;
        let late = config().overlap(Overlap::Window).first_gather(FirstGather::Forward).overlap_grad_reduce(false);
        let late = [Storage::Views, Storage::Shared].map(|storage| late.clone().storage(storage));
        for config in in_modes_and_storages(&config()).chain(late) {
            for seen in on_ranks(ranks, |rank| train(rank, config.clone(), dtype, true)) {
                assert!(seen.iter().all(|[one, other]| one == other), "{dtype}, {ranks} ranks");
                assert!(seen.windows(2).all(|steps| steps[0] != steps[1]), "every step changes the weight");
                assert_eq!(first.get_or_insert_with(|| seen.clone()), &seen, "{dtype}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn copies_train_as_one_weight_that_both_units_use_in_a_single_process() {
    // Without clipping, whose norm is summed in another order where buckets differ.
    let config = config().max_norm(0.0);
    for dtype in [DType::F32, DType::Bf16] {
        let mut first = None;
        for config in in_modes_and_storages(&config) {
            let copies = on_ranks(1, |rank| train(rank, config.clone(), dtype, true));
            let single = on_ranks(1, |rank| train(rank, config.clone(), dtype, false));
            assert!(copies == single && *first.get_or_insert(copies) == single, "{dtype}, {config:?}");
        }
    }
}

#[test]
fn what_is_written_to_one_copy_from_outside_is_written_to_all() {
    let mut hashes: Vec<u64> =
        in_modes_and_storages(&config()).flat_map(|config| written_from_outside(&config)).collect();
    hashes.dedup();
    assert_eq!(hashes.len(), 1, "{hashes:x?}");
}

fn written_from_outside(config: &Config) -> Vec<u64> {
    on_ranks(2, |rank| {
        let Tied { model, uses: [(_, table), (_, head)] } = tied(DType::Bf16, true);
        let mut engine = Engine::new(rank, model, config.clone(), init).unwrap();
        for (param, value) in [(head, 0.25), (table, 0.75)] {
            engine.write_param(param, |out| out.fill_with(|i| value + i as f32 / 512.0)).unwrap();
            engine.reload_masters().unwrap();
            assert_eq!(values(&engine, table), values(&engine, head));
            assert_eq!(values(&engine, head)[0].to_bits(), f32::to_bits(value));
        }
        engine.step().unwrap().outcome().unwrap();
        assert_eq!(values(&engine, table), values(&engine, head), "the masters follow too");
        let hash = engine.params_hash().unwrap();
        engine.close().unwrap();
        hash
    })
}
