//! Gathers run ahead of demand as far as credits reach, and no further (rule C1): with D gathers demanded and I issued,
//! I <= D + credits. Chain is one gather ahead of the wait. The forward pass is slow here, so that they do run ahead.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::time::Duration;

use gatherflow::{Credits, Mode, Overlap, Plan};
use synthetic::{Job, Meeting, Net, Setting, serial, wait_until};

/// Bytes of each gather, in gather order.
fn gather_bytes(plan: &Plan) -> Vec<u64> {
    let bytes = |id: &gatherflow::BucketId| {
        let bucket = plan.bucket(*id);
        (bucket.numel() * plan.buffer(bucket.buffer).dtype.bytes()) as u64
    };
    plan.gather_order().iter().map(bytes).collect()
}

/// Most bytes of so many consecutive gathers.
fn widest(gathers: &[u64], run: usize) -> u64 {
    gathers.windows(run.min(gathers.len())).map(|window| window.iter().sum()).max().unwrap_or(0)
}

/// How far gathers may be ahead, in buckets.
fn ahead(setting: &Setting, buckets: usize) -> usize {
    match (setting.overlap, setting.credits) {
        (Overlap::Chain, _) => 1,
        (Overlap::Window, Credits::Buckets(n)) => n as usize,
        _ => buckets,
    }
}

#[test]
fn a_slow_forward_sees_gathers_run_ahead_by_exactly_the_credits() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 4, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for setting in Setting::modes() {
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            let buckets = trainer.engine.plan().buckets().len();
            let credits = ahead(&setting, buckets);
            for step in 0..job.steps {
                trainer.train_one();
                trainer.outcome(step);
                let engine = &trainer.engine;
                let before = step * buckets as u64;
                let issued = || (engine.counters().gathers - before) as usize;
                // No rank demands more while another counts, since demand of peers is demand too.
                let settled = |demanded: usize| {
                    let bound = (demanded + credits).min(buckets);
                    wait_until(&format!("gather {bound} with {demanded} demanded, {setting:?}"), || issued() >= bound);
                    std::thread::sleep(Duration::from_micros(500));
                    assert_eq!(issued(), bound, "{demanded} gathers are demanded, {setting:?}");
                    meeting.meet();
                };
                settled(0);
                let mut demanded = 0;
                for unit in &net.units {
                    let pass = engine.pass(net.chunks[unit.chunk], 0, false, Mode::Eval).unwrap();
                    pass.enter(unit.id).unwrap();
                    demanded = demanded.max(engine.plan().unit(unit.id).demand as usize);
                    settled(demanded);
                }
                assert_eq!(demanded, buckets);
            }
            trainer.finish()
        });
    }
}

#[test]
fn the_peak_of_bytes_ahead_is_a_run_of_as_many_gathers_as_there_are_credits() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 4, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    let more = [2, 4].map(|n| Setting::window(Credits::Buckets(n)));
    for setting in Setting::modes().into_iter().chain(more) {
        let setting = Setting { pause: Duration::from_micros(500), ..setting };
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            let gathers = gather_bytes(trainer.engine.plan());
            let credits = ahead(&setting, gathers.len());
            trainer.train_one();
            if setting.overlap != Overlap::None {
                // Before any rank demands something.
                let first: u64 = gathers[..credits].iter().sum();
                let what = format!("{first} bytes ahead, {setting:?}");
                wait_until(&what, || trainer.engine.counters().peak_ahead_bytes >= first);
            }
            meeting.meet();
            let peak = trainer.train_to_the_end().counters.peak_ahead_bytes;
            let most = if setting.overlap == Overlap::None { 0 } else { widest(&gathers, credits) };
            assert!(peak <= most, "{peak} bytes ahead, {gathers:?}, {setting:?}");
        });
    }
}
