//! The rules of the supervisor, and who is blamed for what is overdue.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use gatherflow_kernels::{CollectiveKind, DType, Members};

use super::*;
use crate::busy::Spell;

fn cause(message: &str) -> Cause {
    Arc::new(Failure::new(FailureKind::Device, 1, message))
}

fn entry(seq: u64, kind: CollectiveKind, bucket: u32) -> CollectiveKey {
    CollectiveKey { seq, kind, bucket, bytes: 8, dtype: DType::F32, version: 4, group: 0 }
}

fn say(supervisor: &mut Supervisor, message: SupervisorMsg) -> Vec<Action> {
    let mut actions = Vec::new();
    supervisor.on(message, &mut actions).unwrap();
    actions
}

fn own(step: u64, digest: u64, history: &[CollectiveKey]) -> SupervisorMsg {
    SupervisorMsg::Digest { step, digest, history: history.to_vec() }
}

fn theirs(from: usize, step: u64, digest: u64) -> SupervisorMsg {
    SupervisorMsg::Control(ControlMsg::Digest { from, step, digest })
}

fn history(from: usize, step: u64, entries: &[CollectiveKey]) -> SupervisorMsg {
    SupervisorMsg::Control(ControlMsg::History { from, step, entries: entries.into() })
}

/// The one failure that these actions poison with and announce.
fn failure(actions: &[Action]) -> Cause {
    let [Action::Poison(cause), Action::Announce(ControlMsg::Failed(told))] = actions else {
        panic!("{actions:?}");
    };
    assert_eq!(cause, told);
    cause.clone()
}

#[test]
fn the_first_failure_poisons_and_is_told_and_later_ones_change_nothing() {
    let mut s = Supervisor::new(0, 2);
    assert_eq!(failure(&say(&mut s, SupervisorMsg::Failed(cause("a")))), cause("a"));
    assert!(say(&mut s, SupervisorMsg::Failed(cause("b"))).is_empty());
    assert!(say(&mut s, SupervisorMsg::Control(ControlMsg::Failed(cause("c")))).is_empty());
    assert_eq!(s.poisoned(), Some(&cause("a")));
    // What a peer told is not told again.
    let mut s = Supervisor::new(0, 2);
    let actions = say(&mut s, SupervisorMsg::Control(ControlMsg::Failed(cause("c"))));
    assert!(matches!(&actions[..], [Action::Poison(told)] if *told == cause("c")), "{actions:?}");
}

#[test]
fn demand_goes_to_peers_and_that_of_peers_to_the_pre_hook() {
    let mut s = Supervisor::new(1, 2);
    let told = format!("{:?}", say(&mut s, SupervisorMsg::Demanded { version: 3, demanded: 2 }));
    assert_eq!(told, "[Announce(Demand { from: 1, version: 3, demanded: 2 })]");
    let heard = ControlMsg::Demand { from: 0, version: 3, demanded: 2 };
    let told = format!("{:?}", say(&mut s, SupervisorMsg::Control(heard)));
    assert_eq!(told, "[Send(PreHook(PeerDemand { version: 3, demanded: 2 }))]");
}

#[test]
fn digests_that_agree_are_forgotten_whether_peers_are_early_or_late() {
    let mut s = Supervisor::new(1, 3);
    assert!(say(&mut s, theirs(0, 0, 7)).is_empty(), "early");
    assert_eq!(say(&mut s, own(0, 7, &[])).len(), 1, "its own is announced");
    assert!(say(&mut s, theirs(2, 0, 7)).is_empty(), "late");
    assert!(s.own.is_empty() && s.early.is_empty());
    assert!(say(&mut s, theirs(2, 0, 7)).is_empty(), "later than that");
    assert!(s.own.is_empty() && s.early.is_empty(), "is kept by nobody");
}

#[test]
fn a_rank_alone_compares_nothing_and_keeps_nothing() {
    let mut s = Supervisor::new(0, 1);
    for step in 0..10 {
        assert!(say(&mut s, own(step, step, &[])).is_empty());
    }
    assert!(s.own.is_empty());
}

#[test]
fn own_digests_that_no_peer_answers_are_bounded_in_number() {
    let mut s = Supervisor::new(0, 2);
    for step in 0..1000 {
        say(&mut s, own(step, step, &[]));
    }
    assert_eq!(s.own.len(), KEPT);
    assert!(say(&mut s, theirs(1, 3, 999)).is_empty(), "too late to be compared");
    assert!(s.early.is_empty());
    assert_eq!(say(&mut s, theirs(1, 999, 1)).len(), 1, "the newest one still is");
}

#[test]
fn a_mismatch_shows_the_history_to_that_peer_only() {
    for early in [false, true] {
        let mut s = Supervisor::new(1, 3);
        let mut messages = [theirs(2, 5, 8), own(5, 7, &[entry(0, CollectiveKind::Reduce, 1)])];
        if !early {
            messages.reverse();
        }
        let actions: Vec<_> = messages.into_iter().flat_map(|message| say(&mut s, message)).collect();
        let Some(Action::Tell { to: 2, message: ControlMsg::History { from: 1, step: 5, entries } }) = actions.last()
        else {
            panic!("{actions:?}");
        };
        assert_eq!(entries.len(), 1);
        assert!(s.poisoned().is_none(), "the peer's history has to come first");
    }
}

#[test]
fn both_ranks_name_the_first_differing_entry_in_the_same_words() {
    use CollectiveKind::{Gather, Reduce};
    let mine = [entry(0, Reduce, 2), entry(1, Reduce, 1), entry(2, Reduce, 0)];
    let other = [entry(0, Reduce, 2), entry(1, Reduce, 0), entry(2, Gather, 1)];
    let mut said = Vec::new();
    for (rank, peer, a, b) in [(0, 1, &mine, &other), (1, 0, &other, &mine)] {
        for early in [false, true] {
            let mut s = Supervisor::new(rank, 2);
            let mut messages = [history(peer, 4, b), own(4, 1, a)];
            if !early {
                messages.reverse();
            }
            let actions: Vec<_> = messages.into_iter().flat_map(|message| say(&mut s, message)).collect();
            said.push(failure(&actions[actions.len() - 2..]));
        }
    }
    assert!(said.iter().all(|cause| cause == &said[0]), "{said:?}");
    assert_eq!((said[0].kind, said[0].step, said[0].bucket), (FailureKind::OrderMismatch, Some(4), Some(1)));
    assert_eq!(
        said[0].message,
        "collective 1 differs: rank 0 issued reduce of bucket 1 (version 4, 8 bytes, f32), rank 1 issued reduce of \
         bucket 0 (version 4, 8 bytes, f32)"
    );
}

#[test]
fn histories_that_are_cut_shorter_or_equal_are_told_apart() {
    let keys: Vec<_> = (0..6).map(|seq| entry(seq, CollectiveKind::Reduce, seq as u32)).collect();
    let said = |mine: &[CollectiveKey], theirs: &[CollectiveKey]| {
        let mut s = Supervisor::new(0, 2);
        say(&mut s, own(4, 1, mine));
        failure(&say(&mut s, history(1, 4, theirs))).message.clone()
    };
    assert!(said(&keys, &keys[2..]).contains("not their last"), "lined up by sequence number");
    assert!(said(&keys[..5], &keys).contains("collective 5 differs: rank 0 issued nothing, rank 1 issued reduce"));
    assert!(said(&[], &keys).contains("not their last 0 collectives"));
}

fn deadlines() -> Deadlines {
    let limit = Duration::from_nanos(100);
    Deadlines { start_up: limit, collective: limit, silence: Duration::from_nanos(40) }
}

type Expected = Option<(FailureKind, usize, &'static str)>;

#[test]
fn overdue_tells_who_and_why() {
    let key = entry(7, CollectiveKind::Gather, 2);
    let fine = PeerView { issued: 8, begun: 8, progress_ns: 1000, alive_ns: 1000, ..PeerView::default() };
    let waits = PeerView { issued: 7, ..fine };
    let judge = |now: u64, peer: PeerView<'_>, own: PeerView<'_>| {
        overdue(&deadlines(), now, &key, &Members::ALL, 1000, 1, &[peer, own])
    };
    let alive = |now: u64, view: PeerView<'static>| PeerView { alive_ns: now, ..view };
    let table: [(&str, u64, PeerView<'_>, PeerView<'_>, Expected); 14] = [
        ("within all deadlines", 1030, waits, fine, None),
        ("a heartbeat is due", 1040, waits, fine, None),
        ("silent", 1041, waits, fine, Some((FailureKind::RankLost, 0, "gave no sign of life"))),
        ("alive", 1100, alive(1090, waits), fine, None),
        ("not issued", 1101, alive(1100, waits), fine, Some((FailureKind::Deadline, 0, "has not issued the gather"))),
        ("progress", 1150, PeerView { progress_ns: 1060, ..alive(1140, waits) }, fine, None),
        (
            "left",
            1001,
            PeerView { left: Some("left"), ..waits },
            fine,
            Some((FailureKind::RankLost, 0, "rank 0 left; rank 1 waits for it in the gather of bucket 2")),
        ),
        ("left after its part", 1050, PeerView { left: Some("left"), ..fine }, fine, None),
        (
            "left before it finished",
            1001,
            PeerView { left: Some("left"), abandoned: Some(6), ..fine },
            fine,
            Some((FailureKind::RankLost, 0, "which it issued but did not finish")),
        ),
        ("left later than that", 1001, PeerView { left: Some("left"), abandoned: Some(8), ..fine }, fine, None),
        ("not finished in time", 1101, fine, fine, Some((FailureKind::Deadline, 1, "every rank started"))),
        (
            "not started there",
            1101,
            PeerView { begun: 7, ..fine },
            fine,
            Some((FailureKind::Deadline, 0, "rank 0 has not started it")),
        ),
        (
            "not started here",
            1101,
            PeerView { begun: u64::MAX, ..fine },
            PeerView { begun: 3, ..fine },
            Some((FailureKind::Deadline, 1, "rank 1 has not started it")),
        ),
        (
            "stuck in the issuing thread",
            1101,
            fine,
            PeerView { issued: 7, ..fine },
            Some((FailureKind::Deadline, 1, "its issuing thread is stuck")),
        ),
    ];
    for (what, now, peer, own, expected) in table {
        let failure = judge(now, peer, own);
        match (&failure, expected) {
            (None, None) => {}
            (Some(failure), Some((kind, rank, text))) => {
                assert_eq!((failure.kind, failure.rank), (kind, rank), "{what}: {failure}");
                assert!(failure.message.contains(text), "{what}: {failure}");
                assert_eq!((failure.step, failure.bucket), (Some(3), Some(2)), "{what}");
            }
            _ => panic!("{what}: {failure:?}"),
        }
    }
}

#[test]
fn only_members_are_waited_for() {
    let key = entry(7, CollectiveKind::Reduce, 2);
    let fine = PeerView { issued: 8, begun: 8, progress_ns: 1000, alive_ns: 1000, ..PeerView::default() };
    let gone = PeerView { issued: 3, begun: 3, left: Some("left"), ..fine };
    let judge = |group: [usize; 2], now| {
        let members = Members::of(group, 4);
        overdue(&deadlines(), now, &key, &members, 1000, 1, &[gone, fine, PeerView { alive_ns: now, ..fine }, gone])
    };
    assert_eq!(judge([1, 2], 1100), None);
    assert!(judge([1, 2], 1101).unwrap().message.contains("every rank started"), "nobody else is named");
    assert_eq!(judge([1, 3], 1100).unwrap().rank, 3);
    assert_eq!(judge([0, 1], 1100).unwrap().rank, 0);
}

#[test]
fn a_busy_rank_may_take_as_long_as_it_said_while_its_heart_beats() {
    let key = entry(7, CollectiveKind::Reduce, 2);
    let spell = Spell { reason: "saves".into(), since_ns: 900, until_ns: 5000 };
    let fine = PeerView { issued: 8, begun: 8, progress_ns: 1000, alive_ns: 4990, ..PeerView::default() };
    let busy = PeerView { issued: 7, busy: Some(&spell), ..fine };
    // A transport may block this rank in the issue while the busy one is missing.
    for own in [fine, PeerView { issued: 7, ..fine }] {
        let judge =
            |now: u64, peer: PeerView<'_>| overdue(&deadlines(), now, &key, &Members::ALL, 1000, 1, &[peer, own]);
        assert_eq!(judge(5000, busy), None);
        let late = judge(5001, PeerView { alive_ns: 5000, ..busy }).unwrap();
        assert_eq!((late.kind, late.rank), (FailureKind::Deadline, 0));
        assert!(late.message.contains("busy (saves) beyond its limit"), "{late}");
        let silent = judge(4000, PeerView { alive_ns: 3900, ..busy }).unwrap();
        assert!(silent.message.contains("no sign of life"), "{silent}");
        assert_eq!(judge(4000, PeerView { left: Some("left"), ..busy }).unwrap().kind, FailureKind::RankLost);
    }
    let idle = PeerView { busy: None, ..busy };
    assert_eq!(
        overdue(&deadlines(), 4990, &key, &Members::ALL, 1000, 2, &[busy, idle, fine]).unwrap().rank,
        1,
        "no excuse for others"
    );

    let told = |now, peers: &[PeerView<'_>]| -> Vec<(usize, String)> {
        busy_peers(now, &key, &Members::ALL, 1, peers).map(|(peer, spell)| (peer, spell.reason.clone())).collect()
    };
    assert_eq!(told(5000, &[busy, busy, fine]), [(0, "saves".to_string())], "neither itself nor who has issued it");
    assert!(told(5001, &[busy, fine]).is_empty(), "past its limit");
}

#[test]
fn failures_name_the_step_and_bucket_of_their_collective() {
    let lost = [PeerView { left: Some("left"), ..PeerView::default() }, PeerView::default()];
    let named = |kind, bucket| {
        let failure = overdue(&deadlines(), 0, &entry(7, kind, bucket), &Members::ALL, 0, 1, &lost).unwrap();
        (failure.step, failure.bucket)
    };
    assert_eq!(named(CollectiveKind::Gather, 2), (Some(3), Some(2)), "the step that made version 4");
    assert_eq!(named(CollectiveKind::Reduce, 2), (Some(4), Some(2)));
    assert_eq!(named(CollectiveKind::Small, CollectiveKey::NO_BUCKET), (Some(4), None));
    assert_eq!(named(CollectiveKind::StartUp, CollectiveKey::NO_BUCKET), (None, None));
}

#[test]
fn a_verdict_has_the_deadline_of_a_collective() {
    assert!(overdue_verdict(&deadlines(), 1100, 6, 1000, 1).is_none());
    let failure = overdue_verdict(&deadlines(), 1101, 6, 1000, 1).unwrap();
    assert_eq!((failure.kind, failure.rank, failure.step), (FailureKind::Deadline, 1, Some(6)));
}

#[test]
fn deadlines_are_looked_at_often_enough_to_be_met_within_a_quarter() {
    for ms in [20, 200, 20_000, 600_000] {
        let limit = Duration::from_millis(ms);
        let tick = Deadlines { start_up: limit, collective: limit, silence: limit }.tick();
        assert!(tick <= (limit / 4).max(Duration::from_millis(5)) && tick <= Duration::from_secs(1), "{ms}");
    }
}
