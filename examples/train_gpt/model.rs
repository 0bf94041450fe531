//! The GPT: what is registered with the engine, and the forward pass over the candle adapter.
//!
//! Units in forward order: the embeddings, attention and feed-forward of each layer, the head. Norms come first in their
//! unit and residual connections go around it.

use candle_core::{Device, Result, Tensor};
use gatherflow::candle::{Forward, attention, cross_entropy, gelu};
use gatherflow::{
    ChunkId, DType, Group, GroupId, Model, ModelError, ParamId, ParamInfo, ParamMut, ParamOptions, UnitId,
};

use crate::text::{Batch, Numbers};

const EPS: f32 = 1e-5;

/// The shape of a GPT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) vocab: usize,
    pub(crate) seq: usize,
}

impl Shape {
    /// The number of heads that makes their size come closest to 64.
    fn heads(&self) -> usize {
        let sizes = (1..=self.width).filter(|size| self.width.is_multiple_of(*size));
        self.width / sizes.min_by_key(|size| size.abs_diff(64)).unwrap_or(self.width)
    }
}

#[derive(Clone, Debug)]
struct Affine {
    weight: ParamId,
    bias: ParamId,
}

/// A norm and two projections: half a layer.
#[derive(Clone, Debug)]
struct Half {
    unit: UnitId,
    norm: Affine,
    inner: Affine,
    outer: Affine,
}

/// A registered GPT.
#[derive(Clone, Debug)]
pub(crate) struct Gpt {
    pub(crate) chunk: ChunkId,
    heads: usize,
    seq: usize,
    embed: UnitId,
    table: ParamId,
    positions: ParamId,
    layers: Vec<(Half, Half)>,
    head: UnitId,
    head_norm: Affine,
    head_weight: ParamId,
}

/// Registers parameters of one dtype; vectors go to a group without weight decay.
struct Registration<'m> {
    model: &'m mut Model,
    dtype: DType,
    undecayed: GroupId,
}

impl Registration<'_> {
    fn matrix(&mut self, unit: UnitId, name: String, shape: [usize; 2]) -> std::result::Result<ParamId, ModelError> {
        self.model.param(unit, name, &shape, self.dtype)
    }

    fn vector(&mut self, unit: UnitId, name: String, len: usize) -> std::result::Result<ParamId, ModelError> {
        let options = ParamOptions { group: self.undecayed, ..ParamOptions::default() };
        self.model.param_with(unit, name, &[len], self.dtype, options)
    }

    fn norm(&mut self, unit: UnitId, name: &str, width: usize) -> std::result::Result<Affine, ModelError> {
        let weight = self.vector(unit, format!("{name}.norm.scale"), width)?;
        Ok(Affine { weight, bias: self.vector(unit, format!("{name}.norm.shift"), width)? })
    }

    fn affine(&mut self, unit: UnitId, name: &str, shape: [usize; 2]) -> std::result::Result<Affine, ModelError> {
        let weight = self.matrix(unit, format!("{name}.weight"), shape)?;
        Ok(Affine { weight, bias: self.vector(unit, format!("{name}.bias"), shape[0])? })
    }

    fn half(
        &mut self,
        chunk: ChunkId,
        name: &str,
        width: usize,
        inner: usize,
        middle: usize,
    ) -> std::result::Result<Half, ModelError> {
        let unit = self.model.unit(chunk, name)?;
        Ok(Half {
            unit,
            norm: self.norm(unit, name, width)?,
            inner: self.affine(unit, &format!("{name}.in"), [inner, width])?,
            outer: self.affine(unit, &format!("{name}.out"), [width, middle])?,
        })
    }
}

impl Gpt {
    /// Registers all parameters in forward order.
    ///
    /// # Errors
    /// What the engine refuses, by name.
    pub(crate) fn register(model: &mut Model, shape: Shape, dtype: DType) -> std::result::Result<Self, ModelError> {
        let Shape { layers, width, vocab, seq } = shape;
        let undecayed = model.group(Group { weight_decay: Some(0.0), ..Group::default() })?;
        let chunk = model.chunk();
        let mut new = Registration { model, dtype, undecayed };
        let embed = new.model.unit(chunk, "embed")?;
        let table = new.matrix(embed, "embed.table".to_owned(), [vocab, width])?;
        let positions = new.matrix(embed, "embed.positions".to_owned(), [seq, width])?;
        let halves = (0..layers).map(|layer| {
            let attention = new.half(chunk, &format!("layer{layer}.attention"), width, 3 * width, width)?;
            Ok((attention, new.half(chunk, &format!("layer{layer}.feed_forward"), width, 4 * width, 4 * width)?))
        });
        let layers = halves.collect::<std::result::Result<_, ModelError>>()?;
        let head = new.model.unit(chunk, "head")?;
        let head_norm = new.norm(head, "head", width)?;
        let head_weight = new.matrix(head, "head.weight".to_owned(), [vocab, width])?;
        let heads = shape.heads();
        Ok(Self { chunk, heads, seq, embed, table, positions, layers, head, head_norm, head_weight })
    }

    /// Mean loss of a batch, in nats per token.
    ///
    /// # Errors
    /// Candle's, which may carry one of the engine.
    pub(crate) fn loss(&self, forward: &Forward, batch: &Batch) -> Result<Tensor> {
        let x = forward.enter(self.embed, &forward.anchor()?)?;
        let positions: Vec<u32> = (0..self.seq as u32).collect();
        let positions = Tensor::from_vec(positions.repeat(batch.ids.dim(0)?), batch.ids.shape(), &Device::Cpu)?;
        let mut x =
            (forward.embedding(&x, self.table, &batch.ids)? + forward.embedding(&x, self.positions, &positions)?)?;
        for (attend, feed) in &self.layers {
            x = attend.forward(forward, &x, |h| attention(h, self.heads))?;
            x = feed.forward(forward, &x, gelu)?;
        }
        let x = forward.enter(self.head, &x)?;
        let x = forward.layer_norm(&x, self.head_norm.weight, self.head_norm.bias, EPS)?;
        cross_entropy(&forward.linear(&x, self.head_weight, None)?, &batch.targets)
    }
}

impl Half {
    fn forward(&self, forward: &Forward, x: &Tensor, middle: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = forward.enter(self.unit, x)?;
        let h = forward.layer_norm(&x, self.norm.weight, self.norm.bias, EPS)?;
        let h = middle(&forward.linear(&h, self.inner.weight, Some(self.inner.bias))?)?;
        x + forward.linear(&h, self.outer.weight, Some(self.outer.bias))?
    }
}

/// Initial values of a parameter: normal with deviation 0.02, smaller where a residual connection ends; norms are
/// identities and biases zero.
pub(crate) fn initialize(info: &ParamInfo, out: ParamMut<'_>, seed: u64, layers: usize) {
    let mut numbers = Numbers::of(&[seed, 1, u64::from(info.id.0)]);
    let residual = if info.name.ends_with(".out.weight") { 1.0 / (2.0 * layers as f32).sqrt() } else { 1.0 };
    match info.shape.len() {
        1 => {
            let value = if info.name.ends_with("norm.scale") { 1.0 } else { 0.0 };
            out.fill_with(|_| value);
        }
        _ => out.fill_with(|_| 0.02 * residual * numbers.normal()),
    }
}
