//! Adam against a plain-store triad over as many f32 elements, and the norm against a plain read: ratios of one run, its
//! rounds interleaved, so that a slow minute of the machine is in both.
//!
//! ```text
//! cargo bench -p gatherflow-kernels --bench ratio
//! ```
//! Environment: `GATHERFLOW_BENCH_NUMEL` (elements, default 64 Mi; take arrays of at least eight times the last-level cache
//! where memory allows), `GATHERFLOW_BENCH_THREADS` (default 1), `GATHERFLOW_BENCH_ROUNDS` (default 11).
#![allow(missing_docs, clippy::inline_always)]

#[path = "support/memory.rs"]
mod memory;
#[path = "support/yardstick.rs"]
mod yardstick;

use std::hint::black_box;
use std::time::Instant;

use gatherflow_kernels::Element;
use gatherflow_kernels::adam::{AdamRow, AdamSlices, adam_on};
use gatherflow_kernels::isa::Isa;
use gatherflow_kernels::norm::{NormPiece, NormType, partial_on};
use half::{bf16, f16};
use memory::{Array, noise};

struct State {
    master: Array<f32>,
    exp_avg: Array<f32>,
    exp_avg_sq: Array<f32>,
}

fn main() {
    let numel = setting("GATHERFLOW_BENCH_NUMEL", 64 << 20);
    let threads = setting("GATHERFLOW_BENCH_THREADS", 1).max(1);
    let rounds = setting("GATHERFLOW_BENCH_ROUNDS", 11).max(1);
    let per_thread = numel / threads;

    let mut states: Vec<State> = (0..threads)
        .map(|_| State {
            master: Array::from_fn(per_thread, noise),
            exp_avg: Array::from_fn(per_thread, |_| 0.0),
            exp_avg_sq: Array::from_fn(per_thread, |_| 0.0),
        })
        .collect();
    let mut wide: Vec<[Array<f32>; 2]> =
        (0..threads).map(|_| [Array::from_fn(per_thread, noise), Array::from_fn(per_thread, |_| 0.0)]).collect();
    let mut bf16s = sixteen_bit::<bf16>(threads, per_thread);
    let mut f16s = sixteen_bit::<f16>(threads, per_thread);

    let mut table = Table::default();
    for round in 0..=rounds {
        table.recording = round > 0; // the first round only warms up
        let triad = timed(states.iter_mut().zip(&wide), |(state, [c, _])| {
            yardstick::triad(&mut state.master, &state.exp_avg, c, 1e-3);
        });
        let read = timed(wide.iter(), |[grad, _]| {
            black_box(yardstick::read(grad));
        });
        table.put("plain triad".into(), 12 * numel, triad, triad);
        table.put("plain read".into(), 4 * numel, read, read);
        for isa in Isa::available() {
            let name = isa.name();
            let time = adam_pass(isa, &mut states, &mut bf16s);
            table.put(format!("adam bf16-bf16 {name}"), 28 * numel, time, triad);
            let time = adam_pass(isa, &mut states, &mut f16s);
            table.put(format!("adam f16-f16   {name}"), 28 * numel, time, triad);
            let time = timed(states.iter_mut().zip(&wide).zip(&mut bf16s), |((state, [grad, _]), [_, param])| {
                run_adam(isa, state, grad, Some(param));
            });
            table.put(format!("adam f32-bf16  {name}"), 30 * numel, time, triad);
            let time = timed(states.iter_mut().zip(&mut wide), |(state, [grad, _])| {
                run_adam::<f32, f32>(isa, state, grad, None);
            });
            table.put(format!("adam f32-f32   {name}"), 28 * numel, time, triad);
            let time = timed(wide.iter(), |[grad, _]| {
                let pieces = [NormPiece { start: 0, end: grad.len(), param: 0, counted: true }];
                black_box(partial_on(isa, NormType::default(), grad, &pieces));
            });
            table.put(format!("norm f32       {name}"), 4 * numel, time, read);
        }
    }
    println!("{numel} elements, {threads} thread(s), {rounds} rounds; Adam over triad, norm over read");
    table.print();
}

fn sixteen_bit<T: Element>(threads: usize, numel: usize) -> Vec<[Array<T>; 2]> {
    let arrays = |_| [Array::from_fn(numel, |i| T::from_f32(noise(i))), Array::from_fn(numel, |_| T::default())];
    (0..threads).map(arrays).collect()
}

fn adam_pass<T: Element>(isa: Isa, states: &mut [State], arrays: &mut [[Array<T>; 2]]) -> f64 {
    timed(states.iter_mut().zip(arrays), |(state, [grad, param])| run_adam(isa, state, grad, Some(param)))
}

fn run_adam<G: Element, P: Element>(isa: Isa, state: &mut State, grad: &[G], param: Option<&mut [P]>) {
    let row = AdamRow::new(1e-4, (0.9, 0.999), 1e-8, 0.01, true, 10);
    let State { master, exp_avg, exp_avg_sq } = state;
    adam_on(isa, &row, 0.5, AdamSlices { grad, master, exp_avg, exp_avg_sq, param });
}

/// Seconds for all parts, each on a thread of its own.
fn timed<P: Send>(parts: impl Iterator<Item = P>, run: impl Fn(P) + Sync) -> f64 {
    let mut parts: Vec<P> = parts.collect();
    let run = &run;
    let start = Instant::now();
    if parts.len() == 1 {
        parts.drain(..).for_each(run);
    } else {
        std::thread::scope(|scope| parts.into_iter().for_each(|part| drop(scope.spawn(move || run(part)))));
    }
    start.elapsed().as_secs_f64()
}

fn setting(name: &str, default: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")),
        Err(_) => default,
    }
}

#[derive(Default)]
struct Table {
    recording: bool,
    rows: Vec<Row>,
}

struct Row {
    name: String,
    bytes: usize,
    ratios: Vec<f64>,
    seconds: Vec<f64>,
}

impl Table {
    fn put(&mut self, name: String, bytes: usize, seconds: f64, over: f64) {
        if !self.recording {
            return;
        }
        if let Some(row) = self.rows.iter_mut().find(|row| row.name == name) {
            row.ratios.push(seconds / over);
            row.seconds.push(seconds);
        } else {
            self.rows.push(Row { name, bytes, ratios: vec![seconds / over], seconds: vec![seconds] });
        }
    }

    fn print(&mut self) {
        println!("{:<28} {:>7} {:>7} {:>7} {:>9} {:>7}", "", "median", "lowest", "highest", "ms", "GB/s");
        for Row { name, bytes, ratios, seconds } in &mut self.rows {
            ratios.sort_by(f64::total_cmp);
            seconds.sort_by(f64::total_cmp);
            let (ratio, time) = (ratios[ratios.len() / 2], seconds[seconds.len() / 2]);
            let (low, high) = (ratios[0], ratios[ratios.len() - 1]);
            let rate = *bytes as f64 / time / 1e9;
            println!("{name:<28} {ratio:>7.2} {low:>7.2} {high:>7.2} {:>9.2} {rate:>7.2}", time * 1e3);
        }
    }
}
