//! A topological walk over all entries of all ranks, with a vector clock per stream.
//!
//! A stream runs until it waits for an event that is not recorded yet, or for a collective that some member has not reached.
//! Whoever still waits when nobody can run is part of a cycle or behind one.

use std::collections::HashMap;

use super::program::{Point, Program};
use super::report::{Findings, Violation};
use crate::null::LogEntry;

/// Per stream: the last epoch that is known to be over.
pub(super) type Clock = Vec<u32>;

/// An entry that is about to start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step<'a> {
    pub(super) point: Point,
    /// What is over when it starts; its own epoch included.
    clock: &'a Clock,
}

impl Step<'_> {
    /// Whether that entry is over when this one starts, or is this one.
    pub(super) fn is_after(&self, point: Point) -> bool {
        self.clock[point.stream] >= point.epoch
    }
}

/// Calls `visit` for every entry that can run, in an order in which everything comes after what it waits for.
pub(super) fn walk<'f>(
    program: &Program<'_>,
    findings: &mut Findings<'f>,
    visit: &mut dyn FnMut(Step<'_>, &mut Findings<'f>),
) {
    let streams = program.streams.len();
    let mut walk = Walk {
        program,
        clocks: vec![vec![0; streams]; streams],
        started: vec![0; streams],
        recorded: HashMap::new(),
        waiting: HashMap::new(),
        arrived: HashMap::new(),
        ready: (0..streams).rev().collect(),
    };
    while let Some(stream) = walk.ready.pop() {
        while walk.advance(stream, findings, visit) {}
    }
    walk.report_cycle(findings);
}

struct Walk<'p, 'a> {
    program: &'p Program<'a>,
    clocks: Vec<Clock>,
    /// The last entry of each stream that was started.
    started: Vec<u32>,
    recorded: HashMap<(usize, u64), Clock>,
    /// Streams that wait for an event.
    waiting: HashMap<(usize, u64), Vec<usize>>,
    /// How many members have reached a collective, by its first point.
    arrived: HashMap<Point, usize>,
    ready: Vec<usize>,
}

impl Walk<'_, '_> {
    /// Runs one entry; false if the stream has to stop here.
    fn advance<'f>(
        &mut self,
        stream: usize,
        findings: &mut Findings<'f>,
        visit: &mut dyn FnMut(Step<'_>, &mut Findings<'f>),
    ) -> bool {
        let Some(point) = self.next(stream) else { return false };
        let rank = self.program.streams[stream].rank;
        match self.program.entry(point) {
            LogEntry::Wait { event, .. } => {
                let key = (rank, *event);
                if let Some(clock) = self.recorded.get(&key) {
                    join(&mut self.clocks[stream], clock);
                } else if self.program.events.contains_key(&key) {
                    self.waiting.entry(key).or_default().push(stream);
                    return false;
                }
                self.start(point, findings, visit);
            }
            LogEntry::Record { event, .. } => {
                self.start(point, findings, visit);
                let key = (rank, *event);
                if self.program.events.get(&key) == Some(&point) {
                    self.recorded.insert(key, self.clocks[stream].clone());
                    self.ready.extend(self.waiting.remove(&key).into_iter().flatten());
                }
            }
            LogEntry::Enqueue { .. } => {
                if let Some(points) = self.program.participants(point) {
                    return self.arrive(point, points, findings, visit);
                }
                self.start(point, findings, visit);
            }
            _ => self.start(point, findings, visit),
        }
        true
    }

    /// The last member to arrive runs the collective on all of them and wakes the others.
    fn arrive<'f>(
        &mut self,
        point: Point,
        points: &[Point],
        findings: &mut Findings<'f>,
        visit: &mut dyn FnMut(Step<'_>, &mut Findings<'f>),
    ) -> bool {
        let Some(first) = points.first() else { return false };
        let arrived = self.arrived.entry(*first).or_default();
        *arrived += 1;
        if *arrived < points.len() {
            return false;
        }
        let mut reached = vec![0; self.clocks.len()];
        for peer in points {
            join(&mut reached, &self.clocks[peer.stream]);
        }
        for peer in points {
            self.start(*peer, findings, visit);
            join(&mut self.clocks[peer.stream], &reached);
        }
        self.ready.extend(points.iter().map(|peer| peer.stream).filter(|peer| *peer != point.stream));
        true
    }

    fn start<'f>(
        &mut self,
        point: Point,
        findings: &mut Findings<'f>,
        visit: &mut dyn FnMut(Step<'_>, &mut Findings<'f>),
    ) {
        self.clocks[point.stream][point.stream] = point.epoch;
        self.started[point.stream] = point.epoch;
        findings.summary.entries += 1;
        visit(Step { point, clock: &self.clocks[point.stream] }, findings);
    }

    fn next(&self, stream: usize) -> Option<Point> {
        let started = self.started[stream];
        let more = (started as usize) < self.program.streams[stream].entries.len();
        more.then_some(Point { stream, epoch: started + 1 })
    }

    /// Follows from one stuck stream to one it waits for, until a stream comes up again.
    fn report_cycle(&self, findings: &mut Findings<'_>) {
        let Some(mut at) = (0..self.clocks.len()).find_map(|stream| self.next(stream)) else { return };
        let mut path: Vec<Point> = Vec::new();
        while !path.contains(&at) {
            path.push(at);
            let Some(next) = self.blocker(at) else { return };
            at = next;
        }
        let first = path.iter().position(|point| *point == at).unwrap_or_default();
        findings.add(|f| {
            let places = path[first..].iter().map(|point| self.program.place(*point));
            Violation::Cycle(places.map(|(rank, position)| f.site(rank, position)).collect())
        });
    }

    /// The stuck entry that a stuck entry waits for.
    fn blocker(&self, point: Point) -> Option<Point> {
        let rank = self.program.streams[point.stream].rank;
        if let LogEntry::Wait { event, .. } = self.program.entry(point) {
            return self.next(self.program.events.get(&(rank, *event))?.stream);
        }
        let missing = self.program.participants(point)?.iter().find(|peer| self.next(peer.stream) != Some(**peer))?;
        self.next(missing.stream)
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
