//! A model of ranks at the level of messages: the real machines, everything around them reduced to what can be ordered
//! differently.
//!
//! | file | idea |
//! | --- | --- |
//! | `rank`, `turn` | one rank: its machines, a FIFO mailbox for each, what is published, and the rules |
//! | `executor` | what a training program calls, as a script, which blocks where the session blocks |
//! | `side`, `words` | what one rank can do in each of its states, and what is on its way to it |
//! | `explore` | all message orders of two ranks, over hashed states |
//! | `wander` | random orders of larger models |
//!
//! What may happen next is a choice among: a mailbox delivers its oldest letter, an executor takes its next step, the
//! issuing thread issues, a verdict arrives, a rank hears the oldest word of a peer. Device work is symbolic: the
//! number of an event is how many collectives **every** rank must have issued for it to be done, so a collective
//! completes once all ranks issued it, a verdict arrives at any time after the small all-gather is complete, and an
//! executor's wait ends only then. A turn is atomic, as it is under every driver; so is each look of the executor at
//! what is published, but raising the demand and looking whether the pre-hook wants to hear of it are two steps.
//!
//! The supervisor has no mailbox here: it answers at once. A peer's word may be on its way for any time, so no order is
//! lost by that.
#![allow(dead_code, unreachable_pub)]

pub mod executor;
pub mod explore;
pub mod rank;
pub mod side;
pub mod turn;
pub mod wander;
pub mod words;

use gatherflow_actors::plan::{BucketId, Storage};
use gatherflow_actors::{FirstGather, Overlap, Skip};

use self::executor::Op;

/// What all ranks of a run have in common, and what each does.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Parameters per bucket, by position in the gather order.
    pub members: Vec<u32>,
    /// Per unit, the positions of its buckets.
    pub units: Vec<Vec<usize>>,
    /// Per rank, how gathers overlap and with how many credits: it decides when, never which, so ranks may differ.
    pub modes: Vec<(Overlap, u32)>,
    /// Where gathers land: in `shared` gradients may be written only after the gather that zeroes them.
    pub storage: Storage,
    /// Where the first gathers of a version start; not the same on all ranks either.
    pub first_gather: Vec<FirstGather>,
    pub skip: Skip,
    pub overlap_grad_reduce: bool,
    pub steps_in_flight: u64,
    pub steps: u64,
    pub skipped: Vec<u64>,
    /// Collectives are issued by a thread of their own.
    pub issue_on_thread: bool,
    /// Other pipeline stages have the weight that is there twice: it is summed over these too.
    pub staged: bool,
    /// Digests are compared after every so many steps.
    pub compare_every: u64,
    /// Per rank, what its executor does.
    pub scripts: Vec<Vec<Op>>,
    /// What goes wrong, and on which rank.
    pub fault: Option<(Fault, usize)>,
}

impl Setup {
    pub fn ranks(&self) -> usize {
        self.scripts.len()
    }

    pub fn buckets(&self) -> usize {
        self.members.len()
    }

    /// The bucket at a position: numbers are not positions, so that nothing may confuse them.
    pub fn bucket_at(&self, position: usize) -> BucketId {
        BucketId(((position + 1) % self.buckets()) as u32)
    }

    pub fn position(&self, bucket: BucketId) -> usize {
        (bucket.0 as usize + self.buckets() - 1) % self.buckets()
    }

    pub fn updated(&self, step: u64) -> bool {
        !self.skipped.contains(&step)
    }

    /// Whether the buckets are gathered after a step.
    pub fn gathered(&self, step: u64) -> bool {
        self.skip == Skip::Device || self.updated(step)
    }

    /// How many steps are updated, from one on to another.
    pub fn updates(&self, steps: std::ops::RangeInclusive<u64>) -> u64 {
        steps.filter(|step| self.updated(*step)).count() as u64
    }

    /// Gathers of this rank wait to be opened.
    pub fn opens(&self, rank: usize) -> bool {
        self.first_gather[rank] != FirstGather::Step && self.modes[rank].0 != Overlap::None
    }

    /// Whether a weight is summed over stages: it needs two copies here.
    pub fn sums_over_stages(&self) -> bool {
        self.staged && self.buckets() > 1
    }

    /// How many gathers a unit needs.
    pub fn demand(&self, unit: usize) -> u32 {
        self.units[unit].iter().map(|position| *position as u32 + 1).max().unwrap_or(0)
    }
}

/// What is planted between the machines; the machines themselves stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The communicator's word that all gathers must go is lost.
    DrainLost,
    /// A peer's demand for a version that this rank has not reached is lost.
    EarlyPeerDemandLost,
    /// The supervisor does not tell the peers what this rank waits for.
    AnnouncementLost,
    /// The verdict reaches everyone but the communicator.
    VerdictLost,
    /// A bucket is called ready as soon as Adam was enqueued.
    ReadyBeforeItsGather,
    /// The gradients are called free once their reduce was issued.
    FreeBeforeAdam,
    /// The gradients are called free once Adam was enqueued, though their memory is still to be gathered in.
    FreeBeforeItsGather,
    /// The first gather of a version is issued after the second.
    GathersSwapped,
    /// The pre-hook has one credit more than it was given.
    OneCreditMore,
    /// The pre-hook lets the next gather go before the wait on the one before ended.
    ChainRunsAhead,
    /// A reduce is issued twice.
    ReducedTwice,
    /// A bucket tells twice that its gather was issued.
    GatheredTwice,
    /// The communicator takes a skipped step for an updated one.
    SkipUnheard,
    /// The host of one rank decides a skip that on the others the device decides.
    HostDecides,
    /// The verdict of a step arrives before that of the one before.
    VerdictsSwapped,
    /// The optimizer hears of a skipped step that it was updated.
    VerdictMistold,
    /// The pre-hook does not wait for gathers to be opened.
    NeverShut,
    /// The pre-hook does not hear that a future waits.
    AwaitedLost,
    /// The optimizer does not hear that a state was loaded.
    ResumeLost,
    /// A state is loaded without a wait for outcomes and gathers.
    ResumedEarly,
}

/// A rule that a message order broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Nothing can happen any more, and somebody is not finished.
    Deadlock(String),
    /// A unit was entered while the memory of one of its buckets had not the version that is read (V2, E5).
    StaleRead(String),
    /// A gradient was written before the step before it had used it, or before the gather that zeroes it (E6).
    EarlyWrite(String),
    /// Two ranks issued different collectives at the same place (O1, O2).
    OrderDiffers(String),
    /// A collective was issued twice, or one too many, or is missing.
    WrongCount(String),
    /// A gather went further ahead than credits reach (C1).
    CreditsExceeded(String),
    /// A gather went before the place from which on the configuration lets the first ones go (P2).
    NotOpened(String),
    /// Adam of an updated step was not given the row of its t (T1, T8).
    WrongRow(String),
    /// A machine refused a message (V1).
    WrongTransition(String),
    /// A supervisor ended everything.
    Poisoned(String),
}
