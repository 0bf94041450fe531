//! The synthetic model: what is registered, where it starts, and what its gradients are.

use std::sync::Arc;

use gatherflow::{
    Across, ChunkId, DType, Engine, Group, GroupId, Lr, Model, ParamId, ParamInfo, ParamOptions, ShardGroup,
    ShardGroupId, SumOver, UnitId,
};

use super::{At, random};
use crate::reference::Hyper;

/// A unit: its id, its chunk and the parameters it uses, in forward order.
pub struct Unit {
    pub id: UnitId,
    pub chunk: usize,
    pub params: Vec<ParamId>,
}

/// A model whose gradients pull each weight to a target of its own, with noise.
pub struct Net {
    pub model: Model,
    pub chunks: Vec<ChunkId>,
    pub units: Vec<Unit>,
    /// Those after the three that every net has.
    groups: Vec<Group>,
}

/// Betas, eps and weight decay of the groups after the default one; the last one has a learning-rate multiplier.
const NO_DECAY: ((f64, f64), f64, f64) = ((0.8, 0.95), 1e-6, 0.0);
const MULTIPLIED: (f64, f64) = (0.5, 0.1);

fn schedule(t: u64) -> f64 {
    0.03 / (1.0 + t as f64 / 3.0)
}

impl Net {
    /// Units of [`Net::mixed`] by name.
    pub const EMBED: usize = 0;
    pub const BLOCK_A: usize = 1;
    pub const BLOCK_B: usize = 2;
    pub const RARE: usize = 3;
    pub const HEAD: usize = 4;
    pub const TAIL: usize = 5;
    /// Of [`Net::with_experts`].
    pub const EXPERTS: usize = 6;

    /// A model without parameters, with three groups.
    pub fn empty() -> Self {
        let mut model = Model::new();
        let ((beta1, beta2), eps, decay) = NO_DECAY;
        let no_decay =
            Group { betas: Some((beta1, beta2)), eps: Some(eps), weight_decay: Some(decay), ..Group::default() };
        model.group(no_decay).unwrap();
        let (multiplier, decay) = MULTIPLIED;
        let multiplied = Group { lr_multiplier: multiplier, weight_decay: Some(decay), ..Group::default() };
        model.group(multiplied).unwrap();
        Self { model, chunks: Vec::new(), units: Vec::new(), groups: Vec::new() }
    }

    /// Two chunks; f32 beside bf16 (and f16 where asked for); three groups; a tied table in the first and the last unit of
    /// the first chunk; frozen, unused and sparsely written parameters; gradients in bf16 and f16 beside f32.
    pub fn mixed(with_f16: bool) -> Self {
        Self::mixed_and(with_f16, |_| ())
    }

    /// The same, and what `embed` adds to its first unit.
    fn mixed_and(with_f16: bool, embed: impl Fn(&mut Self)) -> Self {
        let half = if with_f16 { DType::F16 } else { DType::Bf16 };
        let in_group = |group| ParamOptions { group: GroupId(group), ..ParamOptions::default() };
        let mut net = Self::empty();
        net.chunk();
        net.unit("embed");
        let table = net.param("table", 240, DType::Bf16, in_group(0));
        net.param("sparse position", 33, DType::F32, in_group(0));
        embed(&mut net);
        net.unit("block a");
        net.param("a.weight", 150, DType::Bf16, in_group(0));
        net.param("a.bias", 70, DType::F32, in_group(1));
        net.param("a.scale", 9, DType::F32, ParamOptions { trainable: false, ..in_group(0) });
        net.unit("block b");
        net.param("b.weight", 130, half, in_group(2));
        net.param("b.narrow", 90, DType::Bf16, ParamOptions { grad_dtype: Some(DType::Bf16), ..in_group(1) });
        net.param("b.half gradients", 65, half, ParamOptions { grad_dtype: Some(half), ..in_group(0) });
        net.unit("rare");
        net.param("rare.weight", 64, DType::F32, in_group(0));
        net.param("unused", 31, DType::F32, in_group(2));
        net.unit("head");
        net.use_param(table);
        net.param("head.weight", 120, half, in_group(1));
        net.chunk();
        net.unit("tail");
        net.param("tail.weight", 77, DType::F32, in_group(2));
        net.param("tail.bias", 1, half, in_group(0));
        net
    }

    /// A group beyond the three of every net.
    pub fn group(&mut self, group: Group) -> GroupId {
        self.groups.push(group.clone());
        self.model.group(group).unwrap()
    }

    /// [`Net::mixed`] with copies of two weights in its first and its last chunk, one of them with three.
    pub fn with_copies() -> Self {
        let mut net = Self::mixed_and(false, |net| net.add_copies("first", None));
        net.add_copies("second", Some(DType::Bf16));
        net.param("third copy", 150, DType::Bf16, Self::copy_of("weight"));
        net
    }

    fn copy_of(weight: &str) -> ParamOptions {
        ParamOptions { shared: Some(weight.into()), ..ParamOptions::default() }
    }

    fn add_copies(&mut self, which: &str, grad_dtype: Option<DType>) {
        let weight = ParamOptions { grad_dtype, ..Self::copy_of("weight") };
        self.param(&format!("{which} copy of the weight"), 150, DType::Bf16, weight);
        let bias = ParamOptions { group: GroupId(1), ..Self::copy_of("bias") };
        self.param(&format!("{which} copy of the bias"), 5, DType::F32, bias);
    }

    /// [`Net::with_copies`] and one more unit, with parameters that are divided among `ranks` ranks: experts, and replicas.
    pub fn with_experts(ranks: usize) -> Self {
        let mut net = Self::with_copies();
        let mut group = |name: &str, across, average_over| {
            let group = ShardGroup { name: name.into(), ranks, across, average_over };
            ParamOptions { shard_group: net.model.shard_group(group), ..ParamOptions::default() }
        };
        let experts = group("experts", Across::Experts, None);
        let routed = group("experts that see all tokens", Across::Experts, Some(3));
        let replicas = group("replicas", Across::Replicas, None);
        net.unit("experts");
        net.param("expert.weight", 190, DType::Bf16, experts.clone());
        net.param("expert.bias", 3, DType::F32, ParamOptions { group: GroupId(1), ..experts.clone() });
        net.param("expert.frozen", 5, DType::F32, ParamOptions { trainable: false, ..experts });
        net.param("routed.weight", 140, DType::F32, routed);
        net.param("replica.weight", 100, DType::F32, replicas.clone());
        let narrow = ParamOptions { grad_dtype: Some(DType::Bf16), group: GroupId(2), ..replicas };
        net.param("replica.narrow", 66, DType::Bf16, narrow);
        net
    }

    /// [`Net::with_experts`], and in the same unit tensor-parallel parameters, one of them among the experts, and ones that are
    /// summed over model-parallel ranks, one of them among the replicas, and copies of one.
    pub fn parallel(ranks: usize) -> Self {
        let mut net = Self::with_experts(ranks);
        let split = ParamOptions { tensor_parallel: true, ..ParamOptions::default() };
        net.param("column.weight", 170, DType::Bf16, split.clone());
        net.param("row.weight", 64, DType::F32, ParamOptions { group: GroupId(2), ..split.clone() });
        net.param("row.frozen", 6, DType::Bf16, ParamOptions { trainable: false, ..split.clone() });
        net.param("expert.row", 33, DType::F32, ParamOptions { shard_group: ShardGroupId(1), ..split });
        let summed = ParamOptions { sum_over: SumOver::ModelParallel, ..ParamOptions::default() };
        net.param("norm.scale", 45, DType::F32, summed.clone());
        net.param("norm.narrow", 70, DType::Bf16, ParamOptions { grad_dtype: Some(DType::Bf16), ..summed.clone() });
        net.param("replica.norm", 20, DType::F32, ParamOptions { shard_group: ShardGroupId(3), ..summed.clone() });
        for name in ["copy of a norm", "other copy of a norm"] {
            net.param(name, 30, DType::F32, ParamOptions { shared: Some("norm".into()), ..summed.clone() });
        }
        net
    }

    pub fn chunk(&mut self) {
        self.chunks.push(self.model.chunk());
    }

    pub fn unit(&mut self, name: &str) {
        let chunk = self.chunks.len() - 1;
        let id = self.model.unit(self.chunks[chunk], name).unwrap();
        self.units.push(Unit { id, chunk, params: Vec::new() });
    }

    /// A parameter of the unit registered last.
    pub fn param(&mut self, name: &str, numel: usize, dtype: DType, options: ParamOptions) -> ParamId {
        let unit = self.units.last_mut().unwrap();
        let id = self.model.param_with(unit.id, name, &[numel], dtype, options).unwrap();
        unit.params.push(id);
        id
    }

    /// The unit registered last uses this one too.
    pub fn use_param(&mut self, param: ParamId) {
        let unit = self.units.last_mut().unwrap();
        self.model.use_param(unit.id, param).unwrap();
        unit.params.push(param);
    }

    pub fn params(&self) -> &[ParamInfo] {
        self.model.params()
    }

    fn name(&self, param: ParamId) -> &str {
        &self.params()[param.index()].name
    }

    /// The parameters whose gradients backward of a unit writes.
    pub fn written(&self, unit: usize) -> impl Iterator<Item = ParamId> + '_ {
        let params = self.units[unit].params.iter().copied();
        params.filter(|p| self.params()[p.index()].options.trainable && !self.name(*p).contains("unused"))
    }

    /// Whether gradients are written through `grad_zeroed`, and only every other element.
    pub fn is_sparse(&self, param: ParamId) -> bool {
        self.name(param).contains("sparse")
    }

    /// What a parameter starts from; ranks that hold other parameters under the same name have another variant.
    pub fn initial(variant: u64, param: ParamId, element: usize) -> f32 {
        random(&[1 + 2 * variant, u64::from(param.0), element as u64])
    }

    /// What a parameter is written to after a step, where it is.
    pub fn rewritten(step: u64, element: usize) -> f32 {
        random(&[4, step, element as u64])
    }

    fn target(param: ParamId, element: usize) -> f32 {
        random(&[2, u64::from(param.0), element as u64])
    }

    pub fn loss(param: ParamId, values: &[f32]) -> f64 {
        let distance = |(i, w): (usize, &f32)| f64::from(*w) - f64::from(Self::target(param, i));
        values.iter().enumerate().map(distance).map(|d| d * d).sum()
    }

    /// The gradient that one visit gives a parameter with these values.
    pub fn gradient(&self, at: At, param: ParamId, values: &[f32], scale: f32, overflows: bool) -> Vec<f32> {
        let seed = [at.rank as u64, at.step, at.microbatch as u64, at.visit as u64, u64::from(param.0)];
        let weight = 0.1 + 0.05 * random(&seed);
        let noise = |i: usize| 0.01 * random(&[&seed[..], &[i as u64]].concat());
        let pull = |(i, w): (usize, &f32)| {
            if self.is_sparse(param) && i % 2 == 1 {
                return 0.0;
            }
            scale * (weight * (w - Self::target(param, i)) + noise(i))
        };
        let mut gradient: Vec<f32> = values.iter().enumerate().map(pull).collect();
        if overflows {
            gradient[0] = f32::INFINITY;
        }
        gradient
    }

    /// What the engine is told about learning rates.
    pub fn set_lrs(engine: &mut Engine) {
        engine.set_lr(GroupId(1), Lr::schedule(schedule)).unwrap();
    }

    /// The same groups for the reference.
    pub fn hyper(&self, lr: f64, decoupled: bool) -> Vec<Hyper> {
        let (no_decay_betas, no_decay_eps, no_decay) = NO_DECAY;
        let (multiplier, multiplied_decay) = MULTIPLIED;
        let mut hyper = vec![
            Hyper { lr: Arc::new(move |_| lr), betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, decoupled },
            Hyper {
                lr: Arc::new(schedule),
                betas: no_decay_betas,
                eps: no_decay_eps,
                weight_decay: no_decay,
                decoupled,
            },
            Hyper {
                lr: Arc::new(move |_| lr * multiplier),
                betas: (0.9, 0.999),
                eps: 1e-8,
                weight_decay: multiplied_decay,
                decoupled,
            },
        ];
        hyper.extend(self.groups.iter().map(|group| {
            let lr = group.lr.unwrap_or(lr) * group.lr_multiplier;
            Hyper {
                lr: Arc::new(move |_| lr),
                betas: group.betas.unwrap_or((0.9, 0.999)),
                eps: group.eps.unwrap_or(1e-8),
                weight_decay: group.weight_decay.unwrap_or(0.01),
                decoupled,
            }
        }));
        hyper
    }
}
