//! Memory comes and goes while collectives are in flight: engines and buffers are made and dropped on other threads, with gathers of
//! their own pending, and no bit of the job that trains beside them changes. That nobody can free what a collective holds is
//! otherwise the business of types (rule V3) and of leases.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gatherflow::{Internals, Link};
use synthetic::{Expected, Job, Meeting, Net, Setting, Trainer, serial};

const LINK: &str = "1gbit,300us";

/// Ends what others do, however the test ends.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Engines of a job that are dropped after its first step: its gathers are still under way, where they overlap with anything.
fn abandoned_engines(job: &Job<'_>, expected: &Expected, setting: &Setting) {
    let meeting = Meeting::of(job.ranks);
    job.on_seats(setting, |rank| {
        let mut trainer = Trainer::start(rank, job, setting, Internals::default(), expected);
        trainer.train_one();
        // Before that the other rank may still need this one.
        meeting.meet();
        drop(trainer);
    });
}

/// Blocks of as many bytes as buffers have, none of them zero.
fn buffers(round: usize) {
    let blocks: Vec<Vec<u8>> = (1..=16).map(|n| vec![0xff; 64 * n * (1 + round % 64)]).collect();
    assert!(std::hint::black_box(&blocks).iter().flatten().all(|byte| *byte == 0xff));
}

#[test]
fn engines_made_and_dropped_while_collectives_of_another_job_are_in_flight_change_none_of_its_bits() {
    let net = Net::mixed(false);
    let program = |_, _| vec![(0..6).collect::<Vec<_>>(); 2];
    let job = Job { overflow: |step, rank| step == 2 && rank == 1, ..Job::new(&net, 2, 5, &program) };
    let brief = Job::new(&net, 2, 1, &program);
    let (expected, expected_of_brief) = (serial(&job), serial(&brief));
    let link = Some(Link::parse(LINK).unwrap());
    for setting in Setting::modes_and_storages().map(|mode| Setting { link, ..mode }) {
        let (ended, dropped, freed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let _end = End(&ended);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        abandoned_engines(&brief, &expected_of_brief, &setting);
                        dropped.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    buffers(freed.fetch_add(1, Ordering::Relaxed));
                }
            });
            synthetic::wait_until("engines to come and go", || dropped.load(Ordering::Relaxed) > 2);
            job.train(&expected, &setting);
        });
        let counts = [dropped, freed].map(AtomicUsize::into_inner);
        assert!(counts.iter().all(|count| *count > 4), "{counts:?}");
    }
}
