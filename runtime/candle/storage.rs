//! From candle's tensors to slices and back, without copies.

use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// The f32 elements of a contiguous storage.
pub(super) fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let CpuStorage::F32(values) = storage else {
        bail!("activations are f32, not {:?}", storage_dtype(storage));
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("the operation needs a contiguous activation, not {layout:?}");
    };
    Ok(&values[start..end])
}

fn storage_dtype(storage: &CpuStorage) -> candle_core::DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

/// Lends the elements of a tensor, made contiguous first where it is not.
pub(super) fn with_elements<R>(tensor: &Tensor, body: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => body(elements(storage, layout)?),
        _ => bail!("activations must be on the CPU"),
    }
}

/// A tensor that owns `values`.
pub(super) fn tensor(values: Vec<f32>, shape: &Shape) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// The pair that a custom operation's forward returns.
pub(super) fn output(values: Vec<f32>, shape: impl Into<Shape>) -> (CpuStorage, Shape) {
    (CpuStorage::F32(values), shape.into())
}

/// Rows and columns of an activation whose last dimension is `width`.
pub(super) fn rows_of(shape: &Shape, width: usize, what: &str) -> Result<usize> {
    match shape.dims().last() {
        Some(&last) if last == width && width > 0 => Ok(shape.elem_count() / width),
        _ => bail!("{what} takes activations whose last dimension is {width}, not {shape:?}"),
    }
}
