use std::sync::Arc;

use candle_core::{D, Device, Tensor, Var};

use super::super::{attention, cause, cross_entropy, gelu};
use super::memory::{Did, Memory};
use super::{assert_close, numbers, values};
use crate::actors::{DType, UnitId};

const LIMIT: f32 = 1e-4;

fn var(values: &[f32], shape: &[usize]) -> Var {
    Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu).unwrap()).unwrap()
}

/// A scalar that weighs every element differently, so that no two gradients are alike.
fn weighed(y: &Tensor) -> Tensor {
    let weights = Tensor::from_vec(numbers(y.elem_count(), 99), y.shape(), &Device::Cpu).unwrap();
    (y * weights).unwrap().sum_all().unwrap()
}

fn grad_of(loss: &Tensor, var: &Var) -> Vec<f32> {
    values(loss.backward().unwrap().get(var).unwrap())
}

/// Same output and same gradient of the input.
fn assert_agrees(what: &str, input: &Var, ours: &Tensor, theirs: &Tensor) {
    assert_eq!(ours.dims(), theirs.dims(), "{what}");
    assert_close(&values(ours), &values(theirs), LIMIT, &format!("{what}: output"));
    let want = grad_of(&weighed(theirs), input);
    assert_close(&grad_of(&weighed(ours), input), &want, LIMIT, &format!("{what}: gradient of the input"));
}

/// The value that a parameter of this dtype has.
fn rounded(values: &[f32], dtype: DType) -> Vec<f32> {
    values
        .iter()
        .map(|x| match dtype {
            DType::Bf16 => half::bf16::from_f32(*x).to_f32(),
            DType::F16 => half::f16::from_f32(*x).to_f32(),
            _ => *x,
        })
        .collect()
}

#[test]
fn linear_agrees_with_candle_in_every_dtype() {
    let (inputs, outputs) = (20, 33);
    let (w, b) = (numbers(inputs * outputs, 1), numbers(outputs, 2));
    let x = var(&numbers(2 * 3 * inputs, 3), &[2, 3, inputs]);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let memory = Arc::new(Memory::new());
        let weight = memory.param(&[outputs, inputs], &w, dtype, true);
        let bias = memory.param(&[outputs], &b, dtype, true);
        let ours = memory.forward().linear(&x, weight, Some(bias)).unwrap();

        let (vw, vb) = (var(&rounded(&w, dtype), &[outputs, inputs]), var(&rounded(&b, dtype), &[outputs]));
        let theirs = x.broadcast_matmul(&vw.t().unwrap()).unwrap().broadcast_add(&vb).unwrap();
        assert_agrees(dtype.name(), &x, &ours, &theirs);
        assert_close(&memory.gradient(weight), &grad_of(&weighed(&theirs), &vw), LIMIT, "weight");
        assert_close(&memory.gradient(bias), &grad_of(&weighed(&theirs), &vb), LIMIT, "bias");
    }
}

#[test]
fn layer_norm_agrees_with_candle() {
    let (width, eps) = (37, 1e-5);
    let (g, b) = (numbers(width, 4), numbers(width, 5));
    let x = var(&numbers(6 * width, 6), &[6, width]);
    let memory = Arc::new(Memory::new());
    let gamma = memory.param(&[width], &g, DType::F32, true);
    let beta = memory.param(&[width], &b, DType::F32, true);
    let ours = memory.forward().layer_norm(&x, gamma, beta, eps).unwrap();

    let (vg, vb) = (var(&g, &[width]), var(&b, &[width]));
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1).unwrap()).unwrap();
    let variance = centred.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    let normal = centred.broadcast_div(&(variance + f64::from(eps)).unwrap().sqrt().unwrap()).unwrap();
    let theirs = normal.broadcast_mul(&vg).unwrap().broadcast_add(&vb).unwrap();
    assert_agrees("layer norm", &x, &ours, &theirs);
    assert_close(&memory.gradient(gamma), &grad_of(&weighed(&theirs), &vg), LIMIT, "gamma");
    assert_close(&memory.gradient(beta), &grad_of(&weighed(&theirs), &vb), LIMIT, "beta");
}

#[test]
fn embedding_agrees_with_candle_and_zeroes_rows_that_nobody_looked_up() {
    let (rows, width) = (7, 5);
    let t = numbers(rows * width, 7);
    let ids = Tensor::new(&[[1u32, 3, 1], [6, 0, 1]], &Device::Cpu).unwrap();
    let memory = Arc::new(Memory::new());
    let table = memory.param(&[rows, width], &t, DType::Bf16, true);
    let forward = memory.forward();
    let ours = forward.embedding(&forward.anchor().unwrap(), table, &ids).unwrap();
    weighed(&ours).backward().unwrap();

    let vt = var(&rounded(&t, DType::Bf16), &[rows, width]);
    let theirs = vt.embedding(&ids.flatten_all().unwrap()).unwrap().reshape((2, 3, width)).unwrap();
    assert_eq!(values(&ours), values(&theirs));
    assert_eq!(ours.dims(), theirs.dims());
    assert_close(&memory.gradient(table), &grad_of(&weighed(&theirs), &vt), LIMIT, "table");
}

#[test]
fn gelu_agrees_with_candle_far_into_its_tails() {
    let wide: Vec<f32> = numbers(500, 8).iter().map(|x| x * 12.0).collect();
    let x = var(&wide, &[20, 25]);
    assert_agrees("gelu", &x, &gelu(&x).unwrap(), &x.gelu().unwrap());
}

#[test]
fn cross_entropy_agrees_with_candle_and_scales_with_what_it_is_multiplied_by() {
    let spread: Vec<f32> = numbers(6 * 19, 9).iter().map(|x| x * 30.0).collect();
    let logits = var(&spread, &[2, 3, 19]);
    let targets = Tensor::new(&[[0u32, 18, 4], [4, 7, 1]], &Device::Cpu).unwrap();
    let ours = (cross_entropy(&logits, &targets).unwrap() * 128.0).unwrap();

    let top = logits.max_keepdim(D::Minus1).unwrap().detach();
    let shifted = logits.broadcast_sub(&top).unwrap();
    let total = shifted.exp().unwrap().sum_keepdim(D::Minus1).unwrap().log().unwrap();
    let logs = shifted.broadcast_sub(&total).unwrap();
    let picked = logs.gather(&targets.unsqueeze(D::Minus1).unwrap(), D::Minus1).unwrap();
    let theirs = (picked.mean_all().unwrap() * -128.0).unwrap();
    assert_agrees("cross-entropy", &logits, &ours, &theirs);
}

#[test]
fn attention_agrees_with_candle_within_and_across_blocks() {
    for (batch, time, heads, size) in [(2, 5, 3, 4), (1, 64, 2, 8), (2, 150, 2, 16)] {
        let width = heads * size;
        let qkv = var(&numbers(batch * time * 3 * width, 10), &[batch, time, 3 * width]);
        let ours = attention(&qkv, heads).unwrap();
        let theirs = super::gpt::plain_attention(&qkv, heads).unwrap();
        assert_agrees(&format!("attention over {time}"), &qkv, &ours, &theirs);
    }
}

#[test]
fn a_tied_weight_adds_up_and_its_first_unit_is_left_last() {
    let memory = Arc::new(Memory::new());
    let table = memory.param(&[4, 3], &numbers(12, 11), DType::F32, true);
    let ids = Tensor::new(&[2u32, 0], &Device::Cpu).unwrap();
    let forward = memory.forward();
    let x = forward.enter(UnitId(0), &forward.anchor().unwrap()).unwrap();
    let x = forward.embedding(&x, table, &ids).unwrap();
    let x = forward.enter(UnitId(1), &x).unwrap();
    let logits = forward.linear(&x, table, None).unwrap();
    weighed(&logits).backward().unwrap();
    let log = memory.log();
    assert_eq!(log, [Did::Entered(0), Did::Entered(1), Did::Wrote(0), Did::Left(1), Did::Wrote(0), Did::Left(0)]);

    let vt = var(&numbers(12, 11), &[4, 3]);
    let theirs = vt.embedding(&ids).unwrap().matmul(&vt.t().unwrap()).unwrap();
    assert_close(&memory.gradient(table), &grad_of(&weighed(&theirs), &vt), LIMIT, "tied table");
}

#[test]
fn microbatches_add_up_in_the_gradient() {
    let memory = Arc::new(Memory::new());
    let weight = memory.param(&[3, 4], &numbers(12, 12), DType::F32, true);
    let (x, forward) = (var(&numbers(8, 13), &[2, 4]), memory.forward());
    for _ in 0..2 {
        weighed(&forward.linear(&x, weight, None).unwrap()).backward().unwrap();
    }
    let twice = memory.gradient(weight);
    memory.start_step();
    weighed(&forward.linear(&x, weight, None).unwrap()).backward().unwrap();
    let once: Vec<f32> = memory.gradient(weight).iter().map(|g| g * 2.0).collect();
    assert_close(&twice, &once, 1e-6, "two microbatches");
}

#[test]
fn a_frozen_parameter_passes_gradients_on_and_takes_none() {
    let memory = Arc::new(Memory::new());
    let weight = memory.param(&[3, 4], &numbers(12, 14), DType::Bf16, false);
    let x = var(&numbers(8, 15), &[2, 4]);
    let y = memory.forward().linear(&x, weight, None).unwrap();
    assert!(grad_of(&weighed(&y), &x).iter().any(|g| *g != 0.0));
    assert_eq!(memory.log(), []);
}

#[test]
fn an_evaluation_builds_no_graph() {
    let mut memory = Memory::new();
    memory.trains = false;
    let memory = Arc::new(memory);
    let table = memory.param(&[4, 3], &numbers(12, 16), DType::F32, true);
    let forward = memory.forward();
    let x = forward.enter(UnitId(0), &forward.anchor().unwrap()).unwrap();
    let x = forward.embedding(&x, table, &Tensor::new(&[2u32], &Device::Cpu).unwrap()).unwrap();
    x.sum_all().unwrap().backward().unwrap();
    assert_eq!(memory.log(), [Did::Entered(0)]);
}

#[test]
fn an_engines_error_comes_out_of_candles() {
    let mut memory = Memory::new();
    let weight = memory.param(&[3, 4], &numbers(12, 17), DType::F32, true);
    memory.broken = Some(weight);
    let error = Arc::new(memory).forward().linear(&var(&numbers(8, 18), &[2, 4]), weight, None).unwrap_err();
    assert_eq!(cause(&error).unwrap().to_string(), "parameter 0 is out of reach");
    assert!(cause(&candle_core::Error::msg("something else")).is_none());
}

#[test]
fn shapes_that_disagree_are_named() {
    let memory = Arc::new(Memory::new());
    let weight = memory.param(&[3, 4], &numbers(12, 19), DType::F32, true);
    let bias = memory.param(&[4], &numbers(4, 20), DType::F32, true);
    let forward = memory.forward();
    let x = var(&numbers(10, 21), &[2, 5]);
    let text = |result: candle_core::Result<Tensor>| result.unwrap_err().to_string();
    assert!(text(forward.linear(&x, weight, None)).contains("last dimension is 4"));
    assert!(text(forward.linear(&x, weight, Some(bias))).contains("must have the shape [3]"));
    assert!(text(forward.linear(&x, bias, None)).contains("two dimensions"));
    let ids = Tensor::new(&[3u32], &Device::Cpu).unwrap();
    assert!(text(forward.embedding(&x, weight, &ids)).contains("id 3 is beyond"));
    assert!(text(cross_entropy(&x, &Tensor::new(&[0u32, 5], &Device::Cpu).unwrap())).contains("target 5"));
    assert!(text(attention(&x.unsqueeze(0).unwrap(), 2)).contains("2 heads"));
    for heads in [0, 4, usize::MAX, usize::MAX / 3 + 1] {
        let qkv = var(&numbers(12, 22), &[1, 2, 6]);
        assert!(text(attention(&qkv, heads)).contains(&format!("{heads} heads")));
    }
}
