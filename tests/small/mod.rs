//! A small model to misuse: two units in one chunk, one tied weight, one frozen one; and a second chunk.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, clippy::missing_panics_doc)]

use std::time::Duration;

use gatherflow::{
    ChunkId, Config, DType, Engine, Error, Mode, Model, Overlap, ParamId, ParamOptions, Pass, Rank, Ranks, Storage,
    UnitId, WriteMode,
};

#[derive(Clone, Copy, Debug)]
pub struct Small {
    pub chunk: ChunkId,
    pub first: UnitId,
    pub second: UnitId,
    pub tied: ParamId,
    pub own: ParamId,
    pub frozen: ParamId,
    pub other_chunk: ChunkId,
    pub other_unit: UnitId,
    pub other: ParamId,
}

pub fn model() -> (Model, Small) {
    let mut model = Model::new();
    let chunk = model.chunk();
    let other_chunk = model.chunk();
    let first = model.unit(chunk, "first").unwrap();
    let tied = model.param(first, "tied", &[3, 50], DType::F32).unwrap();
    let frozen_options = ParamOptions { trainable: false, ..ParamOptions::default() };
    let frozen = model.param_with(first, "frozen", &[5], DType::F32, frozen_options).unwrap();
    let second = model.unit(chunk, "second").unwrap();
    let own = model.param(second, "own", &[70], DType::Bf16).unwrap();
    model.use_param(second, tied).unwrap();
    let other_unit = model.unit(other_chunk, "other").unwrap();
    let other = model.param(other_unit, "other.weight", &[9], DType::F32).unwrap();
    (model, Small { chunk, first, second, tied, own, frozen, other_chunk, other_unit, other })
}

pub fn config() -> Config {
    Config::new().deadlines(Duration::from_secs(20)).bucket_size(64).check_order_every(1)
}

/// A configuration in every overlap mode and both storages.
pub fn in_modes_and_storages(config: &Config) -> impl Iterator<Item = Config> + '_ {
    let stored =
        |overlap| [Storage::Views, Storage::Shared].map(|storage| config.clone().overlap(overlap).storage(storage));
    [Overlap::None, Overlap::Chain, Overlap::Window].into_iter().flat_map(stored)
}

pub fn engine(rank: Rank, config: Config) -> Result<(Engine, Small), Error> {
    let (model, small) = model();
    let engine =
        Engine::new(rank, model, config, |param, out| out.fill_with(|i| (i as f32 + param.id.0 as f32) / 64.0))?;
    Ok((engine, small))
}

pub fn solo(config: Config) -> (Engine, Small) {
    engine(Ranks::local(1).unwrap().remove(0), config).unwrap()
}

/// Runs the same code on every rank, each on a thread of its own.
pub fn on_ranks<T: Send>(ranks: usize, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = Ranks::local(ranks).unwrap().into_iter().map(|r| scope.spawn(move || run(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

pub fn write(pass: &Pass<'_>, unit: UnitId, params: &[ParamId], value: f32) {
    let back = pass.backward(unit).unwrap();
    for param in params {
        let mut gradient = back.grad::<f32>(*param).unwrap();
        match gradient.mode() {
            WriteMode::Overwrite => gradient.fill(value),
            WriteMode::Accumulate => gradient.iter_mut().for_each(|g| *g += value),
        }
        gradient.complete();
    }
}

/// Forward and backward of the first chunk; every gradient element gets `value` (the tied one twice that).
pub fn microbatch(engine: &Engine, small: &Small, last: bool, value: f32) {
    let pass = engine.pass(small.chunk, 0, last, Mode::Train).unwrap();
    pass.enter(small.first).unwrap();
    pass.enter(small.second).unwrap();
    write(&pass, small.second, &[small.own, small.tied], value);
    write(&pass, small.first, &[small.tied], value);
}

pub fn bits(engine: &Engine) -> u64 {
    engine.params_hash().unwrap()
}

/// All bits that training has left on this rank: parameters, masters, moments, and t of each group.
pub fn trained(engine: &Engine) -> (u64, Vec<u64>, Vec<u32>) {
    let state = engine.state().unwrap();
    let pieces = state.tensors.iter().flat_map(|tensor| &tensor.pieces);
    let values = pieces.flat_map(|piece| [&piece.master, &piece.exp_avg, &piece.exp_avg_sq]).flatten();
    (bits(engine), state.groups.iter().map(|group| group.t).collect(), values.map(|x| x.to_bits()).collect())
}

/// The number of the bucket of a parameter.
pub fn bucket_of(engine: &Engine, parameter: Option<&str>) -> Option<u32> {
    let info = engine.params().iter().find(|info| Some(info.name.as_str()) == parameter)?;
    engine.plan().bucket_of(info.id).map(|bucket| bucket.0)
}
