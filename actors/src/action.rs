//! What a machine may ask for, as data: the vocabulary between the pure state machines and whoever carries it out.
//!
//! A machine never touches a device, a clock or a mailbox. It answers a message with [`Action`]s; the ractor shell, the
//! inline loop and the tests all carry out the same ones. Device work is named by an [`Op`] (which the lowering turns into
//! `Work` over real memory) and comes back as an `Enqueued` message with the event behind it, so machines hold events but
//! never memory.

use std::sync::Arc;

use gatherflow_kernels::adam::AdamRows;
use gatherflow_kernels::verdict::{HostVerdict, StepReport};
use gatherflow_kernels::{CollectiveKey, Event};

use crate::bucket::BucketMsg;
use crate::communicator::CommunicatorMsg;
use crate::optimizer::OptimizerMsg;
use crate::plan::{BucketId, ParamId};
use crate::prehook::PreHookMsg;
use crate::supervisor::SupervisorMsg;

/// The edges of a step (DESIGN.md, "Everything is enqueued ahead"). Every wait says which edge it serves, so that a test
/// can leave one out and see the checker find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Edge {
    /// A reduce starts after the last gradient write of its bucket.
    E1,
    /// Norm partials after the reduce, the small all-gather after all partials, the verdict after it, and what the executor
    /// reads of the verdict after that.
    E2,
    /// A sum over the copies of a weight after the reduces of all of them, over stages after the sum within each, and what reads it
    /// after that (SPEC T0).
    T0,
    /// Adam after the last read of the version it overwrites.
    E3,
    /// A gather after Adam of its bucket and after the last read of the old version.
    E4,
    /// A read after the gather of its version.
    E5,
    /// The first gradient write of the next step after this step's reduce and Adam; with storage `shared` after copy-out and
    /// zeroing.
    E6,
    /// The verdict, which moves the loss scale, after the executor's read of the scale.
    E7,
    /// A gather let go by a unit's entry after the executor's stream has reached that entry.
    E8,
}

/// Events to wait for, each with the edge it serves.
pub type After = Vec<(Edge, Event)>;

/// Device work by name. The lowering knows the memory.
#[derive(Clone, Debug)]
pub enum Op {
    /// Zero the gradients of these parameters of a bucket (nobody wrote them in this step).
    ZeroGradients {
        /// The bucket whose reduce comes next.
        bucket: BucketId,
        /// What nobody wrote.
        params: Vec<ParamId>,
    },
    /// Zero all gradients of a bucket (storage `shared`, where a step is skipped: no gather zeroes them).
    ZeroBucket {
        /// Which bucket.
        bucket: BucketId,
    },
    /// Search of this rank's own gradients of a bucket for what is not finite (SPEC T9).
    FindNonFinite {
        /// The bucket whose reduce comes next.
        bucket: BucketId,
    },
    /// The sum of this rank's reduced shards of all its copies of a weight, in the first of them.
    SumCopies {
        /// An index into [`Plan::copies`](crate::plan::Plan::copies).
        set: usize,
    },
    /// That sum in the others too.
    SpreadCopies {
        /// An index into [`Plan::copies`](crate::plan::Plan::copies).
        set: usize,
    },
    /// Norm partials of this rank's reduced shard.
    NormPartials {
        /// Which bucket.
        bucket: BucketId,
    },
    /// This rank's record for the small all-gather.
    Fold {
        /// What only the host knows.
        host: HostVerdict,
    },
    /// All records to scalars and report.
    Verdict {
        /// The step (number of steps before it).
        step: u64,
    },
    /// Fused Adam over this rank's shard.
    Adam {
        /// Which bucket.
        bucket: BucketId,
        /// One row per group, for each t still possible.
        rows: AdamRows,
    },
}

/// What is told to the executor's side, without waking it if it does not wait.
#[derive(Clone, Debug)]
pub enum Publication {
    /// The parameters of a bucket may be read at `version` once `event` is done (rule V1: `Ready`).
    Ready {
        /// Which bucket.
        bucket: BucketId,
        /// At which version.
        version: u64,
        /// Behind its gather.
        event: Event,
    },
    /// The gradients of a bucket may be written for the step `version` once `event` is done (edge E6).
    GradientsFree {
        /// Which bucket.
        bucket: BucketId,
        /// For which step.
        version: u64,
        /// Behind Adam; with storage `shared` behind the zeroing.
        event: Event,
    },
    /// The verdict of so many steps is enqueued: the loss scale of the next one may be read once `event` is done.
    Judged {
        /// How many steps.
        steps: u64,
        /// Behind the verdict.
        event: Event,
    },
    /// The outcome of a step is known.
    Outcome(Arc<StepOutcome>),
    /// More bytes than ever before were gathered ahead of demand.
    PeakAhead(u64),
}

/// The outcome of a step as the optimizer knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// The step (number of steps before it).
    pub step: u64,
    /// Norm, zeros, scale, who spoiled it.
    pub report: StepReport,
    /// The learning rate used, per group.
    pub lrs: Vec<f64>,
    /// Successful steps so far, per group, this one included if it was updated.
    pub t: Vec<u64>,
}

/// A message and whom it is for.
#[derive(Debug)]
pub enum Letter {
    /// To the actor of one bucket.
    Bucket(BucketId, BucketMsg),
    /// To the forward pre-hook.
    PreHook(PreHookMsg),
    /// To the optimizer.
    Optimizer(OptimizerMsg),
    /// To the communicator.
    Communicator(CommunicatorMsg),
    /// To the supervisor.
    Supervisor(SupervisorMsg),
}

/// What a machine asks for.
#[derive(Debug)]
pub enum Action {
    /// Deliver a message.
    Send(Letter),
    /// Enqueue work behind events, record an event and give it back as this machine's `Enqueued` message.
    Enqueue {
        /// What.
        op: Op,
        /// Behind what.
        after: After,
    },
    /// Issue the next collective of the sequence behind events; the event comes back as `Issued`. Communicator only.
    Issue {
        /// What ranks compare.
        key: CollectiveKey,
        /// Behind what.
        after: After,
        /// The next one belongs to the same call; the event comes back for the last of them.
        more: bool,
    },
    /// Deliver the verdict of `step` to the optimizer when the event is done. Several may be awaited, in the order of steps.
    WhenVerdict {
        /// Behind the verdict.
        event: Event,
        /// The step.
        step: u64,
    },
    /// Let a bucket gather. `after_entry`: only after the executor's stream has reached where it is now (edge E8).
    LetGo {
        /// Which bucket.
        bucket: BucketId,
        /// Which version.
        version: u64,
        /// Record and hand over the executor's point.
        after_entry: bool,
    },
    /// Tell the executor's side.
    Publish(Publication),
    /// Tell the other ranks. Supervisor only.
    Announce(crate::control::ControlMsg),
    /// Tell one other rank. Supervisor only.
    Tell {
        /// Whom.
        to: usize,
        /// What.
        message: crate::control::ControlMsg,
    },
    /// End everything with this cause. Supervisor only.
    Poison(gatherflow_kernels::Cause),
}

/// Names an actor, where one fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActorName {
    /// The actor of one bucket.
    Bucket(BucketId),
    /// The forward pre-hook.
    PreHook,
    /// The optimizer.
    Optimizer,
    /// The communicator.
    Communicator,
    /// The supervisor.
    Supervisor,
}

impl std::fmt::Display for ActorName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bucket(bucket) => write!(f, "bucket actor of bucket {}", bucket.0),
            Self::PreHook => f.write_str("pre-hook actor"),
            Self::Optimizer => f.write_str("optimizer actor"),
            Self::Communicator => f.write_str("communicator actor"),
            Self::Supervisor => f.write_str("supervisor actor"),
        }
    }
}

/// A message that the state does not allow (rule V1).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{actor}{}: {message} is not allowed in state {state}", .bucket.map(|b| format!(" of bucket {}", b.0)).unwrap_or_default())]
pub struct WrongTransition {
    /// Which kind of actor.
    pub actor: &'static str,
    /// Which bucket, for a bucket's actor.
    pub bucket: Option<BucketId>,
    /// The state it was in.
    pub state: String,
    /// The message that came.
    pub message: String,
}

/// A pure state machine: no clock, no I/O, no async, no iteration in hash order.
pub trait Machine: Send + 'static {
    /// What it hears.
    type Msg: Send + std::fmt::Debug + 'static;

    /// Takes a message, changes state, and says what to do about it.
    ///
    /// # Errors
    /// [`WrongTransition`] where the state does not allow the message; the state is then unchanged.
    fn on(&mut self, message: Self::Msg, actions: &mut Vec<Action>) -> Result<(), WrongTransition>;

    /// The message by which the event of an [`Action::Enqueue`] comes back, for machines that enqueue.
    fn enqueued(_op: Op, _event: Event) -> Option<Self::Msg> {
        None
    }

    /// The message by which the event of an [`Action::Issue`] comes back, for the one machine that issues.
    fn issued(_key: CollectiveKey, _event: Event) -> Option<Self::Msg> {
        None
    }

    /// For the one machine that waits for the executor: whether more demand would let something go.
    fn waits_for_demand(&self) -> Option<bool> {
        None
    }

    /// For that machine: the message that takes up a demand `(version, gathers)` or a count of ended waits
    /// `(version, waits)` that the executor left without a message.
    fn catch_up(&self, _demand: (u64, u32), _waited: (u64, u32)) -> Option<Self::Msg> {
        None
    }
}
