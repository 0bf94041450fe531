//! The hands of the machines: they carry out [`Action`]s on a device, for every shell alike.
//!
//! A *turn* gives one message to a machine and carries out what it asks for, feeding the events of enqueued work back
//! until it asks for nothing more. The ractor shells and the inline loop differ only in how messages are delivered.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gatherflow_kernels::{
    Cause, Collective, CollectiveKey, CollectiveKind, Comm, Device, DeviceError, Event, Failure, FailureKind, StreamId,
    StreamKind, Work, clock,
};
use parking_lot::Mutex;

use crate::action::{Action, ActorName, After, Edge, Letter, Machine, Op, WrongTransition};
use crate::bucket::BucketMsg;
use crate::control::{Control, ControlMsg};
use crate::drill::{Drill, Fault};
use crate::face::Face;
use crate::issuer::Issuer;
use crate::lowering::Lowering;
use crate::optimizer::OptimizerMsg;
use crate::sequence::digest_of;
use crate::supervisor::SupervisorMsg;

/// Delivers messages to actors. Never blocks; a message to an actor that is gone is dropped.
pub(crate) trait Post: Send + Sync + std::fmt::Debug {
    fn post(&self, letter: Letter);
    /// One of them is being handled.
    fn handled(&self) {}
}

/// The streams of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    pub(crate) executor: StreamId,
    pub(crate) optimizer: StreamId,
    pub(crate) reduce: StreamId,
    pub(crate) gather: StreamId,
}

impl Streams {
    /// One stream of each kind.
    pub(crate) fn of(device: &dyn Device) -> Result<Self, DeviceError> {
        Ok(Self {
            executor: device.stream(StreamKind::Executor)?,
            optimizer: device.stream(StreamKind::Optimizer)?,
            reduce: device.stream(StreamKind::Reduce)?,
            gather: device.stream(StreamKind::Gather)?,
        })
    }
}

/// A collective that was asked for and whose end nobody has seen yet.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) key: CollectiveKey,
    /// `None` while the issuing thread has it.
    pub(crate) event: Option<Event>,
    pub(crate) since_ns: u64,
}

/// Collectives counted as they are issued.
#[derive(Debug, Default)]
pub(crate) struct Issued {
    pub(crate) gathers: AtomicU64,
    pub(crate) reduces: AtomicU64,
    pub(crate) digest: AtomicU64,
}

/// What every shell of one rank shares.
#[derive(Debug)]
pub(crate) struct Hands {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) lowering: Lowering,
    pub(crate) streams: Streams,
    pub(crate) face: Arc<Face>,
    pub(crate) control: Control,
    pub(crate) issued: Issued,
    pub(crate) outstanding: Mutex<VecDeque<Outstanding>>,
    /// Kept from turn to turn, for all machines: the memory of two lists of actions.
    pub(crate) lists: Mutex<Lists>,
    /// The verdicts that are awaited: the step, the event behind each, and since when nothing else is in its way.
    pub(crate) judging: Mutex<VecDeque<(u64, Event, u64)>>,
    /// The session ends its actors: from now on their end is no failure.
    pub(crate) stopping: AtomicBool,
    /// Tests leave out the waits of one edge, to see the checker find it.
    pub(crate) dropped_edge: Option<Edge>,
    pub(crate) drill: Option<Drill>,
}

/// What a turn's machine has asked for, and what of it is being carried out.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    asked: Vec<Action>,
    batch: Vec<Action>,
}

impl Hands {
    pub(crate) fn wait(&self, on: StreamId, edge: Edge, event: &Event) -> Result<(), DeviceError> {
        if self.dropped_edge == Some(edge) {
            return Ok(());
        }
        self.device.wait(on, event)
    }

    fn wait_all(&self, on: StreamId, after: &After) -> Result<(), DeviceError> {
        after.iter().try_for_each(|(edge, event)| self.wait(on, *edge, event))
    }

    /// The stream on which an operation runs.
    fn stream_of(&self, op: &Op) -> StreamId {
        match op {
            Op::ZeroGradients { .. } | Op::ZeroBucket { .. } | Op::FindNonFinite { .. } => self.streams.reduce,
            _ => self.streams.optimizer,
        }
    }

    /// Issues a collective behind events.
    pub(crate) fn issue(
        &self,
        comm: &mut Comm,
        key: CollectiveKey,
        after: &After,
        more: bool,
    ) -> Result<(), DeviceError> {
        let on = self.wire(key);
        self.wait_all(on, after)?;
        comm.issue(on, Collective { more, ..self.lowering.collective(key) })
    }

    /// Ends a call with what belongs to its collectives; the event behind all of that comes back.
    pub(crate) fn conclude(&self, call: &[CollectiveKey]) -> Result<Event, DeviceError> {
        let mut on = self.streams.reduce;
        for &key in call {
            on = self.wire(key);
            for work in self.lowering.follow_up(key).into_iter().flatten() {
                self.device.enqueue(on, work)?;
            }
        }
        Ok(self.device.record(on))
    }

    /// The stream of a collective.
    fn wire(&self, key: CollectiveKey) -> StreamId {
        if key.kind == CollectiveKind::Gather { self.streams.gather } else { self.streams.reduce }
    }

    /// Counts an issued collective and keeps it until its end was seen.
    pub(crate) fn note_issued(&self, key: CollectiveKey, event: &Event) {
        match key.kind {
            CollectiveKind::Gather => self.issued.gathers.fetch_add(1, Ordering::Relaxed),
            CollectiveKind::Reduce => self.issued.reduces.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        // Collectives are issued one after the other, so this read-modify-write has one writer.
        let digest = self.issued.digest.load(Ordering::Relaxed);
        self.issued.digest.store(digest_of(digest, &key), Ordering::Relaxed);
        self.control.board().issued.store(key.seq + 1, Ordering::SeqCst);
        let mut outstanding = self.outstanding.lock();
        match outstanding.iter_mut().rev().find(|o| o.key.seq == key.seq) {
            Some(open) => open.event = Some(event.clone()),
            None if event.is_done() => {}
            None => outstanding.push_back(Outstanding { key, event: Some(event.clone()), since_ns: clock::now_ns() }),
        }
        trim(&mut outstanding);
    }

    /// The device has been poisoned because this rank leaves: peers learn what it issued and will never finish.
    pub(crate) fn abandon(&self) {
        let mut outstanding = self.outstanding.lock();
        trim(&mut outstanding);
        if let Some(first) = outstanding.front() {
            self.control.board().abandoned.store(first.key.seq + 1, Ordering::SeqCst);
        }
    }

    /// The oldest collective that is not over, and since when it is waited for: since it was issued, or since the one before
    /// it was over, whichever is later.
    pub(crate) fn oldest_outstanding(&self) -> Option<(CollectiveKey, u64)> {
        let mut outstanding = self.outstanding.lock();
        trim(&mut outstanding);
        outstanding.front().map(|o| (o.key, o.since_ns))
    }

    /// Keeps the verdict of a step until its end was seen.
    fn note_judging(&self, step: u64, event: &Event) {
        let mut judging = self.judging.lock();
        while judging.front().is_some_and(|(_, event, _)| event.is_done()) {
            judging.pop_front();
        }
        judging.push_back((step, event.clone(), clock::now_ns()));
    }

    /// The oldest step whose verdict is awaited, and since when all collectives before it are over.
    pub(crate) fn oldest_verdict(&self) -> Option<(u64, u64)> {
        let mut judging = self.judging.lock();
        let before = judging.len();
        while judging.front().is_some_and(|(_, event, _)| event.is_done()) {
            judging.pop_front();
        }
        let next_of_several = judging.len() < before;
        let (step, _, since_ns) = judging.front_mut()?;
        if next_of_several || self.oldest_outstanding().is_some() {
            *since_ns = clock::now_ns();
        }
        Some((*step, *since_ns))
    }

    /// Wraps what a device said into a failure of this rank.
    pub(crate) fn failure(&self, error: &DeviceError) -> Cause {
        match error {
            DeviceError::Poisoned(cause) => cause.clone(),
            other => Arc::new(Failure::new(FailureKind::Device, self.control.rank(), other.to_string())),
        }
    }

    fn wrong(&self, error: &WrongTransition) -> Cause {
        let failure = Failure::new(FailureKind::Actor, self.control.rank(), error.to_string());
        Arc::new(match error.bucket {
            Some(bucket) => failure.in_bucket(bucket.0),
            None => failure,
        })
    }

    /// Ends everything on this rank with the job's first cause, which this one is unless another came before it.
    pub(crate) fn poison(&self, cause: &Cause) -> Cause {
        let first = self.control.first_cause(cause);
        tracing::error!(
            target: "gatherflow::supervisor",
            rank = self.control.rank(),
            step = first.step,
            bucket = first.bucket,
            %cause,
            %first,
            "poisoned"
        );
        self.device.poison(first.clone());
        self.face.fail(&first);
        first
    }

    /// Ends everything on every rank, and returns the job's first cause. For whoever cannot rely on the supervisor.
    pub(crate) fn fail(&self, cause: &Cause) -> Cause {
        let first = self.poison(cause);
        self.control.tell_others(&ControlMsg::Failed(first.clone()));
        first
    }

    /// Gives a machine one message and carries out what it asks for. A panic is caught: it fails the turn.
    ///
    /// # Errors
    /// The failure of this turn; the caller tells the supervisor.
    pub(crate) fn turn<M: Machine>(
        self: &Arc<Self>,
        name: ActorName,
        machine: &mut M,
        message: M::Msg,
        issuer: Option<&mut Issuer>,
        post: &Arc<dyn Post>,
    ) -> Result<(), Cause> {
        let turn = AssertUnwindSafe(|| {
            if let Some(drill) = &self.drill
                && self.drilled(drill, name)?
            {
                return Ok(());
            }
            self.take_turn(machine, message, issuer, post)
        });
        // What a panic left half done is never used again: the failure poisons this rank.
        catch_unwind(turn).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Err(self.actor_failure(name, &format!("panicked: {}", text.unwrap_or("without a message"))))
        })
    }

    fn actor_failure(&self, name: ActorName, what: &str) -> Cause {
        let failure = Failure::new(FailureKind::Actor, self.control.rank(), format!("the {name} {what}"));
        Arc::new(match name {
            ActorName::Bucket(bucket) => failure.in_bucket(bucket.0),
            _ => failure,
        })
    }

    /// What the drill says to a message: whether nobody hears it.
    fn drilled(&self, drill: &Drill, name: ActorName) -> Result<bool, Cause> {
        if drill.thread_ends() {
            return Ok(true);
        }
        match drill.ask(name) {
            Fault::Nothing => return Ok(false),
            Fault::Delay(time) => {
                std::thread::sleep(time);
                return Ok(false);
            }
            Fault::Fail(reason) => return Err(self.actor_failure(name, &format!("failed: {reason}"))),
            Fault::Panic(text) => panic!("{text}"),
            Fault::EndThread => {}
            Fault::Vanish => self.control.vanish(),
        }
        drill.end_thread();
        Ok(true)
    }

    fn take_turn<M: Machine>(
        self: &Arc<Self>,
        machine: &mut M,
        message: M::Msg,
        issuer: Option<&mut Issuer>,
        post: &Arc<dyn Post>,
    ) -> Result<(), Cause> {
        let mut issuer = issuer;
        let mut next = Some(message);
        // Turns follow one another on one thread, so nobody waits for this lock.
        let mut lists = self.lists.lock();
        let Lists { asked, batch } = &mut *lists;
        asked.clear();
        while let Some(message) = next.take() {
            machine.on(message, asked).map_err(|e| self.wrong(&e))?;
            while !asked.is_empty() {
                std::mem::swap(asked, batch);
                for action in batch.drain(..) {
                    if let Some(feedback) = self.perform::<M>(action, issuer.as_deref_mut(), post)? {
                        machine.on(feedback, asked).map_err(|e| self.wrong(&e))?;
                    }
                }
            }
            if let Some(wants) = machine.waits_for_demand() {
                self.face.set_wants_demand(wants);
                next = machine.catch_up(self.face.demand(), self.face.waited());
            }
        }
        Ok(())
    }

    fn perform<M: Machine>(
        self: &Arc<Self>,
        action: Action,
        issuer: Option<&mut Issuer>,
        post: &Arc<dyn Post>,
    ) -> Result<Option<M::Msg>, Cause> {
        let device = |e: DeviceError| self.failure(&e);
        match action {
            Action::Send(letter) => post.post(letter),
            Action::Enqueue { op, after } => {
                let on = self.stream_of(&op);
                self.wait_all(on, &after).map_err(device)?;
                let mut result = Ok(());
                self.lowering.lower(&op, &mut |work: Work| {
                    if result.is_ok() {
                        result = self.device.enqueue(on, work);
                    }
                });
                result.map_err(device)?;
                return Ok(M::enqueued(op, self.device.record(on)));
            }
            Action::Issue { key, after, more } => {
                let Some(issuer) = issuer else {
                    let message = format!("an actor without the right to do so issued the {key}");
                    return Err(Arc::new(Failure::new(FailureKind::Actor, self.control.rank(), message)));
                };
                if let Some(event) = issuer.issue(self, key, after, more).map_err(device)? {
                    return Ok(M::issued(key, event));
                }
            }
            Action::WhenVerdict { event, step } => {
                let (report, post, rank) = (self.lowering.report().clone(), post.clone(), self.control.rank());
                let notify = move |ended: Result<(), Cause>| match (ended, report.take(step)) {
                    (Ok(()), Some(report)) => {
                        post.post(Letter::Optimizer(OptimizerMsg::Verdict { step, report: Box::new(report) }));
                    }
                    (Ok(()), None) => {
                        let failure =
                            Failure::new(FailureKind::Device, rank, "the verdict left no report").at_step(step);
                        post.post(Letter::Supervisor(SupervisorMsg::Failed(Arc::new(failure))));
                    }
                    (Err(cause), _) => post.post(Letter::Supervisor(SupervisorMsg::Failed(cause))),
                };
                self.note_judging(step, &event);
                self.device.when(&event, Box::new(notify));
            }
            Action::LetGo { bucket, version, after_entry } => {
                let entry = after_entry.then(|| self.device.record(self.streams.executor));
                post.post(Letter::Bucket(bucket, BucketMsg::Gather { version, entry }));
            }
            Action::Publish(publication) => self.face.publish(publication),
            Action::Announce(message) => self.control.tell_others(&message),
            Action::Tell { to, message } => self.control.tell(to, message),
            Action::Poison(cause) => drop(self.poison(&cause)),
        }
        Ok(None)
    }
}

/// Forgets what is over. That is progress: the next one is waited for from now on.
fn trim(outstanding: &mut VecDeque<Outstanding>) {
    let before = outstanding.len();
    while outstanding.front().is_some_and(|o| o.event.as_ref().is_some_and(Event::is_done)) {
        outstanding.pop_front();
    }
    if outstanding.len() < before
        && let Some(next) = outstanding.front_mut()
    {
        next.since_ns = clock::now_ns();
    }
}
