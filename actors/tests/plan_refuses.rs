//! What cannot be planned is refused by name, with what to do about it, and never panics.
#![allow(clippy::unwrap_used)]

use gatherflow_actors::plan::{
    Across, Bucketing, ChunkSpec, ParamId, ParamSpec, Pipeline, Plan, PlanError, PlanInput, Rank, ShardGroupSpec,
    Storage, SumOver, UnitSpec,
};
use gatherflow_kernels::DType;

/// Two parameters, `w` and `b`, in one unit, on two ranks.
fn input() -> PlanInput {
    let params = vec![ParamSpec::new("w", [4, 4], DType::Bf16), ParamSpec::new("b", [4], DType::Bf16)];
    let unit = UnitSpec { name: "layer".into(), params: vec![ParamId(0), ParamId(1)] };
    PlanInput {
        ranks: 2,
        chunks: vec![ChunkSpec { units: vec![unit] }],
        params,
        groups: 1,
        bucketing: Bucketing::Default,
        alignment: gatherflow_actors::plan::Alignment::Standard,
        storage: Storage::Views,
        model_parallel: 1,
        pipeline: Pipeline::default(),
        shard_groups: Vec::new(),
    }
}

/// The error of the input once `change` has spoilt it; checks that the message names every word.
fn refused(words: &[&str], change: impl FnOnce(&mut PlanInput)) -> PlanError {
    let mut spoilt = input();
    assert!(Plan::new(&spoilt).is_ok());
    change(&mut spoilt);
    let error = Plan::new(&spoilt).unwrap_err();
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    error
}

#[test]
fn no_ranks_and_absurdly_many_ranks_are_refused() {
    assert_eq!(refused(&["0 ranks"], |i| i.ranks = 0), PlanError::NoRanks);
    refused(&["ranks are too many"], |i| i.ranks = usize::MAX);
}

#[test]
fn a_model_without_units_is_refused() {
    assert_eq!(refused(&["no units"], |i| i.chunks.clear()), PlanError::NoUnits);
    assert_eq!(refused(&["no units"], |i| i.chunks[0].units.clear()), PlanError::NoUnits);
    let error = refused(&["chunk 1 has no units"], |i| i.chunks.push(ChunkSpec::default()));
    assert_eq!(error, PlanError::EmptyChunk { chunk: 1 });
}

#[test]
fn a_parameter_that_does_not_fit_into_its_gradients_memory_is_refused_with_storage_shared_only() {
    let narrow = |i: &mut PlanInput| (i.params[1].dtype, i.params[1].grad_dtype) = (DType::F32, DType::Bf16);
    let words = ["`b`", "f32", "bf16 gradients", "storage `shared`", "give it f32 gradients", "storage `views`"];
    let error = refused(&words, |i| {
        narrow(i);
        i.storage = Storage::Shared;
    });
    assert_eq!(error, PlanError::DoesNotFit { name: "b".into(), dtype: DType::F32, grad_dtype: DType::Bf16 });
    let mut views = input();
    narrow(&mut views);
    let plan = Plan::new(&views).unwrap();
    assert!(plan.memory_with(Storage::Shared).is_none() && plan.memory_with(Storage::Views).is_some());
    assert!(plan.describe().contains("storage shared: not with gradients smaller than their parameters"));
    // Of equal size it fits, and a frozen parameter has no gradient to fit into.
    let mut shared = PlanInput { storage: Storage::Shared, ..input() };
    shared.params[0].grad_dtype = DType::Bf16;
    narrow(&mut shared);
    shared.params[1].trainable = false;
    assert!(Plan::new(&shared).is_ok());
}

#[test]
fn a_parameter_registered_twice_is_refused() {
    let error = refused(&["`w`", "registered twice", "parameter 0 and parameter 1"], |i| i.params[1].name = "w".into());
    assert_eq!(error, PlanError::RegisteredTwice { name: "w".into(), first: ParamId(0), second: ParamId(1) });
}

#[test]
fn shapes_without_elements_are_refused() {
    refused(&["`w`", "[]", "at least 1"], |i| i.params[0].shape.clear());
    refused(&["`b`", "[3, 0]"], |i| i.params[1].shape = vec![3, 0]);
    refused(&["`b`", "[0]"], |i| i.params[1] = ParamSpec { trainable: false, ..ParamSpec::new("b", [0], DType::F32) });
}

#[test]
fn shapes_beyond_memory_are_refused_without_overflow() {
    refused(&["`w`", "larger"], |i| i.params[0].shape = vec![usize::MAX, usize::MAX, usize::MAX]);
    refused(&["`b`", "larger"], |i| i.params[1].shape = vec![usize::MAX]);
    refused(&["`b`", "larger"], |i| i.params[1].shape = vec![1 << 31, 1 << 31]);
    // Each fits, both together do not.
    refused(&["`b`", "larger"], |i| {
        let most = isize::MAX.unsigned_abs() / 24 - 1000;
        i.params[0].shape = vec![most / 2];
        i.params[1].shape = vec![most / 2 + 4000];
    });
}

#[test]
fn a_parameter_that_no_unit_uses_is_not_dropped_without_a_word() {
    let error = refused(&["`b`", "used by no unit"], |i| i.chunks[0].units[0].params.truncate(1));
    assert_eq!(error, PlanError::UsedByNoUnit { name: "b".into() });
}

#[test]
fn a_unit_that_lists_what_was_never_registered_is_refused() {
    refused(&["unit `layer`", "chunk 0", "parameter 2", "only 2"], |i| i.chunks[0].units[0].params.push(ParamId(2)));
    refused(&["parameter 4294967295"], |i| i.chunks[0].units[0].params.push(ParamId(u32::MAX)));
}

#[test]
fn groups_and_chunks_out_of_range_are_refused() {
    refused(&["`b`", "group 1", "1 groups"], |i| i.params[1].group = 1);
    refused(&["`w`", "group 0", "0 groups"], |i| i.groups = 0);
    refused(&["`b`", "chunk 3", "1 chunks"], |i| i.params[1].chunk = 3);
}

#[test]
fn sixteen_bit_gradients_of_another_kind_are_refused() {
    refused(&["`w`", "bf16 with f16 gradients", "f32 gradients"], |i| i.params[0].grad_dtype = DType::F16);
    refused(&["`w`", "f16 with bf16 gradients"], |i| {
        i.params[0].dtype = DType::F16;
        i.params[0].grad_dtype = DType::Bf16;
    });
}

#[test]
fn bucket_sizes_and_numbers_of_zero_are_refused() {
    assert_eq!(refused(&["bucket size of 0"], |i| i.bucketing = Bucketing::Size(0)), PlanError::ZeroBucketSize);
    assert_eq!(refused(&["0 buckets"], |i| i.bucketing = Bucketing::Count(0)), PlanError::ZeroBuckets);
}

#[test]
fn ranks_that_groups_or_copies_of_the_model_cannot_share_are_refused() {
    let experts = |ranks| ShardGroupSpec { name: "experts".into(), ranks, across: Across::Experts, average_over: None };
    refused(&["`w`", "shard group 1", "0 besides"], |i| i.params[0].shard_group = 1);
    for ranks in [0, 3, 4] {
        refused(&["`experts`", &format!("of {ranks} ranks"), "divide the 2"], |i| {
            i.shard_groups = vec![experts(ranks)];
        });
    }
    refused(&["`experts`", "twice"], |i| i.shard_groups = vec![experts(1), experts(2)]);
    refused(&["`experts`", "over 0 ranks"], |i| {
        i.shard_groups = vec![ShardGroupSpec { average_over: Some(0), ..experts(1) }];
    });
    refused(&["`w`", "tensor-parallel", "summed"], |i| {
        i.params[0].tensor_parallel = true;
        i.params[0].sum_over = SumOver::ModelParallel;
    });
    for model_parallel in [0, 3, 4] {
        refused(&["2 ranks", &format!("by {model_parallel}")], |i| i.model_parallel = model_parallel);
    }
    for (stage, stages) in [(0, 0), (0, 2), (1, 1), (7, 3)] {
        let words = [&format!("stage {stage} of {stages}"), "`pipeline_parallel`", "1 model-parallel ranks"];
        refused(&words, |i| i.pipeline = Pipeline { stage, stages });
    }
}

#[test]
fn copies_of_a_shared_weight_that_would_come_apart_are_refused() {
    let share = |i: &mut PlanInput| {
        i.params[1].shape = vec![4, 4];
        i.params.iter_mut().for_each(|p| p.shared = Some("embedding".into()));
    };
    let mut fine = input();
    share(&mut fine);
    assert!(Plan::new(&fine).is_ok());
    let spoilt = |what: &str, change: fn(&mut ParamSpec)| {
        refused(&["`w`", "`b`", "`embedding`", what], |i| {
            share(i);
            i.groups = 2;
            change(&mut i.params[1]);
        })
    };
    spoilt("shape", |p| p.shape = vec![16]);
    spoilt("dtype", |p| p.dtype = DType::F32);
    spoilt("group", |p| p.group = 1);
    spoilt("trainable", |p| p.trainable = false);
}

#[test]
fn another_plan_on_another_rank_is_refused_with_the_first_difference() {
    let plan = Plan::new(&input()).unwrap();
    let disagrees = |words: &[&str], change: &dyn Fn(&mut PlanInput)| {
        let mut other = input();
        change(&mut other);
        let error = plan.agrees_with(Rank(3), &Plan::new(&other).unwrap().summary()).unwrap_err().to_string();
        for word in ["rank 3", "same model"].iter().chain(words) {
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    };
    disagrees(&["number of ranks (2 here, 3 there)"], &|i| i.ranks = 3);
    disagrees(&["parameter 1 (here `b`, shape [4], bf16)"], &|i| i.params[1].shape = vec![5]);
    disagrees(&["parameter 0 (here `w`"], &|i| i.params[0].grad_dtype = DType::Bf16);
    disagrees(&["there is no `b` there"], &|i| {
        i.params.pop();
        i.chunks[0].units[0].params.pop();
    });
    disagrees(&["number of parameters (2 here, 3 there)"], &|i| {
        i.params.push(ParamSpec::new("c", [1], DType::F32));
        i.chunks[0].units[0].params.push(ParamId(2));
    });
    disagrees(&["unit 0 (here `layer`)"], &|i| i.chunks[0].units[0].name = "block".into());
    disagrees(&["number of units (1 here, 2 there)"], &|i| {
        i.chunks[0].units.push(UnitSpec { name: "head".into(), params: vec![ParamId(0)] });
    });
    disagrees(&["bucket size (40000000 here, 7 there)"], &|i| i.bucketing = Bucketing::Size(7));
    disagrees(&["groups (1 here, 2 there)"], &|i| i.groups = 2);
    disagrees(&["alignment of bucket ends (128 here, 65536 there)"], &|i| {
        i.alignment = gatherflow_actors::plan::Alignment::Bandwidth;
    });
}
