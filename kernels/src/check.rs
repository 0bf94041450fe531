//! The happens-before checker: proves from the null logs of all ranks together that no two conflicting accesses are
//! concurrent, and that no gather runs ahead of the executor's stream (rule E8).
//!
//! **Model.** Each stream of each rank is a FIFO. A record snapshots its stream, a wait joins the snapshot. The host's order
//! of calls orders nothing, so the executor's accesses count only in its own stream. A collective follows its contract and
//! nothing more ([`crate::collective`]): on each rank it starts once that rank's stream has reached it, and ends once every
//! member's stream has reached it and peers are done with this rank's memory. Its end on one rank says nothing about
//! the memory of another rank. Memory that was never written is zero, so reading it is no error.
//!
//! **Cost.** Entries times streams, plus one visit per byte interval that an access touches (intervals are split at every
//! boundary that any access ever had): vector clocks with epochs, and per interval the last write and the reads since.
//!
//! | file | idea |
//! | --- | --- |
//! | `program` | streams, events and collectives found in the logs, and what is wrong with them |
//! | `order` | a topological walk that computes each entry's vector clock |
//! | `memory` | intervals with their last write and the reads since |
//! | `ahead` | rule E8 |
//! | `report` | violations and the summary |
//! | `passes` | bytes touched by work, to see that no step passes over a full buffer |

mod ahead;
mod memory;
mod order;
mod passes;
mod program;
mod report;

use std::sync::Arc;

use crate::null::{LogEntry, NullLog};

pub use passes::{Pass, bytes_by_work, full_buffer_passes};
pub use report::{RankSummary, Site, Summary, Violation, Violations};

/// What to check beyond memory.
#[derive(Clone, Debug, Default)]
pub struct CheckOptions {
    /// Rule E8.
    pub ahead: RunAhead,
}

/// How far gathers may run ahead of the executor's stream (rules C1 and E8).
///
/// A gather that was let go otherwise (peer demand, flush, drain) has no entry to start after. The log shows this: the
/// mark that would let it go is not there, or comes later than the gather.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum RunAhead {
    /// Not checked.
    #[default]
    Any,
    /// Mode window: the gather at position `i` starts after the first [`crate::Mark::Demanded`] of its version with
    /// `demanded + credits > i`.
    Window {
        /// Buckets in gather order.
        order: Vec<u32>,
        /// Credits in buckets.
        credits: u32,
    },
    /// Mode chain: the gather at position `i > 0` starts after [`crate::Mark::WaitEnded`] at `i - 1` of its version.
    Chain {
        /// Buckets in gather order.
        order: Vec<u32>,
    },
}

/// Checks the logs of all ranks, in rank order.
///
/// # Errors
/// [`Violations`]: every violation found, with the summary. Behind a cycle nothing is checked.
pub fn check(logs: &[&[LogEntry]], options: &CheckOptions) -> Result<Summary, Violations> {
    let mut findings = report::Findings::new(logs);
    let program = program::Program::read(logs, &mut findings);
    let mut memory = memory::Memory::default();
    let ahead = ahead::Ahead::new(&program, &options.ahead);
    order::walk(&program, &mut findings, &mut |step, findings| {
        memory.visit(&program, step, findings);
        ahead.visit(&program, step, findings);
    });
    findings.finish()
}

/// [`check`] for logs as [`crate::Device::log`] returns them, in rank order, each once. Holds their locks meanwhile.
///
/// # Errors
/// As [`check`].
pub fn check_logs(logs: &[Arc<NullLog>], options: &CheckOptions) -> Result<Summary, Violations> {
    let held: Vec<_> = logs.iter().map(|log| log.entries.lock()).collect();
    let entries: Vec<&[LogEntry]> = held.iter().map(|entries| entries.as_slice()).collect();
    check(&entries, options)
}

#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;
