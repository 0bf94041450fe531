//! A rank whose own code panics is lost to the others: they hear which rank it was, and that it panicked (rule F1).
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gatherflow::{Config, DType, Engine, Error, Mode, Model, ParamMut, Rank, Ranks};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Init,
    Forward,
    Backward,
    BetweenSteps,
    Nowhere,
}

const RANKS: usize = 3;

/// Three steps; rank 1 panics there in the second, or when it starts.
fn train(rank: Rank, place: Place) -> Result<(), Error> {
    let panics = rank.rank() == 1;
    let at = |here: Place, step: u64| assert!(!(panics && step == 1 && place == here), "the user's own fault");
    let mut model = Model::new();
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit")?;
    let param = model.param(unit, "w", &[100], DType::F32)?;
    let config = Config::new().deadlines(Duration::from_secs(20));
    let mut engine = Engine::new(rank, model, config, |_, out: ParamMut<'_>| {
        at(Place::Init, 1);
        out.fill_with(|_| 0.5);
    })?;
    for step in 0..3 {
        let pass = engine.pass(chunk, 0, true, Mode::Train)?;
        pass.enter(unit)?;
        at(Place::Forward, step);
        let back = pass.backward(unit)?;
        let mut gradient = back.grad::<f32>(param)?;
        at(Place::Backward, step);
        gradient.fill(1.0);
        gradient.complete();
        back.leave()?;
        engine.step()?.outcome()?;
        at(Place::BetweenSteps, step);
    }
    engine.close()
}

fn told(place: Place) -> Vec<Option<Result<(), Error>>> {
    let ranks = Ranks::local(RANKS).unwrap().into_iter();
    let run = move |rank| catch_unwind(AssertUnwindSafe(|| train(rank, place))).ok();
    let threads: Vec<_> = ranks.map(|rank| std::thread::spawn(move || run(rank))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn wherever_it_panics_and_a_new_job_in_the_process_works() {
    for place in [Place::Init, Place::Forward, Place::Backward, Place::BetweenSteps] {
        let start = Instant::now();
        for (rank, told) in told(place).into_iter().enumerate() {
            if rank == 1 {
                assert!(told.is_none(), "{place:?}: the panic is its own");
                continue;
            }
            let error = told.unwrap().expect_err("a lost rank is an error");
            assert!(error.to_string().contains("rank 1 left when its thread panicked"), "{place:?}: {error}");
            assert!(error.is_fatal(), "{place:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(15), "{place:?}: a departure needs no deadline");
    }
    assert!(told(Place::Nowhere).into_iter().all(|told| told.unwrap().is_ok()));
}
