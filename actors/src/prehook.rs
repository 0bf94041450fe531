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
mod tests;
