//! Which bytes work touches, read off one rank's log: a step should pass over no full buffer beyond its collectives.

use std::collections::BTreeMap;

use crate::buffer::BufferId;
use crate::null::LogEntry;
use crate::work::Work;

/// A piece of work and how much of one buffer it touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Position in the log.
    pub position: usize,
    /// The work's name.
    pub work: &'static str,
    /// The buffer.
    pub buffer: BufferId,
    /// Bytes of it that the work reads or writes, each counted once.
    pub bytes: usize,
}

/// All work that is no collective and touches more bytes of a buffer than `shard_bytes` allows for that buffer.
pub fn full_buffer_passes(log: &[LogEntry], shard_bytes: impl Fn(BufferId) -> usize) -> Vec<Pass> {
    let mut passes = Vec::new();
    each_pass(log, &mut |pass| {
        if pass.bytes > shard_bytes(pass.buffer) {
            passes.push(pass);
        }
    });
    passes
}

/// Bytes that all work of one name touches, per buffer, without collectives: many small pieces are a full pass too. What
/// several pieces touch counts several times.
pub fn bytes_by_work(log: &[LogEntry]) -> BTreeMap<(BufferId, &'static str), usize> {
    let mut bytes = BTreeMap::new();
    each_pass(log, &mut |pass| *bytes.entry((pass.buffer, pass.work)).or_default() += pass.bytes);
    bytes
}

fn each_pass(log: &[LogEntry], visit: &mut dyn FnMut(Pass)) {
    for (position, entry) in log.iter().enumerate() {
        let LogEntry::Enqueue { work, .. } = entry else { continue };
        if matches!(work, Work::Collective(_)) {
            continue;
        }
        let mut ranges = Vec::new();
        work.accesses(&mut |access| ranges.push(access.range));
        ranges.sort_by_key(|range| (range.buffer, range.start));
        for same in ranges.chunk_by(|a, b| a.buffer == b.buffer) {
            let mut bytes = 0;
            let mut covered = 0;
            for range in same {
                bytes += range.end.saturating_sub(range.start.max(covered));
                covered = covered.max(range.end);
            }
            visit(Pass { position, work: work.name(), buffer: same[0].buffer, bytes });
        }
    }
}
