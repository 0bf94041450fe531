//! What the logs say before anything is put in order: each stream's entries, where events are recorded, which ranks take
//! part in which collective, the lengths of allocations.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::discriminant;

use super::report::{Findings, Violation, stream_of};
use crate::buffer::BufferId;
use crate::collective::Collective;
use crate::device::StreamId;
use crate::members::Members;
use crate::null::LogEntry;
use crate::work::Work;

/// An entry of a stream: `epoch` counts the stream's entries from 1, so that 0 in a clock means "nothing".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Point {
    pub(super) stream: usize,
    pub(super) epoch: u32,
}

/// One stream of one rank. Streams of all ranks are numbered together.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) rank: usize,
    id: StreamId,
    /// Positions in the rank's log.
    pub(super) entries: Vec<usize>,
}

/// The logs, sorted out.
#[derive(Debug)]
pub(super) struct Program<'a> {
    logs: &'a [&'a [LogEntry]],
    pub(super) streams: Vec<Stream>,
    /// By rank and event id.
    pub(super) events: HashMap<(usize, u64), Point>,
    /// By sequence number and members: at most one point per rank, in rank order.
    pub(super) collectives: BTreeMap<(u64, Members), Vec<Point>>,
    /// By rank and buffer.
    pub(super) allocated: HashMap<(usize, BufferId), usize>,
}

impl<'a> Program<'a> {
    pub(super) fn read(logs: &'a [&'a [LogEntry]], findings: &mut Findings<'_>) -> Self {
        let mut program = Self {
            logs,
            streams: Vec::new(),
            events: HashMap::new(),
            collectives: BTreeMap::new(),
            allocated: HashMap::new(),
        };
        for (rank, log) in logs.iter().enumerate() {
            program.read_rank(rank, log, findings);
        }
        findings.summary.streams = program.streams.len();
        program.compare_ranks(findings);
        program
    }

    fn read_rank(&mut self, rank: usize, log: &[LogEntry], findings: &mut Findings<'_>) {
        let first_stream = self.streams.len();
        let mut waits = Vec::new();
        let mut last_seq = None;
        for (position, entry) in log.iter().enumerate() {
            let Some(on) = stream_of(entry) else {
                match entry {
                    LogEntry::Stream { id, kind } => findings.note_kind(rank, *id, *kind),
                    LogEntry::Alloc { buffer } => {
                        self.allocated.insert((rank, buffer.id), buffer.bytes);
                        findings.summary.ranks[rank].allocated_bytes += buffer.bytes;
                    }
                    _ => {}
                }
                continue;
            };
            let found = self.streams[first_stream..].iter().position(|stream| stream.id == on);
            let stream = found.map_or(self.streams.len(), |found| first_stream + found);
            if found.is_none() {
                self.streams.push(Stream { rank, id: on, entries: Vec::new() });
            }
            self.streams[stream].entries.push(position);
            let point = Point { stream, epoch: self.streams[stream].entries.len() as u32 };
            match entry {
                LogEntry::Record { event, .. } => {
                    let first = *self.events.entry((rank, *event)).or_insert(point);
                    if first != point {
                        findings.add(|f| Violation::RepeatedEvent { site: f.site(rank, position) });
                    }
                }
                LogEntry::Wait { event, .. } => waits.push((position, *event)),
                LogEntry::Enqueue { work: Work::Collective(collective), .. } => {
                    let seq = collective.key.seq;
                    if let Some(after) = last_seq.filter(|last| *last >= seq) {
                        findings.add(|f| Violation::OutOfOrder { seq, after, site: f.site(rank, position) });
                    }
                    last_seq = last_seq.max(Some(seq));
                    if collective.members.slot_of(rank).is_none() {
                        findings.add(|f| Violation::Outsider { seq, site: f.site(rank, position) });
                    }
                    let points = self.collectives.entry((seq, collective.members.clone())).or_default();
                    if points.last().is_none_or(|last| self.streams[last.stream].rank != rank) {
                        points.push(point);
                    }
                    findings.summary.ranks[rank].collectives += 1;
                    findings.summary.ranks[rank].collective_bytes += collective.key.bytes;
                }
                LogEntry::Enqueue { .. } => findings.summary.ranks[rank].works += 1,
                _ => {}
            }
        }
        for (position, event) in waits {
            if !self.events.contains_key(&(rank, event)) {
                findings.add(|f| Violation::UnknownEvent { site: f.site(rank, position) });
            }
        }
    }

    /// Every collective is on every member and the same there, and what goes on under one number is the same in all parts of a
    /// division.
    fn compare_ranks(&self, findings: &mut Findings<'_>) {
        let mut counted = None;
        for ((seq, members), points) in &self.collectives {
            let Some((first, theirs)) = points.first().and_then(|p| Some((self.place(*p), self.collective(*p)?)))
            else {
                continue;
            };
            let (seq, mut differs) = (*seq, Vec::new());
            let first_group = counted != Some(seq);
            if first_group {
                findings.count(theirs.key.kind);
                counted = Some(seq);
            }
            let present: HashSet<usize> = points.iter().map(|point| self.streams[point.stream].rank).collect();
            for rank in members.ranks(self.logs.len()).filter(|rank| !present.contains(rank)) {
                match self.elsewhere(seq, rank) {
                    Some(place) => differs.push(place),
                    None => findings.add(|f| {
                        let theirs = f.site(first.0, first.1);
                        Violation::MissingCollective { seq, rank, theirs }
                    }),
                }
            }
            let other_groups =
                self.collectives.range((seq, Members::ALL)..).take_while(|((other, _), _)| *other == seq);
            let firsts = other_groups.filter_map(|(_, points)| points.first()).filter(|_| first_group);
            let alike = |point: &&Point| self.collective(**point).is_some_and(|c| c.key.group == theirs.key.group);
            for point in points[1..].iter().chain(firsts.filter(alike)) {
                let Some(mine) = self.collective(*point) else { continue };
                if mine.key != theirs.key || discriminant(&mine.op) != discriminant(&theirs.op) {
                    differs.push(self.place(*point));
                }
            }
            for (rank, position) in differs {
                findings.add(|f| {
                    let theirs = f.site(first.0, first.1);
                    Violation::Mismatch { seq, mine: f.site(rank, position), theirs }
                });
            }
        }
    }

    /// Where a rank issues what it has under a sequence number.
    fn elsewhere(&self, seq: u64, rank: usize) -> Option<(usize, usize)> {
        let under = self.collectives.range((seq, Members::ALL)..).take_while(|((other, _), _)| *other == seq);
        under.flat_map(|(_, points)| points).map(|point| self.place(*point)).find(|(who, _)| *who == rank)
    }

    /// Rank and position of a point.
    pub(super) fn place(&self, point: Point) -> (usize, usize) {
        let stream = &self.streams[point.stream];
        (stream.rank, stream.entries[point.epoch as usize - 1])
    }

    pub(super) fn entry(&self, point: Point) -> &'a LogEntry {
        let (rank, position) = self.place(point);
        &self.logs[rank][position]
    }

    pub(super) fn collective(&self, point: Point) -> Option<&'a Collective> {
        match self.entry(point) {
            LogEntry::Enqueue { work: Work::Collective(collective), .. } => Some(collective),
            _ => None,
        }
    }

    /// Who takes part in the collective at this point; `None` for other work and for a repeated collective.
    pub(super) fn participants(&self, point: Point) -> Option<&[Point]> {
        let collective = self.collective(point)?;
        let points = self.collectives.get(&(collective.key.seq, collective.members.clone()))?;
        points.contains(&point).then_some(points.as_slice())
    }
}
