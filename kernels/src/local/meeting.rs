//! Meetings: one per sequence number and list of members, from the first one's arrival to the last one's leaving.
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
use crate::members::Members;

/// The table of meetings.
#[derive(Debug)]
pub(super) struct Meetings {
    link: Option<Link>,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// By sequence number: meetings that share no rank.
    open: HashMap<u64, Vec<Meeting>>,
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
    members: Members,
    /// Who came first.
    first: usize,
    /// By slot.
    posts: Vec<Option<Post>>,
    arrived: usize,
    /// When the last rank's stream reached it.
    reached_ns: u64,
    done: usize,
    left: usize,
    met: Option<Met>,
    changed: Arc<Condvar>,
}

/// What one rank comes with, besides its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Brought<'a> {
    pub(super) key: CollectiveKey,
    pub(super) shape: Shape,
    pub(super) members: &'a Members,
    /// The next one belongs to the same call.
    pub(super) more: bool,
}

/// All members are there.
#[derive(Clone, Debug)]
pub(super) struct Met {
    /// Everyone's memory, by slot.
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
        slot: usize,
        brought: Brought<'_>,
        post: Post,
        reached_ns: u64,
    ) -> Result<Met, CommError> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        table.may_go_on(rank)?;
        let Brought { key, shape, members, .. } = brought;
        let count = members.count(table.aborted.len());
        let meetings = table.open.entry(key.seq).or_default();
        let found = meetings.iter().position(|meeting| meeting.members.meet(members));
        let index = found.unwrap_or(meetings.len());
        if found.is_none() {
            meetings.push(Meeting::new(brought, rank, count));
        }
        let meeting = &mut meetings[index];
        if meeting.key != key || meeting.shape != shape || meeting.members != *members {
            let theirs = (meeting.first, meeting.brought().to_string());
            let mismatch = Mismatch { seq: key.seq, sides: [theirs, (rank, brought.to_string())] };
            let error = mismatch.seen_by(rank);
            table.mismatch = Some(mismatch);
            table.wake_all();
            return Err(error);
        }
        if meeting.posts[slot].is_some() {
            let reason = format!("rank {rank} brought {key} twice");
            return Err(CommError::Shape { seq: key.seq, reason });
        }
        meeting.posts[slot] = Some(post);
        meeting.arrived += 1;
        meeting.reached_ns = meeting.reached_ns.max(reached_ns);
        let changed = meeting.changed.clone();
        if meeting.arrived == count {
            let posts = meeting.posts.iter().flatten().copied().collect();
            let (begin_ns, end_ns) = self.book(&mut table.free_ns, brought, meeting.reached_ns);
            let met = Met { posts, begin_ns, end_ns };
            meeting.met = Some(met.clone());
            changed.notify_all();
            return Ok(met);
        }
        loop {
            changed.wait(&mut guard);
            if let Some(met) = guard.meeting(key.seq, rank).and_then(|meeting| meeting.met.clone()) {
                return Ok(met);
            }
            if let Err(error) = guard.may_go_on(rank) {
                guard.withdraw(rank, slot, key.seq);
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
        let Some(meeting) = table.meeting(seq, rank) else { return Ok(()) };
        let changed = meeting.changed.clone();
        meeting.done += 1;
        if meeting.done == ranks {
            changed.notify_all();
        }
        while table.meeting(seq, rank).is_some_and(|meeting| meeting.done < ranks) {
            changed.wait(&mut table);
        }
        let outlasted = met.end_ns.map_or(Ok(()), |end_ns| sleep_until(&mut table, rank, end_ns, &changed));
        if let Some(meeting) = table.meeting(seq, rank) {
            meeting.left += 1;
            if meeting.left == ranks {
                table.close(seq, rank);
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
        while self.table.lock().open.values().flatten().map(|meeting| meeting.arrived).sum::<usize>() < arrivals {
            std::thread::yield_now();
        }
    }

    /// Takes the directions of the link that the shape needs: when the transfer begins and ends.
    fn book(&self, free_ns: &mut [[u64; 2]], brought: Brought<'_>, reached_ns: u64) -> (u64, Option<u64>) {
        let Brought { shape, members, more, .. } = brought;
        let Some(link) = self.link else { return (now_ns(), None) };
        let world = free_ns.len();
        let needs = |slot: usize, direction: usize| match shape {
            Shape::AllGather { .. } | Shape::ReduceScatter { .. } | Shape::AllReduce { .. } => true,
            Shape::Broadcast { root, .. } => (slot == root) == (direction == SENDS),
        };
        let both = members.ranks(world).enumerate().flat_map(|(slot, r)| [(slot, r, SENDS), (slot, r, RECEIVES)]);
        let needed: Vec<_> = both.filter(|&(slot, _, d)| needs(slot, d)).map(|(_, r, d)| (r, d)).collect();
        let begin = needed.iter().map(|&(r, d)| free_ns[r][d]).fold(reached_ns, u64::max);
        let end = begin.saturating_add(link.cost_ns(shape.wire_bytes(members.count(world)), more));
        for (r, d) in needed {
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

    /// The open meeting under this number that this rank is a member of.
    fn meeting(&mut self, seq: u64, rank: usize) -> Option<&mut Meeting> {
        self.open.get_mut(&seq)?.iter_mut().find(|meeting| meeting.members.slot_of(rank).is_some())
    }

    fn withdraw(&mut self, rank: usize, slot: usize, seq: u64) {
        let Some(meeting) = self.meeting(seq, rank) else { return };
        meeting.posts[slot] = None;
        meeting.arrived -= 1;
        if meeting.arrived == 0 {
            self.close(seq, rank);
        }
    }

    fn close(&mut self, seq: u64, rank: usize) {
        let Some(meetings) = self.open.get_mut(&seq) else { return };
        meetings.retain(|meeting| meeting.members.slot_of(rank).is_none());
        if meetings.is_empty() {
            self.open.remove(&seq);
        }
    }

    fn wake_all(&self) {
        for meeting in self.open.values().flatten() {
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
    fn new(brought: Brought<'_>, first: usize, members: usize) -> Self {
        Self {
            key: brought.key,
            shape: brought.shape,
            members: brought.members.clone(),
            first,
            posts: vec![None; members],
            arrived: 0,
            reached_ns: 0,
            done: 0,
            left: 0,
            met: None,
            changed: Arc::new(Condvar::new()),
        }
    }

    fn brought(&self) -> Brought<'_> {
        Brought { key: self.key, shape: self.shape, members: &self.members, more: false }
    }
}

impl std::fmt::Display for Brought<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} as {}", self.key, self.shape)?;
        if *self.members == Members::ALL { Ok(()) } else { write!(f, " of {}", self.members) }
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
