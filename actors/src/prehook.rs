//! The forward pre-hook: it knows where the forward pass is and lets gathers go.
//!
//! Owns the credits (rule C1): with D gathers demanded (a prefix of the gather order) and I let go, I <= D + credits.
//! Entering a unit is demand; credits bound how far gathers run ahead of it, in buckets and in bytes. Peer demand (O4), a
//! flush and the drain before the first reduce count as demand. In mode chain one gather follows the other, each after
//! the executor's wait on the one before. The first gathers of a version go when its step is finished, or only once they are
//! opened ([`FirstGather`]); demand opens them too, so nobody waits for who never comes.
//!
//! Hears from the executor (opening, demand, a wait ended), the optimizer (step finished), the buckets (gathered), the
//! communicator (drain) and the supervisor (peer demand). Says to the buckets: gather, in gather order, each once a version.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::action::{Action, Letter, Machine, Publication, WrongTransition};
use crate::plan::BucketId;
use crate::supervisor::SupervisorMsg;

/// What the pre-hook hears.
#[derive(Clone, Debug)]
pub enum PreHookMsg {
    /// Optimizer: the step that made `version` is finished; its gathers may go, if it was updated.
    StepFinished {
        /// The new version.
        version: u64,
        /// Whether there is anything to gather.
        updated: bool,
    },
    /// Executor: from here on the gathers of `version` may start, if the configuration lets them wait for it.
    Open {
        /// The version it reads.
        version: u64,
        /// By entering a unit: what this lets go starts after that (edge E8).
        by_entry: bool,
    },
    /// Executor: it has entered a unit that needs the first `demanded` gathers of `version`.
    Demand {
        /// The version it reads.
        version: u64,
        /// A prefix of the gather order.
        demanded: u32,
        /// It has to wait, so peers must hear of it (rule O4).
        announce: bool,
    },
    /// Executor, mode chain: its wait on the gather at this position ended.
    WaitEnded {
        /// The version it reads.
        version: u64,
        /// How many gathers of the order it has waited for.
        waited: u32,
    },
    /// Bucket: its gather was issued.
    Gathered {
        /// Which version.
        version: u64,
        /// Which bucket.
        bucket: BucketId,
    },
    /// Communicator or executor: let everything go (the first reduce of a step waits for it, or a flush).
    Drain {
        /// The version whose gathers are meant.
        version: u64,
    },
    /// Supervisor: a peer waits for the first `demanded` gathers of `version`.
    PeerDemand {
        /// Which version.
        version: u64,
        /// A prefix of the gather order.
        demanded: u32,
    },
    /// Executor: a future is pending on the first `demanded` gathers of `version`, or they are prefetched in mode chain. Nobody
    /// waits on the ones before it.
    Awaited {
        /// Which version.
        version: u64,
        /// A prefix of the gather order.
        demanded: u32,
    },
}

/// How gathers overlap with the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overlap {
    /// The step gathers everything before it returns (SPEC P1).
    None,
    /// One gather in flight: each wait that ends starts the next (SPEC P2).
    Chain,
    /// As far ahead as credits reach (SPEC P3).
    Window,
}

/// Where the first gathers of a version may start (SPEC P2). Whatever is demanded starts all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FirstGather {
    /// As soon as the step is finished.
    #[default]
    Step,
    /// When the executor zeroes its gradients, or enters a unit.
    ZeroGrad,
    /// When the executor enters the first unit.
    Forward,
}

/// How far gathers may run ahead of demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Credits {
    /// In buckets, at least 1; `u32::MAX` is unlimited.
    pub buckets: u32,
    /// In bytes; a bucket above it goes on demand only.
    pub bytes: Option<u64>,
}

/// Who asked for a prefix of the gathers: entries have a point in the executor's stream, others have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Demand {
    /// By units that the executor has entered.
    entered: u32,
    /// By peers, futures, flushes and drains.
    forced: u32,
}

/// The state machine of the pre-hook.
#[derive(Clone, Debug)]
pub struct PreHook {
    order: Vec<BucketId>,
    /// By position: the position after the last gather of the same call.
    call_ends: Vec<u32>,
    /// Bytes of the first i gathers.
    bytes_before: Vec<u64>,
    mode: Overlap,
    credits: Credits,
    first: FirstGather,
    announces: bool,
    /// The newest finished step's version.
    version: u64,
    /// That step was updated: there are gathers to let go.
    open: bool,
    /// The newest version that the executor has opened.
    opened: u64,
    let_go: u32,
    demand: Demand,
    /// Demand for later versions, heard before their steps finished: executors are ahead by up to the steps in flight.
    early: BTreeMap<u64, Demand>,
    waited: u32,
    /// `(version, demanded)` of the newest announcement.
    announced: (u64, u32),
    /// By bucket: it was let go and has not said that its gather was issued.
    outstanding: Vec<bool>,
    peak_ahead_bytes: u64,
}

impl PreHook {
    /// A pre-hook over the gather order; `bytes` yields the gather size at each position. `announces`: there are peers.
    pub fn new(
        order: Vec<BucketId>,
        bytes: impl IntoIterator<Item = u64>,
        mode: Overlap,
        credits: Credits,
        announces: bool,
    ) -> Self {
        let mut bytes_before = vec![0];
        for size in bytes {
            bytes_before.push(bytes_before[bytes_before.len() - 1] + size);
        }
        Self {
            outstanding: vec![false; order.len()],
            call_ends: (1..=order.len() as u32).collect(),
            order,
            bytes_before,
            mode,
            credits,
            first: FirstGather::Step,
            announces,
            version: 0,
            open: false,
            opened: 0,
            let_go: 0,
            demand: Demand::default(),
            early: BTreeMap::new(),
            waited: 0,
            announced: (0, 0),
            peak_ahead_bytes: 0,
        }
    }

    /// The same, with the first gathers of a version starting elsewhere.
    #[must_use]
    pub fn starting(self, first: FirstGather) -> Self {
        Self { first, ..self }
    }

    /// The same, with gathers that go together: the plan's [`call_ends`](crate::plan::Plan::call_ends).
    #[must_use]
    pub fn in_calls(self, call_ends: Vec<u32>) -> Self {
        Self { call_ends, ..self }
    }

    /// The version whose gathers it lets go.
    pub fn version(&self) -> u64 {
        self.version
    }

    fn total(&self) -> u32 {
        self.order.len() as u32
    }

    fn wrong(&self, message: &PreHookMsg) -> WrongTransition {
        WrongTransition {
            actor: "pre-hook actor",
            bucket: None,
            state: format!(
                "version {}, {} of {} let go, {:?}, waited {}",
                self.version,
                self.let_go,
                self.order.len(),
                self.demand,
                self.waited
            ),
            message: format!("{message:?}"),
        }
    }

    /// Remembers a demand; `true` if it is for this version.
    fn note(&mut self, version: u64, entered: u32, forced: u32) -> bool {
        let slot = match version.cmp(&self.version) {
            Ordering::Less => return false,
            Ordering::Equal => &mut self.demand,
            Ordering::Greater => self.early.entry(version).or_default(),
        };
        slot.entered = slot.entered.max(entered);
        slot.forced = slot.forced.max(forced);
        version == self.version
    }

    /// The gathers of this version wait to be opened, and nothing of it is demanded. Without overlap they never wait.
    fn shut(&self) -> bool {
        let waits = self.first != FirstGather::Step && self.mode != Overlap::None;
        waits && self.opened < self.version && self.demand == Demand::default()
    }

    /// Lets gathers go as far as demand and credits reach. `by_entry`: an entry is the reason.
    fn let_go(&mut self, by_entry: bool, actions: &mut Vec<Action>) {
        if !self.open || self.shut() {
            return;
        }
        let total = self.total();
        let demanded = self.demand.entered.max(self.demand.forced).min(total);
        while self.let_go < total {
            let next = self.let_go;
            let end = self.call_ends[next as usize];
            let forced = next < self.demand.forced;
            // What no entry has to wait for: the start of a version, before anything is demanded. Where that was shut, what
            // an entry finds here waited for it.
            let (goes, free) = match self.mode {
                Overlap::None => (true, true),
                Overlap::Chain => (forced || next <= self.waited, next == 0),
                Overlap::Window => (next < demanded || self.within_credits(demanded, end), self.within_credits(0, end)),
            };
            if !goes {
                break;
            }
            self.let_go = end;
            for &bucket in &self.order[next as usize..end as usize] {
                self.outstanding[bucket.index()] = true;
                actions.push(Action::LetGo {
                    bucket,
                    version: self.version,
                    after_entry: by_entry && !forced && !(free && self.first == FirstGather::Step),
                });
            }
        }
        let ahead = self.ahead_bytes(demanded);
        if ahead > self.peak_ahead_bytes && self.mode != Overlap::None {
            self.peak_ahead_bytes = ahead;
            actions.push(Action::Publish(Publication::PeakAhead(ahead)));
        }
    }

    /// Whether the gathers up to `end` stay within the credits when the first `demanded` are demanded.
    fn within_credits(&self, demanded: u32, end: u32) -> bool {
        let demanded = demanded.min(self.let_go);
        let bytes = self.bytes_before[end as usize] - self.bytes_before[demanded as usize];
        end - demanded <= self.credits.buckets && self.credits.bytes.is_none_or(|budget| bytes <= budget)
    }

    /// Bytes let go beyond the first `demanded` gathers.
    fn ahead_bytes(&self, demanded: u32) -> u64 {
        self.bytes_before[self.let_go as usize] - self.bytes_before[demanded.min(self.let_go) as usize]
    }
}

impl Machine for PreHook {
    type Msg = PreHookMsg;

    fn on(&mut self, message: PreHookMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match message {
            PreHookMsg::StepFinished { version, updated } if version == self.version + 1 => {
                if self.open && self.let_go < self.total() {
                    return Err(self.wrong(&message));
                }
                self.version = version;
                self.open = updated;
                self.let_go = 0;
                self.waited = 0;
                self.demand = self.early.remove(&version).unwrap_or_default();
                self.let_go(self.demand.entered > 0 || self.first == FirstGather::Forward, actions);
            }
            PreHookMsg::Open { version, by_entry } => {
                self.opened = self.opened.max(version);
                if version == self.version {
                    self.let_go(by_entry, actions);
                }
            }
            PreHookMsg::Demand { version, demanded, announce } => {
                let newest = version >= self.version && (version, demanded) > self.announced;
                if announce && self.announces && newest {
                    self.announced = (version, demanded);
                    actions.push(Action::Send(Letter::Supervisor(SupervisorMsg::Demanded { version, demanded })));
                }
                if self.note(version, demanded, 0) {
                    self.let_go(true, actions);
                }
            }
            PreHookMsg::WaitEnded { version, waited } => {
                if version == self.version {
                    self.waited = self.waited.max(waited);
                    // A wait is demand too, whether or not it was asked for.
                    self.demand.entered = self.demand.entered.max(waited);
                    self.let_go(true, actions);
                }
            }
            PreHookMsg::PeerDemand { version, demanded } | PreHookMsg::Awaited { version, demanded } => {
                if self.note(version, 0, demanded.min(self.total())) {
                    self.let_go(false, actions);
                }
            }
            PreHookMsg::Drain { version } => {
                if self.note(version, 0, self.total()) {
                    self.let_go(false, actions);
                }
            }
            // Gathers are issued in order, but each bucket tells of its own: what they say may come in any order.
            PreHookMsg::Gathered { version, bucket }
                if version == self.version && self.outstanding.get(bucket.index()) == Some(&true) =>
            {
                self.outstanding[bucket.index()] = false;
            }
            _ => return Err(self.wrong(&message)),
        }
        Ok(())
    }

    fn waits_for_demand(&self) -> Option<bool> {
        Some(self.open && self.let_go < self.total())
    }

    fn catch_up(&self, demand: (u64, u32), waited: (u64, u32)) -> Option<PreHookMsg> {
        if !self.open || self.let_go == self.total() {
            return None;
        }
        if demand.0 == self.version && demand.1 > self.demand.entered {
            return Some(PreHookMsg::Demand { version: demand.0, demanded: demand.1, announce: false });
        }
        if waited.0 == self.version && waited.1 > self.waited {
            return Some(PreHookMsg::WaitEnded { version: waited.0, waited: waited.1 });
        }
        None
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            [announced(&mut p, 2), announced(&mut p, 2), announced(&mut p, 1), announced(&mut p, 3)],
            [1, 0, 0, 1]
        );
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
}
