//! What can be wrong with a file of state, each naming the file, the thing and what to do about it.

use std::path::{Path, PathBuf};

use crate::state::StateError;

/// A file of state that could not be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
#[non_exhaustive]
pub struct StateFileError {
    /// Which file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: StateFileProblem,
}

impl StateFileError {
    pub(crate) fn new(path: &Path, problem: StateFileProblem) -> Self {
        Self { path: path.to_owned(), problem }
    }
}

/// What is wrong with a file of state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateFileProblem {
    /// It is not there, or the system does not give it.
    #[error("cannot be read: {reason}; give the path of a file that is there")]
    Unreadable {
        /// What the system said.
        reason: String,
    },
    /// The system does not take it. What was there under this name is as it was.
    #[error("cannot be written: {reason}; give a path in a folder that is there, can be written to and has room")]
    Unwritable {
        /// What the system said.
        reason: String,
    },
    /// Not of this format, or damaged where the format says what is where.
    #[error("is no safetensors file: {reason}; give a file that `State::save` wrote, or an older copy of this one")]
    NotSafetensors {
        /// What does not fit.
        reason: String,
    },
    /// The end is missing.
    #[error("has {found} bytes of {expected}: the rest was lost when it was copied; copy it again")]
    Truncated {
        /// Bytes that there should be.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// A safetensors file of something else.
    #[error("is a safetensors file, but not of optimizer state: give a file that `State::save` wrote")]
    NoState,
    /// Of another format version.
    #[error("has format version {found}, this program reads {known}: open it with the program that wrote it")]
    Version {
        /// What the file says.
        found: String,
        /// What this program reads.
        known: &'static str,
    },
    /// What all ranks share does not make sense.
    #[error("does not say what it holds: {reason}; take an older copy of it")]
    Metadata {
        /// What does not fit.
        reason: String,
    },
    /// A tensor of the list is not there.
    #[error("lacks tensor `{tensor}`, which it lists: take an older copy of it")]
    Missing {
        /// Its name in the file.
        tensor: String,
    },
    /// A tensor that is not in the list.
    #[error("has tensor `{tensor}`, which it does not list: take the file as `State::save` wrote it")]
    Unlisted {
        /// Its name in the file.
        tensor: String,
    },
    /// Another element type than f32.
    #[error("tensor `{tensor}` is {dtype}: masters and moments are F32; take the file as `State::save` wrote it")]
    DType {
        /// Its name in the file.
        tensor: String,
        /// Its element type, as the format spells it.
        dtype: String,
    },
    /// Another length than that of its piece.
    #[error("tensor `{tensor}` has {found} elements and is listed with {expected}: take an older copy of the file")]
    Length {
        /// Its name in the file.
        tensor: String,
        /// By the list.
        expected: usize,
        /// In the file.
        found: usize,
    },
    /// A number that the file could not give back.
    #[error("cannot hold {what}: every number must be finite")]
    NotFinite {
        /// What has it.
        what: String,
    },
    /// The pieces do not go together.
    #[error(transparent)]
    Pieces(#[from] StateError),
    /// It was to be a file of Megatron-LM's distributed optimizer.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Megatron(#[from] crate::state::MegatronProblem),
}
