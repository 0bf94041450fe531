//! f16 training with the dynamic loss scale comes down from 2^32 by skipping, learns, and survives later overflows, with
//! gathers overlapped as without. With a constant one it skips and the scale stays.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{DType, GroupId, ParamOptions, Skip};
use reference::Scaler;
use synthetic::{Job, Net, Setting, serial};

const STEPS: u64 = 60;

/// f16 throughout: gradients above 65 504 overflow by themselves.
fn net() -> Net {
    let mut net = Net::empty();
    net.chunk();
    for index in 0..4 {
        net.unit(&format!("layer {index}"));
        let options =
            ParamOptions { grad_dtype: Some(DType::F16), group: GroupId(index % 2), ..ParamOptions::default() };
        net.param(&format!("layer {index}.weight"), 100 + index as usize, DType::F16, options);
        net.param(&format!("layer {index}.bias"), 30, DType::F32, ParamOptions::default());
    }
    net
}

#[test]
fn from_a_scale_of_2_to_the_32_in_every_mode() {
    let net = net();
    let job = Job {
        scaler: Some(Scaler::new(4_294_967_296.0, 12, 2)),
        // On one rank alone: once while the scale comes down, once when training goes well.
        overflow: |step, rank| rank == 1 && (step < 3 || step == 30),
        lr: 0.05,
        ..Job::new(&net, 2, STEPS, &|_, _| vec![(0..4).collect()])
    };
    let expected = serial(&job);
    let skipped = STEPS - expected.updated_steps();
    let scales: Vec<f32> = expected.verdicts.iter().map(|v| v.loss_scale).collect();
    assert!(expected.verdicts[..12].iter().all(|v| !v.updated), "the first steps overflow: {scales:?}");
    assert!(!expected.verdicts[30].updated && expected.verdicts[31].updated);
    assert!((13..STEPS / 2).contains(&skipped), "{skipped} steps were skipped");
    assert!(scales.windows(2).any(|pair| pair[1] > pair[0]), "the scale never grew: {scales:?}");
    let (first, last): (f64, f64) = (expected.losses[0].iter().sum(), expected.losses[STEPS as usize - 1].iter().sum());
    assert!(last < first / 2.0, "it does not learn: {first} to {last}");

    let mut hashes = Vec::new();
    let settings = [(Skip::Host, 2), (Skip::Device, 1), (Skip::Device, 2), (Skip::Device, 3)];
    let settings = settings.into_iter().flat_map(|(skip, steps_in_flight)| {
        Setting::modes_and_storages().map(move |mode| Setting { skip, steps_in_flight, ..mode })
    });
    for setting in settings {
        for finished in job.train(&expected, &setting) {
            assert_eq!(finished.counters.skipped_steps, skipped, "{setting:?}");
            hashes.push(finished.hash);
        }
    }
    assert!(
        hashes.iter().all(|hash| *hash == hashes[0]),
        "overlapped runs end elsewhere than the first one: {hashes:x?}"
    );
}

/// An inf on one rank skips the step on all of them (SPEC T6).
#[test]
fn a_constant_scale_never_moves_and_steps_with_inf_on_one_rank_are_skipped_everywhere_in_every_mode() {
    let net = net();
    let job = Job {
        scaler: Some(Scaler::constant(256.0)),
        overflow: |step, rank| rank == step as usize % 3 && [0, 3, 4, 8].contains(&step),
        ..Job::new(&net, 3, 12, &|_, _| vec![(0..4).collect(); 2])
    };
    let expected = serial(&job);
    let skipped: Vec<usize> = (0..12).filter(|step| !expected.verdicts[*step].updated).collect();
    assert_eq!(skipped, [0, 3, 4, 8]);
    for skip in [Skip::Host, Skip::Device] {
        for setting in Setting::modes_and_storages().map(|mode| Setting { skip, ..mode }) {
            job.on_ranks(&expected, &setting, |mut trainer| {
                trainer.train(12);
                for step in 0..12 {
                    let outcome = trainer.outcome(step);
                    assert_eq!((outcome.updated, outcome.loss_scale), (!skipped.contains(&(step as usize)), 256.0));
                }
                assert_eq!(trainer.engine.loss_scale().unwrap().to_bits(), 256_f32.to_bits());
                assert_eq!(trainer.finish().counters.skipped_steps, 4, "{setting:?}");
            });
        }
    }
}
