//! With storage `shared` gathers land in gradient memory, and every step begins with zeros there: after updated and skipped steps,
//! whatever was written, accumulated or left out, and whether or not anybody has asked for the gather before (SPEC P5).
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{Overlap, Storage};
use gatherflow_kernels::AccessMode;
use synthetic::{Job, Net, Setting, Trainer, serial};

/// The rare unit is entered in every third step, and the step after that has no backward at all.
fn program(step: u64, rank: usize) -> Vec<Vec<usize>> {
    let units = || (0..=Net::TAIL).filter(move |unit| *unit != Net::RARE || step % 3 == 1).collect();
    (0..if step % 3 == 2 { 0 } else { 1 + (step as usize + rank) % 2 }).map(|_| units()).collect()
}

/// Waits for the gradients of one bucket after the other, in any order, and looks at all of their memory, padding too.
fn look(trainer: &Trainer<'_>, last_first: bool) {
    let (session, plan) = (trainer.engine.session(), trainer.engine.plan());
    let mut buckets: Vec<_> = plan.buckets().iter().collect();
    if last_first {
        buckets.reverse();
    }
    for bucket in buckets {
        session.gradient_free(bucket.params[0]).unwrap();
        let lease = session.device().lease(session.bucket_memory(bucket.id).grads, AccessMode::Read).unwrap();
        let found = lease.as_bytes().iter().position(|byte| *byte != 0);
        assert_eq!(found, None, "{} before step {}", bucket.id, trainer.engine.steps());
    }
}

#[test]
fn in_every_mode_after_updated_and_skipped_steps() {
    let net = Net::mixed(false);
    for ranks in 1..=4 {
        let overflow = |step, rank| step == 1 && rank == 0;
        let job = Job { overflow, ..Job::new(&net, ranks, 7, &program) };
        let expected = serial(&job);
        assert_eq!(expected.updated_steps(), 6);
        for mode in Setting::modes() {
            for overlap_grad_reduce in [false, true] {
                let setting = Setting { storage: Storage::Shared, overlap_grad_reduce, ..mode };
                job.on_ranks(&expected, &setting, |mut trainer| {
                    look(&trainer, false);
                    for step in 0..job.steps {
                        trainer.train_one();
                        look(&trainer, step % 2 == trainer.rank() as u64 % 2);
                    }
                    trainer.finish()
                });
            }
        }
    }
}

#[test]
fn a_step_without_forward_or_backward_right_after_another_asks_for_the_gathers_itself() {
    let net = Net::mixed(false);
    let program = |step, _| if step == 0 { vec![(0..6).collect()] } else { Vec::new() };
    let job = Job::new(&net, 2, 4, &program);
    let expected = serial(&job);
    for overlap in [Overlap::None, Overlap::Chain, Overlap::Window] {
        let setting = Setting { storage: Storage::Shared, ..Setting::of(overlap) };
        job.train(&expected, &setting);
    }
}
