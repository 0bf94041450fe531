//! Pipeline stages: what the plans of one job have in common though each stage has other chunks (SPEC T0, T2a).
//!
//! Each stage plans its own chunks, without knowing of the others. At start-up ranks show each other their plans, and
//! [`Plan::joined`] finds what concerns several stages: the copies of one weight (a tied embedding on the first and the last),
//! which are summed over the stages behind all reduces of a step, and a numbering of collectives in which those of several
//! stages have the same number on each (rule O1). A stage with fewer buckets than another leaves numbers out.

use std::collections::HashMap;
use std::sync::Arc;

use super::copies::{self, Traits};
use super::error::PlanError;
use super::ids::{BucketId, ParamId, Rank};
use super::{JOB, ParamPlan, Plan, Purpose};

/// A weight with trained copies on several stages, as all ranks number them: by the first copy's stage and registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedWeight {
    /// The name that its copies share.
    pub shared: String,
    /// The stages that have it, ascending; at least two.
    pub stages: Vec<usize>,
    /// Its first copy.
    pub first: String,
}

/// How many numbers the collectives of a step take, on every stage alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Broadcasts of initial parameters within a stage.
    pub start: u64,
    /// Reduces, with the sums that follow each.
    pub reduces: u64,
    /// Sums of weights over stages.
    pub staged: u64,
    /// Gathers.
    pub gathers: u64,
}

impl Plan {
    /// This plan in a job whose stages have these, its own among them.
    ///
    /// # Errors
    /// [`PlanError`], the same on every rank: two stages have parameters of one name that are no copies of one weight, or
    /// copies that differ in more than their name.
    pub fn joined(&self, plans: Vec<Arc<Self>>) -> Result<Self, PlanError> {
        let staged = staged(&plans)?;
        let mut joined = self.clone();
        for param in joined.params.iter_mut().filter(|param| param.first_copy && param.shared.is_some()) {
            let weight = staged.iter().find(|weight| Some(&weight.shared) == param.shared.as_ref());
            param.first_copy = weight.is_none_or(|weight| weight.stages[0] == self.pipeline.stage);
        }
        joined.copies = copies::sets(&joined.params, |shared| staged.iter().any(|weight| weight.shared == shared));
        joined.staged = staged;
        joined.stages = plans.into();
        Ok(joined)
    }

    /// Whether it knows of all stages there are.
    pub fn is_joined(&self) -> bool {
        self.pipeline.stages == 1 || !self.stages.is_empty()
    }

    /// Weights with trained copies on several stages; none in a plan that was not [joined](Plan::joined).
    pub fn staged(&self) -> &[StagedWeight] {
        &self.staged
    }

    /// The weights of [`Plan::staged`] that this stage has copies of, ascending by number, each with the bucket of the first of
    /// its copies.
    pub fn staged_here(&self) -> impl Iterator<Item = (usize, BucketId)> + '_ {
        let firsts = self.copies.iter().filter_map(|set| set.first().copied());
        let mut here: Vec<_> = firsts.filter_map(|bucket| Some((self.staged_weight(bucket)?, bucket))).collect();
        here.sort_unstable();
        here.into_iter()
    }

    /// Which of [`Plan::staged`] a bucket has a copy of.
    fn staged_weight(&self, bucket: BucketId) -> Option<usize> {
        let shared = self.param(*self.bucket(bucket).params.first()?).shared.as_ref()?;
        self.staged.iter().position(|weight| weight.shared == *shared)
    }

    /// The numbers that collectives take.
    pub fn numbers(&self) -> Numbers {
        let own = self.own_numbers();
        let numbers = self.stages.iter().map(|plan| plan.own_numbers()).fold(own, |most, own| Numbers {
            start: most.start.max(own.start),
            reduces: most.reduces.max(own.reduces),
            staged: 0,
            gathers: most.gathers.max(own.gathers),
        });
        Numbers { staged: self.staged.len() as u64, ..numbers }
    }

    fn own_numbers(&self) -> Numbers {
        let broadcast = |purpose: Purpose| matches!(purpose, Purpose::Params(_) | Purpose::Frozen(_));
        let sums = self.buckets.iter().flat_map(|bucket| self.sum_groups(bucket.id)).filter(|group| *group != JOB);
        Numbers {
            start: self.memory().allocations.iter().filter(|allocation| broadcast(allocation.purpose)).count() as u64,
            reduces: (self.buckets.len() + sums.count()) as u64,
            staged: 0,
            gathers: self.buckets.len() as u64,
        }
    }

    /// The plans of all stages, before they were joined; this one alone where there is one stage.
    pub fn stages(&self) -> impl Iterator<Item = &Self> {
        let alone = self.stages.is_empty().then_some(self);
        alone.into_iter().chain(self.stages.iter().map(Arc::as_ref))
    }

    /// The plan that a rank has, which may be of another stage.
    pub fn on(&self, rank: Rank) -> &Self {
        self.stages().nth(self.stage_of(rank)).unwrap_or(self)
    }

    /// All stages' parameters of which the job has a value of their own: a weight with copies has one, by the name of the first.
    pub fn distinct_params(&self) -> impl Iterator<Item = (&Self, &ParamPlan)> {
        self.stages().flat_map(|plan| plan.params.iter().map(move |param| (plan, param))).filter(|(plan, param)| {
            let weight = self.staged.iter().find(|weight| Some(&weight.shared) == param.shared.as_ref());
            param.first_copy && weight.is_none_or(|weight| weight.stages[0] == plan.pipeline.stage)
        })
    }

    /// The name of a weight of which a parameter may be a copy: that of the first copy of all stages.
    pub fn first_name(&self, param: ParamId) -> &str {
        let first = self.copies_of(param).next().unwrap_or(param);
        let weight = self.bucket_of(first).and_then(|bucket| self.staged_weight(bucket));
        weight.map_or(&self.param(first).name, |weight| &self.staged[weight].first)
    }
}

/// The weights that several stages have.
fn staged(plans: &[Arc<Plan>]) -> Result<Vec<StagedWeight>, PlanError> {
    let mut names: HashMap<&str, (usize, &ParamPlan)> = HashMap::new();
    let mut weights: Vec<(&ParamPlan, StagedWeight)> = Vec::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    for (stage, param) in plans.iter().enumerate().flat_map(|(stage, plan)| plan.params.iter().map(move |p| (stage, p)))
    {
        let (first, named) = *names.entry(&param.name).or_insert((stage, param));
        if first != stage && (param.shared.is_none() || param.shared != named.shared) {
            return Err(PlanError::OnTwoStages { name: param.name.clone(), first, second: stage });
        }
        let Some(shared) = &param.shared else { continue };
        let number = *numbers.entry(shared).or_insert(weights.len());
        if number == weights.len() {
            let weight = StagedWeight { shared: shared.clone(), stages: vec![stage], first: param.name.clone() };
            weights.push((param, weight));
        }
        let (first, weight) = &mut weights[number];
        let (mine, theirs) = (Traits::of_plan(param, &plans[stage]), Traits::of_plan(first, &plans[weight.stages[0]]));
        if let Some(what) = theirs.difference(&mine) {
            let (first, other) = (first.name.clone(), param.name.clone());
            return Err(PlanError::SharedDiffer { shared: shared.clone(), first, other, what });
        }
        if weight.stages.last() != Some(&stage) {
            weight.stages.push(stage);
        }
    }
    let several = |(first, weight): &(&ParamPlan, StagedWeight)| first.trainable && weight.stages.len() > 1;
    Ok(weights.into_iter().filter(several).map(|(_, weight)| weight).collect())
}
