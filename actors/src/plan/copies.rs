//! Copies of one weight, on several chunks say: sets of buckets whose reduced shards are summed (SPEC T0).
//!
//! Each trained copy has a bucket of its own (SPEC L10), cut alike, so a rank owns the same elements of every copy it has and
//! their sum needs no communication. Copies start equal, get the same gradient and the same update, and so stay equal. What
//! other pipeline stages have of a weight is in `stages`.

use std::collections::HashMap;

use gatherflow_kernels::DType;

use super::groups::ShardGroupPlan;
use super::ids::{BucketId, ParamId};
use super::input::{ParamSpec, SumOver};
use super::{ParamPlan, Plan, PlanInput};

/// What copies of one weight must have in common to stay equal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits<'a> {
    shape: &'a [usize],
    dtype: DType,
    trainable: bool,
    group: usize,
    /// Name and size; `None` where all data-parallel ranks share it.
    shard_group: Option<(&'a str, usize)>,
    tensor_parallel: bool,
    sum_over: SumOver,
}

impl<'a> Traits<'a> {
    pub(super) fn of_spec(param: &'a ParamSpec, input: &'a PlanInput) -> Self {
        let group = param.shard_group.checked_sub(1).and_then(|index| input.shard_groups.get(index));
        Self {
            shape: &param.shape,
            dtype: param.dtype,
            trainable: param.trainable,
            group: param.group,
            shard_group: group.map(|group| (&*group.name, group.ranks)),
            tensor_parallel: param.tensor_parallel,
            sum_over: param.sum_over,
        }
    }

    pub(super) fn of_plan(param: &'a ParamPlan, plan: &'a Plan) -> Self {
        let ShardGroupPlan { name, ranks, .. } = &plan.shard_groups[param.shard_group];
        Self {
            shape: &param.shape,
            dtype: param.dtype,
            trainable: param.trainable,
            group: param.group,
            shard_group: name.as_deref().map(|name| (name, *ranks)),
            tensor_parallel: param.tensor_parallel,
            sum_over: param.sum_over,
        }
    }

    /// The first thing in which another copy differs.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let differs = [
            ("shape", self.shape != other.shape),
            ("dtype", self.dtype != other.dtype),
            ("trainable", self.trainable != other.trainable),
            ("shard group", self.shard_group != other.shard_group),
            ("tensor-parallel", self.tensor_parallel != other.tensor_parallel),
            ("what it is summed over", self.sum_over != other.sum_over),
            ("group", self.trainable && self.group != other.group),
        ];
        differs.into_iter().find(|(_, differs)| *differs).map(|(what, _)| what)
    }
}

/// By the first copy's registration; each set's copies in registration order. At least two, or one of a weight of which there are
/// `others`.
pub(super) fn sets(params: &[ParamPlan], others: impl Fn(&str) -> bool) -> Vec<Vec<BucketId>> {
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut sets: Vec<(&str, Vec<BucketId>)> = Vec::new();
    for param in params {
        let (Some(shared), Some(bucket)) = (&param.shared, param.home.bucket()) else { continue };
        let at = *index.entry(shared).or_insert(sets.len());
        if at == sets.len() {
            sets.push((shared, Vec::new()));
        }
        sets[at].1.push(bucket);
    }
    let several = |(shared, set): &(&str, Vec<BucketId>)| set.len() > 1 || others(shared);
    sets.into_iter().filter(several).map(|(_, set)| set).collect()
}

impl Plan {
    /// Sets of buckets that hold this rank's copies of one weight each, in registration order.
    pub fn copies(&self) -> &[Vec<BucketId>] {
        &self.copies
    }

    /// The trained copies of a parameter that this rank has, itself among them, in registration order; none if there is no
    /// other anywhere.
    pub fn copies_of(&self, param: ParamId) -> impl Iterator<Item = ParamId> + '_ {
        let bucket = self.bucket_of(param);
        let set = self.copies.iter().find(move |set| bucket.is_some_and(|bucket| set.contains(&bucket)));
        set.into_iter().flatten().flat_map(|bucket| self.bucket(*bucket).params.iter().copied())
    }
}
