//! The issuing thread: where issuing a collective may block, it must not block the actors.
//!
//! Whether it may is the communicator's property. Where it cannot, collectives are issued inline and nothing here runs. A
//! call that is stuck keeps its thread and what it holds; nobody waits for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::Sender;
use gatherflow_kernels::{CollectiveKey, Comm, DeviceError, Event, Failure, FailureKind, clock};

use crate::action::{After, Letter};
use crate::communicator::CommunicatorMsg;
use crate::hands::{Hands, Outstanding, Post};
use crate::supervisor::SupervisorMsg;

/// Issues collectives: inline, or on a thread of its own.
#[derive(Debug)]
pub(crate) enum Issuer {
    /// Issuing never blocks.
    Inline(Comm, Call),
    /// Issuing may block; requests go to the thread in order.
    Thread(Sender<(CollectiveKey, After, bool)>),
}

/// The collectives of one call so far: their event comes with the last.
#[derive(Debug, Default)]
pub(crate) struct Call(Vec<CollectiveKey>);

impl Call {
    /// Issues one more, and notes all of them with the last.
    fn issue(
        &mut self,
        hands: &Hands,
        comm: &mut Comm,
        key: CollectiveKey,
        after: &After,
        more: bool,
    ) -> Result<Option<Event>, DeviceError> {
        hands.issue(comm, key, after, more)?;
        self.0.push(key);
        if more {
            return Ok(None);
        }
        let event = hands.conclude(&self.0)?;
        self.0.drain(..).for_each(|key| hands.note_issued(key, &event));
        Ok(Some(event))
    }
}

impl Issuer {
    /// The issuer that the communicator needs.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(comm: Comm, hands: &Arc<Hands>, post: &Arc<dyn Post>) -> Result<Self, DeviceError> {
        if !comm.may_block() {
            return Ok(Self::Inline(comm, Call::default()));
        }
        let (sender, requests) = crossbeam_channel::unbounded::<(CollectiveKey, After, bool)>();
        let (hands, post) = (hands.clone(), post.clone());
        let (mut comm, mut call) = (comm, Call::default());
        std::thread::Builder::new()
            .name(format!("gf-issue-{}", comm.rank()))
            .spawn(move || {
                for (key, after, more) in requests {
                    let issue = || call.issue(&hands, &mut comm, key, &after, more).map_err(|e| hands.failure(&e));
                    let issued = catch_unwind(AssertUnwindSafe(issue)).unwrap_or_else(|_| {
                        let message = format!("the issuing thread panicked while it issued the {key}");
                        Err(Arc::new(Failure::new(FailureKind::Collective, hands.control.rank(), message)))
                    });
                    match issued {
                        Ok(None) => {}
                        Ok(Some(event)) => {
                            post.post(Letter::Communicator(CommunicatorMsg::Issued { key, event }));
                        }
                        Err(cause) => {
                            post.post(Letter::Supervisor(SupervisorMsg::Failed(cause)));
                            return;
                        }
                    }
                }
            })
            .map_err(|e| DeviceError::Thread { reason: e.to_string() })?;
        Ok(Self::Thread(sender))
    }

    /// Issues a collective; the event if that happened at once and the call has no more.
    pub(crate) fn issue(
        &mut self,
        hands: &Hands,
        key: CollectiveKey,
        after: After,
        more: bool,
    ) -> Result<Option<Event>, DeviceError> {
        match self {
            Self::Inline(comm, call) => call.issue(hands, comm, key, &after, more),
            Self::Thread(sender) => {
                let open = Outstanding { key, event: None, since_ns: clock::now_ns() };
                hands.outstanding.lock().push_back(open);
                // A closed channel means that the thread failed and has told the supervisor.
                let _ = sender.send((key, after, more));
                Ok(None)
            }
        }
    }
}
