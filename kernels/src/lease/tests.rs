#![allow(clippy::unwrap_used, clippy::float_cmp)]

use super::*;
use crate::adam::AdamRows;
use crate::error::DeviceError;
use crate::work::{Adam, Copy, Work};

fn conflict(result: Result<Lease, LeaseError>) -> BufRange {
    match result {
        Err(LeaseError::Conflict { range, .. }) => range,
        other => panic!("expected a conflict, got {other:?}"),
    }
}

#[test]
fn memory_is_zeroed_and_aligned() {
    let arena = Arena::default();
    for (bytes, align) in [(0, 1), (3, 64), (1000, 64), (5 << 20, 4096)] {
        let buffer = arena.alloc(bytes, &[]).unwrap();
        let lease = arena.lease(buffer.whole(), AccessMode::Read).unwrap();
        assert_eq!(lease.as_bytes().len(), bytes);
        assert!(lease.as_bytes().iter().all(|&b| b == 0));
        assert!(lease.as_bytes().as_ptr().addr().is_multiple_of(align));
    }
    assert_eq!(arena.allocated_bytes(), 1003 + (5 << 20));
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[16, 32, 64]).unwrap();
    let first = arena.lease(buffer.range(0, 16), AccessMode::Read).unwrap();
    let second = arena.lease(buffer.range(4, 8), AccessMode::Read).unwrap();
    let wanted = buffer.range(8, 40);
    assert_eq!(conflict(arena.lease(wanted, AccessMode::Write)), wanted);
    drop(first);
    assert_eq!(conflict(arena.lease(wanted, AccessMode::Write)), wanted);
    drop(second);
    let writer = arena.lease(wanted, AccessMode::Write).unwrap();
    for range in [buffer.range(0, 1), buffer.range(16, 20), buffer.range(63, 64)] {
        assert_eq!(conflict(arena.lease(range, AccessMode::Read)), range);
    }
    drop(writer);
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
}

#[test]
fn a_refused_lease_leaves_nothing_held() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[16, 32, 64]).unwrap();
    let last = arena.lease(buffer.range(32, 64), AccessMode::Read).unwrap();
    conflict(arena.lease(buffer.whole(), AccessMode::Write));
    arena.lease(buffer.range(0, 32), AccessMode::Write).unwrap();
    drop(last);
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
}

#[test]
fn refused_work_leaves_nothing_held() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[16, 32, 64]).unwrap();
    let other = arena.alloc(64, &[]).unwrap();
    let reader = arena.lease(other.range(0, 1), AccessMode::Write).unwrap();
    let copy = Work::Copy(Copy { src: other.whole(), dst: buffer.whole() });
    assert!(matches!(
        arena.hold_all(&copy),
        Err(DeviceError::Lease(LeaseError::Conflict { range, .. })) if range == other.whole()
    ));
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
    drop(reader);
    let holds = arena.hold_all(&copy).unwrap();
    conflict(arena.lease(buffer.range(0, 1), AccessMode::Read));
    conflict(arena.lease(other.range(0, 1), AccessMode::Write));
    arena.lease(other.range(0, 1), AccessMode::Read).unwrap();
    drop(holds);
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
    arena.lease(other.whole(), AccessMode::Write).unwrap();
}

#[test]
fn work_does_not_conflict_with_itself_but_may_not_overlap_what_it_writes() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[]).unwrap();
    let apart = Work::Copy(Copy { src: buffer.range(0, 16), dst: buffer.range(16, 32) });
    let mut holds = arena.hold_all(&apart).unwrap();
    let mut operands = holds.operands("copy").unwrap();
    assert_eq!(operands.read::<f32>(buffer.range(0, 16)).unwrap().len(), 4);
    assert!(operands.write::<f32>(buffer.range(16, 32)).is_ok());
    assert!(operands.write::<f32>(buffer.range(16, 32)).is_err(), "handed out twice");
    drop(holds);
    let across = Work::Copy(Copy { src: buffer.range(0, 16), dst: buffer.range(8, 24) });
    assert!(matches!(arena.hold_all(&across).unwrap().operands("copy"), Err(DeviceError::BadWork { .. })));
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
}

#[test]
fn the_work_with_the_most_ranges_fits() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[]).unwrap();
    let at = |i: usize| buffer.range(8 * i, 8 * i + 8);
    let adam = Work::Adam(Adam {
        grad: at(0),
        grad_dtype: crate::DType::F32,
        master: at(1),
        exp_avg: at(2),
        exp_avg_sq: at(3),
        param: Some((at(4), crate::DType::F32)),
        scalars: at(5),
        ratio: 1.0,
        segments: [].into(),
        rows: AdamRows::new(1, 0, []),
    });
    drop(arena.hold_all(&adam).unwrap());
    arena.lease(buffer.whole(), AccessMode::Write).unwrap();
}

#[test]
fn bad_ranges_and_bad_cells_are_errors() {
    let arena = Arena::default();
    assert!(matches!(arena.alloc(64, &[32]), Err(DeviceError::BadCells { bytes: 64 })));
    assert!(matches!(arena.alloc(64, &[32, 16, 64]), Err(DeviceError::BadCells { .. })));
    assert!(matches!(arena.alloc(usize::MAX, &[]), Err(DeviceError::OutOfMemory { .. })));
    let buffer = arena.alloc(64, &[0, 32, 32, 64]).unwrap();
    let elsewhere = BufRange { buffer: crate::BufferId(7), start: 0, end: 1 };
    for range in [buffer.range(0, 65), buffer.range(9, 8), elsewhere] {
        assert!(matches!(arena.lease(range, AccessMode::Read), Err(LeaseError::OutOfBounds { .. })));
    }
    let odd = arena.lease(buffer.range(2, 10), AccessMode::Write).unwrap();
    assert!(matches!(odd.as_slice::<f32>(), Err(LeaseError::Misaligned { element_bytes: 4, .. })));
    assert_eq!(odd.as_slice::<half::bf16>().unwrap().len(), 4);
    drop(odd);
    let mut read = arena.lease(buffer.range(0, 8), AccessMode::Read).unwrap();
    assert!(matches!(read.as_mut_slice::<f32>(), Err(LeaseError::Conflict { .. })));
    let empty = arena.lease(buffer.range(8, 8), AccessMode::Write).unwrap();
    assert!(empty.as_bytes().is_empty());
}

#[test]
fn a_lease_outlives_its_arena() {
    let arena = Arena::default();
    let buffer = arena.alloc(64, &[]).unwrap();
    let mut lease = arena.lease(buffer.whole(), AccessMode::Write).unwrap();
    drop(arena);
    lease.as_mut_slice::<f32>().unwrap().fill(2.0);
    assert!(lease.as_slice::<f32>().unwrap().iter().all(|&x| x == 2.0));
}

#[test]
fn two_threads_never_hold_one_cell_for_writing() {
    let arena = std::sync::Arc::new(Arena::default());
    let buffer = arena.alloc(8, &[]).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let arena = arena.clone();
            std::thread::spawn(move || {
                let mut added = 0;
                while added < 500 {
                    if let Ok(mut lease) = arena.lease(buffer.whole(), AccessMode::Write) {
                        let slice = lease.as_mut_slice::<f32>().unwrap();
                        slice[0] += 1.0;
                        added += 1;
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let lease = arena.lease(buffer.whole(), AccessMode::Read).unwrap();
    assert_eq!(lease.as_slice::<f32>().unwrap()[0], 2000.0);
}
