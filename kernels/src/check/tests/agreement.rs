//! The fast checker and the slow truth agree on random logs.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::check::oracle::{At, truth};
use crate::members::Members;

#[derive(Clone, Copy, Debug)]
enum Op {
    Write(u32, BufRange),
    Copy(u32, BufRange, BufRange),
    Read(BufRange),
    Record(u32),
    /// Waits for one of the rank's events; the flag allows later ones.
    Wait(u32, prop::sample::Index, bool),
    /// The second stream waits for all that the first one has so far.
    Sync(u32, u32),
    Collective(u32, BufRange, BufRange),
    Demanded(u32),
    WaitEnded(u32),
}

fn any_range() -> impl Strategy<Value = BufRange> {
    (0..2_u32, 0..8_usize, 0..5_usize).prop_map(|(buffer, start, bytes)| BufRange {
        buffer: BufferId(buffer),
        start,
        end: start + bytes,
    })
}

fn any_op() -> impl Strategy<Value = Op> {
    let on = || 0..3_u32;
    prop_oneof![
        2 => (on(), any_range()).prop_map(|(on, range)| Op::Write(on, range)),
        1 => (on(), any_range(), any_range()).prop_map(|(on, src, dst)| Op::Copy(on, src, dst)),
        2 => any_range().prop_map(Op::Read),
        2 => on().prop_map(Op::Record),
        3 => (on(), any::<prop::sample::Index>(), prop::bool::weighted(0.05)).prop_map(|(on, i, late)| Op::Wait(on, i, late)),
        6 => (on(), on()).prop_map(|(from, to)| Op::Sync(from, to)),
        2 => (on(), any_range(), any_range()).prop_map(|(on, send, recv)| Op::Collective(on, send, recv)),
        1 => (0..4_u32).prop_map(Op::Demanded),
        1 => (0..3_u32).prop_map(Op::WaitEnded),
    ]
}

/// One log per rank. Ranks issue equally many collectives; `swap` exchanges the first two of the last rank. Those with odd
/// numbers are of the ranks before `split` and of those from it on.
fn logs_of(ranks: &[Vec<Op>], swap: bool, split: usize) -> Vec<Vec<LogEntry>> {
    let is_collective = |op: &&Op| matches!(op, Op::Collective(..));
    let most = ranks.iter().map(|ops| ops.iter().filter(is_collective).count()).max().unwrap_or(0);
    let nothing = range(0, 0);
    ranks
        .iter()
        .enumerate()
        .map(|(rank, ops)| {
            let own = ops.iter().filter(is_collective).count();
            let filler = std::iter::repeat_n(Op::Collective(2, nothing, nothing), most - own);
            let all = ops.iter().filter(|op| matches!(op, Op::Record(_) | Op::Sync(..))).count();
            let (mut recorded, mut seq) = (0, 0);
            let mut log = Vec::new();
            for op in ops.iter().copied().chain(filler) {
                let entry = match op {
                    Op::Write(on, dst) => fill(StreamId(on), dst),
                    Op::Copy(on, src, dst) => copy(StreamId(on), src, dst),
                    Op::Read(range) => read(range),
                    Op::Record(on) => {
                        recorded += 1;
                        record(StreamId(on), recorded)
                    }
                    Op::Wait(on, index, late) => {
                        let choice = if late { all } else { recorded as usize };
                        if choice == 0 {
                            continue;
                        }
                        wait(StreamId(on), index.index(choice) as u64 + 1)
                    }
                    Op::Sync(from, to) => {
                        recorded += 1;
                        log.push(record(StreamId(from), recorded));
                        wait(StreamId(to), recorded)
                    }
                    Op::Collective(on, send, recv) => {
                        let number = if swap && rank + 1 == ranks.len() && seq < 2 && most > 1 { 1 - seq } else { seq };
                        seq += 1;
                        let groups = [0..split.min(ranks.len()), split.min(ranks.len())..ranks.len()];
                        let group = groups.into_iter().find(|group| group.contains(&rank));
                        let group = group.filter(|_| number % 2 == 1).unwrap_or(0..ranks.len());
                        let members = Members::of(group, ranks.len());
                        among(members, collective(StreamId(on), key(number, CollectiveKind::Gather), send, recv))
                    }
                    Op::Demanded(count) => demanded(count),
                    Op::WaitEnded(position) => wait_ended(position),
                };
                log.push(entry);
            }
            log
        })
        .collect()
}

fn ordered(a: At, b: At) -> (At, At) {
    (a.min(b), a.max(b))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fast_and_slow_checker_agree_on_random_logs(
        ranks in prop::collection::vec(prop::collection::vec(any_op(), 0..14), 1..4),
        swap in prop::bool::weighted(0.1),
        credits in prop::option::of(1..3_u32),
        split in 0..3_usize,
    ) {
        let logs = logs_of(&ranks, swap, split);
        prop_assume!(logs.iter().map(Vec::len).sum::<usize>() <= 64);
        let order = (0..64).collect();
        let ahead = match credits {
            Some(credits) => RunAhead::Window { order, credits },
            None => RunAhead::Chain { order },
        };
        let truth = truth(&logs, &ahead);
        let list = run(&logs, ahead).map_or_else(|violations| violations.list, |_| Vec::new());

        let cyclic = list.iter().any(|violation| matches!(violation, Violation::Cycle(_)));
        prop_assert_eq!(cyclic, truth.cyclic);
        if cyclic {
            return Ok(());
        }
        let mut races = BTreeSet::new();
        let mut ran_ahead = BTreeSet::new();
        for violation in &list {
            match violation {
                Violation::Race { rank, first, second, .. } => {
                    races.insert(ordered((*rank, first.position), (*rank, second.position)));
                }
                Violation::RanAhead { gather, .. } => {
                    ran_ahead.insert((gather.rank, gather.position));
                }
                Violation::OutOfOrder { .. } => prop_assert!(swap),
                other => prop_assert!(false, "{}", other),
            }
        }
        prop_assert!(races.is_subset(&truth.races), "{:?} are no races", races.difference(&truth.races));
        prop_assert_eq!(races.is_empty(), truth.races.is_empty(), "missed: {:?}", truth.races);
        prop_assert_eq!(ran_ahead, truth.ran_ahead);
    }
}
