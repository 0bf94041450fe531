//! The fused Adam pass on the widest instruction set: `adam/<elements>/<gradient>-<parameter>`.
//!
//! `ratio` compares it with the memory's speed and all instruction sets with each other.
#![allow(missing_docs)]

#[path = "support/memory.rs"]
mod memory;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gatherflow_kernels::Element;
use gatherflow_kernels::adam::{AdamRow, AdamSlices, adam};
use half::{bf16, f16};
use memory::{Array, noise};

/// In the second-level cache, and in memory.
const SIZES: [usize; 2] = [64 << 10, 32 << 20];

fn bench<G: Element, P: Element>(criterion: &mut Criterion) {
    let row = AdamRow::new(1e-4, (0.9, 0.999), 1e-8, 0.01, true, 10);
    for numel in SIZES {
        let mut group = criterion.benchmark_group(format!("adam/{numel}"));
        group.throughput(Throughput::Elements(numel as u64)).sample_size(20);
        let grad = Array::from_fn(numel, |i| G::from_f32(noise(i)));
        let mut master = Array::from_fn(numel, noise);
        let mut exp_avg = Array::from_fn(numel, |_| 0.0);
        let mut exp_avg_sq = Array::from_fn(numel, |_| 0.0);
        let mut param = Array::from_fn(numel, |_| P::default());
        group.bench_function(BenchmarkId::from_parameter(format!("{}-{}", G::DTYPE, P::DTYPE)), |bencher| {
            bencher.iter(|| {
                let (master, exp_avg, exp_avg_sq) = (&mut master[..], &mut exp_avg[..], &mut exp_avg_sq[..]);
                // f32 parameters are their own master.
                let param = (size_of::<P>() == 2).then_some(&mut param[..]);
                adam(&row, 0.5, AdamSlices { grad: &grad, master, exp_avg, exp_avg_sq, param });
            });
        });
        group.finish();
    }
}

criterion_group!(
    benches,
    bench::<bf16, bf16>,
    bench::<f16, f16>,
    bench::<f32, bf16>,
    bench::<f32, f16>,
    bench::<f32, f32>
);
criterion_main!(benches);
