//! A file of `torch.save`: a zip archive, not compressed, of a pickle and of one file for each storage.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use zip::ZipArchive;

use super::error::MegatronProblem;
use super::pickle::{Pickle, Tensor, Value};
use crate::state::StateFileProblem;
use crate::state::file::unreadable;

/// A pickle names tensors, about 100 bytes each. Values that it makes take up to 64 times its bytes.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

pub(super) struct TorchFile {
    archive: ZipArchive<BufReader<File>>,
    bytes: u64,
    /// The folder that everything lies in, with its slash.
    folder: String,
    pub(super) pickle: Pickle,
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` hands it over
fn not_torch(reason: impl ToString) -> MegatronProblem {
    MegatronProblem::NotTorch { reason: reason.to_string() }
}

impl TorchFile {
    pub(super) fn open(path: &Path) -> Result<Self, StateFileProblem> {
        let file = File::open(path).map_err(unreadable)?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        let mut archive = ZipArchive::new(BufReader::new(file)).map_err(not_torch)?;
        let folder = archive.file_names().find_map(|name| name.ok()?.strip_suffix("data.pkl").map(str::to_owned));
        let folder = folder.ok_or_else(|| not_torch("it has no `data.pkl`"))?;
        let entry = |name: &str| format!("{folder}{name}");
        let order = match archive.index_for_name(&entry("byteorder")) {
            Some(_) => read(&mut archive, &entry("byteorder"), 100)?,
            None => b"little".to_vec(),
        };
        if order != b"little" {
            return Err(not_torch("it was saved on a machine of another byte order").into());
        }
        let pickle = Pickle::parse(&read(&mut archive, &entry("data.pkl"), bytes.min(MAX_PICKLE_BYTES))?)?;
        Ok(Self { archive, bytes, folder, pickle })
    }

    /// The elements of a flat tensor, which may lie anywhere in its storage, or nothing if there are not so many.
    pub(super) fn read(&mut self, tensor: Tensor, numel: usize) -> Result<Vec<f32>, String> {
        let Tensor { storage, offset, stride, .. } = tensor;
        let kind = match self.pickle.value(storage.kind) {
            Value::Global(name) => name,
            _ => "unknown",
        };
        if kind != "torch.FloatStorage" {
            return Err(format!("its storage is {kind}, not torch.FloatStorage"));
        }
        let stride = self.pickle.flat(stride).ok_or("its stride is not that of a flat tensor")?;
        let last = numel.saturating_sub(1).checked_mul(stride).and_then(|last| last.checked_add(offset));
        if !last.is_some_and(|last| last < storage.numel || numel == 0) {
            return Err(format!("it ends beyond its storage of {} elements", storage.numel));
        }
        let Value::Text(key) = self.pickle.value(storage.key) else { return Err("its storage has no name".into()) };
        let name = format!("{}data/{key}", self.folder);
        let bytes = read(&mut self.archive, &name, self.bytes).map_err(|e| e.to_string())?;
        let stored = bytes.as_chunks::<4>().0;
        if stored.len() < storage.numel {
            return Err(format!("`{name}` has {} bytes, for {} elements", bytes.len(), storage.numel));
        }
        Ok((0..numel).map(|i| f32::from_le_bytes(stored[offset + i * stride])).collect())
    }

    /// How many elements a flat tensor has.
    pub(super) fn numel(&self, tensor: Tensor) -> Result<usize, String> {
        self.pickle.flat(tensor.shape).ok_or_else(|| "it is not flat".into())
    }
}

/// A whole file of the archive, whose checksum is right.
fn read(archive: &mut ZipArchive<BufReader<File>>, name: &str, most: u64) -> Result<Vec<u8>, MegatronProblem> {
    let broken = |e: &dyn std::fmt::Display| not_torch(format!("`{name}`: {e}"));
    let entry = archive.by_name(name).map_err(|e| broken(&e))?;
    let size = entry.size();
    if size > most {
        return Err(broken(&format!("{size} bytes, more than {most}")));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    entry.take(most + 1).read_to_end(&mut bytes).map_err(|e| broken(&e))?;
    Ok(bytes)
}
