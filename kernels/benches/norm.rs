//! Norm partials on the widest instruction set: `norm/<elements>/f32`, one piece, and `norm/<elements>/f32-small`, pieces of
//! 1000 elements.
#![allow(missing_docs)]

#[path = "support/memory.rs"]
mod memory;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gatherflow_kernels::norm::{NormPiece, NormType, partial};
use memory::{Array, noise};

/// In the second-level cache, and in memory.
const SIZES: [usize; 2] = [256 << 10, 64 << 20];

fn bench(criterion: &mut Criterion) {
    for numel in SIZES {
        let mut group = criterion.benchmark_group(format!("norm/{numel}"));
        group.throughput(Throughput::Elements(numel as u64)).sample_size(20);
        let grad = Array::from_fn(numel, noise);
        for (name, piece_numel) in [("f32", numel), ("f32-small", 1000)] {
            let starts = (0..numel).step_by(piece_numel);
            let piece = |(param, start): (u32, usize)| NormPiece {
                start,
                end: (start + piece_numel).min(numel),
                param,
                counted: true,
            };
            let pieces: Vec<NormPiece> = (0..).zip(starts).map(piece).collect();
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter(|| partial(NormType::default(), &grad, &pieces));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
