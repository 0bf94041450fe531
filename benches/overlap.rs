//! How much of the gathers hides under compute: `overlap/<buckets>/<mode>`, two ranks over an emulated link.
//!
//! Every unit has one bucket and computes C in forward and C in backward (a calibrated spin). Its gather takes G on the link,
//! and so does its reduce: gradients are bf16 like the parameters, so both move the same bytes. The link is full duplex per
//! rank and shared by all collectives. With n buckets no step can be faster than
//! ```text
//! bound = 2 (n max(C, G) + min(C, G))
//! ```
//! Forward: the first gather has nothing to hide under, since nothing can be computed before it; then unit i computes while
//! gather i + 1 runs: G + n C where C >= G, n G + C otherwise. Backward: unit i computes while the reduce of unit i + 1 runs, and
//! the last reduce has nothing left to hide under: n C + G where C >= G. Without overlap of gathers forward takes n (G + C). At
//! most 1 - 1/n of the gathers can be hidden. C = G = 5 ms by the choice of the link's bandwidth.
//!
//! C is measured in the same run: each round also runs all spins of a step on both ranks at once and nothing else, so a
//! machine that is slow in that round moves the bound too. The hidden share is the runtime's own report (1 - exposed/total).
//!
//! ```text
//! cargo bench --bench overlap
//! ```
//! Targets: window hides at least 90 % and its step is within 5 % of the bound. Environment: `GATHERFLOW_BENCH_ROUNDS` (default
//! 5), `GATHERFLOW_BENCH_STEPS` (steps per mode and round, default 3), `GATHERFLOW_BENCH_BUCKETS` (default 24).
#![allow(missing_docs)]

#[path = "support/net.rs"]
mod net;
#[path = "support/rounds.rs"]
mod rounds;
#[path = "support/spin.rs"]
mod spin;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use gatherflow::{Config, Credits, DType, Engine, Error, Link, Mode, Overlap, Rank, Ranks, bf16};
use net::{NUMEL, Net};
use rounds::{Rounds, setting};
use spin::Spin;

const RANKS: usize = 2;

/// Compute of one unit in each direction, and link time of one collective, in seconds.
const TIME: f64 = 5e-3;

/// The modes by name, and the credits of a window.
const MODES: [(&str, Overlap, Option<Credits>); 5] = [
    ("none", Overlap::None, None),
    ("chain", Overlap::Chain, None),
    ("window-1", Overlap::Window, Some(Credits::Buckets(1))),
    ("window-3", Overlap::Window, Some(Credits::Buckets(3))),
    ("window-unlimited", Overlap::Window, Some(Credits::Unlimited)),
];

fn step(net: &Net, engine: &mut Engine) -> Result<(), Error> {
    {
        let pass = engine.pass(net.chunk, 0, true, Mode::Train)?;
        for (unit, param) in &net.units {
            let entered = pass.enter(*unit)?;
            black_box(entered.read::<bf16>(*param)?[0]);
            net.spin.run();
        }
        for (unit, param) in net.units.iter().rev() {
            let back = pass.backward(*unit)?;
            net.spin.run();
            let mut gradient = back.grad::<bf16>(*param)?;
            gradient.fill(bf16::from_f32(1e-3));
            gradient.complete();
            back.leave()?;
        }
    }
    engine.step()?.outcome().map(drop)
}

/// What one rank saw of some steps of one mode.
#[derive(Clone, Copy)]
struct Seen {
    step_ms: f64,
    hidden: f64,
    gather_ms: f64,
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let rounds = setting("GATHERFLOW_BENCH_ROUNDS", 5);
    let steps = setting("GATHERFLOW_BENCH_STEPS", 3);
    let buckets = setting("GATHERFLOW_BENCH_BUCKETS", 24);
    let spin = Spin::calibrate(TIME);
    let mut times = Rounds::default();
    let mut ratios = Rounds::default();
    let mut shares = Rounds::default();
    for _ in 0..rounds {
        let compute = compute_alone(spin, buckets);
        times.put("compute alone, 2 n C", None, compute * 1e3);
        let (n, c) = (buckets as f64, compute / (2.0 * buckets as f64));
        let bound = 2.0 * (n * c.max(TIME) + c.min(TIME));
        times.put("bound", None, bound * 1e3);
        for (mode, overlap, credits) in MODES {
            let name = format!("overlap/{buckets}/{mode}");
            let seen = run(overlap, credits, buckets, steps, spin).expect("two ranks on the cpu device");
            let target = mode.starts_with("window");
            times.put(name.as_str(), None, seen.step_ms);
            ratios.put(name.as_str(), target.then_some(1.05), seen.step_ms / (bound * 1e3));
            shares.put(name.as_str(), target.then_some(90.0), seen.hidden * 100.0);
            times.put("one gather", Some(TIME * 1e3), seen.gather_ms / n);
        }
    }
    times.print("Step time", "ms");
    ratios.print("Step time over the bound (at most)", "ratio");
    shares.print("Gathers hidden (at least; at most 100 - 100/n can be)", "%");
}

/// Seconds of all spins of a step, on all ranks at once.
fn compute_alone(spin: Spin, buckets: usize) -> f64 {
    let from = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..RANKS {
            scope.spawn(|| (0..2 * buckets).for_each(|_| spin.run()));
        }
    });
    from.elapsed().as_secs_f64()
}

/// Some steps of one mode; what rank 0 saw.
fn run(
    overlap: Overlap,
    credits: Option<Credits>,
    buckets: usize,
    steps: usize,
    spin: Spin,
) -> Result<Seen, Box<dyn std::error::Error>> {
    // In a collective of d ranks each one sends and receives (d - 1)/d of the bytes.
    let bytes = (NUMEL * DType::Bf16.bytes()) as f64 * (RANKS - 1) as f64 / RANKS as f64;
    let link = Link { bytes_per_second: bytes / TIME, latency: Duration::ZERO };
    let mut config = Config::new().emulate(link).bucket_size(1).overlap(overlap);
    if let Some(credits) = credits {
        config = config.credits(credits);
    }
    let barrier = Barrier::new(RANKS);
    let rank_main = |rank: Rank| -> Result<Seen, Error> {
        let (mut engine, net) = Net::start(rank, config.clone(), buckets, spin)?;
        step(&net, &mut engine)?; // its forward has nothing to gather
        barrier.wait();
        for _ in 0..=steps {
            step(&net, &mut engine)?;
        }
        // The first of them began before the barrier, the last one is not over before the next `step`.
        let times = engine.times()[1..=steps].to_vec();
        engine.close()?;
        let total =
            |of: fn(&gatherflow::StepTimes) -> u64| times.iter().map(of).sum::<u64>() as f64 / steps as f64 / 1e6;
        let (gather_ms, exposed) = (total(|t| t.gather_ns), total(|t| t.exposed_gather_ns));
        Ok(Seen { step_ms: total(|t| t.step_ns), hidden: 1.0 - exposed / gather_ms, gather_ms })
    };
    let seen = std::thread::scope(|scope| {
        let ranks = Ranks::with_config(RANKS, &config)?;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| rank_main(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(seen[0])
}
