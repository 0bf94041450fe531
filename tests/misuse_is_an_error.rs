//! Bad use is an error that names the thing, never a panic and never a hang, and the engine stays usable.
#![allow(clippy::unwrap_used)]

mod small;

use gatherflow::{ChunkId, Config, Error, ErrorKind, GroupId, Lr, Mode, ParamId, UnitId, bf16};
use small::{bits, config, microbatch, on_ranks, solo, write};

fn misuse<T: std::fmt::Debug>(result: Result<T, Error>, names: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert!(!error.is_fatal() && error.to_string().contains(names), "should name {names:?}: {error}");
}

#[test]
fn a_second_live_gradient_guard_is_an_error_naming_the_parameter() {
    let (mut engine, small) = solo(config());
    let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
    pass.enter(small.second).unwrap();
    let back = pass.backward(small.second).unwrap();
    let mut gradient = back.grad::<f32>(small.tied).unwrap();
    misuse(back.grad::<f32>(small.tied), "`tied`: a gradient guard of it is alive");
    misuse(back.grad_zeroed::<f32>(small.tied), "`tied`");
    gradient.fill(1.0);
    gradient.complete();
    back.leave().unwrap();
    assert!(engine.step().unwrap().outcome().unwrap().updated);
}

#[test]
fn ids_dtypes_and_units_that_do_not_fit_are_named() {
    let (engine, small) = solo(config());
    let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
    misuse(pass.enter(small.other_unit), "unit `other` is in chunk 1, but this pass is of chunk 0");
    misuse(pass.enter(UnitId(99)), "no unit 99");
    misuse(engine.pass(ChunkId(2), 0, true, Mode::Train), "no chunk 2");
    misuse(engine.read::<f32>(ParamId(99)), "no parameter 99");
    misuse(engine.prefetch(UnitId(99)), "no unit 99");
    misuse(engine.read::<bf16>(small.tied), "`tied`: the parameter is f32, but was asked for as bf16");
    let first = pass.enter(small.first).unwrap();
    misuse(first.read::<bf16>(small.own), "`own`: unit `first` was not registered with it");
    let back = pass.backward(small.first).unwrap();
    misuse(back.grad::<f32>(small.own), "`own`: unit `first` was not registered with it");
    misuse(back.grad::<f32>(small.frozen), "`frozen`: a frozen parameter has no gradient");
    misuse(back.grad::<bf16>(small.tied), "`tied`: the gradient is f32");
    let owned = engine.owned_pass(small.chunk, 0, false, Mode::Eval).unwrap();
    misuse(owned.enter(small.other_unit), "unit `other`");
    misuse(owned.grad::<f32>(small.tied), "evaluation");
    misuse(owned.read::<f32>(ParamId(99)), "no parameter 99");
}

#[test]
fn backward_more_often_than_forward_is_an_error_naming_the_unit() {
    let (mut engine, small) = solo(config());
    let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
    misuse(pass.backward(small.first), "backward of unit `first` more often");
    pass.enter(small.first).unwrap();
    pass.reenter(small.first).unwrap();
    write(&pass, small.first, &[small.tied], 1.0);
    misuse(pass.backward(small.first), "`first`");
    let owned = engine.owned_pass(small.other_chunk, 0, true, Mode::Train).unwrap();
    misuse(owned.leave(small.other_unit), "`other`");
    owned.enter(small.other_unit).unwrap();
    owned.leave(small.other_unit).unwrap();
    misuse(owned.leave(small.other_unit), "`other`");
    assert!(engine.step().unwrap().outcome().unwrap().updated);
}

#[test]
fn evaluation_has_no_backward_and_a_step_has_one_last_microbatch() {
    let (mut engine, small) = solo(config());
    let pass = engine.pass(small.chunk, 0, false, Mode::Eval).unwrap();
    pass.enter(small.first).unwrap();
    misuse(pass.backward(small.first), "evaluation");
    microbatch(&engine, &small, false, 1.0);
    microbatch(&engine, &small, true, 1.0);
    misuse(engine.pass(small.chunk, 2, false, Mode::Train), "chunk 0 has had its last microbatch");
    misuse(engine.owned_pass(small.chunk, 2, true, Mode::Train), "chunk 0 has had its last microbatch");
    engine.pass(small.chunk, 0, false, Mode::Eval).unwrap();
    engine.pass(small.other_chunk, 0, true, Mode::Train).unwrap();
    engine.step().unwrap().outcome().unwrap();
    microbatch(&engine, &small, true, 1.0);
}

#[test]
fn a_write_after_completion_is_an_error_naming_the_parameter() {
    let (engine, small) = solo(config());
    let owned = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
    owned.enter(small.first).unwrap();
    let mut gradient = owned.grad::<f32>(small.tied).unwrap();
    gradient.fill(1.0);
    owned.leave(small.first).unwrap();
    gradient.complete();
    misuse(owned.grad::<f32>(small.tied), "`tied`: its gradient is complete");
}

#[test]
fn a_last_microbatch_whose_backward_comes_first_is_told_the_order() {
    let (engine, small) = solo(config());
    let earlier = engine.owned_pass(small.chunk, 0, false, Mode::Train).unwrap();
    let last = engine.owned_pass(small.chunk, 1, true, Mode::Train).unwrap();
    last.enter(small.first).unwrap();
    let mut gradient = last.grad::<f32>(small.tied).unwrap();
    gradient.fill(1.0);
    gradient.complete();
    last.leave(small.first).unwrap();
    misuse(earlier.grad::<f32>(small.tied), "let backward of earlier microbatches come before");
}

#[test]
fn step_refuses_while_an_owned_guard_is_alive_and_goes_on_after() {
    let (mut engine, small) = solo(config());
    let owned = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
    owned.enter(small.first).unwrap();
    let reading = owned.read::<f32>(small.tied).unwrap();
    misuse(engine.step(), "`tied`: a guard of it is alive");
    misuse(engine.close(), "`tied`");
    drop(reading);
    let mut writing = owned.grad::<f32>(small.tied).unwrap();
    misuse(engine.step(), "`tied`: a guard of it is alive");
    writing.fill(1.0);
    writing.complete();
    owned.leave(small.first).unwrap();
    assert!(engine.step().unwrap().outcome().unwrap().updated);
    misuse(owned.read::<f32>(small.tied), "belongs to step 0, but the engine is at step 1");
    misuse(owned.enter(small.first), "belongs to step 0");
    misuse(owned.grad::<f32>(small.tied), "belongs to step 0");
    misuse(owned.leave(small.first), "belongs to step 0");
}

#[test]
fn a_step_beside_a_leave_on_another_thread_comes_before_it_or_after() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (mut engine, small) = solo(config());
    // Rounds that have begun, and those that are over on the other thread. Parking would be too slow to meet in the middle.
    let (begun, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let meet = |count: &AtomicUsize, at| {
        while count.load(Ordering::SeqCst) < at {
            std::hint::spin_loop();
        }
    };
    let (sender, receiver) = std::sync::mpsc::channel::<gatherflow::OwnedPass>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (round, pass) in receiver.into_iter().enumerate() {
                meet(&begun, round + 1);
                let left = pass.leave(small.first);
                over.store(round + 1, Ordering::SeqCst);
                // A step that comes first refuses it by name.
                if let Err(error) = left {
                    assert!(error.to_string().contains("belongs to step"), "{error}");
                }
            }
        });
        let begin = |engine: &gatherflow::Engine| {
            let pass = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
            pass.enter(small.first).unwrap();
            let mut gradient = pass.grad::<f32>(small.tied).unwrap();
            gradient.fill(1.0);
            gradient.complete();
            pass
        };
        for round in 0..3000 {
            sender.send(begin(&engine)).unwrap();
            begun.store(round + 1, Ordering::SeqCst);
            (0..round % 300).for_each(|_| std::hint::spin_loop());
            let handle = loop {
                match engine.step() {
                    Ok(handle) => break handle,
                    Err(error) => misuse::<()>(Err(error), "`tied`: a guard of it is alive"),
                }
            };
            meet(&over, round + 1);
            let norm = handle.outcome().unwrap().grad_norm.unwrap();
            assert!((norm - 150.0_f64.sqrt()).abs() < 1e-6, "{norm}");
            begin(&engine).leave(small.first).unwrap();
            engine.step().unwrap().outcome().unwrap();
        }
        drop(sender);
    });
}

#[test]
fn a_guard_that_was_forgotten_is_named_by_step_instead_of_hanging() {
    let (mut engine, small) = solo(config());
    std::mem::forget(engine.read::<f32>(small.tied).unwrap());
    misuse(engine.step(), "`tied`: a guard of it is alive");
}

#[test]
fn a_closed_or_dropped_engine_says_so() {
    let (mut engine, small) = solo(config());
    microbatch(&engine, &small, true, 1.0);
    let handle = engine.step().unwrap();
    let owned = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
    engine.close().unwrap();
    engine.close().unwrap();
    assert!(handle.outcome().unwrap().updated, "outcomes can still be read");
    let closed = |error: Error| assert!(error.kind() == ErrorKind::Closed && error.is_fatal(), "{error}");
    closed(engine.pass(small.chunk, 0, true, Mode::Train).unwrap_err());
    closed(engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap_err());
    closed(engine.step().unwrap_err());
    closed(engine.read::<f32>(small.tied).unwrap_err());
    closed(engine.zero_grad().unwrap_err());
    closed(engine.prefetch(small.first).unwrap_err());
    closed(engine.ensure_params_ready().unwrap_err());
    closed(engine.params_hash().unwrap_err());
    closed(owned.enter(small.first).unwrap_err());
    closed(owned.read::<f32>(small.tied).unwrap_err());
    drop(engine);
    closed(owned.enter(small.first).unwrap_err());
    closed(handle.outcome().unwrap_err());
}

#[test]
fn zero_grad_is_optional_and_repeatable_until_a_gradient_is_complete() {
    // Whether its reduce has begun or waits for `step`: the report of a complete gradient is not taken back.
    let run = |zero: bool, overlap_grad_reduce: bool| {
        let (mut engine, small) = solo(config().overlap_grad_reduce(overlap_grad_reduce));
        if zero {
            microbatch(&engine, &small, false, 9.0);
            engine.zero_grad().unwrap();
            engine.zero_grad().unwrap();
        }
        microbatch(&engine, &small, true, 1.0);
        misuse(engine.zero_grad(), "`tied`: backward of the last microbatch has completed its gradient");
        engine.step().unwrap().outcome().unwrap();
        engine.zero_grad().unwrap();
        bits(&engine)
    };
    let never = run(false, true);
    for (zero, overlap_grad_reduce) in [(true, true), (false, false), (true, false)] {
        assert_eq!(never, run(zero, overlap_grad_reduce), "{zero} {overlap_grad_reduce}");
    }
}

#[test]
fn zero_grad_names_a_live_guard_and_forgets_what_was_abandoned_while_the_step_can_begin_anew() {
    let (mut engine, small) = solo(config());
    let abandon = |engine: &gatherflow::Engine, last| {
        let pass = engine.owned_pass(small.chunk, 0, last, Mode::Train).unwrap();
        pass.enter(small.first).unwrap();
        pass.grad::<f32>(small.tied).unwrap()
    };
    let guard = abandon(&engine, false);
    misuse(engine.zero_grad(), "`tied`: a gradient guard of it is alive");
    drop(guard);
    engine.zero_grad().unwrap();
    microbatch(&engine, &small, true, 1.0);
    assert!(engine.step().unwrap().outcome().unwrap().updated);

    drop(abandon(&engine, true));
    engine.zero_grad().unwrap();
    let error = engine.step().unwrap().outcome().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Abandoned, "{error}");
}

#[test]
fn an_outcome_that_is_no_longer_kept_fails_nothing() {
    let (mut engine, small) = solo(config());
    let first = engine.step().unwrap();
    for _ in 0..1100 {
        engine.step().unwrap().outcome().unwrap();
    }
    misuse(first.outcome(), "there is no outcome of step 0");
    microbatch(&engine, &small, true, 1.0);
    assert!(engine.step().unwrap().outcome().unwrap().updated);
}

#[test]
fn no_ranks_and_more_than_a_process_has_threads_for_are_refused() {
    misuse(gatherflow::Ranks::local(0), "at least one rank");
    for ranks in [65_537, usize::MAX] {
        misuse(gatherflow::Ranks::local(ranks), &format!("{ranks} ranks cannot be threads of one process"));
    }
}

#[test]
fn deadlines_beyond_what_a_clock_can_tell_are_no_panic() {
    let forever = std::time::Duration::from_secs_f64(1.8e19);
    let trained = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config().deadlines(forever)).unwrap();
        for _ in 0..3 {
            microbatch(&engine, &small, true, 1.0);
            assert!(engine.step().unwrap().outcome().unwrap().updated);
        }
        engine.reload_masters().unwrap();
        engine.close()
    });
    assert!(trained.iter().all(Result::is_ok), "{trained:?}");
}

#[test]
fn more_steps_in_flight_than_outcomes_are_kept_for_are_refused() {
    for steps in [0, 65, u32::MAX] {
        let config = config().steps_in_flight(steps);
        let error = small::engine(gatherflow::Ranks::local(1).unwrap().remove(0), config).unwrap_err();
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains("steps_in_flight"), "{error}");
    }
    solo(config().steps_in_flight(64)).0.step().unwrap().outcome().unwrap();
}

/// Rank 0 drops its engine and keeps what `keep` gives it until rank 1 has learned of it.
fn dropped_with<T>(keep: impl Fn(&mut gatherflow::Engine, &small::Small) -> T + Sync) {
    let learned = std::sync::Barrier::new(2);
    on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        if engine.rank() == 0 {
            let kept = keep(&mut engine, &small);
            drop(engine);
            learned.wait();
            drop(kept);
        } else {
            let begin = std::time::Instant::now();
            let error = loop {
                match engine.step().and_then(|handle| handle.outcome()) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            let took = begin.elapsed();
            learned.wait();
            assert!(took.as_secs() < 10, "after {took:?}, long before the deadline: {error}");
            assert_eq!((error.kind(), error.rank()), (ErrorKind::RankLost, Some(0)), "{error}");
        }
    });
}

#[test]
fn an_engine_that_is_dropped_leaves_at_once_whoever_holds_a_guard_of_it() {
    dropped_with(|engine, small| {
        let pass = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
        pass.enter(small.first).unwrap();
        (pass.read::<f32>(small.frozen).unwrap(), pass.grad::<f32>(small.tied).unwrap())
    });
}

#[test]
fn an_engine_that_is_dropped_ends_the_wait_for_an_outcome_on_another_thread() {
    on_ranks(2, |rank| {
        let (mut engine, _) = small::engine(rank, config()).unwrap();
        if engine.rank() == 1 {
            std::thread::sleep(std::time::Duration::from_secs(2));
            return;
        }
        let handle = engine.step().unwrap();
        std::thread::scope(|scope| {
            let begin = std::time::Instant::now();
            let waits = scope.spawn(move || handle.outcome());
            std::thread::sleep(std::time::Duration::from_millis(200));
            drop(engine);
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            assert!(begin.elapsed().as_millis() < 1500, "{error}");
        });
    });
}

#[test]
fn every_call_after_a_fatal_failure_tells_its_cause_again_and_so_does_close() {
    on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        if engine.rank() == 0 {
            return;
        }
        let first = engine.step().and_then(|handle| handle.outcome()).unwrap_err();
        assert_eq!(first.kind(), ErrorKind::RankLost, "{first}");
        let again = |error: Error| assert_eq!(error.to_string(), first.to_string());
        again(engine.zero_grad().unwrap_err());
        again(engine.prefetch(small.first).unwrap_err());
        again(engine.write_param(small.frozen, |_| unreachable!()).unwrap_err());
        again(engine.swap_params(|_, _| unreachable!()).unwrap_err());
        again(engine.reload_masters().unwrap_err());
        again(engine.close().unwrap_err());
        again(engine.close().unwrap_err());
        again(engine.step().unwrap_err());
        again(engine.read::<f32>(small.tied).unwrap_err());
    });
}

#[test]
fn learning_rates_and_weights_out_of_range_are_refused() {
    let (mut engine, _) = solo(config());
    misuse(engine.set_lr(GroupId(1), 1e-3), "no group 1");
    misuse(engine.set_lr(GroupId::DEFAULT, -1.0), "-1");
    misuse(engine.set_weight(1.0), "average = \"weight\"");
    engine.set_lr(GroupId::DEFAULT, Lr::schedule(|_| f64::NAN)).unwrap();
    misuse(engine.step(), "group 0 at t = 1 is NaN");
    engine.set_lr(GroupId::DEFAULT, 1e-3).unwrap();
    assert!(engine.step().unwrap().outcome().unwrap().updated);
}

#[test]
fn a_rank_whose_configuration_is_refused_does_not_keep_the_others_waiting() {
    let errors = on_ranks(2, |rank| {
        let config = if rank.rank() == 0 { Config::new().bucket_size(0) } else { config() };
        small::engine(rank, config).unwrap_err()
    });
    assert_eq!(errors[0].kind(), ErrorKind::Config);
    assert!(errors[1].is_fatal(), "{}", errors[1]);
}

#[test]
fn ranks_with_different_configurations_learn_what_differs() {
    let errors = on_ranks(2, |rank| {
        let config = config().max_norm(1.0 + rank.rank() as f64);
        small::engine(rank, config).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::StartUp, "{error}");
        assert!(error.to_string().contains("clipping"), "{error}");
    }
}

#[test]
fn ranks_whose_models_or_layouts_differ_learn_in_what() {
    use gatherflow::ParamOptions;
    fn with(options: ParamOptions) -> gatherflow::Model {
        let (mut model, small) = small::model();
        model.param_with(small.other_unit, "last", &[8], gatherflow::DType::F32, options).unwrap();
        model
    }
    type Change = fn(gatherflow::Config) -> (gatherflow::Model, gatherflow::Config);
    let cases: [(Change, &str); 4] = [
        (|config| (with(ParamOptions::default()), config.layout(gatherflow::Layout::Reference)), "`layout`"),
        (|config| (with(ParamOptions::default()), config.gather_group_bytes(4096)), "`gather_group_bytes`"),
        (
            |config| {
                let options = ParamOptions { tensor_parallel: true, ..ParamOptions::default() };
                (with(options), config)
            },
            "parameter last = [8] f32, f32 gradients, group 0, tensor-parallel",
        ),
        (
            |config| {
                let options = ParamOptions { grad_dtype: Some(gatherflow::DType::Bf16), ..ParamOptions::default() };
                (with(options), config)
            },
            "parameter last = [8] f32, bf16 gradients",
        ),
    ];
    for (change, says) in cases {
        for error in on_ranks(2, |rank| {
            let plain = (with(ParamOptions::default()), config());
            let (model, config) = if rank.rank() == 1 { change(config()) } else { plain };
            gatherflow::Engine::new(rank, model, config, |_, out| out.fill_with(|_| 1.0)).unwrap_err()
        }) {
            assert_eq!(error.kind(), ErrorKind::StartUp, "{error}");
            assert!(error.to_string().contains(says), "{says}: {error}");
        }
    }
}

#[test]
fn ranks_with_different_learning_rates_learn_which_group_differs() {
    let ranks = gatherflow::Ranks::local(2).unwrap();
    let started: Vec<_> = std::thread::scope(|scope| {
        let start = |rank: gatherflow::Rank| {
            let mut model = gatherflow::Model::new();
            let chunk = model.chunk();
            let unit = model.unit(chunk, "u").unwrap();
            model.param(unit, "w", &[8], gatherflow::DType::F32).unwrap();
            let lr = if rank.rank() == 0 { 1e-3 } else { 5e-2 };
            gatherflow::Engine::new(rank, model, gatherflow::Config::new().lr(lr), |_, out| out.fill_with(|_| 1.0))
                .map(drop)
        };
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || start(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for result in started {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("learning rate of group 0 = 0.001") && text.contains("0.05"), "{text}");
    }
}

#[test]
fn copies_of_a_weight_that_could_not_stay_equal_are_refused_by_name() {
    use gatherflow::{Config, DType, Error, Group, GroupId, Model, ParamOptions, SumOver};
    let copy = || ParamOptions { shared: Some("table".into()), ..ParamOptions::default() };
    let second = |shape: &[usize], dtype, options: ParamOptions| -> Result<(), Error> {
        let mut model = Model::new();
        model.group(Group::default())?;
        let chunk = model.chunk();
        let unit = model.unit(chunk, "u")?;
        model.param_with(unit, "first", &[8], DType::F32, copy())?;
        model.param_with(unit, "second", shape, dtype, options)?;
        model.plan(2, &Config::new()).map(drop)
    };
    assert!(second(&[8], DType::F32, ParamOptions { grad_dtype: Some(DType::Bf16), ..copy() }).is_ok());
    for (what, refused) in [
        ("shapes disagree", second(&[9], DType::F32, copy())),
        ("dtype", second(&[8], DType::Bf16, copy())),
        ("group", second(&[8], DType::F32, ParamOptions { group: GroupId(1), ..copy() })),
        ("trainable", second(&[8], DType::F32, ParamOptions { trainable: false, ..copy() })),
        ("summed over", second(&[8], DType::F32, ParamOptions { sum_over: SumOver::ModelParallel, ..copy() })),
    ] {
        let text = refused.unwrap_err().to_string();
        assert!([what, "`first`", "`second`"].iter().all(|word| text.contains(word)), "{text}");
    }
}
