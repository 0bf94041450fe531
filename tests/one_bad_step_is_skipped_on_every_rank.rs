//! A verdict of one rank rides in the small all-gather: every rank skips, returns the same error naming rank and parameter,
//! and the engine goes on (rule F1).
#![allow(clippy::unwrap_used)]

mod small;

use gatherflow::{
    Config, DType, Engine, ErrorKind, GroupId, Lr, Mode, Model, OnNonFinite, Overlap, ScalerKind, Skip, State, Unused,
};
use small::{Small, bits, config, microbatch, on_ranks, trained};

/// A good step, then `bad` on rank 1 only (the others take a good one), then a good step, in every mode and storage, whoever
/// decides skips. The bad step changes nothing, and all ends as if it had not been: parameters, masters, moments and t.
fn one_bad_step(config: &Config, kind: ErrorKind, parameter: Option<&str>, bad: impl Fn(&mut Engine, &Small) + Sync) {
    let without = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, self::config()).unwrap();
        for _ in 0..2 {
            microbatch(&engine, &small, true, 0.25);
            assert!(engine.step().unwrap().outcome().unwrap().updated);
        }
        let trained = trained(&engine);
        engine.close().unwrap();
        trained
    });
    for config in small::in_modes_and_storages(config) {
        for skip in [Skip::Host, Skip::Device] {
            let with = one_bad_step_with(&config.clone().skip(skip), kind, parameter, &bad);
            assert!(with == without, "{config:?}, {skip:?}");
        }
    }
}

/// What training has left on each rank, by its bits.
type Trained = Vec<(u64, Vec<u64>, Vec<u32>)>;

fn one_bad_step_with(
    config: &Config,
    kind: ErrorKind,
    parameter: Option<&str>,
    bad: &(impl Fn(&mut Engine, &Small) + Sync),
) -> Trained {
    let looks = config.is_explicit("check_for_nan_in_grad");
    on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
        microbatch(&engine, &small, true, 0.25);
        assert!(engine.step().unwrap().outcome().unwrap().updated);
        let before = trained(&engine);
        if engine.rank() == 1 {
            bad(&mut engine, &small);
        } else {
            microbatch(&engine, &small, true, 0.25);
        }
        let error = engine.step().unwrap().outcome().unwrap_err();
        assert_eq!((error.kind(), error.step()), (kind, Some(1)), "{error}");
        // Where gradients are only looked at once they are summed, the rank is the one that owns the element.
        assert!(error.rank() == Some(1) || kind == ErrorKind::NonFinite && !looks, "{error}");
        let bucket = small::bucket_of(&engine, parameter).filter(|_| looks);
        assert_eq!(error.bucket(), bucket, "{error}");
        assert_eq!(error.parameter(), parameter, "{error}");
        assert!(!error.is_fatal());
        assert!(trained(&engine) == before, "a skipped step changes nothing: {config:?}");
        microbatch(&engine, &small, true, 0.25);
        assert!(engine.step().unwrap().outcome().unwrap().updated);
        let after = trained(&engine);
        assert_ne!(after.0, before.0);
        engine.close().unwrap();
        after
    })
}

#[test]
fn an_abandoned_gradient() {
    one_bad_step(&config(), ErrorKind::Abandoned, Some("tied"), |engine, small| {
        let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
        pass.enter(small.second).unwrap();
        let back = pass.backward(small.second).unwrap();
        drop(back.grad::<f32>(small.tied).unwrap());
    });
}

#[test]
fn an_abandoned_owned_gradient() {
    one_bad_step(&config(), ErrorKind::Abandoned, Some("own"), |engine, small| {
        let pass = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
        pass.enter(small.second).unwrap();
        drop(pass.grad::<f32>(small.own).unwrap());
        pass.leave(small.second).unwrap();
    });
}

#[test]
fn a_panic_in_the_middle_of_backward() {
    one_bad_step(&config(), ErrorKind::Abandoned, Some("own"), |engine, small| {
        let engine = &*engine;
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
            pass.enter(small.second).unwrap();
            let back = pass.backward(small.second).unwrap();
            let _gradient = back.grad::<f32>(small.own).unwrap();
            std::panic::resume_unwind(Box::new("user code"));
        }));
        assert!(panicked.is_err());
    });
}

#[test]
fn a_panic_in_backward_between_two_gradients() {
    one_bad_step(&config(), ErrorKind::Abandoned, Some("tied"), |engine, small| {
        let engine = &*engine;
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
            pass.enter(small.first).unwrap();
            pass.enter(small.second).unwrap();
            small::write(&pass, small.second, &[small.own, small.tied], 1.0);
            let _back = pass.backward(small.first).unwrap();
            std::panic::resume_unwind(Box::new("user code"));
        }));
        assert!(panicked.is_err());
    });
}

#[test]
fn a_panic_in_the_middle_of_an_owned_pass() {
    for last in [false, true] {
        one_bad_step(&config(), ErrorKind::Abandoned, Some("tied"), |engine, small| {
            let engine = &*engine;
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let pass = engine.owned_pass(small.chunk, 0, last, Mode::Train).unwrap();
                pass.enter(small.first).unwrap();
                pass.enter(small.second).unwrap();
                let mut gradient = pass.grad::<f32>(small.own).unwrap();
                gradient.fill(1.0);
                gradient.complete();
                pass.leave(small.second).unwrap();
                std::panic::resume_unwind(Box::new("user code"));
            }));
            assert!(panicked.is_err());
        });
    }
}

#[test]
fn a_panic_after_an_owned_pass_or_in_evaluation_spoils_nothing() {
    let (mut engine, small) = small::solo(config());
    for mode in [Mode::Eval, Mode::Train] {
        let pass = engine.owned_pass(small.chunk, 0, true, mode).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            pass.enter(small.first).unwrap();
            if mode == Mode::Train {
                pass.leave(small.first).unwrap();
            }
            std::panic::resume_unwind(Box::new("user code"));
        }));
        assert!(panicked.is_err());
    }
    assert!(engine.step().unwrap().outcome().unwrap().updated);
}

#[test]
fn a_non_finite_gradient_where_the_policy_is_error() {
    one_bad_step(&config().on_nonfinite(OnNonFinite::Error), ErrorKind::NonFinite, Some("own"), |engine, small| {
        let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
        pass.enter(small.second).unwrap();
        small::write(&pass, small.second, &[small.own], f32::NAN);
    });
}

#[test]
fn a_non_finite_gradient_of_one_rank_that_is_found_before_it_is_reduced() {
    for policy in [OnNonFinite::Skip, OnNonFinite::Error] {
        for (value, late) in [(f32::NAN, false), (f32::INFINITY, true), (f32::NEG_INFINITY, false)] {
            let config = config().on_nonfinite(policy).check_for_nan_in_grad(true).overlap_grad_reduce(!late);
            one_bad_step(&config, ErrorKind::NonFinite, Some("own"), |engine, small| {
                let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
                pass.enter(small.second).unwrap();
                small::write(&pass, small.second, &[small.own], value);
            });
        }
    }
}

#[test]
fn finite_gradients_whose_sum_is_not_are_no_fault_of_a_rank() {
    let config = &config().check_for_nan_in_grad(true);
    let outcomes = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
        // The tied one gets it twice on each rank.
        microbatch(&engine, &small, true, 0.4 * f32::MAX);
        let outcome = engine.step().unwrap().outcome().unwrap();
        engine.close().unwrap();
        outcome.updated
    });
    assert_eq!(outcomes, [false, false]);
}

#[test]
fn a_parameter_without_gradient_where_the_policy_is_error() {
    let config = config().unused(Unused::Error);
    let errors = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
        microbatch(&engine, &small, true, 0.25);
        let error = engine.step().unwrap().outcome().unwrap_err();
        engine.close().unwrap();
        (error.kind(), error.rank(), error.parameter().map(str::to_owned))
    });
    assert!(errors.iter().all(|e| *e == (ErrorKind::Unused, Some(0), Some("other.weight".into()))), "{errors:?}");
}

#[test]
fn weights_that_are_all_zero() {
    on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config().average_by_weight(true)).unwrap();
        microbatch(&engine, &small, true, 0.25);
        engine.set_weight(0.0).unwrap();
        assert_eq!(engine.step().unwrap().outcome().unwrap_err().kind(), ErrorKind::NoWeight);
        microbatch(&engine, &small, true, 0.25);
        engine.set_weight(engine.rank() as f64).unwrap();
        assert!(engine.step().unwrap().outcome().unwrap().updated, "0 on some ranks is legal");
        engine.close().unwrap();
    });
}

#[test]
fn learning_rates_that_differ_between_ranks() {
    for skip in [Skip::Host, Skip::Device] {
        on_ranks(3, |rank| {
            let (mut engine, small) = small::engine(rank, config().skip(skip)).unwrap();
            let before = small::bits(&engine);
            let other = engine.rank() == 1;
            for rates in [Lr::Value(0.5), Lr::schedule(|_| 0.5)] {
                if other {
                    engine.set_lr(GroupId::DEFAULT, rates).unwrap();
                }
                microbatch(&engine, &small, true, 1.0);
                let error = engine.step().unwrap().outcome().unwrap_err();
                assert_eq!((error.kind(), error.rank()), (ErrorKind::LearningRates, Some(1)), "{error}");
                assert!(!error.is_fatal() && small::bits(&engine) == before);
            }
            engine.set_lr(GroupId::DEFAULT, 0.5).unwrap();
            microbatch(&engine, &small, true, 1.0);
            assert!(engine.step().unwrap().outcome().unwrap().updated);
            assert_ne!(small::bits(&engine), before);
            engine.close().unwrap();
        });
    }
}

#[test]
fn schedules_that_differ_between_ranks_whatever_outcomes_they_know() {
    for (skip, in_flight) in [(Skip::Host, 2), (Skip::Device, 1), (Skip::Device, 3)] {
        on_ranks(3, |rank| {
            let (mut engine, small) = small::engine(rank, config().skip(skip).steps_in_flight(in_flight)).unwrap();
            let (number, other) = (engine.rank(), engine.rank() == 2);
            engine
                .set_lr(GroupId::DEFAULT, Lr::schedule(move |t| if other && t >= 4 { 0.3 } else { 1.0 / t as f64 }))
                .unwrap();
            let mut handles = Vec::new();
            // The second step is skipped, and only one rank waits to hear of it.
            for step in 0..5 {
                microbatch(&engine, &small, true, if step == 1 { f32::NAN } else { 1.0 });
                handles.push(engine.step().unwrap());
                if number == 0 {
                    assert_eq!(handles[step].outcome().is_ok(), step < 3);
                }
            }
            let outcomes: Vec<_> = handles.iter().map(|handle| handle.outcome().map(|o| o.updated)).collect();
            assert!(matches!(outcomes[..3], [Ok(true), Ok(false), Ok(true)]), "{outcomes:?}");
            for error in outcomes[3..].iter().map(|outcome| outcome.as_ref().unwrap_err()) {
                assert_eq!((error.kind(), error.rank()), (ErrorKind::LearningRates, Some(2)), "{error}");
            }
            let before = bits(&engine);
            engine.set_lr(GroupId::DEFAULT, Lr::schedule(|t| 1.0 / t as f64)).unwrap();
            microbatch(&engine, &small, true, 1.0);
            let outcome = engine.step().unwrap().outcome().unwrap();
            assert_eq!(
                (outcome.updated, &outcome.learning_rates[..]),
                (true, &[1.0 / 3.0][..]),
                "two were updated before"
            );
            assert_ne!(bits(&engine), before);
            engine.close().unwrap();
        });
    }
}

#[test]
fn schedules_that_differ_where_a_state_goes_on() {
    let (mut engine, small) = small::solo(config());
    for _ in 0..6 {
        microbatch(&engine, &small, true, 1.0);
        assert!(engine.step().unwrap().outcome().unwrap().updated);
    }
    let whole = State::merge([engine.state().unwrap()]).unwrap();
    on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        let other = engine.rank() == 1;
        engine.load_state(&whole).unwrap();
        engine.set_lr(GroupId::DEFAULT, Lr::schedule(move |t| if other && t == 8 { 0.25 } else { 0.5 })).unwrap();
        for differs in [false, true, false] {
            microbatch(&engine, &small, true, 1.0);
            let kind = engine.step().unwrap().outcome().map_err(|error| error.kind());
            assert_eq!(kind.is_err(), differs, "{kind:?}");
        }
        engine.close().unwrap();
    });
}

#[test]
fn learning_rate_schedules_stand_still_over_a_skipped_step() {
    for (skip, in_flight) in [(Skip::Host, 2), (Skip::Device, 1), (Skip::Device, 2), (Skip::Device, 3)] {
        schedules_stand_still(&config().skip(skip).steps_in_flight(in_flight));
    }
}

fn schedules_stand_still(config: &Config) {
    let rates = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
        engine.set_lr(GroupId::DEFAULT, Lr::schedule(|t| t as f64)).unwrap();
        let mut handles = Vec::new();
        for step in 0..5 {
            microbatch(&engine, &small, true, if step == 2 { f32::NAN } else { 1.0 });
            handles.push(engine.step().unwrap());
        }
        let outcomes: Vec<_> = handles.iter().map(|h| h.outcome().unwrap()).collect();
        engine.close().unwrap();
        outcomes.iter().filter(|o| o.updated).map(|o| o.learning_rates[0]).collect::<Vec<_>>()
    });
    assert!(rates.iter().all(|r| *r == [1.0, 2.0, 3.0, 4.0]), "{rates:?}");
}

#[test]
fn a_wish_to_stop_reaches_every_rank_in_the_same_step() {
    let stops = on_ranks(3, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        let stops: Vec<bool> = (0..3)
            .map(|step| {
                if step == 1 && engine.rank() == 2 {
                    engine.request_stop();
                }
                microbatch(&engine, &small, true, 1.0);
                engine.step().unwrap().outcome().unwrap().stop
            })
            .collect();
        engine.close().unwrap();
        stops
    });
    assert!(stops.iter().all(|s| *s == [false, true, false]), "{stops:?}");
}

#[test]
fn a_wish_to_stop_outlives_a_step_that_ends_in_an_error() {
    let stops = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        if engine.rank() == 1 {
            engine.request_stop();
        } else {
            let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
            pass.enter(small.first).unwrap();
            drop(pass.backward(small.first).unwrap().grad::<f32>(small.tied).unwrap());
        }
        assert_eq!(engine.step().unwrap().outcome().unwrap_err().kind(), ErrorKind::Abandoned);
        assert_eq!(engine.stop_flag().is_requested(), engine.rank() == 1);
        let stops = [(); 2].map(|()| engine.step().unwrap().outcome().unwrap().stop);
        engine.close().unwrap();
        stops
    });
    assert!(stops.iter().all(|s| *s == [true, false]), "{stops:?}");
}

#[test]
fn an_old_outcome_does_not_answer_a_new_wish_to_stop() {
    let (mut engine, _) = small::solo(config());
    engine.request_stop();
    let handle = engine.step().unwrap();
    assert!(handle.outcome().unwrap().stop);
    engine.request_stop();
    assert!(handle.outcome().unwrap().stop && engine.stop_flag().is_requested());
    assert!(engine.step().unwrap().outcome().unwrap().stop);
    assert!(!engine.stop_flag().is_requested());
}

#[test]
fn f16_training_recovers_once_the_dynamic_scale_has_backed_off_in_every_mode() {
    let run = |config: &Config| {
        on_ranks(2, |rank| {
            let mut model = Model::new();
            let chunk = model.chunk();
            let unit = model.unit(chunk, "unit").unwrap();
            let param = model.param(unit, "half", &[300], DType::F16).unwrap();
            let config = config.clone().scaler(ScalerKind::Dynamic);
            let mut engine = Engine::new(rank, model, config, |_, out| out.fill_with(|i| i as f32 / 300.0)).unwrap();
            let mut seen = Vec::new();
            for step in 0..5 {
                let scale = engine.loss_scale().unwrap();
                let pass = engine.pass(chunk, 0, true, Mode::Train).unwrap();
                pass.enter(unit).unwrap();
                let overflow = step < 3 && engine.rank() == 1;
                small::write(&pass, unit, &[param], if overflow { f32::INFINITY } else { 0.01 * scale });
                let outcome = engine.step().unwrap().outcome().unwrap();
                seen.push((outcome.updated, outcome.loss_scale.log2()));
                assert!(outcome.grad_norm.is_none_or(|norm| (norm - 0.01 * 300_f64.sqrt()).abs() < 1e-6), "unscaled");
            }
            let hash = bits(&engine);
            engine.close().unwrap();
            (seen, hash)
        })
    };
    let expected = vec![(false, 32.0), (false, 32.0), (false, 31.0), (true, 30.0), (true, 30.0)];
    let none = run(&config().overlap(Overlap::None));
    assert_eq!(none[0].0, expected);
    for config in small::in_modes_and_storages(&config()) {
        assert!(run(&config).iter().all(|result| *result == none[0]), "{config:?}");
    }
}
