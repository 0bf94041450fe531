//! `step` blocks only while as many outcomes are unknown as steps may be in flight: not for a peer that is late, wherever gathers
//! land, and also where nobody wrote a gradient.
#![allow(clippy::unwrap_used)]

use std::sync::mpsc::channel;
use std::time::Duration;

use gatherflow::{Config, DType, Engine, Mode, Model, Overlap, Rank, Ranks, Skip, Storage};

const STEPS: usize = 3;

fn start(rank: Rank, config: Config) -> Engine {
    let mut model = Model::new();
    let chunk = model.chunk();
    for name in ["a", "b", "c"] {
        let unit = model.unit(chunk, name).unwrap();
        model.param(unit, name, &[100], DType::Bf16).unwrap();
    }
    Engine::new(rank, model, config, |_, out| out.fill_with(|i| i as f32)).unwrap()
}

#[test]
fn with_steps_in_flight_a_rank_is_ahead_of_a_peer_that_has_not_begun() {
    for overlap in [Overlap::Chain, Overlap::Window] {
        for (storage, skip) in
            [Storage::Views, Storage::Shared].into_iter().flat_map(|s| [Skip::Host, Skip::Device].map(|skip| (s, skip)))
        {
            let config = Config::new()
                .overlap(overlap)
                .storage(storage)
                .skip(skip)
                .bucket_size(1)
                .steps_in_flight(STEPS as u32 + 1)
                .deadlines(Duration::from_secs(20));
            let (tell, told) = channel();
            let mut ranks = Ranks::local(2).unwrap();
            let (late, early) = (ranks.remove(1), ranks.remove(0));
            std::thread::scope(|scope| {
                let own = config.clone();
                scope.spawn(move || {
                    let mut engine = start(early, own);
                    let handles: Vec<_> = (0..STEPS).map(|_| engine.step().unwrap()).collect();
                    tell.send(()).unwrap();
                    assert!(handles.into_iter().all(|handle| handle.outcome().unwrap().updated));
                    engine.close().unwrap();
                });
                let mut engine = start(late, config);
                let ahead = told.recv_timeout(Duration::from_secs(10));
                ahead.unwrap_or_else(|_| panic!("{overlap:?}, {storage}, {skip:?}: it waits for its peer"));
                for _ in 0..STEPS {
                    // This one has a gradient in its first step and none later.
                    if engine.steps() == 0 {
                        let info = engine.params()[1].clone();
                        let pass = engine.pass(info.chunk, 0, true, Mode::Train).unwrap();
                        let unit = gatherflow::UnitId(1);
                        pass.enter(unit).unwrap();
                        let back = pass.backward(unit).unwrap();
                        let mut gradient = back.grad::<f32>(info.id).unwrap();
                        gradient.fill(1.0);
                        gradient.complete();
                        back.leave().unwrap();
                    }
                    engine.step().unwrap().outcome().unwrap();
                }
                engine.close().unwrap();
            });
        }
    }
}
