//! The hands of the machines: they carry out [`Action`]s on a device, for every shell alike.
//!
//! A *turn* gives one message to a machine and carries out what it asks for, feeding the events of enqueued work back
//! until it asks for nothing more. The ractor shells and the inline loop differ only in how messages are delivered.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gatherflow_kernels::{
    Cause, CollectiveKey, CollectiveKind, Comm, Device, DeviceError, Event, Failure, FailureKind, StreamId, Work, clock,
};
use parking_lot::Mutex;

use crate::action::{Action, After, Edge, Letter, Machine, WrongTransition};
use crate::bucket::BucketMsg;
use crate::control::Control;
use crate::face::Face;
use crate::issuer::Issuer;
use crate::lowering::Lowering;
use crate::optimizer::OptimizerMsg;
use crate::sequence::digest_of;
use crate::supervisor::SupervisorMsg;

/// Delivers messages to actors. Never blocks; a message to an actor that is gone is dropped.
pub(crate) trait Post: Send + Sync + std::fmt::Debug {
    fn post(&self, letter: Letter);
}

/// The streams of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    pub(crate) executor: StreamId,
    pub(crate) optimizer: StreamId,
    pub(crate) reduce: StreamId,
    pub(crate) gather: StreamId,
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
    /// Tests leave out the waits of one edge, to see the checker find it.
    pub(crate) dropped_edge: Option<Edge>,
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
    fn stream_of(&self, op: &crate::action::Op) -> StreamId {
        match op {
            crate::action::Op::ZeroGradients { .. } => self.streams.reduce,
            _ => self.streams.optimizer,
        }
    }

    /// Issues a collective behind events; the event behind it comes back.
    pub(crate) fn issue(&self, comm: &mut Comm, key: CollectiveKey, after: &After) -> Result<Event, DeviceError> {
        let on = if key.kind == CollectiveKind::Gather { self.streams.gather } else { self.streams.reduce };
        self.wait_all(on, after)?;
        comm.issue(on, self.lowering.collective(key))?;
        Ok(self.device.record(on))
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

    /// The oldest collective that is not over, and since when it is outstanding.
    pub(crate) fn oldest_outstanding(&self) -> Option<(CollectiveKey, u64)> {
        let mut outstanding = self.outstanding.lock();
        trim(&mut outstanding);
        outstanding.front().map(|o| (o.key, o.since_ns))
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

    /// Ends everything on this rank with this cause.
    pub(crate) fn poison(&self, cause: &Cause) {
        tracing::error!(target: "gatherflow::supervisor", rank = self.control.rank(), %cause, "poisoned");
        self.device.poison(cause.clone());
        self.face.fail(cause);
    }

    /// Gives a machine one message and carries out what it asks for.
    ///
    /// # Errors
    /// The failure of this turn; the caller tells the supervisor.
    pub(crate) fn turn<M: Machine>(
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
            Action::Issue { key, after } => {
                let Some(issuer) = issuer else {
                    let message = format!("an actor without the right to do so issued the {key}");
                    return Err(Arc::new(Failure::new(FailureKind::Actor, self.control.rank(), message)));
                };
                if let Some(event) = issuer.issue(self, key, after).map_err(device)? {
                    return Ok(M::issued(key, event));
                }
            }
            Action::WhenVerdict { event, step } => {
                let (report, post) = (self.lowering.report().clone(), post.clone());
                let notify = move |ended: Result<(), Cause>| match (ended, report.get()) {
                    (Ok(()), Some(report)) => {
                        post.post(Letter::Optimizer(OptimizerMsg::Verdict { step, report: Box::new(report) }));
                    }
                    (Ok(()), None) => {
                        let failure = Failure::new(FailureKind::Device, 0, "the verdict left no report").at_step(step);
                        post.post(Letter::Supervisor(SupervisorMsg::Failed(Arc::new(failure))));
                    }
                    (Err(cause), _) => post.post(Letter::Supervisor(SupervisorMsg::Failed(cause))),
                };
                self.device.when(&event, Box::new(notify));
            }
            Action::LetGo { bucket, version, after_entry } => {
                let entry = after_entry.then(|| self.device.record(self.streams.executor));
                post.post(Letter::Bucket(bucket, BucketMsg::Gather { version, entry }));
            }
            Action::Publish(publication) => self.face.publish(publication),
            Action::Announce(message) => self.control.tell_others(&message),
            Action::Poison(cause) => self.poison(&cause),
        }
        Ok(None)
    }
}

fn trim(outstanding: &mut VecDeque<Outstanding>) {
    while outstanding.front().is_some_and(|o| o.event.as_ref().is_some_and(Event::is_done)) {
        outstanding.pop_front();
    }
}
