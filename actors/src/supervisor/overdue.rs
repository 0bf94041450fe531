//! Deadlines: what is overdue, and which rank is to blame (rule F1, CASES row 24).
//!
//! Pure: the shell gathers what it sees of every rank and asks on every tick.

use std::time::Duration;

use gatherflow_kernels::{CollectiveKey, CollectiveKind, Failure, FailureKind, Members};

use crate::busy::Spell;

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
    /// How it closed or dropped its engine, in words; `None` if it has not.
    pub left: Option<&'static str>,
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
        self.busy.filter(|spell| self.issued <= key.seq && self.left.is_none() && now_ns <= spell.until_ns)
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
        Some(match (key.kind, key.of_bucket()) {
            (CollectiveKind::StartUp, _) => failure,
            (_, None) => failure.at_step(key.version),
            (CollectiveKind::Gather, Some(bucket)) => failure.at_step(key.version - 1).in_bucket(bucket),
            (_, Some(bucket)) => failure.at_step(key.version).in_bucket(bucket),
        })
    };
    let past = |since: u64, limit: Duration| u128::from(now_ns.saturating_sub(since)) > limit.as_nanos();
    let (mut all_issued, mut waits_for_busy) = (true, false);
    let views = || peers.iter().enumerate().filter(|(peer, _)| members.slot_of(*peer).is_some());
    for (peer, view) in views().filter(|(peer, _)| *peer != rank) {
        let issued = view.issued > key.seq;
        if issued && !view.abandoned.is_some_and(|first| view.left.is_some() && first <= key.seq) {
            continue;
        }
        all_issued = false;
        if let Some(left) = view.left {
            let what = if issued { "issued but did not finish" } else { "never issued" };
            let message = format!("rank {peer} {left}; rank {rank} waits for it in the {key}, which it {what}");
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
