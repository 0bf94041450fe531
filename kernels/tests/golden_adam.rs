//! Ten steps of torch's Adam and `AdamW` in mixed precision, bfloat16 and float16 with a loss scale: partial, fold, judge and
//! adam give torch's norms, masters, moments and 16-bit parameters.
//!
//! The values and the tolerances are those of `tests/golden/README.md` in the workspace; the packaged crate goes without.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use gatherflow_kernels::Element;
use gatherflow_kernels::adam::{AdamRow, AdamSlices, adam};
use gatherflow_kernels::convert::cast;
use gatherflow_kernels::norm::{NormPiece, NormType, partial};
use gatherflow_kernels::verdict::{Average, HostVerdict, OnNonFinite, Scalars, ScalerRule, VerdictRule, fold, judge};
use half::{bf16, f16};
use safetensors::SafeTensors;
use serde_json::Value;

const MASTER_ABSOLUTE: f32 = 1e-7;
const MOMENT_OF_LARGEST: f32 = 1e-6;
const NORM_RELATIVE: f64 = 1e-6;
const MODEL_ULPS: u16 = 1;
const MODEL_OFF: usize = 3;

/// A 16-bit element of the golden files.
trait Golden: Element {
    fn bits(self) -> u16;
    fn of_bits(bits: u16) -> Self;
}

impl Golden for bf16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
}

impl Golden for f16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
}

/// One file: all its parameters one after the other, as in a shard.
struct File<'a> {
    tensors: SafeTensors<'a>,
    ends: Vec<usize>,
}

impl File<'_> {
    fn f32s(&self, prefix: &str) -> Vec<f32> {
        self.all(prefix).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn halves<T: Golden>(&self, prefix: &str) -> Vec<T> {
        self.all(prefix).as_chunks::<2>().0.iter().map(|b| T::of_bits(u16::from_le_bytes(*b))).collect()
    }

    fn norms(&self, case: &str) -> Vec<f32> {
        let data = self.tensors.tensor(&format!("{case}.norms")).unwrap().data();
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn all(&self, prefix: &str) -> Vec<u8> {
        let tensor = |i| self.tensors.tensor(&format!("{prefix}.{i}")).unwrap().data().to_vec();
        (0..self.ends.len()).flat_map(tensor).collect()
    }

    fn pieces(&self) -> Vec<NormPiece> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let piece = |(param, (start, &end))| NormPiece { start, end, param, counted: true };
        (0..).zip(starts.zip(&self.ends)).map(piece).collect()
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/adam")
}

/// The index's entry of each file with elements of this dtype; calls `check` for each of its cases.
fn for_each_case(dtype: &str, check: impl Fn(&File<'_>, &Value, &Value)) {
    let index = std::fs::read(folder().join("index.json")).unwrap();
    let index: Vec<Value> = serde_json::from_slice(&index).unwrap();
    let mut cases = 0;
    for entry in index.iter().filter(|entry| entry["dtype"] == dtype) {
        let bytes = std::fs::read(folder().join(entry["file"].as_str().unwrap())).unwrap();
        let sizes = entry["shapes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|shape| shape.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).product::<usize>());
        let ends = sizes.scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        let file = File { tensors: SafeTensors::deserialize(&bytes).unwrap(), ends: ends.collect() };
        for case in entry["cases"].as_array().unwrap() {
            check(&file, entry, case);
            cases += 1;
        }
    }
    assert_eq!(cases, 8, "cases of {dtype}");
}

fn follows_torch<T: Golden>(file: &File<'_>, entry: &Value, case: &Value) {
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    let name = case["case"].as_str().unwrap();
    let scaler = match number(entry, "loss_scale") {
        1.0 => ScalerRule::None,
        scale => ScalerRule::Constant { scale: scale as f32 },
    };
    let rule = VerdictRule {
        average: Average::Ranks(1),
        norm: NormType::P(2.0),
        max_norm: number(case, "clip"),
        on_nonfinite: OnNonFinite::Error,
    };
    let mut scalars = Scalars::initial(&scaler);
    let mut master = file.f32s("init.master");
    let mut model = file.halves::<T>("init.model");
    let (mut exp_avg, mut exp_avg_sq) = (vec![0.0; master.len()], vec![0.0; master.len()]);
    let norms = file.norms(name);

    for step in 1..=entry["steps"].as_u64().unwrap() {
        let grad = file.halves::<T>(&format!("grad.{step}"));
        let mut reduced = vec![0.0_f32; grad.len()];
        cast(&grad, &mut reduced);
        // Two shards, their border within a parameter: what torch has as one tensor, ranks and buckets have in parts.
        let border = reduced.len() / 2;
        let (first, second) = halves_of(&file.pieces(), border);
        let partial = |shard: &[f32], pieces: &[NormPiece]| partial(rule.norm, shard, pieces);
        let partials = [partial(&reduced[..border], &first), partial(&reduced[border..], &second)];
        let report = judge(&[fold(partials, HostVerdict::default())], &rule, &scaler, &mut scalars);
        assert!(report.updated && !scalars.skip, "{name} step {step}");
        let (norm, expected) = (report.grad_norm.unwrap(), f64::from(norms[step as usize - 1]));
        assert!((norm / expected - 1.0).abs() < NORM_RELATIVE, "{name} step {step}: norm {norm}, not {expected}");

        let betas = (number(entry, "beta1"), number(entry, "beta2"));
        let decoupled = case["opt"] == "AdamW";
        let decay = number(case, "weight_decay");
        let row = AdamRow::new(number(entry, "lr"), betas, number(entry, "eps"), decay, decoupled, step);
        let (master, param) = (&mut master[..], Some(&mut model[..]));
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..], &mut exp_avg_sq[..]);
        adam(&row, scalars.factor as f32, AdamSlices { grad: &grad, master, exp_avg, exp_avg_sq, param });

        if [1, 2, 10].contains(&step) {
            let at = format!("{name}.s{step}");
            near(master, &file.f32s(&format!("{at}.master")), |_| MASTER_ABSOLUTE, &at);
            near_each(file, exp_avg, &format!("{at}.exp_avg"));
            near_each(file, exp_avg_sq, &format!("{at}.exp_avg_sq"));
            let off = model.iter().zip(file.halves::<T>(&format!("{at}.model"))).filter(|(a, b)| **a != *b);
            let ulps: Vec<u16> = off.map(|(a, b)| a.bits().abs_diff(b.bits())).collect();
            assert!(ulps.len() <= MODEL_OFF && ulps.iter().all(|&u| u <= MODEL_ULPS), "{at}.model off by {ulps:?}");
        }
    }
    near(&master, &file.f32s(&format!("{name}.fused10.master")), |_| MASTER_ABSOLUTE, name);
}

/// The pieces before and after a border, counted from the start of their half.
fn halves_of(pieces: &[NormPiece], border: usize) -> (Vec<NormPiece>, Vec<NormPiece>) {
    let first = pieces.iter().map(|p| NormPiece { end: p.end.min(border), ..*p }).filter(|p| p.start < p.end);
    let second = pieces.iter().filter(|p| p.end > border).map(|p| NormPiece {
        start: p.start.saturating_sub(border),
        end: p.end - border,
        ..*p
    });
    (first.collect(), second.collect())
}

/// Moments, tensor by tensor: single elements cancel, so the measure is the tensor's largest.
fn near_each(file: &File<'_>, got: &[f32], prefix: &str) {
    let expected = file.f32s(prefix);
    for piece in file.pieces() {
        let range = piece.start..piece.end;
        near(&got[range.clone()], &expected[range], |largest| MOMENT_OF_LARGEST * largest, prefix);
    }
}

fn near(got: &[f32], expected: &[f32], tolerance: impl Fn(f32) -> f32, what: &str) {
    assert_eq!(got.len(), expected.len());
    let tolerance = tolerance(expected.iter().fold(0.0, |max, x| x.abs().max(max)));
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: off by {worst:e}, more than {tolerance:e}");
}

#[test]
fn bfloat16_training_follows_torch() {
    for_each_case("bfloat16", follows_torch::<bf16>);
}

#[test]
fn float16_training_with_a_loss_scale_follows_torch() {
    for_each_case("float16", follows_torch::<f16>);
}
