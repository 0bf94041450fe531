//! `y = x W^T + b`.
//!
//! Backward: `dW = dy^T x` into the gradient itself, `db` = column sums of `dy`, `dx = dy W`.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use gatherflow_kernels::matmul::{Matrix, MatrixMut, Onto, matmul};

use super::access::{Weight, deliver, with_f32};
use super::error::lift;
use super::forward::Access;
use super::simd::simd;
use super::storage::{elements, output, rows_of, tensor, with_elements};
use crate::guard::WriteMode;

#[derive(Debug)]
pub(super) struct Linear {
    pub(super) access: Access,
    pub(super) weight: Weight,
    pub(super) bias: Option<Weight>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "gatherflow-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = elements(storage, layout)?;
        let (inputs, outputs) = (self.inputs, self.outputs);
        let rows = rows_of(layout.shape(), inputs, "this linear operation")?;
        let mut y = match self.bias {
            Some(bias) => with_f32(&*self.access, bias, |bias| bias.repeat(rows))?,
            None => vec![0.0; rows * outputs],
        };
        let onto = if self.bias.is_some() { Onto::Accumulate } else { Onto::Overwrite };
        with_f32(&*self.access, self.weight, |weight| {
            let weight = Matrix::new(weight, outputs, inputs, inputs).transposed();
            let x = Matrix::new(x, rows, inputs, inputs);
            matmul(&mut MatrixMut::new(&mut y, rows, outputs, outputs), onto, 1.0, x, weight);
        })?;
        let mut dims = layout.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = outputs;
        }
        Ok(output(y, dims))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let rows = x.elem_count() / inputs;
        with_elements(dy, |dy| {
            if let Some(bias) = self.bias {
                deliver(&*self.access, bias, &column_sums(dy, outputs))?;
            }
            if self.weight.trainable {
                with_elements(x, |x| {
                    let (x, dy) = (Matrix::new(x, rows, inputs, inputs), Matrix::new(dy, rows, outputs, outputs));
                    self.access
                        .grad(self.weight.param, &mut |mode, grad| {
                            let onto = match mode {
                                WriteMode::Overwrite => Onto::Overwrite,
                                WriteMode::Accumulate => Onto::Accumulate,
                            };
                            let mut grad = MatrixMut::new(grad, outputs, inputs, inputs);
                            matmul(&mut grad, onto, 1.0, dy.transposed(), x);
                        })
                        .map_err(lift)
                })?;
            }
            let mut dx = vec![0.0; rows * inputs];
            with_f32(&*self.access, self.weight, |weight| {
                let dy = Matrix::new(dy, rows, outputs, outputs);
                let weight = Matrix::new(weight, outputs, inputs, inputs);
                matmul(&mut MatrixMut::new(&mut dx, rows, inputs, inputs), Onto::Overwrite, 1.0, dy, weight);
            })?;
            tensor(dx, x.shape()).map(Some)
        })
    }
}

/// Sums of the columns of rows of `width` elements.
fn column_sums(values: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0; width];
    simd(
        #[inline(always)]
        || {
            for row in values.chunks_exact(width) {
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum += value;
                }
            }
        },
    );
    sums
}
