//! How an operation reaches its parameters: the owned pass, behind a small trait.
//!
//! The trait exists so that the arithmetic of every operation is tested against candle's own autograd with plain memory
//! behind it, without an engine. Closures instead of guards keep it object-safe and make it impossible for an operation
//! to hold a guard past its own end (V3).

use std::cell::RefCell;
use std::fmt::Debug;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::error::lift;
use super::simd::simd;

/// PLACEHOLDER
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub u32);
/// PLACEHOLDER
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(pub u32);
/// PLACEHOLDER
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

/// A parameter's elements in its own dtype.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values<'a> {
    /// Used in place.
    F32(&'a [f32]),
    /// Widened into a scratch buffer.
    Bf16(&'a [bf16]),
    /// Widened into a scratch buffer.
    F16(&'a [f16]),
}

/// What a gradient holds when an operation gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Nothing of this step: the operation writes every element.
    Nothing,
    /// Earlier contributions: the operation adds.
    Contributions,
}

/// What an operation needs of a pass.
pub(super) trait ParamAccess: Debug + Send + Sync {
    /// Waits until the unit's parameters are there.
    fn enter(&self, unit: UnitId) -> Result<(), Error>;
    /// Backward is through with the unit.
    fn leave(&self, unit: UnitId) -> Result<(), Error>;
    /// Whether backward will follow.
    fn trains(&self) -> bool;
    /// The registered shape.
    fn shape(&self, param: ParamId) -> Result<Vec<usize>, Error>;
    /// Whether the parameter takes a gradient.
    fn trainable(&self, param: ParamId) -> bool;
    /// Lends the elements.
    fn read(&self, param: ParamId, reader: &mut dyn FnMut(Values<'_>)) -> Result<(), Error>;
    /// Lends the f32 gradient; `last` completes it afterwards.
    fn grad(&self, param: ParamId, last: bool, writer: &mut dyn FnMut(Before, &mut [f32])) -> Result<(), Error>;
}

/// Lends a parameter as f32, widened where its dtype is a narrower one.
pub(super) fn with_f32<R>(
    access: &dyn ParamAccess,
    param: ParamId,
    mut body: impl FnMut(&[f32]) -> R,
) -> candle_core::Result<R> {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let mut result = None;
    access
        .read(param, &mut |values| {
            result = Some(if let Values::F32(values) = values {
                body(values)
            } else {
                // Taken out, not borrowed: the body may need a second parameter.
                let mut scratch = SCRATCH.take();
                let wide = widen(values, &mut scratch);
                let value = body(wide);
                SCRATCH.set(scratch);
                value
            });
        })
        .map_err(lift)?;
    result.ok_or_else(|| candle_core::Error::msg("a parameter was not lent"))
}

fn widen<'a>(values: Values<'a>, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let len = match values {
        Values::F32(values) => return values,
        Values::Bf16(values) => values.len(),
        Values::F16(values) => values.len(),
    };
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    let wide = &mut scratch[..len];
    match values {
        Values::F32(_) => {}
        Values::Bf16(values) => widen_bf16(values, wide),
        Values::F16(values) => values.convert_to_f32_slice(wide),
    }
    wide
}

fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    simd(
        #[inline(always)]
        || {
            for (wide, narrow) in to.iter_mut().zip(from) {
                *wide = f32::from_bits(u32::from(narrow.to_bits()) << 16);
            }
        },
    );
}

/// Writes `contribution` to a gradient that has its length, or adds it.
pub(super) fn deliver(
    access: &dyn ParamAccess,
    param: ParamId,
    last: bool,
    contribution: &[f32],
) -> candle_core::Result<()> {
    access
        .grad(param, last, &mut |before, grad| match before {
            Before::Nothing => grad.copy_from_slice(contribution),
            Before::Contributions => grad.iter_mut().zip(contribution).for_each(|(g, c)| *g += c),
        })
        .map_err(lift)
}
