//! Rule F1 with real actor threads: whatever fails, panics, stalls or vanishes, at whichever message, every caller on every
//! rank gets the first cause in time, all threads are given back, and new sessions work.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod drills;
#[path = "scenario/mod.rs"]
mod scenario;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use drills::{DEADLINES, End, LIMIT, Part, a_new_session_works, nothing_is_left, one_cause, run, run_over, scenario};
use gatherflow_actors::drill::{Drill, Fault};
use gatherflow_actors::plan::{BucketId, UnitId};
use gatherflow_actors::{ActorName, Deadlines, Driver, LrRow, Overlap, Ranks, Session, StepRequest};
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::{Cause, CollectiveKey, CollectiveKind, FailureKind, Link, OpenOptions, Work};
use scenario::{Draw, Scenario, Shape};

/// Tests count threads of the process and measure time, so they run one after the other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn actors() -> Vec<ActorName> {
    let buckets = (0..3).map(|i| ActorName::Bucket(BucketId(i)));
    buckets.chain([ActorName::PreHook, ActorName::Optimizer, ActorName::Communicator, ActorName::Supervisor]).collect()
}

/// How many messages each actor of one rank takes in a healthy run.
fn messages(ranks: usize) -> BTreeMap<ActorName, u64> {
    let counts = Arc::new(Mutex::new(BTreeMap::new()));
    let counting = counts.clone();
    let mut parts = vec![Part::default(); ranks];
    parts[0].drill = Some(Drill::before_message(move |actor| {
        *counting.lock().unwrap().entry(actor).or_insert(0) += 1;
        Fault::Nothing
    }));
    let ends = run("counting", &scenario(ranks), "cpu", parts);
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
    let counts = counts.lock().unwrap();
    assert_eq!(counts.len(), actors().len(), "every actor hears something: {counts:?}");
    counts.clone()
}

/// A drill that lets `actor` have its fault at its `nth` message. What comes back tells at which of the executor's steps
/// that happened, plus 1.
fn at_message(actor: ActorName, nth: u64, fault: Fault, at_step: &Arc<AtomicU64>) -> (Drill, Arc<AtomicU64>) {
    let (count, fired, at_step) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)), at_step.clone());
    let fires = fired.clone();
    let drill = Drill::before_message(move |heard| {
        if heard != actor || count.fetch_add(1, Ordering::SeqCst) != nth {
            return Fault::Nothing;
        }
        fires.store(at_step.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
        fault.clone()
    });
    (drill, fired)
}

/// Every actor, every message of a run: the fault's text is what everybody hears.
fn every_message(ranks: usize, text: &str, fault: &Fault) {
    let mut fired_in_steps = 0;
    for (actor, count) in messages(ranks) {
        for nth in 0..count {
            let drilled = nth as usize % ranks;
            let label = format!("{ranks} ranks, {fault:?} of the {actor} of rank {drilled} at its message {nth}");
            let mut parts = vec![Part::default(); ranks];
            let (drill, fired) = at_message(actor, nth, fault.clone(), &parts[drilled].at_step);
            parts[drilled].drill = Some(drill);
            let scenario = scenario(ranks);
            let ends = run(&label, &scenario, "cpu", parts);
            let failed: Vec<_> = ends.iter().filter(|end| !matches!(end, End::Closed)).cloned().collect();
            match fired.load(Ordering::SeqCst) {
                0 => assert!(failed.is_empty(), "{label}: nothing was wrong, but {ends:?}"),
                // Somebody may have finished before it happened.
                at if at >= scenario.steps => assert!(failed.iter().all(|end| end.cause().message.contains(text))),
                _ => {
                    fired_in_steps += 1;
                    let cause = one_cause(&label, &ends);
                    assert!(cause.message.contains(text), "{label}: {cause}");
                    assert_eq!(cause.rank, drilled, "{label}: {cause}");
                    if let ActorName::Bucket(bucket) = actor
                        && *fault != Fault::EndThread
                    {
                        assert_eq!(cause.bucket, Some(bucket.0), "{label}: {cause}");
                    }
                }
            }
        }
    }
    assert!(fired_in_steps > 20, "{fired_in_steps} drills in the middle of a run");
    nothing_is_left("all drills");
    a_new_session_works(ranks);
}

#[test]
fn an_actor_that_fails_at_any_message_ends_every_wait_on_every_rank_with_its_cause() {
    let _alone = alone();
    for ranks in [2, 3] {
        every_message(ranks, "failed: drill", &Fault::Fail("drill".into()));
    }
}

#[test]
fn an_actor_that_panics_at_any_message_ends_every_wait_on_every_rank_with_its_cause() {
    let _alone = alone();
    for ranks in [2, 3] {
        every_message(ranks, "panicked: drill", &Fault::Panic("drill".into()));
    }
}

#[test]
fn an_actor_thread_that_ends_at_any_message_ends_every_wait_on_every_rank() {
    let _alone = alone();
    for ranks in [2, 3] {
        every_message(ranks, "the actor thread ended", &Fault::EndThread);
    }
}

/// Counts pieces of work and lets one have its fault.
fn at_work(nth: u64, inject: Inject) -> (BeforeWork, Arc<AtomicU64>) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let hook =
        BeforeWork::new(
            move |_| {
                if counted.fetch_add(1, Ordering::SeqCst) == nth { inject.clone() } else { Inject::Nothing }
            },
        );
    (hook, count)
}

/// Collectives and kernels alike: every piece of work of one rank, start-up included.
fn every_work(inject: &Inject, expect: &dyn Fn(&str, &Cause)) {
    for ranks in [2, 3] {
        let mut parts = vec![Part::default(); ranks];
        let (hook, count) = at_work(u64::MAX, Inject::Nothing);
        parts[ranks - 1].before_work = Some(hook);
        run("counting work", &scenario(ranks), "cpu", parts);
        let count = count.load(Ordering::SeqCst);
        assert!(count > 40, "{count}");
        // The last step's work may be over before anybody looks.
        let must_fail = count * 2 / 3 - 4;
        for nth in 0..count {
            let label = format!("{ranks} ranks, {inject:?} before work {nth} of {count}");
            let drilled = nth as usize % ranks;
            let mut parts = vec![Part::default(); ranks];
            parts[drilled].before_work = Some(at_work(nth, inject.clone()).0);
            let ends = run(&label, &scenario(ranks), "cpu", parts);
            if nth < must_fail {
                let cause = one_cause(&label, &ends);
                assert!(cause.kind == FailureKind::Deadline || cause.rank == drilled, "{label}: {cause}");
                expect(&label, &cause);
            } else {
                ends.iter().filter(|end| !matches!(end, End::Closed)).for_each(|end| expect(&label, end.cause()));
            }
        }
        nothing_is_left("all drills");
        a_new_session_works(ranks);
    }
}

#[test]
fn work_that_fails_on_one_rank_is_everybodys_first_cause() {
    let _alone = alone();
    every_work(&Inject::Fail("drill".into()), &|label, cause| {
        assert!(cause.message.contains("drill"), "{label}: {cause}");
    });
}

#[test]
fn work_that_panics_on_one_rank_is_everybodys_first_cause() {
    let _alone = alone();
    every_work(&Inject::Panic, &|label, cause| assert!(cause.message.contains("panic: injected"), "{label}: {cause}"));
}

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
    let mut part = Part::default();
    part.before_work = Some(BeforeWork::new(|work| match work {
        Work::Verdict(verdict) if verdict.step == 1 => Inject::Delay(Duration::from_millis(1500)),
        _ => Inject::Nothing,
    }));
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
fn a_session_whose_last_owner_is_a_waker_ends_on_the_actor_thread() {
    struct Owner(Mutex<Option<(Arc<Session>, Sender<String>)>>);
    impl Wake for Owner {
        fn wake(self: Arc<Self>) {
            if let Some((session, sender)) = self.0.lock().unwrap().take() {
                assert_eq!(Arc::strong_count(&session), 1, "it is the last owner");
                drop(session);
                sender.send(std::thread::current().name().unwrap_or_default().to_string()).unwrap();
            }
        }
    }
    let _alone = alone();
    let scenario = scenario(1);
    let plan = Arc::new(scenario.plan());
    // Time for the test to let go of its own handle.
    let late = BeforeWork::new(|work| match work {
        Work::Verdict(_) => Inject::Delay(Duration::from_millis(200)),
        _ => Inject::Nothing,
    });
    let options = OpenOptions { before_work: Some(late), ..OpenOptions::default() };
    let seat = Ranks::local(1, None).unwrap().remove(0);
    let session =
        Session::start(seat, plan.clone(), scenario.config(Driver::Actors), options, &mut |_, _| Ok(())).unwrap();
    let unwritten = plan.params().iter().map(|param| param.id).collect();
    session.step(StepRequest { lrs: vec![LrRow::constant(1e-3)], unwritten, ..StepRequest::default() }).unwrap();
    let (sender, dropped_on) = std::sync::mpsc::channel();
    let owner = Arc::new(Owner(Mutex::new(None)));
    assert!(session.poll_outcome(0, &Waker::from(owner.clone())).is_pending());
    *owner.0.lock().unwrap() = Some((session, sender));
    drop(owner);
    assert_eq!(dropped_on.recv_timeout(LIMIT).unwrap(), "gf-actors-0");
    nothing_is_left("a session that a waker drops");
}

#[test]
fn a_kernel_that_stalls_on_one_rank_ends_every_wait() {
    let _alone = alone();
    let stall = Inject::Delay(Duration::from_millis(4000));
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
    for (actor, count) in messages(2) {
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
    let other = || Arc::new(Shape::regular(3, 3, 1, 101, 100).plan());
    let cases: [(&str, fn(&mut Part), &str); 3] = [
        ("plan", |_| {}, "p0"),
        ("steps", |part| part.change = Some(|config| config.rule.max_norm = 7.0), "averaging, clipping and policies"),
        (
            "ranks",
            |part| part.plan = Some(Arc::new(Shape::regular(2, 3, 1, 100, 100).plan())),
            "the plan is for 2 ranks",
        ),
    ];
    for (label, differ, says) in cases {
        let mut parts = vec![Part::default(); 3];
        differ(&mut parts[2]);
        if label == "plan" {
            parts[2].plan = Some(other());
        }
        let ends = run(label, &scenario(3), "cpu", parts);
        let cause = one_cause(label, &ends);
        assert_eq!(cause.kind, FailureKind::StartUp, "{cause}");
        assert!(cause.message.contains(says), "{label}: {cause}");
    }
    nothing_is_left("start-up");
    a_new_session_works(3);
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

/// Short runs with random faults at random places, one after the other. `GATHERFLOW_SOAK_SECONDS` (default 15) is for how
/// long, `GATHERFLOW_SOAK_SEED` repeats a run.
#[test]
fn a_soak_of_random_faults_hangs_nowhere() {
    let _alone = alone();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let until = Instant::now() + Duration::from_secs(number("GATHERFLOW_SOAK_SECONDS").unwrap_or(15));
    let (first, mut runs) = (number("GATHERFLOW_SOAK_SEED").unwrap_or(1), 0);
    while Instant::now() < until {
        let seed = first + runs;
        soak(seed);
        runs += 1;
    }
    nothing_is_left("the soak");
    a_new_session_works(2);
    eprintln!("{runs} runs");
}

fn soak(seed: u64) {
    let mut draw = Draw::new(seed);
    let ranks = 1 + draw.below(4);
    let overlap = [Overlap::None, Overlap::Chain, Overlap::Window][draw.below(3)];
    let mut scenario = Scenario { overlap, ..scenario(ranks) };
    scenario.credits = [1, 2, u32::MAX][draw.below(3)];
    scenario.overlap_grad_reduce = draw.chance(50);
    scenario.issue_on_thread = draw.chance(40);
    scenario.forward_seed = draw.chance(50).then(|| draw.next());
    scenario.unused = [0, 0, 30][draw.below(3)];
    let mut parts = vec![Part::default(); ranks];
    let mut text = Vec::new();
    // One fault, or two at once.
    for _ in 0..1 + draw.below(2) {
        let rank = draw.below(ranks);
        let part = &mut parts[rank];
        let actors = actors();
        let (actor, nth) = (actors[draw.below(actors.len())], draw.below(12) as u64);
        let fault = match draw.below(6) {
            0 => Fault::Fail("drill".into()),
            1 => Fault::Panic("drill".into()),
            2 => Fault::EndThread,
            3 => {
                let inject = if draw.chance(50) { Inject::Panic } else { Inject::Fail("drill".into()) };
                let nth = draw.below(100) as u64;
                text.push(format!("{inject:?} before work {nth} of rank {rank}"));
                part.before_work = Some(at_work(nth, inject).0);
                continue;
            }
            4 => {
                part.leave_at = Some((draw.below(3) as u64, draw.below(10) as u64));
                text.push(format!("rank {rank} leaves at {:?}", part.leave_at));
                continue;
            }
            _ => Fault::Vanish,
        };
        text.push(format!("{fault:?} of the {actor} of rank {rank} at its message {nth}"));
        part.drill = Some(at_message(actor, nth, fault, &part.at_step).0);
    }
    let label = format!("seed {seed}: {ranks} ranks, {overlap:?}, {}", text.join(" and "));
    let vanishing = text.iter().any(|what| what.contains("Vanish"));
    let ends = run(&label, &scenario, "cpu", parts);
    // Those that failed say the same; who has vanished has only its own word.
    let failed: Vec<_> = ends.into_iter().filter(|end| matches!(end, End::Failed(_))).collect();
    if !failed.is_empty() && !vanishing {
        one_cause(&label, &failed);
    }
}
