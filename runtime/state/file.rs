//! State in files (SPEC D1), in the safetensors format, which Python reads too.
//!
//! | in the file | what it is |
//! | --- | --- |
//! | tensors `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` | f32; of a whole in the shape of parameter NAME |
//! | `master @128/NAME` | the piece of a part that begins at element 128 of the flattened parameter |
//! | `master (experts 1) @128/NAME` | the same, of one of several parameters of that name ([`Part`]) |
//! | metadata `gatherflow.version` | the version of this format, "1" |
//! | metadata `gatherflow.state` | JSON: steps, groups, scaler, and all tensors with shape, group, part and pieces |
//!
//! A file is written beside its place, synced and renamed, so there is never half of one under its name. It is read and written
//! piece by piece, and nothing is allocated that the file's own length does not vouch for.

mod error;

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::{FIELDS, GroupState, Part, Piece, ScalerState, State, TensorState};
pub use error::{StateFileError, StateFileProblem};

const VERSION: &str = "1";
const VERSION_KEY: &str = "gatherflow.version";
const STATE_KEY: &str = "gatherflow.state";
const FIELD_NAMES: [&str; FIELDS] = ["master", "exp_avg", "exp_avg_sq"];
/// The largest header of the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Elements that are converted at a time.
const CHUNK_NUMEL: usize = 1 << 14;

/// A state without its elements.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    steps: u64,
    groups: Vec<GroupState>,
    #[serde(default)]
    scaler: Option<ScalerState>,
    tensors: Vec<Listed>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    name: String,
    shape: Vec<usize>,
    group: usize,
    part: Part,
    /// First element, and one past the last.
    pieces: Vec<(usize, usize)>,
}

impl State {
    /// Writes a part or a whole to a safetensors file. A file of that name is replaced at once when the new one is complete and
    /// on disk; until then, and after any failure, it is as it was.
    ///
    /// ```
    /// # use gatherflow::{Config, DType, Engine, Model, Ranks, State};
    /// # let mut model = Model::new();
    /// # let chunk = model.chunk();
    /// # let unit = model.unit(chunk, "layer")?;
    /// # model.param(unit, "w", &[100], DType::Bf16)?;
    /// # let rank = Ranks::local(1)?.remove(0);
    /// # let engine = Engine::new(rank, model, Config::new(), |_, out| out.fill_with(|_| 0.5))?;
    /// # let path = std::env::temp_dir().join(format!("gatherflow-{}.safetensors", std::process::id()));
    /// engine.state()?.save(&path)?; // each rank its part, or one of them the whole of all
    /// let whole = State::merge([State::open(&path)?])?;
    /// assert_eq!(whole.tensors[0].pieces[0].master, [0.5; 100]);
    /// # std::fs::remove_file(path).expect("it is there");
    /// # Ok::<(), gatherflow::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`StateFileError`]: the system's refusal, or state that no engine gave.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), StateFileError> {
        let path = path.as_ref();
        self.write(path).map_err(|problem| StateFileError::new(path, problem))
    }

    /// Reads a part or a whole that [`State::save`] wrote, bit for bit. Parts become a whole by [`State::merge`].
    ///
    /// # Errors
    /// [`StateFileError`] names the file, what is wrong with it and what to do.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StateFileError> {
        let path = path.as_ref();
        read(path).map_err(|problem| StateFileError::new(path, problem))
    }

    fn write(&self, path: &Path) -> Result<(), StateFileProblem> {
        let unwritable = |e: std::io::Error| StateFileProblem::Unwritable { reason: e.to_string() };
        self.check_pieces()?;
        self.check_finite()?;
        let header = self.header()?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        builder.prefix(".gatherflow-").suffix(".tmp");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less what the umask takes away
        let file = builder.tempfile_in(folder).map_err(unwritable)?;
        self.write_to(file.as_file(), &header).and_then(|()| file.as_file().sync_all()).map_err(unwritable)?;
        file.persist(path).map_err(|e| unwritable(e.error))?;
        #[cfg(unix)]
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(unwritable)?;
        Ok(())
    }

    fn write_to(&self, file: &File, header: &str) -> std::io::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut bytes = vec![0; CHUNK_NUMEL * 4];
        for (_, piece, field) in self.stored() {
            for values in piece.fields()[field].chunks(CHUNK_NUMEL) {
                let bytes = &mut bytes[..values.len() * 4];
                bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
                out.write_all(bytes)?;
            }
        }
        out.flush()
    }

    /// What is stored, in the order of the file.
    fn stored(&self) -> impl Iterator<Item = (&TensorState, &Piece, usize)> {
        (0..FIELDS).flat_map(move |field| {
            let of_tensor = move |tensor| pieces(tensor).map(move |piece| (tensor, piece, field));
            self.tensors.iter().flat_map(of_tensor)
        })
    }

    /// The header of the file, padded as the format likes it.
    fn header(&self) -> Result<String, StateFileProblem> {
        let listed = |tensor: &TensorState| Listed {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            group: tensor.group,
            part: tensor.part,
            pieces: pieces(tensor).map(|piece| (piece.range().start, piece.range().end)).collect(),
        };
        let header = Header {
            steps: self.steps,
            groups: self.groups.clone(),
            scaler: self.scaler,
            tensors: self.tensors.iter().map(listed).collect(),
        };
        let mut at = 0;
        let infos = self.stored().map(|(tensor, piece, field)| {
            let (range, start) = (piece.range(), at);
            at += range.len() * 4;
            let shape = if tensor.numel() == Some(range.len()) { tensor.shape.clone() } else { vec![range.len()] };
            let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, at) };
            (stored_name(field, tensor.part, range.start, &tensor.name), info)
        });
        let unfit = |e: String| StateFileProblem::Unwritable { reason: e };
        let json = serde_json::to_string(&header).map_err(|e| unfit(e.to_string()))?;
        let shared = [(VERSION_KEY.to_owned(), VERSION.to_owned()), (STATE_KEY.to_owned(), json)];
        let metadata = Metadata::new(Some(shared.into_iter().collect()), infos.collect());
        let metadata = metadata.map_err(|e| unfit(e.to_string()))?;
        let mut text = serde_json::to_string(&metadata).map_err(|e| unfit(e.to_string()))?;
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        if text.len() as u64 > MAX_HEADER_BYTES {
            return Err(unfit("more parameters than a safetensors file can name".into()));
        }
        Ok(text)
    }

    /// JSON has no other numbers.
    fn check_finite(&self) -> Result<(), StateFileProblem> {
        let of_group = |group: &GroupState| {
            let GroupState { t: _, lr, lr_multiplier, betas, eps, weight_decay, adam_w: _ } = group;
            [*lr, *lr_multiplier, betas.0, betas.1, *eps, *weight_decay].iter().all(|x| x.is_finite())
        };
        let what = match (self.groups.iter().find(|group| !of_group(group)), self.scaler) {
            (Some(group), _) => format!("{group:?}"),
            (None, Some(scaler)) if !scaler.scale.is_finite() => format!("{scaler:?}"),
            _ => return Ok(()),
        };
        Err(StateFileProblem::NotFinite { what })
    }
}

/// The pieces that hold something.
fn pieces(tensor: &TensorState) -> impl Iterator<Item = &Piece> {
    tensor.pieces.iter().filter(|piece| !piece.range().is_empty())
}

/// No two of them are alike: neither field nor part nor start has a slash.
fn stored_name(field: usize, part: Part, start: usize, name: &str) -> String {
    let part = if part == Part::default() { String::new() } else { format!(" ({part})") };
    let start = if start == 0 { String::new() } else { format!(" @{start}") };
    format!("{}{part}{start}/{name}", FIELD_NAMES[field])
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` hands it over
pub(super) fn unreadable(e: std::io::Error) -> StateFileProblem {
    StateFileProblem::Unreadable { reason: e.to_string() }
}

fn read(path: &Path) -> Result<State, StateFileProblem> {
    let mut file = File::open(path).map_err(unreadable)?;
    let (metadata, data_start) = read_metadata(&mut file)?;
    let header = header_of(&metadata)?;
    check_listed(&header, &metadata)?;
    let mut tensors = Vec::new();
    for Listed { name, shape, group, part, pieces: ranges } in header.tensors {
        let mut pieces = Vec::new();
        for (start, end) in ranges {
            let mut field = |field| {
                let stored = stored_name(field, part, start, &name);
                read_values(&mut file, data_start, &metadata, stored, end.saturating_sub(start))
            };
            pieces.push(Piece { start, master: field(0)?, exp_avg: field(1)?, exp_avg_sq: field(2)? });
        }
        tensors.push(TensorState { name, shape, group, part, pieces });
    }
    let state = State { steps: header.steps, groups: header.groups, scaler: header.scaler, tensors };
    state.check_pieces()?;
    Ok(state)
}

/// What the format says of its tensors, and where their data begins.
fn read_metadata(file: &mut File) -> Result<(Metadata, u64), StateFileProblem> {
    let not_safetensors = |reason: String| StateFileProblem::NotSafetensors { reason };
    let found = file.metadata().map_err(unreadable)?.len();
    let mut length = [0; 8];
    if found < length.len() as u64 {
        return Err(not_safetensors(format!("it has {found} bytes")));
    }
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(not_safetensors(format!("its header would have {length} bytes")));
    }
    let data_start = 8 + length;
    if data_start > found {
        return Err(StateFileProblem::Truncated { expected: data_start, found });
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|e| not_safetensors(e.to_string()))?;
    let expected = data_start.saturating_add(metadata.data_len() as u64);
    match found.cmp(&expected) {
        Ordering::Less => Err(StateFileProblem::Truncated { expected, found }),
        Ordering::Equal => Ok((metadata, data_start)),
        Ordering::Greater => Err(not_safetensors(format!("it has {found} bytes, its tensors end at {expected}"))),
    }
}

fn header_of(metadata: &Metadata) -> Result<Header, StateFileProblem> {
    let shared = metadata.metadata().as_ref();
    let version = shared.and_then(|shared| shared.get(VERSION_KEY)).ok_or(StateFileProblem::NoState)?;
    if version != VERSION {
        return Err(StateFileProblem::Version { found: version.clone(), known: VERSION });
    }
    let json = shared.and_then(|shared| shared.get(STATE_KEY));
    let json = json.ok_or_else(|| StateFileProblem::Metadata { reason: format!("`{STATE_KEY}` is missing") })?;
    serde_json::from_str(json).map_err(|e| StateFileProblem::Metadata { reason: format!("`{STATE_KEY}`: {e}") })
}

/// The list and the tensors of the file are the same, and nothing is listed twice.
fn check_listed(header: &Header, metadata: &Metadata) -> Result<(), StateFileProblem> {
    let mut listed = HashSet::new();
    for Listed { name, part, pieces, .. } in &header.tensors {
        for ((start, _), field) in pieces.iter().flat_map(|piece| (0..FIELDS).map(move |field| (*piece, field))) {
            let tensor = stored_name(field, *part, start, name);
            if metadata.info(&tensor).is_none() {
                return Err(StateFileProblem::Missing { tensor });
            }
            if let Some(tensor) = listed.replace(tensor) {
                return Err(StateFileProblem::Metadata { reason: format!("it lists tensor `{tensor}` twice") });
            }
        }
    }
    match metadata.offset_keys().into_iter().find(|tensor| !listed.contains(tensor)) {
        Some(tensor) => Err(StateFileProblem::Unlisted { tensor }),
        None => Ok(()),
    }
}

/// The format has checked that its tensors lie within the file and are as long as their shapes.
fn read_values(
    file: &mut File,
    data_start: u64,
    metadata: &Metadata,
    tensor: String,
    expected: usize,
) -> Result<Vec<f32>, StateFileProblem> {
    let Some(info) = metadata.info(&tensor) else { return Err(StateFileProblem::Missing { tensor }) };
    if info.dtype != Dtype::F32 {
        return Err(StateFileProblem::DType { tensor, dtype: info.dtype.to_string() });
    }
    let (start, end) = info.data_offsets;
    let found = (end - start) / 4;
    if found != expected {
        return Err(StateFileProblem::Length { tensor, expected, found });
    }
    file.seek(SeekFrom::Start(data_start + start as u64)).map_err(unreadable)?;
    let mut values = Vec::with_capacity(expected);
    let mut bytes = vec![0; expected.min(CHUNK_NUMEL) * 4];
    while values.len() < expected {
        let bytes = &mut bytes[..(expected - values.len()).min(CHUNK_NUMEL) * 4];
        file.read_exact(bytes).map_err(unreadable)?;
        values.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
    }
    Ok(values)
}
