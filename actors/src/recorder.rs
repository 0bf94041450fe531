//! The recorder: when the executor waited, when collectives ran, and what of them was hidden.
//!
//! Exposed time is time in which the executor's stream waits for communication: the part of the executor's waits during
//! which a gather (or a reduce) was in transfer on this rank. What is left of a wait is other work, Adam or a slower peer.
//! Costs one clock reading at each end of a wait that really waited, and nothing otherwise.

use gatherflow_kernels::{CollectiveKind, Device, Span, clock};
use parking_lot::Mutex;

use crate::plan::BucketId;

/// Times of one step on this rank, in nanoseconds. A step is what lies between two returns of `step`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// The step (number of steps before it).
    pub step: u64,
    /// From the return of the `step` call before it to the return of its own.
    pub step_ns: u64,
    /// The same without the executor's waits.
    pub compute_ns: u64,
    /// Transfer time of all gathers of the version that this step read.
    pub gather_ns: u64,
    /// Transfer time of all reduces of this step.
    pub reduce_ns: u64,
    /// Executor's waits while a gather was in transfer.
    pub exposed_gather_ns: u64,
    /// Executor's waits while a reduce was in transfer.
    pub exposed_reduce_ns: u64,
    /// All of the executor's waits.
    pub wait_ns: u64,
    /// The buckets it waited for, and how long for each; in the order of the first wait.
    pub waited: Vec<(BucketId, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Waited {
    from_ns: u64,
    to_ns: u64,
    bucket: Option<BucketId>,
}

#[derive(Debug, Default)]
struct Log {
    waits: Vec<Waited>,
    spans: Vec<Span>,
    /// `(step, begin, end)` of steps whose times nobody has taken.
    steps: Vec<(u64, u64, u64)>,
    last_boundary_ns: u64,
}

/// Collects spans and waits of one rank.
#[derive(Debug)]
pub(crate) struct Recorder {
    log: Mutex<Log>,
}

/// Without anyone who takes the times, this many steps are kept.
const STEPS_KEPT: usize = 256;

impl Recorder {
    pub(crate) fn new() -> Self {
        let log = Log { last_boundary_ns: clock::now_ns(), ..Log::default() };
        Self { log: Mutex::new(log) }
    }

    /// The executor waited from `from_ns` until now.
    pub(crate) fn waited(&self, from_ns: u64, bucket: Option<BucketId>) {
        self.log.lock().waits.push(Waited { from_ns, to_ns: clock::now_ns(), bucket });
    }

    /// The call of `step` number `step` returns.
    pub(crate) fn boundary(&self, step: u64, device: &dyn Device) {
        let now = clock::now_ns();
        let mut log = self.log.lock();
        let begin = std::mem::replace(&mut log.last_boundary_ns, now);
        log.steps.push((step, begin, now));
        device.drain_spans(&mut log.spans);
        if log.steps.len() > STEPS_KEPT {
            let drop_steps = log.steps.len() / 2;
            log.steps.drain(..drop_steps);
            log.forget();
        }
    }

    /// The times of all steps that are over, each once. The newest step is over once the next one is, or when `all` is set.
    pub(crate) fn take(&self, device: &dyn Device, all: bool) -> Vec<StepTimes> {
        let mut log = self.log.lock();
        device.drain_spans(&mut log.spans);
        let keep = usize::from(!all);
        let count = log.steps.len().saturating_sub(keep);
        let steps: Vec<_> = log.steps.drain(..count).collect();
        let times = steps.iter().map(|step| log.times(*step)).collect();
        log.forget();
        times
    }
}

impl Log {
    fn times(&self, (step, begin, end): (u64, u64, u64)) -> StepTimes {
        let mut times = StepTimes { step, step_ns: end - begin, ..StepTimes::default() };
        for span in self.spans.iter().filter(|span| span.key.version == step) {
            let ns = span.end_ns.saturating_sub(span.begin_ns);
            match span.key.kind {
                CollectiveKind::Gather => times.gather_ns += ns,
                CollectiveKind::Reduce => times.reduce_ns += ns,
                _ => {}
            }
        }
        for wait in self.waits.iter().filter(|wait| wait.to_ns > begin && wait.from_ns < end) {
            let (from, to) = (wait.from_ns.max(begin), wait.to_ns.min(end));
            times.wait_ns += to - from;
            times.exposed_gather_ns += self.overlap(CollectiveKind::Gather, from, to);
            times.exposed_reduce_ns += self.overlap(CollectiveKind::Reduce, from, to);
            if let Some(bucket) = wait.bucket {
                match times.waited.iter_mut().find(|(other, _)| *other == bucket) {
                    Some((_, ns)) => *ns += to - from,
                    None => times.waited.push((bucket, to - from)),
                }
            }
        }
        times.compute_ns = times.step_ns.saturating_sub(times.wait_ns);
        times
    }

    /// How much of `[from, to)` the transfers of this kind cover together.
    fn overlap(&self, kind: CollectiveKind, from: u64, to: u64) -> u64 {
        let mut parts: Vec<(u64, u64)> = self
            .spans
            .iter()
            .filter(|span| span.key.kind == kind && span.end_ns > from && span.begin_ns < to)
            .map(|span| (span.begin_ns.max(from), span.end_ns.min(to)))
            .collect();
        parts.sort_unstable();
        let (mut covered, mut until) = (0, from);
        for (begin, end) in parts {
            let begin = begin.max(until);
            if end > begin {
                covered += end - begin;
                until = end;
            }
        }
        covered
    }

    /// Drops waits and spans that no step still to be taken can need.
    fn forget(&mut self) {
        let (oldest_ns, oldest_step) = match self.steps.first() {
            Some((step, begin, _)) => (*begin, *step),
            None => (self.last_boundary_ns, u64::MAX),
        };
        self.waits.retain(|wait| wait.to_ns > oldest_ns);
        self.spans
            .retain(|span| span.end_ns > oldest_ns || (oldest_step != u64::MAX && span.key.version >= oldest_step));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use gatherflow_kernels::{CollectiveKey, DType};

    fn span(kind: CollectiveKind, version: u64, begin_ns: u64, end_ns: u64) -> Span {
        let key = CollectiveKey { seq: 0, kind, bucket: 0, bytes: 1, dtype: DType::F32, version, group: 0 };
        Span { key, reached_ns: begin_ns, begin_ns, end_ns }
    }

    #[test]
    fn only_waits_during_a_transfer_are_exposed_communication() {
        let log = Log {
            waits: vec![
                Waited { from_ns: 100, to_ns: 200, bucket: Some(BucketId(0)) },
                Waited { from_ns: 300, to_ns: 330, bucket: Some(BucketId(1)) },
            ],
            spans: vec![
                span(CollectiveKind::Gather, 1, 50, 150),
                span(CollectiveKind::Gather, 1, 140, 160),
                span(CollectiveKind::Reduce, 1, 320, 400),
            ],
            ..Log::default()
        };
        let times = log.times((1, 0, 1000));
        assert_eq!(times.gather_ns, 120);
        assert_eq!(times.reduce_ns, 80);
        assert_eq!(times.exposed_gather_ns, 60);
        assert_eq!(times.exposed_reduce_ns, 10);
        assert_eq!((times.wait_ns, times.compute_ns), (130, 870));
        assert_eq!(times.waited, [(BucketId(0), 100), (BucketId(1), 30)]);
    }

    #[test]
    fn a_wait_across_two_steps_counts_once_in_each_part() {
        let log = Log { waits: vec![Waited { from_ns: 90, to_ns: 120, bucket: None }], ..Log::default() };
        let (first, second) = (log.times((0, 0, 100)), log.times((1, 100, 200)));
        assert_eq!((first.wait_ns, second.wait_ns), (10, 20));
    }
}
