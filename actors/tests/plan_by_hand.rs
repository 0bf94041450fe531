//! Small plans worked out by hand: default sizes, order over several buffers and chunks, tied weights, padding-only
//! shards, frozen parameters, the norm's filters, memory, and what is printed.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use gatherflow_actors::plan::{
    Across, Alignment, BucketId, Bucketing, ChunkSpec, Home, ParamId, ParamSpec, Pipeline, Plan, PlanError, PlanInput,
    Purpose, Range, Rank, ShardGroupSpec, Storage, SumOver, UnitId, UnitSpec,
};
use gatherflow_kernels::DType;

/// One unit per inner list.
fn input(ranks: usize, params: Vec<ParamSpec>, chunks: &[&[&[u32]]]) -> PlanInput {
    let unit = |(i, params): (usize, &&[u32])| UnitSpec {
        name: format!("unit{i}"),
        params: params.iter().copied().map(ParamId).collect(),
    };
    let chunk = |units: &&[&[u32]]| ChunkSpec { units: units.iter().enumerate().map(unit).collect() };
    PlanInput {
        ranks,
        chunks: chunks.iter().map(chunk).collect(),
        params,
        groups: 2,
        bucketing: Bucketing::Whole,
        alignment: Alignment::Standard,
        storage: Storage::Views,
        model_parallel: 1,
        pipeline: Pipeline::default(),
        shard_groups: Vec::new(),
    }
}

fn bf16(name: &str, numel: usize) -> ParamSpec {
    ParamSpec::new(name, [numel], DType::Bf16)
}

fn f32(name: &str, numel: usize) -> ParamSpec {
    ParamSpec::new(name, [numel], DType::F32)
}

fn ids(buckets: &[BucketId]) -> Vec<u32> {
    buckets.iter().map(|b| b.0).collect()
}

#[test]
fn the_default_bucket_size_is_forty_million_or_a_million_per_rank() {
    for (ranks, size) in [(1, 40_000_000), (40, 40_000_000), (41, 41_000_000), (64, 64_000_000)] {
        let mut input = input(ranks, vec![bf16("w", 5)], &[&[&[0]]]);
        input.bucketing = Bucketing::Default;
        assert_eq!(Plan::new(&input).unwrap().bucket_size(), size);
    }
}

#[test]
fn a_number_of_buckets_becomes_a_size_over_all_buffers() {
    // Aligned sizes 128 + 64 + 192 + 64 (frozen ones do not count): 448 / 3 rounded up is 150.
    let frozen = ParamSpec { trainable: false, ..bf16("frozen", 9000) };
    let params = vec![bf16("a", 65), bf16("b", 1), f32("c", 129), f32("d", 64), frozen];
    let mut input = input(2, params, &[&[&[0, 1, 2, 3, 4]]]);
    input.bucketing = Bucketing::Count(3);
    let plan = Plan::new(&input).unwrap();
    assert_eq!(plan.bucket_size(), 150);
    // a, b backwards: b, then a reaches 129 of 150; d, then c reaches 193.
    assert_eq!(plan.buckets().len(), 2);
    assert!(plan.hints().iter().any(|h| h.contains("3 buckets were asked for, 2 came out")), "{:?}", plan.hints());
}

#[test]
fn a_bucket_that_holds_exactly_the_bucket_size_closes() {
    for (size, buckets) in [(64, 2), (65, 1)] {
        let mut input = input(2, vec![bf16("a", 1), bf16("b", 64)], &[&[&[0, 1]]]);
        input.bucketing = Bucketing::Size(size);
        assert_eq!(Plan::new(&input).unwrap().buckets().len(), buckets, "bucket size {size}");
    }
}

#[test]
fn a_parameter_listed_twice_by_one_unit_is_used_once() {
    let plan = Plan::new(&input(2, vec![bf16("a", 1), bf16("b", 1)], &[&[&[1, 0, 1]]])).unwrap();
    assert_eq!(plan.unit(UnitId(0)).params, [ParamId(0), ParamId(1)]);
    assert_eq!(plan.param(ParamId(1)).units, [UnitId(0)]);
}

#[test]
fn buffers_of_several_types_and_chunks_are_gathered_by_place() {
    let params = vec![
        bf16("emb", 128),
        f32("norm", 64),
        bf16("mlp", 128),
        ParamSpec { chunk: 1, ..f32("norm2", 64) },
        ParamSpec { chunk: 1, ..bf16("head", 128) },
    ];
    let mut input = input(2, params, &[&[&[0], &[1], &[2]], &[&[3], &[4]]]);
    input.bucketing = Bucketing::Size(1);
    let plan = Plan::new(&input).unwrap();
    let buffers: Vec<_> = plan.buffers().iter().map(|b| (b.chunk, b.dtype, b.buckets().len())).collect();
    assert_eq!(buffers, [(0, DType::Bf16, 2), (0, DType::F32, 1), (1, DType::F32, 1), (1, DType::Bf16, 1)]);
    // Bucket 0 is mlp, 1 is emb, 2 is norm, 3 is norm2, 4 is head.
    assert_eq!(ids(plan.gather_order()), [1, 2, 0, 3, 4]);
    assert_eq!(plan.reduce_order().map(|b| b.0).collect::<Vec<_>>(), [4, 3, 0, 2, 1]);
    let demands: Vec<_> = plan.units().iter().map(|u| u.demand).collect();
    assert_eq!(demands, [1, 2, 3, 4, 5]);
}

#[test]
fn buckets_of_one_place_go_by_buffer_then_bucket() {
    let params = vec![f32("a", 64), bf16("b", 64), f32("c", 64), bf16("d", 64)];
    let mut input = input(2, params, &[&[&[3, 2, 1, 0]]]);
    input.bucketing = Bucketing::Size(1);
    let plan = Plan::new(&input).unwrap();
    assert_eq!(ids(plan.gather_order()), [0, 1, 2, 3]);
    assert_eq!(plan.unit(UnitId(0)).demand, 4);
}

#[test]
fn a_tied_weight_has_the_place_of_its_first_use_and_is_needed_by_both_units() {
    // The output head (unit 2) reads the embedding again; registered last, its place is unit 0 all the same.
    let params = vec![bf16("layer", 128), bf16("emb", 128)];
    let mut input = input(2, params, &[&[&[1], &[0], &[1]]]);
    input.bucketing = Bucketing::Size(1);
    let plan = Plan::new(&input).unwrap();
    let emb = plan.bucket_of(ParamId(1)).unwrap();
    assert_eq!(plan.bucket(emb).place, UnitId(0));
    assert_eq!(ids(plan.gather_order()), [emb.0, 1]);
    assert_eq!(plan.param(ParamId(1)).units, [UnitId(0), UnitId(2)]);
    assert_eq!(plan.unit(UnitId(2)).buckets, [emb]);
    assert_eq!(plan.unit(UnitId(2)).demand, 1, "the head demands nothing beyond the embedding");
}

#[test]
fn a_unit_with_one_late_bucket_demands_all_before_it() {
    let params = vec![bf16("a", 128), bf16("b", 128), bf16("c", 128)];
    let mut input = input(2, params, &[&[&[0], &[1], &[2], &[0, 2], &[]]]);
    input.bucketing = Bucketing::Size(1);
    let plan = Plan::new(&input).unwrap();
    assert_eq!(plan.unit(UnitId(3)).demand, 3);
    assert_eq!(ids(&plan.unit(UnitId(3)).buckets), [2, 0]);
    assert_eq!(plan.unit(UnitId(4)).demand, 0, "a unit without parameters demands nothing");
}

#[test]
fn more_ranks_than_elements_leave_shards_of_padding_only() {
    let params = vec![bf16("a", 1), bf16("b", 3), bf16("c", 63), bf16("d", 65)];
    let plan = Plan::new(&input(192, params, &[&[&[0, 1, 2, 3]]])).unwrap();
    let bucket = plan.bucket(BucketId(0));
    // d at 0..65, c at 128..191, b at 192..195, a at 256..257; lcm(192, 128) = 384 elements, two a rank.
    assert_eq!((bucket.numel(), bucket.shard_numel, bucket.param_numel), (384, 2, 132));
    let empty = (0..192).filter(|r| plan.owned(Rank(*r), BucketId(0)).is_empty()).count();
    assert_eq!(empty, 192 - 33 - 32 - 2 - 1);
    let last = plan.owned(Rank(128), BucketId(0));
    assert_eq!((last[0].param, last[0].in_shard, last[0].in_param), (ParamId(0), Range::new(0, 1), Range::new(0, 1)));
    assert!(
        plan.norm_pieces(Rank(191), BucketId(0)).is_empty() && plan.adam_segments(Rank(191), BucketId(0)).is_empty()
    );
}

#[test]
fn bandwidth_alignment_pads_bucket_ends_to_65_536_times_what_d_needs() {
    let mut input = input(3, vec![bf16("a", 100)], &[&[&[0]]]);
    input.alignment = Alignment::Bandwidth;
    assert_eq!(Plan::new(&input).unwrap().buffers()[0].numel, 3 * 65_536);
}

#[test]
fn the_reference_layout_has_no_gaps_and_pads_bucket_ends_to_d_only() {
    let mut input = input(3, vec![bf16("a", 65), bf16("b", 1), bf16("c", 10)], &[&[&[0, 1, 2]]]);
    (input.alignment, input.bucketing) = (Alignment::Reference, Bucketing::Size(11));
    let plan = Plan::new(&input).unwrap();
    let homes: Vec<_> = plan.params().iter().map(|p| p.home.range()).collect();
    // c and b fill the first bucket to 11 elements, padded to 12; a follows.
    assert_eq!(homes, [Range::new(12, 77), Range::new(10, 11), Range::new(0, 10)]);
    let buckets: Vec<_> = plan.buckets().iter().map(|b| (b.range, b.shard_numel, b.numel_unpadded)).collect();
    assert_eq!(buckets, [(Range::new(0, 12), 4, 11), (Range::new(12, 78), 22, 65)]);
}

#[test]
fn a_shared_embedding_in_the_middle_closes_the_bucket_before_it() {
    let shared = ParamSpec { shared_embedding: true, ..bf16("emb", 10) };
    let plan =
        Plan::new(&input(2, vec![bf16("a", 10), shared, bf16("b", 300), bf16("c", 10)], &[&[&[0, 1, 2, 3]]])).unwrap();
    let buckets: Vec<_> =
        plan.buckets().iter().map(|b| (b.range, b.params.iter().map(|p| p.0).collect::<Vec<_>>())).collect();
    assert_eq!(
        buckets,
        [(Range::new(0, 384), vec![3, 2]), (Range::new(384, 512), vec![1]), (Range::new(512, 640), vec![0])]
    );
    // As in the reference, the gap behind b (364..384) counts in the bucket that closes there.
    let unpadded: Vec<_> = plan.buckets().iter().map(|b| b.numel_unpadded).collect();
    assert_eq!(unpadded, [384, 10, 10]);
}

#[test]
fn nothing_to_train_is_legal_and_leaves_only_the_small_all_gather() {
    let frozen = ParamSpec { trainable: false, grad_dtype: DType::F16, group: 99, ..bf16("w", 100) };
    let plan = Plan::new(&input(2, vec![frozen], &[&[&[0]]])).unwrap();
    assert!(plan.buckets().is_empty() && plan.buffers().is_empty() && plan.gather_order().is_empty());
    assert_eq!(plan.unit(UnitId(0)).demand, 0);
    assert_eq!(plan.memory().total_bytes(), 128 * 2 + 2 * 80 + 64);
    assert_eq!(plan.memory().get(Purpose::Partials).unwrap().bytes, 0);
    assert!(plan.describe().contains("no trainable parameter"));
    let empty = Plan::new(&input(2, vec![], &[&[&[]]])).unwrap();
    assert!(empty.params().is_empty());
}

#[test]
fn frozen_parameters_have_aligned_memory_in_no_bucket() {
    let frozen = |name: &str, numel| ParamSpec { trainable: false, ..bf16(name, numel) };
    let params = vec![frozen("a", 65), bf16("w", 10), frozen("b", 3)];
    let plan = Plan::new(&input(2, params, &[&[&[0, 1, 2]]])).unwrap();
    let ranges: Vec<Range> = [0, 2].map(|p| plan.param(ParamId(p)).home.range()).into();
    assert_eq!(ranges, [Range::new(0, 65), Range::new(128, 131)]);
    assert!(matches!(plan.param(ParamId(2)).home, Home::Frozen { .. }));
    let memory = plan.memory();
    let allocation = memory.get(Purpose::Frozen(plan.frozen()[0].index)).unwrap();
    assert_eq!((allocation.bytes, allocation.cells.as_slice()), (192 * 2, [256, 384].as_slice()));
}

#[test]
fn the_norm_counts_first_copies_and_leaves_duplicates_to_model_parallel_rank_0() {
    let copy = |name: &str| ParamSpec { shared: Some("emb".into()), ..bf16(name, 4) };
    let parallel = ParamSpec { tensor_parallel: true, ..bf16("tp", 4) };
    let parallel_copy = |name: &str| ParamSpec { tensor_parallel: true, shared: Some("tied".into()), ..bf16(name, 4) };
    let params = vec![copy("in"), bf16("w", 4), parallel, copy("out"), parallel_copy("x"), parallel_copy("y")];
    let mut input = input(2, params, &[&[&[0, 1, 2, 3, 4, 5]]]);
    input.model_parallel = 2;
    let plan = Plan::new(&input).unwrap();
    // Copies have buckets of their own.
    assert_eq!(plan.buckets().iter().map(|b| b.params.len()).collect::<Vec<_>>(), [1, 1, 1, 2, 1]);
    let counted = |rank: usize| -> Vec<u32> {
        let pieces: Vec<_> = plan.buckets().iter().flat_map(|b| plan.norm_pieces(Rank(rank), b.id)).collect();
        let mut counted: Vec<u32> = pieces.iter().filter(|p| p.counted).map(|p| p.param).collect();
        assert_eq!(pieces.len(), 6, "the non-finite search reads all of them");
        counted.sort_unstable();
        counted
    };
    assert_eq!((counted(0), counted(1)), (vec![0, 1, 2, 4], vec![2, 4]));
}

#[test]
fn copies_of_a_weight_have_buckets_of_their_own_whose_shards_line_up() {
    let copy =
        |name: &str, grad_dtype, chunk| ParamSpec { shared: Some("emb".into()), grad_dtype, chunk, ..bf16(name, 300) };
    let params = vec![
        bf16("a", 10),
        copy("in", DType::F32, 0),
        bf16("b", 10),
        ParamSpec { chunk: 1, ..bf16("c", 10) },
        copy("out", DType::Bf16, 1),
        ParamSpec { shared: Some("alone".into()), chunk: 1, ..bf16("d", 10) },
    ];
    let mut input = input(3, params, &[&[&[0, 1, 2]], &[&[3, 4, 5]]]);
    let plan = Plan::new(&input).unwrap();
    let named = |buckets: &[BucketId]| {
        let params = buckets.iter().flat_map(|b| &plan.bucket(*b).params);
        params.map(|p| plan.param(*p).name.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(plan.copies().len(), 1, "a single one is no copy");
    assert_eq!(named(&plan.copies()[0]), ["in", "out"]);
    let shards: Vec<_> = plan.copies()[0].iter().map(|b| plan.owned(Rank(2), *b)).collect();
    assert_eq!(shards[0][0].in_param, shards[1][0].in_param);
    assert_eq!(shards[0][0].in_shard, shards[1][0].in_shard);
    assert!(plan.describe().contains("copies of emb: buckets "), "{}", plan.describe());
    // Frozen copies are in no bucket, and nothing is summed.
    input.params.iter_mut().for_each(|param| param.trainable = param.shared.is_none());
    assert!(Plan::new(&input).unwrap().copies().is_empty());
}

#[test]
fn what_is_summed_over_model_parallel_ranks_is_in_buffers_apart() {
    let summed = |name: &str| ParamSpec { sum_over: SumOver::ModelParallel, ..f32(name, 10) };
    let mut input = input(4, vec![f32("a", 10), summed("norm"), f32("b", 10), summed("norm b")], &[&[&[0, 1, 2, 3]]]);
    let sums = |input: &PlanInput| {
        let plan = Plan::new(input).unwrap();
        plan.buckets().iter().map(|b| (b.params.len(), plan.sum_groups(b.id)[0])).collect::<Vec<_>>()
    };
    assert_eq!(sums(&input), [(2, 0), (2, 0)], "one rank has the whole sum");
    input.model_parallel = 2;
    let plan = Plan::new(&input).unwrap();
    assert_eq!(sums(&input), [(2, 0), (2, plan.model_parallel_group())]);
    let members = |rank| plan.members(Rank(rank), plan.model_parallel_group()).ranks(4).collect::<Vec<_>>();
    assert_eq!((members(0), members(3)), (vec![0, 1], vec![2, 3]));
}

#[test]
fn experts_have_buffers_of_their_own_cut_for_their_own_d() {
    let of = |name: &str, numel, shard_group| ParamSpec { shard_group, ..f32(name, numel) };
    let params = vec![of("dense", 100, 0), of("expert", 100, 1), of("expert b", 10, 1), of("mirrored", 5, 2)];
    let mut input = input(6, params, &[&[&[0, 1, 2, 3]]]);
    let group = |name: &str, ranks, across| ShardGroupSpec { name: name.into(), ranks, across, average_over: None };
    input.shard_groups = vec![group("experts", 2, Across::Experts), group("mirrors", 3, Across::Replicas)];
    let plan = Plan::new(&input).unwrap();
    let cut: Vec<_> = plan.buckets().iter().map(|b| (b.numel(), b.shard_numel, b.params.clone())).collect();
    // Ends at multiples of lcm(6, 128), lcm(2, 128) and lcm(3, 128).
    let [dense, expert, other, mirrored] = [0, 1, 2, 3].map(ParamId);
    assert_eq!(cut, [(384, 64, vec![dense]), (256, 128, vec![other, expert]), (384, 128, vec![mirrored])]);
    let members = |rank, group| plan.members(Rank(rank), group).ranks(6).collect::<Vec<_>>();
    let within = |rank, bucket| members(rank, plan.reduce_group(BucketId(bucket)));
    assert_eq!((within(3, 0), within(3, 1), within(3, 2)), ((0..6).collect(), vec![2, 3], vec![3, 4, 5]));
    assert_eq!(plan.sum_groups(BucketId(1)), [0, 0], "experts differ from group to group");
    assert_eq!(members(4, plan.sum_groups(BucketId(2))[0]), [1, 4]);
    // Experts average over their own two ranks, replicas over all six.
    assert_eq!([0, 1, 2].map(|b| plan.gradient_ratio(BucketId(b)) as u32), [1, 3, 1]);
    let text = plan.describe();
    assert!(text.contains("experts") && text.contains("mirrors"), "{text}");
}

#[test]
fn adam_runs_go_over_gaps_within_a_group_and_break_at_the_next_group() {
    let group = |name: &str, numel, group| ParamSpec { group, ..bf16(name, numel) };
    let params = vec![group("a", 10, 0), group("b", 10, 1), group("c", 10, 1)];
    let plan = Plan::new(&input(1, params, &[&[&[0, 1, 2]]])).unwrap();
    let segments = plan.adam_segments(Rank(0), BucketId(0));
    // c at 0..10, b at 64..74, a at 128..138.
    let runs: Vec<_> = segments.iter().map(|s| (s.start, s.end, s.group)).collect();
    assert_eq!(runs, [(0, 74, 1), (128, 138, 0)]);
}

#[test]
fn memory_of_a_mixed_model_is_what_the_formats_need() {
    let bf16_grads = ParamSpec { grad_dtype: DType::Bf16, ..bf16("c", 10) };
    let params = vec![bf16("a", 65), bf16("b", 10), f32("n", 10), bf16_grads];
    let mut input = input(2, params, &[&[&[0, 1, 2, 3]]]);
    input.bucketing = Bucketing::Size(1);
    let plan = Plan::new(&input).unwrap();
    let list: Vec<(String, Vec<usize>)> =
        plan.memory().allocations.iter().map(|a| (a.purpose.to_string(), a.cells.clone())).collect();
    // Buffer 0: b at 0..10 in bucket 0..128, a at 128..193 in bucket 128..256. Shards of 64 elements.
    let expected: [(&str, &[usize]); 17] = [
        ("parameters of buffer 0", &[256, 512]),
        ("gradients of buffer 0", &[512, 1024]),
        ("masters of buffer 0", &[256, 512]),
        ("exp_avg of buffer 0", &[256, 512]),
        ("exp_avg_sq of buffer 0", &[256, 512]),
        ("parameters of buffer 1", &[512]),
        ("gradients of buffer 1", &[512]),
        ("exp_avg of buffer 1", &[256]),
        ("exp_avg_sq of buffer 1", &[256]),
        ("parameters of buffer 2", &[256]),
        ("gradients of buffer 2", &[256]),
        ("reduced gradients of buffer 2", &[256]),
        ("masters of buffer 2", &[256]),
        ("exp_avg of buffer 2", &[256]),
        ("exp_avg_sq of buffer 2", &[256]),
        ("norm partials", &[56, 112, 168, 224]),
        ("rank records", &[80, 160]),
    ];
    assert_eq!(list.len(), expected.len() + 1);
    // Beside masters, storage `shared` has staging shards of 16-bit parameters, 64 elements each; the rest stays.
    let mut shared = plan.memory_with(Storage::Shared).unwrap();
    let staging = shared.allocations.extract_if(.., |a| matches!(a.purpose, Purpose::Staging(_)));
    let staging: Vec<_> = staging.map(|a| (a.purpose.to_string(), a.cells)).collect();
    assert_eq!(staging, [("staging of buffer 0".into(), vec![128, 256]), ("staging of buffer 2".into(), vec![128])]);
    assert_eq!(shared, plan.memory());
    for ((name, cells), (expected_name, expected_cells)) in list.iter().zip(expected) {
        assert_eq!((name.as_str(), cells.as_slice()), (expected_name, expected_cells));
    }
}

#[test]
fn what_cannot_help_is_said_once_and_is_no_error() {
    let hints = |ranks, bucketing| {
        let mut input = input(ranks, vec![bf16("a", 128), f32("b", 128)], &[&[&[0], &[1]]]);
        input.bucketing = bucketing;
        Plan::new(&input).unwrap().hints()
    };
    assert!(hints(2, Bucketing::Whole).is_empty());
    assert!(hints(1, Bucketing::Whole)[0].contains("one rank"));
    assert!(hints(2, Bucketing::Count(3))[0].contains("3 buckets were asked for, 2 came out"));
    assert!(hints(2, Bucketing::Count(1))[0].contains("each of 2 buffers has a last bucket of its own"));
    let one = Plan::new(&input(2, vec![bf16("a", 128)], &[&[&[0]]])).unwrap();
    assert!(one.hints()[0].contains("one bucket"));
    let mut grouped = input(2, vec![bf16("a", 128), f32("b", 128)], &[&[&[0], &[1]]]);
    let group =
        |name: &str| ShardGroupSpec { name: name.into(), ranks: 1, across: Across::Experts, average_over: None };
    (grouped.shard_groups, grouped.params[1].shard_group) = (vec![group("idle"), group("experts")], 2);
    assert_eq!(Plan::new(&grouped).unwrap().hints(), ["shard group `idle`: no parameter names it"]);
}

#[test]
fn calls_that_cannot_help_are_told_with_what_to_do() {
    let params = ["a", "b", "c"].map(|name| f32(name, 100)).to_vec();
    let input = PlanInput { bucketing: Bucketing::Size(1), ..input(2, params, &[&[&[0], &[1], &[2]]]) };
    let hints = |bytes| Plan::new(&input).unwrap().with_gather_calls(bytes).hints();
    assert!(hints(0).is_empty() && hints(1024).is_empty());
    assert!(hints(1023)[0].contains("`gather_group_bytes` = 1023"), "{:?}", hints(1023));
    assert!(hints(1 << 20)[0].contains("ask for a smaller `gather_group_bytes`"));
}

#[test]
fn the_printed_plan_is_aligned_and_complete() {
    let params = vec![bf16("emb", 70_000), bf16("layer", 1_000), f32("norm", 64)];
    let mut input = input(2, params, &[&[&[0], &[1, 2]]]);
    input.bucketing = Bucketing::Size(500);
    let expected = "\
plan: 2 ranks, 1 chunk, 2 units, 3 trainable parameters of 71 064 elements
a bucket closes at 500 elements

buffers
  buffer  chunk  parameters  gradients  count  buckets  elements   owned
       0      0        bf16        f32      2        2    71 040  35 520
       1      0         f32        f32      1        1       128      64

buckets (place: chunk/unit that reads them first)
  bucket  buffer  place    elements  padding   shard  gather MB  reduce MB
       0       0  0/unit1     1 024       24     512      0.002      0.004
       1       0  0/unit0    70 016       16  35 008      0.140      0.280
       2       1  0/unit1       128       64      64      0.001      0.001

gather order (reduces run in reverse)
  1 0 2

memory per rank (storage views)
  allocation                bytes
  parameters of buffer 0  142 080  142.08 kB
  gradients of buffer 0   284 160  284.16 kB
  masters of buffer 0     142 080  142.08 kB
  exp_avg of buffer 0     142 080  142.08 kB
  exp_avg_sq of buffer 0  142 080  142.08 kB
  parameters of buffer 1      512
  gradients of buffer 1       512
  exp_avg of buffer 1         256
  exp_avg_sq of buffer 1      256
  norm partials               168
  rank records                160
  scalars                      64
  total                   854 408  854.41 kB
storage shared: 925 448 bytes, of these 71 040 staging
";
    assert_eq!(Plan::new(&input).unwrap().describe(), expected);
    input.storage = Storage::Shared;
    let tail = "\
  masters of buffer 0     142 080  142.08 kB
  staging of buffer 0      71 040   71.04 kB
  exp_avg of buffer 0     142 080  142.08 kB
  exp_avg_sq of buffer 0  142 080  142.08 kB
  parameters of buffer 1      512
  gradients of buffer 1       512
  exp_avg of buffer 1         256
  exp_avg_sq of buffer 1      256
  norm partials               168
  rank records                160
  scalars                      64
  total                   925 448  925.45 kB
storage views: 854 408 bytes
";
    let shared = Plan::new(&input).unwrap().describe();
    assert!(shared.ends_with(tail) && shared.contains("memory per rank (storage shared)"), "{shared}");
}

/// The plans of stages that have these parameters, joined, each with one unit.
fn stages(params: Vec<Vec<ParamSpec>>) -> Result<Vec<Plan>, PlanError> {
    let number = params.len();
    let plan = |(stage, params): (usize, Vec<ParamSpec>)| {
        let all: Vec<u32> = (0..params.len() as u32).collect();
        let mut input = input(4 * number, params, &[&[&all]]);
        (input.model_parallel, input.pipeline) = (2 * number, Pipeline { stage, stages: number });
        Plan::new(&input).map(Arc::new)
    };
    let plans: Vec<_> = params.into_iter().enumerate().map(plan).collect::<Result<_, _>>()?;
    plans.iter().map(|plan| plan.joined(plans.clone())).collect()
}

fn shared(name: &str, shared: &str) -> ParamSpec {
    ParamSpec { shared: Some(shared.into()), ..f32(name, 10) }
}

#[test]
fn weights_that_several_stages_have_are_numbered_alike_and_counted_on_the_first() {
    let joined = stages(vec![
        vec![shared("embed", "table"), f32("a", 500), f32("b", 500), shared("tied", "tied")],
        vec![shared("norm", "norm"), shared("tied again", "tied"), f32("c", 500)],
        vec![shared("head", "table"), shared("other head", "table")],
    ]);
    let joined = joined.unwrap();
    let weights: Vec<_> = joined[0].staged().iter().map(|w| (&*w.shared, &*w.stages, &*w.first)).collect();
    assert_eq!(weights, [("table", &[0, 2][..], "embed"), ("tied", &[0, 1], "tied")]);
    assert!(joined.iter().all(|plan| plan.staged() == joined[0].staged() && plan.numbers() == joined[0].numbers()));
    let here = |stage: usize| joined[stage].staged_here().map(|(weight, _)| weight).collect::<Vec<_>>();
    assert_eq!((here(0), here(1), here(2)), (vec![0, 1], vec![1], vec![0]));
    assert_eq!(joined[2].copies().iter().map(Vec::len).collect::<Vec<_>>(), [2]);
    // Ranks 0 to 5 share a copy of the model, two on each stage.
    let members = |stage: usize, rank, weight| {
        let plan = &joined[stage];
        plan.members(Rank(rank), plan.staged_group(weight)).ranks(12).collect::<Vec<_>>()
    };
    assert_eq!((members(0, 1, 0), members(2, 5, 0)), (vec![1, 5], vec![1, 5]));
    assert_eq!((members(0, 6, 1), members(1, 8, 1)), (vec![6, 8], vec![6, 8]));
    let counted = |stage: usize, rank: usize, name: &str| {
        let param = joined[stage].params().iter().find(|p| p.name == name).unwrap();
        joined[stage].counts(Rank(rank), param)
    };
    assert!(counted(0, 0, "embed") && !counted(2, 4, "head") && !counted(1, 2, "tied again"));
    assert!(counted(1, 2, "norm") && !counted(1, 3, "norm"), "on the first rank of its stage");
    assert_eq!((joined[2].first_name(ParamId(1)), joined[1].first_name(ParamId(2))), ("embed", "c"));
    let names: Vec<&str> = joined[1].distinct_params().map(|(_, param)| &*param.name).collect();
    assert_eq!(names, ["embed", "a", "b", "tied", "norm", "c"]);
}

#[test]
fn stages_that_cannot_be_of_one_job_are_refused_by_name() {
    let error = |params| stages(params).unwrap_err().to_string();
    let twice = error(vec![vec![f32("layer", 10)], vec![f32("layer", 10)]]);
    assert!(twice.contains("stages 0 and 1 both have a parameter `layer`"), "{twice}");
    let one_shared = error(vec![vec![shared("layer", "w")], vec![f32("layer", 10)]]);
    assert!(one_shared.contains("`layer`"), "{one_shared}");
    let other = ParamSpec { shape: vec![11], ..shared("b", "w") };
    let shapes = error(vec![vec![shared("a", "w")], vec![other]]);
    assert!(shapes.contains("`a` and `b`") && shapes.contains("shape"), "{shapes}");
    let frozen = ParamSpec { trainable: false, ..shared("b", "w") };
    assert!(error(vec![vec![shared("a", "w")], vec![frozen]]).contains("trainable"));
    let joined = stages(vec![vec![shared("w", "w")], vec![shared("w", "w")]]).unwrap();
    assert_eq!(joined[0].staged().len(), 1, "copies of one weight may have one name");
}
