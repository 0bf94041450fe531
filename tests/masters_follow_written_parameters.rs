//! Parameters can be written from outside between steps, and `reload_masters` makes the optimizer go on from them (SPEC G4).
#![allow(clippy::unwrap_used)]

mod small;

use std::time::Duration;

use gatherflow::{Config, Engine, ErrorKind, GroupId, Mode, Overlap, ParamId, Storage};
use gatherflow_actors::plan::Rank;
use gatherflow_kernels::AccessMode;
use small::{Small, bits, config, microbatch, on_ranks, solo};

/// No bf16 holds these exactly.
fn new_value(param: ParamId, element: usize) -> f32 {
    0.7 + 0.001 * element as f32 + param.0 as f32
}

fn write_all(engine: &mut Engine, change: f32) {
    for param in engine.params().iter().map(|p| p.id).collect::<Vec<_>>() {
        engine.write_param(param, |out| out.fill_with(|i| new_value(param, i) + change)).unwrap();
    }
}

/// Whether this rank owns a piece of a parameter that has a master of its own.
fn has_masters(engine: &Engine, small: &Small) -> bool {
    let bucket = engine.plan().bucket_of(small.own).unwrap();
    !engine.plan().owned(Rank(engine.rank()), bucket).is_empty()
}

fn masters_are_the_parameters(engine: &Engine) -> bool {
    let session = engine.session();
    let widened = |range, narrow: bool| -> Vec<f32> {
        let lease = session.device().lease(range, AccessMode::Read).unwrap();
        if narrow {
            return lease.as_slice::<gatherflow::bf16>().unwrap().iter().map(|x| x.to_f32()).collect();
        }
        lease.as_slice::<f32>().unwrap().to_vec()
    };
    engine.plan().buckets().iter().all(|bucket| {
        let memory = session.bucket_memory(bucket.id);
        let narrow = memory.dtype == gatherflow::DType::Bf16;
        // What the next gather sends has them too, wherever that lies.
        [memory.param_shard, memory.send].iter().all(|shard| widened(memory.master, false) == widened(*shard, narrow))
    })
}

fn train(engine: &mut Engine, small: &Small, steps: usize) {
    for _ in 0..steps {
        microbatch(engine, small, true, 1.0);
        assert!(engine.step().unwrap().outcome().unwrap().updated);
    }
}

fn modes() -> impl Iterator<Item = Config> {
    let of = |storage| {
        let mode = move |overlap| config().overlap(overlap).storage(storage);
        [mode(Overlap::None), mode(Overlap::Chain), mode(Overlap::Window), mode(Overlap::Window).steps_in_flight(4)]
    };
    [Storage::Views, Storage::Shared].into_iter().flat_map(of)
}

#[test]
fn training_goes_on_from_what_was_written_on_any_number_of_ranks_in_every_mode() {
    for ranks in [1, 2, 3] {
        for mode in modes() {
            on_ranks(ranks, |rank| {
                let (mut engine, small) = small::engine(rank, mode.clone()).unwrap();
                train(&mut engine, &small, 2);
                write_all(&mut engine, 0.0);
                assert_eq!(
                    masters_are_the_parameters(&engine),
                    !has_masters(&engine, &small),
                    "a write alone leaves them"
                );
                engine.reload_masters().unwrap();
                assert!(masters_are_the_parameters(&engine));
                let written = bits(&engine);
                // Without a learning rate a step writes back what the masters say.
                engine.set_lr(GroupId::DEFAULT, 0.0).unwrap();
                train(&mut engine, &small, 2);
                assert_eq!(bits(&engine), written);
                let own = engine.read::<gatherflow::bf16>(small.own).unwrap();
                assert_eq!(own[3], gatherflow::bf16::from_f32(new_value(small.own, 3)));
                drop(own);
                engine.set_lr(GroupId::DEFAULT, 0.1).unwrap();
                train(&mut engine, &small, 1);
                assert_ne!(bits(&engine), written, "it learns from there");
                let hash = bits(&engine);
                engine.close().unwrap();
                hash
            })
            .windows(2)
            .for_each(|pair| assert_eq!(pair[0], pair[1]));
        }
    }
}

#[test]
fn a_16_bit_parameter_that_was_written_without_a_reload_goes_back_to_its_master() {
    let (mut engine, small) = solo(config().lr(0.0));
    let before = engine.read::<gatherflow::bf16>(small.own).unwrap().to_vec();
    write_all(&mut engine, 0.0);
    assert_ne!(*engine.read::<gatherflow::bf16>(small.own).unwrap(), before);
    train(&mut engine, &small, 1);
    assert_eq!(*engine.read::<gatherflow::bf16>(small.own).unwrap(), before);
    let written = new_value(small.frozen, 2);
    assert_eq!(engine.read::<f32>(small.frozen).unwrap()[2].to_bits(), written.to_bits(), "frozen ones have none");
}

#[test]
fn ranks_that_wrote_different_parameters_all_hear_of_it_and_can_try_again() {
    on_ranks(3, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        train(&mut engine, &small, 1);
        let change = if engine.rank() == 2 { 0.25 } else { 0.0 };
        write_all(&mut engine, change);
        let error = engine.reload_masters().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.message().contains("rank 0 has") && error.message().contains("rank 2 has"), "{error}");
        assert_eq!(masters_are_the_parameters(&engine), !has_masters(&engine, &small));
        write_all(&mut engine, 0.0);
        engine.reload_masters().unwrap();
        train(&mut engine, &small, 1);
        engine.close().unwrap();
    });
}

#[test]
fn a_rank_that_does_not_reload_is_named_to_those_who_do() {
    let limit = Duration::from_millis(300);
    let errors = on_ranks(2, |rank| {
        let (mut engine, _) = small::engine(rank, config().collective_deadline(limit)).unwrap();
        if engine.rank() == 1 {
            while engine.session().failed().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        engine.reload_masters().unwrap_err()
    });
    for error in errors {
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
        assert!(error.message().contains("did not reload its masters"), "{error}");
    }
}

#[test]
fn what_cannot_be_written_is_named() {
    let (mut engine, small) = solo(config());
    let misuse = |error: gatherflow::Error, names: &str| {
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(names), "{error}");
    };
    misuse(engine.write_param(ParamId(99), |_| unreachable!()).unwrap_err(), "no parameter 99");
    let owned = engine.owned_pass(small.chunk, 0, true, Mode::Train).unwrap();
    let reading = owned.read::<f32>(small.tied).unwrap();
    misuse(engine.write_param(small.own, |_| unreachable!()).unwrap_err(), "`tied`: a guard of it is alive");
    misuse(engine.reload_masters().unwrap_err(), "`tied`: a guard of it is alive");
    drop(reading);
    engine.write_param(small.tied, |out| out.fill_with(|_| 1.0)).unwrap();
    engine.close().unwrap();
    assert_eq!(engine.write_param(small.tied, |_| unreachable!()).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(engine.reload_masters().unwrap_err().kind(), ErrorKind::Closed);
}
