//! Rule F1 with real actor threads: whatever fails, panics or ends, at whichever message or piece of work, every caller on
//! every rank gets the first cause in time, nothing unwinds into user code, all threads are given back, and new sessions
//! work.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod drills;
#[path = "scenario/mod.rs"]
mod scenario;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use drills::{
    End, LIMIT, Part, a_new_session_works, actors, alone, at_message, at_work, in_calls, in_groups, in_stages,
    messages, nothing_is_left, one_cause, run, scenario,
};
use gatherflow_actors::drill::Fault;
use gatherflow_actors::plan::Storage;
use gatherflow_actors::{ActorName, Driver, FirstGather, LrRow, Overlap, Ranks, Session, Skip, StepRequest};
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::{Cause, FailureKind, OpenOptions, Work};
use scenario::{Draw, Scenario};

/// Of a piece of work: more than twice as long as the deadline of a collective.
const STALL: Duration = Duration::from_millis(800);

/// Every actor, every message of a run: the fault's text is what everybody hears.
fn every_message(scenario: &Scenario, text: &str, fault: &Fault) {
    let (mut fired_in_steps, ranks) = (0, scenario.shape.ranks);
    for (actor, count) in messages(scenario) {
        for nth in 0..count {
            let drilled = nth as usize % ranks;
            let label = format!("{ranks} ranks, {fault:?} of the {actor} of rank {drilled} at its message {nth}");
            let mut parts = vec![Part::default(); ranks];
            let (drill, fired) = at_message(actor, nth, fault.clone(), &parts[drilled].at_step);
            parts[drilled].drill = Some(drill);
            let ends = run(&label, scenario, "cpu", parts);
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

/// Plain ones, and what has more collectives; in one of them steps run ahead of their verdicts.
fn scenarios() -> [Scenario; 5] {
    let on_the_device = Scenario { skip: Skip::Device, check_for_nan_in_grad: true, reads_scale: true, ..in_calls(2) };
    [scenario(2), scenario(3), on_the_device, in_groups(), in_stages()]
}

#[test]
fn an_actor_that_fails_at_any_message_ends_every_wait_on_every_rank_with_its_cause() {
    let _alone = alone();
    for scenario in scenarios() {
        every_message(&scenario, "failed: drill", &Fault::Fail("drill".into()));
    }
}

#[test]
fn an_actor_that_panics_at_any_message_ends_every_wait_on_every_rank_with_its_cause() {
    let _alone = alone();
    for scenario in scenarios() {
        every_message(&scenario, "panicked: drill", &Fault::Panic("drill".into()));
    }
}

#[test]
fn an_actor_thread_that_ends_at_any_message_ends_every_wait_on_every_rank() {
    let _alone = alone();
    for scenario in scenarios() {
        every_message(&scenario, "the actor thread ended", &Fault::EndThread);
    }
}

/// Collectives and kernels alike: every piece of work of one rank, start-up included.
fn every_work(inject: &Inject, expect: &dyn Fn(&str, &Cause)) {
    for scenario in scenarios() {
        let ranks = scenario.shape.ranks;
        let hooks = || at_work(u64::MAX, Inject::Nothing);
        let (hooks, counts): (Vec<_>, Vec<_>) = (0..ranks).map(|_| hooks()).unzip();
        let counting = |hook| Part { before_work: Some(hook), ..Part::default() };
        run("counting work", &scenario, "cpu", hooks.into_iter().map(counting).collect());
        let counts: Vec<u64> = counts.iter().map(|count| count.load(Ordering::SeqCst)).collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        assert!(most > 40, "{counts:?}");
        for nth in 0..most {
            let drilled = nth as usize % ranks;
            // Stages have different work.
            let count = counts[drilled];
            let label = format!("{ranks} ranks, {inject:?} before work {nth} of {count} of rank {drilled}");
            // The last step's work may be over before anybody looks.
            let must_fail = count * 2 / 3 - 4;
            let mut parts = vec![Part::default(); ranks];
            parts[drilled].before_work = Some(at_work(nth, inject.clone()).0);
            let ends = run(&label, &scenario, "cpu", parts);
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

/// Runs with random faults at random places, several at once, since most of the time of many is a deadline.
/// `GATHERFLOW_SOAK_SECONDS` (default 15) is for how long, `GATHERFLOW_SOAK_SEED` repeats runs: with 0 seconds this and
/// the next few.
#[test]
fn a_soak_of_random_faults_hangs_nowhere() {
    const WORLDS: usize = 4;
    let _alone = alone();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("GATHERFLOW_SOAK_SECONDS").unwrap_or(15);
    // A machine that is busy with other things may take twenty times as long for it.
    let floor = 2_000 * seconds / 15;
    let next = AtomicU64::new(number("GATHERFLOW_SOAK_SEED").unwrap_or(1));
    let (steps, ends) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    let from = Instant::now();
    let world = || {
        loop {
            let (done, first) = soak(next.fetch_add(1, Ordering::SeqCst));
            let first = first.map_or_else(|| "none".into(), |cause| format!("{:?}", cause.kind));
            *ends.lock().unwrap().entry(first).or_insert(0) += 1;
            let enough = steps.fetch_add(done, Ordering::SeqCst) + done >= floor;
            if from.elapsed() >= Duration::from_secs(if enough { seconds } else { 20 * seconds }) {
                break;
            }
        }
    };
    std::thread::scope(|scope| (0..WORLDS).for_each(|_| drop(scope.spawn(world))));
    let (steps, ends) = (steps.into_inner(), ends.into_inner().unwrap());
    let runs: u64 = ends.values().sum();
    let what = format!("{runs} runs, {steps} steps that all ranks of a run have done, {:?}: {ends:?}", from.elapsed());
    eprintln!("{what}");
    assert!(steps >= floor, "{what}");
    let kinds = ["Actor", "Device", "Deadline", "RankLost"];
    assert!(seconds < 15 || kinds.iter().all(|kind| ends.contains_key(*kind)), "{what}");
    nothing_is_left("the soak");
    a_new_session_works(2);
}

/// How many steps all ranks have done, and the cause that ended them.
fn soak(seed: u64) -> (u64, Option<Cause>) {
    let mut draw = Draw::new(seed);
    let mut scenario = match draw.below(8) {
        0 | 1 => in_groups(),
        2 => in_stages(),
        _ => scenario(1 + draw.below(4)),
    };
    scenario.steps = 20 + draw.below(100) as u64;
    let ranks = scenario.shape.ranks;
    scenario.overlap = [Overlap::None, Overlap::Chain, Overlap::Window][draw.below(3)];
    scenario.first_gather = [FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward][draw.below(3)];
    scenario.call_bytes = [0, 600, 5_000][draw.below(3)];
    scenario.steps_in_flight = 1 + draw.below(4) as u32;
    scenario.skip = [Skip::Host, Skip::Device][draw.below(2)];
    scenario.skipped =
        if draw.chance(30) { (1..scenario.steps).step_by(1 + draw.below(9)).collect() } else { Vec::new() };
    scenario.credits = [1, 2, u32::MAX][draw.below(3)];
    scenario.overlap_grad_reduce = draw.chance(50);
    scenario.issue_on_thread = draw.chance(40);
    scenario.forward_seed = draw.chance(50).then(|| draw.next());
    scenario.unused = [0, 0, 30][draw.below(3)];
    scenario.shape.storage = [Storage::Views, Storage::Shared][draw.below(2)];
    scenario.blind = [0, 0, 30][draw.below(3)];
    let mut parts = vec![Part::default(); ranks];
    let mut text = Vec::new();
    // One fault, or two at once, in the first steps or in any.
    let within = if draw.chance(40) { 3 } else { scenario.steps as usize };
    for _ in 0..=draw.below(2) {
        let rank = draw.below(ranks);
        let part = &mut parts[rank];
        let actors = actors();
        let (actor, nth) = (actors[draw.below(actors.len())], draw.below(4 * within) as u64);
        let fault = match draw.below(7) {
            0 => Fault::Fail("drill".into()),
            1 => Fault::Panic("drill".into()),
            2 => Fault::EndThread,
            at @ (3 | 4) => {
                let inject = match draw.below(2) {
                    _ if at == 4 => Inject::Delay(STALL),
                    0 => Inject::Panic,
                    _ => Inject::Fail("drill".into()),
                };
                let nth = draw.below(30 * within) as u64;
                text.push(format!("{inject:?} before work {nth} of rank {rank}"));
                part.before_work = Some(at_work(nth, inject).0);
                continue;
            }
            5 => {
                part.leave_at = Some((draw.below(within) as u64, draw.below(10) as u64));
                text.push(format!("rank {rank} leaves at {:?}", part.leave_at));
                continue;
            }
            _ => Fault::Vanish,
        };
        text.push(format!("{fault:?} of the {actor} of rank {rank} at its message {nth}"));
        part.drill = Some(at_message(actor, nth, fault, &part.at_step).0);
    }
    let label = format!("seed {seed}: {}, {scenario:?}", text.join(" and "));
    let vanishing = text.iter().any(|what| what.contains("Vanish"));
    let at_steps: Vec<_> = parts.iter().map(|part| part.at_step.clone()).collect();
    let ends = run(&label, &scenario, "cpu", parts);
    // Those that failed say the same; who has vanished has only its own word.
    let failed: Vec<_> = ends.into_iter().filter(|end| matches!(end, End::Failed(_))).collect();
    if !failed.is_empty() && !vanishing {
        one_cause(&label, &failed);
    }
    let steps = at_steps.iter().map(|at| at.load(Ordering::SeqCst)).min().unwrap_or(0);
    (steps, failed.first().map(|end| end.cause().clone()))
}
