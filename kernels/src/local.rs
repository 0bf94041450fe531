//! The local communicator: ranks are threads of one process.
//!
//! A [`LocalWorld`] is what the ranks share; each device is built over its rank's [`LocalTransport`]. A collective is a
//! meeting under its sequence number (`meeting`): everyone posts its memory and waits for all (phase 1), does its own
//! part, reading the peers' memory (phase 2, `copy`), and waits until all are done (phase 3), for as long as the
//! emulated [`Link`] pretends. Everyone is the collective's members; others meet under the same number on their own.
//!
//! Invariants: no rank's memory is touched before that rank is in the meeting, nor after its `run` returned (collective
//! contract); sums are in rank order and f32 (S1); ranks that bring different collectives under one number all hear of it
//! by name (O2), and so does every later call, because such a world cannot go on; an aborted rank leaves phase 1 at once,
//! while phase 2, which is finite, is always finished (F1). Aborting one rank leaves its peers waiting: whoever aborts
//! tells them.

mod copy;
mod link;
mod meeting;
mod shape;

use std::sync::Arc;

use crate::clock::now_ns;
use crate::collective::{Collective, HostMemory, Transfer, Transport};
use crate::error::{Cause, CommError, DeviceError};
use copy::Post;
pub use link::{Link, LinkError};
use meeting::{Brought, Meetings};
use shape::Shape;

/// Why there is no such world or rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// A world of no ranks.
    #[error("a world needs at least one rank")]
    NoRanks,
    /// The rank is not in the world.
    #[error("rank {rank} is not one of {ranks} ranks")]
    NoSuchRank {
        /// What was asked for.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// More ranks than a process has threads for.
    #[error("{ranks} ranks cannot be threads of one process: at most {MOST_RANKS} can")]
    TooManyRanks {
        /// How many were asked for.
        ranks: usize,
    },
    /// The emulated link makes no sense.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Most ranks of one process, each of which has several threads.
const MOST_RANKS: usize = 1 << 16;

/// What the ranks of one process share.
#[derive(Debug)]
pub struct LocalWorld {
    ranks: usize,
    meetings: Meetings,
}

impl LocalWorld {
    /// A world of `ranks` ranks, with an emulated link if one is given. One rank alone has no link.
    ///
    /// # Errors
    /// [`DeviceError::World`] without ranks, with more than a process has threads for, or if the link's numbers make no sense.
    pub fn new(ranks: usize, link: Option<Link>) -> Result<Arc<Self>, DeviceError> {
        if ranks == 0 {
            return Err(WorldError::NoRanks.into());
        }
        if ranks > MOST_RANKS {
            return Err(WorldError::TooManyRanks { ranks }.into());
        }
        let link = link.map(Link::checked).transpose().map_err(WorldError::from)?;
        Ok(Arc::new(Self { ranks, meetings: Meetings::new(ranks, link.filter(|_| ranks > 1)) }))
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The transport of one rank. Taken twice, the two share the rank's place in every meeting.
    ///
    /// # Errors
    /// [`DeviceError::World`] if there is no such rank.
    pub fn transport(self: &Arc<Self>, rank: usize) -> Result<LocalTransport, DeviceError> {
        if rank >= self.ranks {
            return Err(WorldError::NoSuchRank { rank, ranks: self.ranks }.into());
        }
        Ok(LocalTransport { world: self.clone(), rank })
    }
}

/// One rank's side of a [`LocalWorld`].
#[derive(Debug)]
pub struct LocalTransport {
    world: Arc<LocalWorld>,
    rank: usize,
}

impl Transport for LocalTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world.ranks
    }

    fn may_block(&self) -> bool {
        false
    }

    unsafe fn run(&self, collective: &Collective, memory: &HostMemory, reached_ns: u64) -> Result<Transfer, CommError> {
        let (key, members, world) = (collective.key, &collective.members, self.world.ranks);
        let no = |reason| CommError::Shape { seq: key.seq, reason };
        if let Some(flaw) = members.flaw(world) {
            return Err(no(flaw));
        }
        let slot = members.slot_of(self.rank);
        let slot = slot.ok_or_else(|| no(format!("rank {} is not one of {members}, who run the {key}", self.rank)))?;
        let shape = Shape::of(collective, memory, slot, members.count(world))?;
        let meetings = &self.world.meetings;
        let post = Post { send: memory.send, recv: memory.recv };
        let met =
            meetings.join(self.rank, slot, Brought { key, shape, members, more: collective.more }, post, reached_ns)?;
        // SAFETY: all members have posted memory that fits this shape (`Shape::of`, `join` compares shapes). Each rank's
        // caller keeps it valid and untouched until its `run` returns, which is after `leave`, which waits for all.
        unsafe { copy::mine(shape, slot, &met.posts) };
        meetings.leave(self.rank, key.seq, &met)?;
        Ok(Transfer { begin_ns: met.begin_ns, end_ns: met.end_ns.unwrap_or_else(now_ns) })
    }

    fn abort(&self, cause: &Cause) {
        self.world.meetings.abort(self.rank, cause);
    }
}

#[cfg(test)]
mod tests;
