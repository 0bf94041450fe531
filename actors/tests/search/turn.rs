//! A machine with the hash of its state, a letter with its own, and a turn.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};
use std::rc::Rc;

use gatherflow_actors::action::{Action, Letter, Machine, Op, WrongTransition};
use gatherflow_kernels::Event;

/// A machine and the hash of its state, made when it is asked for.
#[derive(Clone)]
pub struct Slot<M> {
    pub machine: Rc<M>,
    hash: u64,
}

impl<M: Clone + std::fmt::Debug> Slot<M> {
    pub fn new(machine: M) -> Self {
        Self { machine: Rc::new(machine), hash: 0 }
    }

    pub fn machine(&mut self) -> &mut M {
        self.hash = 0;
        Rc::make_mut(&mut self.machine)
    }

    pub fn fingerprint(&mut self) -> u64 {
        if self.hash == 0 {
            self.hash = hash_of_debug(&self.machine) | 1;
        }
        self.hash
    }
}

/// Hashes what `{:?}` writes: the whole state, without the types having to be hashable.
pub fn hash_of_debug(value: &dyn std::fmt::Debug) -> u64 {
    struct Sink(DefaultHasher);
    impl Write for Sink {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0.write(text.as_bytes());
            Ok(())
        }
    }
    let mut sink = Sink(DefaultHasher::new());
    let _ = write!(sink, "{value:?}");
    sink.0.finish()
}

/// A letter in a mailbox, and its hash once it was asked for.
pub struct Posted {
    pub letter: Letter,
    hash: std::cell::OnceCell<u64>,
}

impl Posted {
    pub fn new(letter: Letter) -> Self {
        Self { letter, hash: std::cell::OnceCell::new() }
    }

    pub fn fingerprint(&self) -> u64 {
        *self.hash.get_or_init(|| hash_of_debug(&self.letter))
    }
}

/// What a turn asked for, in order, with the feedback of enqueued work given back at once.
pub struct Turn {
    pub actions: Vec<Action>,
    pub wants_demand: Option<bool>,
    pub stream: u64,
    pub demand: (u64, u32),
    pub waited: (u64, u32),
    pub on_thread: bool,
}

impl Turn {
    /// As the hands of the runtime do it.
    pub fn take<M: Machine>(&mut self, machine: &mut M, message: M::Msg) -> Result<(), WrongTransition> {
        let mut next = Some(message);
        let mut asked = Vec::new();
        while let Some(message) = next.take() {
            machine.on(message, &mut asked)?;
            while !asked.is_empty() {
                for action in std::mem::take(&mut asked) {
                    let feedback = match &action {
                        Action::Enqueue { op, after } => {
                            let behind = after.iter().map(|(_, event)| event.id()).max().unwrap_or(0);
                            let behind = if matches!(op, Op::ZeroGradients { .. } | Op::ZeroBucket { .. }) {
                                behind
                            } else {
                                self.stream = self.stream.max(behind);
                                self.stream
                            };
                            M::enqueued(op.clone(), Event::done(behind))
                        }
                        Action::Issue { key, more: false, .. } if !self.on_thread => {
                            M::issued(*key, Event::done(key.seq + 1))
                        }
                        _ => None,
                    };
                    self.actions.push(action);
                    if let Some(feedback) = feedback {
                        machine.on(feedback, &mut asked)?;
                    }
                }
            }
            if let Some(wants) = machine.waits_for_demand() {
                self.wants_demand = Some(wants);
                next = machine.catch_up(self.demand, self.waited);
            }
        }
        Ok(())
    }
}
