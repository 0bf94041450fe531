//! Finite gradients that a factor, or their own size, takes beyond what Adam can square skip the step on every rank like inf
//! (SPEC T6): parameters and moments are those of a run without that step.
#![allow(clippy::unwrap_used)]

#[path = "reference/mod.rs"]
mod reference;
mod small;

use std::sync::Arc;

use gatherflow::{Config, Engine, ErrorKind, OnNonFinite, Overlap, ScalerKind, Skip, State};
use reference::{Hyper, Scaler, Serial, Weight};
use small::{Small, config, microbatch, on_ranks};

const RANKS: usize = 2;
const SCALE: f32 = 1e-37;

/// What each gradient element is in each step; the tied parameter's is twice that. The second step's are finite, and 1e47 unscaled.
const STEPS: [(f32, bool); 3] = [(0.25 * SCALE, true), (1e10, false), (0.5 * SCALE, true)];

fn modes() -> impl Iterator<Item = Config> {
    let modes = [Overlap::None, Overlap::Window].into_iter().flat_map(|o| [Skip::Host, Skip::Device].map(|s| (o, s)));
    modes.map(|(overlap, skip)| config().max_norm(0.0).overlap(overlap).skip(skip))
}

/// The serial reference after the same steps.
fn serial(engine: &Engine, small: &Small) -> Serial {
    let weight = |param: &gatherflow::ParamInfo| {
        let initial: Vec<f32> =
            (0..param.shape.iter().product()).map(|i| (i as f32 + param.id.0 as f32) / 64.0).collect();
        Weight::new(param.id, param.dtype, 0, param.options.trainable, &initial)
    };
    let weights: Vec<Weight> = engine.params().iter().map(weight).collect();
    let hyper = Hyper { lr: Arc::new(|_| 1e-3), betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, decoupled: true };
    let constant = Scaler::new(SCALE, u32::MAX, i32::MAX);
    let mut serial = Serial::new(engine.plan().clone(), |_| weights.clone(), vec![hyper], 0.0, Some(constant));
    for (value, updated) in STEPS {
        let gradient = |weight: &Weight| {
            let value = if weight.id == small.tied {
                2.0 * value
            } else if weight.id == small.own {
                value
            } else {
                0.0
            };
            vec![value; weight.param.len()]
        };
        let gradients = vec![weights.iter().map(gradient).collect(); RANKS];
        assert_eq!(serial.step(&gradients, RANKS as f64).updated, updated);
    }
    serial
}

#[test]
fn a_scale_that_takes_finite_gradients_beyond_f32_skips_the_step_and_training_goes_on() {
    for config in modes() {
        let mut config = config.scaler(ScalerKind::Constant);
        config.set("scaler.scale", "1e-37").unwrap();
        let parts = on_ranks(RANKS, |rank| {
            let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
            for (value, updated) in STEPS {
                let before = (engine.state().unwrap(), small::bits(&engine));
                microbatch(&engine, &small, true, value);
                let outcome = engine.step().unwrap().outcome().unwrap();
                assert_eq!(
                    (outcome.updated, outcome.loss_scale, outcome.grad_norm.is_some()),
                    (updated, SCALE, updated)
                );
                let unchanged = small::bits(&engine) == before.1 && same(&engine.state().unwrap(), &before.0);
                assert_eq!(unchanged, !updated);
            }
            let part = (engine.state().unwrap(), serial(&engine, &small));
            engine.close().unwrap();
            part
        });
        let (parts, serials): (Vec<State>, Vec<Serial>) = parts.into_iter().unzip();
        let whole = State::merge(parts).unwrap();
        assert_eq!(whole.groups[0].t, 2);
        let trained: Vec<&Weight> = serials[0].weights(0).iter().filter(|weight| weight.trainable).collect();
        assert_eq!(whole.tensors.len(), trained.len());
        for (tensor, weight) in whole.tensors.iter().zip(trained) {
            let [piece] = &tensor.pieces[..] else { panic!("a whole is one piece") };
            for (found, expected) in [
                (&piece.master, &weight.master),
                (&piece.exp_avg, &weight.exp_avg),
                (&piece.exp_avg_sq, &weight.exp_avg_sq),
            ] {
                assert!(found == expected && found.iter().all(|x| x.is_finite()), "{}", tensor.name);
            }
        }
    }
}

/// Masters and moments, bit for bit.
fn same(a: &State, b: &State) -> bool {
    let bits = |state: &State| -> Vec<u32> {
        let pieces = state.tensors.iter().flat_map(|tensor| &tensor.pieces);
        pieces.flat_map(|p| [&p.master, &p.exp_avg, &p.exp_avg_sq]).flatten().map(|x| x.to_bits()).collect()
    };
    bits(a) == bits(b)
}

#[test]
fn a_gradient_whose_square_is_no_f32_is_an_error_that_names_its_parameter_where_the_policy_is_error() {
    for config in modes() {
        let config = config.on_nonfinite(OnNonFinite::Error);
        on_ranks(RANKS, |rank| {
            let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
            let before = engine.state().unwrap();
            // The square of 2e19 is above the largest f32.
            microbatch(&engine, &small, true, if engine.rank() == 1 { 4e19 } else { 0.0 });
            let error = engine.step().unwrap().outcome().unwrap_err();
            assert_eq!((error.kind(), error.parameter()), (ErrorKind::NonFinite, Some("tied")), "{error}");
            assert!(!error.is_fatal() && error.rank().is_some());
            assert!(same(&engine.state().unwrap(), &before));
            microbatch(&engine, &small, true, 1.0);
            assert!(engine.step().unwrap().outcome().unwrap().updated);
            engine.close().unwrap();
        });
    }
}
