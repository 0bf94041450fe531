//! `examples/candle_vars.rs` before it was made data-parallel: what its changed lines are counted against. With candle-nn the
//! optimizer would come from there.

use std::collections::HashMap;

use super::AdamW;
use candle_core::{DType, Device, Result, Tensor, Var};

const INPUTS: usize = 8;
const HIDDEN: usize = 128;
const ROWS: usize = 64;
const STEPS: usize = 300;

struct Linear {
    weight: Var,
    bias: Var,
}

impl Linear {
    fn new(vars: &mut HashMap<String, Var>, name: &str, inputs: usize, outputs: usize) -> Result<Self> {
        let scale = 1.0 / (inputs as f32).sqrt();
        let weight = Var::rand(-scale, scale, (outputs, inputs), &Device::Cpu)?;
        let bias = Var::zeros(outputs, DType::F32, &Device::Cpu)?;
        vars.insert(format!("{name}.weight"), weight.clone());
        vars.insert(format!("{name}.bias"), bias.clone());
        Ok(Self { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)
    }
}

/// Inputs and the sine of their sum.
fn batch(number: usize) -> Result<(Tensor, Tensor)> {
    let value = |i: usize| ((number * ROWS * INPUTS + i) as f32 * 0.618_034).fract() * 2.0 - 1.0;
    let x = Tensor::from_vec((0..ROWS * INPUTS).map(value).collect(), (ROWS, INPUTS), &Device::Cpu)?;
    let y = x.sum_keepdim(1)?.sin()?;
    Ok((x, y))
}

/// Ends with the last loss, and a figure that is equal on all ranks if their parameters are.
fn train() -> Result<()> {
    let mut vars = HashMap::new();
    let first = Linear::new(&mut vars, "first", INPUTS, HIDDEN)?;
    let second = Linear::new(&mut vars, "second", HIDDEN, HIDDEN)?;
    let last = Linear::new(&mut vars, "last", HIDDEN, 1)?;
    let mut optimizer = AdamW::new_lr(vars.into_values().collect(), 3e-3)?;
    let mut loss_last = 0f32;
    for step in 0..STEPS {
        let (x, y) = batch(step)?;
        let x = first.forward(&x)?.tanh()?;
        let x = second.forward(&x)?.tanh()?;
        let loss = (last.forward(&x)? - y)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
        loss_last = loss.to_scalar()?;
        if step % 50 == 0 {
            println!("step {step:4}  loss {loss_last:.4}");
        }
    }
    let size: f32 = second.weight.sqr()?.sum_all()?.to_scalar()?;
    println!("last loss {loss_last:.4}, squared size of the second layer {size}");
    Ok(())
}

pub(crate) fn main() -> Result<()> {
    train()
}
