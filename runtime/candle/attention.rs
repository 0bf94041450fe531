//! Causal self-attention of several heads as one operation.
//!
//! Works on the joint projection `[batch, time, 3 width]` (queries, keys, values; each `heads` runs of `width / heads`)
//! with strided views instead of transposed copies, and in blocks of queries that leave out the keys in their future.
//! Keeps the probabilities, `batch x heads x time x time`, for backward: with P the probabilities and dP = dO V^T,
//! `dS = P (dP - rowsum(dP P))`, `dQ = dS K / sqrt(size)`, `dK = dS^T Q / sqrt(size)`, `dV = P^T dO`.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use gatherflow_kernels::matmul::{Matrix, MatrixMut, Onto, matmul};

use super::simd::{simd, softmax, sum_with};
use super::storage::{elements, output, tensor, with_elements};

/// Queries of one block.
const BLOCK: usize = 64;

/// Causal self-attention: `qkv` `[batch, time, 3 width]` in f32 to `[batch, time, width]`.
///
/// # Errors
/// A shape that is not of this form, an activation that is not f32 on the CPU.
pub fn attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, time, joint) = qkv.dims3()?;
    let width = joint / 3;
    if heads == 0 || width * 3 != joint || !width.is_multiple_of(heads) || qkv.elem_count() == 0 {
        bail!("attention with {heads} heads does not fit {:?}: the last dimension is 3 x heads x size", qkv.shape());
    }
    let op = Attention { batch, time, heads, width, probabilities: OnceLock::new() };
    qkv.contiguous()?.apply_op1(op)
}

#[derive(Debug)]
struct Attention {
    batch: usize,
    time: usize,
    heads: usize,
    width: usize,
    probabilities: OnceLock<Vec<f32>>,
}

impl Attention {
    fn size(&self) -> usize {
        self.width / self.heads
    }

    fn factor(&self) -> f32 {
        1.0 / (self.size() as f32).sqrt()
    }

    /// Offsets of queries, keys and values of one head in the joint projection.
    fn offsets(&self, pair: usize) -> [usize; 3] {
        let start = (pair / self.heads) * self.time * 3 * self.width + (pair % self.heads) * self.size();
        [start, start + self.width, start + 2 * self.width]
    }

    /// Offset of one head in the output.
    fn out_offset(&self, pair: usize) -> usize {
        (pair / self.heads) * self.time * self.width + (pair % self.heads) * self.size()
    }

    /// First query and end of every block.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let time = self.time;
        (0..time.div_ceil(BLOCK)).map(move |block| (block * BLOCK, (block * BLOCK + BLOCK).min(time)))
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "gatherflow-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = elements(storage, layout)?;
        let (time, width, joint, size) = (self.time, self.width, 3 * self.width, self.size());
        let mut out = vec![0.0; self.batch * time * width];
        let mut probabilities = vec![0.0; self.batch * self.heads * time * time];
        for (pair, table) in probabilities.chunks_exact_mut(time * time).enumerate() {
            let [q, k, v] = self.offsets(pair);
            for (start, end) in self.blocks() {
                let rows = end - start;
                let block = &mut table[start * time..];
                let queries = Matrix::new(&qkv[q + start * joint..], rows, size, joint);
                let keys = Matrix::new(&qkv[k..], end, size, joint).transposed();
                let mut scores = MatrixMut::new(block, rows, end, time);
                matmul(&mut scores, Onto::Overwrite, self.factor(), queries, keys);
                simd(
                    #[inline(always)]
                    || {
                        for (row, query) in block.chunks_mut(time).zip(start..end) {
                            let (past, future) = row[..end].split_at_mut(query + 1);
                            softmax(past);
                            future.fill(0.0);
                        }
                    },
                );
                let mut heads_out =
                    MatrixMut::new(&mut out[self.out_offset(pair) + start * width..], rows, size, width);
                let values = Matrix::new(&qkv[v..], end, size, joint);
                matmul(&mut heads_out, Onto::Overwrite, 1.0, Matrix::new(block, rows, end, time), values);
            }
        }
        // A second forward of the same operation would compute the same values.
        let _ = self.probabilities.set(probabilities);
        Ok(output(out, (self.batch, time, width)))
    }

    fn bwd(&self, qkv: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let Some(probabilities) = self.probabilities.get() else {
            bail!("backward of an attention without its forward");
        };
        let mut dqkv = vec![0.0; qkv.elem_count()];
        with_elements(qkv, |qkv| {
            with_elements(grad, |grad| {
                let mut scratch = vec![0.0; BLOCK * self.time];
                for (pair, table) in probabilities.chunks_exact(self.time * self.time).enumerate() {
                    self.differentiate(pair, table, qkv, grad, &mut dqkv, &mut scratch);
                }
                Ok(())
            })
        })?;
        tensor(dqkv, qkv.shape()).map(Some)
    }
}

impl Attention {
    fn differentiate(
        &self,
        pair: usize,
        table: &[f32],
        qkv: &[f32],
        grad: &[f32],
        dqkv: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (time, width, joint, size) = (self.time, self.width, 3 * self.width, self.size());
        let [q, k, v] = self.offsets(pair);
        // The last block sees all keys: it overwrites, the others add.
        for (start, end) in self.blocks().rev() {
            let onto = if end == time { Onto::Overwrite } else { Onto::Accumulate };
            let rows = end - start;
            let block = &table[start * time..];
            let dout = Matrix::new(&grad[self.out_offset(pair) + start * width..], rows, size, width);
            let probabilities = Matrix::new(block, rows, end, time);
            matmul(&mut MatrixMut::new(&mut dqkv[v..], end, size, joint), onto, 1.0, probabilities.transposed(), dout);

            let values = Matrix::new(&qkv[v..], end, size, joint).transposed();
            matmul(&mut MatrixMut::new(scratch, rows, end, end), Onto::Overwrite, 1.0, dout, values);
            simd(
                #[inline(always)]
                || {
                    for (ds, p) in scratch[..rows * end].chunks_exact_mut(end).zip(block.chunks(time)) {
                        let p = &p[..end];
                        let mean = sum_with(ds, p, |ds, p| ds * p);
                        for (ds, p) in ds.iter_mut().zip(p) {
                            *ds = p * (*ds - mean);
                        }
                    }
                },
            );
            let dscores = Matrix::new(scratch, rows, end, end);
            let keys = Matrix::new(&qkv[k..], end, size, joint);
            let mut dqueries = MatrixMut::new(&mut dqkv[q + start * joint..], rows, size, joint);
            matmul(&mut dqueries, Onto::Overwrite, self.factor(), dscores, keys);
            let queries = Matrix::new(&qkv[q + start * joint..], rows, size, joint);
            let mut dkeys = MatrixMut::new(&mut dqkv[k..], end, size, joint);
            matmul(&mut dkeys, onto, self.factor(), dscores.transposed(), queries);
        }
    }
}
