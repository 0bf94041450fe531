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

/// How many gathers go when `demanded` are demanded and nothing else is.
fn reach(setting: &Setting, gathers: &[u64], demanded: usize) -> usize {
    let most = demanded.saturating_add(ahead(setting, gathers.len())).min(gathers.len());
    let fits = |n: &usize| gathers[demanded..*n].iter().sum::<u64>() <= setting.credits_bytes.unwrap_or(u64::MAX);
    (demanded..=most).rev().find(fits).unwrap_or(demanded)
}

/// Credits in bytes: some buckets are above the first budget, the largest one alone is above the second, two of the largest
/// fit into the third; and together with credits in buckets.
fn budgets(job: &Job<'_>) -> [Setting; 4] {
    let plan = job.net.model.plan(job.ranks, &job.config(&Setting::of(Overlap::None))).unwrap();
    let mut sizes = gather_bytes(&plan);
    sizes.sort_unstable();
    let largest = sizes[sizes.len() - 1];
    let middle = sizes[sizes.len() / 2];
    assert!(sizes[0] <= middle && middle < largest, "{sizes:?}");
    let unlimited = |bytes| Setting { credits_bytes: Some(bytes), ..Setting::window(Credits::Unlimited) };
    let both = Setting { credits: Credits::Buckets(2), ..unlimited(3 * middle) };
    [unlimited(middle), unlimited(largest - 1), unlimited(2 * largest), both]
}

#[test]
fn a_bucket_above_the_budget_of_bytes_is_gathered_on_demand_only_and_changes_no_bit() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 3, 4, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for setting in budgets(&job) {
        let budget = setting.credits_bytes.unwrap();
        for finished in job.train(&expected, &setting) {
            let peak = finished.counters.peak_ahead_bytes;
            assert!(peak <= budget, "{peak} bytes ahead of a budget of {budget}");
        }
    }
    let nothing_fits = Setting { credits_bytes: Some(1), ..Setting::window(Credits::Unlimited) };
    for finished in job.train(&expected, &nothing_fits) {
        assert_eq!(finished.counters.peak_ahead_bytes, 0);
    }
}

#[test]
fn a_slow_forward_sees_gathers_run_ahead_by_exactly_the_credits() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 4, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for setting in Setting::modes().into_iter().chain(budgets(&job)) {
        let meeting = Meeting::of(job.ranks);
        job.on_ranks(&expected, &setting, |mut trainer| {
            let gathers = gather_bytes(trainer.engine.plan());
            let (buckets, mut peak) = (gathers.len(), 0);
            for step in 0..job.steps {
                trainer.train_one();
                trainer.outcome(step);
                let engine = &trainer.engine;
                let before = step * buckets as u64;
                let issued = || (engine.counters().gathers - before) as usize;
                // No rank demands more while another counts, since demand of peers is demand too.
                let mut settled = |demanded: usize| {
                    let bound = reach(&setting, &gathers, demanded);
                    peak = peak.max(gathers[demanded..bound].iter().sum());
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
            let counted = trainer.finish().counters.peak_ahead_bytes;
            // A chain also stops within units, where nobody looks here.
            if setting.overlap == Overlap::Window {
                assert_eq!(counted, peak, "bytes ahead, {setting:?}");
            }
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
