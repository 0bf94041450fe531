//! `prefetch` begins the gathers of a unit on all ranks, waits for nothing, and changes no bit.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{Credits, FirstGather, Overlap};
use synthetic::{Job, Meeting, Net, Setting, serial, wait_until};

#[test]
fn one_rank_begins_the_gathers_of_all_before_the_step_is_even_judged() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 3, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for (setting, ahead) in [(Setting::of(Overlap::Chain), 0), (Setting::window(Credits::Buckets(1)), 1)] {
        for first_gather in [FirstGather::Step, FirstGather::Forward] {
            let setting = Setting { first_gather, ..setting };
            let meeting = Meeting::of(job.ranks);
            job.on_ranks(&expected, &setting, |mut trainer| {
                for step in 0..job.steps {
                    let unit = &net.units[Net::BLOCK_B];
                    if trainer.rank() == 0 {
                        trainer.train_one();
                        // The other rank's step comes after this, so there is nothing yet that could be waited for.
                        trainer.engine.prefetch(unit.id).unwrap();
                        meeting.meet();
                    } else {
                        meeting.meet();
                        trainer.train_one();
                    }
                    let plan = trainer.engine.plan();
                    let (buckets, demand) = (plan.buckets().len(), plan.unit(unit.id).demand as usize);
                    assert!(1 < demand && demand + ahead < buckets);
                    let issued = || trainer.engine.counters().gathers as usize - step as usize * buckets;
                    wait_until("the gathers that were prefetched", || issued() >= demand + ahead);
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    assert_eq!(issued(), demand + ahead, "rank {}, {setting:?}", trainer.rank());
                    meeting.meet();
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn prefetching_everything_everywhere_changes_no_bit() {
    let net = Net::mixed(false);
    let job =
        Job { overflow: |step, rank| step == 1 && rank == 0, ..Job::new(&net, 3, 5, &|_, _| vec![(0..6).collect()]) };
    let expected = serial(&job);
    for setting in Setting::modes_and_storages() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            for _ in 0..job.steps {
                for unit in net.units.iter().rev() {
                    trainer.engine.prefetch(unit.id).unwrap();
                }
                trainer.train_one();
            }
            trainer.finish()
        });
    }
}
