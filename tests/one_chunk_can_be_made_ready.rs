//! `ensure_chunk_ready` demands and awaits the gathers of one chunk (SPEC P4): after it reads of that chunk do not
//! wait, and those of the other chunk need not have begun.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gatherflow::{ChunkId, Credits, FirstGather, Link, Overlap};
use synthetic::{Job, Meeting, Net, Setting, Trainer, serial};

/// Every parameter of the chunk that is still awaited.
fn awaited(trainer: &Trainer<'_>, chunk: ChunkId) -> Vec<String> {
    let net = trainer.job.net;
    let units = net.units.iter().filter(|unit| net.chunks[unit.chunk] == chunk);
    let ready = |param: &_| pin!(trainer.engine.ready(*param)).poll(&mut Context::from_waker(Waker::noop()));
    let params = units.flat_map(|unit| &unit.params).filter(|param| !matches!(ready(param), Poll::Ready(Ok(()))));
    params.map(|param| trainer.engine.params()[param.index()].name.clone()).collect()
}

#[test]
fn after_it_no_read_of_that_chunk_waits_and_the_other_one_is_not_asked_for() {
    let net = Net::mixed(false);
    let job = Job { bucket_size: 1, ..Job::new(&net, 2, 3, &|_, _| vec![(0..6).collect()]) };
    let expected = serial(&job);
    let modes = Setting::modes_and_storages()
        .filter(|mode| mode.credits != Credits::Buckets(3) || mode.overlap != Overlap::Window);
    for (mode, first_gather) in
        modes.flat_map(|mode| [FirstGather::Step, FirstGather::Forward].map(|first| (mode, first)))
    {
        // Slow enough that nobody finds gathers done which nobody waited for.
        let link = Link { bytes_per_second: 1e9, latency: Duration::from_millis(3) };
        let setting = Setting { link: Some(link), first_gather, ..mode };
        let ahead = match (setting.overlap, setting.credits) {
            (Overlap::Chain, _) | (Overlap::Window, Credits::Buckets(1)) => 1,
            _ => usize::MAX,
        };
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            for step in 0..job.steps {
                trainer.train_one();
                let engine = &trainer.engine;
                let (plan, before) = (engine.plan(), step as usize * engine.plan().buckets().len());
                // Alternately the first chunk, and the last one alone.
                let chunk = (step % 2) as usize;
                let demanded =
                    net.units.iter().filter(|unit| unit.chunk == chunk).map(|unit| plan.unit(unit.id).demand);
                let demanded = demanded.max().unwrap() as usize;
                assert!(chunk == 1 || demanded + 1 < plan.buckets().len());
                engine.ensure_chunk_ready(net.chunks[chunk]).unwrap();
                let late = awaited(&trainer, net.chunks[chunk]);
                assert!(late.is_empty(), "chunk {chunk} is ready, but {late:?} are not, {setting:?}");
                let issued = engine.counters().gathers as usize - before;
                assert!(
                    issued >= demanded && issued <= demanded.saturating_add(ahead),
                    "{issued} of {demanded}, {setting:?}"
                );
                meeting.meet();
                net.units.iter().filter(|unit| unit.chunk == chunk).flat_map(|unit| &unit.params).for_each(|param| {
                    trainer.outside(*param);
                });
            }
            trainer.finish()
        });
    }
}
