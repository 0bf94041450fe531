//! What a step costs beyond its work: `orchestration/<buckets>/<mode>`, microseconds per bucket and step.
//!
//! One rank on the null device, which completes all work at once; collectives are issued inline. A step enters all units,
//! completes all gradients, calls `step` and waits for the outcome. `window` and `none` run the actors on their thread;
//! `window-loop` and `none-loop` run the same machines as a plain loop on the caller's thread, so the difference is what
//! mailboxes and waking cost. `window-engine` goes through the public API with its passes and guards.
//!
//! ```text
//! cargo bench --bench orchestration
//! ```
//! `cargo bench --bench orchestration -- orchestration/1000/window` runs one of them, for a profiler.
//!
//! Targets: at most 5 us up to 1 000 buckets, at most 10 us at 10 000. Environment: `GATHERFLOW_BENCH_ROUNDS` (default 15).
#![allow(missing_docs)]

#[path = "support/null_rank.rs"]
mod null_rank;
#[path = "support/rounds.rs"]
mod rounds;

use std::time::Instant;

use gatherflow::{Config, DType, Engine, Internals, Mode, Model, Overlap, ParamId, Ranks, UnitId};
use gatherflow_actors::Driver;
use gatherflow_kernels::OpenOptions;
use null_rank::{NUMEL, NullRank};
use rounds::{Rounds, setting};

const SIZES: [u32; 4] = [10, 100, 1_000, 10_000];
const CREDITS: u32 = 3;

/// What runs a step.
enum Runner {
    Session(NullRank),
    Engine(Box<EngineRank>),
}

struct EngineRank {
    engine: Engine,
    chunk: gatherflow::ChunkId,
    units: Vec<(UnitId, ParamId)>,
}

impl EngineRank {
    fn start(buckets: u32) -> Result<Self, gatherflow::Error> {
        let mut model = Model::new();
        let chunk = model.chunk();
        let mut units = Vec::new();
        for i in 0..buckets {
            let unit = model.unit(chunk, format!("unit {i}"))?;
            units.push((unit, model.param(unit, format!("p{i}"), &[NUMEL], DType::Bf16)?));
        }
        let open = OpenOptions { keep_log: false, ..OpenOptions::default() };
        let internals = Internals { open, ..Internals::default() };
        let config = Config::new().device("null").bucket_size(1);
        let rank = Ranks::local(1)?.remove(0);
        let engine = Engine::with_internals(rank, model, config, internals, |_, out| out.fill_with(|_| 0.5))?;
        Ok(Self { engine, chunk, units })
    }

    fn step(&mut self) -> Result<(), gatherflow::Error> {
        {
            let pass = self.engine.pass(self.chunk, 0, true, Mode::Train)?;
            for (unit, _) in &self.units {
                pass.enter(*unit)?;
            }
            for (unit, param) in self.units.iter().rev() {
                let back = pass.backward(*unit)?;
                back.grad::<f32>(*param)?.complete();
                back.leave()?;
            }
        }
        self.engine.step()?.outcome().map(drop)
    }
}

/// Starts a runner of so many buckets.
type Start = fn(u32) -> Runner;

/// The modes, and how each starts.
const MODES: [(&str, Start); 5] = [
    ("window", |buckets| Runner::session(buckets, Overlap::Window, Driver::Actors)),
    ("none", |buckets| Runner::session(buckets, Overlap::None, Driver::Actors)),
    ("window-loop", |buckets| Runner::session(buckets, Overlap::Window, Driver::Inline)),
    ("none-loop", |buckets| Runner::session(buckets, Overlap::None, Driver::Inline)),
    ("window-engine", |buckets| Runner::Engine(Box::new(EngineRank::start(buckets).expect("the null device starts")))),
];

impl Runner {
    fn session(buckets: u32, overlap: Overlap, driver: Driver) -> Self {
        Self::Session(NullRank::start(buckets, overlap, CREDITS, driver))
    }

    fn step(&mut self) {
        match self {
            Self::Session(rank) => rank.step().expect("the null device does not fail"),
            Self::Engine(rank) => rank.step().expect("the null device does not fail"),
        }
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let rounds = setting("GATHERFLOW_BENCH_ROUNDS", 15);
    let mut table = Rounds::default();
    let only = std::env::args().nth(1).filter(|argument| argument.starts_with("orchestration/"));
    for buckets in SIZES {
        let target = if buckets > 1_000 { 10.0 } else { 5.0 };
        let name = |mode: &str| format!("orchestration/{buckets}/{mode}");
        let mut runners: Vec<(String, Option<f64>, Runner)> = MODES
            .into_iter()
            .filter(|(mode, _)| only.as_ref().is_none_or(|only| *only == name(mode)))
            .map(|(mode, start)| (name(mode), (!mode.contains('-')).then_some(target), start(buckets)))
            .collect();
        let steps = (40_000 / buckets).clamp(4, 400);
        for round in 0..=rounds {
            for (name, target, runner) in &mut runners {
                let from = Instant::now();
                (0..steps).for_each(|_| runner.step());
                let per_bucket = from.elapsed().as_secs_f64() * 1e6 / f64::from(steps) / f64::from(buckets);
                if round > 0 {
                    table.put(name.as_str(), *target, per_bucket);
                }
            }
        }
    }
    table.print("What a step costs on the null device", "us per bucket and step");
}
