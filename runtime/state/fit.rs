//! Whether a model can go on from a state, which tensor each of its parameters takes, and what ranks compare of it.

use std::collections::{BTreeSet, HashMap};

use super::{FIELDS, Part, State, StateError, TensorState, tensors, title};
use crate::actors::{Fnv, Line, ParamId, Plan, PlanRank, Range};

/// Steps counted on from here for longer than anything runs still fit.
const MOST_STEPS: u64 = u64::MAX / 2;

/// A whole state that a rank can go on from.
#[derive(Debug)]
pub(crate) struct Fit<'a> {
    /// By parameter: what it takes; `None` where it is frozen.
    tensors: Vec<Option<&'a TensorState>>,
}

impl<'a> Fit<'a> {
    /// Looks whether the state is whole and of this job's model.
    pub(crate) fn new(state: &'a State, plan: &Plan, rank: PlanRank) -> Result<Self, StateError> {
        if let Some(scaler) = &state.scaler
            && !(scaler.scale.is_finite() && scaler.scale > 0.0)
        {
            return Err(StateError::BadScale { scale: scaler.scale.to_string() });
        }
        let counts = state.groups.iter().enumerate().map(|(group, g)| (format!("t of optimizer group {group}"), g.t));
        let mut counts = counts.chain([("the number of steps".to_owned(), state.steps)]);
        if let Some((what, count)) = counts.find(|(_, count)| *count > MOST_STEPS) {
            return Err(StateError::BadCount { what, count });
        }
        if state.groups.len() != plan.groups() {
            return Err(StateError::Groups { state: state.groups.len(), model: plan.groups() });
        }
        state.check_is_of(plan)?;
        state.check_whole()?;
        state.tensors.iter().try_for_each(TensorState::check_values)?;
        let found: HashMap<_, _> = state.tensors.iter().map(|tensor| ((&*tensor.name, tensor.part), tensor)).collect();
        let take = |param: &crate::actors::ParamPlan| {
            // Copies of a weight are saved as the first of them.
            let name = plan.first_name(param.id);
            found.get(&(name, Part::of(plan, rank, param))).copied().filter(|_| param.trainable)
        };
        Ok(Self { tensors: plan.params().iter().map(take).collect() })
    }

    /// Copies the elements of a range of a parameter, of one field, to `out`.
    pub(crate) fn copy(&self, param: ParamId, range: Range, field: usize, out: &mut dyn FnMut(usize, &[f32])) {
        let Some(tensor) = self.tensors[param.index()] else { return };
        for piece in &tensor.pieces {
            let Some(common) = piece.range().intersection(range) else { continue };
            out(
                common.start - range.start,
                &piece.fields()[field][common.start - piece.start..common.end - piece.start],
            );
        }
    }
}

impl State {
    /// The same parameters, of the same shapes, in the same groups and parts.
    fn check_is_of(&self, plan: &Plan) -> Result<(), StateError> {
        let wanted: Vec<TensorState> = tensors(plan).collect();
        let parts = |tensors: &[TensorState], name: &str| -> BTreeSet<Part> {
            tensors.iter().filter(|tensor| tensor.name == name).map(|tensor| tensor.part).collect()
        };
        let shown = |parts: BTreeSet<Part>| {
            let part = |part: &Part| if *part == Part::default() { "one".into() } else { part.to_string() };
            parts.iter().map(part).collect::<Vec<String>>().join("; ")
        };
        let other_parts = |name: &str| StateError::Parts {
            name: name.into(),
            state: shown(parts(&self.tensors, name)),
            model: shown(parts(&wanted, name)),
        };
        let names = |tensors: &[TensorState]| tensors.iter().map(|tensor| tensor.name.clone()).collect();
        let (here, there): (BTreeSet<String>, BTreeSet<String>) = (names(&wanted), names(&self.tensors));
        let by_key: HashMap<_, _> = self.tensors.iter().map(|tensor| ((&*tensor.name, tensor.part), tensor)).collect();
        for model in &wanted {
            let name = &model.name;
            let Some(state) = by_key.get(&(&**name, model.part)) else {
                return Err(if there.contains(name) {
                    other_parts(name)
                } else {
                    StateError::Untrained { name: name.clone() }
                });
            };
            let tensor = || title(name, model.part);
            if state.shape != model.shape {
                let (state, model) = (state.shape.clone(), model.shape.clone());
                return Err(StateError::Shape { tensor: tensor(), state, model });
            }
            if state.group != model.group {
                return Err(StateError::Group { tensor: tensor(), state: state.group, model: model.group });
            }
        }
        if let Some(name) = there.difference(&here).next() {
            return Err(StateError::Unknown { name: name.clone() });
        }
        // Every wanted one is there, so what is left has a known name and another part.
        let known: BTreeSet<_> = wanted.iter().map(|tensor| (&*tensor.name, tensor.part)).collect();
        match self.tensors.iter().find(|tensor| !known.contains(&(&*tensor.name, tensor.part))) {
            Some(tensor) => Err(other_parts(&tensor.name)),
            None => Ok(()),
        }
    }

    /// What ranks that load it compare: a line for each thing, however its pieces are cut.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let mut lines = vec![Line::new("steps of the state", self.steps.to_string())];
        let group = |(number, group)| Line::new(format!("state of optimizer group {number}"), format!("{group:?}"));
        lines.extend(self.groups.iter().enumerate().map(group));
        lines.push(Line::new("state of the loss scaler", format!("{:?}", self.scaler)));
        let hash = |tensor: &TensorState| format!("hash {:016x}", tensor.hash());
        lines.extend(self.tensors.iter().map(|t| Line::new(format!("state of {}", t.title()), hash(t))));
        lines
    }
}

impl TensorState {
    /// Adam keeps all values finite and second moments at 0 or above (SPEC T6): others are of a damaged state.
    fn check_values(&self) -> Result<(), StateError> {
        for piece in &self.pieces {
            for (values, (what, least)) in piece.fields().into_iter().zip([
                ("master", f32::MIN),
                ("first moment", f32::MIN),
                ("second moment", 0.0),
            ]) {
                let bad = values.iter().position(|value| !(value.is_finite() && *value >= least));
                if let Some(at) = bad {
                    let (element, value) = (piece.start + at, values[at].to_string());
                    return Err(StateError::BadValue { tensor: self.title(), element, what, value });
                }
            }
        }
        Ok(())
    }

    fn hash(&self) -> u64 {
        let mut pieces: Vec<_> = self.pieces.iter().collect();
        pieces.sort_unstable_by_key(|piece| piece.start);
        let mut hash = Fnv::new();
        for field in 0..FIELDS {
            for value in pieces.iter().flat_map(|piece| piece.fields()[field]) {
                hash.bytes(&value.to_le_bytes());
            }
        }
        hash.finish()
    }
}
