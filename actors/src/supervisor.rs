//! The supervisor: it owns the control path, the deadlines and the first cause.
//!
//! Hears of failed actors and devices, of peers (demand, digests, failures, departures) and of time (ticks, with what the
//! shell saw). The first failure poisons everything: every waiter on every rank gets that cause (rule F1); later ones
//! change nothing. Digests of the order of collectives are compared pairwise (rule O2); a mismatch makes both ranks send
//! their history, and the first differing entry is named.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use gatherflow_kernels::{Cause, CollectiveKey, CollectiveKind, Failure, FailureKind, Members};

use crate::action::{Action, Letter, Machine, WrongTransition};
use crate::busy::Spell;
use crate::control::ControlMsg;
use crate::prehook::PreHookMsg;

/// What the supervisor hears.
#[derive(Clone, Debug)]
pub enum SupervisorMsg {
    /// Pre-hook: the executor waits for the first `demanded` gathers of `version`.
    Demanded {
        /// Which version.
        version: u64,
        /// A prefix of the gather order.
        demanded: u32,
    },
    /// Communicator: its digest after `step`.
    Digest {
        /// The step.
        step: u64,
        /// The digest.
        digest: u64,
        /// The entries since the digest before.
        history: Vec<CollectiveKey>,
    },
    /// A peer said something.
    Control(ControlMsg),
    /// An actor, the device or a deadline failed on this rank.
    Failed(Cause),
}

/// One own digest, kept until all peers have shown theirs.
#[derive(Clone, Debug)]
struct Shown {
    step: u64,
    digest: u64,
    history: Arc<[CollectiveKey]>,
    agreed: usize,
}

/// The state machine of the supervisor.
#[derive(Clone, Debug)]
pub struct Supervisor {
    rank: usize,
    ranks: usize,
    poisoned: Option<Cause>,
    own: VecDeque<Shown>,
    /// 1 + the step of the newest own digest.
    shown: u64,
    /// Peers' digests of steps that this rank has not reached.
    early: Vec<(usize, u64, u64)>,
    /// Peers' histories, until this rank has its own.
    histories: Vec<(usize, u64, Arc<[CollectiveKey]>)>,
}

impl Supervisor {
    /// The supervisor of one rank.
    pub fn new(rank: usize, ranks: usize) -> Self {
        Self { rank, ranks, poisoned: None, own: VecDeque::new(), shown: 0, early: Vec::new(), histories: Vec::new() }
    }

    /// The first cause, once there is one.
    pub fn poisoned(&self) -> Option<&Cause> {
        self.poisoned.as_ref()
    }

    fn poison(&mut self, cause: Cause, tell: bool, actions: &mut Vec<Action>) {
        if self.poisoned.is_some() {
            return;
        }
        self.poisoned = Some(cause.clone());
        actions.push(Action::Poison(cause.clone()));
        if tell {
            actions.push(Action::Announce(ControlMsg::Failed(cause)));
        }
    }

    fn compare(&mut self, peer: usize, step: u64, digest: u64, actions: &mut Vec<Action>) {
        if step >= self.shown {
            return self.early.push((peer, step, digest));
        }
        // A digest that is no longer kept was agreed on, or a later one will tell: it covers the steps before it.
        let Some(own) = self.own.iter_mut().find(|shown| shown.step == step) else { return };
        if own.digest != digest {
            let entries = own.history.clone();
            actions.push(Action::Tell { to: peer, message: ControlMsg::History { from: self.rank, step, entries } });
            return;
        }
        own.agreed += 1;
        if own.agreed + 1 == self.ranks {
            self.own.retain(|shown| shown.step > step);
        }
    }

    fn compare_history(&mut self, peer: usize, step: u64, theirs: &Arc<[CollectiveKey]>, actions: &mut Vec<Action>) {
        if step >= self.shown {
            return self.histories.push((peer, step, theirs.clone()));
        }
        let own = self.own.iter().find(|shown| shown.step == step);
        let mine: &[CollectiveKey] = own.map_or(&[], |shown| &shown.history);
        // The lower rank first: both sides then say the same.
        let failure = if self.rank < peer {
            first_mismatch(self.rank, mine, peer, theirs, step)
        } else {
            first_mismatch(peer, theirs, self.rank, mine, step)
        };
        self.poison(Arc::new(failure), true, actions);
    }
}

/// Own digests kept for peers that have not shown theirs. Peers are never so far behind, since every step has collectives
/// of all ranks; where they have none (the null device), the next digest covers what was dropped.
const KEPT: usize = 16;

/// Names the first entry in which two histories differ.
fn first_mismatch(rank: usize, mine: &[CollectiveKey], peer: usize, theirs: &[CollectiveKey], step: u64) -> Failure {
    // Histories may be cut at the front, or gone on one side; line them up by sequence number.
    let first = |history: &[CollectiveKey]| history.first().map_or(u64::MAX, |key| key.seq);
    let from = first(mine).max(first(theirs));
    let (mut a, mut b) = (mine.iter().filter(|k| k.seq >= from), theirs.iter().filter(|k| k.seq >= from));
    loop {
        let (left, right) = (a.next(), b.next());
        if left.is_none() && right.is_none() {
            let message = format!(
                "the digests of ranks {rank} and {peer} differ, but not their last {} collectives: they differ in \
                     what came before, or a digest was damaged",
                mine.len()
            );
            return Failure::new(FailureKind::OrderMismatch, rank, message).at_step(step);
        }
        if left != right {
            let show = |key: Option<&CollectiveKey>| key.map_or_else(|| "nothing".to_string(), ToString::to_string);
            let seq = left.or(right).map_or(0, |key| key.seq);
            let message = format!(
                "collective {seq} differs: rank {rank} issued {}, rank {peer} issued {}",
                show(left),
                show(right)
            );
            let failure = Failure::new(FailureKind::OrderMismatch, rank, message).at_step(step);
            return match left.or(right) {
                Some(key) if key.bucket != CollectiveKey::NO_BUCKET => failure.in_bucket(key.bucket),
                _ => failure,
            };
        }
    }
}

impl Machine for Supervisor {
    type Msg = SupervisorMsg;

    fn on(&mut self, message: SupervisorMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match message {
            SupervisorMsg::Demanded { version, demanded } => {
                actions.push(Action::Announce(ControlMsg::Demand { from: self.rank, version, demanded }));
            }
            SupervisorMsg::Digest { step, digest, history } => {
                if self.ranks == 1 {
                    return Ok(());
                }
                self.shown = step + 1;
                if self.own.len() == KEPT {
                    self.own.pop_front();
                }
                self.own.push_back(Shown { step, digest, history: history.into(), agreed: 0 });
                actions.push(Action::Announce(ControlMsg::Digest { from: self.rank, step, digest }));
                let (now, later): (Vec<_>, Vec<_>) =
                    std::mem::take(&mut self.early).into_iter().partition(|(_, s, _)| *s == step);
                self.early = later;
                for (peer, step, digest) in now {
                    self.compare(peer, step, digest, actions);
                }
                let (now, later): (Vec<_>, Vec<_>) =
                    std::mem::take(&mut self.histories).into_iter().partition(|(_, s, _)| *s == step);
                self.histories = later;
                for (peer, step, entries) in now {
                    self.compare_history(peer, step, &entries, actions);
                }
            }
            SupervisorMsg::Control(ControlMsg::Demand { version, demanded, .. }) => {
                actions.push(Action::Send(Letter::PreHook(PreHookMsg::PeerDemand { version, demanded })));
            }
            SupervisorMsg::Control(ControlMsg::Digest { from, step, digest }) => {
                self.compare(from, step, digest, actions);
            }
            SupervisorMsg::Control(ControlMsg::History { from, step, entries }) => {
                self.compare_history(from, step, &entries, actions);
            }
            SupervisorMsg::Control(ControlMsg::Failed(cause)) => self.poison(cause, false, actions),
            // Whether a departure matters depends on what is outstanding: the next look at the deadlines tells.
            SupervisorMsg::Control(ControlMsg::Left { .. }) => {}
            SupervisorMsg::Failed(cause) => self.poison(cause, true, actions),
        }
        Ok(())
    }
}

/// How long to wait for others, each counted from the last sign of progress of the rank waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// For all ranks to start.
    pub start_up: Duration,
    /// For a collective that a peer has not issued, or that does not finish.
    pub collective: Duration,
    /// For a heartbeat.
    pub silence: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let limit = Duration::from_mins(10);
        Self { start_up: limit, collective: limit, silence: limit }
    }
}

impl Deadlines {
    /// How often to look: often enough that a deadline is met within a quarter of itself, at most every second.
    pub fn tick(&self) -> Duration {
        (self.collective.min(self.silence) / 8).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }
}

/// What a peer looks like from here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerView<'a> {
    /// Collectives it has issued.
    pub issued: u64,
    /// 1 + the newest collective that its stream for this kind has begun; `u64::MAX` where nobody can tell.
    pub begun: u64,
    /// It closed or dropped its engine.
    pub left: bool,
    /// The first collective that it issued and, having left, will never finish.
    pub abandoned: Option<u64>,
    /// When it last made progress, on this rank's clock.
    pub progress_ns: u64,
    /// Its last heartbeat.
    pub alive_ns: u64,
    /// What it has declared itself busy with.
    pub busy: Option<&'a Spell>,
}

impl<'a> PeerView<'a> {
    /// What it is busy with, if it is the one that is waited for and its limit has not passed.
    fn excuse(&self, key: &CollectiveKey, now_ns: u64) -> Option<&'a Spell> {
        self.busy.filter(|spell| self.issued <= key.seq && !self.left && now_ns <= spell.until_ns)
    }
}

/// The ranks that `rank` waits for in this collective and that are busy, and what with.
pub fn busy_peers<'a>(
    now_ns: u64,
    key: &CollectiveKey,
    members: &Members,
    rank: usize,
    peers: &[PeerView<'a>],
) -> impl Iterator<Item = (usize, &'a Spell)> {
    let others = peers.iter().enumerate().filter(move |(peer, _)| *peer != rank && members.slot_of(*peer).is_some());
    others.filter_map(move |(peer, view)| Some((peer, view.excuse(key, now_ns)?)))
}

/// Judges the oldest collective of this rank that is not over: `None` while everything is within its deadline.
///
/// `issued_ns` is when it was issued here, or later, when the one before it was over. `peers` has every rank; only `members`
/// are waited for.
///
/// Tells apart (CASES row 24): a rank that has not issued it, a peer that fell silent or left, a rank whose stream has not
/// started it, and a collective that everybody started and that does not finish. A rank that is [busy](crate::busy) may take
/// as long as it declared, as long as its heart beats.
pub fn overdue(
    deadlines: &Deadlines,
    now_ns: u64,
    key: &CollectiveKey,
    members: &Members,
    issued_ns: u64,
    rank: usize,
    peers: &[PeerView<'_>],
) -> Option<Failure> {
    let failure = |kind, who: usize, message: String| {
        let failure = Failure::new(kind, who, message);
        Some(match (key.kind, key.bucket) {
            (CollectiveKind::StartUp, _) => failure,
            (_, CollectiveKey::NO_BUCKET) => failure.at_step(key.version),
            (CollectiveKind::Gather, bucket) => failure.at_step(key.version - 1).in_bucket(bucket),
            (_, bucket) => failure.at_step(key.version).in_bucket(bucket),
        })
    };
    let past = |since: u64, limit: Duration| u128::from(now_ns.saturating_sub(since)) > limit.as_nanos();
    let (mut all_issued, mut waits_for_busy) = (true, false);
    let views = || peers.iter().enumerate().filter(|(peer, _)| members.slot_of(*peer).is_some());
    for (peer, view) in views().filter(|(peer, _)| *peer != rank) {
        let issued = view.issued > key.seq;
        if issued && !view.abandoned.is_some_and(|first| view.left && first <= key.seq) {
            continue;
        }
        all_issued = false;
        if view.left {
            let what = if issued { "issued but did not finish" } else { "never issued" };
            let message = format!("rank {peer} left; rank {rank} waits for it in the {key}, which it {what}");
            return failure(FailureKind::RankLost, peer, message);
        }
        if past(view.alive_ns.max(issued_ns), deadlines.silence) {
            let message = format!(
                "rank {peer} gave no sign of life for {:.1} s (deadline `silence`); rank {rank} waits for it in the {key}",
                deadlines.silence.as_secs_f64()
            );
            return failure(FailureKind::RankLost, peer, message);
        }
        if view.excuse(key, now_ns).is_some() {
            waits_for_busy = true;
            continue;
        }
        if past(view.progress_ns.max(issued_ns), deadlines.collective) {
            if let Some(spell) = view.busy {
                let message = format!(
                    "rank {peer} is busy ({}) beyond its limit of {:.1} s and has not issued the {key}; rank {rank} waits \
                     for it",
                    spell.reason,
                    Duration::from_nanos(spell.until_ns - spell.since_ns).as_secs_f64()
                );
                return failure(FailureKind::Deadline, peer, message);
            }
            let message = format!(
                "rank {peer} has not issued the {key} and made no progress for {:.1} s (deadline `collective`); rank {rank} \
                 waits for it",
                deadlines.collective.as_secs_f64()
            );
            return failure(FailureKind::Deadline, peer, message);
        }
    }
    if waits_for_busy || !past(issued_ns, deadlines.collective) {
        return None;
    }
    let seconds = deadlines.collective.as_secs_f64();
    if peers.get(rank).is_some_and(|own| own.issued <= key.seq) {
        let message = format!(
            "rank {rank} has not issued the {key}: its issuing thread is stuck for {seconds:.1} s (deadline `collective`)"
        );
        return failure(FailureKind::Deadline, rank, message);
    }
    let last_progress = views().map(|(_, view)| view.progress_ns).max().unwrap_or(0);
    if !all_issued || !past(last_progress, deadlines.collective) {
        return None;
    }
    if let Some((late, _)) = views().find(|(_, view)| view.begun <= key.seq) {
        let message = format!(
            "every rank issued the {key} but rank {late} has not started it within {seconds:.1} s (deadline \
             `collective`): the work before it is stuck"
        );
        return failure(FailureKind::Deadline, late, message);
    }
    let message =
        format!("every rank started the {key} but it did not finish within {seconds:.1} s (deadline `collective`)");
    failure(FailureKind::Deadline, rank, message)
}

/// Judges the verdict that this rank waits for once all collectives before it are over: only its own work is in the way.
pub fn overdue_verdict(deadlines: &Deadlines, now_ns: u64, step: u64, since_ns: u64, rank: usize) -> Option<Failure> {
    if u128::from(now_ns.saturating_sub(since_ns)) <= deadlines.collective.as_nanos() {
        return None;
    }
    let message = format!(
        "the verdict did not come within {:.1} s after the small all-gather (deadline `collective`): the work of the \
         optimizer's stream is stuck",
        deadlines.collective.as_secs_f64()
    );
    Some(Failure::new(FailureKind::Deadline, rank, message).at_step(step))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use gatherflow_kernels::DType;

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
            let Some(Action::Tell { to: 2, message: ControlMsg::History { from: 1, step: 5, entries } }) =
                actions.last()
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
            (
                "not issued",
                1101,
                alive(1100, waits),
                fine,
                Some((FailureKind::Deadline, 0, "has not issued the gather")),
            ),
            ("progress", 1150, PeerView { progress_ns: 1060, ..alive(1140, waits) }, fine, None),
            (
                "left",
                1001,
                PeerView { left: true, ..waits },
                fine,
                Some((FailureKind::RankLost, 0, "rank 0 left; rank 1 waits for it in the gather of bucket 2")),
            ),
            ("left after its part", 1050, PeerView { left: true, ..fine }, fine, None),
            (
                "left before it finished",
                1001,
                PeerView { left: true, abandoned: Some(6), ..fine },
                fine,
                Some((FailureKind::RankLost, 0, "which it issued but did not finish")),
            ),
            ("left later than that", 1001, PeerView { left: true, abandoned: Some(8), ..fine }, fine, None),
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
        let gone = PeerView { issued: 3, begun: 3, left: true, ..fine };
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
            assert_eq!(judge(4000, PeerView { left: true, ..busy }).unwrap().kind, FailureKind::RankLost);
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
        let lost = [PeerView { left: true, ..PeerView::default() }, PeerView::default()];
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
}
