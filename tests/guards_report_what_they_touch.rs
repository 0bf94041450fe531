//! Through the engine's own guards, on the device that logs: every read is ordered after its write and no two conflicting
//! accesses are concurrent, in every mode; and the checker would notice, since it finds each edge that is left out.
#![allow(clippy::unwrap_used)]

mod small;

use std::sync::{Arc, Barrier, Mutex};

use gatherflow::{Config, Engine, Internals, Mode, Overlap, ParamMut, Skip, State, Storage};
use gatherflow_actors::Edge;
use gatherflow_kernels::check::{CheckOptions, RunAhead, Violations, check_logs};
use gatherflow_kernels::null::NullLog;

/// Two ranks, four steps of two microbatches, an evaluation and a read from outside in between.
fn logs(overlap: Overlap, dropped_edge: Option<Edge>) -> (Vec<Arc<NullLog>>, Vec<u32>) {
    let mut order = Vec::new();
    let engines = small::on_ranks(2, |rank| {
        let (model, small) = small::model();
        let config = small::config().device("null").overlap(overlap);
        let internals = Internals { dropped_edge, ..Internals::default() };
        let init = |_: &gatherflow::ParamInfo, out: ParamMut<'_>| out.fill_with(|_| 0.0);
        let mut engine = Engine::with_internals(rank, model, config, internals, init).unwrap();
        for _ in 0..4 {
            for last in [false, true] {
                let pass = engine.pass(small.chunk, 0, last, Mode::Train).unwrap();
                pass.enter(small.second).unwrap().read::<f32>(small.tied).unwrap();
                pass.enter(small.first).unwrap().read::<f32>(small.frozen).unwrap();
                small::write(&pass, small.first, &[small.tied], 1.0);
                small::write(&pass, small.second, &[small.own, small.tied], 1.0);
            }
            // After the last gradient, so that nothing but the reads themselves holds Adam back.
            for param in [small.tied, small.other] {
                engine.read::<f32>(param).unwrap();
            }
            engine.read::<gatherflow::bf16>(small.own).unwrap();
            let handle = engine.step().unwrap();
            engine.read::<f32>(small.other).unwrap();
            let pass = engine.pass(small.other_chunk, 0, false, Mode::Eval).unwrap();
            pass.enter(small.other_unit).unwrap().read::<f32>(small.other).unwrap();
            assert!(handle.outcome().unwrap().updated);
        }
        engine.close().unwrap();
        engine
    });
    order.extend(engines[0].plan().gather_order().iter().map(|b| b.0));
    (engines.iter().map(|e| e.session().device().log().unwrap()).collect(), order)
}

fn verdict(overlap: Overlap, dropped_edge: Option<Edge>) -> Result<(), Violations> {
    let (logs, order) = logs(overlap, dropped_edge);
    let ahead = if overlap == Overlap::Window { RunAhead::Window { order, credits: 3 } } else { RunAhead::Any };
    check_logs(&logs, &CheckOptions { ahead }).map(|_| ())
}

#[test]
fn every_access_is_ordered_in_every_mode() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        verdict(overlap, None).unwrap();
    }
}

/// State is taken between two steps, with nobody waiting for the one before, and put back into both ranks.
fn verdict_with_state(config: &Config, dropped_edge: Option<Edge>) -> Result<(), Violations> {
    let (parts, all_have_it) = (Mutex::new(Vec::new()), Barrier::new(2));
    let logs = small::on_ranks(2, |rank| {
        let (model, small) = small::model();
        let internals = Internals { dropped_edge, ..Internals::default() };
        let init = |_: &gatherflow::ParamInfo, out: ParamMut<'_>| out.fill_with(|_| 0.0);
        let mut engine = Engine::with_internals(rank, model, config.clone(), internals, init).unwrap();
        for step in 0..4 {
            small::microbatch(&engine, &small, true, 1.0);
            let state = engine.state().unwrap();
            engine.step().unwrap().outcome().unwrap();
            if step == 1 {
                parts.lock().unwrap().push(state);
                all_have_it.wait();
                let whole = State::merge(parts.lock().unwrap().clone()).unwrap();
                engine.load_state(&whole).unwrap();
            }
        }
        engine.close().unwrap();
        engine.session().device().log().unwrap()
    });
    check_logs(&logs, &CheckOptions { ahead: RunAhead::Any }).map(|_| ())
}

#[test]
fn state_is_taken_and_loaded_in_order_with_all_work() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for storage in [Storage::Views, Storage::Shared] {
            for skip in [Skip::Host, Skip::Device] {
                let config = small::config().device("null").overlap(overlap).storage(storage).skip(skip);
                verdict_with_state(&config, None).unwrap();
                // The verdict moves the scaler that was read or loaded. Adam comes behind it, so that leaving out E3 alone
                // changes nothing here.
                assert!(verdict_with_state(&config, Some(Edge::E7)).is_err(), "{overlap:?} {storage:?} {skip:?}");
            }
        }
    }
}

#[test]
fn leaving_out_an_edge_between_guards_and_work_is_found() {
    // E3 and E4 keep Adam and gathers off what guards read, E5 guards off what gathers write, E6 writers off the reduce.
    for edge in [Edge::E1, Edge::E3, Edge::E4, Edge::E5, Edge::E6] {
        assert!(verdict(Overlap::Window, Some(edge)).is_err(), "{edge:?}");
    }
}

#[test]
fn keys_that_the_null_device_never_reads_are_refused() {
    let (model, _) = small::model();
    let config = Config::new().device("null").max_norm(1.0);
    let rank = gatherflow::Ranks::local(1).unwrap().remove(0);
    let error = Engine::new(rank, model, config, |_, _| ()).unwrap_err();
    assert!(error.to_string().contains("`max_norm` is set but never read"), "{error}");
    // A program that weighs its ranks runs there all the same.
    small::solo(small::config().device("null")).0.set_weight(2.0).unwrap();
}
