//! The first gathers of a version start at the step's end, at `zero_grad` or in forward, as configured (SPEC P2); whatever is
//! demanded, by whomever, starts all the same, and no bit changes.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::time::Duration;

use gatherflow::{Credits, FirstGather, Mode, Overlap};
use synthetic::{Job, Meeting, Net, Setting, Trainer, serial, wait_until};

const PLACES: [FirstGather; 3] = [FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward];

fn overlapping() -> impl Iterator<Item = (Setting, usize)> {
    let modes = [(Setting::of(Overlap::Chain), 1), (Setting::window(Credits::Buckets(2)), 2)];
    modes.into_iter().flat_map(|(mode, first)| PLACES.map(|first_gather| (Setting { first_gather, ..mode }, first)))
}

/// Waits for so many gathers of the newest version and sees that it stays at that.
fn settled(trainer: &Trainer<'_>, gathers: usize, what: &str) {
    let before = (trainer.engine.steps() - 1) as usize * trainer.engine.plan().buckets().len();
    let issued = || trainer.engine.counters().gathers as usize - before;
    wait_until(what, || issued() >= gathers);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(issued(), gathers, "{what}");
}

#[test]
fn nothing_is_gathered_before_the_place_that_is_configured() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 3, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for (setting, first) in overlapping() {
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            for step in 0..job.steps {
                trainer.train_one();
                trainer.outcome(step);
                let from = |place| if setting.first_gather == place { first } else { 0 };
                let with_step = from(FirstGather::Step);
                settled(&trainer, with_step, &format!("after step {step}, {setting:?}"));
                meeting.meet();
                trainer.engine.zero_grad().unwrap();
                let zeroed = with_step + from(FirstGather::ZeroGrad);
                settled(&trainer, zeroed, &format!("after zero_grad {step}, {setting:?}"));
                meeting.meet();
                let unit = &net.units[Net::EMBED];
                let pass = trainer.engine.pass(net.chunks[unit.chunk], 0, false, Mode::Eval).unwrap();
                pass.enter(unit.id).unwrap();
                let demanded = trainer.engine.plan().unit(unit.id).demand as usize;
                settled(&trainer, demanded + first, &format!("in forward {step}, {setting:?}"));
                meeting.meet();
            }
            trainer.finish()
        });
    }
}

#[test]
fn no_place_changes_a_bit_whether_or_not_gradients_are_zeroed() {
    let net = Net::mixed(false);
    let job =
        Job { overflow: |step, rank| step == 2 && rank == 1, ..Job::new(&net, 3, 6, &|_, _| vec![(0..6).collect()]) };
    let expected = serial(&job);
    for (setting, _) in overlapping() {
        for zeroes in [false, true] {
            job.on_ranks(&expected, &setting, |mut trainer| {
                for _ in 0..job.steps {
                    if zeroes {
                        trainer.engine.zero_grad().unwrap();
                    }
                    trainer.train_one();
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn a_rank_that_reads_alone_gets_gathers_that_its_peers_have_not_opened() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 2, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for (setting, _) in overlapping() {
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            trainer.train_one();
            if trainer.rank() == 0 {
                trainer.evaluate();
            }
            meeting.meet();
            trainer.train_one();
            if trainer.rank() == 1 {
                trainer.engine.ensure_params_ready().unwrap();
            }
            meeting.meet();
            trainer.finish()
        });
    }
}
