//! The supervisor: it owns the control path, the deadlines and the first cause.
//!
//! Hears of failed actors and devices, of peers (demand, digests, failures, departures) and of time (ticks, with what the
//! shell saw). The first failure poisons everything: every waiter on every rank gets that cause (rule F1); later ones
//! change nothing. Digests of the order of collectives are compared pairwise (rule O2); a mismatch makes both ranks send
//! their history, and the first differing entry is named.

mod overdue;

use std::collections::VecDeque;
use std::sync::Arc;

use gatherflow_kernels::{Cause, CollectiveKey, Failure, FailureKind, Members};

use crate::action::{Action, Letter, Machine, WrongTransition};
use crate::control::ControlMsg;
use crate::prehook::PreHookMsg;

pub use overdue::{Deadlines, PeerView, busy_peers, overdue, overdue_verdict};

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
    /// Who has the same order of collectives.
    alike: Members,
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
        Self {
            rank,
            ranks,
            alike: Members::ALL,
            poisoned: None,
            own: VecDeque::new(),
            shown: 0,
            early: Vec::new(),
            histories: Vec::new(),
        }
    }

    /// The same where only these ranks have this one's order of collectives: those of other pipeline stages have another.
    #[must_use]
    pub fn alike(self, alike: Members) -> Self {
        Self { alike, ..self }
    }

    fn is_alike(&self, peer: usize) -> bool {
        self.alike.slot_of(peer).is_some()
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
        if own.agreed + 1 == self.alike.count(self.ranks) {
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
            return match left.or(right).and_then(CollectiveKey::of_bucket) {
                Some(bucket) => failure.in_bucket(bucket),
                None => failure,
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
                if self.alike.count(self.ranks) == 1 {
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
            // Other stages gather for themselves, in an order of their own.
            SupervisorMsg::Control(
                ControlMsg::Demand { from, .. } | ControlMsg::Digest { from, .. } | ControlMsg::History { from, .. },
            ) if !self.is_alike(from) => {}
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

#[cfg(test)]
mod tests;
