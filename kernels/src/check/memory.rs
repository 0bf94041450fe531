//! Byte intervals of every buffer, each with its last write and the reads since.
//!
//! While no race was found, everything before the last write is ordered before it, so comparing with that write and the
//! reads since is comparing with all.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::order::Step;
use super::program::{Point, Program};
use super::report::{Findings, Violation};
use crate::buffer::{BufRange, BufferId};
use crate::device::{Access, AccessMode};
use crate::null::LogEntry;

/// The memory of all ranks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    buffers: HashMap<(usize, BufferId), Intervals>,
    found: HashSet<(Point, Point)>,
}

/// By start; they cover every address.
#[derive(Debug)]
struct Intervals(BTreeMap<usize, Interval>);

#[derive(Clone, Debug, Default)]
struct Interval {
    last_write: Option<Point>,
    /// The last read of each stream since.
    reads: Vec<Point>,
}

impl Memory {
    pub(super) fn visit(&mut self, program: &Program<'_>, step: Step<'_>, findings: &mut Findings<'_>) {
        match program.entry(step.point) {
            LogEntry::Access { access, .. } => self.touch(program, step, *access, findings),
            LogEntry::Enqueue { work, .. } => {
                work.accesses(&mut |access| self.touch(program, step, access, findings));
            }
            _ => {}
        }
    }

    fn touch(&mut self, program: &Program<'_>, step: Step<'_>, access: Access, findings: &mut Findings<'_>) {
        let Access { range, mode } = access;
        let (rank, position) = program.place(step.point);
        findings.summary.accesses += 1;
        let bytes = program.allocated.get(&(rank, range.buffer)).copied();
        if range.start > range.end || bytes.is_some_and(|bytes| range.end > bytes) {
            let bytes = bytes.unwrap_or_default();
            findings.add(|f| Violation::OutOfBounds { site: f.site(rank, position), range, bytes });
        }
        if range.start >= range.end {
            return;
        }
        let found = &mut self.found;
        let intervals = self.buffers.entry((rank, range.buffer)).or_default();
        intervals.touch(step, range, mode, &mut |first, range| {
            if found.insert((first, step.point)) {
                findings.summary.races += 1;
                findings.add(|f| {
                    let first = f.site(rank, program.place(first).1);
                    Violation::Race { rank, range, first, second: f.site(rank, position) }
                });
            }
        });
    }
}

impl Default for Intervals {
    fn default() -> Self {
        Self(BTreeMap::from([(0, Interval::default())]))
    }
}

impl Intervals {
    fn touch(&mut self, step: Step<'_>, range: BufRange, mode: AccessMode, race: &mut dyn FnMut(Point, BufRange)) {
        self.split(range.start);
        self.split(range.end);
        let mut inside = self.0.range_mut(range.start..range.end).peekable();
        while let Some((&start, interval)) = inside.next() {
            let end = inside.peek().map_or(range.end, |(next, _)| **next);
            interval.touch(step, mode, &mut |first| race(first, BufRange { buffer: range.buffer, start, end }));
        }
    }

    fn split(&mut self, at: usize) {
        if let Some((&start, interval)) = self.0.range(..=at).next_back()
            && start < at
        {
            let right = interval.clone();
            self.0.insert(at, right);
        }
    }
}

impl Interval {
    fn touch(&mut self, step: Step<'_>, mode: AccessMode, race: &mut dyn FnMut(Point)) {
        if let Some(write) = self.last_write.filter(|write| !step.is_after(*write)) {
            race(write);
        }
        match mode {
            AccessMode::Read => match self.reads.iter_mut().find(|read| read.stream == step.point.stream) {
                Some(read) => *read = step.point,
                None => self.reads.push(step.point),
            },
            AccessMode::Write => {
                self.reads.iter().filter(|read| !step.is_after(**read)).for_each(|read| race(*read));
                self.reads.clear();
                self.last_write = Some(step.point);
            }
        }
    }
}
