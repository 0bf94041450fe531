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
use crate::actors::{DType, Element, ParamId, UnitId};
use crate::error::Error;
use crate::guard::{OwnedGrad, WriteMode};
use crate::owned::OwnedPass;
use crate::pass::Mode;

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

/// What an operation needs of a pass.
pub(super) trait ParamAccess: Debug + Send + Sync {
    /// Waits until the unit's parameters are there.
    fn enter(&self, unit: UnitId) -> Result<(), Error>;
    /// Backward is through with the unit.
    fn leave(&self, unit: UnitId) -> Result<(), Error>;
    /// Whether backward will follow.
    fn trains(&self) -> bool;
    /// The registered shape, and whether the parameter takes a gradient.
    fn describe(&self, param: ParamId) -> Result<(Vec<usize>, bool), Error>;
    /// Lends the elements.
    fn read(&self, param: ParamId, reader: &mut dyn FnMut(Values<'_>)) -> Result<(), Error>;
    /// Lends the gradient for one write, as f32: in place, or widened and rounded again where its dtype is a narrower one.
    fn grad(&self, param: ParamId, writer: &mut dyn FnMut(WriteMode, &mut [f32])) -> Result<(), Error>;
}

impl ParamAccess for OwnedPass {
    fn enter(&self, unit: UnitId) -> Result<(), Error> {
        self.enter(unit)
    }

    fn leave(&self, unit: UnitId) -> Result<(), Error> {
        self.leave(unit)
    }

    fn trains(&self) -> bool {
        self.mode() == Mode::Train
    }

    fn describe(&self, param: ParamId) -> Result<(Vec<usize>, bool), Error> {
        let info = self.info(param)?;
        Ok((info.shape, info.options.trainable))
    }

    fn read(&self, param: ParamId, reader: &mut dyn FnMut(Values<'_>)) -> Result<(), Error> {
        match self.dtype(param)? {
            DType::Bf16 => reader(Values::Bf16(&self.read(param)?)),
            DType::F16 => reader(Values::F16(&self.read(param)?)),
            _ => reader(Values::F32(&self.read(param)?)),
        }
        Ok(())
    }

    fn grad(&self, param: ParamId, writer: &mut dyn FnMut(WriteMode, &mut [f32])) -> Result<(), Error> {
        match self.grad_dtype(param)? {
            DType::Bf16 => through_f32(self.grad::<bf16>(param)?, writer),
            DType::F16 => through_f32(self.grad::<f16>(param)?, writer),
            _ => {
                let mut grad = self.grad::<f32>(param)?;
                writer(grad.mode(), &mut grad);
                grad.complete();
            }
        }
        Ok(())
    }
}

/// One write of a 16-bit gradient by an f32 writer.
fn through_f32<T: Element>(mut grad: OwnedGrad<T>, writer: &mut dyn FnMut(WriteMode, &mut [f32])) {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    // Taken out, not borrowed: a writer that panics leaves the next one an empty vector.
    let mut wide = SCRATCH.take();
    wide.clear();
    wide.extend(grad.iter().map(|g| g.to_f32()));
    writer(grad.mode(), &mut wide);
    grad.iter_mut().zip(&wide).for_each(|(g, w)| *g = T::from_f32(*w));
    grad.complete();
    SCRATCH.set(wide);
}

/// A parameter as an operation keeps it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weight {
    pub(super) param: ParamId,
    /// Whether it takes a gradient.
    pub(super) trainable: bool,
}

/// Lends a parameter as f32, widened where its dtype is a narrower one.
pub(super) fn with_f32<R>(
    access: &dyn ParamAccess,
    weight: Weight,
    mut body: impl FnMut(&[f32]) -> R,
) -> candle_core::Result<R> {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let mut result = None;
    access
        .read(weight.param, &mut |values| {
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

/// Writes `contribution` to a gradient that has its length, or adds it; nothing where the parameter is frozen.
pub(super) fn deliver(access: &dyn ParamAccess, weight: Weight, contribution: &[f32]) -> candle_core::Result<()> {
    if !weight.trainable {
        return Ok(());
    }
    access
        .grad(weight.param, &mut |mode, grad| match mode {
            WriteMode::Overwrite => grad.copy_from_slice(contribution),
            WriteMode::Accumulate => grad.iter_mut().zip(contribution).for_each(|(g, c)| *g += c),
        })
        .map_err(lift)
}
