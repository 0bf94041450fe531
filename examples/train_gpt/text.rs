//! The bytes to learn from, and batches of them that depend on seed, step, rank and microbatch alone.

use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::{Device, Result, Tensor};

/// Largest text: it is held in memory.
const MOST_BYTES: u64 = 1 << 30;

/// A text, every byte a token.
#[derive(Debug)]
pub(crate) struct Text {
    bytes: Vec<u8>,
}

/// Tokens to read and the tokens that follow each of them, both `[batch, seq]`.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) ids: Tensor,
    pub(crate) targets: Tensor,
}

impl Text {
    /// A file, or the sources and documents of this repository.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub(crate) fn load(file: Option<&Path>) -> std::result::Result<Self, String> {
        let mut bytes = Vec::new();
        let files = match file {
            Some(file) => vec![file.to_owned()],
            None => sources(Path::new(env!("CARGO_MANIFEST_DIR")))?,
        };
        for file in files {
            let read = std::fs::File::open(&file).and_then(|open| open.take(MOST_BYTES + 1).read_to_end(&mut bytes));
            read.map_err(|e| format!("cannot read the text {}: {e}", file.display()))?;
            if bytes.len() as u64 > MOST_BYTES {
                return Err(format!("the text {} is too large: give at most 1 GiB", file.display()));
            }
        }
        Ok(Self { bytes })
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Fails where no sequence fits, or a byte is not a token.
    ///
    /// # Errors
    /// A sentence that says what to do about it.
    pub(crate) fn check(&self, seq: usize, vocab: usize) -> std::result::Result<(), String> {
        // One more than a sequence: the last token's target.
        if self.bytes.len() <= seq {
            return Err(format!(
                "the text has {} bytes, and one sequence with its targets needs {}: give a longer text or a smaller --seq",
                self.bytes.len(),
                seq + 1
            ));
        }
        match self.bytes.iter().position(|byte| usize::from(*byte) >= vocab) {
            Some(at) => Err(format!(
                "byte {} of the text is {}, beyond a vocabulary of {vocab}: give --vocab 256",
                at, self.bytes[at]
            )),
            None => Ok(()),
        }
    }

    /// Random sequences of a text that [`Text::check`] has passed.
    ///
    /// # Errors
    /// Candle's.
    pub(crate) fn batch(&self, batch: usize, seq: usize, mut numbers: Numbers) -> Result<Batch> {
        let (mut ids, mut targets) = (Vec::with_capacity(batch * seq), Vec::with_capacity(batch * seq));
        for _ in 0..batch {
            let start = numbers.below(self.bytes.len() - seq);
            ids.extend(self.bytes[start..start + seq].iter().map(|byte| u32::from(*byte)));
            targets.extend(self.bytes[start + 1..=start + seq].iter().map(|byte| u32::from(*byte)));
        }
        let tensor = |values| Tensor::from_vec(values, (batch, seq), &Device::Cpu);
        Ok(Batch { ids: tensor(ids)?, targets: tensor(targets)? })
    }
}

/// All sources and documents below a folder, in the order of their paths.
fn sources(root: &Path) -> std::result::Result<Vec<PathBuf>, String> {
    let unreadable =
        |path: &Path, e| format!("cannot read {} (give a text with --data FILE instead): {e}", path.display());
    let (mut files, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(|e| unreadable(&folder, e))? {
            let path = entry.map_err(|e| unreadable(&folder, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let wanted = path.extension().is_some_and(|e| e == "rs" || e == "md" || e == "toml");
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.is_file() && wanted {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Reproducible random numbers: `SplitMix64`, seeded by a list of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    state: u64,
}

impl Numbers {
    /// The same list gives the same numbers; lists that differ anywhere give unrelated ones.
    pub(crate) fn of(seeds: &[u64]) -> Self {
        let mut numbers = Self { state: 0x0067_6174_6865_7266 };
        for seed in seeds {
            numbers.state ^= *seed;
            numbers.state = numbers.next();
        }
        numbers
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to just below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// Evenly from 0 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 16_777_216.0
    }

    /// Normal with mean 0 and deviation 1 (Box-Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }
}
