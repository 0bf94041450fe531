//! Ranks in groups: what they must agree on, and what is refused.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use gatherflow::{
    Across, Config, DType, Engine, Error, ErrorKind, Model, ModelError, ParamMut, ParamOptions, Rank, Ranks,
    ShardGroup, ShardGroupId, StartParams, SumOver,
};

/// A dense parameter and one that is divided among two ranks.
fn model(across: Across) -> Model {
    let mut model = Model::new();
    let group = ShardGroup { name: "pairs".into(), ranks: 2, across, average_over: None };
    let shard_group = model.shard_group(group);
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit").unwrap();
    model.param(unit, "dense", &[70], DType::Bf16).unwrap();
    let options = ParamOptions { shard_group, ..ParamOptions::default() };
    model.param_with(unit, "grouped", &[40], DType::Bf16, options).unwrap();
    model
}

fn config() -> Config {
    Config::new().deadlines(Duration::from_secs(20)).check_order_every(1)
}

/// Starts four ranks, each with a value of its own for the grouped parameter, and does something with each.
fn on_ranks<T: Send>(
    across: Across,
    config: &Config,
    values: [f32; 4],
    run: impl Fn(Result<Engine, Error>) -> T + Sync,
) -> Vec<T> {
    let (run, model) = (&run, model(across));
    let start = |rank: Rank| {
        let value = values[rank.rank()];
        let init = move |param: &gatherflow::ParamInfo, out: ParamMut<'_>| {
            out.fill_with(|_| if param.name == "dense" { 0.5 } else { value });
        };
        run(Engine::new(rank, model.clone(), config.clone(), init))
    };
    std::thread::scope(|scope| {
        let ranks = Ranks::local(4).unwrap().into_iter();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || start(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn experts_may_start_apart_in_other_groups_but_not_within_one() {
    let check = config().start_params(StartParams::Check);
    let told = |across, values| {
        let started = on_ranks(across, &check, values, |engine| engine.map(|mut engine| engine.close().unwrap()));
        started.into_iter().map(Result::err).collect::<Vec<_>>()
    };
    assert!(told(Across::Experts, [1.0, 1.0, 2.0, 2.0]).iter().all(Option::is_none));
    for (across, values, words) in [
        (Across::Experts, [1.0, 1.0, 2.0, 3.0], ["rank 2 has", "rank 3 has", "that ranks 2, 3 share"]),
        (Across::Replicas, [1.0, 1.0, 2.0, 2.0], ["rank 0 has", "rank 2 has", "hash of the initial parameters ="]),
    ] {
        for error in told(across, values) {
            let error = error.unwrap();
            assert_eq!(error.kind(), ErrorKind::StartUp);
            assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
        }
    }
}

#[test]
fn without_a_check_every_rank_starts_from_the_first_of_its_group() {
    for (across, expected) in [(Across::Experts, [1.0, 1.0, 3.0, 3.0]), (Across::Replicas, [1.0; 4])] {
        let values = on_ranks(across, &config(), [1.0, 2.0, 3.0, 4.0], |engine| {
            let mut engine = engine.unwrap();
            let grouped = engine.params()[1].id;
            let value = engine.read::<gatherflow::bf16>(grouped).unwrap()[0].to_f32();
            engine.close().unwrap();
            value.to_bits()
        });
        assert_eq!(values, expected.map(f32::to_bits), "{across:?}");
    }
}

#[test]
fn masters_are_reloaded_from_experts_that_differ_between_groups_and_agree_within() {
    for (written, agrees) in [([5.0, 5.0, 6.0, 6.0], true), ([5.0, 5.0, 6.0, 7.0], false)] {
        let told = on_ranks(Across::Experts, &config(), [1.0; 4], |engine| {
            let mut engine = engine.unwrap();
            let (grouped, value) = (engine.params()[1].id, written[engine.rank()]);
            engine.write_param(grouped, |out| out.fill_with(|_| value)).unwrap();
            let told = engine.reload_masters();
            engine.close().unwrap();
            told.err()
        });
        assert!(told.iter().all(|error| error.is_none() == agrees), "{told:?}");
        let named = |error: &Error| error.to_string().contains("hash of the parameters that ranks 2, 3 share");
        assert!(told.iter().flatten().all(named), "{told:?}");
    }
}

/// What each rank's first step tells where every gradient element is `value`, and the number of logical parameters.
fn first_outcomes(ranks: usize, model_parallel: usize, value: f32) -> (Vec<gatherflow::Outcome>, u64) {
    let d = ranks / model_parallel;
    let size = if d.is_multiple_of(2) { d / 2 } else { d };
    let mut model = Model::new();
    let mut group = |name: &str, across| ParamOptions {
        shard_group: model.shard_group(ShardGroup { name: name.into(), ranks: size, across, average_over: None }),
        ..ParamOptions::default()
    };
    let (experts, replicas) = (group("experts", Across::Experts), group("replicas", Across::Replicas));
    let split = ParamOptions { tensor_parallel: true, ..ParamOptions::default() };
    let copy = || ParamOptions { shared: Some("shared".into()), ..ParamOptions::default() };
    let summed = ParamOptions { sum_over: SumOver::ModelParallel, ..ParamOptions::default() };
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit").unwrap();
    // Name, elements on each rank, and how often they exist.
    let params = [
        ("norm", 65, ParamOptions::default(), 1),
        ("column", 130, split.clone(), model_parallel),
        ("experts", 70, experts.clone(), d / size),
        ("replicas", 33, replicas, 1),
        ("split experts", 7, ParamOptions { tensor_parallel: true, ..experts }, model_parallel * d / size),
        ("frozen", 50, ParamOptions { trainable: false, ..ParamOptions::default() }, 0),
        ("copy", 90, copy(), 1),
        ("other copy", 90, copy(), 0),
        ("summed", 20, summed, 1),
    ];
    let logical = params.iter().map(|(_, numel, _, times)| (numel * times) as u64).sum();
    for (name, numel, options, _) in params {
        model.param_with(unit, name, &[numel], DType::F32, options).unwrap();
    }
    let config = config().model_parallel(model_parallel).bucket_size(64);
    let step = |rank: Rank| {
        let mut engine = Engine::new(rank, model.clone(), config.clone(), |_, out| out.fill_with(|_| 0.5)).unwrap();
        let pass = engine.pass(chunk, 0, true, gatherflow::Mode::Train).unwrap();
        pass.enter(unit).unwrap();
        let back = pass.backward(unit).unwrap();
        for param in engine.params().iter().filter(|param| param.options.trainable) {
            let mut gradient = back.grad::<f32>(param.id).unwrap();
            // What adds up, over two copies or the model-parallel ranks, has its part here.
            let copies = if param.options.shared.is_some() { 2 } else { 1 };
            let parts = if param.options.sum_over == SumOver::ModelParallel { model_parallel } else { 1 };
            gradient.fill(value / (copies * parts) as f32);
            gradient.complete();
        }
        back.leave().unwrap();
        let outcome = engine.step().unwrap().outcome().unwrap();
        engine.close().unwrap();
        outcome
    };
    let outcomes = std::thread::scope(|scope| {
        let step = &step;
        let threads: Vec<_> =
            Ranks::local(ranks).unwrap().into_iter().map(|rank| scope.spawn(move || step(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (outcomes, logical)
}

#[test]
fn with_all_gradients_one_the_norm_is_the_root_of_the_number_of_logical_parameters() {
    for (ranks, model_parallel) in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (6, 3), (8, 2), (3, 3)] {
        let (outcomes, logical) = first_outcomes(ranks, model_parallel, 1.0);
        for outcome in outcomes {
            let norm = outcome.grad_norm.unwrap();
            assert!((norm - (logical as f64).sqrt()).abs() < 1e-12 * norm, "{norm}² is not {logical}");
            assert_eq!(outcome.zeros, Some(0));
        }
        let (outcomes, logical) = first_outcomes(ranks, model_parallel, 0.0);
        let told = |o: &gatherflow::Outcome| (o.grad_norm, o.zeros);
        assert!(outcomes.iter().all(|o| told(o) == (Some(0.0), Some(logical))), "{ranks} ranks by {model_parallel}");
    }
}

#[test]
fn a_weight_counts_once_for_the_ranks_that_share_a_copy_of_the_model() {
    let config = config().model_parallel(2).average_by_weight(true).max_norm(0.0);
    let mut model = Model::new();
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit").unwrap();
    let param = model.param(unit, "w", &[10], DType::F32).unwrap();
    let norm = |rank: Rank| {
        let mut engine = Engine::new(rank, model.clone(), config.clone(), |_, out| out.fill_with(|_| 0.5)).unwrap();
        let ((part, parts), (copy, copies)) = (engine.model_parallel(), engine.data_parallel());
        assert_eq!((parts, copies, copy * 2 + part), (2, 2, engine.rank()));
        engine.set_weight([3.0, 1.0][copy]).unwrap();
        let pass = engine.pass(chunk, 0, true, gatherflow::Mode::Train).unwrap();
        pass.enter(unit).unwrap();
        let back = pass.backward(unit).unwrap();
        let mut gradient = back.grad::<f32>(param).unwrap();
        gradient.fill(1.0);
        gradient.complete();
        back.leave().unwrap();
        let outcome = engine.step().unwrap().outcome().unwrap();
        engine.close().unwrap();
        outcome.grad_norm.unwrap()
    };
    std::thread::scope(|scope| {
        let norm = &norm;
        let threads: Vec<_> =
            Ranks::local(4).unwrap().into_iter().map(|rank| scope.spawn(move || norm(rank))).collect();
        for thread in threads {
            // A sum of 2 over a weight of 4, ten times.
            assert!((thread.join().unwrap() - 2.5_f64.sqrt()).abs() < 1e-12);
        }
    });
}

#[test]
fn ranks_that_share_a_copy_must_start_from_the_same_values_and_others_take_theirs() {
    let shared = config().model_parallel(2);
    let start =
        |values| on_ranks(Across::Replicas, &shared, values, |engine| engine.map(|mut e| e.close().unwrap()).err());
    assert!(start([1.0, 1.0, 3.0, 4.0]).iter().all(Option::is_none), "the last two are broadcast to");
    for error in start([1.0, 2.0, 1.0, 1.0]) {
        let error = error.unwrap().to_string();
        assert!(error.contains("rank 0 has hash") && error.contains("rank 1 has hash"), "{error}");
    }
}

#[test]
fn experts_of_one_copy_must_start_from_the_same_values_too() {
    let config = |how| config().model_parallel(2).start_params(how);
    let start = |config, values| {
        let started = on_ranks(Across::Experts, &config, values, |engine| engine.map(|mut e| e.close().unwrap()).err());
        started.into_iter().map(|error| error.map(|error| error.to_string())).collect::<Vec<_>>()
    };
    assert!(start(config(StartParams::Check), [1.0; 4]).iter().all(Option::is_none));
    assert!(start(config(StartParams::Broadcast), [1.0, 1.0, 3.0, 4.0]).iter().all(Option::is_none));
    for how in [StartParams::Check, StartParams::Broadcast] {
        for told in start(config(how), [1.0, 2.0, 1.0, 2.0]) {
            assert!(told.unwrap().contains("hash of the initial parameters that ranks 0, 1 share"), "{how:?}");
        }
    }
}

#[test]
fn ranks_that_cannot_share_copies_of_the_model_are_refused() {
    let error = model(Across::Experts).plan(4, &config().model_parallel(3)).unwrap_err();
    assert!(error.to_string().contains("`model_parallel`") && error.to_string().contains("4 ranks"), "{error}");
    let printed = model(Across::Experts).plan(4, &config().model_parallel(2)).unwrap().describe();
    assert!(printed.contains("2 ranks share a copy of the model"), "{printed}");
}

#[test]
fn groups_that_do_not_fit_are_refused_by_name() {
    let plan = |ranks: usize| model(Across::Experts).plan(ranks, &config());
    assert!(plan(4).is_ok() && plan(2).is_ok());
    let error = plan(3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Model);
    assert!(error.to_string().contains("`pairs` of 2 ranks") && error.to_string().contains("divide the 3"), "{error}");
    let mut other = Model::new();
    let chunk = other.chunk();
    let unit = other.unit(chunk, "unit").unwrap();
    let options = ParamOptions { shard_group: ShardGroupId(1), ..ParamOptions::default() };
    let error = other.param_with(unit, "w", &[1], DType::F32, options).unwrap_err();
    assert!(matches!(error, ModelError::Unknown { what: "shard group", id: 1 }), "{error}");
}

#[test]
fn a_description_declares_shard_groups_and_names_those_that_it_does_not() {
    let text = |name: &str, sum_over: &str| {
        format!(
            r#"
            [[shard_group]]
            name = "experts"
            ranks = 2
            experts = true
            average_over = 4
            [[chunk]]
            [[chunk.unit]]
            name = "mlp"
            params = [
                {{ name = "norm", shape = [8], dtype = "f32", sum_over = "{sum_over}" }},
                {{ name = "up", shape = [64, 8], dtype = "bf16", shard_group = "{name}" }},
            ]
        "#
        )
    };
    let plan = Model::from_toml(&text("experts", "model_parallel")).unwrap().plan(4, &config()).unwrap();
    assert_eq!(plan.params()[0].sum_over, SumOver::ModelParallel);
    let printed = plan.describe();
    let line = "shard group experts: 2 ranks, the others hold other parameters, average over 4";
    assert!(printed.contains(line), "{printed}");
    let error = |name, sum_over| Model::from_toml(&text(name, sum_over)).unwrap_err().to_string();
    let (group, sum) = (error("expert", "model_parallel"), error("experts", "everybody"));
    assert!(group.contains("`up`") && group.contains("`expert`"), "{group}");
    assert!(sum.contains("`norm`") && sum.contains("`everybody`"), "{sum}");
}
