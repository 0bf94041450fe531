//! Counts how often the plan's loops touch a parameter or a bucket, in tests only: rule L11 is about counts, not times.

#[cfg(test)]
thread_local! {
    static TICKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// One parameter or bucket was touched.
#[inline]
pub(super) fn tick() {
    #[cfg(test)]
    TICKS.with(|t| t.set(t.get() + 1));
}

/// How many were touched on this thread while `f` ran.
#[cfg(test)]
pub(super) fn count<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = TICKS.get();
    let out = f();
    (out, TICKS.get() - before)
}

#[cfg(test)]
mod tests {
    use gatherflow_kernels::DType;

    use super::count;
    use crate::plan::{
        Alignment, Bucketing, ChunkSpec, ParamId, ParamSpec, Pipeline, Plan, PlanInput, Rank, Storage, UnitSpec,
    };

    /// `n` parameters, each in a unit and (two types in turn) mostly in a bucket of its own.
    fn input(n: usize) -> PlanInput {
        let dtype = |i: usize| if i.is_multiple_of(2) { DType::Bf16 } else { DType::F32 };
        let unit = |i: usize| UnitSpec { name: format!("u{i}"), params: vec![ParamId::from_index(i)] };
        PlanInput {
            ranks: 4,
            model_parallel: 1,
            pipeline: Pipeline::default(),
            shard_groups: Vec::new(),
            chunks: vec![ChunkSpec { units: (0..n).map(unit).collect() }],
            params: (0..n).map(|i| ParamSpec::new(format!("p{i}"), [100 + i % 7], dtype(i))).collect(),
            groups: 1,
            bucketing: Bucketing::Size(150),
            alignment: Alignment::Standard,
            storage: Storage::Views,
        }
    }

    #[test]
    fn planning_touches_each_parameter_and_bucket_a_fixed_number_of_times() {
        for n in [10, 100, 1000, 10_000] {
            let (plan, touched) = count(|| Plan::new(&input(n)));
            let plan = plan.expect("a plan");
            assert!(plan.buckets().len() >= n / 2);
            assert!(touched <= 8 * (n + plan.buckets().len()) as u64, "{touched} for {n} parameters");
            assert!(touched >= 4 * n as u64, "the loops are counted");
        }
    }

    #[test]
    fn the_pieces_of_all_ranks_are_at_most_parameters_and_shards() {
        let plan = Plan::new(&PlanInput { bucketing: Bucketing::Size(5000), ..input(1000) }).expect("a plan");
        let shards = || plan.buckets().iter().flat_map(|b| (0..4).map(move |r| (Rank(r), b.id)));
        let (pieces, touched) = count(|| shards().map(|(rank, bucket)| plan.owned(rank, bucket).len()).sum::<usize>());
        assert!(pieces <= 1000 + 4 * plan.buckets().len());
        assert_eq!(touched, pieces as u64, "only what is owned is looked at");
    }
}
