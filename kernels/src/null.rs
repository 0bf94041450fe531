//! The null device: all work completes at once and does nothing; every enqueue, record, wait, access and mark is logged.
use crate::device::{Access, Device, Mark, StreamId, StreamKind};
use crate::verdict::StepReport;
use crate::work::Work;
use parking_lot::Mutex;
use std::sync::Arc;

/// The verdict of each step, by its number.
#[derive(Clone)]
pub struct Script(pub Arc<dyn Fn(u64) -> StepReport + Send + Sync>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script(..)")
    }
}

/// One line of the log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LogEntry {
    /// A stream was handed out.
    Stream {
        /// Its id.
        id: StreamId,
        /// What it is for.
        kind: StreamKind,
    },
    /// Work was enqueued.
    Enqueue {
        /// On which stream.
        on: StreamId,
        /// What.
        work: Work,
    },
    /// An event was recorded.
    Record {
        /// On which stream.
        on: StreamId,
        /// Its id.
        event: u64,
    },
    /// A stream waits for an event.
    Wait {
        /// Which stream.
        on: StreamId,
        /// For which event.
        event: u64,
    },
    /// The executor touches memory.
    Access {
        /// On which stream.
        on: StreamId,
        /// What and how.
        access: Access,
    },
    /// A mark in the executor's stream.
    Mark {
        /// On which stream.
        on: StreamId,
        /// What.
        mark: Mark,
    },
}

/// The log of one rank.
#[derive(Debug, Default)]
pub struct NullLog {
    /// In the order of the calls.
    pub entries: Mutex<Vec<LogEntry>>,
}

/// The null device.
#[derive(Debug)]
pub struct NullDevice {}

impl NullDevice {
    /// Opens it. `script` gives each step's verdict (default: updated, norm 0).
    pub fn open(rank: usize, world: usize, script: Option<Script>, keep_log: bool) -> Arc<dyn Device> {
        let _ = (rank, world, script, keep_log);
        unimplemented!()
    }
}
