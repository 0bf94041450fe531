//! Parameters swapped in from outside are what evaluation reads, and training goes on as if they had never been there (SPEC P4),
//! in every mode and storage.
#![allow(clippy::unwrap_used)]

mod small;

use gatherflow::{Config, Engine, ErrorKind, Mode, Overlap, Storage, bf16};
use small::{Small, bits, config, in_modes_and_storages, microbatch, on_ranks, solo, trained};

fn settings() -> impl Iterator<Item = Config> {
    let long = config().overlap(Overlap::Window).steps_in_flight(4);
    let long = [Storage::Views, Storage::Shared].map(|storage| long.clone().storage(storage));
    let modes: Vec<Config> = in_modes_and_storages(&config()).collect();
    modes.into_iter().chain(long)
}

fn train(engine: &mut Engine, small: &Small, steps: usize) {
    for _ in 0..steps {
        microbatch(engine, small, true, 1.0);
        engine.step().unwrap().outcome().unwrap();
    }
}

/// Reads through entered units, as an evaluation does.
fn first_elements(engine: &Engine, small: &Small) -> (f32, f32) {
    let pass = engine.pass(small.chunk, 0, false, Mode::Eval).unwrap();
    let first = pass.enter(small.first).unwrap();
    let second = pass.enter(small.second).unwrap();
    let tied = first.read::<f32>(small.tied).unwrap()[0];
    (tied, second.read::<bf16>(small.own).unwrap()[0].to_f32())
}

#[test]
fn training_after_a_swap_is_training_without_one_on_any_number_of_ranks_in_every_mode() {
    for ranks in [1, 2, 3] {
        let mut first = None;
        for mode in settings() {
            let run = |swap: bool| {
                on_ranks(ranks, |rank| {
                    let (mut engine, small) = small::engine(rank, mode.clone()).unwrap();
                    train(&mut engine, &small, 2);
                    if swap {
                        // Each rank its own, right after a step whose gathers are pending.
                        let value = 3.0 + engine.rank() as f32;
                        let swapped = engine.swap_params(|_, out| out.fill_with(|_| value)).unwrap();
                        assert_eq!(first_elements(&swapped, &small), (value, value));
                        swapped.back().unwrap();
                    }
                    train(&mut engine, &small, 2);
                    let trained = trained(&engine);
                    engine.close().unwrap();
                    trained
                })
            };
            let without = run(false);
            assert!(run(true) == without, "{ranks} ranks, {mode:?}");
            assert!(*first.get_or_insert_with(|| without.clone()) == without, "{ranks} ranks, {mode:?}");
        }
    }
}

#[test]
fn a_swap_in_mid_accumulation_keeps_the_gradients() {
    let run = |config: &Config, swap: bool| {
        let (mut engine, small) = solo(config.clone());
        microbatch(&engine, &small, false, 1.0);
        if swap {
            drop(engine.swap_params(|_, out| out.fill_with(|_| 9.0)).unwrap());
        }
        microbatch(&engine, &small, true, 0.5);
        engine.step().unwrap().outcome().unwrap();
        trained(&engine)
    };
    let without = run(&config(), false);
    for config in settings() {
        assert!(run(&config, true) == without, "{config:?}");
    }
}

#[test]
fn what_is_written_finds_the_trained_parameter_and_a_panic_puts_it_back() {
    for config in settings() {
        let (mut engine, small) = solo(config);
        train(&mut engine, &small, 1);
        let before = bits(&engine);
        let own = engine.read::<bf16>(small.own).unwrap().to_vec();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = engine.swap_params(|param, out| {
                if param.id == small.own {
                    let gatherflow::ParamMut::Bf16(out) = out else { panic!("it is bf16") };
                    assert_eq!(out, own);
                    out.fill(bf16::ZERO);
                    panic!("user code");
                }
                out.fill_with(|_| 1.0);
            });
        }));
        assert!(panicked.is_err());
        assert_eq!(bits(&engine), before);
        train(&mut engine, &small, 1);
    }
}

fn misuse<T: std::fmt::Debug>(result: Result<T, gatherflow::Error>, says: &str) {
    let error = result.unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(says), "{error}");
}

#[test]
fn nothing_trains_on_parameters_that_are_swapped_in() {
    for config in settings() {
        let (mut engine, small) = solo(config);
        let trained = bits(&engine);
        let owned = engine.owned_pass(small.chunk, 0, false, Mode::Train).unwrap();
        std::mem::forget(engine.swap_params(|_, out| out.fill_with(|_| 1.0)).unwrap());
        let says = "other parameters are swapped in";
        misuse(engine.step().map(drop), says);
        misuse(engine.pass(small.chunk, 0, true, Mode::Train), says);
        misuse(owned.enter(small.first), says);
        misuse(owned.read::<f32>(small.tied), says);
        misuse(owned.leave(small.first), says);
        misuse(owned.grad::<f32>(small.own), says);
        misuse(engine.write_param(small.own, |_| unreachable!()), says);
        misuse(engine.reload_masters(), says);
        misuse(engine.swap_params(|_, _| unreachable!()), says);
        engine.restore_params().unwrap();
        assert_eq!(bits(&engine), trained);
        drop(owned);
        train(&mut engine, &small, 1);
        engine.restore_params().unwrap();
        engine.close().unwrap();
        assert_eq!(engine.swap_params(|_, _| unreachable!()).unwrap_err().kind(), ErrorKind::Closed);
    }
}

#[test]
fn a_guard_that_is_alive_is_named_on_the_way_in_and_on_the_way_back() {
    for config in settings() {
        let (mut engine, small) = solo(config);
        let trained = bits(&engine);
        let owned = engine.owned_pass(small.chunk, 0, false, Mode::Eval).unwrap();
        let reading = owned.read::<f32>(small.tied).unwrap();
        misuse(engine.swap_params(|_, _| unreachable!()), "`tied`: a guard of it is alive");
        drop(reading);
        let swapped = engine.swap_params(|_, out| out.fill_with(|_| 1.0)).unwrap();
        let reading = owned.read::<f32>(small.tied).unwrap();
        misuse(swapped.back(), "`tied`: a guard of it is alive");
        misuse(engine.step().map(drop), "other parameters are swapped in");
        drop(reading);
        engine.restore_params().unwrap();
        assert_eq!(bits(&engine), trained);
    }
}
