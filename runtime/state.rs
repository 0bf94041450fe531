//! The optimizer's state as plain data, in the coordinates of parameters (SPEC D1).
//!
//! A [`State`] does not know how it was divided: number of ranks, buckets, layout, storage and overlap mode leave no trace in
//! it. Each rank has a part of it ([`Engine::state`](crate::Engine::state)): all parameters by name and shape, with the elements
//! that it owns. [`State::merge`] makes a whole of all parts, and any job that trains the same parameters goes on from that
//! ([`Engine::load_state`](crate::Engine::load_state)). Each logical element is in one part: of replicas, model-parallel ranks
//! that hold the same, and copies of one weight the first has it. Padding is in none (L5).
//!
//! | file | idea |
//! | --- | --- |
//! | `merge` | parts of all ranks to a whole |
//! | `file` | a part or a whole in a safetensors file |
//! | `megatron` | a whole out of a file of Megatron-LM's distributed optimizer |
//! | `fit` | whether a model can go on from a whole, and what ranks compare of it |
//! | `error` | what can be wrong, by name |

mod error;
mod file;
mod fit;
#[cfg(feature = "torch")]
mod megatron;
mod merge;

pub use error::StateError;
pub use file::{StateFileError, StateFileProblem};
pub(crate) use fit::Fit;
#[cfg(feature = "torch")]
pub use megatron::{MegatronFile, MegatronProblem};

use serde::{Deserialize, Serialize, Serializer};

use crate::actors::{ParamPlan, Plan, PlanRank, Range};
use crate::config::Config;
use crate::model::Group;

/// Optimizer state: one rank's part, or a whole. See [`Engine::state`](crate::Engine::state) for an example.
///
/// It holds what Adam needs to go on bit for bit: f32 masters and both moments of every trained parameter, step counts, loss
/// scaler. Not in it: frozen parameters, which are the model's (initialise them as before); 16-bit parameters, which are their
/// masters, rounded; learning rates set since the start; the gradients of a step that was not taken.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct State {
    /// Steps taken, skipped ones too, since training began.
    pub steps: u64,
    /// Optimizer groups, by number.
    pub groups: Vec<GroupState>,
    /// The dynamic loss scaler, where there was one.
    pub scaler: Option<ScalerState>,
    /// Every trained parameter of the job, whether or not a piece of it is here.
    pub tensors: Vec<TensorState>,
}

/// An optimizer group: the hyperparameters with which its engine started, and how far it has come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct GroupState {
    /// Updated steps: the t of bias corrections and learning-rate schedules.
    pub t: u64,
    /// Learning rate at the start, without the multiplier.
    pub lr: f64,
    /// Multiplies every learning rate.
    pub lr_multiplier: f64,
    /// Decay of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decoupled weight decay.
    pub adam_w: bool,
}

/// Where the dynamic loss scaler stands (SPEC T5).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ScalerState {
    /// The loss scale of the next step.
    #[serde(serialize_with = "in_full")]
    pub scale: f32,
    /// Good steps since the last growth or bad step.
    pub growth_counter: u32,
    /// Bad steps left before back-off.
    pub hysteresis: i32,
}

impl GroupState {
    pub(crate) fn new(group: &Group, config: &Config, t: u64) -> Self {
        Self {
            t,
            lr: group.lr.unwrap_or(config.lr),
            lr_multiplier: group.lr_multiplier,
            betas: group.betas.unwrap_or(config.betas),
            eps: group.eps.unwrap_or(config.eps),
            weight_decay: group.weight_decay.unwrap_or(config.weight_decay),
            adam_w: config.adam_w,
        }
    }
}

impl ScalerState {
    /// For state that comes from elsewhere.
    pub fn new(scale: f32, growth_counter: u32, hysteresis: i32) -> Self {
        Self { scale, growth_counter, hysteresis }
    }
}

/// All digits of an f32, so that whoever reads it as an f64 reads the same number.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde hands it over
fn in_full<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(f64::from(*value))
}

/// A trained parameter, or one of several that go by its name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorState {
    /// Name of the parameter; of copies of one weight, of the first.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its optimizer group.
    pub group: usize,
    /// Which of those with this name it is.
    pub part: Part,
    /// What is here of it. A whole has all its elements.
    pub pieces: Vec<Piece>,
}

/// Tells parameters of one name apart. Both are `None` where every rank has the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Which group of experts has it, where there are several.
    pub experts: Option<usize>,
    /// Which model-parallel rank has it, if it is tensor-parallel and there are several.
    pub model_parallel: Option<usize>,
}

/// A run of elements of a flattened parameter. All three have its length.
#[derive(Clone)]
#[non_exhaustive]
pub struct Piece {
    /// Its first element.
    pub start: usize,
    /// f32 masters.
    pub master: Vec<f32>,
    /// First moments.
    pub exp_avg: Vec<f32>,
    /// Second moments.
    pub exp_avg_sq: Vec<f32>,
}

/// Masters, first and second moments: whatever is done to one of them is done to all.
pub(crate) const FIELDS: usize = 3;

impl Piece {
    pub(crate) fn new(start: usize, [master, exp_avg, exp_avg_sq]: [&[f32]; FIELDS]) -> Self {
        Self { start, master: master.to_vec(), exp_avg: exp_avg.to_vec(), exp_avg_sq: exp_avg_sq.to_vec() }
    }

    pub(crate) fn range(&self) -> Range {
        Range::new(self.start, self.start.saturating_add(self.master.len()))
    }

    pub(crate) fn fields(&self) -> [&[f32]; FIELDS] {
        [&self.master, &self.exp_avg, &self.exp_avg_sq]
    }
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Piece").field("elements", &self.range()).finish_non_exhaustive()
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let experts = self.experts.map(|n| format!("experts {n}"));
        let rank = self.model_parallel.map(|n| format!("model-parallel rank {n}"));
        f.write_str(&experts.into_iter().chain(rank).collect::<Vec<_>>().join(", "))
    }
}

impl TensorState {
    /// Its name, and which of that name.
    pub(crate) fn title(&self) -> String {
        title(&self.name, self.part)
    }

    /// Its elements; `None` where that number does not exist.
    pub(crate) fn numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))
    }
}

pub(crate) fn title(name: &str, part: Part) -> String {
    if part == Part::default() { format!("`{name}`") } else { format!("`{name}` ({part})") }
}

impl Part {
    /// The part that a rank has of a parameter.
    pub(crate) fn of(plan: &Plan, rank: PlanRank, param: &ParamPlan) -> Self {
        let ((experts, layers), (own, layer)) = (plan.parts(param), plan.part(rank, param));
        Self { experts: (experts > 1).then_some(own), model_parallel: (layers > 1).then_some(layer) }
    }

    /// All parts of a parameter.
    fn all(plan: &Plan, param: &ParamPlan) -> Vec<Self> {
        let numbers = |n: usize| (0..n).map(move |number| (n > 1).then_some(number));
        let (experts, layers) = plan.parts(param);
        let of_experts = |experts| numbers(layers).map(move |model_parallel| Self { experts, model_parallel });
        numbers(experts).flat_map(of_experts).collect()
    }
}

/// Every trained parameter of a job, without any elements: what each rank's part lists.
pub(crate) fn tensors(plan: &Plan) -> impl Iterator<Item = TensorState> + '_ {
    plan.distinct_params().filter(|(_, param)| param.trainable).flat_map(|(plan, param)| {
        Part::all(plan, param).into_iter().map(|part| TensorState {
            name: param.name.clone(),
            shape: param.shape.clone(),
            group: param.group,
            part,
            pieces: Vec::new(),
        })
    })
}
