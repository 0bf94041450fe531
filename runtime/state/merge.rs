//! The parts of all ranks to a whole: each must be of the same state, every element must be there, and none twice.

use std::collections::HashSet;

use super::{FIELDS, Piece, State, StateError, TensorState};
use crate::actors::Range;

impl State {
    /// Makes a whole of the states of all ranks, in any order; every parameter is then one piece. A rank that owns nothing may
    /// be left out.
    ///
    /// # Errors
    /// [`StateError`]: parts of different steps, models or configurations, by what they disagree about; elements that are
    /// missing or there twice, by parameter and range.
    pub fn merge(parts: impl IntoIterator<Item = Self>) -> Result<Self, StateError> {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().ok_or(StateError::NoParts)?;
        for (number, part) in parts.enumerate() {
            whole.check_same(number + 1, &part)?;
            for (tensor, other) in whole.tensors.iter_mut().zip(part.tensors) {
                tensor.pieces.extend(other.pieces);
            }
        }
        whole.check_whole()?;
        whole.tensors.iter_mut().for_each(TensorState::join);
        Ok(whole)
    }

    fn check_same(&self, number: usize, other: &Self) -> Result<(), StateError> {
        let disagree = |what: &str, first: String, other: String| {
            Err(StateError::PartsDisagree { what: what.into(), first, number, other })
        };
        if self.steps != other.steps {
            return disagree("the number of steps", self.steps.to_string(), other.steps.to_string());
        }
        if self.scaler != other.scaler {
            return disagree("the loss scaler", format!("{:?}", self.scaler), format!("{:?}", other.scaler));
        }
        let groups = self.groups.len().max(other.groups.len());
        if let Some(group) = (0..groups).find(|group| self.groups.get(*group) != other.groups.get(*group)) {
            let shown = |state: &Self| state.groups.get(group).map_or("nothing".into(), |group| format!("{group:?}"));
            return disagree(&format!("optimizer group {group}"), shown(self), shown(other));
        }
        let tensors = self.tensors.len().max(other.tensors.len());
        for index in 0..tensors {
            let shown = |state: &Self| {
                let shown = |t: &TensorState| format!("{} of shape {:?} in group {}", t.title(), t.shape, t.group);
                state.tensors.get(index).map_or("nothing".into(), shown)
            };
            let (first, other) = (shown(self), shown(other));
            if first != other {
                return disagree(&format!("parameter number {index}"), first, other);
            }
        }
        Ok(())
    }

    /// Every element of every parameter is there once.
    pub(super) fn check_whole(&self) -> Result<(), StateError> {
        self.check_pieces()?;
        self.tensors.iter().try_for_each(TensorState::check_whole)
    }

    /// Every piece is one of its parameter, and nothing is there twice.
    pub(super) fn check_pieces(&self) -> Result<(), StateError> {
        let mut seen = HashSet::new();
        for tensor in &self.tensors {
            if !seen.insert((&tensor.name, tensor.part)) {
                return Err(StateError::ListedTwice { tensor: tensor.title() });
            }
            tensor.check_pieces()?;
        }
        Ok(())
    }
}

impl TensorState {
    /// The elements that are here, in order.
    fn ranges(&self) -> Vec<Range> {
        let mut ranges: Vec<_> = self.pieces.iter().map(Piece::range).filter(|range| !range.is_empty()).collect();
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        ranges
    }

    fn check_pieces(&self) -> Result<(), StateError> {
        let numel = self.numel().unwrap_or(usize::MAX);
        for piece in &self.pieces {
            let lengths = piece.fields().map(<[f32]>::len);
            if lengths != [lengths[0]; FIELDS] || piece.range().end > numel {
                return Err(StateError::BadPiece { tensor: self.title(), start: piece.start, lengths, numel });
            }
        }
        match self.ranges().windows(2).find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => {
                let end = pair[0].end.min(pair[1].end);
                Err(StateError::Twice { tensor: self.title(), start: pair[1].start, end })
            }
            None => Ok(()),
        }
    }

    fn check_whole(&self) -> Result<(), StateError> {
        let mut covered = 0;
        let end = Range::new(self.numel().unwrap_or(usize::MAX), usize::MAX);
        for range in self.ranges().into_iter().chain([end]) {
            if range.start > covered {
                return Err(StateError::Missing { tensor: self.title(), start: covered, end: range.start });
            }
            covered = range.end;
        }
        Ok(())
    }

    /// Makes one piece of all, which are whole.
    fn join(&mut self) {
        if self.pieces.len() == 1 {
            return;
        }
        self.pieces.sort_unstable_by_key(|piece| piece.start);
        let all = |field: usize| self.pieces.iter().flat_map(|piece| piece.fields()[field]).copied().collect();
        self.pieces = vec![Piece { start: 0, master: all(0), exp_avg: all(1), exp_avg_sq: all(2) }];
    }
}
