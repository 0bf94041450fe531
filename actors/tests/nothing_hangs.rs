//! Rule F1 with real actor threads: whatever fails, panics, stalls or vanishes, at whichever message, every caller on every
//! rank gets the first cause in time, all threads are given back, and new sessions work.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod drills;
#[path = "scenario/mod.rs"]
mod scenario;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use drills::{End, Part, a_new_session_works, nothing_is_left, one_cause, run, scenario};
use gatherflow_actors::ActorName;
use gatherflow_actors::drill::{Drill, Fault};
use gatherflow_actors::plan::BucketId;

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
