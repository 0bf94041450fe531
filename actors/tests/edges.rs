//! Rules E1 to E8, C1 and O1 proven by the happens-before checker over the null logs of all ranks together.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "scenario/mod.rs"]
mod scenario;

use gatherflow_actors::plan::Storage;
use gatherflow_actors::{Edge, FirstGather, Overlap, Skip};
use gatherflow_kernels::DType;
use gatherflow_kernels::check::{CheckOptions, RunAhead, Summary, Violations, check_logs};
use gatherflow_kernels::null::LogEntry;
use gatherflow_kernels::{Collective, CollectiveOp, Work};
use proptest::prelude::*;
use scenario::{Scenario, Shape};

const STORAGES: [Storage; 2] = [Storage::Views, Storage::Shared];

fn check(scenario: &Scenario) -> Result<Summary, Violations> {
    let run = scenario.run_on_null();
    let order: Vec<u32> = run.plan.gather_order().iter().map(|b| b.0).collect();
    let ahead = match scenario.overlap {
        // Each stage has an order of its own.
        _ if scenario.shape.stages > 1 => RunAhead::Any,
        Overlap::None => RunAhead::Any,
        Overlap::Chain => RunAhead::Chain { order },
        Overlap::Window => RunAhead::Window { order, credits: scenario.credits },
    };
    check_logs(&run.logs, &CheckOptions { ahead })
}

#[test]
fn a_plain_run_is_clean_in_every_mode_and_storage() {
    let modes = [Overlap::None, Overlap::Chain, Overlap::Window];
    for (overlap, storage) in modes.into_iter().flat_map(|mode| STORAGES.map(|storage| (mode, storage))) {
        for (overlap_grad_reduce, first_gather) in [
            (false, FirstGather::Step),
            (true, FirstGather::Step),
            (true, FirstGather::ZeroGrad),
            (true, FirstGather::Forward),
        ] {
            let skips = [(Skip::Host, true, vec![]), (Skip::Host, false, vec![2]), (Skip::Device, true, vec![0, 2])];
            for (shape, (skip, check_for_nan_in_grad, skipped)) in
                [Scenario::plain().shape, Shape::grouped()].iter().flat_map(|shape| skips.clone().map(|s| (shape, s)))
            {
                let mode = Scenario { overlap, first_gather, overlap_grad_reduce, ..Scenario::plain() };
                let scenario =
                    Scenario { shape: shape.clone(), skip, skipped, check_for_nan_in_grad, reads_scale: true, ..mode };
                let scenario = scenario.stored(storage);
                let summary = check(&scenario).unwrap_or_else(|v| panic!("{overlap:?}, {storage}: {v}"));
                let plan = scenario.plan();
                let (buckets, steps) = (plan.buckets().len(), scenario.steps as usize);
                assert!(buckets > 3);
                assert_eq!(summary.gathers, buckets * scenario.gathered_versions(), "{overlap:?}, {skip:?}");
                assert_eq!(summary.reduces, buckets * steps, "{overlap:?}");
                let sums = plan.buckets().iter().flat_map(|b| plan.sum_groups(b.id)).filter(|group| *group > 0);
                assert_eq!(summary.sums, sums.count() * steps, "{overlap:?}");
                assert_eq!(summary.smalls, steps);
                let in_calls = Scenario { call_bytes: 2_000, ..scenario };
                let plan = in_calls.plan();
                assert!(1 < plan.calls() && plan.calls() < buckets);
                let together = check(&in_calls).unwrap_or_else(|v| panic!("{overlap:?} in calls: {v}"));
                assert_eq!((together.gathers, together.reduces), (summary.gathers, summary.reduces));
            }
        }
    }
}

#[test]
fn stages_are_clean_in_every_mode_and_storage() {
    let modes = [Overlap::None, Overlap::Chain, Overlap::Window];
    for (overlap, storage) in modes.into_iter().flat_map(|mode| STORAGES.map(|storage| (mode, storage))) {
        for (skip, skipped) in [(Skip::Host, vec![2]), (Skip::Device, vec![0, 2])] {
            let scenario = Scenario { shape: Shape::staged(), overlap, skip, skipped, ..Scenario::plain() };
            let scenario = scenario.stored(storage);
            let summary = check(&scenario).unwrap_or_else(|v| panic!("{overlap:?}, {storage}: {v}"));
            let steps = scenario.steps as usize;
            // Two weights over stages; one parameter of the second stage is summed over its ranks, under the number of another sum or
            // reduce of the first.
            assert!(summary.sums >= 2 * steps && summary.smalls == steps, "{overlap:?}: {summary:?}");
        }
    }
}

#[test]
fn leaving_out_the_waits_of_any_edge_is_found() {
    let thorough = |storage, edge| {
        let mut scenario = Scenario::thorough().stored(storage);
        if edge == Edge::T0 {
            let shape = [Shape::grouped(), Shape::staged()][usize::from(storage == Storage::Shared)].clone();
            scenario = Scenario { shape, ..scenario }.stored(storage);
        } else if storage == Storage::Shared {
            // Adam writes staging shards, which nobody reads, and f32 parameters where the model reads them.
            scenario.shape.dtype[0] = DType::F32;
        }
        scenario
    };
    for storage in STORAGES {
        for (skip, check_for_nan_in_grad) in [(Skip::Host, false), (Skip::Host, true), (Skip::Device, true)] {
            for edge in [Edge::E1, Edge::E2, Edge::T0, Edge::E3, Edge::E4, Edge::E5, Edge::E6] {
                let thorough = Scenario { skip, check_for_nan_in_grad, ..thorough(storage, edge) };
                // A search waits for its bucket's writes, and zeroing behind it on the same stream with it: where nobody writes,
                // it does not.
                let unused = if check_for_nan_in_grad && edge == Edge::E6 { 100 } else { thorough.unused };
                let scenario = Scenario { unused, dropped_edge: Some(edge), ..thorough.clone() };
                let violations = check(&scenario).expect_err(&format!("{edge:?} is missing and nothing was found"));
                assert!(violations.summary.races > 0, "{edge:?} must show as an unordered access: {violations}");
                check(&thorough).unwrap_or_else(|v| panic!("with all edges it is clean: {v}"));
            }
        }
    }
}

#[test]
fn leaving_out_e7_lets_the_verdict_move_the_scale_under_its_reader_where_the_device_decides() {
    // Where gradients come after the read, their events order it too: here it is read after them.
    let with = Scenario { skip: Skip::Device, reads_scale: true, ..Scenario::plain() };
    check(&with).unwrap_or_else(|v| panic!("with all edges it is clean: {v}"));
    let violations = check(&Scenario { dropped_edge: Some(Edge::E7), ..with.clone() }).expect_err("E7 is missing");
    assert_eq!(violations.summary.races as u64, with.steps * with.shape.ranks as u64, "one a verdict: {violations}");
    let host = Scenario { skip: Skip::Host, dropped_edge: Some(Edge::E7), ..with.clone() };
    let violations = check(&host).expect_err("E7 is missing");
    assert_eq!(
        violations.summary.races, with.shape.ranks,
        "outcomes tell the host all scales but the first: {violations}"
    );
}

#[test]
fn leaving_out_e8_is_found_by_its_assertion() {
    for overlap in [Overlap::Chain, Overlap::Window] {
        let with = Scenario { overlap, credits: 1, ..Scenario::plain() };
        let summary = check(&with).unwrap_or_else(|v| panic!("{overlap:?}: {v}"));
        assert!(summary.let_go_by_entry > 0, "{overlap:?}: the scenario must let gathers go by entries");
        let without = Scenario { dropped_edge: Some(Edge::E8), ..with };
        let violations = check(&without).expect_err("E8 is missing");
        assert_eq!(violations.summary.races, 0, "{overlap:?}: nothing else is wrong");
    }
}

#[test]
fn no_gather_goes_beyond_the_credits_but_in_the_flush_at_the_end() {
    // Where nobody waits for what a peer demands: one rank that enters units in any order, and two that enter them in
    // the same, with no more buckets in a unit than there are credits. All is demanded before the first reduce, so
    // there is no drain.
    let alone = Scenario { shape: Shape::regular(1, 6, 2, 100, 100), forward_seed: Some(7), ..Scenario::plain() };
    let together = Scenario { shape: Shape::regular(2, 6, 1, 100, 100), ..Scenario::plain() };
    for (scenario, storage) in [alone, together].iter().flat_map(|of| STORAGES.map(|storage| (of, storage))) {
        let buckets = scenario.plan().buckets().len();
        let modes = [1, 2, 3, 5, 100].map(|credits| (Overlap::Window, credits));
        for (overlap, credits) in modes.into_iter().chain([(Overlap::Chain, 1)]) {
            for first_gather in [FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward] {
                // The end flushes the last version, if there is one.
                for (skip, skipped) in [(Skip::Host, vec![3]), (Skip::Host, vec![1]), (Skip::Device, vec![3])] {
                    let scenario =
                        Scenario { overlap, credits, first_gather, skip, skipped, evaluate: true, ..scenario.clone() };
                    let summary =
                        check(&scenario.clone().stored(storage)).unwrap_or_else(|v| panic!("{scenario:?}: {v}"));
                    let free = buckets.min(credits as usize);
                    let last = usize::from(skip == Skip::Device || !scenario.skipped.contains(&3));
                    let flushed = scenario.shape.ranks * last * (buckets - free);
                    assert_eq!(summary.let_go_without_entry, flushed, "{scenario:?}");
                    let gathers = scenario.shape.ranks * scenario.gathered_versions() * buckets;
                    let seen = summary.let_go_by_entry + summary.let_go_within_credits + flushed;
                    assert_eq!(seen, gathers, "{scenario:?}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_searched_behind_their_writes_and_before_their_reduce_once_a_bucket_and_step() {
    let with = Scenario { check_for_nan_in_grad: true, unused: 20, ..Scenario::plain() };
    for log in with.run_on_null().logs {
        let (mut searched, mut reduces) = (Vec::new(), 0);
        for entry in log.entries.lock().iter() {
            match entry {
                LogEntry::Enqueue { on, work: Work::FindNonFinite(search) } => searched.push((*on, search.grad)),
                LogEntry::Enqueue {
                    on,
                    work: Work::Collective(Collective { op: CollectiveOp::ReduceScatter { send, .. }, .. }),
                } => {
                    let before = searched.len();
                    searched.retain(|search| *search != (*on, *send));
                    assert_eq!(before - searched.len(), 1, "the same gradients, once, before it on the same stream");
                    reduces += 1;
                }
                _ => {}
            }
        }
        assert_eq!(reduces, with.steps as usize * with.plan().buckets().len());
    }
    // What the search reads is one more thing that E1 orders.
    let races = |check_for_nan_in_grad| {
        let without = Scenario { check_for_nan_in_grad, dropped_edge: Some(Edge::E1), ..with.clone() };
        check(&without).expect_err("E1 is missing").summary.races
    };
    assert!(races(true) > races(false));
}

#[test]
fn one_step_makes_no_pass_over_a_full_buffer_beyond_the_collectives() {
    let scenario = Scenario::plain();
    let run = scenario.run_on_null();
    for log in &run.logs {
        let entries = log.entries.lock();
        // Zeroing of what nobody wrote is per parameter; everything else is per shard.
        let passes = gatherflow_kernels::check::full_buffer_passes(&entries, |buffer| run.shard_bytes(buffer));
        assert!(passes.is_empty(), "{passes:?}");
    }
}

#[test]
fn with_storage_shared_one_gather_costs_one_copy_out_and_one_zeroing_and_nothing_else_passes_over_a_bucket() {
    let scenario = Scenario { skipped: vec![1], ..Scenario::plain() }.stored(Storage::Shared);
    let run = scenario.run_on_null();
    let numel: usize = run.plan.buffers().iter().map(|b| b.numel).sum();
    let updated = (scenario.steps - 1) as usize;
    for log in &run.logs {
        let entries = log.entries.lock();
        let passes = gatherflow_kernels::check::full_buffer_passes(&entries, |buffer| run.shard_bytes(buffer));
        assert!(passes.iter().all(|pass| ["copy", "fill"].contains(&pass.work)), "{passes:?}");
        let bytes = gatherflow_kernels::check::bytes_by_work(&entries);
        let of =
            |work: &str| bytes.iter().filter(|((_, name), _)| *name == work).map(|(_, bytes)| bytes).sum::<usize>();
        // bf16 parameters, read and written once each, and copied to the staging shards at the start; f32 gradients, zeroed
        // after every step, skipped or not.
        let staged = 2 * numel * 2 / scenario.shape.ranks;
        assert_eq!((of("copy"), of("fill")), (updated * 2 * numel * 2 + staged, (updated + 1) * numel * 4));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_plans_orders_and_modes_are_clean(shape in any::<u64>().prop_map(Shape::draw), seed in any::<u64>()) {
        let scenario = Scenario::draw(shape, seed);
        let result = check(&scenario);
        prop_assert!(result.is_ok(), "{scenario:?}: {}", result.unwrap_err());
    }
}
