//! Rule E8: a gather let go by a unit's entry (chain: by the wait that ended) starts after the executor's stream has reached
//! that entry.

use std::collections::HashMap;

use super::RunAhead;
use super::order::Step;
use super::program::{Point, Program};
use super::report::{Findings, Violation};
use crate::collective::CollectiveKind;
use crate::device::Mark;
use crate::null::LogEntry;

/// The marks of all ranks.
#[derive(Debug)]
pub(super) struct Ahead {
    rule: Option<Rule>,
    /// By bucket: its position in the gather order.
    positions: HashMap<u32, u32>,
    /// By rank and version, in log order. Window: only marks that demand more than all before them.
    marks: HashMap<(usize, u64), Vec<Marked>>,
}

#[derive(Clone, Copy, Debug)]
enum Rule {
    Window { credits: u32 },
    Chain,
}

#[derive(Clone, Copy, Debug)]
struct Marked {
    /// Window: how many gathers are demanded. Chain: the position whose wait ended.
    value: u32,
    position: usize,
    point: Point,
}

impl Ahead {
    pub(super) fn new(program: &Program<'_>, ahead: &RunAhead) -> Self {
        let (rule, order) = match ahead {
            RunAhead::Any => (None, &[][..]),
            RunAhead::Window { order, credits } => (Some(Rule::Window { credits: *credits }), order.as_slice()),
            RunAhead::Chain { order } => (Some(Rule::Chain), order.as_slice()),
        };
        let positions = order.iter().zip(0..).map(|(bucket, position)| (*bucket, position)).collect();
        let marks = rule.map(|rule| collect(program, rule)).unwrap_or_default();
        Self { rule, positions, marks }
    }

    pub(super) fn visit(&self, program: &Program<'_>, step: Step<'_>, findings: &mut Findings<'_>) {
        let Some(rule) = self.rule else { return };
        let Some(collective) = program.collective(step.point) else { return };
        if collective.key.kind != CollectiveKind::Gather {
            return;
        }
        let (rank, position) = program.place(step.point);
        let Some(&at) = self.positions.get(&collective.key.bucket) else {
            findings.add(|f| Violation::UnknownBucket { site: f.site(rank, position) });
            return;
        };
        let marks = self.marks.get(&(rank, collective.key.version)).map_or(&[][..], Vec::as_slice);
        let free = match rule {
            Rule::Window { credits } => at < credits,
            Rule::Chain => at == 0,
        };
        if free {
            findings.summary.let_go_within_credits += 1;
            return;
        }
        let let_go = match rule {
            Rule::Window { credits } => marks.get(marks.partition_point(|mark| mark.value < at + 1 - credits)),
            Rule::Chain => {
                let first = marks.partition_point(|mark| mark.value < at - 1);
                marks.get(first).filter(|mark| mark.value == at - 1)
            }
        };
        match let_go.filter(|mark| mark.position < position) {
            None => findings.summary.let_go_without_entry += 1,
            Some(mark) if step.is_after(mark.point) => findings.summary.let_go_by_entry += 1,
            Some(mark) => findings
                .add(|f| Violation::RanAhead { gather: f.site(rank, position), mark: f.site(rank, mark.position) }),
        }
    }
}

fn collect(program: &Program<'_>, rule: Rule) -> HashMap<(usize, u64), Vec<Marked>> {
    let mut marks: HashMap<(usize, u64), Vec<Marked>> = HashMap::new();
    for (stream, found) in program.streams.iter().enumerate() {
        for (position, epoch) in found.entries.iter().zip(1..) {
            let point = Point { stream, epoch };
            let LogEntry::Mark { mark, .. } = program.entry(point) else { continue };
            let (version, value) = match (rule, *mark) {
                (Rule::Window { .. }, Mark::Demanded { version, demanded }) => (version, demanded),
                (Rule::Chain, Mark::WaitEnded { version, position }) => (version, position),
                _ => continue,
            };
            let marked = Marked { value, position: *position, point };
            marks.entry((found.rank, version)).or_default().push(marked);
        }
    }
    for list in marks.values_mut() {
        match rule {
            Rule::Window { .. } => {
                list.sort_by_key(|mark| mark.position);
                let mut most = None;
                list.retain(|mark| {
                    let more = Some(mark.value) > most;
                    most = most.max(Some(mark.value));
                    more
                });
            }
            Rule::Chain => list.sort_by_key(|mark| (mark.value, mark.position)),
        }
    }
    marks
}
