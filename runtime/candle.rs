//! The candle adapter (feature `candle`): parameters live in the engine, activations in candle tensors.
//!
//! A model built here owns no weights. [`Forward`] wraps one owned pass and offers the operations that need parameters
//! ([`Forward::linear`], [`Forward::layer_norm`], [`Forward::embedding`]); each is a custom operation *on the activation*
//! that reads its parameter in place, in its own dtype, and whose backward multiplies straight into the engine's f32
//! gradient: no copy of a weight, no entry in candle's gradient store, and gradients that arrive one by one while
//! [`candle_core::Tensor::backward`] still runs. Operations without parameters may be candle's own; [`attention`],
//! [`gelu`] and [`cross_entropy`] are fused ones that cost a fraction of the same arithmetic in single steps.
//!
//! ```no_run
//! use candle_core::Tensor;
//! use gatherflow::candle::{Forward, cross_entropy};
//! use gatherflow::{ChunkId, Engine, Mode, ParamId, UnitId};
//!
//! # type Done = Result<(), Box<dyn std::error::Error>>;
//! fn microbatch(engine: &Engine, chunk: ChunkId, unit: UnitId, table: ParamId, ids: &Tensor, targets: &Tensor) -> Done {
//!     let forward = Forward::new(engine.owned_pass(chunk, 0, true, Mode::Train)?);
//!     let x = forward.enter(unit, &forward.anchor()?)?; // waits for the unit's parameters
//!     let x = forward.embedding(&x, table, ids)?;
//!     // More units, each begun with `forward.enter(unit, &x)?`.
//!     let logits = forward.linear(&x, table, None)?;
//!     cross_entropy(&logits, targets)?.backward()?; // gradients are delivered inside
//!     Ok(())
//! }
//! ```
//!
//! A program that has its own layers and `Var`s already takes the other road, [`VarOptimizer`]: a few changed lines instead
//! of another forward, at the price of copies and of the overlap.
//!
//! # Rules
//! - A unit begins with [`Forward::enter`] on its input. In backward the same place is where the unit is left: everything
//!   derived from the tensor that `enter` returned is done by then.
//! - Gradients: the first write of a step overwrites, later ones add (P8), so a weight may be used several times (a tied
//!   output head: [`Model::use_param`](crate::Model::use_param) tells the engine), and it is complete when backward has left
//!   all units that use it.
//! - Activations are f32 on the CPU; parameters are f32, bf16 or f16 and are widened exactly.
//! - Errors of the engine travel inside candle's error and come out again with [`cause`].
//! - Everything runs on the calling thread. Candle's own matrix products do not: set `RAYON_NUM_THREADS=1` where ranks
//!   share a machine.

// Loops are compiled per instruction set only where they are inlined into the closure that is.
#![allow(clippy::inline_always)]

mod access;
mod attention;
mod boundary;
mod embedding;
mod error;
mod forward;
mod gelu;
mod linear;
mod loss;
mod norm;
mod simd;
mod storage;
#[cfg(test)]
mod tests;
mod vars;

pub use attention::attention;
pub use error::cause;
pub use forward::Forward;
pub use gelu::gelu;
pub use loss::cross_entropy;
pub use vars::VarOptimizer;
