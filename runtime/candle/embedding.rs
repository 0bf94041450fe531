//! Rows of a table, looked up by ids that the operation carries; its argument only places it in the graph.
//!
//! Backward scatters into the gradient itself, which is zeroed first where nothing was written before.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::access::{Weight, with_f32};
use super::error::lift;
use super::forward::Access;
use super::storage::{output, with_elements};
use crate::guard::WriteMode;

#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) access: Access,
    pub(super) table: Weight,
    pub(super) ids: Vec<u32>,
    pub(super) width: usize,
    pub(super) dims: Vec<usize>,
}

impl Embedding {
    fn row(&self, id: u32) -> std::ops::Range<usize> {
        let start = id as usize * self.width;
        start..start + self.width
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "gatherflow-embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut rows = Vec::with_capacity(self.ids.len() * self.width);
        with_f32(&*self.access, self.table, |table| {
            for id in &self.ids {
                rows.extend_from_slice(&table[self.row(*id)]);
            }
        })?;
        Ok(output(rows, self.dims.as_slice()))
    }

    fn bwd(&self, anchor: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if self.table.trainable {
            with_elements(grad, |dy| {
                self.access
                    .grad(self.table.param, &mut |mode, grad| {
                        if mode == WriteMode::Overwrite {
                            grad.fill(0.0);
                        }
                        for (id, dy) in self.ids.iter().zip(dy.chunks_exact(self.width)) {
                            grad[self.row(*id)].iter_mut().zip(dy).for_each(|(g, d)| *g += d);
                        }
                    })
                    .map_err(lift)
            })?;
        }
        // Nothing flows into the argument, but backward must reach it: behind it lies the edge of the unit.
        anchor.zeros_like().map(Some)
    }
}
