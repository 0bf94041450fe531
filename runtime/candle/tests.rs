//! The operations against candle's own autograd: same values, same gradients, in every dtype.

#![allow(clippy::unwrap_used)]

mod gpt;
mod memory;
mod operations;

use candle_core::Tensor;

/// Fails unless the largest difference is below `limit` of the largest value wanted.
fn assert_close(got: &[f32], want: &[f32], limit: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let scale = want.iter().fold(1e-6f32, |top, x| top.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= limit * scale, "{what}: element {i} is {g}, not {w} (largest {scale})");
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Reproducible numbers between -1 and 1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / 8_388_608.0) - 1.0
        })
        .collect()
}
