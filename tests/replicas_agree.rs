//! All ranks hold the same parameters to the bit, in every mode and storage and for every number of ranks, shards that are only padding
//! included.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{Credits, DType, Overlap, ParamOptions};
use synthetic::{Job, Net, Setting, serial};

/// The hashes of all parameters are equal on all ranks after a job, and in all these settings.
fn agree(job: &Job<'_>, settings: impl Iterator<Item = Setting>) {
    let expected = serial(job);
    let run = |setting| job.train(&expected, &setting);
    let hashes: Vec<u64> = settings.flat_map(run).map(|finished| finished.hash).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{} ranks: {hashes:x?}", job.ranks);
}

#[test]
fn for_many_numbers_of_ranks_in_every_mode() {
    let net = Net::mixed(false);
    let program = |step: u64, rank: usize| vec![(0..6).collect(); 1 + (step as usize + rank) % 2];
    for ranks in [1, 2, 3, 5, 7, 8] {
        agree(&Job::new(&net, ranks, 4, &program), Setting::modes_and_storages());
    }
}

/// Parameters of 1, 3, 63 and 65 elements, each in a unit and a bucket of its own.
fn tiny() -> Net {
    let mut net = Net::empty();
    net.chunk();
    for (numel, dtype) in [(1, DType::F32), (3, DType::Bf16), (63, DType::F32), (65, DType::Bf16)] {
        net.unit(&format!("unit of {numel}"));
        net.param(&format!("{numel} elements"), numel, dtype, ParamOptions::default());
    }
    net
}

#[test]
fn where_most_shards_are_only_padding() {
    let net = tiny();
    for bucket_size in [1, 1 << 20] {
        for ranks in [3, 8] {
            let job = Job { bucket_size, ..Job::new(&net, ranks, 3, &|_, _| vec![(0..4).collect()]) };
            agree(&job, Setting::modes_and_storages());
        }
    }
}

#[test]
fn with_more_ranks_than_elements() {
    let net = tiny();
    let job = Job { bucket_size: 1, ..Job::new(&net, 133, 2, &|_, _| vec![(0..4).collect()]) };
    let least_credit = |setting: &Setting| setting.overlap != Overlap::Window || setting.credits == Credits::Buckets(1);
    agree(&job, Setting::modes_and_storages().filter(least_credit));
}

#[test]
fn where_a_rank_writes_no_gradient_at_all() {
    let net = Net::mixed(false);
    let idle = |step: u64, rank: usize| vec![if step as usize % 3 == rank { vec![] } else { (0..6).collect() }];
    agree(&Job::new(&net, 3, 6, &idle), Setting::modes_and_storages());
}
