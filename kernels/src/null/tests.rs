#![allow(clippy::unwrap_used)]

use super::*;
use crate::collective::{CollectiveKey, CollectiveKind, CollectiveOp, Comm};
use crate::dtype::DType;
use crate::error::{Failure, FailureKind};
use crate::norm::NormType;
use crate::verdict::{Average, OnNonFinite, Report, ScalerRule, VerdictRule};
use crate::work::{Fill, Verdict};

fn fill(dst: BufRange) -> Work {
    Work::Fill(Fill { dst, dtype: DType::F32, value: 0.0 })
}

fn verdict(range: BufRange, step: u64, report: &Report) -> Work {
    Work::Verdict(Verdict {
        records: range,
        rule: VerdictRule {
            average: Average::Ranks(1),
            norm: NormType::default(),
            max_norm: 0.0,
            on_nonfinite: OnNonFinite::Skip,
        },
        scaler: ScalerRule::None,
        scalars: range,
        report: report.clone(),
        step,
    })
}

fn gather(range: BufRange) -> Collective {
    let key = CollectiveKey {
        seq: 0,
        kind: CollectiveKind::Gather,
        bucket: 0,
        bytes: range.bytes() as u64,
        dtype: DType::F32,
        version: 1,
        group: 0,
    };
    Collective::of_all(key, CollectiveOp::AllGather { send: range, recv: range })
}

#[test]
fn every_call_is_logged_in_order() {
    let device = NullDevice::open(1, 2, None, true);
    let mut comm = Comm::new(device.clone(), false, 1, 2);
    let range = device.alloc(64, &[]).unwrap().whole();
    let executor = device.stream(StreamKind::Executor).unwrap();
    let gathers = device.stream(StreamKind::Gather).unwrap();
    assert_eq!(gathers, device.stream(StreamKind::Gather).unwrap(), "a kind has one stream");
    device.enqueue(gathers, fill(range)).unwrap();
    comm.issue(gathers, gather(range)).unwrap();
    let first = device.record(gathers);
    let second = device.record(gathers);
    assert!(first.is_done());
    assert_ne!(first.id(), second.id());
    device.wait(executor, &second).unwrap();
    device.access(executor, Access { range, mode: AccessMode::Read });
    device.mark(executor, Mark::Demanded { version: 0, demanded: 1 });

    let log = device.log().unwrap();
    assert_eq!((log.rank, log.world), (1, 2));
    let entries = log.entries.lock();
    let lines: Vec<String> = entries
        .iter()
        .map(|entry| match entry {
            LogEntry::Alloc { buffer } => format!("alloc {}", buffer.bytes),
            LogEntry::Stream { id, kind } => format!("stream {} {kind:?}", id.0),
            LogEntry::Enqueue { on, work } => format!("{} {}", on.0, work.name()),
            LogEntry::Record { on, event } => format!("{} record {}", on.0, event - first.id()),
            LogEntry::Wait { on, event } => format!("{} wait {}", on.0, event - first.id()),
            LogEntry::Access { on, access } => format!("{} {:?}", on.0, access.mode),
            LogEntry::Mark { on, .. } => format!("{} mark", on.0),
        })
        .collect();
    let expected = [
        "alloc 64",
        "stream 0 Executor",
        "stream 3 Gather",
        "stream 3 Gather",
        "3 fill",
        "3 collective",
        "3 record 0",
        "3 record 1",
        "0 wait 1",
        "0 Read",
        "0 mark",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn without_a_log_nothing_is_kept() {
    let device = NullDevice::open(0, 1, None, false);
    let on = device.stream(StreamKind::Optimizer).unwrap();
    assert!(device.log().is_none());
    let event = device.record(on);
    assert_eq!(event.id(), 0);
    assert!(event.is_done());
}

#[test]
fn the_script_decides_each_step_and_without_one_every_step_updates() {
    let script = Script(Arc::new(|step| StepReport { updated: step != 1, ..updated_report() }));
    for (script, expected) in [(Some(script), [true, false]), (None, [true, true])] {
        let device = NullDevice::open(0, 1, script, false);
        let range = device.alloc(64, &[]).unwrap().whole();
        let on = device.stream(StreamKind::Optimizer).unwrap();
        for (step, updated) in expected.into_iter().enumerate() {
            let report = Report::new();
            device.enqueue(on, verdict(range, step as u64, &report)).unwrap();
            assert_eq!(report.take(step as u64).unwrap().updated, updated, "step {step}");
        }
    }
}

#[test]
fn a_verdict_that_is_held_back_ends_once_it_is_let_through_or_with_the_first_cause() {
    let gate = Gate::default();
    let device = NullDevice::open_gated(0, 1, None, true, Some(gate.clone()));
    let range = device.alloc(64, &[]).unwrap().whole();
    let on = device.stream(StreamKind::Optimizer).unwrap();
    let events: Vec<_> = (0..3)
        .map(|step| {
            device.enqueue(on, verdict(range, step, &Report::new())).unwrap();
            let judged = device.record(on);
            assert!(device.record(on).is_done(), "nothing but the verdict is held back");
            judged
        })
        .collect();
    gate.let_through(1);
    assert_eq!([0, 1, 2].map(|step: usize| events[step].is_done()), [true, false, false]);
    device.poison(Arc::new(Failure::new(FailureKind::Device, 0, "first")));
    assert!(matches!(events[1].status(), EventStatus::Failed(cause) if cause.message == "first"));
}

#[test]
fn after_poison_everyone_gets_the_first_cause() {
    let device = NullDevice::open(0, 1, None, true);
    let mut comm = Comm::new(device.clone(), false, 0, 1);
    let range = device.alloc(64, &[]).unwrap().whole();
    let on = device.stream(StreamKind::Reduce).unwrap();
    let before = device.record(on);
    let first = Arc::new(Failure::new(FailureKind::RankLost, 3, "gone"));
    device.poison(first.clone());
    device.poison(Arc::new(Failure::new(FailureKind::Closed, 0, "later")));

    let is_first = |result: Result<(), DeviceError>| matches!(result, Err(DeviceError::Poisoned(c)) if c == first);
    assert!(is_first(device.enqueue(on, fill(range))));
    assert!(is_first(comm.issue(on, gather(range))));
    assert!(is_first(device.wait(on, &before)));
    assert!(before.is_done(), "what ended before stays as it ended");
    let after = device.record(on);
    assert!(matches!(after.status(), EventStatus::Failed(cause) if cause == first));
    let (send, heard) = crossbeam_channel::bounded(1);
    device.when(&after, Box::new(move |result| send.send(result).unwrap()));
    assert_eq!(heard.recv().unwrap(), Err(first));
}

#[test]
fn collectives_and_unknown_streams_are_refused() {
    let device = NullDevice::open(0, 1, None, true);
    let range = device.alloc(64, &[]).unwrap().whole();
    let on = device.stream(StreamKind::Gather).unwrap();
    let refused = device.enqueue(on, Work::Collective(gather(range)));
    assert!(matches!(refused, Err(DeviceError::CollectiveOutsideComm)));
    let nowhere = StreamId(9);
    assert!(matches!(device.enqueue(nowhere, fill(range)), Err(DeviceError::NoStream(s)) if s == nowhere));
    assert_eq!(device.log().unwrap().entries.lock().len(), 2, "what is refused is not logged");
}

#[test]
fn leases_are_real_memory_with_and_without_a_log() {
    for keep_log in [true, false] {
        let device = NullDevice::open(0, 1, None, keep_log);
        let buffer = device.alloc(64, &[32, 64]).unwrap();
        let mut init = device.lease(buffer.range(0, 32), AccessMode::Write).unwrap();
        init.as_mut_slice::<f32>().unwrap()[7] = 1.5;
        assert!(matches!(device.lease(buffer.range(28, 32), AccessMode::Read), Err(LeaseError::Conflict { .. })));
        drop(init);
        let guard = device.lease(buffer.range(0, 64), AccessMode::Read).unwrap();
        let on = device.stream(StreamKind::Reduce).unwrap();
        device.enqueue(on, fill(buffer.whole())).unwrap();
        assert_eq!(guard.as_slice::<f32>().unwrap()[6..9], [0.0, 1.5, 0.0], "work touches no memory");
        assert_eq!(device.allocated_bytes(), 64);
    }
}
