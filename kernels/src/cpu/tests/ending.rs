//! How things end: failures, panics, poison, and the drop of a device.

use super::*;

/// Fails or panics on fills of this kind of value.
fn spoil(what: &Inject) -> BeforeWork {
    let what = what.clone();
    BeforeWork::new(move |work| if matches!(work, Work::Fill(_)) { what.clone() } else { Inject::Nothing })
}

#[test]
fn work_that_fails_or_panics_fails_the_device_and_not_the_process() {
    for (inject, says) in [(Inject::Fail("bad luck".into()), "bad luck"), (Inject::Panic, "panic: injected")] {
        let device = alone(Some(spoil(&inject)));
        let [reduce, gather] = [StreamKind::Reduce, StreamKind::Gather].map(|kind| device.stream(kind).unwrap());
        let buffer = device.alloc(8, &[4, 8]).unwrap();
        let (first, second) = (buffer.range(0, 4), buffer.range(4, 8));
        let before = Event::pending(0);
        device.wait(reduce, &before.0).unwrap();
        device.enqueue(reduce, fill(first, 1.0)).unwrap();
        let behind = device.record(reduce);
        device.wait(gather, &behind).unwrap();
        device.enqueue(gather, copy(first, second)).unwrap();
        let elsewhere = device.record(gather);
        assert!(device.failed().is_none());
        before.1.complete();
        let cause = failed(&behind);
        assert_eq!(device.failed().as_ref(), Some(&cause));
        assert_eq!((cause.kind, cause.rank), (FailureKind::Device, 0));
        assert!(cause.message.contains("fill") && cause.message.contains(says), "{cause}");
        assert_eq!(failed(&elsewhere), cause);
        let executor = device.stream(StreamKind::Executor).unwrap();
        assert!(matches!(device.wait(executor, &behind), Err(DeviceError::Poisoned(c)) if c == cause));
        for stream in [executor, reduce, gather] {
            assert!(matches!(device.enqueue(stream, copy(first, second)), Err(DeviceError::Poisoned(_))));
            assert!(matches!(device.record(stream).status(), EventStatus::Failed(c) if c == cause));
        }
        device.lease(buffer.whole(), AccessMode::Write).expect("nothing stays held");
    }
}

#[test]
fn inline_work_that_panics_is_an_error() {
    let device = alone(Some(spoil(&Inject::Panic)));
    let executor = device.stream(StreamKind::Executor).unwrap();
    let buffer = device.alloc(4, &[]).unwrap();
    assert!(device.enqueue(executor, fill(buffer.whole(), 1.0)).unwrap_err().to_string().contains("panic"));
    assert!(device.record(executor).wait_for(LONG).unwrap().is_err());
}

#[test]
fn poison_ends_every_open_event_with_the_first_cause_behind_stuck_work_too() {
    let (open, hook) = gate();
    let device = alone(Some(hook));
    let buffer = device.alloc(8, &[4, 8]).unwrap();
    let mut events = Vec::new();
    for (kind, range) in [(StreamKind::Reduce, buffer.range(0, 4)), (StreamKind::Gather, buffer.range(4, 8))] {
        let stream = device.stream(kind).unwrap();
        for _ in 0..3 {
            device.enqueue(stream, fill(range, 1.0)).unwrap();
            events.push(device.record(stream));
        }
    }
    assert!(events.iter().all(|event| matches!(event.status(), EventStatus::Pending)));
    device.poison(cause("first"));
    device.poison(cause("second"));
    // Both streams are still stuck: nobody has opened the gate.
    for event in &events {
        assert!(matches!(event.status(), EventStatus::Failed(c) if c == cause("first")));
    }
    drop(open);
    drop(device);
}

#[test]
fn poison_wakes_a_stream_that_waits_for_its_peers() {
    let world = LocalWorld::new(2, None).unwrap();
    let Opened { device, mut comm } = opened(&world, 0, None);
    let gather = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(8, &[]).unwrap();
    comm.issue(gather, all_gather(0, &buffer, 0, 2)).unwrap();
    let event = device.record(gather);
    // A lease of our own here could be in the collective's way.
    while device.begun(gather) == 0 {
        std::thread::yield_now();
    }
    assert!(device.lease(buffer.whole(), AccessMode::Read).is_err());
    assert!(matches!(event.status(), EventStatus::Pending));
    device.poison(cause("peer lost"));
    assert_eq!(failed(&event), cause("peer lost"));
    let start = std::time::Instant::now();
    while device.lease(buffer.whole(), AccessMode::Read).is_err() {
        assert!(start.elapsed() < LONG, "the collective still holds its memory");
        std::thread::yield_now();
    }
}

#[test]
fn a_wait_for_a_failed_event_fails_the_stream_with_its_cause() {
    let device = alone(None);
    let gather = device.stream(StreamKind::Gather).unwrap();
    let (event, completer) = Event::pending(0);
    device.wait(gather, &event).unwrap();
    let behind = device.record(gather);
    completer.fail(&cause("elsewhere"));
    assert_eq!(failed(&behind), cause("elsewhere"));
}

#[test]
fn work_on_leased_memory_fails_naming_the_range() {
    let device = alone(None);
    let gather = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(16, &[8, 16]).unwrap();
    let lease = device.lease(buffer.range(8, 12), AccessMode::Read).unwrap();
    device.enqueue(gather, fill(buffer.range(0, 8), 1.0)).unwrap();
    done(&device.record(gather));
    device.enqueue(gather, fill(buffer.range(12, 16), 1.0)).unwrap();
    let text = failed(&device.record(gather)).message.clone();
    assert!(text.contains("bytes 12..16") && text.contains("reading"), "{text}");
    drop(lease);
}

#[test]
fn ranks_that_disagree_fail_with_bucket_and_step() {
    let world = LocalWorld::new(2, None).unwrap();
    let ranks = [0, 1].map(|rank| opened(&world, rank, None));
    let events = ranks.map(|Opened { device, mut comm }| {
        let gather = device.stream(StreamKind::Gather).unwrap();
        let buffer = device.alloc(8, &[]).unwrap();
        let mut collective = all_gather(0, &buffer, comm.rank(), 2);
        collective.key.bucket += comm.rank() as u32;
        comm.issue(gather, collective).unwrap();
        (device.record(gather), comm, device)
    });
    for (rank, (event, ..)) in events.iter().enumerate() {
        let cause = failed(event);
        assert_eq!((cause.kind, cause.rank, cause.step), (FailureKind::OrderMismatch, rank, Some(7)));
        assert_eq!(cause.bucket, Some(3 + rank as u32));
        assert!(cause.message.contains("bucket 3") && cause.message.contains("bucket 4"), "{cause}");
    }
}

#[test]
fn collectives_are_issued_through_comm_only() {
    let device = alone(None);
    let gather = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(8, &[]).unwrap();
    let work = Work::Collective(all_gather(0, &buffer, 0, 1));
    assert!(matches!(device.enqueue(gather, work), Err(DeviceError::CollectiveOutsideComm)));
}

#[test]
fn a_callback_that_panics_fails_the_device_and_not_its_thread() {
    let (open, hook) = gate();
    let device = alone(Some(hook));
    let gather = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(8, &[]).unwrap();
    device.enqueue(gather, fill(buffer.whole(), 1.0)).unwrap();
    device.when(&device.record(gather), Box::new(|_| panic!("of the callback")));
    device.enqueue(gather, fill(buffer.whole(), 1.0)).unwrap();
    let behind = device.record(gather);
    open.send(()).unwrap();
    assert!(failed(&behind).message.contains("of the callback"));
    drop(open);
}

/// A hook, and what tells whether the device's state, with its threads, is gone.
fn witness(hook: BeforeWork) -> (BeforeWork, std::sync::Weak<()>) {
    let alive = Arc::new(());
    let weak = Arc::downgrade(&alive);
    let hook = BeforeWork::new(move |work| {
        assert!(Arc::strong_count(&alive) > 0);
        (hook.0)(work)
    });
    (hook, weak)
}

#[test]
fn a_dropped_device_finishes_its_work_and_joins_its_threads() {
    let (hook, alive) = witness(BeforeWork::new(|_| Inject::Delay(Duration::from_millis(2))));
    let device = alone(Some(hook));
    let mut events = Vec::new();
    for kind in [StreamKind::Optimizer, StreamKind::Reduce, StreamKind::Gather] {
        let stream = device.stream(kind).unwrap();
        let buffer = device.alloc(8, &[]).unwrap();
        (0..5).for_each(|_| device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap());
        events.push(device.record(stream));
    }
    drop(device);
    assert!(events.iter().all(Event::is_done));
    assert!(alive.upgrade().is_none(), "a thread or something else keeps the device's state");
}

#[test]
fn a_dropped_device_leaves_a_stuck_thread_and_its_memory_behind() {
    let (open, hook) = gate();
    let (hook, alive) = witness(hook);
    let device = alone(Some(hook));
    let stream = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(8, &[]).unwrap();
    device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap();
    let event = device.record(stream);
    drop(device);
    assert_eq!(failed(&event).kind, FailureKind::Closed);
    assert!(alive.upgrade().is_some(), "freed what the stuck thread may still touch");
    drop(open);
    let start = std::time::Instant::now();
    while alive.upgrade().is_some() {
        assert!(start.elapsed() < LONG, "the thread did not end once it was free");
        std::thread::yield_now();
    }
}

#[test]
fn a_device_dropped_on_its_own_thread_does_not_join_itself() {
    let (open, hook) = gate();
    let (hook, alive) = witness(hook);
    let device = alone(Some(hook));
    let stream = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(8, &[]).unwrap();
    device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap();
    let (sender, seen) = channel();
    let event = device.record(stream);
    let kept = Mutex::new(Some(device.clone()));
    device.when(
        &event,
        Box::new(move |_| {
            drop(kept.lock().unwrap().take());
            sender.send(()).unwrap();
        }),
    );
    drop(device);
    drop(open);
    seen.recv_timeout(LONG).unwrap();
    let start = std::time::Instant::now();
    while alive.upgrade().is_some() {
        assert!(start.elapsed() < LONG);
        std::thread::yield_now();
    }
}
