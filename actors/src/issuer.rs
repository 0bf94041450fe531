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
    Inline(Comm),
    /// Issuing may block; requests go to the thread in order.
    Thread(Sender<(CollectiveKey, After)>),
}

impl Issuer {
    /// The issuer that the communicator needs.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(comm: Comm, hands: &Arc<Hands>, post: &Arc<dyn Post>) -> Result<Self, DeviceError> {
        if !comm.may_block() {
            return Ok(Self::Inline(comm));
        }
        let (sender, requests) = crossbeam_channel::unbounded::<(CollectiveKey, After)>();
        let (hands, post) = (hands.clone(), post.clone());
        let mut comm = comm;
        std::thread::Builder::new()
            .name(format!("gf-issue-{}", comm.rank()))
            .spawn(move || {
                for (key, after) in requests {
                    let issue = AssertUnwindSafe(|| hands.issue(&mut comm, key, &after).map_err(|e| hands.failure(&e)));
                    let issued = catch_unwind(issue).unwrap_or_else(|_| {
                        let message = format!("the issuing thread panicked while it issued the {key}");
                        Err(Arc::new(Failure::new(FailureKind::Collective, hands.control.rank(), message)))
                    });
                    match issued {
                        Ok(event) => {
                            hands.note_issued(key, &event);
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

    /// Issues a collective; the event if that happened at once.
    pub(crate) fn issue(
        &mut self,
        hands: &Hands,
        key: CollectiveKey,
        after: After,
    ) -> Result<Option<Event>, DeviceError> {
        match self {
            Self::Inline(comm) => {
                let event = hands.issue(comm, key, &after)?;
                hands.note_issued(key, &event);
                Ok(Some(event))
            }
            Self::Thread(sender) => {
                let open = Outstanding { key, event: None, since_ns: clock::now_ns() };
                hands.outstanding.lock().push_back(open);
                // A closed channel means that the thread failed and has told the supervisor.
                let _ = sender.send((key, after));
                Ok(None)
            }
        }
    }
}
