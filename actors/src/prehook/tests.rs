//! What each message lets go, in every mode.

#![allow(clippy::unwrap_used)]

use super::*;

const BYTES: [u64; 5] = [10, 20, 30, 40, 50];

fn prehook(mode: Overlap, buckets: u32, bytes: Option<u64>) -> PreHook {
    let order = (0..5).rev().map(BucketId).collect();
    PreHook::new(order, BYTES, mode, Credits { buckets, bytes }, true)
}

/// The positions that a message lets go, and which of them only after the executor's entry.
fn say(prehook: &mut PreHook, message: PreHookMsg) -> (Vec<u32>, Vec<u32>) {
    let mut actions = Vec::new();
    prehook.on(message, &mut actions).unwrap();
    let (mut gone, mut after) = (Vec::new(), Vec::new());
    for action in actions {
        if let Action::LetGo { bucket, version, after_entry } = action {
            assert_eq!(version, prehook.version());
            let position = 4 - bucket.0;
            gone.push(position);
            if after_entry {
                after.push(position);
            }
        }
    }
    (gone, after)
}

fn finished(version: u64) -> PreHookMsg {
    PreHookMsg::StepFinished { version, updated: true }
}

fn demand(version: u64, demanded: u32) -> PreHookMsg {
    PreHookMsg::Demand { version, demanded, announce: false }
}

fn none() -> (Vec<u32>, Vec<u32>) {
    (vec![], vec![])
}

#[test]
fn a_call_goes_as_a_whole_and_only_within_the_credits() {
    // Calls of the positions 0 and 1, of 2, and of 3 and 4.
    let calls = || vec![2, 2, 3, 5, 5];
    let mut window = prehook(Overlap::Window, 3, None).in_calls(calls());
    assert_eq!(say(&mut window, finished(1)).0, [0, 1, 2]);
    assert_eq!(say(&mut window, demand(1, 1)).0, [] as [u32; 0], "two more would be one too many");
    assert_eq!(say(&mut window, demand(1, 2)).0, [3, 4]);
    let mut bytes = prehook(Overlap::Window, 5, Some(60)).in_calls(calls());
    assert_eq!(say(&mut bytes, finished(1)).0, [0, 1, 2]);
    assert_eq!(say(&mut bytes, demand(1, 3)).0, [] as [u32; 0], "40 and 50 bytes go on demand only");
    assert_eq!(say(&mut bytes, demand(1, 5)).0, [3, 4]);
    let mut chain = prehook(Overlap::Chain, 1, None).in_calls(calls());
    assert_eq!(say(&mut chain, finished(1)).0, [0, 1]);
    let waited = |waited| PreHookMsg::WaitEnded { version: 1, waited };
    assert_eq!(say(&mut chain, waited(1)).0, [] as [u32; 0]);
    assert_eq!(say(&mut chain, waited(2)).0, [2]);
    assert_eq!(say(&mut chain, waited(3)).0, [3, 4]);
    let mut none = prehook(Overlap::None, 1, None).in_calls(calls());
    assert_eq!(say(&mut none, finished(1)).0, [0, 1, 2, 3, 4]);
}

#[test]
fn credits_in_buckets_bound_how_far_gathers_run_ahead_of_demand() {
    for credits in 1..=5 {
        let mut p = prehook(Overlap::Window, credits, None);
        assert_eq!(say(&mut p, finished(1)).0, (0..credits).collect::<Vec<_>>());
        let mut let_go = credits;
        for demanded in 1..=5 {
            let (gone, after) = say(&mut p, demand(1, demanded));
            let reach = (demanded + credits).min(5);
            assert_eq!(gone, (let_go..reach).collect::<Vec<_>>(), "{credits} credits, {demanded} demanded");
            assert_eq!(after, gone, "what an entry lets go starts after it");
            let_go = reach.max(let_go);
        }
        assert!(say(&mut p, demand(1, 5)).0.is_empty(), "each goes once");
    }
}

#[test]
fn unlimited_credits_let_everything_go_when_the_step_is_finished() {
    let mut p = prehook(Overlap::Window, u32::MAX, None);
    assert_eq!(say(&mut p, finished(1)), (vec![0, 1, 2, 3, 4], vec![]));
    assert_eq!(p.waits_for_demand(), Some(false));
}

#[test]
fn credits_in_bytes_bound_the_sum_and_a_bucket_above_them_goes_on_demand_only() {
    let mut p = prehook(Overlap::Window, u32::MAX, Some(30));
    assert_eq!(say(&mut p, finished(1)).0, [0, 1], "10 + 20 bytes");
    assert_eq!(say(&mut p, demand(1, 1)), none(), "20 + 30 are too many");
    assert_eq!(say(&mut p, demand(1, 2)).0, [2]);
    assert_eq!(say(&mut p, demand(1, 3)), none(), "40 bytes are above the budget");
    assert_eq!(say(&mut p, demand(1, 4)).0, [3]);
    assert_eq!(say(&mut p, demand(1, 5)).0, [4]);
    assert_eq!(p.peak_ahead_bytes, 30);
}

#[test]
fn without_overlap_the_finished_step_lets_everything_go() {
    let mut p = prehook(Overlap::None, 1, None);
    assert_eq!(say(&mut p, finished(1)), (vec![0, 1, 2, 3, 4], vec![]));
}

#[test]
fn in_a_chain_each_wait_that_ended_lets_the_next_one_go() {
    let mut p = prehook(Overlap::Chain, 1, None);
    assert_eq!(say(&mut p, finished(1)), (vec![0], vec![]));
    assert_eq!(say(&mut p, demand(1, 3)), none(), "demand alone does not break the chain");
    for waited in 1..5 {
        let ended = PreHookMsg::WaitEnded { version: 1, waited };
        assert_eq!(say(&mut p, ended), (vec![waited], vec![waited]));
    }
}

#[test]
fn peers_flushes_and_drains_count_as_demand_without_an_entry() {
    for mode in [Overlap::Window, Overlap::Chain] {
        let mut p = prehook(mode, 1, None);
        say(&mut p, finished(1));
        let reach = if mode == Overlap::Window { vec![1, 2, 3] } else { vec![1, 2] };
        assert_eq!(say(&mut p, PreHookMsg::PeerDemand { version: 1, demanded: 3 }).0, reach);
        let (gone, after) = say(&mut p, PreHookMsg::Drain { version: 1 });
        assert_eq!(gone.last(), Some(&4));
        assert!(after.is_empty());
        assert_eq!(say(&mut p, PreHookMsg::Drain { version: 0 }), none(), "a version that is over");
    }
    let mut p = prehook(Overlap::Window, 1, None);
    say(&mut p, finished(1));
    let beyond = PreHookMsg::PeerDemand { version: 1, demanded: 99 };
    assert_eq!(say(&mut p, beyond).0, [1, 2, 3, 4], "a peer cannot ask for more than there is");
}

#[test]
fn demand_for_any_later_version_is_kept_until_its_step_is_finished() {
    let mut p = prehook(Overlap::Window, 1, None);
    assert_eq!(say(&mut p, PreHookMsg::PeerDemand { version: 2, demanded: 4 }), none());
    assert_eq!(say(&mut p, PreHookMsg::Drain { version: 3 }), none());
    assert_eq!(say(&mut p, demand(1, 2)), none());
    assert_eq!(say(&mut p, finished(1)).0, [0, 1, 2]);
    say(&mut p, PreHookMsg::Drain { version: 1 });
    assert_eq!(say(&mut p, finished(2)), (vec![0, 1, 2, 3, 4], vec![]));
    assert_eq!(say(&mut p, finished(3)), (vec![0, 1, 2, 3, 4], vec![]));
    assert_eq!(say(&mut p, finished(4)).0, [0], "nothing is carried over");
}

#[test]
fn a_skipped_step_has_nothing_to_let_go() {
    let mut p = prehook(Overlap::Window, 3, None);
    assert_eq!(say(&mut p, PreHookMsg::StepFinished { version: 1, updated: false }), none());
    assert_eq!(say(&mut p, demand(1, 5)), none());
    assert_eq!((p.waits_for_demand(), p.version()), (Some(false), 1));
    assert_eq!(say(&mut p, finished(2)).0, [0, 1, 2]);
}

fn open(version: u64, by_entry: bool) -> PreHookMsg {
    PreHookMsg::Open { version, by_entry }
}

#[test]
fn the_first_gathers_wait_to_be_opened_where_they_do_not_start_with_the_step() {
    for first in [FirstGather::ZeroGrad, FirstGather::Forward] {
        let mut p = prehook(Overlap::Window, 2, None).starting(first);
        assert_eq!(say(&mut p, finished(1)), none());
        assert_eq!(p.waits_for_demand(), Some(true));
        assert_eq!(say(&mut p, open(0, false)), none(), "a version that is over");
        assert_eq!(say(&mut p, open(1, false)), (vec![0, 1], vec![]));
        assert_eq!(say(&mut p, open(1, true)), none(), "credits still bound it");
        assert_eq!(say(&mut p, demand(1, 3)), (vec![2, 3, 4], vec![2, 3, 4]));

        let mut chain = prehook(Overlap::Chain, 1, None).starting(first);
        assert_eq!(say(&mut chain, finished(1)), none());
        assert_eq!(say(&mut chain, open(1, true)), (vec![0], vec![0]), "after the entry that opened it");
        assert_eq!(say(&mut chain, PreHookMsg::WaitEnded { version: 1, waited: 1 }).0, [1]);
    }
    let mut p = prehook(Overlap::Window, 2, None);
    assert_eq!(say(&mut p, finished(1)).0, [0, 1], "the step itself opens them by default");
    let mut p = prehook(Overlap::None, 1, None).starting(FirstGather::Forward);
    assert_eq!(say(&mut p, finished(1)).0, [0, 1, 2, 3, 4], "without overlap nothing waits");
}

#[test]
fn a_version_may_be_opened_before_its_step_is_finished() {
    let mut p = prehook(Overlap::Window, 1, None).starting(FirstGather::ZeroGrad);
    assert_eq!(say(&mut p, open(2, false)), none());
    assert_eq!(say(&mut p, finished(1)).0, [0], "whoever opens a later version is past this one");
    say(&mut p, PreHookMsg::Drain { version: 1 });
    assert_eq!(say(&mut p, finished(2)), (vec![0], vec![]));
    say(&mut p, PreHookMsg::Drain { version: 2 });
    assert_eq!(say(&mut p, finished(3)), none());
}

#[test]
fn whatever_is_demanded_opens_a_version_too() {
    let demands = [
        demand(1, 1),
        PreHookMsg::PeerDemand { version: 1, demanded: 1 },
        PreHookMsg::Awaited { version: 1, demanded: 1 },
        PreHookMsg::Drain { version: 1 },
    ];
    for mode in [Overlap::Window, Overlap::Chain] {
        for message in demands.clone() {
            let mut early = prehook(mode, 1, None).starting(FirstGather::Forward);
            assert_eq!(say(&mut early, message.clone()), none());
            assert_eq!(say(&mut early, finished(1)).0[0], 0, "{message:?}");
            let mut late = prehook(mode, 1, None).starting(FirstGather::Forward);
            say(&mut late, finished(1));
            let (gone, after) = say(&mut late, message.clone());
            let by_entry = matches!(message, PreHookMsg::Demand { .. });
            assert_eq!((gone[0], after.contains(&0)), (0, by_entry), "{message:?}");
        }
    }
}

#[test]
fn peers_hear_of_a_demand_once() {
    let mut p = prehook(Overlap::Window, 1, None);
    say(&mut p, finished(1));
    let announced = |p: &mut PreHook, demanded| {
        let mut actions = Vec::new();
        p.on(PreHookMsg::Demand { version: 1, demanded, announce: true }, &mut actions).unwrap();
        let told = |a: &&Action| matches!(a, Action::Send(Letter::Supervisor(SupervisorMsg::Demanded { .. })));
        actions.iter().filter(told).count()
    };
    assert_eq!([announced(&mut p, 2), announced(&mut p, 2), announced(&mut p, 1), announced(&mut p, 3)], [1, 0, 0, 1]);
}

#[test]
fn what_the_executor_left_without_a_message_is_caught_up() {
    let mut p = prehook(Overlap::Window, 1, None);
    assert!(p.catch_up((1, 3), (0, 0)).is_none(), "that step is not finished");
    say(&mut p, finished(1));
    let message = p.catch_up((1, 3), (0, 0)).unwrap();
    assert_eq!(say(&mut p, message).0, [1, 2, 3]);
    assert!(p.catch_up((1, 3), (1, 2)).is_some(), "a wait that ended");
    assert!(p.catch_up((2, 1), (0, 0)).is_none());
}

#[test]
fn what_the_state_does_not_allow_names_state_and_message() {
    let gathered = |version, bucket| PreHookMsg::Gathered { version, bucket: BucketId(bucket) };
    let mut p = prehook(Overlap::Window, 2, None);
    say(&mut p, finished(1));
    say(&mut p, gathered(1, 4));
    // Twice, of another version, not let go; a step that is finished twice, or before its gathers went.
    for wrong in [gathered(1, 4), gathered(2, 3), gathered(1, 2), finished(1), finished(3), finished(2)] {
        let error = p.on(wrong.clone(), &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("pre-hook actor") && error.contains("version 1, 2 of 5 let go"), "{error}");
        assert!(error.contains(&format!("{wrong:?}")), "{error}");
    }
    say(&mut p, gathered(1, 3));
}

#[test]
fn buckets_tell_of_their_gathers_in_any_order() {
    let gathered = |bucket| PreHookMsg::Gathered { version: 1, bucket: BucketId(bucket) };
    let mut p = prehook(Overlap::None, 1, None);
    say(&mut p, finished(1));
    for bucket in [3, 4, 0, 2, 1] {
        say(&mut p, gathered(bucket));
        assert!(p.on(gathered(bucket), &mut Vec::new()).is_err(), "twice");
    }
}

#[test]
fn each_version_is_announced_for_itself_and_only_what_is_more() {
    let mut p = prehook(Overlap::Window, 1, None);
    say(&mut p, finished(1));
    let mut announced = |version, demanded| {
        let mut actions = Vec::new();
        p.on(PreHookMsg::Demand { version, demanded, announce: true }, &mut actions).unwrap();
        let told = |a: &&Action| matches!(a, Action::Send(Letter::Supervisor(SupervisorMsg::Demanded { .. })));
        actions.iter().filter(told).count()
    };
    assert_eq!(announced(1, 4), 1);
    assert_eq!(announced(2, 1), 1, "less than was announced, but for a later version");
    assert_eq!([announced(2, 1), announced(2, 3)], [0, 1]);
}

#[test]
fn a_chain_goes_on_for_what_a_future_awaits_though_nobody_waits_on_what_is_before_it() {
    let mut p = prehook(Overlap::Chain, 3, None);
    assert_eq!(say(&mut p, finished(1)).0, [0]);
    assert_eq!(say(&mut p, PreHookMsg::Demand { version: 1, demanded: 3, announce: true }).0, []);
    assert_eq!(say(&mut p, PreHookMsg::Awaited { version: 1, demanded: 3 }).0, [1, 2]);
}

#[test]
fn a_chain_is_one_gather_ahead_of_the_wait_and_says_so() {
    let mut p = prehook(Overlap::Chain, 3, None);
    say(&mut p, finished(1));
    for waited in 1..5 {
        assert_eq!(say(&mut p, PreHookMsg::WaitEnded { version: 1, waited }).0, [waited]);
    }
    assert_eq!(p.peak_ahead_bytes, *BYTES.iter().max().unwrap());
}
