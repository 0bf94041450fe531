//! Nothing is communicated twice and nothing is left out: per step one reduce per bucket, and one gather per bucket unless
//! the host has skipped the step, in every mode.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{Overlap, Skip};
use synthetic::{Expected, Job, Net, Setting, serial};

fn job(net: &Net) -> Job<'_> {
    let bad = |step, rank| rank == 1 && (step == 1 || step == 4);
    Job { overflow: bad, ..Job::new(net, 2, 6, &|_, _| vec![(0..6).collect(), (0..6).rev().collect()]) }
}

#[test]
fn each_step_has_as_many_reduces_and_gathers_as_buckets_and_one_that_the_host_skips_no_gathers() {
    let net = Net::mixed(false);
    let job = job(&net);
    let expected = serial(&job);
    for (overlap_grad_reduce, skip) in
        [(false, Skip::Host), (true, Skip::Host), (false, Skip::Device), (true, Skip::Device)]
    {
        for setting in Setting::modes_and_storages().map(|mode| Setting { overlap_grad_reduce, skip, ..mode }) {
            job.on_ranks(&expected, &setting, |mut trainer| {
                let buckets = trainer.engine.plan().buckets().len() as u64;
                assert!(buckets >= 6, "only {buckets} buckets would show little");
                let mut before = trainer.engine.counters();
                for step in 0..job.steps {
                    trainer.train_one();
                    let updated = trainer.outcome(step).updated;
                    assert_eq!(updated, step != 1 && step != 4);
                    if setting.overlap != Overlap::None {
                        trainer.engine.ensure_params_ready().unwrap();
                    }
                    let now = trainer.engine.counters();
                    assert_eq!(now.reduces - before.reduces, buckets, "reduces of step {step}, {setting:?}");
                    let gathers = buckets * setting.gathered_steps(u64::from(updated), 1);
                    assert_eq!(now.gathers - before.gathers, gathers, "gathers of step {step}, {setting:?}");
                    before = now;
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn the_totals_of_a_run_without_flushes_are_the_same_and_so_is_the_order() {
    let net = Net::mixed(false);
    let job = job(&net);
    let expected = serial(&job);
    for skip in [Skip::Host, Skip::Device] {
        totals_and_order(&job, &expected, skip);
    }
}

fn totals_and_order(job: &Job<'_>, expected: &Expected, skip: Skip) {
    let mut digests = Vec::new();
    for setting in Setting::modes_and_storages().map(|mode| Setting { skip, ..mode }) {
        for finished in
            job.on_ranks(expected, &setting, |t| (t.engine.plan().buckets().len() as u64, t.train_to_the_end()))
        {
            let (buckets, counters) = (finished.0, finished.1.counters);
            let gathers = buckets * setting.gathered_steps(4, 6);
            assert_eq!((counters.reduces, counters.gathers, counters.skipped_steps), (6 * buckets, gathers, 2));
            digests.push(counters.order_digest);
        }
    }
    assert!(
        digests.windows(2).all(|pair| pair[0] == pair[1]),
        "the order depends on plan and verdicts alone: {digests:?}"
    );
}
