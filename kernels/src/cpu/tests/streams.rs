//! Order: within a stream, across streams, and across ranks.

use super::*;

#[test]
fn the_executor_is_the_calling_thread() {
    let device = alone(None);
    let executor = device.stream(StreamKind::Executor).unwrap();
    let buffer = device.alloc(64, &[]).unwrap();
    device.enqueue(executor, fill(buffer.whole(), 3.0)).unwrap();
    assert_eq!(read::<f32>(&device, buffer.whole()), [3.0; 16]);
    assert!(device.record(executor).is_done());
    assert_eq!(device.name(), "cpu");
    assert_eq!(device.allocated_bytes(), 64);
    assert!(device.log().is_none());
}

#[test]
fn a_stream_of_a_kind_is_one_and_the_same() {
    let device = alone(None);
    let kinds = [StreamKind::Executor, StreamKind::Optimizer, StreamKind::Reduce, StreamKind::Gather];
    let ids = kinds.map(|kind| device.stream(kind).unwrap());
    assert_eq!(ids, kinds.map(|kind| device.stream(kind).unwrap()));
    assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])));
}

#[test]
fn an_unknown_stream_is_an_error_and_its_events_fail() {
    let device = alone(None);
    let buffer = device.alloc(4, &[]).unwrap();
    for id in [crate::StreamId(2), crate::StreamId(9)] {
        assert!(matches!(device.enqueue(id, fill(buffer.whole(), 0.0)), Err(DeviceError::NoStream(n)) if n == id));
        assert!(failed(&device.record(id)).message.contains("no stream"));
        assert!(device.wait(id, &Event::done(0)).is_err());
    }
}

#[test]
fn work_on_a_stream_runs_in_order() {
    let device = alone(Some(BeforeWork::new(|_| Inject::Delay(Duration::from_micros(200)))));
    let stream = device.stream(StreamKind::Optimizer).unwrap();
    let buffer = device.alloc(4, &[]).unwrap();
    for i in 0..50 {
        device.enqueue(stream, fill(buffer.whole(), i as f32)).unwrap();
    }
    let event = device.record(stream);
    device.wait(device.stream(StreamKind::Executor).unwrap(), &event).unwrap();
    assert_eq!(read::<f32>(&device, buffer.whole()), [49.0]);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let hook = |work: &Work| match work {
        Work::Fill(_) => Inject::Delay(Duration::from_millis(1)),
        _ => Inject::Nothing,
    };
    let device = alone(Some(BeforeWork::new(hook)));
    let [reduce, gather] = [StreamKind::Reduce, StreamKind::Gather].map(|kind| device.stream(kind).unwrap());
    let [from, to] = [(); 2].map(|()| device.alloc(4, &[]).unwrap());
    for round in 1..50 {
        device.enqueue(reduce, fill(from.whole(), round as f32)).unwrap();
        device.wait(gather, &device.record(reduce)).unwrap();
        device.enqueue(gather, copy(from.whole(), to.whole())).unwrap();
        let copied = device.record(gather);
        device.wait(reduce, &copied).unwrap();
        done(&copied);
        assert_eq!(read::<f32>(&device, to.whole()), [round as f32]);
    }
}

#[test]
fn an_event_on_an_idle_stream_is_done_already() {
    let device = alone(None);
    let stream = device.stream(StreamKind::Gather).unwrap();
    assert!(device.record(stream).is_done());
    let buffer = device.alloc(4, &[]).unwrap();
    device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap();
    done(&device.record(stream));
    assert_eq!(read::<f32>(&device, buffer.whole()), [1.0]);
}

#[test]
fn when_calls_back_in_the_order_of_the_stream() {
    let (open, hook) = gate();
    let device = alone(Some(hook));
    let stream = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(4, &[]).unwrap();
    let (sender, seen) = channel();
    for i in 0..3 {
        device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap();
        let sender = sender.clone();
        let notify = move |result: Result<(), Cause>| {
            let thread = std::thread::current().name().unwrap().to_owned();
            sender.send((i, result.is_ok(), thread)).unwrap();
        };
        device.when(&device.record(stream), Box::new(notify));
    }
    drop(open);
    for i in 0..3 {
        assert_eq!(seen.recv_timeout(LONG).unwrap(), (i, true, "gf-gather-0".to_owned()));
    }
}

#[test]
fn a_parked_thread_gives_up_at_the_limit() {
    let (open, hook) = gate();
    let options =
        OpenOptions { before_work: Some(hook), wait_limit: Duration::from_millis(20), ..OpenOptions::default() };
    let world = LocalWorld::new(1, None).unwrap();
    let device = open_device(&options, &world);
    let stream = device.stream(StreamKind::Gather).unwrap();
    let buffer = device.alloc(4, &[]).unwrap();
    device.enqueue(stream, fill(buffer.whole(), 1.0)).unwrap();
    let event = device.record(stream);
    let executor = device.stream(StreamKind::Executor).unwrap();
    assert!(matches!(device.wait(executor, &event), Err(DeviceError::WaitLimit { limit_ms: 20 })));
    drop(open);
    done(&event);
}

fn open_device(options: &OpenOptions, world: &Arc<LocalWorld>) -> Arc<dyn Device> {
    crate::open(options, &Place { world: world.clone(), rank: 0 }).unwrap().device
}

#[test]
fn two_streams_of_three_ranks_exchange_for_a_thousand_rounds() {
    const ROUNDS: u64 = 1000;
    let world = LocalWorld::new(3, None).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let world = &world;
            scope.spawn(move || {
                let Opened { device, mut comm } = opened(world, rank, None);
                let streams = [StreamKind::Reduce, StreamKind::Gather].map(|kind| device.stream(kind).unwrap());
                let buffers = [(); 2].map(|()| device.alloc(12, &[]).unwrap());
                for round in 0..ROUNDS {
                    let events = [0, 1].map(|i| {
                        let buffer = buffers[i];
                        let value = (round * 10 + i as u64) as f32;
                        let part = buffer.range(4 * rank, 4 * rank + 4);
                        device.enqueue(streams[i], fill(part, value + rank as f32)).unwrap();
                        comm.issue(streams[i], all_gather(2 * round + i as u64, &buffer, rank, 3)).unwrap();
                        device.record(streams[i])
                    });
                    for i in 0..2 {
                        done(&events[i]);
                        let value = (round * 10 + i as u64) as f32;
                        assert_eq!(read::<f32>(&device, buffers[i].whole()), [value, value + 1.0, value + 2.0]);
                    }
                }
            });
        }
    });
}

#[test]
fn twenty_gathers_of_five_milliseconds_take_a_hundred() {
    let link = crate::Link { bytes_per_second: 1e6, latency: Duration::from_millis(1) };
    let world = LocalWorld::new(2, Some(link)).unwrap();
    let spans = std::thread::scope(|scope| {
        [0, 1]
            .map(|rank| {
                let world = &world;
                scope.spawn(move || {
                    let Opened { device, mut comm } = opened(world, rank, None);
                    let gather = device.stream(StreamKind::Gather).unwrap();
                    let buffer = device.alloc(8000, &[]).unwrap();
                    for seq in 0..20 {
                        comm.issue(gather, all_gather(seq, &buffer, rank, 2)).unwrap();
                    }
                    done(&device.record(gather));
                    let mut spans = Vec::new();
                    device.drain_spans(&mut spans);
                    let mut none = Vec::new();
                    device.drain_spans(&mut none);
                    assert!(none.is_empty());
                    spans
                })
            })
            .map(|thread| thread.join().unwrap())
    });
    for spans in &spans {
        assert_eq!(spans.iter().map(|span| span.key.seq).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
        assert!(spans.iter().all(|s| s.reached_ns <= s.begin_ns && s.begin_ns + 5_000_000 <= s.end_ns), "{spans:?}");
        assert!(spans[19].end_ns - spans[0].begin_ns >= 100_000_000);
    }
    let begins = |spans: &[crate::Span]| spans.iter().map(|span| span.begin_ns).collect::<Vec<_>>();
    assert_eq!(begins(&spans[0]), begins(&spans[1]));
    for i in 1..20 {
        let reached = spans[0][i].reached_ns.max(spans[1][i].reached_ns);
        assert_eq!(spans[0][i].begin_ns, reached.max(spans[0][i - 1].end_ns), "the link waits for no thread: {i}");
        assert_eq!(spans[0][i].end_ns, spans[0][i].begin_ns + 5_000_000);
    }
}

#[test]
fn a_call_pays_its_latency_once() {
    let link = crate::Link { bytes_per_second: 1e6, latency: Duration::from_millis(2) };
    let world = LocalWorld::new(2, Some(link)).unwrap();
    let run = |rank: usize| {
        let Opened { device, mut comm } = opened(&world, rank, None);
        let gather = device.stream(StreamKind::Gather).unwrap();
        let buffer = device.alloc(2000, &[]).unwrap();
        for seq in 0..4 {
            comm.issue(gather, Collective { more: seq < 2, ..all_gather(seq, &buffer, rank, 2) }).unwrap();
        }
        done(&device.record(gather));
        let mut spans = Vec::new();
        device.drain_spans(&mut spans);
        spans.iter().map(|span| span.end_ns - span.begin_ns).collect::<Vec<_>>()
    };
    let spans =
        std::thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || run(rank))).map(|t| t.join().unwrap()));
    assert_eq!(spans[0], [1_000_000, 1_000_000, 3_000_000, 3_000_000]);
}

#[test]
fn a_stream_tells_which_collective_it_has_begun() {
    let (open, hook) = gate();
    let world = LocalWorld::new(1, None).unwrap();
    let Opened { device, mut comm } = opened(&world, 0, Some(hook));
    let [reduce, gather] = [StreamKind::Reduce, StreamKind::Gather].map(|kind| device.stream(kind).unwrap());
    let buffer = device.alloc(8, &[]).unwrap();
    comm.issue(gather, all_gather(4, &buffer, 0, 1)).unwrap();
    let event = device.record(gather);
    assert_eq!(device.begun(gather), 0, "it is stuck before the collective");
    drop(open);
    done(&event);
    assert_eq!((device.begun(gather), device.begun(reduce)), (5, 0));
}
