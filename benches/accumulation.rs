//! Whether overlap costs anything where there is little to hide: `accumulation/<microbatches>/<case>`, two ranks.
//!
//! Communication comes once per step, so with 64 microbatches nearly all of a step is compute, and what overlap does in every
//! microbatch (entering units, telling that backward left them) must not cost more than the little that it hides. Every unit has
//! one bucket and computes 0.1 ms in each direction (a calibrated spin) in every microbatch. `link` has an emulated link on which
//! each collective takes 0.4 ms; without one nothing can be hidden and only costs remain.
//!
//! Each round runs everything on (`overlap = "window"`, `overlap_grad_reduce`) and everything off, and the latter twice: what
//! those two differ by is the noise. The ratios are of one round.
//!
//! ```text
//! cargo bench --bench accumulation
//! ```
//! Target: at most as long as without overlap, beyond noise. Environment: `GATHERFLOW_BENCH_ROUNDS` (default 9),
//! `GATHERFLOW_BENCH_BUCKETS` (default 8).
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

use gatherflow::{Config, DType, Engine, Error, Link, Mode, Overlap, Rank, Ranks, WriteMode, bf16};
use net::{NUMEL, Net};
use rounds::{Rounds, setting};
use spin::Spin;

const RANKS: usize = 2;

/// Compute of one unit in each direction and microbatch, in seconds.
const COMPUTE: f64 = 0.1e-3;

/// Link time of one collective, in seconds.
const COLLECTIVE: f64 = 0.4e-3;

/// Microbatches, and steps that are measured at once.
const SIZES: [(usize, usize); 2] = [(1, 100), (64, 4)];

fn step(net: &Net, engine: &mut Engine, microbatches: usize) -> Result<(), Error> {
    for microbatch in 0..microbatches {
        let pass = engine.pass(net.chunk, microbatch, microbatch + 1 == microbatches, Mode::Train)?;
        for (unit, param) in &net.units {
            let entered = pass.enter(*unit)?;
            black_box(entered.read::<bf16>(*param)?[0]);
            net.spin.run();
        }
        for (unit, param) in net.units.iter().rev() {
            let back = pass.backward(*unit)?;
            net.spin.run();
            let mut gradient = back.grad::<bf16>(*param)?;
            if gradient.mode() == WriteMode::Overwrite {
                gradient.fill(bf16::from_f32(1e-3));
            } else {
                gradient[0] += bf16::from_f32(1e-3);
            }
            gradient.complete();
            back.leave()?;
        }
    }
    engine.step().map(drop)
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let rounds = setting("GATHERFLOW_BENCH_ROUNDS", 9);
    let buckets = setting("GATHERFLOW_BENCH_BUCKETS", 8);
    let spin = Spin::calibrate(COMPUTE);
    let (mut times, mut ratios) = (Rounds::default(), Rounds::default());
    for _ in 0..rounds {
        for (microbatches, steps) in SIZES {
            for link in [true, false] {
                let run = |overlap: bool| {
                    let seconds = run(overlap, link, buckets, microbatches, steps, spin);
                    seconds.expect("two ranks on the cpu device") * 1e3
                };
                let name = |case: &str| {
                    let link = if link { "-link" } else { "" };
                    format!("accumulation/{microbatches}/{case}{link}")
                };
                let (off, on, off_again) = (run(false), run(true), run(false));
                times.put(name("none"), None, off.midpoint(off_again));
                times.put(name("window"), None, on);
                ratios.put(name("window"), Some(1.0), on / off.midpoint(off_again));
                ratios.put(name("noise"), None, off_again / off);
            }
        }
    }
    times.print("Step time", "ms");
    ratios.print("Step time over that without overlap (at most)", "ratio");
}

/// Seconds per step, as rank 0 saw them.
fn run(
    overlap: bool,
    link: bool,
    buckets: usize,
    microbatches: usize,
    steps: usize,
    spin: Spin,
) -> Result<f64, Box<dyn std::error::Error>> {
    // In a collective of d ranks each one sends and receives (d - 1)/d of the bytes.
    let bytes = (NUMEL * DType::Bf16.bytes()) as f64 * (RANKS - 1) as f64 / RANKS as f64;
    let link = link.then_some(Link { bytes_per_second: bytes / COLLECTIVE, latency: Duration::ZERO });
    let mode = if overlap { Overlap::Window } else { Overlap::None };
    let config = Config::new().bucket_size(1).overlap(mode).overlap_grad_reduce(overlap);
    let config = link.map_or(config.clone(), |link| config.emulate(link));
    let barrier = Barrier::new(RANKS);
    let rank_main = |rank: Rank| -> Result<f64, Error> {
        let (mut engine, net) = Net::start(rank, config.clone(), buckets, spin)?;
        step(&net, &mut engine, microbatches)?; // its forward has nothing to gather
        engine.ensure_params_ready()?;
        barrier.wait();
        let from = Instant::now();
        for _ in 0..steps {
            step(&net, &mut engine, microbatches)?;
        }
        engine.ensure_params_ready()?;
        let time = from.elapsed().as_secs_f64();
        engine.close()?;
        Ok(time / steps as f64)
    };
    let seen = std::thread::scope(|scope| {
        let ranks = Ranks::with_config(RANKS, &config)?;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| rank_main(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(seen[0])
}
