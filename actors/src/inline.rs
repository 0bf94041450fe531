//! The plain loop: the same machines without threads, driven on the caller's thread until nothing is left to do.
//!
//! For tests, simulation and measuring what the actors cost. Deterministic: letters are delivered in the order in which they
//! were posted. There are no deadlines here, so it is for devices that complete by themselves (`null`).

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::action::{ActorName, Letter};
use crate::hands::{Hands, Post};
use crate::issuer::Issuer;
use crate::machines::Machines;
use crate::supervisor::SupervisorMsg;

#[derive(Debug)]
struct Loop {
    machines: Machines,
    issuer: Issuer,
}

/// Delivers letters by running the machines at once.
#[derive(Debug)]
pub(crate) struct Inline {
    queue: Mutex<VecDeque<Letter>>,
    state: Mutex<Option<Loop>>,
    hands: Arc<Hands>,
    me: Weak<Inline>,
}

impl Inline {
    pub(crate) fn new(hands: &Arc<Hands>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            queue: Mutex::default(),
            state: Mutex::new(None),
            hands: hands.clone(),
            me: me.clone(),
        })
    }

    pub(crate) fn start(&self, machines: Machines, issuer: Issuer) {
        *self.state.lock() = Some(Loop { machines, issuer });
    }

    fn deliver(&self, run: &mut Loop, letter: Letter, post: &Arc<dyn Post>) {
        let hands = &self.hands;
        let machines = &mut run.machines;
        let result = match letter {
            Letter::Bucket(bucket, message) => {
                let (name, machine) = (ActorName::Bucket(bucket), &mut machines.buckets[bucket.0 as usize]);
                hands.turn(name, machine, message, None, post)
            }
            Letter::PreHook(message) => hands.turn(ActorName::PreHook, &mut machines.prehook, message, None, post),
            Letter::Optimizer(message) => {
                hands.turn(ActorName::Optimizer, &mut machines.optimizer, message, None, post)
            }
            Letter::Communicator(message) => {
                let (name, issuer) = (ActorName::Communicator, Some(&mut run.issuer));
                hands.turn(name, &mut machines.communicator, message, issuer, post)
            }
            Letter::Supervisor(message) => {
                hands.turn(ActorName::Supervisor, &mut machines.supervisor, message, None, post)
            }
        };
        if let Err(cause) = result {
            self.queue.lock().push_back(Letter::Supervisor(SupervisorMsg::Failed(cause)));
        }
    }
}

impl Post for Inline {
    fn post(&self, letter: Letter) {
        self.queue.lock().push_back(letter);
        let Some(me) = self.me.upgrade() else { return };
        let post: Arc<dyn Post> = me;
        // A letter posted while the loop runs is taken up by that loop.
        while let Some(mut state) = self.state.try_lock() {
            let Some(run) = state.as_mut() else { return };
            loop {
                let Some(letter) = self.queue.lock().pop_front() else { break };
                self.deliver(run, letter, &post);
            }
            drop(state);
            self.hands.face.wake_for_facts();
            if self.queue.lock().is_empty() {
                return;
            }
        }
    }
}
