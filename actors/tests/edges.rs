//! Rules E1 to E8, C1 and O1 proven by the happens-before checker over the null logs of all ranks together.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "scenario/mod.rs"]
mod scenario;

use gatherflow_actors::{Edge, FirstGather, Overlap};
use gatherflow_kernels::check::{CheckOptions, RunAhead, Summary, Violations, check_logs};
use proptest::prelude::*;
use scenario::{Scenario, Shape};

fn check(scenario: &Scenario) -> Result<Summary, Violations> {
    let run = scenario.run_on_null();
    let order: Vec<u32> = run.plan.gather_order().iter().map(|b| b.0).collect();
    let ahead = match scenario.overlap {
        Overlap::None => RunAhead::Any,
        Overlap::Chain => RunAhead::Chain { order },
        Overlap::Window => RunAhead::Window { order, credits: scenario.credits },
    };
    check_logs(&run.logs, &CheckOptions { ahead })
}

#[test]
fn a_plain_run_is_clean_in_every_mode() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for (overlap_grad_reduce, first_gather) in [
            (false, FirstGather::Step),
            (true, FirstGather::Step),
            (true, FirstGather::ZeroGrad),
            (true, FirstGather::Forward),
        ] {
            for shape in [Scenario::plain().shape, Shape::grouped()] {
                let scenario = Scenario { shape, overlap, first_gather, overlap_grad_reduce, ..Scenario::plain() };
                let summary = check(&scenario).unwrap_or_else(|v| panic!("{overlap:?}: {v}"));
                let plan = scenario.plan();
                let (buckets, steps) = (plan.buckets().len(), scenario.steps as usize);
                assert!(buckets > 3);
                let updated = steps - scenario.skipped.len();
                assert_eq!(summary.gathers, buckets * updated, "{overlap:?}");
                assert_eq!(summary.reduces, buckets * steps, "{overlap:?}");
                let sums = plan.buckets().iter().flat_map(|b| plan.sum_groups(b.id)).filter(|group| *group > 0);
                assert_eq!(summary.sums, sums.count() * steps, "{overlap:?}");
                assert_eq!(summary.smalls, steps);
            }
        }
    }
}

#[test]
fn leaving_out_the_waits_of_any_edge_is_found() {
    let grouped = || Scenario { shape: Shape::grouped(), ..Scenario::thorough() };
    for edge in [Edge::E1, Edge::E2, Edge::T0, Edge::E3, Edge::E4, Edge::E5, Edge::E6] {
        let scenario = if edge == Edge::T0 { grouped() } else { Scenario::thorough() };
        let scenario = Scenario { dropped_edge: Some(edge), ..scenario };
        let violations = check(&scenario).expect_err(&format!("{edge:?} is missing and nothing was found"));
        assert!(violations.summary.races > 0, "{edge:?} must show as an unordered access: {violations}");
    }
    for scenario in [Scenario::thorough(), grouped()] {
        check(&scenario).unwrap_or_else(|v| panic!("with all edges it is clean: {v}"));
    }
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_plans_orders_and_modes_are_clean(shape in any::<u64>().prop_map(Shape::draw), seed in any::<u64>()) {
        let scenario = Scenario::draw(shape, seed);
        let result = check(&scenario);
        prop_assert!(result.is_ok(), "{scenario:?}: {}", result.unwrap_err());
    }
}
