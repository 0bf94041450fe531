//! The actor of one bucket: its two state machines, its gather handle and its reduce handle.
//!
//! Owns the truth about the readiness of its parameters and gradients (rule V1):
//! `Ready(k) -> Updated(k+1) -> Ready(k+1)` and `Empty -> Accumulating -> Complete -> Reduced -> Empty`. Hears from the
//! executor (gradient complete), the optimizer (close, updated, skipped), the pre-hook (gather) and the communicator
//! (issued). A message that the state does not allow is an error naming bucket, state and message.
//!
//! Gradients may be written again after Adam (storage `views`) or once they are zeroed (storage `shared`, where the gather
//! lands in their memory): behind the gather, or behind a zeroing of its own where the step was skipped (edge E6). A close that
//! comes before such a gather waits here, so that `step` need not.
//!
//! States are about what has been enqueued; when that is done is the business of the events it hands on.

use gatherflow_kernels::Event;

use crate::action::{Action, After, Edge, Letter, Machine, Op, Publication, WrongTransition};
use crate::communicator::CommunicatorMsg;
use crate::optimizer::OptimizerMsg;
use crate::plan::{BucketId, ParamId, Storage};
use crate::prehook::PreHookMsg;

/// What a bucket hears.
#[derive(Clone, Debug)]
pub enum BucketMsg {
    /// Executor: the last gradient write of one of its parameters in `step` was enqueued; `event` is behind it.
    GradientComplete {
        /// The step.
        step: u64,
        /// Behind the last write.
        event: Event,
    },
    /// Optimizer: the executor called `step`, nothing more comes.
    Close {
        /// The step.
        step: u64,
        /// Parameters that nobody wrote.
        zero: Vec<ParamId>,
        /// Behind the last writes of parameters that were written but not reported complete.
        writes: Vec<Event>,
    },
    /// Own feedback: the zeroing was enqueued.
    Zeroed {
        /// Behind it.
        event: Event,
    },
    /// Own feedback: the search for non-finite gradients was enqueued.
    Searched {
        /// Behind it.
        event: Event,
    },
    /// Communicator: its reduce was issued.
    ReduceIssued {
        /// The step.
        step: u64,
        /// Behind it.
        event: Event,
    },
    /// Optimizer: Adam of this bucket was enqueued and the step's verdict is "updated".
    Updated {
        /// The new version.
        version: u64,
        /// Behind Adam.
        adam: Event,
        /// Behind the last reads of the old version, one per reader stream.
        readers: std::sync::Arc<[Event]>,
    },
    /// Optimizer: the step was skipped.
    Skipped {
        /// The new version, with the old bytes.
        version: u64,
        /// Behind the pass that did nothing.
        adam: Event,
    },
    /// Pre-hook: gather.
    Gather {
        /// Which version.
        version: u64,
        /// The executor's point that let it go (edge E8).
        entry: Option<Event>,
    },
    /// Communicator: its gather was issued.
    GatherIssued {
        /// Which version.
        version: u64,
        /// Behind it.
        event: Event,
    },
}

/// Readiness of the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Params {
    /// They may be read at this version.
    Ready(u64),
    /// This rank's shard has this version; the gather is not issued yet.
    Updated(u64),
}

/// Readiness of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grads {
    /// Nothing was reported in this step.
    Empty,
    /// This many parameters are still to be reported.
    Accumulating {
        /// How many.
        missing: u32,
    },
    /// Everything is written; the reduce was asked for, or waits for `step` where reduces do not overlap.
    Complete,
    /// The reduce was issued.
    Reduced,
}

/// The state machine of one bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    id: BucketId,
    members: u32,
    overlap_reduce: bool,
    storage: Storage,
    /// Gradients are looked at before they are reduced.
    searches: bool,
    params: Params,
    grads: Grads,
    /// The step whose gradients are being collected.
    step: u64,
    /// Behind the gradient writes reported so far (edge E1).
    writes: After,
    /// Behind the last Adam pass (edge E4).
    adam: Event,
    /// Behind what made the gradients free (edge E6).
    free: Event,
    /// Behind the last reads of the overwritten version (edge E4).
    readers: std::sync::Arc<[Event]>,
    /// What a reader waits for: behind the newest gather, or behind Adam where that skipped.
    gathered: Event,
    gather_asked: bool,
    /// Storage `shared`: the close of a step whose gradients nobody could write yet, with what it is to zero.
    held: Option<Vec<ParamId>>,
}

impl Bucket {
    /// A bucket of `members` parameters at version 0, ready. `started` is behind the start-up work on its memory.
    pub fn new(id: BucketId, members: u32, overlap_reduce: bool, started: Event) -> Self {
        Self {
            id,
            members,
            overlap_reduce,
            storage: Storage::Views,
            searches: false,
            params: Params::Ready(0),
            grads: Grads::Empty,
            step: 0,
            writes: After::new(),
            adam: started.clone(),
            free: started.clone(),
            readers: std::sync::Arc::from([]),
            gathered: started,
            gather_asked: false,
            held: None,
        }
    }

    /// The same bucket with its parameters gathered there.
    #[must_use]
    pub fn stored(self, storage: Storage) -> Self {
        Self { storage, ..self }
    }

    /// The same, looking for gradients that are not finite before each reduce (SPEC T9).
    #[must_use]
    pub fn searching(self, searches: bool) -> Self {
        Self { searches, ..self }
    }

    /// The readiness of its parameters.
    pub fn params(&self) -> Params {
        self.params
    }

    /// The readiness of its gradients.
    pub fn grads(&self) -> Grads {
        self.grads
    }

    fn wrong(&self, message: &BucketMsg) -> WrongTransition {
        WrongTransition {
            actor: "bucket actor",
            bucket: Some(self.id),
            state: format!("{:?}, {:?}, step {}", self.params, self.grads, self.step),
            message: format!("{message:?}"),
        }
    }

    /// All gradients are written behind what was collected.
    fn written(&mut self, actions: &mut Vec<Action>) {
        if self.searches {
            let after = std::mem::take(&mut self.writes);
            actions.push(Action::Enqueue { op: Op::FindNonFinite { bucket: self.id }, after });
        } else {
            self.ask_reduce(actions);
        }
    }

    fn ask_reduce(&mut self, actions: &mut Vec<Action>) {
        let after = std::mem::take(&mut self.writes);
        actions.push(Action::Send(Letter::Communicator(CommunicatorMsg::Reduce {
            step: self.step,
            bucket: self.id,
            after,
        })));
    }

    fn ask_gather(&mut self, version: u64, entry: Option<Event>, actions: &mut Vec<Action>) {
        self.gather_asked = true;
        let mut after = vec![(Edge::E4, self.adam.clone())];
        after.extend(self.readers.iter().map(|event| (Edge::E4, event.clone())));
        after.extend(entry.map(|event| (Edge::E8, event)));
        let bucket = self.id;
        actions.push(Action::Send(Letter::Communicator(CommunicatorMsg::Gather { version, bucket, after })));
    }

    fn publish_ready(&self, version: u64, actions: &mut Vec<Action>) {
        actions.push(Action::Publish(Publication::Ready { bucket: self.id, version, event: self.gathered.clone() }));
    }

    /// The gradients may be written for the step that is collected, behind this event.
    fn set_free(&mut self, event: Event, actions: &mut Vec<Action>) {
        self.free = event.clone();
        let version = self.step;
        actions.push(Action::Publish(Publication::GradientsFree { bucket: self.id, version, event }));
    }

    /// Nothing more comes in this step: what nobody wrote is zeroed, and the rest is behind these writes.
    fn close(&mut self, zero: Vec<ParamId>, writes: Vec<Event>, actions: &mut Vec<Action>) {
        self.grads = Grads::Complete;
        self.writes.extend(writes.into_iter().map(|event| (Edge::E1, event)));
        if zero.is_empty() {
            self.written(actions);
        } else {
            let after = vec![(Edge::E6, self.free.clone())];
            actions.push(Action::Enqueue { op: Op::ZeroGradients { bucket: self.id, params: zero }, after });
        }
    }

    /// `Reduced -> Empty`: the step is over for the gradients.
    fn open_next(&mut self, version: u64, adam: Event, actions: &mut Vec<Action>) {
        self.grads = Grads::Empty;
        self.step = version;
        self.adam = adam.clone();
        if self.storage == Storage::Views {
            self.set_free(adam, actions);
        }
    }

    /// Storage `shared`: whether the gather that zeroes the gradients is still to come. Nobody can have written any then.
    fn is_to_be_zeroed(&self) -> bool {
        self.storage == Storage::Shared && self.params == Params::Updated(self.step)
    }
}

impl Machine for Bucket {
    type Msg = BucketMsg;

    fn on(&mut self, message: BucketMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match (message, self.params, self.grads) {
            (BucketMsg::GradientComplete { step, event }, _, Grads::Empty | Grads::Accumulating { .. })
                if step == self.step && !self.is_to_be_zeroed() =>
            {
                let missing = match self.grads {
                    Grads::Accumulating { missing } => missing,
                    _ => self.members,
                } - 1;
                self.writes.push((Edge::E1, event));
                if missing > 0 {
                    self.grads = Grads::Accumulating { missing };
                } else {
                    self.grads = Grads::Complete;
                    if self.overlap_reduce {
                        self.written(actions);
                    }
                }
            }
            (BucketMsg::Close { step, zero, writes }, _, Grads::Empty | Grads::Accumulating { .. })
                if step == self.step && !self.is_to_be_zeroed() =>
            {
                self.close(zero, writes, actions);
            }
            (BucketMsg::Close { step, zero, writes }, _, Grads::Empty)
                if step == self.step && writes.is_empty() && self.held.is_none() =>
            {
                self.held = Some(zero);
            }
            (BucketMsg::Close { step, .. }, _, Grads::Complete) if step == self.step && !self.overlap_reduce => {
                self.written(actions);
            }
            (BucketMsg::Zeroed { event }, _, Grads::Complete) => {
                self.writes.push((Edge::E1, event));
                self.written(actions);
            }
            (BucketMsg::Searched { event }, _, Grads::Complete) if self.searches => {
                self.writes.push((Edge::E1, event));
                self.ask_reduce(actions);
            }
            // The step was skipped, and its gradients are zeroed.
            (BucketMsg::Zeroed { event }, Params::Ready(version), Grads::Empty)
                if version == self.step && self.storage == Storage::Shared =>
            {
                self.set_free(event, actions);
            }
            (BucketMsg::ReduceIssued { step, event }, _, Grads::Complete) if step == self.step => {
                self.grads = Grads::Reduced;
                actions.push(Action::Send(Letter::Optimizer(OptimizerMsg::ShardReduced {
                    step,
                    bucket: self.id,
                    event,
                    gathered: self.gathered.clone(),
                })));
            }
            (BucketMsg::Updated { version, adam, readers }, Params::Ready(old), Grads::Reduced)
                if version == old + 1 && version == self.step + 1 =>
            {
                self.params = Params::Updated(version);
                self.readers = readers;
                self.gather_asked = false;
                self.open_next(version, adam, actions);
            }
            (BucketMsg::Skipped { version, adam }, Params::Ready(old), Grads::Reduced)
                if version == old + 1 && version == self.step + 1 =>
            {
                self.params = Params::Ready(version);
                // Adam only looks at the flag, but it holds the shard while it does.
                self.gathered = adam.clone();
                self.open_next(version, adam.clone(), actions);
                if self.storage == Storage::Shared {
                    let after = vec![(Edge::E6, adam)];
                    actions.push(Action::Enqueue { op: Op::ZeroBucket { bucket: self.id }, after });
                }
                self.publish_ready(version, actions);
            }
            (BucketMsg::Gather { version, entry }, Params::Updated(current), _)
                if version == current && !self.gather_asked =>
            {
                self.ask_gather(version, entry, actions);
            }
            (BucketMsg::GatherIssued { version, event }, Params::Updated(current), _)
                if version == current && self.gather_asked =>
            {
                self.params = Params::Ready(version);
                self.gathered = event.clone();
                if self.storage == Storage::Shared {
                    self.set_free(event, actions);
                }
                self.publish_ready(version, actions);
                actions.push(Action::Send(Letter::PreHook(PreHookMsg::Gathered { version, bucket: self.id })));
                if let Some(zero) = self.held.take() {
                    self.close(zero, Vec::new(), actions);
                }
            }
            (message, ..) => return Err(self.wrong(&message)),
        }
        Ok(())
    }

    fn enqueued(op: Op, event: Event) -> Option<BucketMsg> {
        match op {
            Op::FindNonFinite { .. } => Some(BucketMsg::Searched { event }),
            _ => Some(BucketMsg::Zeroed { event }),
        }
    }
}

#[cfg(test)]
mod tests;
