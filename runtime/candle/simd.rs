//! Loops compiled once per instruction set, and the elementwise arithmetic inside them.
//!
//! Plain Rust that the compiler vectorises; no fused multiply-add and fixed lanes in sums, so that every instruction set
//! gives the same bits.

/// Lanes of a sum: a multiple of the widest vector in use.
pub(super) const LANES: usize = 16;

/// Runs `body` compiled for the best instruction set of this machine. What it calls must be `#[inline(always)]`.
#[inline]
pub(super) fn simd<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

/// e^x within 2 units in the last place, from -87 to 88; clamped beyond, NaN stays NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer that then sits in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    (p * r * r + r + 1.0) * scale
}

/// Folds over `values` in [`LANES`] independent lanes.
#[inline(always)]
fn lanes(values: &[f32], start: f32, fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = fold(*lane, *value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = fold(*lane, *value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = fold(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of the values.
#[inline(always)]
pub(super) fn sum(values: &[f32]) -> f32 {
    lanes(values, 0.0, |a, b| a + b)
}

/// Largest of the values; minus infinity of none.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    lanes(values, f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
}

/// Sum of `map(a, b)` over two slices of one length.
#[inline(always)]
pub(super) fn sum_with(a: &[f32], b: &[f32], map: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += map(a[i], b[i]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += map(*a, *b);
    }
    sum(&lanes)
}

/// Turns a row of scores into probabilities and returns (largest score, sum of the exponentials before division).
#[inline(always)]
pub(super) fn softmax(row: &mut [f32]) -> (f32, f32) {
    let top = largest(row);
    for value in row.iter_mut() {
        *value = exp(*value - top);
    }
    let total = sum(row);
    let factor = 1.0 / total;
    for value in row.iter_mut() {
        *value *= factor;
    }
    (top, total)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)]

    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -86_000..=87_000 {
            let x = i as f32 * 1e-3;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, not {want}");
        }
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_cover_the_rest_behind_the_last_full_chunk() {
        let values: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(sum(&values), 666.0);
        assert_eq!(largest(&values), 36.0);
        assert_eq!(sum_with(&values, &values, |a, b| a * b), 16_206.0);
    }
}
