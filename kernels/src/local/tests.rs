#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use half::{bf16, f16};

mod groups;

use super::*;
use crate::buffer::{BufRange, BufferId};
use crate::clock::now_ns;
use crate::collective::{CollectiveKey, CollectiveKind, CollectiveOp};
use crate::dtype::{DType, Element};
use crate::error::{Failure, FailureKind};

const NOWHERE: BufRange = BufRange { buffer: BufferId(0), start: 0, end: 0 };

fn key(seq: u64, bucket: u32) -> CollectiveKey {
    CollectiveKey { seq, kind: CollectiveKind::Gather, bucket, bytes: 0, dtype: DType::F32, version: 0, group: 0 }
}

fn gather() -> CollectiveOp {
    CollectiveOp::AllGather { send: NOWHERE, recv: NOWHERE }
}

fn reduce(dtype: DType) -> CollectiveOp {
    CollectiveOp::ReduceScatter { send: NOWHERE, dtype, recv: NOWHERE }
}

fn broadcast(root: usize) -> CollectiveOp {
    CollectiveOp::Broadcast { range: NOWHERE, root }
}

/// Runs a collective that is not in place.
fn apart<S, R>(
    transport: &LocalTransport,
    collective: &Collective,
    send: &[S],
    recv: &mut [R],
) -> Result<Transfer, CommError> {
    let memory = HostMemory {
        send: send.as_ptr().cast(),
        send_bytes: size_of_val(send),
        recv: recv.as_mut_ptr().cast(),
        recv_bytes: size_of_val(recv),
    };
    // SAFETY: both slices are borrowed until the call returns.
    unsafe { transport.run(collective, &memory, now_ns()) }
}

/// Runs a collective whose smaller range is slot `rank` of `all`; `gathers` says which of the two is sent.
fn in_place<T>(
    transport: &LocalTransport,
    collective: &Collective,
    all: &mut [T],
    gathers: bool,
) -> Result<Transfer, CommError> {
    let bytes = size_of_val(all);
    let part = bytes / transport.world();
    let start: *mut u8 = all.as_mut_ptr().cast();
    // SAFETY: the slot lies inside the slice.
    let slot = unsafe { start.add(transport.rank() * part) };
    let memory = if gathers {
        HostMemory { send: slot, send_bytes: part, recv: start, recv_bytes: bytes }
    } else {
        HostMemory { send: start, send_bytes: bytes, recv: slot, recv_bytes: part }
    };
    // SAFETY: the slice is borrowed until the call returns.
    unsafe { transport.run(collective, &memory, now_ns()) }
}

/// Runs `body` on one thread per rank; the results in rank order.
fn on_ranks<R: Send>(world: &Arc<LocalWorld>, body: impl Fn(&LocalTransport) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..world.ranks())
            .map(|rank| {
                let transport = world.transport(rank).unwrap();
                scope.spawn(move || body(&transport))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Rank `rank`'s element `i`: exact in f16 and bf16.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7 + i * 3) % 101) as f32 - 50.0
}

/// More than a chunk, and no multiple of one.
const NUMEL: usize = 5000;

fn reduces_right<T: Element>(world: &Arc<LocalWorld>) {
    let d = world.ranks();
    let sums = on_ranks(world, |transport| {
        let send: Vec<T> = (0..d * NUMEL).map(|i| T::from_f32(value(transport.rank(), i))).collect();
        let mut recv = vec![f32::NAN; NUMEL];
        let collective = Collective::of_all(key(0, 0), reduce(T::DTYPE));
        apart(transport, &collective, &send, &mut recv).unwrap();
        recv
    });
    for (rank, sum) in sums.iter().enumerate() {
        for (i, &got) in sum.iter().enumerate() {
            assert_eq!(got, (0..d).map(|peer| value(peer, rank * NUMEL + i)).sum::<f32>(), "d={d} rank {rank} at {i}");
        }
    }
}

#[test]
fn a_reduce_scatter_sums_every_wire_type_on_one_to_five_ranks() {
    for d in 1..=5 {
        reduces_right::<f32>(&LocalWorld::new(d, None).unwrap());
        reduces_right::<bf16>(&LocalWorld::new(d, None).unwrap());
        reduces_right::<f16>(&LocalWorld::new(d, None).unwrap());
    }
}

#[test]
fn a_reduce_scatter_in_place_sums_in_rank_order() {
    for d in 1..=5 {
        let world = LocalWorld::new(d, None).unwrap();
        // Sums of these depend on their order.
        let value = |rank: usize, i: usize| [1e8, 1.0, -1e8, 3.0, 0.1][(rank + i) % 5] * (1.0 + i as f32);
        let all = on_ranks(&world, |transport| {
            let mut all: Vec<f32> = (0..d * NUMEL).map(|i| value(transport.rank(), i)).collect();
            in_place(transport, &Collective::of_all(key(0, 0), reduce(DType::F32)), &mut all, false).unwrap();
            all
        });
        for (rank, all) in all.iter().enumerate() {
            for (i, &got) in all.iter().enumerate() {
                let sum = (1..d).fold(value(0, i), |sum, peer| sum + value(peer, i));
                let want = if i / NUMEL == rank { sum } else { value(rank, i) };
                assert_eq!(got.to_bits(), want.to_bits(), "d={d} rank {rank} at {i}");
            }
        }
    }
}

#[test]
fn an_all_gather_brings_every_part_in_and_out_of_place() {
    for d in 1..=5 {
        let world = LocalWorld::new(d, None).unwrap();
        let want: Vec<u16> = (0..d * NUMEL).map(|i| i as u16).collect();
        let results = on_ranks(&world, |transport| {
            let mine = transport.rank() * NUMEL..(transport.rank() + 1) * NUMEL;
            let mut inside = vec![0_u16; d * NUMEL];
            inside[mine.clone()].copy_from_slice(&want[mine.clone()]);
            in_place(transport, &Collective::of_all(key(0, 0), gather()), &mut inside, true).unwrap();
            let mut outside = vec![0_u16; d * NUMEL];
            apart(transport, &Collective::of_all(key(1, 0), gather()), &want[mine], &mut outside).unwrap();
            (inside, outside)
        });
        for (inside, outside) in results {
            assert!(inside == want && outside == want, "d={d}");
        }
    }
}

#[test]
fn a_broadcast_brings_the_roots_bytes() {
    for d in 1..=5 {
        let world = LocalWorld::new(d, None).unwrap();
        for root in 0..d {
            let got = on_ranks(&world, |transport| {
                let mut bytes = vec![transport.rank() as u8; 777];
                let start = bytes.as_mut_ptr();
                let memory = HostMemory { send: start, send_bytes: 777, recv: start, recv_bytes: 777 };
                let collective = Collective::of_all(key(root as u64, 0), broadcast(root));
                // SAFETY: the vector lives until the call returns.
                unsafe { transport.run(&collective, &memory, now_ns()) }.unwrap();
                bytes
            });
            assert!(got.iter().flatten().all(|&byte| byte == root as u8));
        }
    }
}

#[test]
fn collectives_of_no_bytes_meet_all_the_same() {
    let world = LocalWorld::new(3, None).unwrap();
    on_ranks(&world, |transport| {
        apart::<u8, u8>(transport, &Collective::of_all(key(0, 0), gather()), &[], &mut []).unwrap();
        apart::<f32, f32>(transport, &Collective::of_all(key(1, 0), reduce(DType::F32)), &[], &mut []).unwrap();
    });
}

#[test]
fn two_streams_per_rank_run_thousands_of_collectives_at_once() {
    const ROUNDS: u64 = 3000;
    let world = LocalWorld::new(3, None).unwrap();
    on_ranks(&world, |transport| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let mut all = [0.0_f32; 3];
                    all[transport.rank()] = round as f32;
                    let collective = Collective::of_all(key(2 * round, 0), gather());
                    in_place(transport, &collective, &mut all, true).unwrap();
                    assert_eq!(all, [round as f32; 3]);
                }
            });
            for round in 0..ROUNDS {
                let send = [round as f32; 3];
                let mut sum = [0.0_f32];
                let collective = Collective::of_all(key(2 * round + 1, 0), reduce(DType::F32));
                apart(transport, &collective, &send, &mut sum).unwrap();
                assert_eq!(sum, [3.0 * round as f32]);
            }
        });
    });
    assert!(world.meetings.is_empty(), "a meeting was left open");
}

#[test]
fn ranks_that_disagree_all_hear_both_sides_now_and_later() {
    let world = LocalWorld::new(3, None).unwrap();
    let errors = on_ranks(&world, |transport| {
        let bucket = if transport.rank() == 1 { 5 } else { 4 };
        let run = |seq, bucket| {
            let collective = Collective::of_all(key(seq, bucket), gather());
            apart(transport, &collective, &[0_u8], &mut [0_u8; 3]).unwrap_err()
        };
        [run(7, bucket), run(8, 0)]
    });
    for error in errors.iter().flatten() {
        assert!(matches!(error, CommError::Mismatch { seq: 7, .. }), "{error}");
        let text = error.to_string();
        for part in ["rank 1", "bucket 4", "bucket 5"] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert!(matches!(errors[1][0], CommError::Mismatch { rank: 1, .. }));
}

#[test]
fn ranks_that_bring_another_operation_or_length_disagree() {
    let run = |transport: &LocalTransport, op, send: &[f32], recv: &mut [f32]| {
        apart(transport, &Collective::of_all(key(0, 0), op), send, recv).unwrap_err().to_string()
    };
    let world = LocalWorld::new(2, None).unwrap();
    let operation = on_ranks(&world, |transport| match transport.rank() {
        0 => run(transport, gather(), &[0.0], &mut [0.0; 2]),
        _ => run(transport, reduce(DType::F32), &[0.0; 2], &mut [0.0]),
    });
    assert!(operation.iter().all(|e| e.contains("all-gather") && e.contains("reduce-scatter")), "{operation:?}");
    let world = LocalWorld::new(2, None).unwrap();
    let length = on_ranks(&world, |transport| match transport.rank() {
        0 => run(transport, gather(), &[0.0], &mut [0.0; 2]),
        _ => run(transport, gather(), &[0.0; 2], &mut [0.0; 4]),
    });
    assert!(length.iter().all(|e| e.contains("4 bytes") && e.contains("8 bytes")), "{length:?}");
    let world = LocalWorld::new(2, None).unwrap();
    let root = on_ranks(&world, |transport| run(transport, broadcast(transport.rank()), &[0.0], &mut [0.0]));
    assert!(root.iter().all(|e| e.contains("from rank 0") && e.contains("from rank 1")), "{root:?}");
}

#[test]
fn a_disagreement_wakes_who_waits_in_another_meeting() {
    let world = LocalWorld::new(2, None).unwrap();
    let run = |transport: &LocalTransport, seq, bucket| {
        let collective = Collective::of_all(key(seq, bucket), gather());
        apart(transport, &collective, &[0_u8], &mut [0_u8; 2])
    };
    std::thread::scope(|scope| {
        let (here, there) = (world.transport(0).unwrap(), world.transport(1).unwrap());
        let waiting = scope.spawn(move || run(&here, 1, 0));
        let here = world.transport(0).unwrap();
        let first = scope.spawn(move || run(&here, 2, 0));
        world.meetings.wait_for_arrivals(2);
        assert!(run(&there, 2, 1).is_err());
        assert!(matches!(first.join().unwrap(), Err(CommError::Mismatch { seq: 2, .. })));
        assert!(matches!(waiting.join().unwrap(), Err(CommError::Mismatch { seq: 2, .. })));
    });
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let world = LocalWorld::new(2, None).unwrap();
    let transport = world.transport(1).unwrap();
    let refused = |op, send: &[u8], recv: &mut [u8]| {
        let error = apart(&transport, &Collective::of_all(key(0, 0), op), send, recv).unwrap_err();
        assert!(matches!(error, CommError::Shape { .. }), "{error}");
    };
    refused(gather(), &[0; 4], &mut [0; 7]);
    refused(reduce(DType::F32), &[0; 12], &mut [0; 8]);
    refused(reduce(DType::F32), &[0; 12], &mut [0; 6]);
    refused(reduce(DType::Bf16), &[0; 16], &mut [0; 8]);
    refused(broadcast(0), &[0; 8], &mut [0; 4]);
    refused(broadcast(2), &[0; 8], &mut [0; 8]);
    let mut all = [0_f32; 4];
    let start: *mut u8 = all.as_mut_ptr().cast();
    // In place is slot 1 here; this is slot 0.
    let memory = HostMemory { send: start, send_bytes: 8, recv: start, recv_bytes: 16 };
    // SAFETY: the array lives until the call returns.
    let error = unsafe { transport.run(&Collective::of_all(key(0, 0), gather()), &memory, now_ns()) }.unwrap_err();
    assert!(error.to_string().contains("in place"), "{error}");
}

#[test]
fn an_abort_wakes_its_rank_only_and_refuses_what_comes() {
    let world = LocalWorld::new(3, None).unwrap();
    let cause = Arc::new(Failure::new(FailureKind::RankLost, 2, "gone"));
    let (sender, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let transport = world.transport(rank).unwrap();
            let sender = sender.clone();
            scope.spawn(move || {
                let collective = Collective::of_all(key(0, 0), gather());
                let result = apart(&transport, &collective, &[0_u8], &mut [0_u8; 3]);
                sender.send((rank, result.unwrap_err())).unwrap();
            });
        }
        world.meetings.wait_for_arrivals(2);
        for rank in 0..2 {
            let transport = world.transport(rank).unwrap();
            transport.abort(&cause);
            let (who, error) = ended.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_eq!(who, rank, "a peer must keep waiting until it is aborted too");
            assert!(matches!(error, CommError::Aborted(first) if first == cause));
            let later = Collective::of_all(key(1, 0), gather());
            let later = apart(&transport, &later, &[0_u8], &mut [0_u8; 3]);
            assert!(matches!(later, Err(CommError::Aborted(_))));
        }
    });
    assert!(world.meetings.is_empty());
}

const SLOW: Link = Link { bytes_per_second: 1e6, latency: Duration::from_millis(1) };

#[test]
fn transfers_share_the_emulated_link_one_after_the_other() {
    let world = LocalWorld::new(2, Some(SLOW)).unwrap();
    let start = Instant::now();
    // 8000 bytes gathered by 2 ranks: 4000 over the link, 4 ms and 1 ms latency. Two streams share the link.
    let begins = on_ranks(&world, |transport| {
        let run = |stream: u64| {
            let mut begins = Vec::new();
            for i in 0..10 {
                let collective = Collective::of_all(key(2 * i + stream, 0), gather());
                let mut all = vec![0_u8; 8000];
                begins.push(in_place(transport, &collective, &mut all, true).unwrap().begin_ns);
            }
            begins
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(1));
            let mut begins = run(0);
            begins.extend(other.join().unwrap());
            begins.sort_unstable();
            begins
        })
    });
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert_eq!(begins[0], begins[1], "the model is the same on all ranks");
    assert!(begins[0].windows(2).all(|pair| pair[1] >= pair[0] + 5_000_000), "{:?}", begins[0]);
}

#[test]
fn a_broadcast_needs_one_direction_and_moves_everything_once() {
    let world = LocalWorld::new(3, Some(SLOW)).unwrap();
    let run = |transport: &LocalTransport, seq, root| {
        let mut bytes = vec![0_u8; 5000];
        let start = bytes.as_mut_ptr();
        let memory = HostMemory { send: start, send_bytes: 5000, recv: start, recv_bytes: 5000 };
        let collective = Collective::of_all(key(seq, 0), broadcast(root));
        // SAFETY: the vector lives until the call returns.
        unsafe { transport.run(&collective, &memory, now_ns()) }.unwrap().begin_ns
    };
    let begins = on_ranks(&world, |transport| [run(transport, 0, 0), run(transport, 1, 0)]);
    assert!(begins[2][1] - begins[2][0] >= 6_000_000, "latency 1 ms and 5 ms for 5000 bytes");
}

#[test]
fn a_thread_that_wakes_late_does_not_slow_down_the_link() {
    let world = LocalWorld::new(2, Some(SLOW)).unwrap();
    let transfers = on_ranks(&world, |transport| {
        let mut all = vec![0_u8; 8000];
        let mut run = |seq, reached_ns| {
            let start = all.as_mut_ptr();
            let send = start.wrapping_add(4000 * transport.rank());
            let memory = HostMemory { send, send_bytes: 4000, recv: start, recv_bytes: 8000 };
            let collective = Collective::of_all(key(seq, 0), gather());
            // SAFETY: the vector lives until the call returns, and nobody else has it.
            unsafe { transport.run(&collective, &memory, reached_ns) }.unwrap()
        };
        let first = run(0, now_ns());
        std::thread::sleep(Duration::from_millis(3));
        let late = run(1, first.end_ns);
        (first, late)
    });
    let (first, late) = transfers[0];
    assert_eq!(late.begin_ns, first.end_ns, "its stream had reached it by then");
    assert_eq!(late.end_ns, late.begin_ns + 5_000_000);
}

#[test]
fn an_abort_ends_a_long_transfer() {
    let hours = Link { bytes_per_second: 1e-3, latency: Duration::ZERO };
    let world = LocalWorld::new(2, Some(hours)).unwrap();
    let cause = Arc::new(Failure::new(FailureKind::Closed, 0, "enough"));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let transport = world.transport(rank).unwrap();
                scope.spawn(move || {
                    let mut all = [rank as u8 + 1; 2];
                    let result = in_place(&transport, &Collective::of_all(key(0, 0), gather()), &mut all, true);
                    (result, all)
                })
            })
            .collect();
        world.meetings.wait_for_arrivals(2);
        (0..2).for_each(|rank| world.transport(rank).unwrap().abort(&cause));
        for thread in threads {
            let (result, all) = thread.join().unwrap();
            match result {
                // Aborted before the other one arrived.
                Err(CommError::Aborted(_)) => {}
                other => panic!("{other:?} {all:?}"),
            }
        }
    });
    assert!(world.meetings.is_empty());
}

#[test]
fn one_rank_has_no_link_and_a_world_needs_sense() {
    let alone = LocalWorld::new(1, Some(Link { bytes_per_second: 1e-9, latency: Duration::from_mins(50) })).unwrap();
    let transport = alone.transport(0).unwrap();
    apart(&transport, &Collective::of_all(key(0, 0), gather()), &[1_u8], &mut [0_u8]).unwrap();
    assert!(matches!(LocalWorld::new(0, None), Err(DeviceError::World(WorldError::NoRanks))));
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let link = Link { bytes_per_second: rate, latency: Duration::ZERO };
        assert!(matches!(LocalWorld::new(2, Some(link)), Err(DeviceError::World(WorldError::Link(_)))));
    }
    let no_rank = alone.transport(1).unwrap_err();
    assert_eq!(no_rank.to_string(), "rank 1 is not one of 1 ranks");
}
