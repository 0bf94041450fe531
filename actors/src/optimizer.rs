//! The optimizer: when all shards are reduced, one verdict, then fused Adam per bucket by place.
//!
//! Owns the groups' hyperparameters and their step counts t. Hears from the executor (step), the buckets (shard reduced),
//! the communicator (the small all-gather is issued) and the device (verdict). Enqueues, in this order: norm partials
//! behind each reduce (edge E2), for copies of a weight behind their sum, and that behind the last of their reduces (edge T0);
//! where other pipeline stages have copies too, the communicator sums over those in between;
//! the fold behind all partials, the verdict behind the small all-gather, and Adam of every bucket behind the last reads of the
//! version it overwrites (edge E3). The verdict moves the loss scale, so it comes behind the executor's read of that (edge E7).
//!
//! Adam reads the verdict on the device. Where the host decides a skip ([`Skip::Host`]) it is told before it lets gathers go,
//! and a skipped step has none. Where the device decides ([`Skip::Device`]) the step is over for the host once Adam is enqueued:
//! gathers go whatever the verdict will be, the next step may begin, and the device picks Adam's row among those of each number
//! of updated steps that the unknown verdicts leave possible. Outcomes come in the order of steps.
//!
//! A skipped step changes no parameter, no moment and no t (SPEC T7). Both ways give the same bits.

use std::collections::VecDeque;
use std::sync::Arc;

use gatherflow_kernels::Event;
use gatherflow_kernels::adam::{AdamRow, AdamRows};
use gatherflow_kernels::verdict::{HostVerdict, StepReport};

use crate::action::{Action, After, Edge, Letter, Machine, Op, Publication, StepOutcome, WrongTransition};
use crate::bucket::BucketMsg;
use crate::communicator::CommunicatorMsg;
use crate::copies::Copies;
pub use crate::copies::CopySet;
use crate::plan::{BucketId, ParamId};
use crate::prehook::PreHookMsg;

/// Who decides that a step is skipped, and so that it has no gathers (SPEC T7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Skip {
    /// The host: gathers wait until it knows the verdict.
    #[default]
    Host,
    /// The device: gathers do not wait, and move unchanged bytes.
    Device,
}

/// The hyperparameters of one optimizer group that do not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Decay of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment; above 0.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decoupled weight decay (`AdamW`).
    pub decoupled: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, decoupled: true }
    }
}

/// The learning rates of one group for every t that this step may turn out to have.
#[derive(Clone, Debug, PartialEq)]
pub struct LrRow {
    /// The t of `values[0]`; the first step ever has t = 1.
    pub first_t: u64,
    /// One learning rate per t.
    pub values: Vec<f64>,
}

impl LrRow {
    /// The same learning rate whatever t is.
    pub fn constant(lr: f64) -> Self {
        Self { first_t: 1, values: vec![lr] }
    }

    /// The learning rate at `t`; beyond the row its nearest end.
    pub fn at(&self, t: u64) -> f64 {
        let index = t.saturating_sub(self.first_t).min(self.values.len().saturating_sub(1) as u64);
        self.values.get(index as usize).copied().unwrap_or(0.0)
    }
}

/// A bucket whose gradients were not all reported when `step` was called.
#[derive(Clone, Debug)]
pub struct CloseBucket {
    /// Which bucket.
    pub bucket: BucketId,
    /// Parameters that nobody wrote.
    pub zero: Vec<ParamId>,
    /// Behind the last writes of the others.
    pub writes: Vec<Event>,
}

/// What the executor says with `step`.
#[derive(Clone, Debug)]
pub struct StepStart {
    /// The number of steps before it.
    pub step: u64,
    /// Learning rates per group.
    pub lrs: Vec<LrRow>,
    /// What only the host knows.
    pub host: HostVerdict,
    /// Buckets that still wait for gradients, in reduce order.
    pub close: Vec<CloseBucket>,
    /// Behind the last reads of the old version, one per reader stream.
    pub readers: Arc<[Event]>,
    /// Behind the executor's last read of the loss scale on the device, if there was one.
    pub scale_read: Option<Event>,
}

/// What the optimizer hears.
#[derive(Clone, Debug)]
pub enum OptimizerMsg {
    /// Executor: `step` was called.
    Step(Box<StepStart>),
    /// Executor: the steps so far are over, and the next ones go on from these updated steps per group.
    Resume {
        /// Updated steps, per group.
        t: Vec<u64>,
    },
    /// Bucket: its reduce was issued.
    ShardReduced {
        /// The step.
        step: u64,
        /// Which bucket.
        bucket: BucketId,
        /// Behind the reduce.
        event: Event,
        /// Behind the bucket's last gather, which reads the shard that Adam overwrites.
        gathered: Event,
    },
    /// Own feedback: norm partials were enqueued.
    PartialsEnqueued,
    /// Own feedback: the sum of this rank's copies of a weight was enqueued.
    CopiesSummed {
        /// Which set of copies.
        set: usize,
        /// Behind it.
        event: Event,
    },
    /// Communicator: the sum of a weight over pipeline stages was issued.
    StagedSummed {
        /// The step.
        step: u64,
        /// The number of the weight.
        weight: u32,
        /// Behind it.
        event: Event,
    },
    /// Own feedback: the fold was enqueued.
    Folded {
        /// Behind it.
        event: Event,
    },
    /// Communicator: the small all-gather was issued.
    SmallIssued {
        /// The step.
        step: u64,
        /// Behind it.
        event: Event,
    },
    /// Own feedback: the verdict was enqueued.
    Judged {
        /// The step.
        step: u64,
        /// Behind it.
        event: Event,
    },
    /// Own feedback: Adam of a bucket was enqueued.
    AdamEnqueued {
        /// Which bucket.
        bucket: BucketId,
        /// Behind it.
        event: Event,
    },
    /// Device: the verdict is known.
    Verdict {
        /// The step.
        step: u64,
        /// What the device left.
        report: Box<StepReport>,
    },
}

/// Where a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Shards come in; `step` may or may not have been called.
    Reducing,
    /// All partials are enqueued and folded; the small all-gather was asked for.
    Exchanging,
    /// The verdict is enqueued; Adam is not, or the host has to know the verdict before the step is over.
    Judging,
}

/// The state machine of the optimizer.
#[derive(Clone, Debug)]
pub struct Optimizer {
    groups: Vec<Group>,
    skip: Skip,
    t: Vec<u64>,
    /// Steps updated so far, as far as verdicts are known: the device counts on from there.
    updates: u64,
    /// Steps whose verdict is enqueued and not known, with their learning rates.
    judging: VecDeque<(u64, Vec<LrRow>)>,
    /// Buckets in gather order: the order of Adam.
    order: Vec<BucketId>,
    copies: Copies,
    step: u64,
    phase: Phase,
    reduced: usize,
    /// Behind the last gather, by bucket (edge E3).
    gathered: Vec<Option<Event>>,
    /// What `step` said, until it is used up.
    start: Option<Box<StepStart>>,
    /// Steps called before the one before them was judged.
    next: VecDeque<Box<StepStart>>,
    adam: Vec<(BucketId, Event)>,
    readers: Arc<[Event]>,
}

impl Optimizer {
    /// An optimizer over buckets in gather order.
    pub fn new(groups: Vec<Group>, order: Vec<BucketId>) -> Self {
        Self {
            t: vec![0; groups.len()],
            groups,
            skip: Skip::Host,
            updates: 0,
            judging: VecDeque::new(),
            adam: Vec::with_capacity(order.len()),
            gathered: vec![None; order.len()],
            order,
            copies: Copies::default(),
            step: 0,
            phase: Phase::Reducing,
            reduced: 0,
            start: None,
            next: VecDeque::new(),
            readers: Arc::from([]),
        }
    }

    /// The same, with somebody else deciding skips.
    #[must_use]
    pub fn deciding(self, skip: Skip) -> Self {
        Self { skip, ..self }
    }

    /// The same, which sums the reduced shards of each of these sets of copies.
    #[must_use]
    pub fn summing(self, copies: Vec<CopySet>) -> Self {
        Self { copies: Copies::new(copies), ..self }
    }

    /// Successful steps so far, per group.
    pub fn t(&self) -> &[u64] {
        &self.t
    }

    fn wrong(&self, message: &OptimizerMsg) -> WrongTransition {
        WrongTransition {
            actor: "optimizer actor",
            bucket: None,
            state: format!(
                "step {}, {:?}, {} of {} shards reduced, step {}called",
                self.step,
                self.phase,
                self.reduced,
                self.order.len(),
                if self.start.is_some() { "" } else { "not " }
            ),
            message: format!("{message:?}"),
        }
    }

    /// Where the host decides, a verdict ends the step, and that needs every Adam to be enqueued.
    fn expects_verdict(&self, step: u64) -> bool {
        let enqueued = self.phase == Phase::Judging && self.adam.len() == self.order.len();
        self.judging.front().is_some_and(|(oldest, _)| *oldest == step) && (self.skip == Skip::Device || enqueued)
    }

    /// Nothing of a step has come, and every verdict is known.
    fn is_between_steps(&self) -> bool {
        self.reduced == 0 && self.start.is_none() && self.judging.is_empty()
    }

    fn begin(&mut self, mut start: Box<StepStart>, actions: &mut Vec<Action>) {
        for close in std::mem::take(&mut start.close) {
            actions.push(Action::Send(Letter::Bucket(
                close.bucket,
                BucketMsg::Close { step: self.step, zero: close.zero, writes: close.writes },
            )));
        }
        self.start = Some(start);
        self.fold_if_complete(actions);
    }

    /// Norm partials of a reduced shard; of copies once they are summed.
    fn measure(&mut self, bucket: BucketId, event: Event, actions: &mut Vec<Action>) {
        let Some(set) = self.copies.set_of(bucket) else {
            actions.push(Action::Enqueue { op: Op::NormPartials { bucket }, after: vec![(Edge::E2, event)] });
            return;
        };
        let Some(after) = self.copies.reduced(set, event) else { return };
        match self.copies.set(set) {
            // What one copy comes to is the sum over stages.
            Some(CopySet { buckets, staged: Some(weight) }) if buckets.len() == 1 => {
                let request = CommunicatorMsg::StagedSum { step: self.step, weight: *weight, after };
                actions.push(Action::Send(Letter::Communicator(request)));
            }
            _ => actions.push(Action::Enqueue { op: Op::SumCopies { set }, after }),
        }
    }

    /// The sum of this rank's copies goes to the other stages, or to the copies.
    fn summed_here(&mut self, set: usize, event: Event, actions: &mut Vec<Action>) {
        match self.copies.set(set).and_then(|set| set.staged) {
            Some(weight) => {
                let after = vec![(Edge::T0, event)];
                let request = CommunicatorMsg::StagedSum { step: self.step, weight, after };
                actions.push(Action::Send(Letter::Communicator(request)));
            }
            None => self.spread(set, After::new(), actions),
        }
    }

    /// A sum to all copies, and norm partials of each behind that on the same stream.
    fn spread(&mut self, set: usize, after: After, actions: &mut Vec<Action>) {
        self.copies.summed();
        let Some(CopySet { buckets, .. }) = self.copies.set(set) else { return };
        actions.push(Action::Enqueue { op: Op::SpreadCopies { set }, after });
        let partials = |bucket: &BucketId| Op::NormPartials { bucket: *bucket };
        actions.extend(buckets.iter().map(partials).map(|op| Action::Enqueue { op, after: Vec::new() }));
    }

    /// Once every shard is reduced and `step` was called: this rank's record, for the small all-gather.
    fn fold_if_complete(&mut self, actions: &mut Vec<Action>) {
        if self.reduced < self.order.len() || self.copies.is_open() || self.phase != Phase::Reducing {
            return;
        }
        let Some(start) = &self.start else { return };
        self.phase = Phase::Exchanging;
        actions.push(Action::Enqueue { op: Op::Fold { host: start.host }, after: Vec::new() });
    }

    /// One row of scalars per group, for each t that this step may have if it is updated: any of the steps before it whose
    /// verdicts are unknown may be updated or not.
    fn rows(&self, lrs: &[LrRow]) -> AdamRows {
        let row = |unknown: u64, ((group, t), lr): ((&Group, &u64), &LrRow)| {
            let t = t + 1 + unknown;
            AdamRow::new(lr.at(t), group.betas, group.eps, group.weight_decay, group.decoupled, t)
        };
        let groups = || self.groups.iter().zip(&self.t).zip(lrs);
        let rows = (0..=self.judging.len() as u64).flat_map(|unknown| groups().map(move |group| row(unknown, group)));
        AdamRows::new(self.updates + 1, groups().len(), rows)
    }

    fn judged(&mut self, event: Event, actions: &mut Vec<Action>) {
        self.phase = Phase::Judging;
        if self.skip == Skip::Device {
            // The executor may read the next loss scale where the host does not know it.
            actions.push(Action::Publish(Publication::Judged { steps: self.step + 1, event: event.clone() }));
        }
        actions.push(Action::WhenVerdict { event, step: self.step });
        let mut lrs = Vec::new();
        if let Some(start) = self.start.take() {
            self.readers = start.readers;
            lrs = start.lrs;
        }
        let rows = self.rows(&lrs);
        self.judging.push_back((self.step, lrs));
        for &bucket in &self.order {
            let gathered = self.gathered[bucket.0 as usize].take();
            let after = self.readers.iter().cloned().chain(gathered).map(|event| (Edge::E3, event)).collect();
            actions.push(Action::Enqueue { op: Op::Adam { bucket, rows: rows.clone() }, after });
        }
        self.go_on_if_enqueued(actions);
    }

    /// Where the device decides, the step is over for the host once its last Adam is enqueued.
    fn go_on_if_enqueued(&mut self, actions: &mut Vec<Action>) {
        if self.skip == Skip::Device && self.adam.len() == self.order.len() {
            self.release(true, actions);
            self.go_on(actions);
        }
    }

    /// The verdict of the oldest step that awaits one.
    fn known(&mut self, report: StepReport, actions: &mut Vec<Action>) {
        let Some((step, lrs)) = self.judging.pop_front() else { return };
        let lrs = lrs.iter().zip(&self.t).map(|(row, t)| row.at(t + 1)).collect();
        let updated = report.updated;
        if updated {
            self.updates += 1;
            self.t.iter_mut().for_each(|t| *t += 1);
        }
        if self.skip == Skip::Host {
            self.release(updated, actions);
        }
        let t = self.t.clone();
        actions.push(Action::Publish(Publication::Outcome(Arc::new(StepOutcome { step, report, lrs, t }))));
        if self.skip == Skip::Host {
            self.go_on(actions);
        }
    }

    /// The new version: buckets, communicator and pre-hook hear whether gathers make it.
    fn release(&mut self, updated: bool, actions: &mut Vec<Action>) {
        let version = self.step + 1;
        for (bucket, adam) in self.adam.drain(..) {
            let message = if updated {
                BucketMsg::Updated { version, adam, readers: self.readers.clone() }
            } else {
                BucketMsg::Skipped { version, adam }
            };
            actions.push(Action::Send(Letter::Bucket(bucket, message)));
        }
        actions.push(Action::Send(Letter::Communicator(CommunicatorMsg::Verdict { step: self.step, updated })));
        actions.push(Action::Send(Letter::PreHook(PreHookMsg::StepFinished { version, updated })));
    }

    fn go_on(&mut self, actions: &mut Vec<Action>) {
        self.step += 1;
        self.phase = Phase::Reducing;
        self.reduced = 0;
        self.copies.begin();
        if let Some(next) = self.next.pop_front() {
            self.begin(next, actions);
        }
    }
}

impl Machine for Optimizer {
    type Msg = OptimizerMsg;

    fn on(&mut self, message: OptimizerMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match (message, self.phase) {
            (OptimizerMsg::Step(start), Phase::Reducing) if start.step == self.step && self.start.is_none() => {
                self.begin(start, actions);
            }
            (OptimizerMsg::Step(start), _) if start.step == self.step + 1 + self.next.len() as u64 => {
                self.next.push_back(start);
            }
            (OptimizerMsg::Resume { t }, Phase::Reducing) if self.is_between_steps() && t.len() == self.t.len() => {
                self.t = t;
            }
            (OptimizerMsg::ShardReduced { step, bucket, event, gathered }, Phase::Reducing)
                if step == self.step && self.reduced < self.order.len() =>
            {
                self.reduced += 1;
                self.gathered[bucket.0 as usize] = Some(gathered);
                self.measure(bucket, event, actions);
                self.fold_if_complete(actions);
            }
            (OptimizerMsg::PartialsEnqueued, Phase::Reducing | Phase::Exchanging) => {}
            (OptimizerMsg::CopiesSummed { set, event }, Phase::Reducing) => {
                self.summed_here(set, event, actions);
                self.fold_if_complete(actions);
            }
            (OptimizerMsg::StagedSummed { step, weight, event }, Phase::Reducing) if step == self.step => {
                let Some(set) = self.copies.of_weight(weight).filter(|_| self.copies.is_open()) else {
                    return Err(self.wrong(&OptimizerMsg::StagedSummed { step, weight, event }));
                };
                self.spread(set, vec![(Edge::T0, event)], actions);
                self.fold_if_complete(actions);
            }
            (OptimizerMsg::Folded { event }, Phase::Exchanging) => {
                actions.push(Action::Send(Letter::Communicator(CommunicatorMsg::Small {
                    step: self.step,
                    after: vec![(Edge::E2, event)],
                })));
            }
            (OptimizerMsg::SmallIssued { step, event }, Phase::Exchanging) if step == self.step => {
                let scale_read = self.start.as_ref().and_then(|start| start.scale_read.clone());
                let read = scale_read.map(|event| (Edge::E7, event));
                let after = std::iter::once((Edge::E2, event)).chain(read).collect();
                actions.push(Action::Enqueue { op: Op::Verdict { step }, after });
            }
            (OptimizerMsg::Judged { step, event }, Phase::Exchanging) if step == self.step => {
                self.judged(event, actions);
            }
            (OptimizerMsg::AdamEnqueued { bucket, event }, Phase::Judging) if self.adam.len() < self.order.len() => {
                self.adam.push((bucket, event));
                self.go_on_if_enqueued(actions);
            }
            (OptimizerMsg::Verdict { step, report }, _) if self.expects_verdict(step) => self.known(*report, actions),
            (message, _) => return Err(self.wrong(&message)),
        }
        Ok(())
    }

    fn enqueued(op: Op, event: Event) -> Option<OptimizerMsg> {
        match op {
            Op::SpreadCopies { .. } | Op::NormPartials { .. } => Some(OptimizerMsg::PartialsEnqueued),
            Op::SumCopies { set } => Some(OptimizerMsg::CopiesSummed { set, event }),
            Op::Fold { .. } => Some(OptimizerMsg::Folded { event }),
            Op::Verdict { step } => Some(OptimizerMsg::Judged { step, event }),
            Op::Adam { bucket, .. } => Some(OptimizerMsg::AdamEnqueued { bucket, event }),
            Op::ZeroGradients { .. } | Op::ZeroBucket { .. } | Op::FindNonFinite { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests;
