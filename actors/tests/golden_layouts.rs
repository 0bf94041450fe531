//! The layouts agree with those printed from megatron-core's own classes (see tests/golden/README.md), in every number:
//! parameter ranges, bucket ends, unpadded sizes, and the four ranges of every owned piece on every rank.
#![allow(clippy::unwrap_used)]

use gatherflow_actors::plan::{
    Alignment, BucketId, Bucketing, BufferIndex, ChunkSpec, Home, ParamId, ParamSpec, Pipeline, Plan, PlanInput, Range,
    Rank, Storage, UnitSpec,
};
use gatherflow_kernels::DType;
use serde_json::Value;

fn cases() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/layouts.json");
    let text = std::fs::read_to_string(path).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    file["cases"].as_array().unwrap().clone()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn range(value: &Value) -> Range {
    let ends = numbers(value);
    assert_eq!(ends.len(), 2);
    Range::new(ends[0], ends[1])
}

/// Every parameter in a unit of its own, in registration order.
fn plan(case: &Value) -> Plan {
    let dtype = if case["dtype"] == "fp32" { DType::F32 } else { DType::Bf16 };
    let shared = case.get("shared_embedding").map(numbers).unwrap_or_default();
    let shapes = case["shapes"].as_array().unwrap().iter().enumerate();
    let params: Vec<ParamSpec> = shapes
        .map(|(i, shape)| ParamSpec {
            shared_embedding: shared.contains(&i),
            ..ParamSpec::new(format!("p{i}"), numbers(shape), dtype)
        })
        .collect();
    let units = (0..params.len()).map(|i| UnitSpec { name: format!("u{i}"), params: vec![ParamId::from_index(i)] });
    let input = PlanInput {
        ranks: number(&case["dp"]),
        chunks: vec![ChunkSpec { units: units.collect() }],
        params,
        groups: 1,
        bucketing: case["bucket_size"]
            .as_u64()
            .map_or(Bucketing::Whole, |n| Bucketing::Size(usize::try_from(n).unwrap())),
        alignment: Alignment::Standard,
        storage: Storage::Views,
        model_parallel: 1,
        pipeline: Pipeline::default(),
        shard_groups: Vec::new(),
    };
    Plan::new(&input).unwrap()
}

#[test]
fn all_nine_layouts_agree_with_the_reference() {
    let cases = cases();
    assert_eq!(cases.len(), 9);
    for case in &cases {
        let (plan, name) = (plan(case), &case["name"]);
        assert_eq!(plan.buffers().len(), 1, "{name}");
        assert_eq!(plan.buffer(BufferIndex(0)).numel, number(&case["layout"]["numel"]), "{name}");
        let unpadded: usize = plan.buckets().iter().map(|b| b.numel_unpadded).sum();
        assert_eq!(unpadded, number(&case["layout"]["numel_unpadded"]), "{name}");

        let params = case["layout"]["params"].as_array().unwrap();
        assert_eq!(params.len(), plan.params().len(), "{name}");
        for golden in params {
            let param = &plan.params()[number(&golden["index"])];
            assert_eq!(param.numel, number(&golden["numel"]), "{name} {}", param.name);
            let range = Range::new(number(&golden["start"]), number(&golden["end"]));
            let bucket = BucketId::from_index(number(&golden["bucket"]));
            assert_eq!(param.home, Home::Bucket { bucket, buffer: BufferIndex(0), range }, "{name} {}", param.name);
        }

        let buckets = case["layout"]["buckets"].as_array().unwrap();
        assert_eq!(buckets.len(), plan.buckets().len(), "{name}");
        for (golden, bucket) in buckets.iter().zip(plan.buckets()) {
            assert_eq!(bucket.id.index(), number(&golden["bucket"]), "{name}");
            assert_eq!(
                bucket.range,
                Range::new(number(&golden["offset"]), number(&golden["end"])),
                "{name} {}",
                bucket.id
            );
            assert_eq!(bucket.numel(), number(&golden["numel"]), "{name} {}", bucket.id);
            assert_eq!(bucket.numel_unpadded, number(&golden["numel_unpadded"]), "{name} {}", bucket.id);
            let ids: Vec<usize> = bucket.params.iter().map(|p| p.index()).collect();
            assert_eq!(ids, numbers(&golden["params"]), "{name} {}", bucket.id);
        }
    }
}

#[test]
fn every_rank_owns_the_pieces_of_the_reference() {
    for case in &cases() {
        let (plan, name) = (plan(case), &case["name"]);
        let ranks = case["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), plan.ranks(), "{name}");
        for golden_rank in ranks {
            let rank = Rank(number(&golden_rank["rank"]));
            let buckets = golden_rank["buckets"].as_array().unwrap();
            assert_eq!(buckets.len(), plan.buckets().len(), "{name}");
            for golden in buckets {
                let bucket = BucketId::from_index(number(&golden["bucket"]));
                assert_eq!(plan.shard(rank, bucket), range(&golden["shard"]), "{name} {rank} {bucket}");
                let owned = plan.owned(rank, bucket);
                let pieces = golden["params"].as_array().unwrap();
                assert_eq!(owned.len(), pieces.len(), "{name} {rank} {bucket}");
                for (piece, golden) in owned.iter().zip(pieces) {
                    assert_eq!(piece.param.index(), number(&golden["index"]), "{name} {rank} {bucket}");
                    assert_eq!(piece.in_buffer, range(&golden["gbuf_world"]), "{name} {rank} {bucket}");
                    assert_eq!(piece.in_bucket, range(&golden["gbuf_world_in_bucket"]), "{name} {rank} {bucket}");
                    assert_eq!(piece.in_shard, range(&golden["gbuf_local"]), "{name} {rank} {bucket}");
                    assert_eq!(piece.in_param, range(&golden["param"]), "{name} {rank} {bucket}");
                }
            }
        }
    }
}
