//! Rules F1 and O2, and CASES rows 20 and 24, with real actor threads: the error names rank, collective and what is missing
//! (not issued, not started, not finished, left, silent, another order), and nobody is blamed who is only slow.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod drills;
#[path = "scenario/mod.rs"]
mod scenario;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drills::{
    DEADLINES, End, LIMIT, Part, a_new_session_works, alone, at_message, in_stages, messages, nothing_is_left,
    one_cause, run, run_over, scenario,
};
use gatherflow_actors::drill::{Drill, Fault};
use gatherflow_actors::plan::UnitId;
use gatherflow_actors::{Deadlines, Driver, LrRow, Overlap, Ranks, StepRequest};
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::{CollectiveKey, CollectiveKind, FailureKind, Link, Work};
use scenario::Shape;

/// The nth collective of this kind and bucket.
fn at_collective(kind: CollectiveKind, version: u64, bucket: u32, inject: Inject) -> BeforeWork {
    BeforeWork::new(move |work| match work {
        Work::Collective(c) if (c.key.kind, c.key.version, c.key.bucket) == (kind, version, bucket) => inject.clone(),
        _ => Inject::Nothing,
    })
}

#[test]
fn a_collective_that_stalls_on_one_rank_is_named_with_that_rank_as_not_started() {
    let _alone = alone();
    let stall = Inject::Delay(Duration::from_millis(1200));
    for ranks in [2, 3] {
        for (kind, version, bucket) in [
            (CollectiveKind::Reduce, 0, 1),
            (CollectiveKind::Small, 1, CollectiveKey::NO_BUCKET),
            (CollectiveKind::Gather, 1, 0),
            (CollectiveKind::Gather, 2, 2),
        ] {
            let mut parts = vec![Part::default(); ranks];
            parts[1].before_work = Some(at_collective(kind, version, bucket, stall.clone()));
            let label = format!("{ranks} ranks, {kind:?} {version} {bucket}");
            let ends = run(&label, &scenario(ranks), "cpu", parts);
            let cause = one_cause(&label, &ends);
            assert_eq!((cause.kind, cause.rank), (FailureKind::Deadline, 1), "{label}: {cause}");
            assert!(cause.message.contains("rank 1 has not started it"), "{label}: {cause}");
            assert_eq!(cause.bucket, (bucket != CollectiveKey::NO_BUCKET).then_some(bucket), "{label}: {cause}");
        }
        nothing_is_left("stalls");
        a_new_session_works(ranks);
    }
}

#[test]
fn a_verdict_that_stalls_on_the_only_rank_ends_its_wait() {
    let _alone = alone();
    let stall = BeforeWork::new(|work| match work {
        Work::Verdict(verdict) if verdict.step == 1 => Inject::Delay(Duration::from_millis(1500)),
        _ => Inject::Nothing,
    });
    let part = Part { before_work: Some(stall), ..Part::default() };
    let from = Instant::now();
    let ends = run("verdict", &scenario(1), "cpu", vec![part]);
    let cause = one_cause("verdict", &ends);
    assert_eq!((cause.kind, cause.step), (FailureKind::Deadline, Some(1)), "{cause}");
    assert!(cause.message.contains("the verdict did not come"), "{cause}");
    // The deadline, and what a drop spends on a stuck thread.
    assert!(from.elapsed() < Duration::from_millis(2500), "{:?}", from.elapsed());
    nothing_is_left("verdict");
}

#[test]
fn a_kernel_that_stalls_on_one_rank_ends_every_wait() {
    let _alone = alone();
    let stall = Inject::Delay(Duration::from_millis(2500));
    for (name, at) in [("norm partials", 1), ("fold", 0), ("verdict", 0), ("adam", 1)] {
        let count = AtomicU64::new(0);
        let stall = stall.clone();
        let mut parts = vec![Part::default(); 2];
        parts[1].before_work = Some(BeforeWork::new(move |work| {
            let hit = work.name().eq_ignore_ascii_case(name) && count.fetch_add(1, Ordering::SeqCst) == at;
            if hit { stall.clone() } else { Inject::Nothing }
        }));
        let ends = run(name, &scenario(2), "cpu", parts);
        let cause = one_cause(name, &ends);
        assert_eq!(cause.kind, FailureKind::Deadline, "{name}: {cause}");
        assert_eq!(cause.rank, 1, "{name}: {cause}");
    }
    nothing_is_left("stalls");
    a_new_session_works(2);
}

fn sleeps_at(step: u64, call: u64, time: Duration) -> Part {
    let before_call = move |s: u64, c: u64| {
        if (s, c) == (step, call) {
            std::thread::sleep(time);
        }
    };
    Part { before_call: Some(Arc::new(before_call)), ..Part::default() }
}

#[test]
fn an_executor_asleep_for_longer_than_the_deadline_is_named_with_what_it_has_not_issued() {
    let _alone = alone();
    for ranks in [2, 3] {
        // Forward of the second step, before backward, and before `step`.
        for call in [1, 5, 9] {
            let mut parts = vec![Part::default(); ranks];
            parts[1] = sleeps_at(1, call, Duration::from_millis(1500));
            let label = format!("{ranks} ranks, asleep before call {call}");
            let ends = run(&label, &scenario(ranks), "cpu", parts);
            let cause = one_cause(&label, &ends);
            assert_eq!((cause.kind, cause.rank), (FailureKind::Deadline, 1), "{label}: {cause}");
            assert!(cause.message.contains("rank 1 has not issued the"), "{label}: {cause}");
            assert!(cause.step == Some(1) || cause.step == Some(0), "{label}: {cause}");
        }
    }
    nothing_is_left("sleepers");
    a_new_session_works(2);
}

#[test]
fn a_slow_executor_that_goes_on_entering_units_trips_no_deadline() {
    let _alone = alone();
    let mut scenario = scenario(2);
    scenario.shape = Shape::regular(2, 8, 1, 100, 100);
    // Every call takes 50 ms, a step 1.2 s: four times the deadline of its peer, which waits for its reduces and gathers.
    let slow =
        Part { before_call: Some(Arc::new(|_, _| std::thread::sleep(Duration::from_millis(50)))), ..Part::default() };
    let ends = run("slow", &scenario, "cpu", vec![Part::default(), slow]);
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
}

#[test]
fn an_executor_that_computes_for_longer_than_silence_is_still_alive() {
    let _alone = alone();
    let deadlines = Deadlines { silence: Duration::from_millis(400), collective: LIMIT, start_up: LIMIT };
    let parts = vec![Part::default(), sleeps_at(1, 4, Duration::from_millis(1500))];
    let ends = run_over("computes", &scenario(2), "cpu", parts, deadlines, None);
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
}

#[test]
fn many_slow_collectives_one_after_the_other_each_have_the_whole_deadline() {
    let _alone = alone();
    let mut scenario = scenario(2);
    scenario.shape = Shape::regular(2, 8, 1, 100, 100);
    scenario.steps = 2;
    scenario.overlap_grad_reduce = false;
    // Eight reduces are issued at once and take 80 ms each: together twice the deadline.
    let link = Link { bytes_per_second: 1e9, latency: Duration::from_millis(80) };
    let deadlines = Deadlines { silence: LIMIT, start_up: LIMIT, ..DEADLINES };
    let ends = run_over("slow link", &scenario, "cpu", vec![Part::default(); 2], deadlines, Some(link));
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
}

#[test]
fn a_session_dropped_before_any_call_is_a_lost_rank_to_its_peers() {
    let _alone = alone();
    for ranks in [2, 3] {
        let calls = Arc::new(AtomicU64::new(0));
        let (counting, mut parts) = (calls.clone(), vec![Part::default(); ranks]);
        parts[1].before_call = Some(Arc::new(move |_, call| {
            counting.fetch_max(call + 1, Ordering::SeqCst);
        }));
        run("counting calls", &scenario(ranks), "cpu", parts);
        for step in 0..2 {
            for call in 0..calls.load(Ordering::SeqCst) {
                let mut parts = vec![Part::default(); ranks];
                parts[1].leave_at = Some((step, call));
                let label = format!("{ranks} ranks, dropped at step {step} before call {call}");
                let ends = run(&label, &scenario(ranks), "cpu", parts);
                let (left, peers): (Vec<_>, Vec<_>) = ends.into_iter().partition(|end| matches!(end, End::Left));
                assert_eq!((left.len(), peers.len()), (1, ranks - 1), "{label}");
                let cause = one_cause(&label, &peers);
                assert_eq!((cause.kind, cause.rank), (FailureKind::RankLost, 1), "{label}: {cause}");
                assert!(cause.message.contains("rank 1 left; rank "), "{label}: {cause}");
                let named = ["reduce of bucket", "small all-gather", "gather of bucket"];
                assert!(named.iter().any(|what| cause.message.contains(what)), "{label}: {cause}");
            }
        }
        nothing_is_left("lost ranks");
        a_new_session_works(ranks);
    }
}

#[test]
fn a_rank_that_vanishes_at_any_message_is_missed_by_name() {
    let _alone = alone();
    for (actor, count) in messages(&scenario(2)) {
        // Most of the time of each is the deadline, so several worlds at once.
        let runs: Vec<_> = (0..count)
            .map(|nth| {
                std::thread::spawn(move || {
                    let label = format!("vanished at message {nth} of the {actor}");
                    let mut parts = vec![Part::default(); 2];
                    let (drill, fired) = at_message(actor, nth, Fault::Vanish, &parts[1].at_step);
                    parts[1].drill = Some(drill);
                    let scenario = scenario(2);
                    let ends = run(&label, &scenario, "cpu", parts);
                    if (1..scenario.steps).contains(&fired.load(Ordering::SeqCst)) {
                        let cause = ends[0].cause();
                        assert!(matches!(ends[1], End::Failed(_)), "{label}: its own calls end too");
                        assert_eq!(cause.rank, 1, "{label}: {cause}");
                        assert!(
                            matches!(cause.kind, FailureKind::RankLost | FailureKind::Deadline),
                            "{label}: {cause}"
                        );
                    }
                })
            })
            .collect();
        for run in runs {
            run.join().expect("a drill");
        }
    }
    nothing_is_left("vanished ranks");
    a_new_session_works(2);
}

#[test]
fn ranks_that_differ_at_the_start_all_hear_the_same_difference() {
    let _alone = alone();
    let plan = |ranks, numel| Some(Arc::new(Shape::regular(ranks, 3, 1, numel, 100).plan()));
    let rule = Part { change: Some(|config| config.rule.max_norm = 7.0), ..Part::default() };
    for (differs, says) in [
        (Part { plan: plan(3, 101), ..Part::default() }, "parameter p0"),
        (Part { plan: plan(2, 100), ..Part::default() }, "the plan is for 2 ranks"),
        (rule, "averaging, clipping and policies"),
    ] {
        let ends = run(says, &scenario(3), "cpu", vec![Part::default(), Part::default(), differs]);
        let cause = one_cause(says, &ends);
        assert_eq!(cause.kind, FailureKind::StartUp, "{cause}");
        assert!(cause.message.contains(says), "{says}: {cause}");
    }
    nothing_is_left("start-up");
    a_new_session_works(3);
}

#[test]
fn ranks_of_all_stages_hear_of_a_difference_within_one() {
    let _alone = alone();
    let staged = in_stages();
    let (plans, mut other) = (staged.plans(), staged.clone());
    other.shape.numel[1] = 101;
    for (plan, says) in [
        (other.plans()[2].clone(), "rank 0 has parameter p1"),
        (plans[1].clone(), "the plan is of pipeline stage 1 but rank 2 is of stage 0"),
    ] {
        let mut parts = vec![Part::default(); 4];
        parts[2].plan = Some(plan);
        let cause = one_cause(says, &run(says, &staged, "cpu", parts));
        assert!(cause.kind == FailureKind::StartUp && cause.message.contains(says), "{cause}");
    }
    nothing_is_left("start-up");
}

#[test]
fn a_rank_that_never_starts_is_named_by_the_start_up_deadline() {
    let _alone = alone();
    let mut parts = vec![Part::default(); 3];
    parts[1].never_starts = Some(Duration::from_millis(900));
    let deadlines = Deadlines { start_up: Duration::from_millis(300), ..DEADLINES };
    let mut ends = run_over("never starts", &scenario(3), "cpu", parts, deadlines, None);
    ends.remove(1);
    let cause = one_cause("never starts", &ends);
    assert_eq!((cause.kind, cause.rank), (FailureKind::Deadline, 1), "{cause}");
    // And one that gives up its seat at once.
    let mut parts = vec![Part::default(); 3];
    parts[1].never_starts = Some(Duration::ZERO);
    let mut ends = run("gives up", &scenario(3), "cpu", parts);
    ends.remove(1);
    let cause = one_cause("gives up", &ends);
    assert_eq!((cause.kind, cause.rank), (FailureKind::RankLost, 1), "{cause}");
    nothing_is_left("start-up");
}

#[test]
fn another_order_is_named_with_its_first_differing_entry_on_all_ranks() {
    let _alone = alone();
    for (device, ranks) in [("cpu", 2), ("cpu", 3), ("null", 2), ("null", 3)] {
        let mut parts = vec![Part::default(); ranks];
        parts[1].drill = Some(Drill::swap(0, 1));
        let label = format!("{ranks} ranks on {device}");
        let mut scenario = scenario(ranks);
        scenario.overlap = Overlap::None;
        scenario.skipped = vec![0, 1, 2];
        if device == "null" {
            // Nobody meets there: only the digests tell.
            scenario.steps = 40;
            for part in &mut parts {
                part.before_call = Some(Arc::new(|_, _| std::thread::sleep(Duration::from_millis(2))));
            }
            scenario.skipped = (0..40).collect();
        }
        let ends = run(&label, &scenario, device, parts);
        let cause = one_cause(&label, &ends);
        assert_eq!(cause.kind, FailureKind::OrderMismatch, "{label}: {cause}");
        assert_eq!(cause.step, Some(0), "{label}: {cause}");
        assert!(cause.message.contains("rank 1 issued reduce of bucket"), "{label}: {cause}");
        let peers = ["rank 0 issued reduce of bucket", "rank 2 issued reduce of bucket"];
        assert!(peers.iter().any(|peer| cause.message.contains(peer)), "{label}: {cause}");
    }
    nothing_is_left("orders");
}

#[test]
fn a_wrong_digest_of_a_peer_ends_the_run_on_all_ranks() {
    let _alone = alone();
    for step in [0, 1] {
        let mut parts = vec![Part::default(); 3];
        parts[1].forges = Some(step);
        let ends = run("a forged digest", &scenario(3), "cpu", parts);
        let cause = one_cause("a forged digest", &ends);
        assert_eq!((cause.kind, cause.step), (FailureKind::OrderMismatch, Some(step)), "{cause}");
        assert!(cause.message.contains("ranks 0 and 1") || cause.message.contains("ranks 1 and 2"), "{cause}");
    }
    nothing_is_left("forged digests");
    a_new_session_works(3);
}

#[test]
fn a_rank_that_fails_while_it_starts_is_everybodys_first_cause() {
    let _alone = alone();
    for ranks in [2, 3] {
        let mut parts = vec![Part::default(); ranks];
        parts[1].fails_in_init = true;
        let ends = run("init", &scenario(ranks), "cpu", parts);
        let cause = one_cause("init", &ends);
        assert_eq!((cause.kind, cause.rank), (FailureKind::StartUp, 1), "{cause}");
        assert!(cause.message.contains("no file"), "{cause}");
    }
    nothing_is_left("start-up");
    a_new_session_works(2);
}

#[test]
fn a_demand_several_steps_ahead_is_met_by_a_peer_whose_executor_sleeps() {
    let _alone = alone();
    let mut scenario = scenario(2);
    scenario.steps_in_flight = 3;
    let plan = Arc::new(scenario.plan());
    let ranks: Vec<_> = Ranks::local(2, None)
        .unwrap()
        .into_iter()
        .map(|seat| {
            let (scenario, plan) = (scenario.clone(), plan.clone());
            std::thread::spawn(move || {
                let session = scenario.start(seat, &plan, Driver::Actors, "cpu");
                for _ in 0..3 {
                    let unwritten = plan.params().iter().map(|param| param.id).collect();
                    let request = StepRequest { lrs: vec![LrRow::constant(1e-3)], unwritten, ..StepRequest::default() };
                    session.step(request).unwrap();
                }
                let asked = Instant::now();
                if session.rank() == 0 {
                    session.enter(UnitId(2)).unwrap();
                } else {
                    std::thread::sleep(Duration::from_secs(2));
                }
                let waited = asked.elapsed();
                session.close().unwrap();
                waited
            })
        })
        .collect();
    let waited = ranks.into_iter().map(|rank| rank.join().unwrap()).min().unwrap();
    assert!(waited < Duration::from_secs(1), "the demand was met after {waited:?}");
}
