//! The bytes allocated on a rank's device are exactly those that the plan prints, from start to end, in every mode and storage.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::Storage;
use synthetic::{Job, Net, Setting, Trainer, serial};

fn check(trainer: &Trainer<'_>, setting: &Setting) {
    let allocated = trainer.engine.session().device().allocated_bytes();
    let net = trainer.job.net;
    let plan = net.model.plan(trainer.job.ranks, &trainer.job.config(setting)).unwrap();
    assert_eq!(allocated, plan.memory().total_bytes());
    assert_eq!(plan.memory(), trainer.engine.plan().memory());
    // Both storages are printed whichever is chosen: what would be allocated with this one is what is.
    let printed = [Storage::Views, Storage::Shared].map(|storage| plan.memory_with(storage).unwrap());
    assert_eq!(plan.memory(), printed[usize::from(setting.storage == Storage::Shared)]);
    let halves = |b: &&gatherflow_actors::plan::BufferPlan| b.dtype != gatherflow::DType::F32;
    let staging: usize = plan.buffers().iter().filter(halves).map(|b| b.owned_numel * b.dtype.bytes()).sum();
    assert!(staging > 0);
    assert_eq!(printed.each_ref().map(gatherflow_actors::plan::Memory::staging_bytes), [0, staging]);
    assert_eq!(printed[1].total_bytes(), printed[0].total_bytes() + staging);
    let params: usize = net.params().iter().map(|p| p.numel * p.dtype.bytes()).sum();
    assert!(allocated > params, "{allocated} bytes hold no more than the parameters");
}

#[test]
fn in_every_mode_and_for_every_number_of_ranks() {
    for with_f16 in [false, true] {
        let net = Net::mixed(with_f16);
        for (ranks, bucket_size) in [(1, 128), (2, 1), (3, 128), (8, 1 << 20)] {
            let scaler = with_f16.then(|| reference::Scaler::new(64.0, 100, 1));
            let program = |_, _| vec![(0..6).collect()];
            let job = Job { scaler, bucket_size, ..Job::new(&net, ranks, 2, &program) };
            let expected = serial(&job);
            for setting in Setting::modes_and_storages() {
                job.on_ranks(&expected, &setting, |mut trainer| {
                    check(&trainer, &setting);
                    for _ in 0..job.steps {
                        trainer.train_one();
                        check(&trainer, &setting);
                    }
                    trainer.engine.ensure_params_ready().unwrap();
                    check(&trainer, &setting);
                    trainer.finish()
                });
            }
        }
    }
}
