//! The device through its public face: [`crate::open`], streams, events.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod ending;
mod streams;
mod work;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::collective::{Collective, CollectiveKey, CollectiveKind, CollectiveOp};
use crate::cpu::{BeforeWork, Inject};
use crate::device::{AccessMode, Device, StreamKind};
use crate::dtype::{DType, Element};
use crate::error::{Cause, DeviceError, Failure, FailureKind};
use crate::event::{Event, EventStatus};
use crate::open::{OpenOptions, Opened, Place, open};
use crate::work::{Copy, Fill, Work};
use crate::{BufRange, Buffer, LocalWorld};

/// Longer than anything here takes; a test that needs it has failed.
const LONG: Duration = Duration::from_secs(20);

fn opened(world: &Arc<LocalWorld>, rank: usize, before_work: Option<BeforeWork>) -> Opened {
    let options = OpenOptions { before_work, wait_limit: LONG, ..OpenOptions::default() };
    open(&options, &Place { world: world.clone(), rank }).unwrap()
}

/// A device of a world of its own.
fn alone(before_work: Option<BeforeWork>) -> Arc<dyn Device> {
    opened(&LocalWorld::new(1, None).unwrap(), 0, before_work).device
}

fn fill(dst: BufRange, value: f32) -> Work {
    Work::Fill(Fill { dst, dtype: DType::F32, value })
}

fn copy(src: BufRange, dst: BufRange) -> Work {
    Work::Copy(Copy { src, dst })
}

fn read<T: Element>(device: &Arc<dyn Device>, range: BufRange) -> Vec<T> {
    device.lease(range, AccessMode::Read).unwrap().as_slice::<T>().unwrap().to_vec()
}

fn write<T: Element>(device: &Arc<dyn Device>, range: BufRange, values: &[T]) {
    device.lease(range, AccessMode::Write).unwrap().as_mut_slice::<T>().unwrap().copy_from_slice(values);
}

fn all_gather(seq: u64, buffer: &Buffer, rank: usize, world: usize) -> Collective {
    let part = buffer.bytes / world;
    let key = CollectiveKey {
        seq,
        kind: CollectiveKind::Gather,
        bucket: 3,
        bytes: buffer.bytes as u64,
        dtype: DType::F32,
        version: 8,
        group: 0,
    };
    let send = buffer.range(rank * part, (rank + 1) * part);
    Collective::of_all(key, CollectiveOp::AllGather { send, recv: buffer.whole() })
}

fn failed(event: &Event) -> Cause {
    event.wait_for(LONG).expect("the event ends").expect_err("the event fails")
}

fn done(event: &Event) {
    event.wait_for(LONG).expect("the event ends").expect("the event is done");
}

fn cause(message: &str) -> Cause {
    Arc::new(Failure::new(FailureKind::RankLost, 1, message))
}

/// Work blocks until the sender sends or is dropped.
fn gate() -> (Sender<()>, BeforeWork) {
    let (open, closed) = channel();
    let closed = Mutex::new(closed);
    let hook = BeforeWork::new(move |_| {
        let _ = closed.lock().unwrap().recv();
        Inject::Nothing
    });
    (open, hook)
}
