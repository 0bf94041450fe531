//! Passes of several chunks are open at once: forward of the second chunk goes on beside backward of the first, on one thread or
//! on two. Dtypes are mixed, one weight is used by both chunks and twice by one, the number of microbatches changes from step to
//! step, and every bit is that of the serial reference.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{DType, GroupId, ParamOptions};
use synthetic::{Beside, Job, Net, Setting, random_bits, serial};

/// Three units in each chunk; bf16 beside f32 in each of them.
fn net() -> Net {
    let mut net = Net::empty();
    let mut tied = None;
    for chunk in 0..2 {
        net.chunk();
        for index in 0..3 {
            let name = format!("{chunk}.{index}");
            net.unit(&name);
            let group = GroupId((chunk + index) % 3);
            let options = ParamOptions { group, ..ParamOptions::default() };
            net.param(&format!("{name}.weight"), 100 + 10 * index as usize, DType::Bf16, options.clone());
            net.param(&format!("{name}.scale"), 65, DType::F32, options);
            match tied {
                None => tied = Some(net.param("tied", 90, DType::Bf16, ParamOptions::default())),
                Some(param) if index == 1 => net.use_param(param),
                Some(_) => {}
            }
        }
    }
    net
}

/// One to four microbatches, which go through a unit twice now and then.
fn program(step: u64, _: usize) -> Vec<Vec<usize>> {
    let count = 1 + (step as usize * 3) % 4;
    let microbatch = |m: u64| if (step + m) % 3 == 1 { vec![0, 1, 1, 2, 3, 4, 5, 4] } else { (0..6).collect() };
    (0..count as u64).map(microbatch).collect()
}

fn in_every_mode_and_storage(ranks: usize, beside: impl Fn(u64, usize) -> Beside + Sync) {
    let net = net();
    let job = Job::new(&net, ranks, 6, &program);
    let expected = serial(&job);
    for overlap_grad_reduce in [true, false] {
        for setting in Setting::modes_and_storages().map(|mode| Setting { overlap_grad_reduce, ..mode }) {
            job.on_ranks(&expected, &setting, |mut trainer| {
                for step in 0..job.steps {
                    trainer.pipelined(beside(step, trainer.rank()));
                    trainer.step();
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn forward_of_one_chunk_between_the_units_of_backward_of_another() {
    for ranks in [1, 2, 3] {
        in_every_mode_and_storage(ranks, |_, _| Beside::Alternating);
    }
}

#[test]
fn forward_of_one_chunk_on_one_thread_beside_backward_of_another_on_a_second() {
    for ranks in [1, 2, 3] {
        in_every_mode_and_storage(ranks, |_, _| Beside::Threads);
    }
}

#[test]
fn ranks_and_steps_that_interleave_in_different_ways() {
    let either = |step, rank| match random_bits(&[step, rank as u64]) % 2 {
        0 => Beside::Alternating,
        _ => Beside::Threads,
    };
    in_every_mode_and_storage(3, either);
}
