//! Copies of one weight, on several chunks say: sets of buckets whose reduced shards are summed (SPEC T0).
//!
//! Each trained copy has a bucket of its own (SPEC L10), cut alike, so a rank owns the same elements of every copy and the sum
//! needs no communication. Copies start equal, get the same gradient and the same update, and so stay equal.

use std::collections::HashMap;

use super::ids::{BucketId, ParamId};
use super::{ParamPlan, Plan};

/// By the first copy's registration; each set's copies in registration order, at least two.
pub(super) fn sets(params: &[ParamPlan]) -> Vec<Vec<BucketId>> {
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut sets: Vec<Vec<BucketId>> = Vec::new();
    for param in params {
        let (Some(shared), Some(bucket)) = (&param.shared, param.home.bucket()) else { continue };
        let at = *index.entry(shared).or_insert(sets.len());
        if at == sets.len() {
            sets.push(Vec::new());
        }
        sets[at].push(bucket);
    }
    sets.retain(|set| set.len() > 1);
    sets
}

impl Plan {
    /// Sets of buckets that hold copies of one weight each, in registration order.
    pub fn copies(&self) -> &[Vec<BucketId>] {
        &self.copies
    }

    /// The trained copies of a parameter, itself among them, in registration order; none if it has no other.
    pub fn copies_of(&self, param: ParamId) -> impl Iterator<Item = ParamId> + '_ {
        let bucket = self.bucket_of(param);
        let set = self.copies.iter().find(move |set| bucket.is_some_and(|bucket| set.contains(&bucket)));
        set.into_iter().flatten().flat_map(|bucket| self.bucket(*bucket).params.iter().copied())
    }
}
