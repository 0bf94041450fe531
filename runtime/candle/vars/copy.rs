//! The two copies of the on-ramp: a gradient tensor into the main gradient, parameters into a `Var`.
//!
//! Each touches every element once. A gradient may have any strides (that of a weight used through `t()` is transposed);
//! it is widened to f32 on the way, exactly. A `Var` is written in place.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;

use crate::actors::Element;
use crate::candle::access::Values;
use crate::guard::WriteMode;

/// Rows and columns of a tile of a two-dimensional gradient: both sides stay in the first-level cache.
const TILE: usize = 32;

/// Writes the gradient to `main`, or adds it.
pub(super) fn gradient_to_main(gradient: &Tensor, mode: WriteMode, main: &mut [f32]) -> Result<()> {
    let (storage, layout) = gradient.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            deliver(values, gradient, layout, mode, main, <[f32]>::copy_from_slice);
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            deliver(values, gradient, layout, mode, main, |main, values| values.convert_to_f32_slice(main));
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            deliver(values, gradient, layout, mode, main, |main, values| values.convert_to_f32_slice(main));
        }
        _ => bail!("a gradient must be f32, bf16 or f16 on the CPU"),
    }
    Ok(())
}

fn deliver<T: Element>(
    values: &[T],
    gradient: &Tensor,
    layout: &Layout,
    mode: WriteMode,
    main: &mut [f32],
    assign: impl FnOnce(&mut [f32], &[T]),
) {
    match (layout.contiguous_offsets(), mode) {
        (Some((start, end)), WriteMode::Overwrite) => assign(main, &values[start..end]),
        (Some((start, end)), WriteMode::Accumulate) => {
            main.iter_mut().zip(&values[start..end]).for_each(|(main, value)| *main += value.to_f32());
        }
        (None, WriteMode::Overwrite) => visit(gradient, layout, |to, from| main[to] = values[from].to_f32()),
        (None, WriteMode::Accumulate) => visit(gradient, layout, |to, from| main[to] += values[from].to_f32()),
    }
}

/// Calls `each(index in row-major order, index in storage)` for every element.
fn visit(tensor: &Tensor, layout: &Layout, mut each: impl FnMut(usize, usize)) {
    let (&[rows, columns], &[down, right]) = (layout.dims(), layout.stride()) else {
        return tensor.strided_index().enumerate().for_each(|(to, from)| each(to, from));
    };
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    each(row * columns + column, layout.start_offset() + row * down + column * right);
                }
            }
        }
    }
}

/// The elements that a `Var` is set to, in its own dtype.
#[derive(Debug)]
pub(super) struct Fill<'a>(pub(super) Values<'a>);

impl InplaceOp1 for Fill<'_> {
    fn name(&self) -> &'static str {
        "gatherflow-fill"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match (self.0, storage) {
            (Values::F32(values), CpuStorage::F32(out)) => fill(values, out, layout),
            (Values::Bf16(values), CpuStorage::BF16(out)) => fill(values, out, layout),
            (Values::F16(values), CpuStorage::F16(out)) => fill(values, out, layout),
            (values, _) => bail!("the Var does not have the dtype of its parameter {values:?}"),
        }
    }
}

fn fill<T: Copy>(values: &[T], out: &mut [T], layout: &Layout) -> Result<()> {
    match layout.contiguous_offsets() {
        Some((start, end)) if end - start == values.len() => out[start..end].copy_from_slice(values),
        _ => bail!("a Var of {} contiguous elements was expected, not {layout:?}", values.len()),
    }
    Ok(())
}
