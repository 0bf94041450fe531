//! Adam, norms and casts give the same bits on every instruction set of this machine, and those of one f32 operation after
//! the other. Loops are only vectorised where they are optimised: run with `--release` as well.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use gatherflow_kernels::Element;
use gatherflow_kernels::adam::{AdamRow, AdamSlices, adam_on};
use gatherflow_kernels::convert::{cast_on, fill};
use gatherflow_kernels::isa::Isa;
use gatherflow_kernels::norm::{NormPiece, NormType, partial_on};
use half::{bf16, f16};
use proptest::prelude::*;

const LONGEST: usize = 200;

/// A stream of numbers that are hard to get right: a third ordinary, a third any bits at all, a third special.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn ordinary(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn any(&mut self) -> f32 {
        const SPECIAL: [f32; 14] = [
            0.0,
            -0.0,
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-40,
            -1e-45,
            65504.0,
            65520.0,
            5.96e-8,
        ];
        let bits = self.bits();
        match bits % 3 {
            0 => self.ordinary(),
            1 => f32::from_bits((bits >> 32) as u32),
            _ => SPECIAL[(bits >> 32) as usize % SPECIAL.len()],
        }
    }

    fn list<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| T::from_f32(self.any())).collect()
    }
}

/// Everything Adam writes.
#[derive(Clone)]
struct Written<P> {
    master: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    param: Vec<P>,
}

impl<P: Element> Written<P> {
    fn random(numbers: &mut Numbers, len: usize) -> Self {
        Self {
            master: numbers.list(len),
            exp_avg: numbers.list(len),
            exp_avg_sq: numbers.list(len),
            param: numbers.list(len),
        }
    }

    /// Bits, with one pattern for all NaNs.
    fn bits(&self) -> [Vec<u32>; 4] {
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        let f32s = |list: &[f32]| list.iter().map(|&x| bits(x)).collect();
        [
            f32s(&self.master),
            f32s(&self.exp_avg),
            f32s(&self.exp_avg_sq),
            self.param.iter().map(|p| bits(p.to_f32())).collect(),
        ]
    }
}

/// Elements `from..` by SPEC T1, one operation after the other: nothing can be fused or reordered across a black box.
fn one_by_one<G: Element, P: Element>(row: &AdamRow, factor: f32, grad: &[G], into: &mut Written<P>, from: usize) {
    let mul = |a: f32, b: f32| black_box(black_box(a) * black_box(b));
    let add = |a: f32, b: f32| black_box(black_box(a) + black_box(b));
    let div = |a: f32, b: f32| black_box(black_box(a) / black_box(b));
    for (i, g) in grad.iter().enumerate().skip(from) {
        let (p, m, v) = (into.master[i], into.exp_avg[i], into.exp_avg_sq[i]);
        let mut g = mul(g.to_f32(), factor);
        if !row.decoupled {
            g = add(g, mul(row.weight_decay, p));
        }
        let m = add(mul(row.beta1, m), mul(row.one_minus_beta1, g));
        let v = add(mul(row.beta2, v), mul(row.one_minus_beta2, mul(g, g)));
        let mut update = div(div(m, row.bias1), add(black_box(div(v, row.bias2).sqrt()), row.eps));
        if row.decoupled {
            update = add(update, mul(row.weight_decay, p));
        }
        let p = black_box(p - mul(row.lr, update));
        (into.master[i], into.exp_avg[i], into.exp_avg_sq[i]) = (p, m, v);
        into.param[i] = P::from_f32(p);
    }
}

fn adam_agrees<G: Element, P: Element>(seed: u64, offset: usize, decoupled: bool) {
    let mut numbers = Numbers(seed);
    let row = AdamRow::new(0.013, (0.87, 0.991), 1e-8, 0.03, decoupled, 1 + seed % 50);
    let factor = numbers.ordinary();
    for len in (0..LONGEST).chain([1000]) {
        let grad: Vec<G> = numbers.list(offset + len);
        let before = Written::<P>::random(&mut numbers, offset + len);
        let mut expected = before.clone();
        one_by_one(&row, factor, &grad, &mut expected, offset);
        let mut expected_without = expected.clone();
        expected_without.param.clone_from(&before.param);
        for isa in Isa::available() {
            for (with_param, expected) in [(true, &expected), (false, &expected_without)] {
                let mut written = before.clone();
                let slices = AdamSlices {
                    grad: &grad[offset..],
                    master: &mut written.master[offset..],
                    exp_avg: &mut written.exp_avg[offset..],
                    exp_avg_sq: &mut written.exp_avg_sq[offset..],
                    param: with_param.then_some(&mut written.param[offset..]),
                };
                adam_on(isa, &row, factor, slices);
                assert_eq!(written.bits(), expected.bits(), "{}, {len} elements at {offset}", isa.name());
            }
        }
    }
}

fn cast_agrees<S: Element, D: Element>(seed: u64, offset: usize, narrow: impl Fn(f32) -> D) {
    let mut numbers = Numbers(seed);
    for len in 0..LONGEST {
        let src: Vec<S> = numbers.list(offset + len);
        let expected: Vec<D> = src[offset..].iter().map(|s| narrow(s.to_f32())).collect();
        for isa in Isa::available() {
            let mut dst = vec![D::default(); offset + len];
            cast_on(isa, &src[offset..], &mut dst[offset..]);
            let same = dst[offset..].iter().zip(&expected).all(|(d, e)| d.to_f32().to_bits() == e.to_f32().to_bits());
            assert!(same, "{}, {len} elements at {offset}", isa.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn adam_gives_the_bits_of_one_operation_after_the_other(seed: u64, offset in 0_usize..4, decoupled: bool) {
        adam_agrees::<bf16, bf16>(seed, offset, decoupled);
        adam_agrees::<f16, f16>(seed, offset, decoupled);
        adam_agrees::<f32, bf16>(seed, offset, decoupled);
        adam_agrees::<f32, f16>(seed, offset, decoupled);
        adam_agrees::<bf16, f32>(seed, offset, decoupled);
        adam_agrees::<f32, f32>(seed, offset, decoupled);
    }

    #[test]
    fn casts_give_the_bits_of_half(seed: u64, offset in 0_usize..4) {
        cast_agrees::<f32, bf16>(seed, offset, bf16::from_f32);
        cast_agrees::<f32, f16>(seed, offset, f16::from_f32);
        cast_agrees::<bf16, f32>(seed, offset, |x| x);
        cast_agrees::<f16, f32>(seed, offset, |x| x);
        cast_agrees::<bf16, f16>(seed, offset, f16::from_f32);
        cast_agrees::<f16, bf16>(seed, offset, bf16::from_f32);
        cast_agrees::<f32, f32>(seed, offset, |x| x);
    }

    #[test]
    fn norms_give_the_same_bits_with_and_without_nonfinite_elements(seed: u64, offset in 0_usize..4) {
        let mut numbers = Numbers(seed);
        for len in (0..LONGEST).chain([4095, 4096, 4097, 10_000]) {
            let any: Vec<f32> = numbers.list(offset + len);
            let finite: Vec<f32> = any.iter().map(|&x| if x.is_finite() { x } else { 0.5 }).collect();
            for grad in [any, finite] {
                let pieces = [
                    NormPiece { start: offset, end: offset + len / 3, param: 8, counted: true },
                    NormPiece { start: offset + len / 3, end: offset + len, param: 9, counted: true },
                ];
                for norm in [NormType::P(2.0), NormType::P(1.0), NormType::P(2.7), NormType::Inf] {
                    let partial = |isa| partial_on(isa, norm, &grad, &pieces).to_bytes();
                    let bytes: Vec<_> = Isa::available().into_iter().map(partial).collect();
                    assert!(bytes.iter().all(|b| *b == bytes[0]), "{len} elements at {offset}, {norm:?}");
                }
            }
        }
    }
}

#[test]
fn norms_are_accurate_to_a_millionth_of_a_millionth() {
    let mut numbers = Numbers(3);
    for scale in [1.0_f32, 1e-18, 1e15] {
        let grad: Vec<f32> =
            (0..1_000_003).map(|i| numbers.ordinary() * scale * if i % 1000 == 0 { 1e4 } else { 1.0 }).collect();
        // Squares are exact in f64; their sum is carried with its error.
        let (mut sum, mut error) = (0.0_f64, 0.0);
        for &g in &grad {
            let square = f64::from(g) * f64::from(g);
            let next = sum + square;
            error += if sum >= square { (sum - next) + square } else { (square - next) + sum };
            sum = next;
        }
        let exact = sum + error;
        let piece = NormPiece { start: 0, end: grad.len(), param: 0, counted: true };
        let partial = partial_on(Isa::widest(), NormType::default(), &grad, &[piece]);
        assert!((partial.sum_powers / exact - 1.0).abs() < 1e-12, "{} instead of {exact}", partial.sum_powers);
        assert_eq!(partial.zeros, grad.iter().filter(|&&g| g == 0.0).count() as u64);
        let max_abs = grad.iter().fold(0.0_f32, |max, g| max.max(g.abs()));
        assert_eq!(partial.max_abs.to_bits(), f64::from(max_abs).to_bits());
    }
}

#[test]
fn a_fill_rounds_once_and_poisons_with_nan() {
    let mut dst = [bf16::ZERO; 7];
    fill(&mut dst, 0.1);
    assert_eq!(dst, [bf16::from_f32(0.1); 7]);
    fill(&mut dst, f32::NAN);
    assert!(dst.iter().all(|d| d.is_nan()));
}
