//! Evaluation at any time changes nothing in training and sees current weights; what one rank reads alone it gets alone,
//! while the others are somewhere else (rule O4).
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use gatherflow::{Link, Overlap};
use synthetic::{Expected, Job, Meeting, Net, Setting, Trainer, serial, wait_until};

fn job(net: &Net, ranks: usize) -> Job<'_> {
    Job { overflow: |step, rank| step == 1 && rank == 0, ..Job::new(net, ranks, 4, &|_, _| vec![(0..6).collect(); 2]) }
}

/// The loss over all weights of a version, by the reference.
fn expected_loss(net: &Net, expected: &Expected, version: usize) -> f64 {
    let params = net.units.iter().flat_map(|unit| &unit.params);
    params.fold(0.0, |loss, param| loss + Net::loss(*param, &expected.weights[version][param.index()]))
}

fn evaluate(trainer: &Trainer<'_>) {
    let loss = trainer.evaluate();
    let expected = expected_loss(trainer.job.net, trainer.expected, trainer.engine.steps() as usize);
    assert_eq!(loss.to_bits(), expected.to_bits());
}

#[test]
fn train_evaluate_train_is_train_train() {
    let net = Net::mixed(false);
    let job = job(&net, 2);
    let expected = serial(&job);
    for setting in Setting::modes_and_storages() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            evaluate(&trainer);
            for _ in 0..job.steps {
                trainer.train_one();
                evaluate(&trainer);
            }
            trainer.finish()
        });
    }
}

#[test]
fn evaluation_in_mid_accumulation_leaves_the_gradients_alone() {
    let net = Net::mixed(false);
    let job = job(&net, 2);
    let expected = serial(&job);
    for setting in Setting::modes_and_storages() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            for _ in 0..job.steps {
                trainer.microbatches_with(evaluate);
                trainer.step();
            }
            trainer.finish()
        });
    }
}

/// After every step `alone` runs on one rank, while the others wait for it outside the engine.
fn on_one_rank_alone(alone: impl Fn(&Trainer<'_>) + Sync) {
    let net = Net::mixed(false);
    for ranks in [2, 3] {
        let job = job(&net, ranks);
        let expected = serial(&job);
        for setting in Setting::modes_and_storages() {
            let meeting = Meeting::of(ranks);
            job.on_ranks(&expected, &setting, |mut trainer| {
                for step in 0..job.steps as usize {
                    trainer.train_one();
                    if trainer.rank() == step % ranks {
                        alone(&trainer);
                    }
                    meeting.meet();
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn an_evaluation_on_one_rank_alone_ends_while_the_others_wait_elsewhere() {
    on_one_rank_alone(evaluate);
}

#[test]
fn a_flush_on_one_rank_alone_ends_while_the_others_wait_elsewhere() {
    on_one_rank_alone(|trainer| trainer.engine.ensure_params_ready().unwrap());
}

#[test]
fn a_read_on_one_rank_alone_ends_while_the_others_wait_elsewhere() {
    on_one_rank_alone(|trainer| {
        // The tail is gathered last.
        let last = *trainer.job.net.units[Net::TAIL].params.last().unwrap();
        trainer.outside(last);
    });
}

#[test]
fn readiness_awaited_on_one_rank_alone_comes_while_the_others_wait_elsewhere() {
    on_one_rank_alone(|trainer| {
        let last = *trainer.job.net.units[Net::TAIL].params.last().unwrap();
        wait_until("the last parameter to be ready", || {
            let mut ready = pin!(trainer.engine.ready(last));
            ready.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        });
        trainer.outside(last);
    });
}

/// The executor is several steps ahead of the newest outcome when it asks, so the peers hear of versions they are far from.
#[test]
fn what_one_rank_demands_several_steps_ahead_is_not_forgotten() {
    let net = Net::mixed(false);
    let only_the_first_has_gradients = |step, _| if step % 4 == 0 { vec![(0..6).collect()] } else { vec![] };
    let job = Job::new(&net, 2, 12, &only_the_first_has_gradients);
    let expected = serial(&job);
    let link = Some(Link::parse("1gbit,300us").unwrap());
    let last = *net.units[Net::TAIL].params.last().unwrap();
    let flush = |trainer: &Trainer<'_>| trainer.engine.ensure_params_ready().unwrap();
    let read = |trainer: &Trainer<'_>| _ = trainer.outside(last);
    let ways: [&(dyn Fn(&Trainer<'_>) + Sync); 3] = [&evaluate, &flush, &read];
    for alone in ways {
        for setting in Setting::modes_and_storages().filter(|setting| setting.overlap != Overlap::None) {
            let meeting = Meeting::of(job.ranks);
            let setting = Setting { steps_in_flight: 4, link, ..setting };
            job.on_ranks(&expected, &setting, |mut trainer| {
                for rank in 0..3 {
                    trainer.train(4);
                    if trainer.rank() == rank % 2 {
                        alone(&trainer);
                    }
                    meeting.meet();
                }
                trainer.finish()
            });
        }
    }
}
