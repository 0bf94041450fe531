//! Rules O1, O2, O4 with real actor threads: ranks that move differently issue the same collectives in the same order, and
//! nobody waits for ever.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "scenario/mod.rs"]
mod scenario;

use std::sync::Arc;

use gatherflow_actors::{Driver, Overlap, Ranks};
use proptest::prelude::*;
use scenario::{Scenario, Shape};

/// Runs every rank on a thread of its own and returns the order digests.
fn digests(scenario: &Scenario, device: &str) -> Vec<u64> {
    let plans = scenario.plans();
    let seats = Ranks::local(scenario.shape.ranks, None).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                let plan = plans[seat.rank()].clone();
                scope.spawn(move || {
                    let session = scenario.start(seat, &plan, Driver::Actors, device);
                    scenario.execute(&session);
                    session.close().expect("close");
                    session.counters().order_digest
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("rank")).collect()
    })
}

#[test]
fn digests_agree_in_every_mode_and_equal_the_plain_loops() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for issue_on_thread in [false, true] {
            for shape in [Scenario::plain().shape, Shape::grouped()] {
                let forward_seed = Some(7);
                let scenario =
                    Scenario { shape, overlap, issue_on_thread, forward_seed, unused: 20, ..Scenario::plain() };
                let threads = digests(&scenario, "cpu");
                let inline = scenario.run_on_null().digests;
                assert_eq!(threads, inline, "{overlap:?}, issuing thread {issue_on_thread}");
                assert!(threads.iter().all(|digest| *digest == threads[0]));
            }
        }
    }
}

#[test]
fn a_rank_without_overlap_is_not_held_up_by_a_peer_that_overlaps_and_waits_for_it() {
    let eager = Scenario { overlap: Overlap::None, ..Scenario::plain() };
    let held = Scenario { overlap: Overlap::Window, credits: 1, ..Scenario::plain() };
    let plan = Arc::new(eager.plan());
    let mut seats = Ranks::local(2, None).unwrap().into_iter();
    let mut next = || seats.next().unwrap();
    let (first, second) = (next(), next());
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (plan, eager) = (&plan, &eager);
        scope.spawn(move || {
            let session = eager.start(first, plan, Driver::Actors, "cpu");
            eager.step(&session, 0, &mut |_| {}).expect("all gathers, though the peer demands none");
            tell.send(()).unwrap();
            session.close().expect("close");
        });
        let session = held.start(second, plan, Driver::Actors, "cpu");
        held.step(&session, 0, &mut |_| {}).expect("step");
        told.recv().expect("the first rank's step");
        session.close().expect("close");
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_models_and_orders_end_and_agree(shape in any::<u64>().prop_map(Shape::draw), seed in any::<u64>()) {
        let mut scenario = Scenario::draw(shape, seed);
        scenario.skipped.clear();
        let (digests, plans) = (digests(&scenario, "cpu"), scenario.plans());
        for (digest, plan) in digests.iter().zip(&plans) {
            let first = plans.iter().position(|other| Arc::ptr_eq(plan, other)).unwrap();
            prop_assert_eq!(*digest, digests[first], "{:?}: {:?}", scenario, digests);
        }
    }
}
