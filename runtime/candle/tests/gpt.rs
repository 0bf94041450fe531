//! A whole GPT: every gradient of one built on the adapter against one of plain candle variables.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{D, Device, Result, Tensor, Var};

use super::super::{Forward, attention, cross_entropy, gelu};
use super::memory::{Did, Memory};
use super::{assert_close, numbers, values};
use crate::actors::{DType, ParamId, UnitId};

const EPS: f32 = 1e-5;

#[derive(Clone, Copy)]
struct Size {
    layers: usize,
    width: usize,
    heads: usize,
    vocab: usize,
    time: usize,
    batch: usize,
}

impl Size {
    /// Shapes in registration order: table, positions, 12 for each layer, then the head's norm and projection.
    fn shapes(&self) -> Vec<Vec<usize>> {
        let c = self.width;
        let mut shapes = vec![vec![self.vocab, c], vec![self.time, c]];
        for _ in 0..self.layers {
            shapes.extend([vec![c], vec![c], vec![3 * c, c], vec![3 * c], vec![c, c], vec![c]]);
            shapes.extend([vec![c], vec![c], vec![4 * c, c], vec![4 * c], vec![c, 4 * c], vec![c]]);
        }
        shapes.extend([vec![c], vec![c], vec![self.vocab, c]]);
        shapes
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        let shapes = self.shapes();
        let scale = |shape: &[usize]| if shape.len() == 1 { 1.0 } else { 0.2 };
        let sized = |(i, s): (usize, &Vec<usize>)| {
            numbers(s.iter().product(), i as u64 + 1).iter().map(|x| x * scale(s)).collect()
        };
        shapes.iter().enumerate().map(sized).collect()
    }

    fn ids(&self, seed: u64) -> Tensor {
        let ids = numbers(self.batch * self.time, seed)
            .iter()
            .map(|x| ((x + 1.0) * 0.499 * self.vocab as f32) as u32)
            .collect::<Vec<_>>();
        Tensor::from_vec(ids, (self.batch, self.time), &Device::Cpu).unwrap()
    }

    fn positions(&self) -> Tensor {
        let row: Vec<u32> = (0..self.time as u32).collect();
        Tensor::from_vec(row.repeat(self.batch), (self.batch, self.time), &Device::Cpu).unwrap()
    }
}

fn ours(size: Size, f: &Forward, p: &[ParamId]) -> Result<Tensor> {
    let x = f.enter(UnitId(0), &f.anchor()?)?;
    let mut x = (f.embedding(&x, p[0], &size.ids(50))? + f.embedding(&x, p[1], &size.positions())?)?;
    for layer in 0..size.layers {
        let p = &p[2 + 12 * layer..];
        let start = f.enter(UnitId(1 + 2 * layer as u32), &x)?;
        let h = f.linear(&f.layer_norm(&start, p[0], p[1], EPS)?, p[2], Some(p[3]))?;
        let h = f.linear(&attention(&h, size.heads)?, p[4], Some(p[5]))?;
        let start = f.enter(UnitId(2 + 2 * layer as u32), &(start + h)?)?;
        let h = f.linear(&f.layer_norm(&start, p[6], p[7], EPS)?, p[8], Some(p[9]))?;
        x = (&start + f.linear(&gelu(&h)?, p[10], Some(p[11]))?)?;
    }
    let p = &p[2 + 12 * size.layers..];
    let x = f.enter(UnitId(1 + 2 * size.layers as u32), &x)?;
    let logits = f.linear(&f.layer_norm(&x, p[0], p[1], EPS)?, p[2], None)?;
    cross_entropy(&logits, &size.ids(51))
}

fn plain_norm(x: &Tensor, gamma: &Tensor, beta: &Tensor) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centred.broadcast_div(&(variance + f64::from(EPS))?.sqrt()?)?;
    normal.broadcast_mul(gamma)?.broadcast_add(beta)
}

fn plain_linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)?.broadcast_add(bias)
}

pub(super) fn plain_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)
}

pub(super) fn plain_attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, time, joint) = qkv.dims3()?;
    let width = joint / 3;
    let part = |i: usize| -> Result<Tensor> {
        let part = qkv.narrow(2, i * width, width)?.reshape((batch, time, heads, width / heads))?;
        part.transpose(1, 2)?.contiguous()
    };
    let scores = (part(0)?.matmul(&part(1)?.t()?)? / ((width / heads) as f64).sqrt())?;
    let mask: Vec<f32> = (0..time * time).map(|i| if i % time > i / time { -1e9 } else { 0.0 }).collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (time, time), qkv.device())?)?;
    let out = plain_softmax(&scores)?.matmul(&part(2)?)?;
    out.transpose(1, 2)?.contiguous()?.reshape((batch, time, width))
}

fn theirs(size: Size, p: &[Var]) -> Result<Tensor> {
    let rows = |table: &Var, ids: Tensor| -> Result<Tensor> {
        table.embedding(&ids.flatten_all()?)?.reshape((size.batch, size.time, size.width))
    };
    let mut x = (rows(&p[0], size.ids(50))? + rows(&p[1], size.positions())?)?;
    for layer in 0..size.layers {
        let p = &p[2 + 12 * layer..];
        let h = plain_linear(&plain_norm(&x, &p[0], &p[1])?, &p[2], &p[3])?;
        x = (&x + plain_linear(&plain_attention(&h, size.heads)?, &p[4], &p[5])?)?;
        let h = plain_linear(&plain_norm(&x, &p[6], &p[7])?, &p[8], &p[9])?;
        x = (&x + plain_linear(&h.gelu()?, &p[10], &p[11])?)?;
    }
    let p = &p[2 + 12 * size.layers..];
    let logits = plain_norm(&x, &p[0], &p[1])?.broadcast_matmul(&p[2].t()?)?;
    let picked = plain_softmax(&logits)?.gather(&size.ids(51).unsqueeze(D::Minus1)?, D::Minus1)?;
    picked.log()?.mean_all()?.neg()
}

fn in_memory(size: Size, dtype: DType) -> (Arc<Memory>, Vec<ParamId>) {
    let memory = Arc::new(Memory::new());
    let (shapes, weights) = (size.shapes(), size.weights());
    let params = shapes.iter().zip(&weights).map(|(shape, w)| memory.param(shape, w, dtype, true)).collect();
    (memory, params)
}

#[test]
fn every_gradient_of_a_gpt_agrees_with_plain_candle() {
    let size = Size { layers: 2, width: 24, heads: 3, vocab: 31, time: 70, batch: 2 };
    let (memory, params) = in_memory(size, DType::F32);
    let loss = ours(size, &memory.forward(), &params).unwrap();
    loss.backward().unwrap();

    let shaped = |(shape, w): (&Vec<usize>, Vec<f32>)| {
        Var::from_tensor(&Tensor::from_vec(w, shape.as_slice(), &Device::Cpu).unwrap()).unwrap()
    };
    let vars: Vec<Var> = size.shapes().iter().zip(size.weights()).map(shaped).collect();
    let plain = theirs(size, &vars).unwrap();
    let grads = plain.backward().unwrap();
    assert_close(&values(&loss), &values(&plain), 1e-5, "loss");
    for (i, (param, var)) in params.iter().zip(&vars).enumerate() {
        assert_close(&memory.gradient(*param), &values(grads.get(var).unwrap()), 1e-4, &format!("parameter {i}"));
    }
}

#[test]
fn backward_leaves_units_one_after_the_other_from_the_last_to_the_first() {
    let size = Size { layers: 3, width: 8, heads: 2, vocab: 11, time: 6, batch: 1 };
    let (memory, params) = in_memory(size, DType::Bf16);
    ours(size, &memory.forward(), &params).unwrap().backward().unwrap();
    let unit_of = |param: u32| match param {
        0 | 1 => 0,
        p => (p - 2) / 6 + 1,
    };
    let log = memory.log();
    let back = &log[log.iter().rposition(|did| matches!(did, Did::Entered(_))).unwrap() + 1..];
    let mut open = 7;
    let mut left = Vec::new();
    for did in back {
        match *did {
            Did::Wrote(param) => {
                assert_eq!(unit_of(param), open, "parameter {param} came while unit {open} was open");
            }
            Did::Left(unit) => {
                left.push(unit);
                open = unit.wrapping_sub(1);
            }
            other @ Did::Entered(_) => panic!("{other:?} in backward"),
        }
    }
    assert_eq!(left, [7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(back.len(), size.shapes().len() + 8);
}

/// `cargo test --release --features candle -- --ignored --nocapture speed_of_a_step`
#[test]
#[ignore = "a measurement, not a promise"]
fn speed_of_a_step() {
    let size = Size { layers: 4, width: 256, heads: 4, vocab: 256, time: 128, batch: 4 };
    let (memory, params) = in_memory(size, DType::Bf16);
    let mut times: Vec<(f64, f64)> = (0..20)
        .map(|_| {
            memory.start_step();
            let start = Instant::now();
            let loss = ours(size, &memory.forward(), &params).unwrap();
            let forward = start.elapsed().as_secs_f64() * 1e3;
            loss.backward().unwrap();
            (forward, start.elapsed().as_secs_f64() * 1e3)
        })
        .collect();
    times.sort_by(|a, b| a.1.total_cmp(&b.1));
    println!("forward {:.1} ms, forward and backward {:.1} ms (median of 20)", times[10].0, times[10].1);
}
