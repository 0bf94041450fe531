//! [`Forward`]: one forward pass over candle tensors, with parameters from an owned pass.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var, bail};

use super::access::{ParamAccess, Weight};
use super::boundary::Boundary;
use super::embedding::Embedding;
use super::error::lift;
use super::linear::Linear;
use super::norm::LayerNorm;
use crate::actors::{ParamId, UnitId};
use crate::owned::OwnedPass;

/// Where the operations of one pass find their parameters.
pub(super) type Access = Arc<dyn ParamAccess>;

/// One forward pass (and its backward) over candle tensors; cheap to clone.
#[derive(Clone, Debug)]
pub struct Forward {
    access: Access,
}

impl Forward {
    /// Over a pass of an engine, which must be current whenever an operation or its backward runs.
    pub fn new(pass: OwnedPass) -> Self {
        Self::over(Arc::new(pass))
    }

    pub(super) fn over(access: Access) -> Self {
        Self { access }
    }

    /// What the first unit takes as input: a scalar that candle differentiates to, so that backward reaches the units
    /// whose input is not an activation.
    ///
    /// # Errors
    /// Candle's.
    pub fn anchor(&self) -> Result<Tensor> {
        let anchor = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        if self.access.trains() { Ok(Var::from_tensor(&anchor)?.into_inner()) } else { Ok(anchor) }
    }

    /// Enters a unit: waits until its parameters are there and marks the place where backward leaves it.
    ///
    /// Everything in the unit must derive from the tensor returned, residual connections included.
    ///
    /// # Errors
    /// Those of the engine (see [`super::cause`]): a fatal failure, a pass of an earlier step, a unit of another chunk.
    pub fn enter(&self, unit: UnitId, input: &Tensor) -> Result<Tensor> {
        self.access.enter(unit).map_err(lift)?;
        input.contiguous()?.apply_op1(Boundary { access: Arc::clone(&self.access), unit })
    }

    /// `x W^T + b` over the last dimension: weight `[out, in]`, bias `[out]`, `x` `[.., in]`.
    ///
    /// # Errors
    /// Shapes that do not agree, and those of the engine.
    pub fn linear(&self, x: &Tensor, weight: ParamId, bias: Option<ParamId>) -> Result<Tensor> {
        let (weight, shape) = self.weight(weight)?;
        let &[outputs, inputs] = &shape[..] else {
            bail!("the weight of a linear operation has two dimensions, not {shape:?}");
        };
        let bias = bias.map(|bias| self.vector(bias, outputs, "the bias of a linear operation")).transpose()?;
        let access = Arc::clone(&self.access);
        x.contiguous()?.apply_op1(Linear { access, weight, bias, inputs, outputs })
    }

    /// Normalizes the last dimension to mean 0 and variance 1, then scales by `gamma` and shifts by `beta`.
    ///
    /// # Errors
    /// Shapes that do not agree, and those of the engine.
    pub fn layer_norm(&self, x: &Tensor, gamma: ParamId, beta: ParamId, eps: f32) -> Result<Tensor> {
        let (gamma, shape) = self.weight(gamma)?;
        let &[width] = &shape[..] else {
            bail!("the scale of a layer norm has one dimension, not {shape:?}");
        };
        let beta = self.vector(beta, width, "the shift of a layer norm")?;
        x.contiguous()?.apply_op1(LayerNorm::new(Arc::clone(&self.access), gamma, beta, width, eps))
    }

    /// Looks up rows of `table` `[rows, width]` by `ids` (u32, any shape): `[.., width]`.
    ///
    /// `input` is what [`Forward::enter`] returned for the unit; only its place in the graph matters.
    ///
    /// # Errors
    /// An id beyond the table, and those of the engine.
    pub fn embedding(&self, input: &Tensor, table: ParamId, ids: &Tensor) -> Result<Tensor> {
        let (table, shape) = self.weight(table)?;
        let &[rows, width] = &shape[..] else {
            bail!("an embedding table has two dimensions, not {shape:?}");
        };
        let mut dims = ids.dims().to_vec();
        dims.push(width);
        let ids: Vec<u32> = ids.flatten_all()?.to_vec1()?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= rows) {
            bail!("id {id} is beyond an embedding table of {rows} rows");
        }
        let access = Arc::clone(&self.access);
        input.apply_op1(Embedding { access, table, ids, width, dims })
    }

    fn weight(&self, param: ParamId) -> Result<(Weight, Vec<usize>)> {
        let (shape, trainable) = self.access.describe(param).map_err(lift)?;
        Ok((Weight { param, trainable }, shape))
    }

    fn vector(&self, param: ParamId, len: usize, what: &str) -> Result<Weight> {
        let (weight, shape) = self.weight(param)?;
        if shape != [len] {
            bail!("{what} must have the shape [{len}], not {shape:?}");
        }
        Ok(weight)
    }
}
