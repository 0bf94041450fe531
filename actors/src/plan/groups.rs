//! How the ranks of a job are divided, and which part of each division a rank belongs to (SPEC L2, T0, T2a).
//!
//! The job has `ranks` ranks: `model_parallel` adjacent ones share one copy of the model, so rank r is model-parallel rank
//! `r % model_parallel` and data-parallel rank `r / model_parallel` of d. Each run of `model_parallel / stages` of them is a
//! pipeline stage: its ranks hold the same parameters, or parts of them, and are alike in every order. A shard group of its own
//! has fewer ranks than d, which its size divides: consecutive data-parallel ranks, so d / size groups stand side by side. What
//! the others hold is its [`Across`].
//!
//! Every division has a number, the same on every rank that takes part and compared as part of each collective (rule O2); a rank
//! runs the collective with the members of its own part. Stages divide themselves each in its own way, so their divisions have
//! numbers of their own: `stages x kind + stage`. With one stage the number is the kind.

use gatherflow_kernels::Members;

use super::ids::{BucketId, Rank};
use super::input::{Pipeline, SumOver};
use super::{ParamPlan, Plan};

/// What the other shard groups beside a rank's own hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Across {
    /// Replicas of the same parameters: each reduce is followed by a sum over the groups.
    #[default]
    Replicas,
    /// Other parameters under the same names (experts): nothing is summed over the groups.
    Experts,
}

/// A shard group with fewer ranks than all that share the model's other parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardGroupSpec {
    /// Unique among shard groups.
    pub name: String,
    /// Its d: divides the number of data-parallel ranks.
    pub ranks: usize,
    /// What the other groups hold.
    pub across: Across,
    /// Averaging divides by this number of ranks; `None`: by as many as add up.
    pub average_over: Option<usize>,
}

/// A shard group as planned. Number 0 is that of all data-parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardGroupPlan {
    /// Its name; `None` for number 0.
    pub name: Option<String>,
    /// Its d: how many ranks share one set of shards.
    pub ranks: usize,
    /// What the other groups hold.
    pub across: Across,
    /// Averaging divides by this number of ranks.
    pub average_over: usize,
}

/// All ranks of the job.
pub const JOB: u32 = 0;
/// Kinds of divisions: the ranks that share a model-parallel rank.
const DATA_PARALLEL: u32 = 1;
/// The ranks of a stage that share a data-parallel rank.
const MODEL_PARALLEL: u32 = 2;
/// All ranks of a stage.
const STAGE: u32 = 3;
/// Ranks of several stages that have copies of weight `i` of [`Plan::staged`]: one more for each. Behind these, shard group `i`
/// has two: its own, and what lies across it.
const FIRST_STAGED: u32 = 4;

impl Plan {
    /// d: the number of ranks that share one set of shards, unless a parameter names another group.
    pub fn data_parallel(&self) -> usize {
        self.ranks / self.model_parallel
    }

    /// The number of ranks that share one copy of the model.
    pub fn model_parallel(&self) -> usize {
        self.model_parallel
    }

    /// The number of ranks of one pipeline stage that share one copy of the model.
    pub fn tensor_parallel(&self) -> usize {
        self.model_parallel / self.pipeline.stages
    }

    /// Which pipeline stage this is a plan of, and how many there are.
    pub fn pipeline(&self) -> Pipeline {
        self.pipeline
    }

    /// The pipeline stage of a rank.
    pub fn stage_of(&self, rank: Rank) -> usize {
        self.model_parallel_rank(rank) / self.tensor_parallel()
    }

    /// A rank's number among those of its stage that share its copy of the model.
    fn tensor_parallel_rank(&self, rank: Rank) -> usize {
        self.model_parallel_rank(rank) % self.tensor_parallel()
    }

    /// A rank's number among those that share its copy of the model.
    pub fn model_parallel_rank(&self, rank: Rank) -> usize {
        rank.0 % self.model_parallel
    }

    /// A rank's number among those that train the same part of the model on other data.
    pub fn data_parallel_rank(&self, rank: Rank) -> usize {
        rank.0 / self.model_parallel
    }

    /// Shard groups by number; the first is that of all data-parallel ranks.
    pub fn shard_groups(&self) -> &[ShardGroupPlan] {
        &self.shard_groups
    }

    /// The shard group of a bucket.
    pub fn shard_group(&self, bucket: BucketId) -> &ShardGroupPlan {
        &self.shard_groups[self.buffer(self.bucket(bucket).buffer).shard_group]
    }

    /// Which shard of a bucket a rank owns.
    pub fn slot(&self, rank: Rank, bucket: BucketId) -> usize {
        self.data_parallel_rank(rank) % self.shard_group(bucket).ranks
    }

    /// What a bucket's gradients are multiplied by beyond the average over d: other groups average over other numbers of ranks.
    pub fn gradient_ratio(&self, bucket: BucketId) -> f64 {
        self.data_parallel() as f64 / self.shard_group(bucket).average_over as f64
    }

    /// Whether norm and zero count have a parameter from this rank: each logical element once (SPEC T2a). The first copy of a
    /// shared one, on the first of several replicas, and on the stage's first model-parallel rank only unless it is
    /// tensor-parallel.
    pub fn counts(&self, rank: Rank, param: &ParamPlan) -> bool {
        let group = &self.shard_groups[param.shard_group];
        let replica = self.data_parallel_rank(rank) / group.ranks;
        param.first_copy
            && (group.across == Across::Experts || replica == 0)
            && (param.tensor_parallel || self.tensor_parallel_rank(rank) == 0)
    }

    /// Of how many different parts of the model a parameter's name is the name: groups of experts, and model-parallel ranks.
    pub fn parts(&self, param: &ParamPlan) -> (usize, usize) {
        let group = &self.shard_groups[param.shard_group];
        let experts = if group.across == Across::Experts { self.data_parallel() / group.ranks } else { 1 };
        (experts, if param.tensor_parallel { self.tensor_parallel() } else { 1 })
    }

    /// Which of its parts ([`Plan::parts`]) a rank has.
    pub fn part(&self, rank: Rank, param: &ParamPlan) -> (usize, usize) {
        let (experts, _) = self.parts(param);
        let group = self.data_parallel_rank(rank) / self.shard_groups[param.shard_group].ranks;
        let layer = if param.tensor_parallel { self.tensor_parallel_rank(rank) } else { 0 };
        (if experts > 1 { group } else { 0 }, layer)
    }

    /// The divisions whose parts hold a parameter alike: all ranks of the stage, unless each model-parallel rank or each shard
    /// group has another part of the model in it. Experts that are not tensor-parallel are alike in two ways, and so is a weight
    /// that other stages have too.
    pub fn holders(&self, param: &ParamPlan) -> impl Iterator<Item = u32> {
        let experts = self.shard_groups[param.shard_group].across == Across::Experts && param.shard_group > 0;
        let (first, second) = match (experts, param.tensor_parallel) {
            (true, false) if self.tensor_parallel() > 1 => {
                (self.group_number(param.shard_group), Some(self.model_parallel_group()))
            }
            (true, _) => (self.group_number(param.shard_group), None),
            (false, true) => (self.group_number(0), None),
            (false, false) => (self.number(STAGE), None),
        };
        let bucket = param.home.bucket().filter(|_| param.shared.is_some());
        let staged = bucket.and_then(|own| self.staged_here().find(|(_, bucket)| *bucket == own));
        let across = staged.map(|(weight, _)| self.staged_group(weight));
        std::iter::once(first).chain(second).chain(across)
    }

    /// The number of a kind of division in this stage.
    fn number(&self, kind: u32) -> u32 {
        let (stage, stages) = (self.pipeline.stage as u32, self.pipeline.stages as u32);
        match kind {
            // Where there is one stage only, it is the job.
            JOB => JOB,
            STAGE if stages == 1 => JOB,
            kind => stages * kind + stage,
        }
    }

    /// The kind of division behind a number.
    pub fn kind(&self, division: u32) -> usize {
        division as usize / self.pipeline.stages
    }

    /// The division of this stage's ranks that share a copy of the model.
    pub fn model_parallel_group(&self) -> u32 {
        self.number(MODEL_PARALLEL)
    }

    /// The division of the ranks that hold copies of weight `index` of [`Plan::staged`], the same on all their stages.
    pub fn staged_group(&self, index: usize) -> u32 {
        self.pipeline.stages as u32 * (FIRST_STAGED + index as u32)
    }

    /// The first kind of division of the shard groups.
    fn first_group(&self) -> u32 {
        FIRST_STAGED + self.staged.len() as u32
    }

    /// Whether a rank's values of a parameter are the ones that others with the same part of the model start from.
    pub fn is_source(&self, rank: Rank, param: &ParamPlan) -> bool {
        let group = &self.shard_groups[param.shard_group];
        let d = if group.across == Across::Replicas { self.data_parallel() } else { group.ranks };
        self.data_parallel_rank(rank).is_multiple_of(d)
    }

    /// The division over which a bucket is reduced and gathered.
    pub fn reduce_group(&self, bucket: BucketId) -> u32 {
        self.group_number(self.buffer(self.bucket(bucket).buffer).shard_group)
    }

    /// The division whose parts hold a shard group's parameters alike.
    pub fn group_number(&self, shard_group: usize) -> u32 {
        match shard_group {
            _ if self.shard_groups[shard_group].ranks < self.data_parallel() => {
                self.number(self.first_group() + 2 * (shard_group as u32 - 1))
            }
            _ if self.model_parallel > 1 => self.number(DATA_PARALLEL),
            _ => JOB,
        }
    }

    /// The divisions over whose parts a bucket's reduced shards are summed, one after the other; [`JOB`] is none.
    pub fn sum_groups(&self, bucket: BucketId) -> [u32; 2] {
        let buffer = self.buffer(self.bucket(bucket).buffer);
        let group = self.shard_group(bucket);
        let replicas = group.across == Across::Replicas && group.ranks < self.data_parallel();
        let beside = || self.number(self.first_group() + 2 * (buffer.shard_group as u32 - 1) + 1);
        let parts = buffer.sum_over == SumOver::ModelParallel && self.tensor_parallel() > 1;
        match (replicas, parts) {
            (true, true) => [beside(), self.model_parallel_group()],
            (true, false) => [beside(), JOB],
            (false, true) => [self.model_parallel_group(), JOB],
            (false, false) => [JOB; 2],
        }
    }

    /// By [kind](Plan::kind) of division: the ranks of a rank's own part of it.
    pub fn divisions(&self, rank: Rank) -> Vec<Members> {
        let kinds = self.first_group() + 2 * (self.shard_groups.len() as u32 - 1);
        (0..kinds).map(|kind| self.members_of_kind(rank, kind)).collect()
    }

    /// The ranks that have this rank's plan: all of its stage.
    pub fn stage_members(&self, rank: Rank) -> Members {
        self.members_of_kind(rank, STAGE)
    }

    /// The ranks of a rank's own part of a division.
    pub fn members(&self, rank: Rank, division: u32) -> Members {
        self.members_of_kind(rank, self.kind(division) as u32)
    }

    fn members_of_kind(&self, rank: Rank, kind: u32) -> Members {
        let (d, model, tensor) = (self.data_parallel(), self.model_parallel, self.tensor_parallel());
        let (at, layer) = (self.data_parallel_rank(rank), self.model_parallel_rank(rank));
        let (stage, part) = (self.stage_of(rank), self.tensor_parallel_rank(rank));
        let of = |ranks: &mut dyn Iterator<Item = usize>| Members::of(ranks.map(|at| at * model + layer), self.ranks);
        let first_group = self.first_group();
        match kind {
            JOB => Members::ALL,
            DATA_PARALLEL => of(&mut (0..d)),
            MODEL_PARALLEL => Members::of((0..tensor).map(|part| at * model + stage * tensor + part), self.ranks),
            STAGE => Members::of((0..self.ranks).filter(|other| self.stage_of(Rank(*other)) == stage), self.ranks),
            staged if staged < first_group => {
                let stages = &self.staged[(staged - FIRST_STAGED) as usize].stages;
                Members::of(stages.iter().map(|stage| at * model + stage * tensor + part), self.ranks)
            }
            own => {
                let group = &self.shard_groups[1 + (own - first_group) as usize / 2];
                if (own - first_group).is_multiple_of(2) {
                    let start = at / group.ranks * group.ranks;
                    of(&mut (start..start + group.ranks))
                } else {
                    of(&mut (at % group.ranks..d).step_by(group.ranks))
                }
            }
        }
    }
}

/// The groups of a checked input.
pub(super) fn plan(d: usize, specs: &[ShardGroupSpec]) -> Vec<ShardGroupPlan> {
    let all = ShardGroupPlan { name: None, ranks: d, across: Across::Experts, average_over: d };
    let named = specs.iter().map(|spec| ShardGroupPlan {
        name: Some(spec.name.clone()),
        ranks: spec.ranks,
        across: spec.across,
        average_over: spec.average_over.unwrap_or(if spec.across == Across::Replicas { d } else { spec.ranks }),
    });
    std::iter::once(all).chain(named).collect()
}
