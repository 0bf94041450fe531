#![allow(clippy::unwrap_used)]

mod agreement;

use super::*;
use crate::buffer::{BufRange, Buffer, BufferId};
use crate::collective::{Collective, CollectiveKey, CollectiveKind, CollectiveOp};
use crate::device::{Access, AccessMode, Mark, StreamId, StreamKind};
use crate::dtype::DType;
use crate::members::Members;
use crate::work::{Copy, Fill, Work};

const EXECUTOR: StreamId = StreamId(0);
const OPTIMIZER: StreamId = StreamId(1);
const GATHER: StreamId = StreamId(3);

fn range(start: usize, end: usize) -> BufRange {
    BufRange { buffer: BufferId(0), start, end }
}

fn fill(on: StreamId, dst: BufRange) -> LogEntry {
    LogEntry::Enqueue { on, work: Work::Fill(Fill { dst, dtype: DType::F32, value: 0.0 }) }
}

fn copy(on: StreamId, src: BufRange, dst: BufRange) -> LogEntry {
    LogEntry::Enqueue { on, work: Work::Copy(Copy { src, dst }) }
}

fn access(mode: AccessMode, range: BufRange) -> LogEntry {
    LogEntry::Access { on: EXECUTOR, access: Access { range, mode } }
}

fn read(range: BufRange) -> LogEntry {
    access(AccessMode::Read, range)
}

fn record(on: StreamId, event: u64) -> LogEntry {
    LogEntry::Record { on, event }
}

fn wait(on: StreamId, event: u64) -> LogEntry {
    LogEntry::Wait { on, event }
}

fn key(seq: u64, kind: CollectiveKind) -> CollectiveKey {
    CollectiveKey { seq, kind, bucket: seq as u32, bytes: 8, dtype: DType::F32, version: 1, group: 0 }
}

fn collective(on: StreamId, key: CollectiveKey, send: BufRange, recv: BufRange) -> LogEntry {
    let op = CollectiveOp::AllGather { send, recv };
    LogEntry::Enqueue { on, work: Work::Collective(Collective::of_all(key, op)) }
}

/// The same collective among some ranks.
fn among(members: Members, mut entry: LogEntry) -> LogEntry {
    if let LogEntry::Enqueue { work: Work::Collective(collective), .. } = &mut entry {
        collective.members = members;
    }
    entry
}

/// An in-place gather into bytes 0..8.
fn gather(seq: u64) -> LogEntry {
    collective(GATHER, key(seq, CollectiveKind::Gather), range(0, 4), range(0, 8))
}

/// A gather that touches nothing else's bytes.
fn gather_apart(seq: u64) -> LogEntry {
    let start = 8 * seq as usize;
    collective(GATHER, key(seq, CollectiveKind::Gather), range(start, start + 4), range(start, start + 8))
}

fn demanded(demanded: u32) -> LogEntry {
    LogEntry::Mark { on: EXECUTOR, mark: Mark::Demanded { version: 1, demanded } }
}

fn wait_ended(position: u32) -> LogEntry {
    LogEntry::Mark { on: EXECUTOR, mark: Mark::WaitEnded { version: 1, position } }
}

fn run(logs: &[Vec<LogEntry>], ahead: RunAhead) -> Result<Summary, Violations> {
    let logs: Vec<&[LogEntry]> = logs.iter().map(Vec::as_slice).collect();
    check(&logs, &CheckOptions { ahead })
}

fn found(logs: &[Vec<LogEntry>]) -> Vec<Violation> {
    run(logs, RunAhead::Any).unwrap_err().list
}

fn without(log: &[LogEntry], position: usize) -> Vec<LogEntry> {
    let mut log = log.to_vec();
    log.remove(position);
    log
}

/// Two steps of one bucket on one rank: gradient, Adam (a copy here), gather, read.
fn step_of(rank: usize) -> Vec<LogEntry> {
    let shard = range(4 * rank, 4 * rank + 4);
    let at = |seq| collective(GATHER, key(seq, CollectiveKind::Gather), shard, range(0, 8));
    vec![
        read(range(0, 8)),
        record(EXECUTOR, 1),
        wait(OPTIMIZER, 1),
        copy(OPTIMIZER, range(100, 104), shard),
        record(OPTIMIZER, 2),
        wait(GATHER, 2),
        at(0),
        record(GATHER, 3),
        wait(EXECUTOR, 3),
        read(range(0, 8)),
    ]
}

#[test]
fn work_ordered_by_events_is_clean() {
    let summary = run(&[step_of(0), step_of(1)], RunAhead::Any).unwrap();
    assert_eq!((summary.entries, summary.streams, summary.races), (20, 6, 0));
    assert_eq!((summary.gathers, summary.accesses), (1, 2 * (1 + 2 + 2 + 1)));
    assert_eq!(summary.ranks[1], RankSummary { works: 1, collectives: 1, collective_bytes: 8, allocated_bytes: 0 });
}

#[test]
fn removing_any_wait_is_found_as_a_race_on_that_rank() {
    for position in [2, 5, 8] {
        let races = found(&[step_of(0), without(&step_of(1), position)]);
        assert!(!races.is_empty() && races.iter().all(|v| matches!(v, Violation::Race { rank: 1, .. })), "{races:?}");
    }
}

#[test]
fn recording_too_early_is_found_as_a_race() {
    for position in [1, 4, 7] {
        let mut log = step_of(0);
        log.swap(position - 1, position);
        assert!(matches!(found(&[log, step_of(1)])[0], Violation::Race { rank: 0, .. }), "entry {position}");
    }
}

#[test]
fn a_race_names_both_sides_and_where_they_meet() {
    let stream = LogEntry::Stream { id: OPTIMIZER, kind: StreamKind::Optimizer };
    let violations = found(&[vec![stream, fill(OPTIMIZER, range(4, 12)), read(range(0, 8))]]);
    let [violation] = violations.as_slice() else { panic!("{violations:?}") };
    let said = violation.to_string();
    for part in ["bytes 4..8", "fill [rank 0, Optimizer stream, entry 1]", "read by the executor", "entry 2"] {
        assert!(said.contains(part), "{part:?} is missing in {said:?}");
    }
    let violations = found(&[vec![gather(0), read(range(0, 8))]]);
    assert!(violations[0].to_string().contains("gather of bucket 0"), "{}", violations[0]);
}

#[test]
fn reads_do_not_conflict_and_neither_does_memory_apart() {
    run(
        &[vec![read(range(0, 8)), copy(OPTIMIZER, range(0, 8), range(8, 16)), fill(GATHER, range(16, 24))]],
        RunAhead::Any,
    )
    .unwrap();
}

#[test]
fn a_read_between_two_ordered_writes_is_still_compared_with_the_later_one() {
    let log =
        [fill(GATHER, range(0, 8)), record(GATHER, 1), wait(EXECUTOR, 1), read(range(2, 4)), fill(GATHER, range(0, 8))];
    assert!(matches!(found(&[log.to_vec()])[..], [Violation::Race { range: BufRange { start: 2, end: 4, .. }, .. }]));
}

#[test]
fn the_read_of_a_peer_that_its_gather_does_not_wait_for_is_found() {
    let quiet = vec![gather(0)];
    let reader = vec![read(range(6, 8)), gather(0)];
    assert!(matches!(found(&[quiet, reader])[..], [Violation::Race { rank: 1, .. }]));
}

#[test]
fn a_collective_orders_what_ranks_did_before_it_but_not_the_memory_of_peers() {
    // Rank 1's second collective is behind its first one only by way of rank 0: not enough for rank 1's own memory.
    let ordered = vec![
        gather(0),
        record(GATHER, 1),
        wait(OPTIMIZER, 1),
        collective(OPTIMIZER, key(1, CollectiveKind::Small), range(50, 51), range(50, 52)),
    ];
    let detour = |last: LogEntry| {
        vec![gather(0), collective(OPTIMIZER, key(1, CollectiveKind::Small), range(50, 51), range(50, 52)), last]
    };
    assert!(matches!(
        found(&[ordered.clone(), detour(fill(OPTIMIZER, range(0, 8)))])[..],
        [Violation::Race { rank: 1, .. }]
    ));
    // What rank 1 did before the first collective is over.
    let mut before = detour(fill(OPTIMIZER, range(90, 94)));
    before.insert(0, fill(GATHER, range(90, 94)));
    run(&[ordered, before], RunAhead::Any).unwrap();
}

#[test]
fn a_collective_missing_on_a_rank_is_found_and_the_rest_still_checked() {
    let violations = found(&[vec![gather(0), gather(1), read(range(0, 8))], vec![gather(1)]]);
    assert!(
        violations.iter().any(|v| matches!(v, Violation::MissingCollective { seq: 0, rank: 1, .. })),
        "{violations:?}"
    );
    assert!(violations.iter().any(|v| matches!(v, Violation::Race { .. })), "{violations:?}");
}

#[test]
fn different_collectives_under_one_number_are_found() {
    let other = CollectiveKey { bucket: 7, ..key(0, CollectiveKind::Gather) };
    let theirs = vec![collective(GATHER, other, range(0, 4), range(0, 8))];
    assert!(matches!(found(&[vec![gather(0)], theirs])[..], [Violation::Mismatch { seq: 0, .. }]));
    let op = CollectiveOp::Broadcast { range: range(0, 8), root: 0 };
    let broadcast = Work::Collective(Collective::of_all(key(0, CollectiveKind::Gather), op));
    let theirs = vec![LogEntry::Enqueue { on: GATHER, work: broadcast }];
    assert!(matches!(found(&[vec![gather(0)], theirs])[..], [Violation::Mismatch { seq: 0, .. }]));
}

#[test]
fn a_collective_of_some_ranks_is_theirs_alone_and_counts_once() {
    let of = |ranks: [usize; 2], seq| among(Members::of(ranks, 4), gather(seq));
    let [low, high] = [[0, 1], [2, 3]];
    let summary = run(
        &[
            vec![of(low, 0), gather(1)],
            vec![of(low, 0), gather(1)],
            vec![of(high, 0), gather(1)],
            vec![of(high, 0), gather(1)],
        ],
        RunAhead::Any,
    );
    assert_eq!(summary.unwrap().gathers, 2);
    // A read of rank 3 before the collective of the others orders nothing.
    let reader = vec![read(range(6, 8)), of(high, 0)];
    let race = found(&[vec![of(low, 0)], vec![of(low, 0)], vec![of(high, 0)], reader]);
    assert!(matches!(race[..], [Violation::Race { rank: 3, .. }]), "{race:?}");

    let alone = found(&[vec![of(low, 0)], vec![], vec![of(high, 0)], vec![of(high, 0)]]);
    assert!(matches!(alone[..], [Violation::MissingCollective { seq: 0, rank: 1, .. }]), "{alone:?}");
    let outsider = found(&[vec![of(low, 0)], vec![of(low, 0)], vec![of(low, 0)], vec![]]);
    assert!(outsider.iter().any(|v| matches!(v, Violation::Outsider { seq: 0, .. })), "{outsider:?}");
    let crossed = found(&[vec![of(low, 0)], vec![of([1, 2], 0)], vec![of([1, 2], 0)], vec![]]);
    let named = |v: &Violation| matches!(v, Violation::Mismatch { .. }) && v.to_string().contains("of ranks 1, 2");
    assert!(crossed.iter().any(named), "{crossed:?}");
    let other = CollectiveKey { version: 2, ..key(0, CollectiveKind::Gather) };
    let other = || among(Members::of(high, 4), collective(GATHER, other, range(0, 4), range(0, 8)));
    let differ = found(&[vec![of(low, 0)], vec![of(low, 0)], vec![other()], vec![other()]]);
    assert!(matches!(differ[..], [Violation::Mismatch { seq: 0, .. }]), "{differ:?}");
}

#[test]
fn collectives_out_of_order_on_one_stream_are_a_cycle() {
    let violations = found(&[vec![gather(0), gather(1)], vec![gather(1), gather(0)]]);
    let [Violation::OutOfOrder { seq: 0, after: 1, .. }, Violation::Cycle(sites)] = violations.as_slice() else {
        panic!("{violations:?}")
    };
    assert_eq!(sites.len(), 2);
}

#[test]
fn a_wait_for_a_later_record_of_the_same_stream_is_a_cycle() {
    assert!(matches!(found(&[vec![wait(GATHER, 1), record(GATHER, 1)]])[..], [Violation::Cycle(_)]));
}

#[test]
fn events_that_nobody_records_or_two_record_are_found() {
    assert!(matches!(found(&[vec![wait(GATHER, 1)]])[..], [Violation::UnknownEvent { .. }]));
    let twice = vec![record(GATHER, 1), record(GATHER, 1)];
    assert!(matches!(found(&[twice])[..], [Violation::RepeatedEvent { .. }]));
    let repeated = vec![gather(0), gather(0)];
    assert!(matches!(found(&[repeated])[..], [Violation::OutOfOrder { seq: 0, after: 0, .. }]));
}

#[test]
fn an_access_beyond_its_allocation_is_found() {
    let alloc = LogEntry::Alloc { buffer: Buffer { id: BufferId(0), bytes: 8 } };
    let log = vec![alloc, read(range(0, 8)), read(range(4, 12))];
    assert!(matches!(found(&[log])[..], [Violation::OutOfBounds { bytes: 8, .. }]));
}

fn window(credits: u32) -> RunAhead {
    RunAhead::Window { order: vec![0, 1, 2, 3], credits }
}

#[test]
fn a_gather_let_go_by_an_entry_must_start_after_it() {
    // One credit: the gather at position 1 needs one demanded, the one at position 2 needs two.
    let log = vec![
        gather_apart(0),
        demanded(1),
        record(EXECUTOR, 1),
        wait(GATHER, 1),
        gather_apart(1),
        demanded(2),
        record(EXECUTOR, 2),
        wait(GATHER, 2),
        gather_apart(2),
    ];
    let summary = run(std::slice::from_ref(&log), window(1)).unwrap();
    assert_eq!((summary.let_go_by_entry, summary.let_go_within_credits, summary.let_go_without_entry), (2, 1, 0));
    for position in [3, 7] {
        let violations = run(&[without(&log, position)], window(1)).unwrap_err();
        assert!(matches!(violations.list[..], [Violation::RanAhead { .. }]), "{violations}");
    }
    // The event recorded before the mark does not count.
    let mut early = log.clone();
    early.swap(5, 6);
    assert!(matches!(run(&[early], window(1)).unwrap_err().list[..], [Violation::RanAhead { .. }]));
    // Two credits: the first entry is enough for position 2.
    run(&[without(&log, 7)], window(2)).unwrap();
    // Not asked for, not checked.
    run(&[without(&log, 7)], RunAhead::Any).unwrap();
}

#[test]
fn a_gather_let_go_without_an_entry_is_counted_only() {
    let log = vec![gather_apart(0), demanded(1), gather_apart(3), demanded(4)];
    let summary = run(&[log], window(1)).unwrap();
    assert_eq!(summary.let_go_without_entry, 1, "demand for 3 comes after the gather");
    // A later, smaller demand takes nothing back.
    let falling = vec![demanded(3), demanded(1), demanded(2), gather_apart(3)];
    assert!(matches!(run(&[falling], window(1)).unwrap_err().list[..], [Violation::RanAhead { .. }]));
    let other_version = LogEntry::Mark { on: EXECUTOR, mark: Mark::Demanded { version: 0, demanded: 4 } };
    let summary = run(&[vec![other_version, gather_apart(3)]], window(1)).unwrap();
    assert_eq!(summary.let_go_without_entry, 1, "demand for another version lets nothing go");
}

#[test]
fn in_chain_mode_a_gather_starts_after_the_wait_on_the_one_before() {
    let chain = || RunAhead::Chain { order: vec![0, 1, 2] };
    let log = vec![
        gather_apart(0),
        record(GATHER, 1),
        wait(EXECUTOR, 1),
        wait_ended(0),
        record(EXECUTOR, 2),
        wait(GATHER, 2),
        gather_apart(1),
        gather_apart(2),
    ];
    let summary = run(std::slice::from_ref(&log), chain()).unwrap();
    assert_eq!((summary.let_go_by_entry, summary.let_go_within_credits, summary.let_go_without_entry), (1, 1, 1));
    assert!(matches!(run(&[without(&log, 5)], chain()).unwrap_err().list[..], [Violation::RanAhead { .. }]));
}

#[test]
fn a_gather_of_an_unknown_bucket_is_found_where_the_order_matters() {
    let order = RunAhead::Chain { order: vec![1] };
    assert!(matches!(run(&[vec![gather_apart(0)]], order).unwrap_err().list[..], [Violation::UnknownBucket { .. }]));
}

#[test]
fn work_over_more_than_a_shard_is_listed_and_collectives_are_not() {
    let log = vec![
        gather(0),
        fill(OPTIMIZER, range(0, 4)),
        copy(OPTIMIZER, range(0, 6), range(4, 8)),
        copy(OPTIMIZER, range(0, 4), BufRange { buffer: BufferId(1), start: 0, end: 4 }),
    ];
    let expected = Pass { position: 2, work: "copy", buffer: BufferId(0), bytes: 8 };
    assert_eq!(full_buffer_passes(&log, |_| 4), [expected]);
    let bytes: Vec<_> = bytes_by_work(&log).into_iter().collect();
    assert_eq!(bytes, [((BufferId(0), "copy"), 12), ((BufferId(0), "fill"), 4), ((BufferId(1), "copy"), 4)]);
}

#[test]
fn a_long_log_of_many_ranks_takes_no_quadratic_time() {
    let ranks: Vec<Vec<LogEntry>> = (0..4)
        .map(|rank| {
            let mut log = Vec::new();
            for seq in 0..5000_u64 {
                let at = 8 * (seq as usize % 1000);
                let shard = range(at + 2 * rank, at + 2 * rank + 2);
                log.extend([
                    record(EXECUTOR, 3 * seq + 1),
                    wait(OPTIMIZER, 3 * seq + 1),
                    copy(OPTIMIZER, range(100_000, 100_002), shard),
                    record(OPTIMIZER, 3 * seq + 2),
                    wait(GATHER, 3 * seq + 2),
                    collective(GATHER, key(seq, CollectiveKind::Gather), shard, range(at, at + 8)),
                    record(GATHER, 3 * seq + 3),
                    wait(EXECUTOR, 3 * seq + 3),
                    read(range(at, at + 8)),
                ]);
            }
            log
        })
        .collect();
    let begin = std::time::Instant::now();
    assert_eq!(run(&ranks, RunAhead::Any).unwrap().entries, 4 * 5000 * 9);
    let took = begin.elapsed();
    assert!(took < std::time::Duration::from_secs(20), "180 000 entries took {took:?}");
}

#[test]
fn the_log_of_a_null_device_is_what_the_checker_reads() {
    let device = crate::null::NullDevice::open(0, 1, None, true);
    let mut comm = crate::Comm::new(device.clone(), false, 0, 1);
    let buffer = device.alloc(8, &[]).unwrap();
    let executor = device.stream(StreamKind::Executor).unwrap();
    let on = device.stream(StreamKind::Gather).unwrap();
    let op = CollectiveOp::AllGather { send: buffer.whole(), recv: buffer.whole() };
    comm.issue(on, Collective::of_all(key(0, CollectiveKind::Gather), op)).unwrap();
    device.wait(executor, &device.record(on)).unwrap();
    device.access(executor, Access { range: buffer.whole(), mode: AccessMode::Read });
    let summary = check_logs(&[device.log().unwrap()], &CheckOptions::default()).unwrap();
    assert_eq!((summary.gathers, summary.ranks[0].allocated_bytes), (1, 8));
    device.enqueue(on, Work::Fill(Fill { dst: buffer.whole(), dtype: DType::F32, value: 0.0 })).unwrap();
    let violations = check_logs(&[device.log().unwrap()], &CheckOptions::default()).unwrap_err();
    assert!(matches!(violations.list[..], [Violation::Race { .. }]), "{violations}");
}
