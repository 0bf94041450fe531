//! Drills: what tests let go wrong inside a running session, message by message.
//!
//! A drill sits in the turn that gives a message to a machine, never in a machine. It is asked before each message of each
//! actor and says what happens instead of, or before, the turn. Without one a turn costs one look at an `Option`.
//! What goes wrong on a device has its own hook ([`gatherflow_kernels::cpu::BeforeWork`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::action::ActorName;

/// What happens before an actor takes a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: the message is taken.
    Nothing,
    /// The actors' thread sleeps first: this message and all behind it are late.
    Delay(Duration),
    /// The turn fails with this reason.
    Fail(String),
    /// The turn panics with this text.
    Panic(String),
    /// The thread that hosts the actors ends, without a word from any of them.
    EndThread,
    /// As if the process had been killed: the thread ends and nobody hears from this rank again, not even that it left.
    Vanish,
}

/// A drill of one rank.
#[derive(Clone)]
pub struct Drill {
    before_message: Arc<dyn Fn(ActorName) -> Fault + Send + Sync>,
    swapped: Option<(usize, usize)>,
    ended: Arc<AtomicBool>,
}

impl Drill {
    /// Called before each message, on the actor thread.
    pub fn before_message(hook: impl Fn(ActorName) -> Fault + Send + Sync + 'static) -> Self {
        Self { before_message: Arc::new(hook), swapped: None, ended: Arc::default() }
    }

    /// This rank issues in another order than the plan says: two positions of the gather order are swapped.
    pub fn swap(first: usize, second: usize) -> Self {
        Self { swapped: Some((first, second)), ..Self::before_message(|_| Fault::Nothing) }
    }

    pub(crate) fn ask(&self, actor: ActorName) -> Fault {
        (self.before_message)(actor)
    }

    pub(crate) fn swapped(&self) -> Option<(usize, usize)> {
        self.swapped
    }

    /// From now on the actors are deaf, and their thread ends at its next look.
    pub(crate) fn end_thread(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    pub(crate) fn thread_ends(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

impl std::fmt::Debug for Drill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drill").field("swapped", &self.swapped).finish_non_exhaustive()
    }
}
