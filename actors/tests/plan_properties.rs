//! What holds for the plan of any model on any number of ranks: nothing lost, nothing twice, everything aligned, one
//! order.
#![allow(clippy::unwrap_used)]

use gatherflow_actors::plan::{
    Across, Alignment, BucketId, Bucketing, ChunkSpec, Home, PARAM_ALIGN, ParamId, ParamSpec, Pipeline, Plan,
    PlanInput, Purpose, Rank, ShardGroupSpec, Storage, SumOver, UnitId, UnitSpec,
};
use gatherflow_kernels::DType;
use proptest::prelude::*;

const DTYPES: [(DType, DType); 5] = [
    (DType::Bf16, DType::F32),
    (DType::Bf16, DType::Bf16),
    (DType::F16, DType::F32),
    (DType::F32, DType::F32),
    (DType::F32, DType::Bf16),
];

fn param() -> impl Strategy<Value = ParamSpec> {
    let size = prop_oneof![
        3 => prop::sample::select(vec![vec![1], vec![3], vec![63], vec![64], vec![65], vec![7, 5]]),
        2 => (1_usize..3000).prop_map(|n| vec![n]),
    ];
    let marks = (prop::bool::weighted(0.9), prop::bool::weighted(0.1), any::<bool>(), prop::bool::weighted(0.3));
    let shard_group = prop_oneof![3 => Just(0_usize), 1 => Just(1), 1 => Just(2)];
    (size, 0..DTYPES.len(), 0_usize..3, marks, 0_usize..3, shard_group).prop_map(
        |(shape, dtypes, group, marks, chunk, shard_group)| ParamSpec {
            grad_dtype: DTYPES[dtypes].1,
            group,
            trainable: marks.0,
            shared_embedding: marks.1,
            tensor_parallel: marks.2,
            chunk,
            shard_group,
            sum_over: if marks.2 || !marks.3 { SumOver::Nothing } else { SumOver::ModelParallel },
            ..ParamSpec::new("", shape, DTYPES[dtypes].0)
        },
    )
}

/// Three chunks of up to five units; every parameter is used by one to three of them, anywhere. Two shard groups beside the
/// one of all ranks, replicated and of experts.
fn model() -> impl Strategy<Value = PlanInput> {
    let users = prop::collection::vec(any::<prop::sample::Index>(), 1..4);
    let params = prop::collection::vec((param(), users), 0..24);
    let bucketing = prop_oneof![
        Just(Bucketing::Default),
        Just(Bucketing::Whole),
        (1_usize..4000).prop_map(Bucketing::Size),
        (1_usize..9).prop_map(Bucketing::Count),
    ];
    let alignment =
        prop_oneof![9 => Just(Alignment::Standard), 1 => Just(Alignment::Bandwidth), 3 => Just(Alignment::Reference)];
    let units = prop::collection::vec(1_usize..6, 3);
    let ranks = (1_usize..=24, 1_usize..=4, any::<[prop::sample::Index; 4]>());
    (ranks, params, units, bucketing, alignment).prop_map(
        |((d, model_parallel, sizes), params, units, bucketing, alignment)| {
            let divisors: Vec<usize> = (1..=d).filter(|n| d.is_multiple_of(*n)).collect();
            let of = |name: &str, size: prop::sample::Index, across| ShardGroupSpec {
                name: name.into(),
                ranks: *size.get(&divisors),
                across,
                average_over: None,
            };
            let [replicated, experts, stages, stage] = sizes;
            let stages = *stages.get(&[1, 2, 3, 4].map(|n| if model_parallel % n == 0 { n } else { 1 }));
            let pipeline = Pipeline { stage: stage.index(stages), stages };
            let shard_groups =
                vec![of("replicated", replicated, Across::Replicas), of("experts", experts, Across::Experts)];
            let ranks = d * model_parallel;
            let places: Vec<(usize, usize)> =
                units.iter().enumerate().flat_map(|(c, &n)| (0..n).map(move |u| (c, u))).collect();
            let unit = |name| UnitSpec { name, params: Vec::new() };
            let mut chunks: Vec<ChunkSpec> =
                units.iter().map(|&n| ChunkSpec { units: (0..n).map(|u| unit(format!("u{u}"))).collect() }).collect();
            let params = params.into_iter().enumerate().map(|(i, (mut param, users))| {
                for user in users {
                    let (chunk, unit) = places[user.index(places.len())];
                    chunks[chunk].units[unit].params.push(ParamId::from_index(i));
                }
                param.name = format!("p{i}");
                param
            });
            let params = params.collect();
            let storage = Storage::Views;
            PlanInput {
                ranks,
                model_parallel,
                pipeline,
                shard_groups,
                chunks,
                params,
                groups: 3,
                bucketing,
                alignment,
                storage,
            }
        },
    )
}

fn end_align(input: &PlanInput, d: usize) -> usize {
    let base = match input.alignment {
        Alignment::Bandwidth => 65_536,
        Alignment::Reference => 1,
        _ => 128,
    };
    (1..=d).map(|n| n * base).find(|n| n.is_multiple_of(d)).unwrap()
}

fn all_ranks(plan: &Plan) -> impl Iterator<Item = Rank> + use<> {
    let (stage, stages) = (plan.pipeline().stage, plan.pipeline().stages);
    let (share, of_stage) = (plan.model_parallel(), plan.model_parallel() / stages);
    (0..plan.ranks()).filter(move |rank| rank % share / of_stage == stage).map(Rank)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_trainable_parameter_is_in_exactly_one_bucket(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let mut found = vec![0; input.params.len()];
        for bucket in plan.buckets() {
            prop_assert!(!bucket.params.is_empty());
            for &param in &bucket.params {
                found[param.index()] += 1;
                let plan_of = plan.param(param);
                let range = plan_of.home.range();
                prop_assert_eq!(plan.bucket_of(param), Some(bucket.id));
                prop_assert!(bucket.range.start <= range.start && range.end <= bucket.range.end);
                prop_assert_eq!(range.len(), plan_of.numel);
                let buffer = plan.buffer(bucket.buffer);
                prop_assert_eq!(
                    (plan_of.chunk, plan_of.shard_group, plan_of.sum_over, plan_of.dtype, plan_of.grad_dtype),
                    (buffer.chunk, buffer.shard_group, buffer.sum_over, buffer.dtype, buffer.grad_dtype)
                );
            }
        }
        for (spec, found) in input.params.iter().zip(found) {
            prop_assert_eq!(found, usize::from(spec.trainable), "{}", spec.name);
        }
    }

    #[test]
    fn calls_are_runs_of_whole_buckets_within_their_bytes(input in model(), bytes in 0_usize..20_000) {
        let (alone, plan) = (Plan::new(&input).unwrap(), Plan::new(&input).unwrap().with_gather_calls(bytes));
        prop_assert_eq!(&alone, &plan.clone().with_gather_calls(0));
        prop_assert_eq!(plan.gather_order(), alone.gather_order());
        let size = |position: usize| {
            let bucket = plan.bucket(plan.gather_order()[position]);
            bucket.numel() * plan.buffer(bucket.buffer).dtype.bytes()
        };
        let (mut start, mut calls) = (0, 0);
        while start < plan.gather_order().len() {
            let end = plan.call_ends()[start] as usize;
            prop_assert!(plan.call_ends()[start..end].iter().all(|e| *e as usize == end));
            let held: usize = (start..end).map(size).sum();
            prop_assert!(end == start + 1 || held <= bytes);
            prop_assert!(end == plan.gather_order().len() || held + size(end) > bytes, "as long as it fits");
            (start, calls) = (end, calls + 1);
        }
        prop_assert_eq!(plan.calls(), calls);
        for (unit, before) in plan.units().iter().zip(alone.units()) {
            let ends = before.demand.checked_sub(1).map_or(0, |last| plan.call_ends()[last as usize]);
            prop_assert_eq!(unit.demand, ends);
        }
    }

    #[test]
    fn buckets_tile_their_buffer_and_everything_is_aligned(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let mut next = 0;
        for buffer in plan.buffers() {
            let d = plan.shard_groups()[buffer.shard_group].ranks;
            let align = end_align(&input, d);
            let (mut at, mut owned) = (0, 0);
            for id in buffer.buckets() {
                prop_assert_eq!(id.index(), next);
                next += 1;
                let bucket = plan.bucket(id);
                prop_assert_eq!(bucket.range.start, at);
                prop_assert_eq!(bucket.shard_start, owned);
                prop_assert_eq!(bucket.shard_numel * d, bucket.numel());
                prop_assert!(bucket.range.end.is_multiple_of(align));
                prop_assert!(bucket.numel() - bucket.numel_unpadded < align);
                at = bucket.range.end;
                owned += bucket.shard_numel;
                let mut end = bucket.range.start;
                for param in &bucket.params {
                    let range = plan.param(*param).home.range();
                    let start = input.alignment.params();
                    prop_assert!(range.start.is_multiple_of(start));
                    prop_assert!(range.start - end < start, "a gap is never a whole alignment");
                    end = range.end;
                }
            }
            prop_assert_eq!(buffer.numel, at);
            prop_assert_eq!(buffer.owned_numel, owned);
            prop_assert!(buffer.params.is_sorted_by(|a, b| a > b), "reverse registration order");
        }
        prop_assert_eq!(next, plan.buckets().len());
        let firsts: Vec<_> = plan.buffers().iter().map(|b| (b.chunk, *b.params.last().unwrap())).collect();
        prop_assert!(firsts.is_sorted());
    }

    #[test]
    fn a_bucket_closes_as_soon_as_it_holds_the_bucket_size(input in model()) {
        let plan = Plan::new(&input).unwrap();
        for buffer in plan.buffers() {
            for id in buffer.buckets() {
                let bucket = plan.bucket(id);
                let own = bucket.params.iter().any(|p| plan.param(*p).shared_embedding);
                prop_assert!(!own || bucket.params.len() == 1, "a shared embedding has a bucket of its own");
                let (last, before) = bucket.params.split_last().unwrap();
                let filled = |params: &[ParamId]| {
                    params.last().map_or(0, |p| plan.param(*p).home.range().end - bucket.range.start)
                };
                prop_assert!(filled(before) < plan.bucket_size(), "closed too late");
                let next = buffer.buckets().find(|b| *b > id);
                let next_own = next.is_some_and(|n| plan.param(plan.bucket(n).params[0]).shared_embedding);
                prop_assert!(
                    own || next.is_none() || next_own || filled(&bucket.params) >= plan.bucket_size(),
                    "closed too early behind {}", last
                );
            }
        }
    }

    #[test]
    fn the_shards_of_each_group_cover_every_element_once(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let mut covered: Vec<Vec<u32>> = plan.params().iter().map(|p| vec![0; p.numel]).collect();
        let mut groups = vec![0; plan.params().len()];
        for (bucket, first) in plan.buckets().iter().flat_map(|b| all_ranks(&plan).map(move |rank| (b, rank))) {
            let mut at = bucket.range.start;
            if plan.slot(first, bucket.id) > 0 {
                continue;
            }
            bucket.params.iter().for_each(|p| groups[p.index()] += 1);
            for rank in plan.members(first, plan.reduce_group(bucket.id)).ranks(plan.ranks()).map(Rank) {
                let shard = plan.shard(rank, bucket.id);
                prop_assert_eq!(shard.start, at);
                at = shard.end;
                for piece in plan.owned(rank, bucket.id) {
                    let whole = plan.param(piece.param).home.range();
                    prop_assert!(!piece.in_buffer.is_empty(), "an empty range is never stored");
                    prop_assert_eq!(piece.in_buffer.start - whole.start, piece.in_param.start);
                    prop_assert_eq!(piece.in_buffer.start - bucket.range.start, piece.in_bucket.start);
                    prop_assert_eq!(piece.in_buffer.start - shard.start, piece.in_shard.start);
                    prop_assert!(piece.in_shard.end <= bucket.shard_numel);
                    for range in [piece.in_bucket, piece.in_shard, piece.in_param] {
                        prop_assert_eq!(range.len(), piece.in_buffer.len());
                    }
                    for times in &mut covered[piece.param.index()][piece.in_param.start..piece.in_param.end] {
                        *times += 1;
                    }
                }
            }
            prop_assert_eq!(at, bucket.range.end);
        }
        for ((param, covered), groups) in plan.params().iter().zip(covered).zip(groups) {
            let expected = all_ranks(&plan).count() / plan.shard_groups()[param.shard_group].ranks;
            prop_assert_eq!(groups, if param.trainable { expected as u32 } else { 0 });
            prop_assert!(covered.iter().all(|&n| n == groups), "{}", param.name);
        }
    }

    #[test]
    fn gathers_go_by_place_and_reduces_in_reverse(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let order = plan.gather_order();
        let key = |b: &BucketId| (plan.bucket(*b).place, plan.bucket(*b).buffer, *b);
        prop_assert!(order.is_sorted_by_key(key));
        prop_assert_eq!(order.len(), plan.buckets().len());
        for (position, bucket) in order.iter().enumerate() {
            prop_assert_eq!(plan.position(*bucket).index(), position);
        }
        let reversed: Vec<BucketId> = order.iter().rev().copied().collect();
        prop_assert_eq!(plan.reduce_order().collect::<Vec<_>>(), reversed);
        // Places, counted anew from the registration.
        let units: Vec<&UnitSpec> = input.chunks.iter().flat_map(|c| &c.units).collect();
        for bucket in plan.buckets() {
            let uses = |unit: &&UnitSpec| unit.params.iter().any(|p| bucket.params.contains(p));
            prop_assert_eq!(Some(bucket.place.index()), units.iter().position(uses));
        }
    }

    #[test]
    fn a_unit_needs_its_own_buckets_and_demands_the_order_up_to_the_last(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let specs: Vec<&UnitSpec> = input.chunks.iter().flat_map(|c| &c.units).collect();
        prop_assert_eq!(specs.len(), plan.units().len());
        for (unit, spec) in plan.units().iter().zip(specs) {
            let needed = |b: &&BucketId| spec.params.iter().any(|p| plan.bucket_of(*p) == Some(**b));
            let expected: Vec<BucketId> = plan.gather_order().iter().filter(needed).copied().collect();
            let demand = expected.last().map_or(0, |b| plan.position(*b).index() + 1);
            prop_assert_eq!(unit.demand as usize, demand);
            prop_assert_eq!(&unit.buckets, &expected);
            for param in plan.params() {
                prop_assert_eq!(param.units.contains(&unit.id), spec.params.contains(&param.id));
            }
        }
        for chunk in 0..plan.chunks() {
            prop_assert!(plan.units_of(chunk).iter().all(|u| u.chunk == chunk));
            prop_assert_eq!(plan.units_of(chunk).len(), input.chunks[chunk].units.len());
        }
    }

    #[test]
    fn kernels_get_every_owned_element_once_and_the_right_group(input in model()) {
        let plan = Plan::new(&input).unwrap();
        for bucket in plan.buckets() {
            for rank in all_ranks(&plan) {
                let owned = plan.owned(rank, bucket.id);
                let norm = plan.norm_pieces(rank, bucket.id);
                let adam = plan.adam_segments(rank, bucket.id);
                prop_assert_eq!(norm.len(), owned.len());
                for (piece, norm) in owned.iter().zip(&norm) {
                    let spec = &input.params[piece.param.index()];
                    prop_assert_eq!((norm.start, norm.end), (piece.in_shard.start, piece.in_shard.end));
                    prop_assert_eq!(norm.param, piece.param.0);
                    let inside: Vec<_> =
                        adam.iter().filter(|s| s.start <= norm.start && norm.end <= s.end).map(|s| s.group).collect();
                    prop_assert_eq!(inside, vec![spec.group]);
                }
                prop_assert!(adam.windows(2).all(|w| w[0].end <= w[1].start && w[0].group != w[1].group), "runs are merged");
                prop_assert_eq!(adam.first().map(|s| s.start), owned.first().map(|p| p.in_shard.start));
                prop_assert_eq!(adam.last().map(|s| s.end), owned.last().map(|p| p.in_shard.end));
            }
        }
    }

    #[test]
    fn the_norm_counts_each_logical_element_once(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let mut counted = vec![0; plan.params().len()];
        for (bucket, rank) in plan.buckets().iter().flat_map(|b| all_ranks(&plan).map(move |rank| (b, rank))) {
            for piece in plan.norm_pieces(rank, bucket.id).iter().filter(|piece| piece.counted) {
                counted[piece.param as usize] += piece.end - piece.start;
            }
        }
        for (param, counted) in plan.params().iter().zip(counted) {
            let parts = if param.tensor_parallel { input.model_parallel / input.pipeline.stages } else { 1 };
            let group = &plan.shard_groups()[param.shard_group];
            let experts = if group.across == Across::Experts { plan.data_parallel() / group.ranks } else { 1 };
            let logical = if param.trainable { param.numel * parts * experts } else { 0 };
            prop_assert_eq!(counted, logical, "{}", &param.name);
        }
    }

    #[test]
    fn every_rank_is_in_one_part_of_each_division_and_sums_meet_equal_shards(input in model()) {
        let plan = Plan::new(&input).unwrap();
        for rank in all_ranks(&plan) {
            // The first is the whole job; all others are within the stage.
            for (kind, members) in plan.divisions(rank).into_iter().enumerate().skip(1) {
                prop_assert!(members.slot_of(rank.0).is_some());
                for other in members.ranks(plan.ranks()).map(Rank) {
                    prop_assert_eq!(plan.stage_of(other), input.pipeline.stage);
                    prop_assert_eq!(&plan.divisions(other)[kind], &members);
                }
            }
        }
        for (bucket, rank) in plan.buckets().iter().flat_map(|b| all_ranks(&plan).map(move |rank| (b.id, rank))) {
            let members = |group| plan.members(rank, group).ranks(plan.ranks()).map(Rank).collect::<Vec<_>>();
            let within = members(plan.reduce_group(bucket));
            prop_assert!(within.iter().enumerate().all(|(slot, rank)| plan.slot(*rank, bucket) == slot));
            for group in plan.sum_groups(bucket).into_iter().filter(|group| *group > 0) {
                for other in members(group) {
                    prop_assert_eq!(plan.shard(other, bucket), plan.shard(rank, bucket));
                    prop_assert!(other == rank || !within.contains(&other));
                }
            }
        }
    }

    #[test]
    fn cells_end_where_ranges_end_and_memory_adds_up(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let memory = plan.memory();
        for allocation in &memory.allocations {
            prop_assert!(allocation.cells.is_sorted_by(|a, b| a < b), "{}", allocation.purpose);
            prop_assert_eq!(allocation.cells.last().copied().unwrap_or(0), allocation.bytes);
        }
        // Storage `shared` takes staging on top: as much as a rank owns, whatever the number of buckets.
        if let Some(shared) = plan.memory_with(Storage::Shared) {
            let halves = plan.buffers().iter().filter(|b| b.dtype != DType::F32);
            let staging: usize = halves.map(|b| b.owned_numel * b.dtype.bytes()).sum();
            prop_assert_eq!((shared.staging_bytes(), shared.total_bytes()), (staging, memory.total_bytes() + staging));
        } else {
            prop_assert!(plan.buffers().iter().any(|b| b.dtype.bytes() > b.grad_dtype.bytes()));
        }
        let cells = |purpose| memory.get(purpose).map(|a| a.cells.clone()).unwrap_or_default();
        let mut expected = 56 * plan.buckets().len() + 80 * plan.ranks() + 64;
        for buffer in plan.buffers() {
            let (index, grad) = (buffer.index, buffer.grad_dtype.bytes());
            let d = plan.shard_groups()[buffer.shard_group].ranks;
            let f32s = 2 + usize::from(buffer.dtype != DType::F32) + usize::from(buffer.grad_dtype != DType::F32);
            expected += buffer.numel * (buffer.dtype.bytes() + grad) + buffer.owned_numel * 4 * f32s;
            prop_assert_eq!(memory.get(Purpose::Master(index)).is_some(), buffer.dtype != DType::F32);
            prop_assert_eq!(memory.get(Purpose::Reduced(index)).is_some(), buffer.grad_dtype != DType::F32);
            prop_assert_eq!(cells(Purpose::Params(index)).len(), buffer.buckets().len());
            let (grads, moments) = (cells(Purpose::Grads(index)), cells(Purpose::ExpAvg(index)));
            prop_assert_eq!(grads.len(), buffer.params.len());
            for bucket in buffer.buckets().map(|b| plan.bucket(b)) {
                prop_assert!(grads.contains(&(bucket.range.end * grad)));
                prop_assert!(moments.contains(&((bucket.shard_start + bucket.shard_numel) * 4)));
            }
            for (param, end) in buffer.params.iter().zip(&grads) {
                let range = plan.param(*param).home.range().bytes(grad);
                prop_assert!(range.end <= *end && end - range.len() <= range.start + end_align(&input, d) * grad);
            }
        }
        for frozen in plan.frozen() {
            expected += frozen.numel * frozen.dtype.bytes();
            prop_assert_eq!(cells(Purpose::Frozen(frozen.index)).len(), frozen.params.len());
            let mut at = 0;
            for param in &frozen.params {
                let Home::Frozen { buffer, range } = plan.param(*param).home else { panic!("not frozen") };
                prop_assert_eq!(buffer, frozen.index);
                prop_assert!(range.start >= at && range.start.is_multiple_of(PARAM_ALIGN));
                at = range.end;
            }
            prop_assert!(at <= frozen.numel && frozen.numel - at < PARAM_ALIGN);
        }
        prop_assert_eq!(memory.total_bytes(), expected);
    }

    #[test]
    fn equal_input_gives_equal_plans_and_another_name_does_not(input in model()) {
        let (a, b) = (Plan::new(&input).unwrap(), Plan::new(&input).unwrap());
        prop_assert_eq!(&a, &b);
        prop_assert_eq!(a.fingerprint(), b.fingerprint());
        prop_assert!(a.agrees_with(Rank(1), &b.summary()).is_ok());
        let mut regrouped = input.clone();
        regrouped.shard_groups[0].average_over = Some(77);
        prop_assert_ne!(Plan::new(&regrouped).unwrap().fingerprint(), a.fingerprint());
        if !input.params.is_empty() {
            let mut renamed = input.clone();
            renamed.params[0].name.push('x');
            let renamed = Plan::new(&renamed).unwrap();
            prop_assert_ne!(renamed.fingerprint(), a.fingerprint());
            let error = a.agrees_with(Rank(1), &renamed.summary()).unwrap_err().to_string();
            prop_assert!(error.contains("parameter 0 (here `p0`"), "{}", error);
        }
    }

    #[test]
    fn a_plan_of_any_model_can_be_printed(input in model()) {
        let plan = Plan::new(&input).unwrap();
        let text = plan.describe();
        prop_assert!(text.ends_with('\n') && !text.contains(" \n"));
        prop_assert!(plan.units().iter().all(|u| u.id == UnitId::from_index(u.id.index())));
    }
}
