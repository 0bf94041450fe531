//! The control path between ranks: demand, digests, signs of life and the first cause. A side channel, never a collective.
//!
//! For ranks of one process it is shared memory: one board per rank with what others may look at, and one inbox per rank
//! into which peers put messages. A message that comes before its rank has started waits in the inbox.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gatherflow_kernels::{
    Cause, CollectiveKey, DeviceError, Failure, FailureKind, Link, LocalWorld, Members, Place, clock,
};
use parking_lot::{Condvar, Mutex};

use crate::busy::{Busy, Spell};
use crate::plan::Plan;

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
    /// It left while its thread panicked.
    panicked: AtomicBool,
    /// 1 + the first collective that it issued and, having left, will never finish; 0 while there is none.
    pub abandoned: AtomicU64,
    /// What it has declared itself busy with.
    spells: Mutex<Vec<Arc<Spell>>>,
    /// When it last ceased to be busy, on the clock of [`gatherflow_kernels::clock`]; 0: never.
    was_busy_ns: AtomicU64,
    /// A drill: it is dead, and says nothing more.
    vanished: AtomicBool,
}

impl Board {
    /// How it left, in words for a message that begins with the rank; `None` if it has not.
    pub fn how_it_left(&self) -> Option<&'static str> {
        let left = self.left.load(Ordering::SeqCst);
        left.then(|| if self.panicked.load(Ordering::SeqCst) { "left when its thread panicked" } else { "left" })
    }

    /// What the rank is busy with: of several declarations the one with the latest limit, whether or not that has passed.
    pub fn spell(&self) -> Option<Arc<Spell>> {
        self.spells.lock().iter().max_by_key(|spell| spell.until_ns).cloned()
    }

    pub(crate) fn begin_spell(&self, spell: &Arc<Spell>) {
        self.spells.lock().push(spell.clone());
    }

    pub(crate) fn end_spell(&self, spell: &Arc<Spell>, now_ns: u64) {
        self.was_busy_ns.fetch_max(now_ns.min(spell.until_ns), Ordering::SeqCst);
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.spells.lock().retain(|other| !Arc::ptr_eq(other, spell));
    }

    /// Whether the rank is busy within its limit, or was less than so long ago.
    pub(crate) fn busy_within(&self, limit_ns: u64, now_ns: u64) -> bool {
        let busy_ns = self.spell().map_or(0, |spell| now_ns.min(spell.until_ns));
        let last_ns = busy_ns.max(self.was_busy_ns.load(Ordering::SeqCst));
        last_ns > 0 && now_ns.saturating_sub(last_ns) <= limit_ns
    }
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

/// What ranks must agree on, line by line.
pub type Agreement = Vec<Line>;

/// One thing that ranks must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What it is.
    pub what: String,
    /// What this rank has.
    pub value: String,
    /// Who must have the same; this rank is one of them.
    pub among: Members,
}

impl Line {
    /// What all ranks must agree on.
    pub fn new(what: impl Into<String>, value: impl Into<String>) -> Self {
        Self { what: what.into(), value: value.into(), among: Members::ALL }
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} = {}", self.what, self.value)
    }
}

/// What a rank brings to a meeting.
#[derive(Debug, Default)]
struct Brought {
    lines: Agreement,
    /// What it has planned, where others want to see that.
    plan: Option<Arc<Plan>>,
}

#[derive(Debug, Default)]
struct Meeting {
    /// By round, then rank: what was brought.
    rounds: Vec<Vec<Option<Arc<Brought>>>>,
    /// By rank: the rounds that it has come to.
    came: Vec<usize>,
}

impl Meeting {
    fn of(ranks: usize) -> Self {
        Self { rounds: Vec::new(), came: vec![0; ranks] }
    }

    /// What this rank brings to its next round, and which one that is.
    fn bring(&mut self, rank: usize, brought: Brought) -> usize {
        let round = self.came[rank];
        self.came[rank] += 1;
        if round == self.rounds.len() {
            self.rounds.push(vec![None; self.came.len()]);
        }
        self.rounds[round][rank] = Some(Arc::new(brought));
        // Whoever comes to a round has left the one before, to which all had come: nobody looks at those before that.
        if let Some(over) = round.checked_sub(2) {
            self.rounds[over] = Vec::new();
        }
        round
    }
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
    /// What [`LocalWorld::new`] refuses: no ranks or too many, or a link without bandwidth.
    pub fn local(ranks: usize, link: Option<Link>) -> Result<Vec<Seat>, DeviceError> {
        let world = LocalWorld::new(ranks, link)?;
        let hub = Arc::new(Hub {
            boards: (0..ranks).map(|_| Board::default()).collect(),
            inboxes: (0..ranks).map(|_| Mutex::new(Inbox::Waiting(Vec::new()))).collect(),
            meeting: Mutex::new(Meeting::of(ranks)),
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

    /// This rank is busy with something for at most so long, until what is returned is dropped: peers that wait for it warn
    /// instead of failing.
    pub fn busy(&self, reason: impl Into<String>, limit: Duration) -> Busy {
        Busy::new(self.clone(), reason.into(), limit)
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

    /// Opens this rank's inbox and delivers what came before. A message that comes meanwhile may overtake those.
    pub fn open_inbox(&self, deliver: Deliver) {
        let deliver = Arc::new(deliver);
        let before = std::mem::replace(&mut *self.hub.inboxes[self.rank].lock(), Inbox::Open(deliver.clone()));
        if let Inbox::Waiting(messages) = before {
            for message in messages {
                deliver(message);
            }
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
        self.board().panicked.fetch_or(std::thread::panicking(), Ordering::SeqCst);
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
        self.meet_with(Brought { lines: agreement, plan: None }, limit).map(drop)
    }

    /// Start-up of a job of several pipeline stages, before [`Control::meet`]: every rank shows its plan and sees all others', by
    /// rank. Those who do not come to show a plan bring another division line.
    ///
    /// # Errors
    /// As [`Control::meet`].
    pub fn show(&self, division: Line, plan: &Arc<Plan>, limit: Duration) -> Result<Vec<Arc<Plan>>, Cause> {
        let brought = Brought { lines: vec![division], plan: Some(plan.clone()) };
        let shown = self.meet_with(brought, limit)?;
        Ok(shown.iter().filter_map(|brought| brought.plan.clone()).collect())
    }

    fn meet_with(&self, brought: Brought, limit: Duration) -> Result<Vec<Arc<Brought>>, Cause> {
        let late = |rank: usize| {
            format!(
                "rank {rank} did not start within {} s (deadline `start_up`); is its process or thread running?",
                limit.as_secs_f64()
            )
        };
        let all = self.assemble(brought, limit, &late)?;
        let Some(difference) = first_difference(&all) else { return Ok(all) };
        let message = format!(
            "ranks must agree before they start: {difference}; register the same model and use the same configuration on \
             every rank"
        );
        Err(self.first_cause(&Arc::new(Failure::new(FailureKind::StartUp, self.rank, message))))
    }

    /// Every rank brings something, waits for all others, and learns the first line in which two ranks differ, the same one on
    /// every rank. `late` says what it means that a rank did not come within the limit; a busy one may take longer.
    ///
    /// # Errors
    /// On every rank alike: a rank that left or did not come, or the job's first cause.
    pub fn compare(
        &self,
        lines: Agreement,
        limit: Duration,
        late: &dyn Fn(usize) -> String,
    ) -> Result<Option<String>, Cause> {
        Ok(first_difference(&self.assemble(Brought { lines, plan: None }, limit, late)?))
    }

    /// Waits until every rank has come, and returns what they brought, by rank.
    fn assemble(
        &self,
        brought: Brought,
        limit: Duration,
        late: &dyn Fn(usize) -> String,
    ) -> Result<Vec<Arc<Brought>>, Cause> {
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let mut deadline = clock::deadline(limit);
        let mut meeting = self.hub.meeting.lock();
        let round = meeting.bring(self.rank, brought);
        self.hub.met.notify_all();
        loop {
            if let Some(cause) = self.failed() {
                return Err(cause);
            }
            let brought = &meeting.rounds[round];
            let failure = match brought.iter().position(Option::is_none) {
                None => return Ok(brought.iter().flatten().cloned().collect()),
                Some(rank) if let Some(left) = self.hub.boards[rank].how_it_left() => {
                    let message = format!("rank {rank} {left}, before it came to where the others wait for it");
                    Failure::new(FailureKind::RankLost, rank, message)
                }
                Some(rank) => {
                    let timed_out = self.hub.met.wait_until(&mut meeting, deadline).timed_out();
                    if !timed_out || meeting.rounds[round][rank].is_some() {
                        continue;
                    }
                    if self.hub.boards[rank].busy_within(limit_ns, clock::now_ns()) {
                        deadline = clock::deadline(limit);
                        continue;
                    }
                    Failure::new(FailureKind::Deadline, rank, late(rank))
                }
            };
            drop(meeting);
            return Err(self.first_cause(&Arc::new(failure)));
        }
    }
}

/// Compares each rank's lines with those of the first rank that must have the same.
fn first_difference(brought: &[Arc<Brought>]) -> Option<String> {
    (1..brought.len()).find_map(|rank| {
        let most = brought[..=rank].iter().map(|brought| brought.lines.len()).max().unwrap_or(0);
        (0..most).find_map(|at| difference_at(brought, rank, at))
    })
}

/// How a rank's line at an index differs from what others have, or a line that another has there and must share with it.
fn difference_at(brought: &[Arc<Brought>], rank: usize, at: usize) -> Option<String> {
    let ranks = brought.len();
    // Lines mostly come in the same order everywhere.
    let same = |other: usize, what: &str| {
        let lines = &brought[other].lines;
        let found = lines.get(at).filter(|line| line.what == what);
        found.or_else(|| lines.iter().find(|line| line.what == what))
    };
    let shown = |other: usize, line: Option<&Line>| {
        let line = line.or_else(|| brought[other].lines.get(at).filter(|line| line.among.slot_of(rank).is_some()));
        format!("rank {other} has {}", line.map_or_else(|| "nothing".to_string(), ToString::to_string))
    };
    let mine = brought[rank].lines.get(at);
    if let Some(mine) = mine {
        let first = mine.among.ranks(ranks).next().unwrap_or(0);
        let theirs = same(first, &mine.what);
        if theirs != Some(mine) {
            return Some(format!("{}, rank {rank} has {mine}", shown(first, theirs)));
        }
    }
    (0..rank).find_map(|first| {
        let theirs = brought[first].lines.get(at)?;
        let leads = theirs.among.ranks(ranks).next() == Some(first) && theirs.among.slot_of(rank).is_some();
        let missing = leads && same(rank, &theirs.what).is_none();
        missing.then(|| format!("rank {first} has {theirs}, {}", shown(rank, None)))
    })
}

#[cfg(test)]
mod tests;
