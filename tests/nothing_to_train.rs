//! Frozen parameters never change, and ranks and chunks with nothing to train take every step with the others (rule O3): in every
//! mode and storage, whoever decides skips.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{DType, ParamOptions, Skip};
use synthetic::{Job, Net, Setting, serial};

/// Two chunks of two units each, in mixed dtypes; which of the chunks are trained.
fn net(trained: [bool; 2]) -> Net {
    let mut net = Net::empty();
    for (chunk, trainable) in trained.into_iter().enumerate() {
        net.chunk();
        for index in 0..2 {
            let name = format!("{chunk}.{index}");
            net.unit(&name);
            let options = || ParamOptions { trainable, ..ParamOptions::default() };
            net.param(&format!("{name}.weight"), 140, DType::Bf16, options());
            net.param(&format!("{name}.bias"), 7, DType::F32, options());
        }
    }
    net
}

/// Trains in every setting. The third step is skipped if there is anything to overflow, and one rank asks to stop in the second.
fn in_every_setting(trained: [bool; 2], buckets: usize) {
    let net = net(trained);
    for ranks in [1, 3] {
        let job = Job {
            overflow: |step, rank| step == 2 && rank == 0,
            may_stand_still: buckets == 0,
            ..Job::new(&net, ranks, 4, &|_, _| vec![(0..4).collect(); 2])
        };
        let expected = serial(&job);
        assert_eq!(expected.updated_steps(), if buckets == 0 { 4 } else { 3 });
        for param in net.params() {
            let [first, last] = [0, 4].map(|version: usize| &expected.weights[version][param.id.index()]);
            assert_eq!(first != last, param.options.trainable, "{}", param.name);
        }
        for skip in [Skip::Host, Skip::Device] {
            for setting in Setting::modes_and_storages().map(|mode| Setting { skip, ..mode }) {
                job.on_ranks(&expected, &setting, |mut trainer| {
                    assert_eq!(trainer.engine.plan().buckets().len(), buckets);
                    for step in 0..job.steps {
                        if step == 1 && trainer.rank() == ranks - 1 {
                            trainer.engine.request_stop();
                        }
                        trainer.train_one();
                        trainer.evaluate();
                        assert_eq!(trainer.outcome(step).stop, step == 1, "what one rank says reaches all");
                    }
                    let counters = trainer.finish().counters;
                    let gathers = buckets as u64 * setting.gathered_steps(expected.updated_steps(), 4);
                    assert_eq!((counters.reduces, counters.gathers), (buckets as u64 * 4, gathers), "{setting:?}");
                });
            }
        }
    }
}

#[test]
fn a_model_of_frozen_parameters_alone_takes_every_step_and_never_changes() {
    in_every_setting([false, false], 0);
}

#[test]
fn a_first_chunk_with_nothing_to_train_stays_as_it_is_while_the_last_one_learns() {
    in_every_setting([false, true], 3);
}

#[test]
fn a_last_chunk_with_nothing_to_train_stays_as_it_is_while_the_first_one_learns() {
    in_every_setting([true, false], 3);
}
