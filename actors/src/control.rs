//! The control path between ranks: demand, digests, signs of life and the first cause. A side channel, never a collective.
//!
//! For ranks of one process it is shared memory: one board per rank with what others may look at, and one inbox per rank
//! into which peers put messages. A message that comes before its rank has started waits in the inbox.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gatherflow_kernels::{Cause, CollectiveKey, DeviceError, Failure, FailureKind, Link, LocalWorld, Place};
use parking_lot::{Condvar, Mutex};

/// What ranks tell each other.
#[derive(Clone, Debug)]
pub enum ControlMsg {
    /// `from` waits for the first `demanded` gathers of `version` (rule O4).
    Demand {
        /// Who waits.
        from: usize,
        /// For which version.
        version: u64,
        /// A prefix of the gather order.
        demanded: u32,
    },
    /// Everything ends with this cause.
    Failed(Cause),
    /// `from` closed or dropped its engine.
    Left {
        /// Who left.
        from: usize,
    },
    /// The digest of all collectives up to and including `step` (rule O2).
    Digest {
        /// Whose.
        from: usize,
        /// The step.
        step: u64,
        /// The digest.
        digest: u64,
    },
    /// The last entries behind a digest that did not agree.
    History {
        /// Whose.
        from: usize,
        /// The step of the digest.
        step: u64,
        /// The entries since the digest before it.
        entries: Arc<[CollectiveKey]>,
    },
}

/// What others may look at without a message.
#[derive(Debug, Default)]
pub struct Board {
    /// Counts the executor's calls: its sign of progress.
    pub progress: AtomicU64,
    /// How many collectives it has issued.
    pub issued: AtomicU64,
    /// 1 + the newest collective that its reduce stream has begun, as [`gatherflow_kernels::Device::begun`] says it.
    pub begun_reduce: AtomicU64,
    /// The same of its gather stream.
    pub begun_gather: AtomicU64,
    /// Its supervisor's last heartbeat, on the clock of [`gatherflow_kernels::clock`].
    pub alive_ns: AtomicU64,
    /// It closed or dropped its engine.
    pub left: AtomicBool,
    /// 1 + the first collective that it issued and, having left, will never finish; 0 while there is none.
    pub abandoned: AtomicU64,
    /// A drill: it is dead, and says nothing more.
    vanished: AtomicBool,
}

/// Takes the messages of one rank.
pub type Deliver = Box<dyn Fn(ControlMsg) + Send + Sync>;

#[derive(Default)]
enum Inbox {
    #[default]
    Gone,
    Waiting(Vec<ControlMsg>),
    Open(Arc<Deliver>),
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gone => "Gone",
            Self::Waiting(_) => "Waiting",
            Self::Open(_) => "Open",
        })
    }
}

/// What ranks must agree on before they start, line by line: `(what, value)`.
pub type Agreement = Vec<(String, String)>;

#[derive(Debug, Default)]
struct Meeting {
    brought: Vec<Option<Arc<Agreement>>>,
}

/// The control path of one process.
#[derive(Debug)]
struct Hub {
    boards: Vec<Board>,
    inboxes: Vec<Mutex<Inbox>>,
    meeting: Mutex<Meeting>,
    met: Condvar,
    /// The job's first cause.
    first: OnceLock<Cause>,
}

/// One rank's place: its transport's world and its end of the control path. Not `Clone`: a place is taken once.
#[derive(Debug)]
pub struct Seat {
    world: Arc<LocalWorld>,
    hub: Arc<Hub>,
    rank: usize,
    taken: bool,
}

/// The ranks of a job.
#[derive(Debug)]
pub struct Ranks;

impl Ranks {
    /// `ranks` ranks as threads of this process, over an emulated link if one is given. Give each thread its seat.
    ///
    /// # Errors
    /// What [`LocalWorld::new`] refuses: no ranks, or a link without bandwidth.
    pub fn local(ranks: usize, link: Option<Link>) -> Result<Vec<Seat>, DeviceError> {
        let world = LocalWorld::new(ranks, link)?;
        let hub = Arc::new(Hub {
            boards: (0..ranks).map(|_| Board::default()).collect(),
            inboxes: (0..ranks).map(|_| Mutex::new(Inbox::Waiting(Vec::new()))).collect(),
            meeting: Mutex::new(Meeting { brought: vec![None; ranks] }),
            met: Condvar::new(),
            first: OnceLock::new(),
        });
        Ok((0..ranks).map(|rank| Seat { world: world.clone(), hub: hub.clone(), rank, taken: false }).collect())
    }
}

impl Seat {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.hub.boards.len()
    }

    /// Where a device is opened.
    pub fn place(&self) -> Place {
        Place { world: self.world.clone(), rank: self.rank }
    }

    /// This rank's end of the control path.
    pub fn control(&self) -> Control {
        Control { hub: self.hub.clone(), rank: self.rank }
    }
}

impl Seat {
    /// From now on the session speaks for this rank.
    pub(crate) fn taken(mut self) {
        self.taken = true;
    }
}

impl Drop for Seat {
    /// A seat that was never taken leaves, so that nobody waits for it.
    fn drop(&mut self) {
        if !self.taken {
            self.control().leave();
        }
    }
}

/// One rank's end of the control path.
#[derive(Clone, Debug)]
pub struct Control {
    hub: Arc<Hub>,
    rank: usize,
}

impl Control {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.hub.boards.len()
    }

    /// This rank's board.
    pub fn board(&self) -> &Board {
        &self.hub.boards[self.rank]
    }

    /// Everybody's boards, by rank.
    pub fn boards(&self) -> &[Board] {
        &self.hub.boards
    }

    /// The job's first cause: of all failures on all ranks the one that came here first, which is what everyone gets. Two
    /// ranks that fail at the same moment agree on one of the two.
    pub fn first_cause(&self, cause: &Cause) -> Cause {
        if self.vanished() {
            return cause.clone();
        }
        let first = self.hub.first.get_or_init(|| cause.clone()).clone();
        self.wake_meeting();
        first
    }

    /// The job's first cause, once there is one.
    pub fn failed(&self) -> Option<Cause> {
        self.hub.first.get().filter(|_| !self.vanished()).cloned()
    }

    /// Whoever waits at the meeting looks again.
    fn wake_meeting(&self) {
        drop(self.hub.meeting.lock());
        self.hub.met.notify_all();
    }

    /// Tells every other rank. One that has gone hears nothing.
    pub fn tell_others(&self, message: &ControlMsg) {
        if self.vanished() {
            return;
        }
        for peer in (0..self.ranks()).filter(|peer| *peer != self.rank) {
            self.tell(peer, message.clone());
        }
    }

    /// Tells one rank. One that has gone, or that never was, hears nothing.
    pub fn tell(&self, peer: usize, message: ControlMsg) {
        let Some(inbox) = self.hub.inboxes.get(peer).filter(|_| !self.vanished()) else { return };
        let deliver = match &mut *inbox.lock() {
            Inbox::Gone => return,
            Inbox::Waiting(messages) => return messages.push(message),
            Inbox::Open(deliver) => deliver.clone(),
        };
        deliver(message);
    }

    /// Opens this rank's inbox; what came before is delivered first.
    pub fn open_inbox(&self, deliver: Deliver) {
        let deliver = Arc::new(deliver);
        let before = std::mem::replace(&mut *self.hub.inboxes[self.rank].lock(), Inbox::Open(deliver.clone()));
        if let Inbox::Waiting(messages) = before {
            messages.into_iter().for_each(|message| deliver(message));
        }
    }

    /// A drill: from now on this rank is as dead as a killed process.
    pub(crate) fn vanish(&self) {
        self.board().vanished.store(true, Ordering::SeqCst);
    }

    fn vanished(&self) -> bool {
        self.board().vanished.load(Ordering::SeqCst)
    }

    /// This rank goes: its inbox closes and the others hear of it, once.
    pub fn leave(&self) {
        *self.hub.inboxes[self.rank].lock() = Inbox::Gone;
        if !self.vanished() && !self.board().left.swap(true, Ordering::SeqCst) {
            self.wake_meeting();
            self.tell_others(&ControlMsg::Left { from: self.rank });
        }
    }

    /// Start-up: every rank brings what must agree and waits for all others.
    ///
    /// # Errors
    /// On every rank alike: the first line in which two ranks differ, a rank that left, or one that did not come within
    /// the limit.
    pub fn meet(&self, agreement: Agreement, limit: Duration) -> Result<(), Cause> {
        let deadline = Instant::now() + limit;
        let mut meeting = self.hub.meeting.lock();
        meeting.brought[self.rank] = Some(Arc::new(agreement));
        self.hub.met.notify_all();
        loop {
            if let Some(cause) = self.failed() {
                return Err(cause);
            }
            let missing = (0..self.ranks()).find(|rank| meeting.brought[*rank].is_none());
            let failure = match missing {
                None => match first_difference(&meeting.brought) {
                    None => return Ok(()),
                    Some(message) => Failure::new(FailureKind::StartUp, self.rank, message),
                },
                Some(rank) if self.hub.boards[rank].left.load(Ordering::SeqCst) => {
                    Failure::new(FailureKind::RankLost, rank, format!("rank {rank} left before it started"))
                }
                Some(rank) => {
                    if !self.hub.met.wait_until(&mut meeting, deadline).timed_out() || meeting.brought[rank].is_some() {
                        continue;
                    }
                    let message = format!(
                        "rank {rank} did not start within {} s (deadline `start_up`); is its process or thread running?",
                        limit.as_secs_f64()
                    );
                    Failure::new(FailureKind::Deadline, rank, message)
                }
            };
            drop(meeting);
            return Err(self.first_cause(&Arc::new(failure)));
        }
    }
}

fn first_difference(brought: &[Option<Arc<Agreement>>]) -> Option<String> {
    let all: Vec<&Arc<Agreement>> = brought.iter().flatten().collect();
    let first = all.first()?;
    for (rank, other) in all.iter().enumerate().skip(1) {
        let lines = first.len().max(other.len());
        for line in 0..lines {
            let (mine, theirs) = (first.get(line), other.get(line));
            if mine != theirs {
                let show = |line: Option<&(String, String)>| {
                    line.map_or_else(|| "nothing".to_string(), |(what, value)| format!("{what} = {value}"))
                };
                return Some(format!(
                    "ranks must agree before they start: rank 0 has {}, rank {rank} has {}; register the same model and \
                     use the same configuration on every rank",
                    show(mine),
                    show(theirs)
                ));
            }
        }
    }
    None
}
