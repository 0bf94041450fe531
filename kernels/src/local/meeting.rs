//! Meetings: one per sequence number, from the first rank's arrival to the last one's leaving.
//!
//! One lock guards the table; each meeting has its own condition variable, so ranks that wait for different collectives
//! do not wake each other. Nothing spins and nothing sleeps with the lock held. The modelled clock of the emulated link
//! is part of the table: per rank and direction the time at which it is free again. A transfer starts when all ranks'
//! streams have reached it and all directions it needs are free, and ends by the model, never by "now plus duration": a
//! link goes on by itself, so neither a thread that wakes late nor one that arrives late for that reason slows it down.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::copy::Post;
use super::link::Link;
use super::shape::Shape;
use crate::clock::now_ns;
use crate::collective::CollectiveKey;
use crate::error::{Cause, CommError};

/// The table of meetings.
#[derive(Debug)]
pub(super) struct Meetings {
    link: Option<Link>,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    open: HashMap<u64, Meeting>,
    /// By rank: who was aborted, and why.
    aborted: Vec<Option<Cause>>,
    /// The first mismatch: nobody can go on after it.
    mismatch: Option<Mismatch>,
    /// By rank: when its sending and its receiving direction are free, in nanoseconds of [`crate::clock`].
    free_ns: Vec<[u64; 2]>,
}

#[derive(Debug)]
struct Meeting {
    key: CollectiveKey,
    shape: Shape,
    first: usize,
    posts: Vec<Option<Post>>,
    arrived: usize,
    /// When the last rank's stream reached it.
    reached_ns: u64,
    done: usize,
    left: usize,
    met: Option<Met>,
    changed: Arc<Condvar>,
}

/// All ranks are there.
#[derive(Clone, Debug)]
pub(super) struct Met {
    /// Everyone's memory.
    pub(super) posts: Arc<[Post]>,
    /// When the transfer begins.
    pub(super) begin_ns: u64,
    /// When it ends, if a link is emulated.
    pub(super) end_ns: Option<u64>,
}

/// Two ranks, and what each brought.
#[derive(Clone, Debug)]
struct Mismatch {
    seq: u64,
    sides: [(usize, String); 2],
}

const SENDS: usize = 0;
const RECEIVES: usize = 1;

impl Meetings {
    pub(super) fn new(ranks: usize, link: Option<Link>) -> Self {
        let table =
            Table { open: HashMap::new(), aborted: vec![None; ranks], mismatch: None, free_ns: vec![[0; 2]; ranks] };
        Self { link, table: Mutex::new(table) }
    }

    /// Phase 1: posts this rank's memory and waits for everyone else's.
    ///
    /// # Errors
    /// [`CommError`]; then the memory is withdrawn.
    pub(super) fn join(
        &self,
        rank: usize,
        key: CollectiveKey,
        shape: Shape,
        post: Post,
        reached_ns: u64,
    ) -> Result<Met, CommError> {
        let mut table = self.table.lock();
        table.may_go_on(rank)?;
        let ranks = table.aborted.len();
        let meeting = table.open.entry(key.seq).or_insert_with(|| Meeting::new(key, shape, rank, ranks));
        if meeting.key != key || meeting.shape != shape {
            let theirs = (meeting.first, format!("{} as {}", meeting.key, meeting.shape));
            let mismatch = Mismatch { seq: key.seq, sides: [theirs, (rank, format!("{key} as {shape}"))] };
            let error = mismatch.seen_by(rank);
            table.mismatch = Some(mismatch);
            table.wake_all();
            return Err(error);
        }
        if meeting.posts[rank].is_some() {
            let reason = format!("rank {rank} brought {key} twice");
            return Err(CommError::Shape { seq: key.seq, reason });
        }
        meeting.posts[rank] = Some(post);
        meeting.arrived += 1;
        meeting.reached_ns = meeting.reached_ns.max(reached_ns);
        let changed = meeting.changed.clone();
        if meeting.arrived == ranks {
            let posts = meeting.posts.iter().flatten().copied().collect();
            let reached_ns = meeting.reached_ns;
            let (begin_ns, end_ns) = self.book(&mut table.free_ns, shape, reached_ns);
            let met = Met { posts, begin_ns, end_ns };
            if let Some(meeting) = table.open.get_mut(&key.seq) {
                meeting.met = Some(met.clone());
            }
            changed.notify_all();
            return Ok(met);
        }
        loop {
            changed.wait(&mut table);
            if let Some(met) = table.open.get(&key.seq).and_then(|meeting| meeting.met.clone()) {
                return Ok(met);
            }
            if let Err(error) = table.may_go_on(rank) {
                table.withdraw(rank, key.seq);
                return Err(error);
            }
        }
    }

    /// Phase 3: waits until everyone is done, and until the emulated link is.
    ///
    /// # Errors
    /// [`CommError::Aborted`] if this rank was aborted while the link was busy; by then peers are done with its memory.
    pub(super) fn leave(&self, rank: usize, seq: u64, met: &Met) -> Result<(), CommError> {
        let mut table = self.table.lock();
        let ranks = met.posts.len();
        let Some(meeting) = table.open.get_mut(&seq) else { return Ok(()) };
        let changed = meeting.changed.clone();
        meeting.done += 1;
        if meeting.done == ranks {
            changed.notify_all();
        }
        while table.open.get(&seq).is_some_and(|meeting| meeting.done < ranks) {
            changed.wait(&mut table);
        }
        let outlasted = met.end_ns.map_or(Ok(()), |end_ns| sleep_until(&mut table, rank, end_ns, &changed));
        if let Some(meeting) = table.open.get_mut(&seq) {
            meeting.left += 1;
            if meeting.left == ranks {
                table.open.remove(&seq);
            }
        }
        outlasted
    }

    /// Ends this rank's waiting, now and later.
    pub(super) fn abort(&self, rank: usize, cause: &Cause) {
        let mut table = self.table.lock();
        table.aborted[rank].get_or_insert_with(|| cause.clone());
        table.wake_all();
    }

    /// Whether nobody is in a meeting.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.table.lock().open.is_empty()
    }

    /// Returns when as many ranks have posted their memory, over all meetings.
    #[cfg(test)]
    pub(super) fn wait_for_arrivals(&self, arrivals: usize) {
        while self.table.lock().open.values().map(|meeting| meeting.arrived).sum::<usize>() < arrivals {
            std::thread::yield_now();
        }
    }

    /// Takes the directions of the link that the shape needs: when the transfer begins and ends.
    fn book(&self, free_ns: &mut [[u64; 2]], shape: Shape, reached_ns: u64) -> (u64, Option<u64>) {
        let Some(link) = self.link else { return (now_ns(), None) };
        let ranks = free_ns.len();
        let needs = |rank: usize, direction: usize| match shape {
            Shape::AllGather { .. } | Shape::ReduceScatter { .. } => true,
            Shape::Broadcast { root, .. } => (rank == root) == (direction == SENDS),
        };
        let needed = || (0..ranks).flat_map(|r| [(r, SENDS), (r, RECEIVES)]).filter(|&(r, d)| needs(r, d));
        let begin = needed().map(|(r, d)| free_ns[r][d]).fold(reached_ns, u64::max);
        let end = begin.saturating_add(link.cost_ns(shape.wire_bytes(ranks)));
        for (r, d) in needed() {
            free_ns[r][d] = end;
        }
        (begin, Some(end))
    }
}

impl Table {
    fn may_go_on(&self, rank: usize) -> Result<(), CommError> {
        if let Some(cause) = &self.aborted[rank] {
            return Err(CommError::Aborted(cause.clone()));
        }
        self.mismatch.as_ref().map_or(Ok(()), |mismatch| Err(mismatch.seen_by(rank)))
    }

    fn withdraw(&mut self, rank: usize, seq: u64) {
        if let Some(meeting) = self.open.get_mut(&seq) {
            meeting.posts[rank] = None;
            meeting.arrived -= 1;
            if meeting.arrived == 0 {
                self.open.remove(&seq);
            }
        }
    }

    fn wake_all(&self) {
        for meeting in self.open.values() {
            meeting.changed.notify_all();
        }
    }
}

/// Sleeps until the modelled end of a transfer, or until this rank is aborted.
fn sleep_until(
    table: &mut MutexGuard<'_, Table>,
    rank: usize,
    end_ns: u64,
    changed: &Condvar,
) -> Result<(), CommError> {
    loop {
        if let Some(cause) = &table.aborted[rank] {
            return Err(CommError::Aborted(cause.clone()));
        }
        let left = end_ns.saturating_sub(now_ns());
        if left == 0 {
            return Ok(());
        }
        match Instant::now().checked_add(Duration::from_nanos(left)) {
            Some(end) => {
                changed.wait_until(table, end);
            }
            None => changed.wait(table),
        }
    }
}

impl Meeting {
    fn new(key: CollectiveKey, shape: Shape, first: usize, ranks: usize) -> Self {
        Self {
            key,
            shape,
            first,
            posts: vec![None; ranks],
            arrived: 0,
            reached_ns: 0,
            done: 0,
            left: 0,
            met: None,
            changed: Arc::new(Condvar::new()),
        }
    }
}

impl Mismatch {
    /// The error as this rank sees it: its own side first, if it has one.
    fn seen_by(&self, rank: usize) -> CommError {
        let [a, b] = &self.sides;
        let (mine, theirs) = if b.0 == rank { (b, a) } else { (a, b) };
        let (mine, theirs, peer) = (mine.1.clone(), theirs.1.clone(), theirs.0);
        let owner = if b.0 == rank { b.0 } else { a.0 };
        CommError::Mismatch { seq: self.seq, rank: owner, mine, peer, theirs }
    }
}
