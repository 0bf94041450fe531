//! What comes late changes when things happen and nothing else: a delay before every kernel, every collective and every message
//! in turn, gradients from two threads, and released memory that holds NaN. Every run is compared with the serial reference bit
//! for bit, so any two runs have the same bits too.
#![allow(clippy::unwrap_used, clippy::redundant_closure_for_method_calls)] // the method is of one lifetime, the closure of any

mod reference;
mod synthetic;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gatherflow::{Credits, DType, GroupId, Internals, ParamOptions, Storage};
use gatherflow_actors::drill::{Drill, Fault};
use gatherflow_kernels::Work;
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use synthetic::{Job, Net, Setting, serial};

const RANKS: usize = 2;

/// Long beside everything here: a run without delays takes a few milliseconds.
const DELAY: Duration = Duration::from_millis(3);

/// Four buckets of three dtypes; one parameter is tied, one sparse, one is never written.
fn net() -> Net {
    let mut net = Net::empty();
    net.chunk();
    net.unit("first");
    let table = net.param("table", 130, DType::Bf16, ParamOptions::default());
    net.param("sparse position", 33, DType::F32, ParamOptions { group: GroupId(1), ..ParamOptions::default() });
    net.unit("middle");
    net.param("narrow", 65, DType::Bf16, ParamOptions { grad_dtype: Some(DType::Bf16), ..ParamOptions::default() });
    net.param("unused", 40, DType::F32, ParamOptions::default());
    net.unit("last");
    net.use_param(table);
    net.param("head", 70, DType::Bf16, ParamOptions { group: GroupId(2), ..ParamOptions::default() });
    net
}

/// Three steps, the second of which is skipped.
fn job(net: &Net, ranks: usize) -> Job<'_> {
    Job {
        overflow: |step, rank| step == 1 && rank == 0,
        ..Job::new(net, ranks, 3, &|step, _| if step == 2 { vec![vec![0, 1, 2]; 2] } else { vec![vec![0, 1, 2]] })
    }
}

/// Counts what comes by on one rank, and whether the n-th of it is there to be delayed.
#[derive(Clone)]
struct Nth {
    n: usize,
    seen: Arc<AtomicUsize>,
}

impl Nth {
    fn is_next(&self) -> bool {
        self.seen.fetch_add(1, Ordering::SeqCst) == self.n
    }
}

/// Runs the job in every mode and storage with the n-th place of a rank delayed, for each n there is; `delayed` sets up that rank.
fn every_place_in_turn(at_least: usize, delayed: impl Fn(Nth) -> Internals) {
    let net = net();
    let job = job(&net, RANKS);
    let expected = serial(&job);
    let mut hashes = Vec::new();
    // Where a gather lands is one thing, how far it runs ahead another: the second storage has one of the credits.
    let few = |mode: &Setting| mode.storage == Storage::Views || matches!(mode.credits, Credits::Buckets(3));
    for mode in Setting::modes_and_storages().filter(few) {
        let (mut n, mut places) = (0, 1);
        while n < places {
            let nth = Nth { n, seen: Arc::default() };
            let setting = Setting { issue_on_thread: n % 2 == 1, two_writers: n % 3 == 1, ..mode };
            let slow = n / 2 % RANKS;
            let internals = |rank| if rank == slow { delayed(nth.clone()) } else { Internals::default() };
            let finished = job.on_ranks_with(&expected, &setting, internals, |trainer| trainer.train_to_the_end());
            hashes.extend(finished.iter().map(|finished| finished.hash));
            // Runs differ in the number of messages: the last places are not in all of them.
            (n, places) = (n + 1, places.max(nth.seen.load(Ordering::SeqCst)));
        }
        assert!(places >= at_least, "only {places} places");
        println!("{places} places in {:?}, {:?}", mode.overlap, mode.storage);
    }
    assert!(hashes.windows(2).all(|pair| pair[0] == pair[1]), "runs differ: {hashes:x?}");
}

#[test]
fn a_delay_before_every_kernel_and_collective_in_turn() {
    every_place_in_turn(45, |nth| {
        let mut internals = Internals::default();
        let delay = move |_: &Work| if nth.is_next() { Inject::Delay(DELAY) } else { Inject::Nothing };
        internals.open.before_work = Some(BeforeWork::new(delay));
        internals
    });
}

#[test]
fn a_delay_before_every_message_in_turn() {
    every_place_in_turn(100, |nth| {
        let delay = move |_| if nth.is_next() { Fault::Delay(DELAY) } else { Fault::Nothing };
        Internals { drill: Some(Drill::before_message(delay)), ..Internals::default() }
    });
}

#[test]
fn everything_late_by_another_time() {
    let net = net();
    let job = job(&net, 3);
    let expected = serial(&job);
    for (round, setting) in Setting::modes_and_storages().enumerate() {
        let internals = |rank: usize| {
            let late = move |n: usize| {
                Duration::from_micros(synthetic::random_bits(&[round as u64, rank as u64, n as u64]) % 400)
            };
            let (work, messages) = (AtomicUsize::new(0), AtomicUsize::new(1 << 32));
            let mut internals = Internals::default();
            let delay = move |_: &Work| Inject::Delay(late(work.fetch_add(1, Ordering::Relaxed)));
            internals.open.before_work = Some(BeforeWork::new(delay));
            let delay = move |_| Fault::Delay(late(messages.fetch_add(1, Ordering::Relaxed)));
            Internals { drill: Some(Drill::before_message(delay)), ..internals }
        };
        job.on_ranks_with(&expected, &setting, internals, |trainer| trainer.train_to_the_end());
    }
}

#[test]
fn gradients_written_from_two_threads_have_the_bits_of_one() {
    let net = Net::mixed(false);
    let program = |_, rank| vec![(0..6).collect(), (0..=rank + 2).rev().collect()];
    let job = Job { overflow: |step, rank| step == 2 && rank == 1, ..Job::new(&net, RANKS, 5, &program) };
    let expected = serial(&job);
    for setting in Setting::modes_and_storages() {
        for _ in 0..3 {
            job.train(&expected, &Setting { two_writers: true, ..setting });
        }
    }
}

/// Beside what guards show in debug builds: here the memory of *every* gradient is poisoned, of those too that nobody writes in
/// the next step and of those that are written into zeroed memory.
#[test]
fn a_released_gradient_that_holds_nan_never_leaks() {
    let net = Net::mixed(true);
    let program = |step: u64, rank: usize| {
        let all = vec![(0..6).collect::<Vec<_>>(); 1 + (step as usize + rank) % 2];
        // In between a step with one unit only, and one without backward.
        [all, vec![vec![Net::BLOCK_A]], vec![]].into_iter().nth(step as usize % 3).unwrap()
    };
    let job = Job {
        scaler: Some(reference::Scaler::new(64.0, 100, 1)),
        overflow: |step, rank| step == 3 && rank == 1,
        ..Job::new(&net, RANKS, 8, &program)
    };
    let expected = serial(&job);
    for setting in Setting::modes_and_storages() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            for _ in 0..job.steps {
                trainer.train_one();
                trainer.poison_gradients();
            }
            trainer.finish()
        });
    }
}
