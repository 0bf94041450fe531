//! What entering a unit costs its executor: `hook/<case>/<mode>`, nanoseconds per call.
//!
//! - `hook/enter-first/window`: the first entry of a unit at a version; its bucket is gathered, nobody waits.
//! - `hook/enter-again/window`: every entry after it.
//! - `hook/enter-first/engine`, `hook/enter-again/engine`: the same through [`gatherflow::Pass`].
//! - `hook/credit/window`: an entry that gives a credit back to a pre-hook that waits for it, its thread parked.
//! - `hook/wake/unpark`: the yardstick of that: unparking a parked thread, and nothing else.
//! - `hook/credit-to-gather/window`: from the start of that entry until the gather that it lets go is issued.
//! - `hook/wake-to-run/unpark`: from the start of the unpark until the other thread has run.
//!
//! One rank on the null device, one bucket per unit. Allocations of the entering thread are counted as well.
//!
//! ```text
//! cargo bench --bench hook
//! ```
//! Targets: at most 100 ns and no allocation where nobody waits; 2 us beyond the yardstick for a credit. Environment:
//! `GATHERFLOW_BENCH_ROUNDS` (default 15).
#![allow(missing_docs)]

#[path = "support/counting.rs"]
mod counting;
#[path = "support/null_rank.rs"]
mod null_rank;
#[path = "support/rounds.rs"]
mod rounds;

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use counting::allocations;
use criterion::Criterion;
use gatherflow::{Config, Credits, DType, Engine, Internals, Mode, Model, Overlap, Ranks, UnitId};
use gatherflow_actors::Driver;
use gatherflow_kernels::OpenOptions;
use null_rank::{NUMEL, NullRank};
use rounds::{Rounds, setting};

const UNITS: u32 = 200;

/// Credits that never run out.
const UNLIMITED: u32 = u32::MAX;

/// Long enough for another thread to have parked.
const SETTLE: Duration = Duration::from_micros(200);

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    again(&mut criterion);
    criterion.final_summary();
    if !std::env::args().any(|argument| argument == "--test") {
        tables(setting("GATHERFLOW_BENCH_ROUNDS", 15));
    }
}

/// The case that criterion can repeat by itself.
fn again(criterion: &mut Criterion) {
    let rank = ready_rank();
    rank.forward().expect("the null device does not fail");
    let unit = UnitId(0);
    criterion.bench_function("hook/enter-again/window", |bencher| bencher.iter(|| rank.session.enter(black_box(unit))));
}

fn tables(rounds: usize) {
    let mut nanoseconds = Rounds::default();
    let mut counts = Rounds::default();
    let free = ready_rank();
    let mut engine = EngineRank::start().expect("the null device starts");
    let tight = NullRank::start(UNITS, Overlap::Window, 1, Driver::Actors);
    tight.step().expect("the null device does not fail");
    let sleeper = Sleeper::start();
    for _ in 0..rounds {
        for case in ["first", "again"] {
            let mut time = 0.0;
            let allocated = allocations(|| time = per_unit(|| free.forward().expect("the null device does not fail")));
            nanoseconds.put(format!("hook/enter-{case}/window"), Some(100.0), time);
            counts.put(format!("hook/enter-{case}/window"), Some(0.0), allocated as f64);
        }
        next_version(&free);
        engine.round(&mut nanoseconds, &mut counts).expect("the null device does not fail");
        credits(&tight, &mut nanoseconds, &mut counts);
        for _ in 0..UNITS / 10 {
            let (call, ran) = sleeper.wake();
            nanoseconds.put("hook/wake/unpark", None, call);
            nanoseconds.put("hook/wake-to-run/unpark", None, ran);
        }
    }
    nanoseconds.print("Entering a unit; a credit may cost 2 000 ns beyond its yardstick", "ns per call");
    counts.print(&format!("Allocations by the entering thread, in {UNITS} entries (a credit: in one)"), "allocations");
}

/// Nanoseconds per unit of a pass over all units.
fn per_unit(run: impl FnOnce()) -> f64 {
    let from = Instant::now();
    run();
    from.elapsed().as_nanos() as f64 / f64::from(UNITS)
}

/// A rank whose gathers of version 1 are all issued and not yet waited for.
fn ready_rank() -> NullRank {
    let rank = NullRank::start(UNITS, Overlap::Window, UNLIMITED, Driver::Actors);
    rank.forward().expect("the null device does not fail");
    next_version(&rank);
    rank
}

fn next_version(rank: &NullRank) {
    let before = rank.session.counters().gathers;
    let step = rank.backward_and_step().expect("the null device does not fail");
    rank.session.outcome(step).expect("the null device does not fail");
    await_gathers(rank, before + u64::from(UNITS));
    settle();
}

/// Spins until so many gathers were issued since the start.
fn await_gathers(rank: &NullRank, gathers: u64) {
    while rank.session.counters().gathers < gathers {
        spin_loop();
    }
}

fn settle() {
    let from = Instant::now();
    while from.elapsed() < SETTLE {
        spin_loop();
    }
}

/// With one credit each entry lets one gather go, and the next bucket is there when the actors have parked.
fn credits(rank: &NullRank, nanoseconds: &mut Rounds, counts: &mut Rounds) {
    let before = rank.session.counters().gathers;
    let step = rank.backward_and_step().expect("the null device does not fail");
    rank.session.outcome(step).expect("the null device does not fail");
    for unit in rank.units() {
        let last = unit.0 + 1 == UNITS;
        await_gathers(rank, before + u64::from(unit.0) + 1);
        settle();
        let from = Instant::now();
        let allocated = allocations(|| rank.session.enter(unit).expect("the null device does not fail"));
        let call = from.elapsed();
        if last {
            continue; // nothing is left to let go
        }
        await_gathers(rank, before + u64::from(unit.0) + 2);
        nanoseconds.put("hook/credit/window", None, call.as_nanos() as f64);
        nanoseconds.put("hook/credit-to-gather/window", None, from.elapsed().as_nanos() as f64);
        counts.put("hook/credit/window", None, allocated as f64);
    }
}

/// The engine's way in.
struct EngineRank {
    engine: Engine,
    chunk: gatherflow::ChunkId,
    units: Vec<UnitId>,
}

impl EngineRank {
    fn start() -> Result<Self, gatherflow::Error> {
        let mut model = Model::new();
        let chunk = model.chunk();
        let mut units = Vec::new();
        for i in 0..UNITS {
            let unit = model.unit(chunk, format!("unit {i}"))?;
            model.param(unit, format!("p{i}"), &[NUMEL], DType::Bf16)?;
            units.push(unit);
        }
        let open = OpenOptions { keep_log: false, ..OpenOptions::default() };
        let internals = Internals { open, ..Internals::default() };
        let config = Config::new().device("null").bucket_size(1).credits(Credits::Unlimited);
        let rank = Ranks::local(1)?.remove(0);
        let engine = Engine::with_internals(rank, model, config, internals, |_, out| out.fill_with(|_| 0.5))?;
        Ok(Self { engine, chunk, units })
    }

    fn round(&mut self, nanoseconds: &mut Rounds, counts: &mut Rounds) -> Result<(), gatherflow::Error> {
        let before = self.engine.counters().gathers;
        self.engine.step()?.outcome()?;
        while self.engine.counters().gathers < before + u64::from(UNITS) {
            spin_loop();
        }
        settle();
        let pass = self.engine.pass(self.chunk, 0, true, Mode::Train)?;
        for case in ["first", "again"] {
            let mut result = Ok(());
            let mut time = 0.0;
            let allocated = allocations(|| {
                time = per_unit(|| result = self.units.iter().try_for_each(|unit| pass.enter(*unit).map(drop)));
            });
            result?;
            nanoseconds.put(format!("hook/enter-{case}/engine"), Some(100.0), time);
            counts.put(format!("hook/enter-{case}/engine"), Some(0.0), allocated as f64);
        }
        Ok(())
    }
}

/// A thread that parks and counts how often it was woken.
struct Sleeper {
    woken: Arc<AtomicU64>,
    thread: std::thread::Thread,
}

impl Sleeper {
    fn start() -> Self {
        let woken = Arc::new(AtomicU64::new(0));
        let count = woken.clone();
        let handle = std::thread::spawn(move || {
            loop {
                std::thread::park();
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { woken, thread: handle.thread().clone() }
    }

    /// Nanoseconds of the call, and until the thread has run.
    fn wake(&self) -> (f64, f64) {
        settle();
        let before = self.woken.load(Ordering::SeqCst);
        let from = Instant::now();
        self.thread.unpark();
        let call = from.elapsed();
        while self.woken.load(Ordering::SeqCst) == before {
            spin_loop();
        }
        (call.as_nanos() as f64, from.elapsed().as_nanos() as f64)
    }
}
