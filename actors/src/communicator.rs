//! The communicator: the only one that issues collectives, in the one order (rule O1).
//!
//! Owns the [`Sequence`] and the requests that came early. Readiness, demand and credits decide *when* the next
//! collective is issued, never *which*. The first reduce of a step first issues all pending gathers: it asks the pre-hook
//! to let them go. Hears from buckets (reduce, gather) and the optimizer (small, verdict); answers each with the event
//! behind what was issued. Its digest of the order goes to the supervisor every n steps (rule O2).

use std::collections::VecDeque;

use gatherflow_kernels::{CollectiveKey, CollectiveKind, Event};

use crate::action::{Action, After, Letter, Machine, WrongTransition};
use crate::bucket::BucketMsg;
use crate::optimizer::OptimizerMsg;
use crate::plan::BucketId;
use crate::prehook::PreHookMsg;
use crate::sequence::{Entry, Sequence};
use crate::supervisor::SupervisorMsg;

/// What the communicator hears.
#[derive(Clone, Debug)]
pub enum CommunicatorMsg {
    /// Bucket: its gradients are complete.
    Reduce {
        /// The step.
        step: u64,
        /// Which bucket.
        bucket: BucketId,
        /// Start behind these.
        after: After,
    },
    /// Optimizer: this rank's record is enqueued.
    Small {
        /// The step.
        step: u64,
        /// Start behind these.
        after: After,
    },
    /// Optimizer: the verdict of a step is known.
    Verdict {
        /// The step.
        step: u64,
        /// Whether gathers follow.
        updated: bool,
    },
    /// Bucket: it was told to gather.
    Gather {
        /// The version.
        version: u64,
        /// Which bucket.
        bucket: BucketId,
        /// Start behind these.
        after: After,
    },
    /// Own feedback: a collective was issued.
    Issued {
        /// Which.
        key: CollectiveKey,
        /// Behind it.
        event: Event,
    },
}

/// How many entries are kept for naming the first difference between two ranks.
const HISTORY: usize = 4096;

/// The state machine of the communicator.
#[derive(Debug)]
pub struct Communicator {
    sequence: Sequence,
    /// Early requests, by bucket.
    reduces: Vec<Option<(u64, After)>>,
    gathers: Vec<Option<(u64, After)>>,
    small: Option<(u64, After)>,
    drained: u64,
    compare_every: u64,
    history: VecDeque<CollectiveKey>,
}

impl Communicator {
    /// A communicator at the start of a sequence over `buckets` buckets. The digest goes out after every `compare_every`th
    /// step (0: never).
    pub fn new(sequence: Sequence, buckets: usize, compare_every: u64) -> Self {
        Self {
            sequence,
            reduces: vec![None; buckets],
            gathers: vec![None; buckets],
            small: None,
            drained: 0,
            compare_every,
            history: VecDeque::new(),
        }
    }

    /// The sequence and its digest.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    fn wrong(&self, message: &CommunicatorMsg) -> WrongTransition {
        WrongTransition {
            actor: "communicator actor",
            bucket: None,
            state: format!("{:?} is next", self.sequence.next()),
            message: format!("{message:?}"),
        }
    }

    /// Issues what is next for as long as it was asked for.
    fn advance(&mut self, actions: &mut Vec<Action>) {
        loop {
            let taken = match self.sequence.next() {
                Entry::Reduce { step, bucket } => take(&mut self.reduces[bucket.0 as usize], step),
                Entry::Small { step } => take(&mut self.small, step),
                Entry::Gather { version, bucket } => take(&mut self.gathers[bucket.0 as usize], version),
                Entry::AwaitVerdict { .. } => None,
            };
            let Some(after) = taken else { return };
            let step = self.sequence.step();
            let Some(key) = self.sequence.advance() else { return };
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(key);
            actions.push(Action::Issue { key, after });
            if self.sequence.step() != step {
                self.step_over(step, actions);
            }
        }
    }

    fn step_over(&mut self, step: u64, actions: &mut Vec<Action>) {
        if self.compare_every > 0 && (step + 1).is_multiple_of(self.compare_every) {
            actions.push(Action::Send(Letter::Supervisor(SupervisorMsg::Digest {
                step,
                digest: self.sequence.digest(),
                history: self.history.drain(..).collect(),
            })));
        }
    }

    /// A reduce that came while gathers are pending: they go first.
    fn drain_before(&mut self, step: u64, actions: &mut Vec<Action>) {
        if step > self.drained && self.sequence.step() < step {
            self.drained = step;
            actions.push(Action::Send(Letter::PreHook(PreHookMsg::Drain { version: step })));
        }
    }
}

fn take(slot: &mut Option<(u64, After)>, wanted: u64) -> Option<After> {
    slot.take_if(|(number, _)| *number == wanted).map(|(_, after)| after)
}

impl Machine for Communicator {
    type Msg = CommunicatorMsg;

    fn on(&mut self, message: CommunicatorMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match message {
            CommunicatorMsg::Reduce { step, bucket, after }
                if step >= self.sequence.step() && self.reduces[bucket.0 as usize].is_none() =>
            {
                self.reduces[bucket.0 as usize] = Some((step, after));
                self.drain_before(step, actions);
            }
            CommunicatorMsg::Small { step, after } if step >= self.sequence.step() && self.small.is_none() => {
                self.small = Some((step, after));
            }
            CommunicatorMsg::Gather { version, bucket, after }
                if version == self.sequence.step() + 1 && self.gathers[bucket.0 as usize].is_none() =>
            {
                self.gathers[bucket.0 as usize] = Some((version, after));
            }
            CommunicatorMsg::Verdict { step, updated } if self.sequence.verdict(step, updated) => {
                if self.sequence.step() != step {
                    self.step_over(step, actions);
                }
            }
            CommunicatorMsg::Issued { key, event } => {
                actions.push(Action::Send(match key.kind {
                    CollectiveKind::Reduce => {
                        Letter::Bucket(BucketId(key.bucket), BucketMsg::ReduceIssued { step: key.version, event })
                    }
                    CollectiveKind::Gather => {
                        Letter::Bucket(BucketId(key.bucket), BucketMsg::GatherIssued { version: key.version, event })
                    }
                    _ => Letter::Optimizer(OptimizerMsg::SmallIssued { step: key.version, event }),
                }));
                return Ok(());
            }
            message => return Err(self.wrong(&message)),
        }
        self.advance(actions);
        Ok(())
    }

    fn issued(key: CollectiveKey, event: Event) -> Option<CommunicatorMsg> {
        Some(CommunicatorMsg::Issued { key, event })
    }
}
