//! What guards show: own memory without copies, old memory never by accident, and readiness that can be awaited.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod small;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use gatherflow::{Mode, WriteMode, bf16};
use small::{bits, config, microbatch, on_ranks, solo};

#[test]
fn the_first_write_of_a_step_overwrites_and_later_ones_accumulate() {
    let (mut engine, small) = solo(config());
    for _ in 0..2 {
        for (microbatch, expected) in [(0, WriteMode::Overwrite), (1, WriteMode::Accumulate)] {
            let pass = engine.pass(small.chunk, microbatch, microbatch == 1, Mode::Train).unwrap();
            pass.enter(small.second).unwrap();
            let back = pass.backward(small.second).unwrap();
            let mut gradient = back.grad::<f32>(small.tied).unwrap();
            assert_eq!((gradient.mode(), gradient.len()), (expected, 150));
            if expected == WriteMode::Overwrite {
                assert!(!cfg!(debug_assertions) || gradient.iter().all(|g| g.is_nan()), "old memory is poisoned");
                gradient.fill(3.0);
            } else {
                assert!(gradient.iter().all(|g| *g == 3.0));
            }
            gradient.complete();
            let mut sparse = back.grad_zeroed::<f32>(small.own).unwrap();
            assert_eq!(sparse.mode(), WriteMode::Accumulate);
            assert!(sparse.iter().all(|g| *g == microbatch as f32));
            sparse.iter_mut().for_each(|g| *g += 1.0);
            sparse.complete();
        }
        engine.step().unwrap().outcome().unwrap();
    }
}

#[test]
fn a_parameter_is_read_in_its_own_dtype_wherever_it_is_asked_for() {
    let (engine, small) = solo(config());
    assert_eq!(engine.read::<f32>(small.tied).unwrap()[64], 1.0);
    assert_eq!(engine.read::<bf16>(small.own).unwrap()[62].to_f32(), 1.0);
    assert_eq!(engine.read::<f32>(small.frozen).unwrap().len(), 5);
    let pass = engine.pass(small.chunk, 0, false, Mode::Eval).unwrap();
    let entered = pass.enter(small.second).unwrap();
    let inside = entered.read::<f32>(small.tied).unwrap();
    let outside = pass.read::<f32>(small.tied).unwrap();
    assert_eq!(inside.as_ptr(), outside.as_ptr(), "no copy");
    let owned = engine.owned_pass(small.chunk, 0, false, Mode::Eval).unwrap();
    assert_eq!(owned.read::<f32>(small.tied).unwrap().as_ptr(), inside.as_ptr());
}

#[test]
fn every_thread_may_enter_units_of_one_pass() {
    let (mut engine, small) = solo(config());
    microbatch(&engine, &small, true, 1.0);
    engine.step().unwrap().outcome().unwrap();
    let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
    std::thread::scope(|scope| {
        for unit in [small.first, small.second] {
            let pass = &pass;
            scope.spawn(move || {
                for _ in 0..100 {
                    assert!(pass.enter(unit).unwrap().read::<f32>(small.tied).unwrap()[0].is_finite());
                }
            });
        }
    });
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park_timeout(std::time::Duration::from_secs(20));
    }
}

#[test]
fn outcomes_and_readiness_can_be_awaited() {
    let hashes = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        for _ in 0..5 {
            microbatch(&engine, &small, true, 1.0);
            let outcome = block_on(engine.step().unwrap()).unwrap();
            assert!(outcome.updated && outcome.grad_norm.is_some());
            block_on(engine.ready(small.own)).unwrap();
            assert!(engine.read::<bf16>(small.own).unwrap()[0].is_finite());
        }
        let hash = bits(&engine);
        engine.close().unwrap();
        let report = engine.report();
        assert!(report.steps >= 4, "{report}");
        hash
    });
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn an_evaluation_in_mid_accumulation_changes_nothing() {
    let run = |evaluate: bool| {
        let (mut engine, small) = solo(config());
        for _ in 0..3 {
            microbatch(&engine, &small, false, 0.5);
            if evaluate {
                engine.ensure_chunk_ready(small.other_chunk).unwrap();
                let pass = engine.pass(small.chunk, 0, true, Mode::Eval).unwrap();
                pass.enter(small.first).unwrap();
                pass.enter(small.second).unwrap();
            }
            microbatch(&engine, &small, true, 0.5);
            assert!(engine.step().unwrap().outcome().unwrap().updated);
        }
        bits(&engine)
    };
    assert_eq!(run(false), run(true));
}
