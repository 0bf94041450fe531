//! Softmax cross-entropy against ids, with its gradient made in the same pass.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::simd::{simd, softmax};
use super::storage::{elements, output, tensor};

/// Mean over all positions of `-ln softmax(logits)[target]`: a scalar, in nats.
///
/// `logits` are `[.., classes]` in f32, `targets` u32 ids, one for each position.
///
/// # Errors
/// Counts that do not agree, a target beyond the classes, an activation that is not f32 on the CPU.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let Some(&classes) = logits.dims().last() else {
        bail!("cross-entropy takes logits with a dimension of classes");
    };
    let targets: Vec<u32> = targets.flatten_all()?.to_vec1()?;
    if targets.is_empty() || targets.len() * classes != logits.elem_count() {
        bail!("{} targets do not fit logits {:?}", targets.len(), logits.shape());
    }
    if let Some(target) = targets.iter().find(|target| **target as usize >= classes) {
        bail!("target {target} is beyond {classes} classes");
    }
    logits.contiguous()?.apply_op1(CrossEntropy { targets, classes, gradient: OnceLock::new() })
}

#[derive(Debug)]
struct CrossEntropy {
    targets: Vec<u32>,
    classes: usize,
    /// (softmax - one-hot) / positions.
    gradient: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "gatherflow-cross-entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = elements(storage, layout)?;
        let mut gradient = logits.to_vec();
        let share = 1.0 / self.targets.len() as f32;
        let mut total = 0.0f64;
        simd(
            #[inline(always)]
            || {
                for (row, target) in gradient.chunks_exact_mut(self.classes).zip(&self.targets) {
                    let target = *target as usize;
                    let score = row[target];
                    let (top, sum) = softmax(row);
                    total += f64::from(sum).ln() + f64::from(top) - f64::from(score);
                    row[target] -= 1.0;
                    for value in row {
                        *value *= share;
                    }
                }
            },
        );
        // A second forward of the same operation would compute the same values.
        let _ = self.gradient.set(gradient);
        Ok(output(vec![(total / self.targets.len() as f64) as f32], ()))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let Some(gradient) = self.gradient.get() else {
            bail!("backward of a cross-entropy without its forward");
        };
        let factor: f32 = grad.to_scalar()?;
        tensor(gradient.iter().map(|g| g * factor).collect(), logits.shape()).map(Some)
    }
}
