//! Ranks in groups: what they must agree on, and what is refused.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use gatherflow::{
    Across, Config, DType, Engine, Error, ErrorKind, Model, ModelError, ParamMut, ParamOptions, Rank, Ranks,
    ShardGroup, ShardGroupId, StartParams,
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
    let text = |name: &str| {
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
                {{ name = "router", shape = [8], dtype = "f32" }},
                {{ name = "up", shape = [64, 8], dtype = "bf16", shard_group = "{name}" }},
            ]
        "#
        )
    };
    let plan = Model::from_toml(&text("experts")).unwrap().plan(4, &config()).unwrap();
    let printed = plan.describe();
    let line = "shard group experts: 2 ranks, the others hold other parameters, average over 4";
    assert!(printed.contains(line), "{printed}");
    let error = Model::from_toml(&text("expert")).unwrap_err().to_string();
    assert!(error.contains("`up`") && error.contains("`expert`"), "{error}");
}
