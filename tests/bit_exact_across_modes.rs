//! Overlap modes, credits, the overlap of reduction, who decides skips, steps in flight and the issuing thread change no bit of parameters, masters, moments,
//! losses, norms, zero counts and loss scales (rule S1): all are those of a serial optimizer that shares no code with the
//! runtime. Dtypes are mixed, microbatches change in number, groups differ, some parameters are frozen, unused or tied, and
//! one step is skipped.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::Storage;
use gatherflow::{Credits, NormType, Overlap, Skip};
use reference::Scaler;
use std::time::Duration;
use synthetic::{Job, Net, Setting, Trainer, serial};

const STORAGES: [Storage; 2] = [Storage::Views, Storage::Shared];

/// One to four microbatches, not as many on every rank. The rare unit is entered in every third step only; block b is left
/// out of the last microbatch of odd steps, so its gradients are written but never complete.
fn program(step: u64, rank: usize) -> Vec<Vec<usize>> {
    let count = 1 + (step as usize * 3 + rank) % 4;
    let units = |microbatch: usize| {
        let all = 0..=Net::TAIL;
        let rare = |unit: &usize| *unit != Net::RARE || step % 3 == 1;
        let late = |unit: &usize| *unit != Net::BLOCK_B || step.is_multiple_of(2) || microbatch + 1 < count;
        all.filter(rare).filter(late).collect()
    };
    (0..count).map(units).collect()
}

fn every_setting_gives_the_bits_of_the_reference(ranks: usize, with_f16: bool) {
    let net = Net::mixed(with_f16);
    check(&Job {
        overflow: |step, rank| step == 2 && rank == 0,
        scaler: with_f16.then(|| Scaler::new(512.0, 2, 1)),
        adam_w: !with_f16,
        ..Job::new(&net, ranks, 6, &program)
    });
}

/// Dense parameters on all ranks beside experts and replicas that are divided among fewer.
fn shard_groups_give_the_bits_of_the_reference(ranks: usize, of: usize) {
    groups_give_the_bits_of_the_reference(&Net::with_experts(of), ranks, 1);
}

/// The same, and tensor-parallel parameters.
fn model_parallel_ranks_give_the_bits_of_the_reference(ranks: usize, model_parallel: usize, of: usize) {
    groups_give_the_bits_of_the_reference(&Net::parallel(of), ranks, model_parallel);
}

fn groups_give_the_bits_of_the_reference(net: &Net, ranks: usize, model_parallel: usize) {
    let grouped = |step, rank| {
        let mut microbatches = program(step, rank);
        for units in &mut microbatches {
            units.push(Net::EXPERTS);
        }
        microbatches
    };
    let overflow = |step, rank| step == 2 && rank == 1;
    check(&Job { model_parallel, overflow, ..Job::new(net, ranks, 6, &grouped) });
}

fn check(job: &Job<'_>) {
    let expected = serial(job);
    assert_eq!(expected.updated_steps(), 5, "one step is skipped");
    for mode in Setting::modes_and_storages() {
        for overlap_grad_reduce in [false, true] {
            for (issue_on_thread, gather_group_bytes, skip, steps_in_flight) in [
                (false, 0, Skip::Host, 2),
                (true, 1500, Skip::Host, 2),
                (false, 1500, Skip::Device, 1),
                (false, 0, Skip::Device, 2),
                (true, 0, Skip::Device, 3),
            ] {
                let setting =
                    Setting { gather_group_bytes, overlap_grad_reduce, skip, issue_on_thread, steps_in_flight, ..mode };
                let finished = job.train(&expected, &setting);
                assert!(finished.iter().all(|f| f.counters.skipped_steps == 1), "{setting:?}");
            }
        }
    }
}

/// Storage decides where a rank receives, not what it sends: each rank has its own here.
#[test]
fn ranks_may_differ_in_storage() {
    let net = Net::mixed(false);
    let job = Job { overflow: |step, rank| step == 2 && rank == 0, ..Job::new(&net, 4, 6, &program) };
    let expected = serial(&job);
    for mode in Setting::modes() {
        let of = |rank: &gatherflow::Rank| Setting { storage: STORAGES[rank.rank() % 2], ..mode };
        let ranks = gatherflow::Ranks::with_config(4, &job.config(&mode)).unwrap();
        std::thread::scope(|scope| {
            let (job, expected) = (&job, &expected);
            let start = |rank| {
                let setting = of(&rank);
                scope.spawn(move || {
                    Trainer::start(rank, job, &setting, gatherflow::Internals::default(), expected).train_to_the_end()
                })
            };
            let threads: Vec<_> = ranks.into_iter().map(start).collect();
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }
}

#[test]
fn four_ranks_with_experts_and_replicas_on_two() {
    shard_groups_give_the_bits_of_the_reference(4, 2);
}

#[test]
fn six_ranks_with_experts_and_replicas_on_three() {
    shard_groups_give_the_bits_of_the_reference(6, 3);
}

#[test]
fn two_ranks_with_experts_and_replicas_on_each() {
    shard_groups_give_the_bits_of_the_reference(2, 1);
}

#[test]
fn two_copies_of_the_model_on_two_ranks_each() {
    model_parallel_ranks_give_the_bits_of_the_reference(4, 2, 1);
}

#[test]
fn one_copy_of_the_model_on_three_ranks() {
    model_parallel_ranks_give_the_bits_of_the_reference(3, 3, 1);
}

#[test]
fn four_copies_of_the_model_on_two_ranks_each_with_experts_and_replicas_on_two() {
    model_parallel_ranks_give_the_bits_of_the_reference(8, 2, 2);
}

#[test]
fn every_type_of_norm_is_told_and_clipped_by_with_the_bits_of_the_reference() {
    for (norm, max_norm) in
        [(NormType::P(1.0), 20.0), (NormType::P(2.5), 1.0), (NormType::P(0.5), 3000.0), (NormType::Inf, 0.05)]
    {
        for (ranks, with_f16) in [(1, false), (3, true), (4, false)] {
            let net = Net::mixed(with_f16);
            let job = Job {
                norm,
                max_norm,
                overflow: |step, rank| step == 2 && rank == 0,
                scaler: with_f16.then(|| Scaler::new(512.0, 2, 1)),
                ..Job::new(&net, ranks, 5, &program)
            };
            let expected = serial(&job);
            let norms: Vec<f64> = expected.verdicts.iter().filter_map(|v| v.grad_norm).collect();
            assert!(norms.len() == 4 && norms.iter().all(|n| *n > max_norm), "not clipped: {norm:?}, {norms:?}");
            for mode in [Setting::of(Overlap::None), Setting::window(Credits::Buckets(3))] {
                job.train(&expected, &mode);
            }
        }
    }
}

/// Three steps in four read nothing, so that none of them waits for the verdict of the one before. The device alone knows by
/// then how many of them were updated, and which learning rates and bias corrections that makes.
#[test]
fn steps_that_begin_while_several_verdicts_are_unknown_use_the_rows_of_the_updates_there_were() {
    let net = Net::mixed(false);
    let program = |step: u64, rank| if step.is_multiple_of(4) { program(step, rank) } else { Vec::new() };
    for ranks in 1..=3 {
        let job =
            Job { overflow: |step, rank| (step == 0 || step == 8) && rank == 0, ..Job::new(&net, ranks, 12, &program) };
        let expected = serial(&job);
        assert_eq!(expected.updated_steps(), 10);
        for steps_in_flight in 1..=4 {
            for mode in [Setting::of(Overlap::Chain), Setting::window(Credits::Unlimited)] {
                let verdict_delay = Duration::from_millis(2);
                job.train(&expected, &Setting { skip: Skip::Device, steps_in_flight, verdict_delay, ..mode });
            }
        }
    }
}

/// Two weights with copies on two chunks, one of them with three.
fn copies_give_the_bits_of_the_reference(ranks: usize) {
    let net = Net::with_copies();
    check(&Job { overflow: |step, rank| step == 2 && rank == 0, ..Job::new(&net, ranks, 6, &program) });
}

#[test]
fn one_rank_with_copies_on_two_chunks() {
    copies_give_the_bits_of_the_reference(1);
}

#[test]
fn three_ranks_with_copies_on_two_chunks() {
    copies_give_the_bits_of_the_reference(3);
}

macro_rules! on {
    ($($name:ident: $ranks:literal, $with_f16:literal;)+) => {
        $(#[test]
        fn $name() {
            every_setting_gives_the_bits_of_the_reference($ranks, $with_f16);
        })+
    };
}

on! {
    one_rank: 1, false;
    two_ranks: 2, false;
    three_ranks: 3, false;
    four_ranks: 4, false;
    one_rank_with_f16_and_a_loss_scale: 1, true;
    two_ranks_with_f16_and_a_loss_scale: 2, true;
    three_ranks_with_f16_and_a_loss_scale: 3, true;
    four_ranks_with_f16_and_a_loss_scale: 4, true;
}
