//! Overlap modes, credits, the overlap of reduction and the issuing thread change no bit of parameters, masters, moments,
//! losses, norms, zero counts and loss scales (rule S1): all are those of a serial optimizer that shares no code with the
//! runtime. Dtypes are mixed, microbatches change in number, groups differ, some parameters are frozen, unused or tied, and
//! one step is skipped.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use reference::Scaler;
use synthetic::{Job, Net, Setting, serial};

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
    for mode in Setting::modes() {
        for overlap_grad_reduce in [false, true] {
            for issue_on_thread in [false, true] {
                let setting = Setting { overlap_grad_reduce, issue_on_thread, ..mode };
                let finished = job.train(&expected, &setting);
                assert!(finished.iter().all(|f| f.counters.skipped_steps == 1), "{setting:?}");
            }
        }
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
