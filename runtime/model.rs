//! The model as the runtime sees it: chunks of units of parameters, registered in forward order, and optimizer groups.
//!
//! [`Model`] only collects and checks; [`Engine::new`](crate::Engine::new) makes a plan from it. Every refusal names the
//! thing and says what to do.

mod description;
mod error;

use std::collections::{HashMap, HashSet};

use crate::actors::{
    Across, ChunkSpec, DType, ParamId, ParamSpec, Pipeline, Plan, PlanInput, ShardGroupSpec, SumOver, UnitId, UnitSpec,
};
use crate::config::{Config, ConfigError};
use crate::error::Error;
pub use error::ModelError;

/// Names a model chunk (a virtual pipeline stage), in forward order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub u32);

/// Names an optimizer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

impl GroupId {
    /// The group of parameters that name none. It takes everything from the configuration.
    pub const DEFAULT: Self = Self(0);
}

/// Names a shard group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardGroupId(pub u32);

impl ShardGroupId {
    /// All ranks that share the model's other parameters: the group of parameters that name none.
    pub const ALL: Self = Self(0);
}

/// A group of ranks with a d of its own, for experts: its parameters are divided among fewer ranks than the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardGroup {
    /// Its name, in plans and errors.
    pub name: String,
    /// How many consecutive ranks share one set of shards. Divides the number of ranks that the other parameters are divided
    /// among, so that several such groups stand side by side.
    pub ranks: usize,
    /// What those groups hold: replicas, whose gradients are summed over all of them, or experts, which have nothing to do with
    /// each other. Of experts, every rank of a group must start from the same values.
    pub across: Across,
    /// Gradients are divided by this number of ranks. `None`: by as many as add up, all of them for replicas, the group's own for
    /// experts. Where experts see the tokens of all ranks, give the number of all ranks. With `average = "weight"` a
    /// rank counts with the mean weight of all.
    pub average_over: Option<usize>,
}

/// Hyperparameters of an optimizer group; what is `None` comes from the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Learning rate until [`Engine::set_lr`](crate::Engine::set_lr).
    pub lr: Option<f64>,
    /// Multiplies every learning rate of this group.
    pub lr_multiplier: f64,
    /// Decay of the two moments.
    pub betas: Option<(f64, f64)>,
    /// Added to the root of the second moment.
    pub eps: Option<f64>,
    /// Weight decay; 0 for biases and norms, as a rule.
    pub weight_decay: Option<f64>,
}

impl Default for Group {
    fn default() -> Self {
        Self { lr: None, lr_multiplier: 1.0, betas: None, eps: None, weight_decay: None }
    }
}

/// What a parameter can be besides name, shape and dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamOptions {
    /// Its optimizer group.
    pub group: GroupId,
    /// `false` freezes it: it gets no gradient, no optimizer state, no collective.
    pub trainable: bool,
    /// Element type of its gradient; `None` takes the configuration's `grad_dtype`.
    pub grad_dtype: Option<DType>,
    /// Each model-parallel rank of a pipeline stage holds another part of it, so each counts in the norm. Every other parameter is
    /// the same on all of them and must get the same gradient there, or parts of one ([`ParamOptions::sum_over`]). Without
    /// model-parallel ranks it changes nothing.
    pub tensor_parallel: bool,
    /// Copies of one weight, on several chunks or pipeline stages, carry the same name here and are alike in all else. Trained
    /// copies start from the values of the first one, each gets the sum of their gradients, and so they stay equal; the norm counts
    /// the first. Over stages that sum waits for the reduces of all of them.
    /// A weight that several units can read from one place is better registered once and used with [`Model::use_param`].
    pub shared: Option<String>,
    /// Over which ranks its gradient is summed, beyond the average: a norm under sequence parallelism, of which each
    /// model-parallel rank has a part of the gradient.
    pub sum_over: SumOver,
    /// Gets a bucket of its own.
    pub shared_embedding: bool,
    /// Its shard group: which ranks share its shards.
    pub shard_group: ShardGroupId,
}

impl Default for ParamOptions {
    fn default() -> Self {
        Self {
            group: GroupId::DEFAULT,
            trainable: true,
            grad_dtype: None,
            tensor_parallel: false,
            shared: None,
            sum_over: SumOver::Nothing,
            shared_embedding: false,
            shard_group: ShardGroupId::ALL,
        }
    }
}

/// A parameter as it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Its id.
    pub id: ParamId,
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Its element count.
    pub numel: usize,
    /// The chunk in which it was registered.
    pub chunk: ChunkId,
    /// The rest.
    pub options: ParamOptions,
    pub(crate) units: Vec<UnitId>,
}

impl ParamInfo {
    /// Element type of its gradient. What an engine tells of its parameters has the configuration in it already.
    pub fn grad_dtype(&self) -> DType {
        self.options.grad_dtype.unwrap_or(DType::F32)
    }
}

/// A unit as it was registered.
#[derive(Clone, Debug)]
pub(crate) struct UnitInfo {
    pub(crate) name: String,
    pub(crate) chunk: ChunkId,
    pub(crate) params: Vec<ParamId>,
}

/// Chunks, units and parameters in forward order, and optimizer groups.
///
/// ```
/// use gatherflow::{DType, Model};
///
/// let mut model = Model::new();
/// let chunk = model.chunk();
/// let embed = model.unit(chunk, "embed")?;
/// let table = model.param(embed, "embed.table", &[256, 64], DType::Bf16)?;
/// let head = model.unit(chunk, "head")?;
/// model.use_param(head, table)?; // tied: the head uses the embedding's weight
/// assert!(model.param(head, "embed.table", &[64], DType::Bf16).is_err());
/// # Ok::<(), gatherflow::ModelError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) groups: Vec<Group>,
    shard_groups: Vec<ShardGroup>,
    chunks: u32,
    pub(crate) units: Vec<UnitInfo>,
    pub(crate) params: Vec<ParamInfo>,
    unit_names: HashSet<String>,
    by_name: HashMap<String, ParamId>,
    shared: HashMap<String, ParamId>,
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

impl Model {
    /// An empty model with the default group.
    pub fn new() -> Self {
        Self {
            groups: vec![Group::default()],
            shard_groups: Vec::new(),
            chunks: 0,
            units: Vec::new(),
            params: Vec::new(),
            unit_names: HashSet::new(),
            by_name: HashMap::new(),
            shared: HashMap::new(),
        }
    }

    /// A new optimizer group.
    ///
    /// # Errors
    /// [`ModelError::BadGroup`] names the hyperparameter that is out of range.
    pub fn group(&mut self, group: Group) -> Result<GroupId, ModelError> {
        let id = self.groups.len() as u32;
        // Adam runs in f32: what is infinite or zero there is out of range here.
        let from_0 = |x: f64| (0.0..f64::from(f32::MAX)).contains(&x);
        let below_1 = |x: f64| (0.0..1.0).contains(&x);
        let checks = [
            ("lr", group.lr.filter(|x| !from_0(*x))),
            ("lr_multiplier", Some(group.lr_multiplier).filter(|x| !from_0(*x))),
            ("beta1", group.betas.map(|b| b.0).filter(|x| !below_1(*x))),
            ("beta2", group.betas.map(|b| b.1).filter(|x| !below_1(*x))),
            ("eps", group.eps.filter(|x| !from_0(*x) || *x < f64::from(f32::MIN_POSITIVE))),
            ("weight_decay", group.weight_decay.filter(|x| !from_0(*x))),
        ];
        if let Some((what, value)) = checks.into_iter().find_map(|(what, bad)| Some((what, bad?))) {
            return Err(ModelError::BadGroup { group: id, what, value });
        }
        self.groups.push(group);
        Ok(GroupId(id))
    }

    /// A new shard group, for parameters to name. Whether it fits the ranks is checked with the plan.
    pub fn shard_group(&mut self, group: ShardGroup) -> ShardGroupId {
        self.shard_groups.push(group);
        ShardGroupId(self.shard_groups.len() as u32)
    }

    /// A new chunk, after all others in forward order.
    pub fn chunk(&mut self) -> ChunkId {
        self.chunks += 1;
        ChunkId(self.chunks - 1)
    }

    /// A new unit: what the executor enters at once. After all others of its chunk in forward order.
    ///
    /// # Errors
    /// [`ModelError`]: an unknown chunk, a name registered twice, a chunk that is not the last one.
    pub fn unit(&mut self, chunk: ChunkId, name: impl Into<String>) -> Result<UnitId, ModelError> {
        let name = name.into();
        if chunk.0 >= self.chunks {
            return Err(ModelError::Unknown { what: "chunk", id: chunk.0 });
        }
        if let Some(last) = self.units.last().map(|u| u.chunk).filter(|last| chunk < *last) {
            return Err(ModelError::OutOfOrder { unit: name, chunk: chunk.0, last: last.0 });
        }
        if !self.unit_names.insert(name.clone()) {
            return Err(ModelError::UnitTwice { name });
        }
        self.units.push(UnitInfo { name, chunk, params: Vec::new() });
        Ok(UnitId::from_index(self.units.len() - 1))
    }

    /// A trainable parameter of the default group, with gradients of the configuration's `grad_dtype` (f32 by default).
    ///
    /// # Errors
    /// [`ModelError`]: an unknown unit, a name registered twice, an impossible shape.
    pub fn param(
        &mut self,
        unit: UnitId,
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<ParamId, ModelError> {
        self.param_with(unit, name, shape, dtype, ParamOptions::default())
    }

    /// A parameter with options.
    ///
    /// # Errors
    /// As [`Model::param`], and an unknown group or shard group, and copies of one weight whose shapes disagree.
    pub fn param_with(
        &mut self,
        unit: UnitId,
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
        options: ParamOptions,
    ) -> Result<ParamId, ModelError> {
        let name = name.into();
        let shape = if shape.is_empty() { vec![1] } else { shape.to_vec() };
        let chunk = self.unit_info(unit)?.chunk;
        if let Some(first) = self.by_name.get(&name) {
            let first = self.params[first.index()].shape.clone();
            return Err(ModelError::RegisteredTwice { name, first, second: shape });
        }
        let numel = shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d)).filter(|n| *n > 0);
        let Some(numel) = numel else { return Err(ModelError::BadShape { name, shape }) };
        if options.group.0 as usize >= self.groups.len() {
            return Err(ModelError::Unknown { what: "group", id: options.group.0 });
        }
        if options.shard_group.0 as usize > self.shard_groups.len() {
            return Err(ModelError::Unknown { what: "shard group", id: options.shard_group.0 });
        }
        let id = ParamId::from_index(self.params.len());
        self.check_copy(&name, &shape, &options)?;
        if let Some(shared) = &options.shared {
            self.shared.entry(shared.clone()).or_insert(id);
        }
        self.by_name.insert(name.clone(), id);
        self.units[unit.index()].params.push(id);
        self.params.push(ParamInfo { id, name, shape, dtype, numel, chunk, options, units: vec![unit] });
        Ok(id)
    }

    /// Lets another unit use a parameter that is registered already (tied weights).
    ///
    /// # Errors
    /// [`ModelError::Unknown`].
    pub fn use_param(&mut self, unit: UnitId, param: ParamId) -> Result<(), ModelError> {
        self.unit_info(unit)?;
        let info = self.params.get_mut(param.index()).ok_or(ModelError::Unknown { what: "parameter", id: param.0 })?;
        if !info.units.contains(&unit) {
            info.units.push(unit);
            self.units[unit.index()].params.push(param);
        }
        Ok(())
    }

    /// The parameters in registration order.
    pub fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks as usize
    }

    /// A parameter by name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    /// The plan of this model for so many ranks. Where there are several pipeline stages it is that of the first.
    ///
    /// # Errors
    /// An [`Error`] that names what the configuration or the plan refuses.
    pub fn plan(&self, ranks: usize, config: &Config) -> Result<Plan, Error> {
        self.plan_stage(0, ranks, config)
    }

    /// The plan of this model as the chunks of a pipeline stage. What it has in common with other stages it learns from their
    /// ranks, when an engine starts.
    ///
    /// # Errors
    /// As [`Model::plan`], and a stage that there is not.
    pub fn plan_stage(&self, stage: usize, ranks: usize, config: &Config) -> Result<Plan, Error> {
        let own = |p: &ParamInfo| p.options.grad_dtype.is_some() || !p.options.trainable;
        if config.is_explicit("grad_dtype") && self.params.iter().all(own) {
            let reason = "every trainable parameter names a gradient dtype of its own".to_owned();
            return Err(ConfigError::Dead { key: "grad_dtype", reason }.into());
        }
        config.validate_for(ranks, self.f16_params(config))?;
        let plan = Plan::new(&self.plan_input(stage, ranks, config)).map_err(ModelError::from)?;
        Ok(plan.with_gather_calls(config.gather_group_bytes))
    }

    pub(crate) fn plan_input(&self, stage: usize, ranks: usize, config: &Config) -> PlanInput {
        let mut chunks = vec![ChunkSpec::default(); self.chunks as usize];
        for unit in &self.units {
            chunks[unit.chunk.0 as usize].units.push(UnitSpec { name: unit.name.clone(), params: unit.params.clone() });
        }
        let params = self.params.iter().map(|p| ParamSpec {
            name: p.name.clone(),
            shape: p.shape.clone(),
            dtype: p.dtype,
            grad_dtype: p.options.grad_dtype.unwrap_or(config.grad_dtype),
            group: p.options.group.0 as usize,
            trainable: p.options.trainable,
            shared_embedding: p.options.shared_embedding,
            tensor_parallel: p.options.tensor_parallel,
            shared: p.options.shared.clone(),
            sum_over: p.options.sum_over,
            shard_group: p.options.shard_group.0 as usize,
            chunk: p.chunk.0 as usize,
        });
        let shard_group = |group: &ShardGroup| ShardGroupSpec {
            name: group.name.clone(),
            ranks: group.ranks,
            across: group.across,
            average_over: group.average_over,
        };
        PlanInput {
            ranks,
            model_parallel: config.model_parallel,
            pipeline: Pipeline { stage, stages: config.pipeline_parallel },
            shard_groups: self.shard_groups.iter().map(shard_group).collect(),
            chunks,
            params: params.collect(),
            groups: self.groups.len(),
            bucketing: config.bucketing(),
            alignment: config.alignment(),
            storage: config.storage,
        }
    }

    /// The trainable parameters that are f16, or whose gradients are.
    fn f16_params(&self, config: &Config) -> impl Iterator<Item = (&str, &'static str)> {
        let default = config.grad_dtype;
        self.params.iter().filter(|p| p.options.trainable).filter_map(move |p| {
            let gradient = p.options.grad_dtype.unwrap_or(default);
            match (p.dtype, gradient) {
                (DType::F16, _) => Some((p.name.as_str(), "is f16")),
                (_, DType::F16) => Some((p.name.as_str(), "has f16 gradients")),
                _ => None,
            }
        })
    }

    /// Takes from the configuration what parameters left to it.
    pub(crate) fn settle(&mut self, config: &Config) {
        for param in &mut self.params {
            param.options.grad_dtype.get_or_insert(config.grad_dtype);
        }
    }

    fn unit_info(&self, unit: UnitId) -> Result<&UnitInfo, ModelError> {
        self.units.get(unit.index()).ok_or(ModelError::Unknown { what: "unit", id: unit.0 })
    }

    fn check_copy(&self, name: &str, shape: &[usize], options: &ParamOptions) -> Result<(), ModelError> {
        let Some(shared) = &options.shared else { return Ok(()) };
        let Some(first) = self.shared.get(shared).map(|id| &self.params[id.index()]) else { return Ok(()) };
        if first.shape == shape {
            return Ok(());
        }
        Err(ModelError::ShapesDisagree {
            shared: shared.clone(),
            first: first.name.clone(),
            first_shape: first.shape.clone(),
            second: name.to_owned(),
            second_shape: shape.to_vec(),
        })
    }
}
