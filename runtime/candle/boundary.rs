//! The edge of a unit: identity in forward, the unit's leave in backward.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::error::lift;
use super::forward::Access;
use super::storage::{elements, output};
use crate::actors::UnitId;

#[derive(Debug)]
pub(super) struct Boundary {
    pub(super) access: Access,
    pub(super) unit: UnitId,
}

impl CustomOp1 for Boundary {
    fn name(&self) -> &'static str {
        "gatherflow-unit"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(output(elements(storage, layout)?.to_vec(), layout.shape()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.access.leave(self.unit).map_err(lift)?;
        Ok(Some(grad.clone()))
    }
}
