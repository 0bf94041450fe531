//! docs/THREADS.md is true: its table agrees with the compiler about `Send` and `Sync`, what it calls `'static` is, and handles do
//! work on other threads and inside an async runtime.
#![allow(clippy::unwrap_used)]

mod small;

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::thread;

use gatherflow::{
    Back, Busy, Config, Engine, Error, Grad, Lr, Mode, Model, Outcome, OwnedGrad, OwnedPass, OwnedRead, Pass, Plan,
    Rank, Read, Ready, Report, State, StepHandle, StopFlag, Swapped, UnitGuard, bf16, candle,
};
use small::{config, microbatch, on_ranks, solo};

/// The constants of this are found where `T` has the trait, those of [`Neither`] elsewhere.
struct Probe<T>(PhantomData<T>);

trait Neither {
    const SEND: bool = false;
    const SYNC: bool = false;
}

impl<T> Neither for Probe<T> {}

impl<T: Send> Probe<T> {
    const SEND: bool = true;
}

impl<T: Sync> Probe<T> {
    const SYNC: bool = true;
}

/// This is there for `'static` types only.
impl<T: 'static> Probe<T> {
    const STATIC: &'static str = "yes";
}

/// Send, Sync and `'static` by the name of a type in the table.
fn by_the_compiler() -> BTreeMap<String, [&'static str; 3]> {
    const fn word(is: bool) -> &'static str {
        if is { "yes" } else { "no" }
    }
    macro_rules! rows {
        ($(owned $name:literal: $owned:ty;)+ $(borrowing $other:literal: $borrowing:ty;)+) => {
            BTreeMap::from([
                $(($name.to_owned(), [word(Probe::<$owned>::SEND), word(Probe::<$owned>::SYNC), Probe::<$owned>::STATIC]),)+
                // They have a lifetime, which is that of an engine or a pass.
                $(($other.to_owned(), [word(Probe::<$borrowing>::SEND), word(Probe::<$borrowing>::SYNC), "no"]),)+
            ])
        };
    }
    rows! {
        owned "Rank": Rank;
        owned "Model": Model;
        owned "Config": Config;
        owned "Plan": Plan;
        owned "Engine": Engine;
        owned "OwnedPass": OwnedPass;
        owned "OwnedRead": OwnedRead<bf16>;
        owned "OwnedGrad": OwnedGrad<f32>;
        owned "StepHandle": StepHandle;
        owned "Outcome": Outcome;
        owned "Error": Error;
        owned "StopFlag": StopFlag;
        owned "Busy": Busy;
        owned "Report": Report;
        owned "State": State;
        owned "Lr": Lr;
        owned "candle::Forward": candle::Forward;
        owned "candle::VarOptimizer": candle::VarOptimizer;
        borrowing "Swapped": Swapped<'_>;
        borrowing "Pass": Pass<'_>;
        borrowing "UnitGuard": UnitGuard<'_>;
        borrowing "Back": Back<'_>;
        borrowing "Read": Read<'_, bf16>;
        borrowing "Grad": Grad<'_, f32>;
        borrowing "Ready": Ready<'_>;
    }
}

#[test]
fn the_table_of_handles_agrees_with_the_compiler() {
    let page = include_str!("../docs/THREADS.md");
    let table = page.split("| handle |").nth(1).unwrap().split("\n\n").next().unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells.get(1)?.strip_prefix('`')?.strip_suffix('`')?;
        Some((name.to_owned(), [cells[2].to_owned(), cells[3].to_owned(), cells[4].to_owned()]))
    };
    let written: BTreeMap<_, _> = table.lines().filter_map(row).collect();
    let compiled = by_the_compiler();
    let compiled: BTreeMap<_, _> = compiled.into_iter().map(|(name, row)| (name, row.map(str::to_owned))).collect();
    assert_eq!(written, compiled);
    assert_eq!(written["Engine"], ["yes", "no", "yes"]);
    let of_rc = (Probe::<std::rc::Rc<()>>::SEND, Probe::<std::rc::Rc<()>>::SYNC);
    assert_eq!(of_rc, (false, false), "the probe says no where it must");
}

#[test]
fn guards_of_one_pass_work_on_threads_of_their_own() {
    let hashes = on_ranks(2, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
        let (first, second) = (pass.enter(small.first).unwrap(), pass.enter(small.second).unwrap());
        let read = first.read::<f32>(small.tied).unwrap();
        let back = pass.backward(small.second).unwrap();
        let mut gradient = back.grad::<f32>(small.own).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || second.read::<bf16>(small.own).unwrap().len());
            scope.spawn(move || assert_eq!(read.len(), 150));
            // Begun on one thread, ended on another.
            scope.spawn(move || {
                gradient.fill(0.5);
                gradient.complete();
            });
        });
        let back = thread::scope(|scope| {
            let left = scope.spawn(move || {
                let mut tied = back.grad::<f32>(small.tied).unwrap();
                tied.fill(0.25);
                tied.complete();
                back
            });
            left.join().unwrap()
        });
        thread::scope(|scope| scope.spawn(move || back.leave().unwrap()).join().unwrap());
        small::write(&pass, small.first, &[small.tied], 1.0);
        assert!(engine.step().unwrap().outcome().unwrap().updated);
        let hash = engine.params_hash().unwrap();
        engine.close().unwrap();
        hash
    });
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn owned_handles_outlive_the_scope_that_made_them_on_any_thread() {
    let (mut engine, small) = solo(config());
    let pass = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
    let other = pass.clone();
    let gradient = thread::spawn(move || {
        other.enter(small.second).unwrap();
        assert_eq!(other.read::<bf16>(small.own).unwrap().len(), 70);
        other.grad::<f32>(small.own).unwrap()
    });
    let mut gradient = gradient.join().unwrap();
    gradient.fill(1.0);
    thread::spawn(move || gradient.complete()).join().unwrap();
    pass.leave(small.second).unwrap();
    let handle = engine.step().unwrap();
    let again = handle.clone();
    assert!(thread::spawn(move || handle.outcome().unwrap().updated).join().unwrap());
    assert!(again.outcome().unwrap().updated);
    let (stop, busy) = (engine.stop_flag(), engine.busy("a test", std::time::Duration::from_secs(5)));
    thread::spawn(move || stop.request()).join().unwrap();
    thread::spawn(move || drop(busy)).join().unwrap();
    assert!(engine.step().unwrap().outcome().unwrap().stop);
}

#[test]
fn an_engine_goes_from_thread_to_thread_and_is_shared_behind_a_mutex() {
    let (engine, small) = solo(config());
    let mut engine = thread::spawn(move || {
        microbatch(&engine, &small, true, 1.0);
        engine
    })
    .join()
    .unwrap();
    assert!(engine.step().unwrap().outcome().unwrap().updated);
    let engine = Arc::new(Mutex::new(engine));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let engine = engine.clone();
            thread::spawn(move || {
                let mut engine = engine.lock().unwrap();
                microbatch(&engine, &small, true, 1.0);
                engine.step().unwrap().outcome().unwrap().step
            })
        })
        .collect();
    let mut steps: Vec<u64> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    steps.sort_unstable();
    assert_eq!(steps, [1, 2, 3, 4]);
}

/// Every call that waits, on a thread of a runtime; `block_on` there would panic.
#[test]
fn every_wait_is_legal_inside_an_async_runtime_and_its_futures_wake_there() {
    let hashes = on_ranks(2, |rank| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let trained = runtime.block_on(async move {
            let task = async move {
                let (mut engine, small) = small::engine(rank, config()).unwrap();
                for _ in 0..4 {
                    microbatch(&engine, &small, true, 1.0);
                    assert!(engine.step()?.await?.updated);
                    engine.ready(small.own).await?;
                    engine.ensure_params_ready()?;
                    microbatch(&engine, &small, true, 1.0);
                    engine.step()?.outcome()?;
                    engine.write_param(small.own, |_| ())?;
                }
                engine.reload_masters()?;
                let hash = engine.params_hash()?;
                engine.close()?;
                Ok::<u64, Error>(hash)
            };
            tokio::spawn(task).await.unwrap()
        });
        trained.unwrap()
    });
    assert_eq!(hashes[0], hashes[1]);
}
