//! Gathers run while forward computes, for at least the share that the plan predicts (CASES row 10), as the engine
//! itself reports it. Forward sleeps in each unit here and the link is emulated, so neither needs a core of its own.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::time::Duration;

use gatherflow::{Credits, Link, Overlap, Plan};
use synthetic::{Job, Net, Setting, serial};

/// Of what is predicted, a machine that is busy with other things reaches so much.
const REACHED: f64 = 0.85;

/// The share of gathers that are let go while forward is in the unit before the one that needs them. A gather takes
/// less time than a unit, and so do as many as a unit has buckets; nothing comes before the first unit.
fn predicted(setting: &Setting, plan: &Plan) -> f64 {
    let ahead = match (setting.overlap, setting.credits) {
        (Overlap::None, _) => 0,
        (Overlap::Chain, _) => 1,
        (_, Credits::Buckets(buckets)) => buckets,
        _ => u32::MAX,
    };
    let demands = plan.units().windows(2);
    let hidden: u32 = demands.map(|unit| unit[1].demand.saturating_sub(unit[0].demand).min(ahead)).sum();
    f64::from(hidden) / plan.buckets().len() as f64
}

/// The smallest share of the ranks, and what was predicted.
fn hidden_share(setting: &Setting) -> (f64, f64) {
    let net = Net::mixed(false);
    let job = Job { bucket_size: 1, ..Job::new(&net, 2, 8, &|_, _| vec![(0..6).collect()]) };
    let ranks = job.on_ranks(&serial(&job), setting, |mut trainer| {
        trainer.train(job.steps);
        (trainer.engine.report().hidden_share, predicted(setting, trainer.engine.plan()))
    });
    ranks.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn the_share_that_is_hidden_is_what_the_plan_predicts_in_every_mode_and_storage() {
    for mode in Setting::modes_and_storages() {
        let link = Link { bytes_per_second: 1e9 / 8.0, latency: Duration::from_millis(2) };
        let setting = Setting { link: Some(link), pause: Duration::from_millis(8), ..mode };
        let what = format!("{:?}, {:?}, {}", setting.overlap, setting.credits, setting.storage);
        // Whatever else the machine does can only take from it.
        let mut tries = (0..3).map(|_| hidden_share(&setting));
        let (share, predicted) = tries.find(|(share, predicted)| *share >= REACHED * predicted).unwrap_or_else(|| {
            panic!("{what}: three times less was hidden than predicted, the last time {:?}", hidden_share(&setting))
        });
        eprintln!("{what}: {share:.2} of {predicted:.2}");
        match (setting.overlap, setting.credits) {
            (Overlap::None, _) => assert!(share < 0.1, "{what}: nothing can be hidden, but {share} was"),
            // The buckets of the first unit are all that nothing hides.
            (Overlap::Window, Credits::Buckets(3)) => assert!(share >= 0.7 && predicted > 0.8, "{what}: {share}"),
            _ => {}
        }
    }
}
