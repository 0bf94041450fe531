//! Where the device decides skips, the host waits for no verdict before it lets gathers go or begins the next step (SPEC T7):
//! on the null device with verdicts that are held back until the test lets them through.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "scenario/mod.rs"]
mod scenario;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gatherflow_actors::{Driver, Overlap, Ranks, Session, Skip};
use gatherflow_kernels::null::Gate;
use scenario::{Scenario, Shape};

const STEPS: u64 = 7;
/// Steps that the device skips.
const SKIPPED: [u64; 3] = [0, 3, 4];

fn held(skip: Skip, overlap: Overlap, steps_in_flight: u32) -> (Scenario, Gate, Arc<Session>) {
    let gate = Gate::default();
    let shape = Shape::regular(1, 6, 2, 100, 100);
    let scenario = Scenario {
        shape,
        skip,
        overlap,
        steps_in_flight,
        credits: u32::MAX,
        steps: STEPS,
        skipped: SKIPPED.into(),
        reads_scale: skip == Skip::Device,
        gate: Some(gate.clone()),
        ..Scenario::plain()
    };
    let seat = Ranks::local(1, None).unwrap().pop().unwrap();
    let session = scenario.start(seat, &Arc::new(scenario.plan()), Driver::Inline, "null");
    (scenario, gate, session)
}

#[test]
fn whole_steps_run_while_verdicts_are_unknown_up_to_the_steps_in_flight() {
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        for in_flight in 1..=3 {
            let (scenario, gate, session) = held(Skip::Device, overlap, in_flight);
            let (buckets, in_flight) = (session.plan().buckets().len() as u64, u64::from(in_flight));
            for step in 0..in_flight {
                scenario.step(&session, step, &mut |_| {}).unwrap();
                assert_eq!(session.finished_steps(), 0, "{overlap:?}: nothing is known");
                session.all_ready().unwrap();
                assert_eq!(session.counters().gathers, buckets * (step + 1), "{overlap:?}: gathers do not wait");
            }
            for step in in_flight..STEPS {
                // One step more than may be in flight waits for the oldest verdict, and for that one alone.
                std::thread::scope(|scope| {
                    let next = scope.spawn(|| scenario.step(&session, step, &mut |_| {}));
                    let from = Instant::now();
                    while from.elapsed() < Duration::from_millis(3) {
                        assert!(!next.is_finished(), "{overlap:?}: step {step} did not wait for its place");
                        std::thread::yield_now();
                    }
                    gate.let_through(step + 1 - in_flight);
                    next.join().unwrap().unwrap();
                });
                assert_eq!(session.finished_steps(), step + 1 - in_flight);
            }
            gate.let_through(STEPS);
            let mut updates = 0;
            for step in 0..STEPS {
                let outcome = session.outcome(step).unwrap();
                updates += u64::from(outcome.report.updated);
                assert_eq!((outcome.report.updated, &outcome.t[..]), (!SKIPPED.contains(&step), &[updates][..]));
            }
            session.close().unwrap();
            assert_eq!(session.counters().gathers, buckets * STEPS, "{overlap:?}: also in skipped steps");
        }
    }
}

#[test]
fn where_the_host_decides_nothing_is_gathered_before_it_knows_the_verdict() {
    let (scenario, gate, session) = held(Skip::Host, Overlap::Window, 2);
    scenario.step(&session, 0, &mut |_| {}).unwrap();
    gate.let_through(1);
    scenario.step(&session, 1, &mut |_| {}).unwrap();
    assert_eq!((session.finished_steps(), session.counters().gathers), (1, 0), "the first was skipped");
    gate.let_through(2);
    assert_eq!(session.counters().gathers, session.plan().buckets().len() as u64);
    session.close().unwrap();
}
