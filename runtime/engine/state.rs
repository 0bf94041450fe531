//! The optimizer's state out of an engine and into another one, in memory (SPEC D1).
//!
//! A rank reads and writes what it owns of its buckets, and knows it by parameter, so the engine that loads may have been cut
//! in any other way. Loading needs no collective: every rank has the whole, so it writes all of its parameters itself. Ranks
//! compare what they load first (a hash of each tensor), as they do for [`Engine::reload_masters`], so that a difference is an
//! error on all of them and changes nothing.

use std::sync::Arc;

use super::Engine;
use super::start::{ParamMut, param_memory};
use crate::actors::{Cause, Element, Failure, FailureKind, Lease, LeaseError, Line, PlanRank, Range, Resumed, Scalars};
use crate::config::ScalerKind;
use crate::error::{Error, ErrorKind};
use crate::model::ParamInfo;
use crate::state::{Fit, GroupState, Part, Piece, ScalerState, State, tensors};

impl Engine {
    /// This rank's part of the optimizer's state: what all ranks share, and the elements that this one owns. [`State::merge`]
    /// makes a whole of the parts of all ranks. It waits for all outcomes and gathers, so parameters that are read next are the
    /// masters that it took, rounded. In mid-accumulation it is the state after the last step: gradients are not in it.
    ///
    /// What [`Engine::write_param`] wrote into a 16-bit parameter is in it after [`Engine::reload_masters`] only.
    ///
    /// ```
    /// # use gatherflow::{Config, DType, Engine, Error, Model, Rank, Ranks, State};
    /// # fn start(rank: Rank, w: f32) -> Result<Engine, Error> {
    /// #     let mut model = Model::new();
    /// #     let chunk = model.chunk();
    /// #     let unit = model.unit(chunk, "layer")?;
    /// #     model.param(unit, "w", &[100], DType::Bf16)?;
    /// #     Engine::new(rank, model, Config::new(), |_, out| out.fill_with(|_| w))
    /// # }
    /// let on_two = |rank| std::thread::spawn(|| start(rank, 0.5)?.state());
    /// let ranks: Vec<_> = Ranks::local(2)?.into_iter().map(on_two).collect();
    /// let parts: Result<Vec<State>, Error> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    /// let whole = State::merge(parts?)?;
    /// let mut alone = start(Ranks::local(1)?.remove(0), 0.0)?;
    /// alone.load_state(&whole)?;
    /// assert_eq!(alone.state()?.tensors[0].pieces[0].master, [0.5; 100]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Parameters that are swapped, a closed engine, or the first cause of a fatal failure.
    pub fn state(&self) -> Result<State, Error> {
        self.shared.check_open()?;
        self.shared.check_not_swapped()?;
        let (plan, rank) = (self.plan(), PlanRank(self.rank()));
        let mut pieces: Vec<Option<Piece>> = vec![None; self.params().len()];
        let scalars = self.shared.session.save_state(&mut |piece, fields| {
            // What others have too is saved by the first of them.
            if plan.counts(rank, plan.param(piece.param)) {
                pieces[piece.param.index()] = Some(Piece::new(piece.in_param.start, fields));
            }
        })?;
        let mut state = State {
            steps: self.steps_of_the_job(),
            groups: self.group_states(&self.t()?),
            scaler: (self.config.scaler == ScalerKind::Dynamic).then_some(ScalerState {
                scale: scalars.scale,
                growth_counter: scalars.growth_counter,
                hysteresis: scalars.hysteresis,
            }),
            tensors: tensors(plan).collect(),
        };
        for tensor in &mut state.tensors {
            let Some(param) = self.shared.model.find(&tensor.name) else { continue };
            if Part::of(plan, rank, plan.param(param)) == tensor.part {
                tensor.pieces.extend(pieces[param.index()].take());
            }
        }
        Ok(state)
    }

    /// Goes on from a whole state ([`State::merge`]): masters, moments, step counts and loss scaler become the state's, and every
    /// trained parameter its masters, rounded. Call it on every rank, between the same two steps, with the same state. Number of
    /// ranks, buckets, layout, storage and mode need not be those of the engine that it was taken from, nor the dtypes of
    /// parameters. From there training is what it would have been without a pause, bit for bit where the number of ranks is the
    /// same too. The state takes 12 bytes for each element of the model while it is loaded, beside what the plan says.
    ///
    /// Hyperparameters stay those of this engine's configuration, with a warning where the state's differ; so do learning rates,
    /// whose schedules go on from the state's t. [`Engine::steps`] still counts this engine's steps: [`State::steps`] tells where
    /// the data goes on. A dynamic loss scaler of which the state knows nothing starts anew, with a warning.
    ///
    /// # Errors
    /// [`ErrorKind::State`]: a state that is not whole, of another model, or another one on another rank; every rank gets an
    /// error that names it, nothing was changed, and the engine stays usable. [`ErrorKind::Misuse`]: a live owned guard or a
    /// gradient of this step that would be lost, by the name of its parameter; parameters that are swapped. A rank that does not
    /// call it, a closed engine, or the first cause of a fatal failure.
    pub fn load_state(&mut self, state: &State) -> Result<(), Error> {
        self.shared.check_open()?;
        self.shared.check_not_swapped()?;
        self.shared.check_no_guards("load_state")?;
        if let Some(param) = self.shared.gradients.written() {
            let message = "its gradient of this step would be lost: call step or zero_grad before load_state";
            return Err(Error::misuse(message).on_rank(self.rank()).of_parameter(&*self.params()[param.index()].name));
        }
        let fit = self.agreed(state)?;
        self.warn_of_differences(state);
        let resumed = Resumed { t: state.groups.iter().map(|group| group.t).collect(), scaler: self.scaler_of(state) };
        let (rank, params) = (self.rank(), self.params());
        self.shared.session.load_state(
            resumed,
            &mut |param, lease| write_masters(&fit, &params[param.index()], lease, rank),
            &mut |piece, fields| {
                for (field, memory) in fields.into_iter().enumerate() {
                    fit.copy(piece.param, piece.in_param, field, &mut |at, values| {
                        memory[at..at + values.len()].copy_from_slice(values);
                    });
                }
            },
        )?;
        self.known_t = state.groups.iter().map(|group| group.t).collect();
        self.unknown_from = self.steps();
        self.resumed = (state.steps, self.steps());
        Ok(())
    }

    /// The state as this rank can load it, once all ranks load the same.
    fn agreed<'s>(&self, state: &'s State) -> Result<Fit<'s>, Error> {
        let fit = Fit::new(state, self.plan(), PlanRank(self.rank()));
        let verdict = |value: String| Line::new("the state to load", value);
        let lines = match &fit {
            Ok(_) => std::iter::once(verdict("of this model".into())).chain(state.lines()).collect(),
            Err(refused) => vec![verdict(format!("refused: {refused}"))],
        };
        let placed = |error: Error| error.on_rank(self.rank()).at_step(self.steps());
        let difference = self.shared.session.agree_on_state(lines)?;
        match (fit, difference) {
            (Ok(fit), None) => Ok(fit),
            (Err(refused), None) => Err(placed(refused.into())),
            (fit, Some(difference)) => {
                let message = format!("ranks load different states: {difference}; load the same whole on every rank");
                let error = placed(Error::new(ErrorKind::State, message));
                Err(match fit {
                    Ok(_) => error,
                    Err(refused) => error.because(refused),
                })
            }
        }
    }

    /// Updated steps per group, the last step included.
    fn t(&self) -> Result<Vec<u64>, Error> {
        match self.steps().checked_sub(1).filter(|last| *last >= self.unknown_from) {
            Some(last) => Ok(self.shared.session.outcome(last)?.t.clone()),
            None => Ok(self.known_t.clone()),
        }
    }

    fn group_states(&self, t: &[u64]) -> Vec<GroupState> {
        self.shared.model.groups.iter().zip(t).map(|(group, t)| GroupState::new(group, &self.config, *t)).collect()
    }

    /// Where the loss scaler goes on. Only a dynamic one has state.
    fn scaler_of(&self, state: &State) -> Scalars {
        let fresh = Scalars::initial(&self.config.scaler_rule());
        match state.scaler.filter(|_| self.config.scaler == ScalerKind::Dynamic) {
            None => fresh,
            Some(ScalerState { scale, growth_counter, hysteresis }) => {
                Scalars { scale, growth_counter, hysteresis, ..fresh }
            }
        }
    }

    fn warn_of_differences(&self, state: &State) {
        let rank = self.rank();
        match (&state.scaler, self.config.scaler) {
            (None, ScalerKind::Dynamic) => tracing::warn!(
                target: "gatherflow::engine", rank, "the state has no loss scaler: the dynamic one starts anew"
            ),
            (Some(_), ScalerKind::None | ScalerKind::Constant) => tracing::warn!(
                target: "gatherflow::engine", rank, "the state has a dynamic loss scaler, which the configuration has not"
            ),
            _ => {}
        }
        let t: Vec<u64> = state.groups.iter().map(|group| group.t).collect();
        for (group, (saved, own)) in state.groups.iter().zip(self.group_states(&t)).enumerate() {
            if *saved != own {
                tracing::warn!(
                    target: "gatherflow::engine", rank, group, ?saved, ?own, "hyperparameters differ from the state's"
                );
            }
        }
    }
}

/// A parameter is its masters, rounded.
fn write_masters(fit: &Fit<'_>, info: &ParamInfo, lease: &mut Lease, rank: usize) -> Result<(), Cause> {
    let failed = |e: LeaseError| Arc::new(Failure::new(FailureKind::Device, rank, e.to_string()));
    let mut memory = param_memory(info.dtype, lease).map_err(failed)?;
    fit.copy(info.id, Range::new(0, info.numel), 0, &mut |at, masters| match &mut memory {
        ParamMut::F32(out) => round(&mut out[at..], masters),
        ParamMut::Bf16(out) => round(&mut out[at..], masters),
        ParamMut::F16(out) => round(&mut out[at..], masters),
    });
    Ok(())
}

fn round<T: Element>(out: &mut [T], masters: &[f32]) {
    out.iter_mut().zip(masters).for_each(|(out, master)| *out = T::from_f32(*master));
}
