//! What the checker says: violations that name both sides, and a summary of what it saw.

use std::fmt;

use crate::buffer::BufRange;
use crate::collective::{Collective, CollectiveKind};
use crate::device::{AccessMode, Mark, StreamId, StreamKind};
use crate::members::Members;
use crate::null::LogEntry;
use crate::work::Work;

/// An entry of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Whose log.
    pub rank: usize,
    /// Position in that log.
    pub position: usize,
    /// The stream.
    pub stream: StreamId,
    /// What the stream is for, if the log shows its hand-out.
    pub kind: Option<StreamKind>,
    /// The work, access or mark; a collective with its bucket.
    pub what: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, position, stream, kind, what } = self;
        match kind {
            Some(kind) => write!(f, "{what} [rank {rank}, {kind:?} stream, entry {position}]"),
            None => write!(f, "{what} [rank {rank}, stream {}, entry {position}]", stream.0),
        }
    }
}

/// Something the logs show to be wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Two accesses, one of them a write, are not ordered.
    #[error("rank {rank}: nothing orders {first} and {second} on {range}")]
    Race {
        /// Whose memory.
        rank: usize,
        /// The first interval on which they meet.
        range: BufRange,
        /// The one that the checker met first.
        first: Site,
        /// The other one.
        second: Site,
    },
    /// A gather does not start after the entry (or the ended wait) that let it go: rule E8.
    #[error("{gather} may start before the executor's stream reaches {mark} (rule E8)")]
    RanAhead {
        /// The gather.
        gather: Site,
        /// The mark.
        mark: Site,
    },
    /// An access goes beyond its allocation, or ends before it starts.
    #[error("{site} touches {range}, but the allocation has {bytes} bytes")]
    OutOfBounds {
        /// Who.
        site: Site,
        /// What it touches.
        range: BufRange,
        /// The length of the allocation.
        bytes: usize,
    },
    /// A wait for an event that no stream of the rank records.
    #[error("{site}: nobody records that event")]
    UnknownEvent {
        /// The wait.
        site: Site,
    },
    /// Two records of one event.
    #[error("{site}: the event was recorded before")]
    RepeatedEvent {
        /// The later record.
        site: Site,
    },
    /// A member does not issue a collective that others issue.
    #[error("collective {seq}: rank {rank} does not issue it, but there is {theirs}")]
    MissingCollective {
        /// Its sequence number.
        seq: u64,
        /// The rank that lacks it.
        rank: usize,
        /// The collective on another rank.
        theirs: Site,
    },
    /// Ranks issue different collectives, or ones of other members, under one sequence number (rule O2).
    #[error("collective {seq}: {mine} does not match {theirs}")]
    Mismatch {
        /// The sequence number.
        seq: u64,
        /// On this rank.
        mine: Site,
        /// On the first rank that issues it.
        theirs: Site,
    },
    /// A rank issues a collective that it is no member of.
    #[error("collective {seq}: this rank is not one of its members: {site}")]
    Outsider {
        /// Its sequence number.
        seq: u64,
        /// The collective.
        site: Site,
    },
    /// A rank issues collectives not in the order of their sequence numbers, or one twice (rule O1).
    #[error("collective {seq} is issued after collective {after}: {site}")]
    OutOfOrder {
        /// The sequence number.
        seq: u64,
        /// The largest sequence number before it.
        after: u64,
        /// The collective.
        site: Site,
    },
    /// Each of these entries waits for the next one, the last for the first.
    #[error("these wait for each other: {}", join(.0))]
    Cycle(
        /// The entries.
        Vec<Site>,
    ),
    /// A gather of a bucket that is not in the gather order given to the checker.
    #[error("{site}: the bucket is not in the gather order")]
    UnknownBucket {
        /// The gather.
        site: Site,
    },
}

fn join(sites: &[Site]) -> String {
    sites.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Why the checker rejects the logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violations {
    /// What was found, at most [`Violations::MOST`].
    pub list: Vec<Violation>,
    /// Violations found beyond those in the list.
    pub more: usize,
    /// What the checker saw.
    pub summary: Box<Summary>,
}

impl Violations {
    /// The longest list.
    pub const MOST: usize = 1000;
    /// How many [`fmt::Display`] shows.
    const SHOWN: usize = 10;
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} violations", self.list.len() + self.more)?;
        for violation in self.list.iter().take(Self::SHOWN) {
            write!(f, "\n  {violation}")?;
        }
        if self.list.len() + self.more > Self::SHOWN {
            f.write_str("\n  ...")?;
        }
        Ok(())
    }
}

impl std::error::Error for Violations {}

/// What the checker saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Log entries on streams that were put in order, all ranks.
    pub entries: usize,
    /// Streams, all ranks.
    pub streams: usize,
    /// Accesses checked, all ranks.
    pub accesses: usize,
    /// Unordered pairs of conflicting accesses; where three meet not every pair is counted.
    pub races: usize,
    /// Reductions; each counts once, not once per rank or group of ranks.
    pub reduces: usize,
    /// Gathers, counted likewise.
    pub gathers: usize,
    /// Sums of reduced shards, counted likewise.
    pub sums: usize,
    /// Small all-gathers, counted likewise.
    pub smalls: usize,
    /// Start-up exchanges, counted likewise.
    pub start_ups: usize,
    /// Rule E8: gathers that start after the entry that let them go, as they must. Counted per rank, as the next two.
    pub let_go_by_entry: usize,
    /// Rule E8: gathers that need no entry (the credits of an empty window; the first of a chain).
    pub let_go_within_credits: usize,
    /// Rule E8: gathers let go by peer demand, a flush or a drain: no entry to start after.
    pub let_go_without_entry: usize,
    /// Per rank.
    pub ranks: Vec<RankSummary>,
}

/// What the checker saw of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSummary {
    /// Work without collectives.
    pub works: usize,
    /// Collectives.
    pub collectives: usize,
    /// Sum of the larger buffers of its collectives.
    pub collective_bytes: u64,
    /// Bytes allocated.
    pub allocated_bytes: usize,
}

/// Violations and counts while they are gathered.
#[derive(Debug)]
pub(super) struct Findings<'a> {
    logs: &'a [&'a [LogEntry]],
    kinds: Vec<Vec<(StreamId, StreamKind)>>,
    list: Vec<Violation>,
    more: usize,
    pub(super) summary: Summary,
}

impl<'a> Findings<'a> {
    pub(super) fn new(logs: &'a [&'a [LogEntry]]) -> Self {
        let summary = Summary { ranks: vec![RankSummary::default(); logs.len()], ..Summary::default() };
        Self { logs, kinds: vec![Vec::new(); logs.len()], list: Vec::new(), more: 0, summary }
    }

    pub(super) fn note_kind(&mut self, rank: usize, id: StreamId, kind: StreamKind) {
        if !self.kinds[rank].iter().any(|(known, _)| *known == id) {
            self.kinds[rank].push((id, kind));
        }
    }

    /// `violation` is built only where it is kept.
    pub(super) fn add(&mut self, violation: impl FnOnce(&Self) -> Violation) {
        if self.list.len() < Violations::MOST {
            let violation = violation(self);
            self.list.push(violation);
        } else {
            self.more += 1;
        }
    }

    pub(super) fn count(&mut self, kind: CollectiveKind) {
        match kind {
            CollectiveKind::StartUp => self.summary.start_ups += 1,
            CollectiveKind::Reduce => self.summary.reduces += 1,
            CollectiveKind::Small => self.summary.smalls += 1,
            CollectiveKind::Gather => self.summary.gathers += 1,
            CollectiveKind::Sum | CollectiveKind::StagedSum => self.summary.sums += 1,
        }
    }

    pub(super) fn finish(self) -> Result<Summary, Violations> {
        if self.list.is_empty() {
            Ok(self.summary)
        } else {
            Err(Violations { list: self.list, more: self.more, summary: Box::new(self.summary) })
        }
    }

    /// Describes an entry of a stream.
    pub(super) fn site(&self, rank: usize, position: usize) -> Site {
        let entry = &self.logs[rank][position];
        let stream = stream_of(entry).unwrap_or(StreamId(u32::MAX));
        let kind = self.kinds[rank].iter().find(|(id, _)| *id == stream).map(|(_, kind)| *kind);
        Site { rank, position, stream, kind, what: what(entry) }
    }
}

/// The stream an entry is on; `None` for entries that are on none.
pub(super) fn stream_of(entry: &LogEntry) -> Option<StreamId> {
    match entry {
        LogEntry::Alloc { .. } | LogEntry::Stream { .. } => None,
        LogEntry::Enqueue { on, .. }
        | LogEntry::Record { on, .. }
        | LogEntry::Wait { on, .. }
        | LogEntry::Access { on, .. }
        | LogEntry::Mark { on, .. } => Some(*on),
    }
}

fn what(entry: &LogEntry) -> String {
    match entry {
        LogEntry::Alloc { buffer } => format!("allocation of buffer {}", buffer.id.0),
        LogEntry::Stream { .. } => "hand-out of a stream".into(),
        LogEntry::Enqueue { work: Work::Collective(collective), .. } => collective_name(collective),
        LogEntry::Enqueue { work, .. } => work.name().into(),
        LogEntry::Record { event, .. } => format!("record of event {event}"),
        LogEntry::Wait { event, .. } => format!("wait for event {event}"),
        LogEntry::Access { access, .. } => match access.mode {
            AccessMode::Read => "read by the executor".into(),
            AccessMode::Write => "write by the executor".into(),
        },
        LogEntry::Mark { mark: Mark::Demanded { version, demanded }, .. } => {
            format!("demand for {demanded} gathers of version {version}")
        }
        LogEntry::Mark { mark: Mark::WaitEnded { version, position }, .. } => {
            format!("end of the wait on the gather at position {position} of version {version}")
        }
    }
}

fn collective_name(collective: &Collective) -> String {
    let Collective { key, members, .. } = collective;
    let of = if *members == Members::ALL { String::new() } else { format!(" of {members}") };
    format!("collective {}, {key}{of}", key.seq)
}
