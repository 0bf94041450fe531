//! Every read sees exactly the values of the version that its reader needs (rule V2), whatever the forward order: those of
//! the serial reference at that step, bit for bit. The link is slow, so that reads do come before their gathers.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::Link;
use synthetic::{Job, Net, Program, Setting, random_bits, serial, shuffled};

fn slow_link(setting: Setting) -> Setting {
    Setting { link: Some(Link::parse("1gbit,300us").unwrap()), ..setting }
}

/// Trains a job in every mode, each bucket being reduced once a step; `after` runs on each rank after each step.
fn in_every_mode(ranks: usize, steps: u64, program: &Program, after: impl Fn(&synthetic::Trainer<'_>) + Sync) {
    let net = Net::mixed(false);
    let job = Job::new(&net, ranks, steps, program);
    let expected = serial(&job);
    for setting in Setting::modes_and_storages().map(slow_link) {
        job.on_ranks(&expected, &setting, |mut trainer| {
            let buckets = trainer.engine.plan().buckets().len() as u64;
            for _ in 0..steps {
                trainer.train_one();
                after(&trainer);
            }
            assert_eq!(trainer.finish().counters.reduces, buckets * steps, "{setting:?}");
        });
    }
}

/// One to three microbatches, each through up to eight units in any order, some of them several times, others not at all.
fn random_program(step: u64, rank: usize) -> Vec<Vec<usize>> {
    let draw = |what: u64, below: u64| (random_bits(&[3, step, rank as u64, what]) % below) as usize;
    let microbatch = |m: u64| (0..=draw(m, 8)).map(|i| draw(100 + 10 * m + i as u64, 6)).collect();
    (0..=draw(99, 3) as u64).map(microbatch).collect()
}

#[test]
fn random_forward_orders_that_change_every_step_and_differ_on_every_rank() {
    for ranks in [1, 2, 3] {
        in_every_mode(ranks, 8, &random_program, |_| ());
    }
}

#[test]
fn permutations_of_registration_order() {
    let permuted = |step, rank| vec![shuffled(6, &[4, step, rank as u64])];
    in_every_mode(2, 6, &permuted, |_| ());
}

#[test]
fn a_weight_tied_between_the_first_and_the_last_unit() {
    in_every_mode(2, 4, &|_, _| vec![vec![Net::EMBED, Net::BLOCK_A, Net::HEAD], vec![Net::HEAD, Net::EMBED]], |_| ());
}

#[test]
fn a_unit_entered_three_times_in_one_forward() {
    let thrice = |_, _| vec![vec![Net::BLOCK_A, Net::TAIL, Net::BLOCK_A, Net::BLOCK_B, Net::BLOCK_A]];
    in_every_mode(2, 4, &thrice, |_| ());
}

#[test]
fn any_parameter_read_outside_all_units_right_after_a_step() {
    in_every_mode(3, 5, &|_, _| vec![(0..6).collect()], |trainer| {
        // In another order on every rank, and not on rank 2 at all.
        let params = trainer.job.net.params();
        let order = shuffled(params.len(), &[5, trainer.engine.steps(), trainer.rank() as u64]);
        for index in order.into_iter().filter(|_| trainer.rank() < 2) {
            trainer.outside(params[index].id);
        }
    });
}

#[test]
fn a_unit_that_nobody_enters_for_several_steps() {
    let rarely = |step: u64, _| {
        let all = [Net::EMBED, Net::BLOCK_B, Net::RARE, Net::TAIL];
        vec![all.into_iter().filter(|u| step == 4 || ![Net::BLOCK_B, Net::EMBED].contains(u)).collect()]
    };
    in_every_mode(2, 6, &rarely, |_| ());
}

#[test]
fn a_unit_that_only_one_rank_enters() {
    let by_rank = |_, rank| vec![if rank == 0 { vec![Net::RARE, Net::EMBED] } else { vec![Net::TAIL] }];
    in_every_mode(3, 5, &by_rank, |_| ());
}
