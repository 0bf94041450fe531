//! The on-ramp: [`VarOptimizer`] trains the `Var`s of an existing candle program from its gradient store.
//!
//! It owns an engine with one unit per `Var`, and the claim on the `Var`s; the program keeps its layers, its forward and
//! its backward. One copy per parameter and direction and step: the gradient into the engine's f32 gradient, the updated
//! parameter into the `Var`. Every step ends with the gathers awaited, so a `Var` always holds the version that the next
//! forward needs (V2) and no pass of the engine outlives a call (V3).
//!
//! It fails, naming the `Var`, before anything is changed: what is wrong with a `Var` at the start, what is wrong with a
//! gradient before the first one is delivered.

mod claim;
mod copy;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType as CandleDType, Storage, Tensor, Var};

use self::claim::Claims;
use self::copy::{Fill, gradient_to_main};
use super::access::Values;
use super::error::lower;
use crate::actors::{Counters, DType, ParamId, Plan, UnitId};
use crate::config::Config;
use crate::engine::{Engine, ParamMut};
use crate::error::{Error, ErrorKind};
use crate::model::{ChunkId, GroupId, Model, ModelError, ParamOptions};
use crate::outcome::Outcome;
use crate::pass::Mode;
use crate::ranks::Rank;
use crate::report::Report;
use crate::state::State;

/// Trains candle `Var`s on all ranks, in place of a candle optimizer. For programs that exist: new ones lose less time with
/// [`Forward`](super::Forward).
///
/// ```
/// use candle_core::{Device, Result, Tensor, Var};
/// use gatherflow::candle::VarOptimizer;
/// use gatherflow::{Config, Rank, Ranks};
///
/// fn train(rank: Rank) -> Result<u64> {
///     let w = Var::zeros((1, 4), candle_core::DType::F32, &Device::Cpu)?; // Vars of this rank's own
///     let vars = [("w".to_string(), w.clone())]; // with candle-nn: `varmap.data().lock()?.clone()`
///     let x = Tensor::full(rank.rank() as f32, (1, 4), &Device::Cpu)?; // data of this rank's own
///     let mut optimizer = VarOptimizer::new(rank, vars, Config::new().lr(0.1))?;
///     for _step in 0..3 {
///         let loss = ((&x * w.as_tensor())? - 1.0)?.sqr()?.mean_all()?; // unchanged
///         optimizer.backward_step(&loss)?; // unchanged: the same call as candle's own optimizers have
///     }
///     let hash = optimizer.params_hash()?;
///     optimizer.close()?;
///     Ok(hash)
/// }
///
/// let ranks: Vec<_> = Ranks::local(2)?.into_iter().map(|rank| std::thread::spawn(|| train(rank))).collect();
/// let hashes: Result<Vec<u64>> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
/// assert!(hashes?.windows(2).all(|pair| pair[0] == pair[1]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # What it costs beside [`Forward`](super::Forward)
/// The update is the same, bit for bit, for the same gradients. But:
/// - **Nothing overlaps.** The reduces start after backward, the gathers are awaited before the step returns: all
///   communication is exposed, whatever `overlap` says.
/// - **Copies**: every gradient is read from the gradient store and written to the engine's f32 gradient, every parameter is
///   copied into its `Var`: with f32 `Var`s 16 bytes of memory traffic per element and step.
/// - **Memory**: parameters and gradients exist twice, in candle's tensors and in the engine's buffers.
/// - **16-bit `Var`s**: candle computes their gradients in 16 bits, where `Forward` multiplies into f32.
///
/// # Rules
/// - Each rank makes `Var`s of its own, with the same names, shapes and dtypes on all ranks, and gives each `Var` once. At
///   the start all take rank 0's values (or `start_params = "check"` refuses ranks that differ).
/// - From then on the optimizer owns the values: it writes every `Var` in each updated step. What the program writes to one
///   by hand is computed with until then, but never trained on.
/// - A `Var` without a gradient counts as zero, or is an error with `unused = "error"`.
#[derive(Debug)]
pub struct VarOptimizer {
    engine: Engine,
    chunk: ChunkId,
    slots: Vec<Slot>,
    /// Microbatches delivered since the last step.
    microbatches: usize,
    /// Given back when the optimizer is closed or dropped.
    claims: Option<Claims>,
}

/// A `Var` and the parameter that it mirrors.
#[derive(Debug)]
struct Slot {
    param: ParamId,
    unit: UnitId,
    dtype: DType,
    var: Var,
}

impl VarOptimizer {
    /// Registers the `Var`s, sorted by name, and starts this rank: takes their values, meets the other ranks and writes the
    /// common initial values back. It returns once all ranks have come.
    ///
    /// All parameters are in the default group, which takes everything from the configuration. Their gradients are f32 in the
    /// engine: `grad_dtype` is refused.
    ///
    /// # Errors
    /// [`ErrorKind::Model`] names a `Var` whose dtype is not f32, bf16 or f16, that is not on the CPU, that is given twice
    /// or that another live optimizer trains, and a name given twice; it also refuses an empty set. Otherwise as
    /// [`Engine::new`].
    pub fn new(rank: Rank, vars: impl IntoIterator<Item = (String, Var)>, config: Config) -> Result<Self, Error> {
        let mut vars: Vec<(String, Var)> = vars.into_iter().collect();
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        if vars.is_empty() {
            return Err(Error::new(
                ErrorKind::Model,
                "there are no Vars to train: build the layers before the optimizer",
            ));
        }
        let claims = Claims::of(&vars)?;
        let mut model = Model::new();
        let chunk = model.chunk();
        let slots = vars
            .into_iter()
            .map(|(name, var)| {
                let dtype = trainable_dtype(&name, &var)?;
                let unit = model.unit(chunk, &name).map_err(|_| twice(&model, &name, &var))?;
                // Set here, so that a configured `grad_dtype` is refused as one that nothing reads (K1).
                let options = ParamOptions { grad_dtype: Some(DType::F32), ..ParamOptions::default() };
                let param = model.param_with(unit, name, var.dims(), dtype, options)?;
                Ok(Slot { param, unit, dtype, var })
            })
            .collect::<Result<Vec<_>, Error>>()?;

        let mut unread = None;
        let engine = Engine::new(rank, model, config, |info, memory| {
            if read_var(&slots[info.id.index()].var, memory).is_none() {
                unread.get_or_insert_with(|| info.name.clone());
            }
        })?;
        if let Some(name) = unread {
            return Err(Error::new(ErrorKind::Model, "the Var changed while it was registered").of_parameter(name));
        }
        let this = Self { engine, chunk, slots, microbatches: 0, claims: Some(claims) };
        this.write_vars()?;
        Ok(this)
    }

    /// Backward from `loss` and a [step](Self::step): the call that candle's own optimizers have. The loss is given as it is;
    /// this multiplies it by the [loss scale](Self::loss_scale).
    ///
    /// # Errors
    /// Candle's from backward (as [`ErrorKind::Misuse`], with the cause as its source), and those of [`Self::step`].
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<Outcome, Error> {
        let scaled = loss.affine(f64::from(self.loss_scale()?), 0.0).map_err(lower)?;
        self.step(&scaled.backward().map_err(lower)?)
    }

    /// Copies the gradients into the engine, reduces them, updates, waits for the gathers and copies the parameters into the
    /// `Var`s. With a scaler, the gradients are those of a loss times [`Self::loss_scale`].
    ///
    /// Gradients may be f32, bf16 or f16, whatever the `Var` is, and have any strides.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] names a gradient of another shape, of another dtype or not on the CPU: nothing was changed.
    /// Otherwise as [`StepHandle::outcome`](crate::StepHandle::outcome): if that is not fatal the step was skipped on every
    /// rank, and no `Var` has changed.
    pub fn step(&mut self, grads: &GradStore) -> Result<Outcome, Error> {
        self.deliver(grads, true)?;
        let step = self.engine.step()?;
        self.microbatches = 0;
        let outcome = step.outcome()?;
        if outcome.updated {
            self.write_vars()?;
        }
        Ok(outcome)
    }

    /// Adds the gradients of a microbatch that is not the step's last one; those of the last go to [`Self::step`]. Any number
    /// of microbatches, each loss divided by it as usual.
    ///
    /// # Errors
    /// As [`Self::step`], for the gradients.
    pub fn accumulate(&mut self, grads: &GradStore) -> Result<(), Error> {
        self.deliver(grads, false)?;
        self.microbatches += 1;
        Ok(())
    }

    /// The factor that the next loss must carry; 1 without a scaler. [`Self::backward_step`] sees to it by itself.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn loss_scale(&self) -> Result<f32, Error> {
        self.engine.loss_scale()
    }

    /// Sets the learning rate from the next step on.
    ///
    /// # Errors
    /// A value that is negative or not finite.
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<(), Error> {
        self.engine.set_lr(GroupId::DEFAULT, lr)
    }

    /// This rank's weight in the average of the next step, with `average = "weight"`.
    ///
    /// # Errors
    /// As [`Engine::set_weight`].
    pub fn set_weight(&mut self, weight: f64) -> Result<(), Error> {
        self.engine.set_weight(weight)
    }

    /// The number of steps so far.
    pub fn steps(&self) -> u64 {
        self.engine.steps()
    }

    /// The layout and the order of collectives.
    pub fn plan(&self) -> &Plan {
        self.engine.plan()
    }

    /// A hash of all parameters' bytes, by name. Equal on all ranks, and to that of an engine with the same parameters in
    /// the same order.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn params_hash(&self) -> Result<u64, Error> {
        self.engine.params_hash()
    }

    /// This rank's part of the optimizer's state, by the names of the `Var`s: as [`Engine::state`]. [`State::merge`] makes a whole of
    /// the parts of all ranks.
    ///
    /// # Errors
    /// As [`Engine::state`].
    pub fn state(&self) -> Result<State, Error> {
        self.engine.state()
    }

    /// Goes on from a whole state, between the same two steps and with the same state on every rank: as [`Engine::load_state`]. The
    /// `Var`s then have its parameters, rounded to their dtypes. An [`Engine`] with the same names and shapes, and another number of
    /// ranks, can have saved it.
    ///
    /// # Errors
    /// As [`Engine::load_state`]: if that is not fatal, no `Var` has changed on any rank. Gradients that were
    /// [accumulated](Self::accumulate) are refused, by name: take the step before.
    pub fn load_state(&mut self, state: &State) -> Result<(), Error> {
        self.engine.load_state(state)?;
        self.write_vars()
    }

    /// Totals of this rank.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// Times of the finished steps so far, summed up: what this path leaves exposed.
    pub fn report(&mut self) -> Report {
        self.engine.report()
    }

    /// Ends the run and tells the other ranks. Idempotent. The `Var`s keep their values and may go to another optimizer.
    ///
    /// # Errors
    /// The first cause of a fatal failure.
    pub fn close(&mut self) -> Result<(), Error> {
        self.claims = None;
        self.engine.close()
    }

    fn deliver(&mut self, grads: &GradStore, last: bool) -> Result<(), Error> {
        for slot in &self.slots {
            if let Some(gradient) = grads.get(&slot.var) {
                check_gradient(gradient, &slot.var).map_err(|message| self.misuse(slot, message))?;
            }
        }
        let pass = self.engine.pass(self.chunk, self.microbatches, last, Mode::Train)?;
        for slot in &self.slots {
            pass.enter(slot.unit)?;
        }
        // In the order of the reduces, so that the first of them run beside the copies that are left.
        for slot in self.slots.iter().rev() {
            let back = pass.backward(slot.unit)?;
            if let Some(gradient) = grads.get(&slot.var) {
                let mut main = back.grad::<f32>(slot.param)?;
                let mode = main.mode();
                gradient_to_main(gradient, mode, &mut main).map_err(|e| self.misuse(slot, e.to_string()))?;
                main.complete();
            }
            back.leave()?;
        }
        Ok(())
    }

    /// Waits for each parameter in the order of the gathers and copies it.
    fn write_vars(&self) -> Result<(), Error> {
        for slot in &self.slots {
            let written = match slot.dtype {
                DType::Bf16 => slot.var.inplace_op1(&Fill(Values::Bf16(&self.engine.read(slot.param)?))),
                DType::F16 => slot.var.inplace_op1(&Fill(Values::F16(&self.engine.read(slot.param)?))),
                _ => slot.var.inplace_op1(&Fill(Values::F32(&self.engine.read(slot.param)?))),
            };
            written.map_err(|error| self.misuse(slot, error.to_string()))?;
        }
        Ok(())
    }

    #[cold]
    fn misuse(&self, slot: &Slot, message: String) -> Error {
        let name = &self.engine.params()[slot.param.index()].name;
        Error::misuse(message).on_rank(self.engine.rank()).at_step(self.steps()).of_parameter(name)
    }
}

/// A gradient that does not fit its `Var`, in words.
fn check_gradient(gradient: &Tensor, var: &Var) -> Result<(), String> {
    if gradient.shape() != var.shape() {
        return Err(format!("its gradient has the shape {:?}, but the Var has {:?}", gradient.dims(), var.dims()));
    }
    if supported(gradient.dtype()).is_none() {
        return Err(format!("its gradient is {}: use f32, bf16 or f16", gradient.dtype().as_str()));
    }
    if !gradient.device().is_cpu() {
        return Err(format!("its gradient is on {:?}: move it to the CPU", gradient.device().location()));
    }
    Ok(())
}

fn trainable_dtype(name: &str, var: &Var) -> Result<DType, Error> {
    let refused = |message: String| Error::new(ErrorKind::Model, message).of_parameter(name);
    if !var.device().is_cpu() {
        return Err(refused(format!("the Var is on {:?}: it must be on the CPU", var.device().location())));
    }
    if var.layout().contiguous_offsets().is_none() {
        return Err(refused(format!("the Var is not contiguous: {:?}", var.layout())));
    }
    supported(var.dtype()).ok_or_else(|| {
        ModelError::UnsupportedDType { name: name.to_owned(), dtype: var.dtype().as_str().to_owned() }.into()
    })
}

fn supported(dtype: CandleDType) -> Option<DType> {
    match dtype {
        CandleDType::F32 => Some(DType::F32),
        CandleDType::BF16 => Some(DType::Bf16),
        CandleDType::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Units bear the names of their parameters, so the name is taken by one.
fn twice(model: &Model, name: &str, var: &Var) -> Error {
    let first = model.find(name).map_or_else(Vec::new, |id| model.params()[id.index()].shape.clone());
    ModelError::RegisteredTwice { name: name.to_owned(), first, second: var.dims().to_vec() }.into()
}

/// Copies a contiguous `Var` into the parameter's memory; `None` if the two do not fit.
fn read_var(var: &Var, memory: ParamMut<'_>) -> Option<()> {
    fn copy<T: Copy>(values: &[T], (start, end): (usize, usize), out: &mut [T]) -> Option<()> {
        let values = values.get(start..end).filter(|values| values.len() == out.len())?;
        out.copy_from_slice(values);
        Some(())
    }
    let (storage, layout) = var.storage_and_layout();
    let range = layout.contiguous_offsets()?;
    match (&*storage, memory) {
        (Storage::Cpu(CpuStorage::F32(values)), ParamMut::F32(out)) => copy(values, range, out),
        (Storage::Cpu(CpuStorage::BF16(values)), ParamMut::Bf16(out)) => copy(values, range, out),
        (Storage::Cpu(CpuStorage::F16(values)), ParamMut::F16(out)) => copy(values, range, out),
        _ => None,
    }
}
