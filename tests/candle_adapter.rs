//! The candle adapter over a real engine: gradients arrive whole, in every overlap mode, and misuse comes out by name.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use candle_core::{D, Device, Tensor, Var};
use gatherflow::candle::{Forward, cause, cross_entropy, gelu};
use gatherflow::{Config, DType, Engine, ErrorKind, Mode, Model, Overlap, ParamId, Rank, Ranks, Storage, UnitId};

const VOCAB: usize = 13;
const WIDTH: usize = 24;

/// An embedding, a gelu layer, and a head that uses the embedding's table again.
struct Net {
    embed: UnitId,
    table: ParamId,
    middle: UnitId,
    weight: ParamId,
    bias: ParamId,
    head: UnitId,
}

fn register(dtype: DType) -> (Model, gatherflow::ChunkId, Net) {
    let mut model = Model::new();
    let chunk = model.chunk();
    let embed = model.unit(chunk, "embed").unwrap();
    let table = model.param(embed, "table", &[VOCAB, WIDTH], dtype).unwrap();
    let middle = model.unit(chunk, "middle").unwrap();
    let weight = model.param(middle, "weight", &[WIDTH, WIDTH], dtype).unwrap();
    let bias = model.param(middle, "bias", &[WIDTH], dtype).unwrap();
    let head = model.unit(chunk, "head").unwrap();
    model.use_param(head, table).unwrap();
    (model, chunk, Net { embed, table, middle, weight, bias, head })
}

fn initial(param: usize, index: usize) -> f32 {
    (((index * 31 + param * 17) % 29) as f32 - 14.0) / 40.0
}

fn ids(shift: usize) -> (Tensor, Tensor) {
    let row = |by: usize| (0..8).map(|i| ((i * 5 + by + shift) % VOCAB) as u32).collect::<Vec<_>>();
    let tensor = |values| Tensor::from_vec(values, (2, 4), &Device::Cpu).unwrap();
    (tensor(row(0)), tensor(row(3)))
}

impl Net {
    fn loss(&self, forward: &Forward, (ids, targets): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
        let x = forward.enter(self.embed, &forward.anchor()?)?;
        let x = forward.embedding(&x, self.table, ids)?;
        let x = forward.enter(self.middle, &x)?;
        let x = (&x + gelu(&forward.linear(&x, self.weight, Some(self.bias))?)?)?;
        let x = forward.enter(self.head, &x)?;
        cross_entropy(&forward.linear(&x, self.table, None)?, targets)
    }
}

fn engine(rank: Rank, model: Model, config: Config) -> Engine {
    Engine::new(rank, model, config, |info, out| out.fill_with(|i| initial(info.id.0 as usize, i))).unwrap()
}

fn config() -> Config {
    Config::new().deadlines(Duration::from_secs(20)).num_buckets(3)
}

/// Norm of all gradients, and the loss, by candle alone.
fn plain_candle() -> (f64, f32) {
    let var = |param: usize, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| initial(param, i)).collect();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
    };
    let vars = [var(0, &[VOCAB, WIDTH]), var(1, &[WIDTH, WIDTH]), var(2, &[WIDTH])];
    let (ids, targets) = ids(0);
    let x = vars[0].embedding(&ids.flatten_all().unwrap()).unwrap();
    let h = x.matmul(&vars[1].t().unwrap()).unwrap().broadcast_add(&vars[2]).unwrap().gelu().unwrap();
    let logits = (x + h).unwrap().matmul(&vars[0].t().unwrap()).unwrap();
    let exp = logits.exp().unwrap();
    let chances = exp.broadcast_div(&exp.sum_keepdim(D::Minus1).unwrap()).unwrap();
    let picked = chances.gather(&targets.flatten_all().unwrap().unsqueeze(1).unwrap(), 1).unwrap();
    let loss = picked.log().unwrap().mean_all().unwrap().neg().unwrap();
    let grads = loss.backward().unwrap();
    let squares: f64 = vars
        .iter()
        .flat_map(|v| grads.get(v).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .map(|g| f64::from(g) * f64::from(g))
        .sum();
    (squares.sqrt(), loss.to_scalar().unwrap())
}

#[test]
fn the_norm_of_all_gradients_is_candles_own_with_any_number_of_microbatches() {
    let (norm, loss_wanted) = plain_candle();
    for microbatches in [1, 3] {
        let (model, chunk, net) = register(DType::F32);
        let rank = Ranks::local(1).unwrap().remove(0);
        let mut engine = engine(rank, model, config());
        for microbatch in 0..microbatches {
            let last = microbatch + 1 == microbatches;
            let forward = Forward::new(engine.owned_pass(chunk, microbatch, last, Mode::Train).unwrap());
            let loss = net.loss(&forward, &ids(0)).unwrap();
            assert!((loss.to_scalar::<f32>().unwrap() - loss_wanted).abs() < 1e-5);
            (loss / microbatches as f64).unwrap().backward().unwrap();
        }
        let got = engine.step().unwrap().outcome().unwrap().grad_norm.unwrap();
        assert!((got / norm - 1.0).abs() < 1e-4, "{microbatches} microbatches: {got}, not {norm}");
        engine.close().unwrap();
    }
}

/// Losses of rank 0 and the hash of the parameters that both ranks end with.
fn train(config: &Config, dtype: DType) -> (Vec<f32>, u64) {
    let ranks = Ranks::local(2).unwrap();
    let ended: Vec<(Vec<f32>, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let (number, (model, chunk, net)) = (rank.rank(), register(dtype));
                    let mut engine = engine(rank, model, config.clone());
                    let losses = (0..6)
                        .map(|step| {
                            let forward = Forward::new(engine.owned_pass(chunk, 0, true, Mode::Train).unwrap());
                            let loss = net.loss(&forward, &ids(number + 2 * step)).unwrap();
                            loss.backward().unwrap();
                            engine.step().unwrap().outcome().unwrap();
                            loss.to_scalar().unwrap()
                        })
                        .collect();
                    let hash = engine.params_hash().unwrap();
                    engine.close().unwrap();
                    (losses, hash)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(ended[0].1, ended[1].1, "the ranks end with different parameters");
    ended.into_iter().next().unwrap()
}

#[test]
fn every_overlap_mode_and_storage_trains_to_the_same_bits() {
    for dtype in [DType::F32, DType::Bf16] {
        let of = |storage| {
            [Overlap::None, Overlap::Chain, Overlap::Window]
                .map(|mode| train(&config().overlap(mode).storage(storage), dtype))
        };
        let runs = [of(Storage::Views), of(Storage::Shared)].concat();
        assert!(runs.iter().all(|run| *run == runs[0]), "{dtype}: {runs:?}");
        assert!(runs[0].0.iter().all(|loss| loss.is_finite()));
    }
}

#[test]
fn a_pass_of_an_earlier_step_is_refused_by_name_through_candle() {
    let (model, chunk, net) = register(DType::Bf16);
    let mut engine = engine(Ranks::local(1).unwrap().remove(0), model, config());
    let forward = Forward::new(engine.owned_pass(chunk, 0, true, Mode::Train).unwrap());
    let loss = net.loss(&forward, &ids(0)).unwrap();
    engine.step().unwrap().outcome().unwrap();
    for error in [net.loss(&forward, &ids(0)).unwrap_err(), loss.backward().unwrap_err()] {
        let error = cause(&error).unwrap();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains("belongs to step 0, but the engine is at step 1"), "{error}");
    }
    engine.close().unwrap();
}

#[test]
fn an_evaluation_between_microbatches_changes_nothing() {
    let grad_norm = |evaluate: bool| {
        let (model, chunk, net) = register(DType::Bf16);
        let mut engine = engine(Ranks::local(1).unwrap().remove(0), model, config());
        for (microbatch, last) in [(0, false), (1, true)] {
            let forward = Forward::new(engine.owned_pass(chunk, microbatch, last, Mode::Train).unwrap());
            let loss = net.loss(&forward, &ids(microbatch)).unwrap();
            if evaluate {
                let forward = Forward::new(engine.owned_pass(chunk, 0, false, Mode::Eval).unwrap());
                net.loss(&forward, &ids(5)).unwrap();
            }
            loss.backward().unwrap();
        }
        let norm = engine.step().unwrap().outcome().unwrap().grad_norm.unwrap();
        engine.close().unwrap();
        norm
    };
    assert_eq!(grad_norm(true).to_bits(), grad_norm(false).to_bits());
}
