//! Layer norm over the last dimension.
//!
//! Keeps mean and 1/deviation of every row for backward: with x' = (x - mean) / deviation and g = dy gamma,
//! `dx = (g - mean(g) - x' mean(g x')) / deviation`, `dgamma` = column sums of `dy x'`, `dbeta` = column sums of `dy`.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::access::{Weight, deliver, with_f32};
use super::forward::Access;
use super::simd::{simd, sum, sum_with};
use super::storage::{elements, output, rows_of, tensor, with_elements};

#[derive(Debug)]
pub(super) struct LayerNorm {
    access: Access,
    gamma: Weight,
    beta: Weight,
    width: usize,
    eps: f32,
    /// Mean and 1/deviation per row.
    moments: OnceLock<Vec<(f32, f32)>>,
}

impl LayerNorm {
    pub(super) fn new(access: Access, gamma: Weight, beta: Weight, width: usize, eps: f32) -> Self {
        Self { access, gamma, beta, width, eps, moments: OnceLock::new() }
    }
}

impl CustomOp1 for LayerNorm {
    fn name(&self) -> &'static str {
        "gatherflow-layer-norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = elements(storage, layout)?;
        let rows = rows_of(layout.shape(), self.width, "this layer norm")?;
        let (mut y, mut moments) = (vec![0.0; x.len()], Vec::with_capacity(rows));
        // The two parameters are small; one copy makes room for the other in the scratch buffer.
        let beta = with_f32(&*self.access, self.beta, <[f32]>::to_vec)?;
        with_f32(&*self.access, self.gamma, |gamma| {
            simd(
                #[inline(always)]
                || {
                    for (x, y) in x.chunks_exact(self.width).zip(y.chunks_exact_mut(self.width)) {
                        moments.push(normalize(x, y, gamma, &beta, self.eps));
                    }
                },
            );
        })?;
        // A second forward of the same operation would compute the same values.
        let _ = self.moments.set(moments);
        Ok(output(y, layout.shape()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let Some(moments) = self.moments.get() else {
            bail!("backward of a layer norm without its forward");
        };
        let mut dx = vec![0.0; x.elem_count()];
        let (mut dgamma, mut dbeta) = (vec![0.0; self.width], vec![0.0; self.width]);
        with_elements(x, |x| {
            with_elements(dy, |dy| {
                with_f32(&*self.access, self.gamma, |gamma| {
                    simd(
                        #[inline(always)]
                        || {
                            let rows = x.chunks_exact(self.width).zip(dy.chunks_exact(self.width));
                            for ((x, dy), (dx, moments)) in rows.zip(dx.chunks_exact_mut(self.width).zip(moments)) {
                                differentiate(x, dy, dx, gamma, *moments, &mut dgamma, &mut dbeta);
                            }
                        },
                    );
                })
            })
        })?;
        deliver(&*self.access, self.beta, &dbeta)?;
        deliver(&*self.access, self.gamma, &dgamma)?;
        tensor(dx, x.shape()).map(Some)
    }
}

#[inline(always)]
fn normalize(x: &[f32], y: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32) -> (f32, f32) {
    let width = x.len() as f32;
    let mean = sum(x) / width;
    let variance = sum_with(x, x, |a, _| (a - mean) * (a - mean)) / width;
    let scale = 1.0 / (variance + eps).sqrt();
    for (((y, x), gamma), beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
        *y = (x - mean) * scale * gamma + beta;
    }
    (mean, scale)
}

#[inline(always)]
fn differentiate(
    x: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    gamma: &[f32],
    (mean, scale): (f32, f32),
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let width = x.len();
    let (dy, dx, gamma) = (&dy[..width], &mut dx[..width], &gamma[..width]);
    let (dgamma, dbeta) = (&mut dgamma[..width], &mut dbeta[..width]);
    for i in 0..width {
        dbeta[i] += dy[i];
        dgamma[i] += dy[i] * ((x[i] - mean) * scale);
        dx[i] = dy[i] * gamma[i];
    }
    let mean_g = sum(dx) / width as f32;
    let mean_gx = sum_with(dx, x, |g, x| g * ((x - mean) * scale)) / width as f32;
    for i in 0..width {
        let normal = (x[i] - mean) * scale;
        dx[i] = (dx[i] - mean_g - normal * mean_gx) * scale;
    }
}
