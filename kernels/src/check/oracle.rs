//! The slow truth for the property test: the whole happens-before relation as a matrix, every pair of accesses compared.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use super::RunAhead;
use crate::collective::CollectiveKind;
use crate::device::{Access, AccessMode, Mark};
use crate::null::LogEntry;
use crate::work::Work;

/// Rank and position.
pub(super) type At = (usize, usize);

#[derive(Debug, Default)]
pub(super) struct Truth {
    pub(super) cyclic: bool,
    /// Unordered conflicting pairs, the smaller place first.
    pub(super) races: BTreeSet<(At, At)>,
    /// Gathers that break rule E8.
    pub(super) ran_ahead: BTreeSet<At>,
}

struct Relation {
    /// Bit `b` of row `a`: node `a` comes before node `b`. Entry `e` starts at node `2e` and ends at node `2e + 1`.
    before: Vec<u128>,
    places: Vec<At>,
}

impl Relation {
    fn node(&self, at: At) -> usize {
        2 * self.places.iter().position(|place| *place == at).unwrap()
    }

    fn edge(&mut self, from: usize, to: usize) {
        self.before[from] |= 1 << to;
    }

    fn close(&mut self) {
        for via in 0..self.before.len() {
            for from in 0..self.before.len() {
                if self.before[from] >> via & 1 == 1 {
                    self.before[from] |= self.before[via];
                }
            }
        }
    }

    /// Whether `first` ends before `second` starts.
    fn ordered(&self, first: At, second: At) -> bool {
        self.before[self.node(first) + 1] >> self.node(second) & 1 == 1
    }
}

pub(super) fn truth(logs: &[Vec<LogEntry>], ahead: &RunAhead) -> Truth {
    let places: Vec<At> =
        logs.iter().enumerate().flat_map(|(rank, log)| (0..log.len()).map(move |position| (rank, position))).collect();
    assert!(places.len() <= 64, "the matrix has 128 columns");
    let mut relation = Relation { before: vec![0; 2 * places.len()], places: places.clone() };
    let entry = |at: At| &logs[at.0][at.1];
    for (index, &a) in places.iter().enumerate() {
        relation.edge(2 * index, 2 * index + 1);
        for &b in &places {
            let (start_a, start_b) = (relation.node(a), relation.node(b));
            if a.0 == b.0 && a.1 < b.1 && stream(entry(a)) == stream(entry(b)) {
                relation.edge(start_a + 1, start_b);
            }
            match (entry(a), entry(b)) {
                (LogEntry::Record { event: made, .. }, LogEntry::Wait { event: wanted, .. })
                    if a.0 == b.0 && made == wanted =>
                {
                    relation.edge(start_a + 1, start_b);
                }
                (
                    LogEntry::Enqueue { work: Work::Collective(mine), .. },
                    LogEntry::Enqueue { work: Work::Collective(theirs), .. },
                ) if mine.key.seq == theirs.key.seq && mine.members == theirs.members => {
                    relation.edge(start_a, start_b + 1);
                }
                _ => {}
            }
        }
    }
    relation.close();
    let cyclic = (0..relation.before.len()).any(|node| relation.before[node] >> node & 1 == 1);
    let mut truth = Truth { cyclic, ..Truth::default() };
    for &a in &places {
        for &b in &places {
            let conflict = a < b && a.0 == b.0 && conflict(&accesses(entry(a)), &accesses(entry(b)));
            if conflict && !relation.ordered(a, b) && !relation.ordered(b, a) {
                truth.races.insert((a, b));
            }
        }
        if let Some(mark) = let_go(logs, a, ahead).filter(|mark| *mark < a)
            && !relation.ordered(mark, a)
        {
            truth.ran_ahead.insert(a);
        }
    }
    truth
}

/// The first mark in the rank's log that lets this gather go.
fn let_go(logs: &[Vec<LogEntry>], at: At, ahead: &RunAhead) -> Option<At> {
    let LogEntry::Enqueue { work: Work::Collective(gather), .. } = &logs[at.0][at.1] else { return None };
    if gather.key.kind != CollectiveKind::Gather {
        return None;
    }
    let suffices = |mark: &Mark| match (ahead, *mark) {
        (RunAhead::Window { order, credits }, Mark::Demanded { version, demanded }) => {
            let index = order.iter().position(|bucket| *bucket == gather.key.bucket).unwrap() as u32;
            version == gather.key.version && index >= *credits && demanded + credits > index
        }
        (RunAhead::Chain { order }, Mark::WaitEnded { version, position }) => {
            let index = order.iter().position(|bucket| *bucket == gather.key.bucket).unwrap() as u32;
            version == gather.key.version && position + 1 == index
        }
        _ => false,
    };
    let is_it = |entry: &LogEntry| matches!(entry, LogEntry::Mark { mark, .. } if suffices(mark));
    logs[at.0].iter().position(is_it).map(|position| (at.0, position))
}

fn stream(entry: &LogEntry) -> u32 {
    match entry {
        LogEntry::Enqueue { on, .. }
        | LogEntry::Record { on, .. }
        | LogEntry::Wait { on, .. }
        | LogEntry::Access { on, .. }
        | LogEntry::Mark { on, .. } => on.0,
        LogEntry::Alloc { .. } | LogEntry::Stream { .. } => panic!("not on a stream"),
    }
}

fn accesses(entry: &LogEntry) -> Vec<Access> {
    let mut all = Vec::new();
    match entry {
        LogEntry::Access { access, .. } => all.push(*access),
        LogEntry::Enqueue { work, .. } => work.accesses(&mut |access| all.push(access)),
        _ => {}
    }
    all
}

fn conflict(a: &[Access], b: &[Access]) -> bool {
    a.iter().any(|a| {
        b.iter().any(|b| {
            let written = a.mode == AccessMode::Write || b.mode == AccessMode::Write;
            let meet = a.range.start.max(b.range.start) < a.range.end.min(b.range.end);
            written && meet && a.range.buffer == b.range.buffer
        })
    })
}
