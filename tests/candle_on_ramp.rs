//! The on-ramp for candle programs: the same update as the zero-copy path, one copy each way, and bad `Var`s and gradients
//! are named.
#![allow(clippy::unwrap_used)]

mod small;

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType as Candle, Device, Layout, Shape, Tensor, Var};
use gatherflow::candle::{Forward, VarOptimizer, cause};
use gatherflow::{
    Config, DType, Engine, Error, ErrorKind, Mode, Model, Outcome, Overlap, ParamId, Rank, Ranks, ScalerKind, State,
    WriteMode,
};
use small::on_ranks;

const ROWS: usize = 5;
const INPUTS: usize = 40;
const OUTPUTS: usize = 30;

/// In the order of the names, which is that of registration.
const SHAPES: [(&str, &[usize]); 3] =
    [("embed.table", &[ROWS, OUTPUTS]), ("linear.bias", &[OUTPUTS]), ("linear.weight", &[OUTPUTS, INPUTS])];

fn config() -> Config {
    Config::new().deadlines(std::time::Duration::from_secs(20)).num_buckets(3).check_order_every(1).lr(0.01)
}

fn alone() -> Rank {
    Ranks::local(1).unwrap().remove(0)
}

fn initial(param: usize, index: usize) -> f32 {
    ((index * 31 + param * 17) % 29) as f32 / 37.0 - 0.4
}

/// Whole numbers from -3 to 3: sums of their products are exact in every dtype and in any order.
fn whole(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + seed * 5 + i * i) % 7) as f32 - 3.0).collect()
}

/// Numbers that round in every operation.
fn ragged(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 + seed * 101 + 1) as f32).sin() / 3.0).collect()
}

fn tensor(values: Vec<f32>, shape: &[usize], dtype: Candle) -> Tensor {
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn numel(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn vars(dtype: Candle) -> HashMap<String, Var> {
    let var = |(param, (name, shape)): (usize, &(&str, &[usize]))| {
        let values = (0..numel(shape)).map(|i| initial(param, i)).collect();
        ((*name).to_string(), Var::from_tensor(&tensor(values, shape, dtype)).unwrap())
    };
    SHAPES.iter().enumerate().map(var).collect()
}

/// A gradient store with these gradients.
fn store(gradients: impl IntoIterator<Item = (Var, Tensor)>) -> GradStore {
    let mut store = Tensor::zeros((), Candle::F32, &Device::Cpu).unwrap().backward().unwrap();
    for (var, gradient) in gradients {
        store.insert(&var, gradient);
    }
    store
}

fn kernel_dtype(dtype: Candle) -> DType {
    DType::parse(dtype.as_str()).unwrap()
}

/// The same parameters in an engine, as the zero-copy path has them: an embedding unit and a linear unit.
fn engine(rank: Rank, dtype: Candle, config: Config) -> Engine {
    let mut model = Model::new();
    let chunk = model.chunk();
    for (unit, params) in [("embed", &SHAPES[..1]), ("linear", &SHAPES[1..])] {
        let unit = model.unit(chunk, unit).unwrap();
        for (name, shape) in params {
            model.param(unit, *name, shape, kernel_dtype(dtype)).unwrap();
        }
    }
    Engine::new(rank, model, config, |info, out| out.fill_with(|i| initial(info.id.index(), i))).unwrap()
}

/// What one rank of one step computes with: input, rows looked up, and the factors that make both outputs a scalar.
struct Batch {
    x: Tensor,
    ids: Tensor,
    linear_factor: Tensor,
    embed_factor: Tensor,
}

fn batch(rank: usize, step: usize, dtype: Candle) -> Batch {
    let seed = 2 * step + rank;
    let ids: Vec<u32> = (0..4).map(|i| ((i + seed) % ROWS) as u32).collect();
    Batch {
        x: tensor(whole(4 * INPUTS, seed), &[4, INPUTS], dtype),
        ids: Tensor::from_vec(ids, 4, &Device::Cpu).unwrap(),
        linear_factor: tensor(whole(4 * OUTPUTS, seed + 1), &[4, OUTPUTS], dtype),
        embed_factor: tensor(whole(4 * OUTPUTS, seed + 2), &[4, OUTPUTS], dtype),
    }
}

/// Candle's own operations on `Var`s.
fn plain_loss(vars: &HashMap<String, Var>, batch: &Batch) -> candle_core::Result<Tensor> {
    let linear = batch.x.matmul(&vars["linear.weight"].t()?)?.broadcast_add(&vars["linear.bias"])?;
    let embed = vars["embed.table"].embedding(&batch.ids)?;
    let parts = [(linear * &batch.linear_factor)?.sum_all()?, (embed * &batch.embed_factor)?.sum_all()?];
    &parts[0] + &parts[1]
}

/// The same with the zero-copy operations.
fn forward_loss(engine: &Engine, batch: &Batch) -> candle_core::Result<Tensor> {
    let units = [0, 1].map(gatherflow::UnitId);
    let [table, bias, weight] = [0, 1, 2].map(ParamId);
    let forward = Forward::new(engine.owned_pass(gatherflow::ChunkId(0), 0, true, Mode::Train)?);
    let anchor = forward.anchor()?;
    let x = forward.enter(units[0], &anchor)?;
    let embed = (forward.embedding(&x, table, &batch.ids)? * &batch.embed_factor)?.sum_all()?;
    let x = forward.enter(units[1], &batch.x.broadcast_add(&anchor)?)?;
    let linear = (forward.linear(&x, weight, Some(bias))? * &batch.linear_factor)?.sum_all()?;
    linear + embed
}

type Steps = (Vec<(u64, Option<u64>)>, Vec<f64>);

fn seen(hash: u64, outcome: &Outcome) -> (u64, Option<u64>) {
    (hash, outcome.grad_norm.map(f64::to_bits))
}

#[test]
fn the_same_model_trains_to_the_same_bits_on_both_paths() {
    for (ranks, dtype) in [(1, Candle::F32), (2, Candle::F32), (2, Candle::BF16)] {
        let zero_copy = on_ranks(ranks, |rank| -> Vec<_> {
            let number = rank.rank();
            let mut engine = engine(rank, dtype, config());
            let steps = (0..6).map(|step| {
                forward_loss(&engine, &batch(number, step, Candle::F32)).unwrap().backward().unwrap();
                let outcome = engine.step().unwrap().outcome().unwrap();
                seen(engine.params_hash().unwrap(), &outcome)
            });
            steps.collect()
        });
        let on_ramp = on_ranks(ranks, |rank| -> Vec<_> {
            let (number, vars) = (rank.rank(), vars(dtype));
            let mut optimizer = VarOptimizer::new(rank, vars.clone(), config()).unwrap();
            let steps = (0..6).map(|step| {
                let loss = plain_loss(&vars, &batch(number, step, dtype)).unwrap();
                let outcome = optimizer.backward_step(&loss).unwrap();
                seen(optimizer.params_hash().unwrap(), &outcome)
            });
            steps.collect()
        });
        assert_eq!(zero_copy, on_ramp, "{ranks} ranks, {dtype:?}");
        assert!(on_ramp.iter().all(|rank| *rank == on_ramp[0]), "all ranks hold the same");
        assert!(on_ramp[0].windows(2).all(|pair| pair[0].0 != pair[1].0), "every step changes something");
    }
}

/// Hash and norm after each of four steps with given gradients, two microbatches each, and the last parameters.
fn on_ramp_steps(rank: Rank, dtype: Candle, config: Config, strided: bool) -> Steps {
    let number = rank.rank();
    let vars = vars(dtype);
    let mut optimizer = VarOptimizer::new(rank, vars.clone(), config).unwrap();
    let steps = (0..4)
        .map(|step| {
            let grads = |microbatch: usize| {
                store(SHAPES.iter().enumerate().map(|(param, (name, shape))| {
                    let values = ragged(numel(shape), param + 10 * step + 100 * number + 1000 * microbatch);
                    let gradient = tensor(values, shape, dtype);
                    let gradient = if strided && shape.len() == 2 {
                        gradient.t().unwrap().contiguous().unwrap().t().unwrap()
                    } else {
                        gradient
                    };
                    (vars[*name].clone(), gradient)
                }))
            };
            optimizer.accumulate(&grads(0)).unwrap();
            let outcome = optimizer.step(&grads(1)).unwrap();
            seen(optimizer.params_hash().unwrap(), &outcome)
        })
        .collect();
    let values = SHAPES.iter().flat_map(|(name, _)| flat(&vars[*name])).collect();
    optimizer.close().unwrap();
    (steps, values)
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(Candle::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The same written straight into the engine's gradients.
fn engine_steps(rank: Rank, dtype: Candle, config: Config) -> Steps {
    let number = rank.rank();
    let mut engine = engine(rank, dtype, config);
    let steps = (0..4)
        .map(|step| {
            for microbatch in 0..2 {
                let pass = engine.owned_pass(gatherflow::ChunkId(0), microbatch, microbatch == 1, Mode::Train).unwrap();
                let units = [0, 1].map(gatherflow::UnitId);
                for unit in units {
                    pass.enter(unit).unwrap();
                }
                for (param, (_, shape)) in SHAPES.iter().enumerate() {
                    let values = ragged(numel(shape), param + 10 * step + 100 * number + 1000 * microbatch);
                    let values = tensor(values, shape, dtype).to_dtype(Candle::F32).unwrap();
                    let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
                    let mut main = pass.grad::<f32>(ParamId::from_index(param)).unwrap();
                    match main.mode() {
                        WriteMode::Overwrite => main.copy_from_slice(&values),
                        WriteMode::Accumulate => main.iter_mut().zip(values).for_each(|(main, g)| *main += g),
                    }
                    main.complete();
                }
                for unit in units.into_iter().rev() {
                    pass.leave(unit).unwrap();
                }
            }
            let outcome = engine.step().unwrap().outcome().unwrap();
            seen(engine.params_hash().unwrap(), &outcome)
        })
        .collect();
    let values = (0..SHAPES.len()).map(ParamId::from_index).flat_map(|param| match kernel_dtype(dtype) {
        DType::Bf16 => engine.read::<gatherflow::bf16>(param).unwrap().iter().map(|x| f64::from(x.to_f32())).collect(),
        DType::F16 => engine.read::<gatherflow::f16>(param).unwrap().iter().map(|x| f64::from(x.to_f32())).collect(),
        _ => engine.read::<f32>(param).unwrap().iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
    });
    let values = values.collect();
    engine.close().unwrap();
    (steps, values)
}

#[test]
fn the_same_gradients_give_the_same_bits_in_every_dtype_and_mode_and_with_any_strides() {
    for dtype in [Candle::F32, Candle::BF16, Candle::F16] {
        for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
            let scaler = if dtype == Candle::F16 { ScalerKind::Constant } else { ScalerKind::None };
            let config = config().overlap(overlap).scaler(scaler);
            let wanted = on_ranks(2, |rank| engine_steps(rank, dtype, config.clone()));
            for strided in [false, true] {
                let got = on_ranks(2, |rank| on_ramp_steps(rank, dtype, config.clone(), strided));
                assert_eq!(got, wanted, "{dtype:?} {overlap:?}, strided gradients: {strided}");
            }
        }
    }
}

#[test]
fn every_rank_starts_from_the_values_of_rank_0() {
    let values = on_ranks(3, |rank| {
        let var = Var::from_tensor(&tensor(vec![rank.rank() as f32 + 7.0; 70], &[70], Candle::F32)).unwrap();
        let mut optimizer = VarOptimizer::new(rank, [("w".to_string(), var.clone())], config()).unwrap();
        optimizer.close().unwrap();
        flat(&var)
    });
    assert!(values.iter().all(|values| *values == [7.0; 70]), "{values:?}");
}

#[test]
fn a_var_without_a_gradient_counts_as_zero_or_is_named() {
    let run = |config: Config, zeros: bool| {
        let vars = vars(Candle::F32);
        let mut optimizer = VarOptimizer::new(alone(), vars.clone(), config).unwrap();
        let mut grads = store([(vars["linear.bias"].clone(), tensor(ragged(OUTPUTS, 1), &[OUTPUTS], Candle::F32))]);
        if zeros {
            for name in ["embed.table", "linear.weight"] {
                grads.insert(&vars[name], vars[name].zeros_like().unwrap());
            }
        }
        let outcome = optimizer.step(&grads);
        (outcome, optimizer.params_hash().unwrap())
    };
    let ((without, hash_without), (with, hash_with)) = (run(config(), false), run(config(), true));
    assert_eq!(hash_without, hash_with);
    assert_eq!(without.unwrap().grad_norm, with.unwrap().grad_norm);
    let error = run(config().unused(gatherflow::Unused::Error), false).0.unwrap_err();
    assert_eq!((error.kind(), error.parameter()), (ErrorKind::Unused, Some("embed.table")), "{error}");
}

#[test]
fn a_skipped_step_leaves_every_var_and_the_scale_recovers() {
    let config = config().scaler(ScalerKind::Dynamic).scaler_hysteresis(1);
    let ended = on_ranks(2, |rank| {
        let (number, vars) = (rank.rank(), vars(Candle::F16));
        let before = flat(&vars["linear.weight"]);
        let mut optimizer = VarOptimizer::new(rank, vars.clone(), config.clone()).unwrap();
        let mut updated = Vec::new();
        for step in 0..30 {
            let loss = plain_loss(&vars, &batch(number, step, Candle::F16)).unwrap();
            let outcome = optimizer.backward_step(&loss).unwrap();
            updated.push(outcome.updated);
            if !updated.contains(&true) {
                assert_eq!(flat(&vars["linear.weight"]), before);
            }
        }
        (updated, optimizer.params_hash().unwrap(), optimizer.loss_scale().unwrap())
    });
    assert_eq!(ended[0], ended[1]);
    assert!(!ended[0].0[0] && ended[0].0[29], "{:?}", ended[0]);
}

/// Takes these steps.
fn train(optimizer: &mut VarOptimizer, vars: &HashMap<String, Var>, rank: usize, steps: std::ops::Range<usize>) {
    for step in steps {
        let loss = plain_loss(vars, &batch(rank, step, vars["linear.bias"].dtype())).unwrap();
        assert!(optimizer.backward_step(&loss).unwrap().updated);
    }
}

fn values(vars: &HashMap<String, Var>) -> [Vec<f64>; 3] {
    SHAPES.map(|(name, _)| flat(&vars[name]))
}

/// The parts of all ranks as one, and what is compared of it: masters and moments by parameter.
fn merged(parts: impl IntoIterator<Item = State>) -> (State, Vec<Vec<f32>>) {
    let state = State::merge(parts).unwrap();
    let pieces = state.tensors.iter().flat_map(|tensor| &tensor.pieces);
    let fields = pieces.flat_map(|p| [p.master.clone(), p.exp_avg.clone(), p.exp_avg_sq.clone()]).collect();
    (state, fields)
}

#[test]
fn vars_that_go_on_from_a_state_train_to_the_bits_of_a_run_without_a_pause() {
    let dynamic = config().scaler(ScalerKind::Dynamic).scaler_initial(512.0).scaler_interval(2);
    for (dtype, config) in [(Candle::F32, config()), (Candle::BF16, config()), (Candle::F16, dynamic)] {
        let without_pause = on_ranks(2, |rank| {
            let (number, vars) = (rank.rank(), vars(dtype));
            let mut optimizer = VarOptimizer::new(rank, vars.clone(), config.clone()).unwrap();
            train(&mut optimizer, &vars, number, 0..3);
            let saved = (optimizer.state().unwrap(), values(&vars));
            train(&mut optimizer, &vars, number, 3..6);
            (saved, (optimizer.state().unwrap(), values(&vars)))
        });
        let (saved, ended): (Vec<_>, Vec<_>) = without_pause.into_iter().unzip();
        let (state, _) = merged(saved.iter().map(|(part, _)| part.clone()));
        let resumed = on_ranks(2, |rank| {
            let zeros = |(name, var): (String, Var)| (name, Var::zeros(var.shape(), dtype, &Device::Cpu).unwrap());
            let (number, vars) = (rank.rank(), vars(dtype).into_iter().map(zeros).collect::<HashMap<_, _>>());
            let mut optimizer = VarOptimizer::new(rank, vars.clone(), config.clone().num_buckets(1)).unwrap();
            train(&mut optimizer, &vars, number, 0..1);
            optimizer.load_state(&state).unwrap();
            assert_eq!(values(&vars), saved[number].1, "the Vars have the state's parameters");
            train(&mut optimizer, &vars, number, 3..6);
            (optimizer.state().unwrap(), values(&vars))
        });
        for ((_, found), (_, expected)) in resumed.iter().zip(&ended) {
            assert_eq!(found, expected, "{dtype:?}");
        }
        let [(found, found_fields), (expected, expected_fields)] =
            [resumed, ended].map(|ranks| merged(ranks.into_iter().map(|(part, _)| part)));
        assert_eq!((found.steps, found.scaler, found.groups), (expected.steps, expected.scaler, expected.groups));
        assert!(found_fields == expected_fields, "{dtype:?}");
    }
}

#[test]
fn a_state_that_does_not_fit_or_comes_amid_a_step_changes_no_var() {
    let vars = vars(Candle::F32);
    let mut optimizer = VarOptimizer::new(alone(), vars.clone(), config()).unwrap();
    let (before, own) = (flat(&vars["linear.bias"]), merged([optimizer.state().unwrap()]).0);
    let other = Var::zeros(3, Candle::F32, &Device::Cpu).unwrap();
    let other = VarOptimizer::new(alone(), [("linear.bias".to_string(), other)], config()).unwrap();
    let (other, _) = merged([other.state().unwrap()]);
    let grads = store([(vars["linear.bias"].clone(), tensor(ragged(OUTPUTS, 1), &[OUTPUTS], Candle::F32))]);
    assert_eq!(optimizer.load_state(&other).unwrap_err().kind(), ErrorKind::State);
    optimizer.accumulate(&grads).unwrap();
    let error = optimizer.load_state(&own).unwrap_err();
    assert_eq!((error.kind(), error.parameter()), (ErrorKind::Misuse, Some("linear.bias")), "{error}");
    assert_eq!(flat(&vars["linear.bias"]), before);
    assert!(optimizer.step(&grads).unwrap().updated);
    assert_ne!(flat(&vars["linear.bias"]), before);
    optimizer.load_state(&own).unwrap();
    assert_eq!(flat(&vars["linear.bias"]), before);
}

/// An operation that candle cannot go back through.
struct NoBackward;

impl CustomOp1 for NoBackward {
    fn name(&self) -> &'static str {
        "no-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
}

#[test]
fn gradients_that_do_not_fit_are_named_and_change_nothing() {
    let vars = vars(Candle::F32);
    let mut optimizer = VarOptimizer::new(alone(), vars.clone(), config()).unwrap();
    let before = optimizer.params_hash().unwrap();
    let good = tensor(ragged(OUTPUTS, 1), &[OUTPUTS], Candle::F32);
    let bad: [(Tensor, &str); 3] = [
        (tensor(ragged(OUTPUTS, 1), &[1, OUTPUTS], Candle::F32), "shape [1, 30], but the Var has [30]"),
        (tensor(ragged(3, 1), &[3], Candle::F32), "shape [3]"),
        (good.to_dtype(Candle::F64).unwrap(), "its gradient is f64"),
    ];
    for (gradient, message) in bad {
        let grads = store([(vars["linear.bias"].clone(), gradient)]);
        for error in [optimizer.accumulate(&grads).unwrap_err(), optimizer.step(&grads).unwrap_err()] {
            assert_eq!((error.kind(), error.parameter()), (ErrorKind::Misuse, Some("linear.bias")), "{error}");
            assert!(error.to_string().contains(message) && !error.is_fatal(), "{error}");
        }
    }
    assert_eq!(optimizer.params_hash().unwrap(), before);
    assert!(optimizer.step(&store([(vars["linear.bias"].clone(), good)])).unwrap().updated);
    assert_eq!(optimizer.set_learning_rate(-1.0).unwrap_err().kind(), ErrorKind::Misuse);
    let error = optimizer.backward_step(&vars["linear.bias"].apply_op1(NoBackward).unwrap()).unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("no-backward"), "{error}");
    assert!(std::error::Error::source(&error).is_some(), "candle's own error is its source");
    assert!(optimizer.step(&store([])).unwrap().updated);
}

fn refused(vars: impl IntoIterator<Item = (String, Var)>, parameter: Option<&str>, message: &str) {
    let error = VarOptimizer::new(alone(), vars, config()).unwrap_err();
    assert_eq!((error.kind(), error.parameter()), (ErrorKind::Model, parameter), "{error}");
    assert!(error.to_string().contains(message), "should say {message:?}: {error}");
}

#[test]
fn vars_that_cannot_be_trained_are_named_at_the_start() {
    let named = |name: &str, var: &Var| (name.to_string(), var.clone());
    let var = Var::zeros(3, Candle::F32, &Device::Cpu).unwrap();
    refused([], None, "there are no Vars to train: build the layers before the optimizer");
    for dtype in [Candle::F64, Candle::U32] {
        let other = Var::zeros(3, dtype, &Device::Cpu).unwrap();
        refused(
            [named("a", &var), named("b", &other)],
            None,
            &format!("`b` has the unsupported dtype `{}`", dtype.as_str()),
        );
    }
    refused([named("a", &var), named("b", &var)], Some("b"), "it is the same Var as `a`");
    let twin = Var::zeros(4, Candle::F32, &Device::Cpu).unwrap();
    refused([named("a", &var), named("a", &twin)], None, "`a` is registered twice, with shapes [3] and [4]");
    let empty = Var::zeros((0, 2), Candle::F32, &Device::Cpu).unwrap();
    refused([named("a", &empty)], None, "`a` has the impossible shape [0, 2]");
    let half = Var::zeros(3, Candle::F16, &Device::Cpu).unwrap();
    let error = VarOptimizer::new(alone(), [named("half", &half)], config()).unwrap_err();
    assert!(error.kind() == ErrorKind::Config && error.to_string().contains("`half` is f16"), "{error}");
    VarOptimizer::new(alone(), [named("a", &var), named("half", &twin)], config()).unwrap();
}

#[test]
fn a_gradient_dtype_in_the_configuration_is_refused_because_nothing_would_read_it() {
    let error = VarOptimizer::new(alone(), vars(Candle::F32), config().grad_dtype(DType::Bf16)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("`grad_dtype` is set but never read"), "{error}");
    VarOptimizer::new(alone(), vars(Candle::F32), config()).unwrap();
}

#[test]
fn a_var_has_one_live_optimizer_and_is_free_after_close_or_drop() {
    let shared = vars(Candle::F32);
    let mut first = VarOptimizer::new(alone(), shared.clone(), config()).unwrap();
    refused(shared.clone(), Some("embed.table"), "trained by another live VarOptimizer");
    first.close().unwrap();
    first.close().unwrap();
    let error = first.step(&store([])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    drop(VarOptimizer::new(alone(), shared.clone(), config()).unwrap());
    VarOptimizer::new(alone(), shared, config()).unwrap();
}

#[test]
fn ranks_that_share_their_vars_are_told_instead_of_racing() {
    let shared = vars(Candle::F32);
    let errors: Vec<Option<Error>> = on_ranks(2, |rank| VarOptimizer::new(rank, shared.clone(), config()).err());
    assert!(errors.iter().flatten().any(|e| e.to_string().contains("each rank makes Vars of its own")), "{errors:?}");
}

#[test]
fn errors_pass_through_functions_that_return_candles_result() {
    fn program(config: Config) -> candle_core::Result<()> {
        VarOptimizer::new(alone(), vars(Candle::F16), config)?.close()?;
        Ok(())
    }
    let error = program(config()).unwrap_err();
    assert_eq!(cause(&error).unwrap().kind(), ErrorKind::Config, "{error}");
    program(config().scaler(ScalerKind::Dynamic)).unwrap();
}

#[test]
fn scalar_vars_train_too() {
    let var = Var::new(2f32, &Device::Cpu).unwrap();
    let mut optimizer = VarOptimizer::new(alone(), [("scale".to_string(), var.clone())], config()).unwrap();
    for _ in 0..3 {
        assert!(optimizer.backward_step(&var.sqr().unwrap()).unwrap().updated);
    }
    assert!(var.to_scalar::<f32>().unwrap() < 2.0);
    assert_eq!(optimizer.steps(), 3);
}
