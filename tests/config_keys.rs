//! Every key is read by name, unknown ones are refused with a hint, and one that nothing reads is an error (rule K1).
#![allow(clippy::unwrap_used)]

use gatherflow::{Config, ConfigError, Credits, DType, ErrorKind, KEYS, Model, NormType, Overlap};

fn refusal(text: &str) -> String {
    Config::from_toml(text).unwrap_err().to_string()
}

#[test]
fn a_key_that_a_file_sets_in_two_ways_is_refused() {
    for text in [
        "\"scaler.kind\" = \"dynamic\"\n[scaler]\nkind = \"none\"",
        "\"deadlines.silence_s\" = 3\ndeadlines.silence_s = 4",
    ] {
        let error = Config::from_toml(text).unwrap_err().to_string();
        assert!(error.contains("sets what another line has set already"), "{error}");
    }
    Config::from_toml("\"scaler.kind\" = \"dynamic\"\n[scaler]\ninterval = 3").unwrap();
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_one_as_a_hint() {
    assert!(refusal("credit = 3").contains("unknown configuration key `credit`; did you mean `credits`?"));
    assert!(refusal("overlap_grad_reduction = true").contains("did you mean `overlap_grad_reduce`?"));
    assert!(
        refusal("[scaler]\nkind = \"dynamic\"\ngroth = 2").contains("`scaler.groth`; did you mean `scaler.growth`?")
    );
    assert!(refusal("qqq = 1").contains("the keys are"));
    assert!(refusal("[deadline]\nsilence_s = 3").contains("`deadline`"));
}

#[test]
fn zero_credits_and_zero_bucket_sizes_are_errors_from_text_and_builder() {
    for key in ["credits", "credits_bytes", "bucket_size", "num_buckets", "steps_in_flight", "ranks", "model_parallel"]
    {
        assert!(refusal(&format!("{key} = 0")).contains(&format!("`{key}` = 0: expected")), "{key}");
    }
    assert!(Config::new().credits(Credits::Buckets(0)).validate().unwrap_err().to_string().contains("`credits` = 0"));
    assert!(Config::new().bucket_size(0).validate().unwrap_err().to_string().contains("`bucket_size` = 0"));
    assert!(Config::new().betas(0.9, 1.0).validate().is_err());
    assert!(Config::new().max_norm(f64::NAN).validate().is_err());
}

#[test]
fn values_of_the_wrong_type_name_key_value_and_what_is_expected() {
    assert_eq!(
        refusal("overlap = \"windows\""),
        "configuration key `overlap` = \"windows\": expected \"none\", \"chain\" or \"window\""
    );
    for text in [
        "credits = \"many\"",
        "max_norm = -1",
        "norm_type = 0",
        "norm_type = 7.5",
        "norm_type = \"max\"",
        "betas = [0.9]",
        "emulate = \"fast\"",
        "device = \"cuda\"",
        "storage = \"both\"",
    ] {
        assert!(refusal(text).contains("expected"), "{text}");
    }
    assert!(refusal("overlap = ").contains("not valid TOML"));
    assert!(Config::from_file("/nowhere/config.toml").unwrap_err().to_string().contains("/nowhere/config.toml"));
}

#[test]
fn an_infinite_power_is_the_inf_norm_from_text_and_builder() {
    let debug = |config: Config| format!("{config:?}");
    let inf = debug(Config::new().norm_type(NormType::Inf));
    assert_eq!(debug(Config::new().norm_type(NormType::P(f64::INFINITY))), inf);
    assert_eq!(debug(Config::from_toml("norm_type = inf").unwrap()), inf);
    assert_eq!(debug(Config::from_toml("norm_type = \"inf\"").unwrap()), inf);
    for power in [f64::NAN, f64::NEG_INFINITY, 0.0, -2.0, 7.5] {
        let refused = Config::new().norm_type(NormType::P(power)).validate();
        assert!(refused.unwrap_err().to_string().contains("`norm_type`"), "{power}");
    }
}

#[test]
fn bucket_size_and_num_buckets_exclude_each_other() {
    assert!(matches!(
        Config::from_toml("bucket_size = 1\nnum_buckets = 1").unwrap_err(),
        ConfigError::Conflict { first: "bucket_size", second: "num_buckets" }
    ));
}

#[test]
fn a_key_that_the_mode_never_reads_is_an_error_only_if_it_was_set() {
    for (text, key) in [
        ("overlap = \"none\"\ncredits = 3", "credits"),
        ("overlap = \"chain\"\ncredits = \"unlimited\"", "credits"),
        ("overlap = \"none\"\ncredits_bytes = 4096", "credits_bytes"),
        ("overlap = \"chain\"\ncredits_bytes = 4096", "credits_bytes"),
        ("overlap = \"none\"\nfirst_gather = \"forward\"", "first_gather"),
        ("device = \"null\"\nemulate = \"1gbit,200us\"", "emulate"),
        ("device = \"null\"\nmax_norm = 1.0", "max_norm"),
        ("layout = \"reference\"\nbandwidth_alignment = true", "bandwidth_alignment"),
        ("device = \"null\"\nnorm_type = 2", "norm_type"),
        ("device = \"null\"\ncheck_for_nan_in_grad = true", "check_for_nan_in_grad"),
        ("device = \"null\"\naverage = \"weight\"", "average"),
        ("device = \"null\"\nunused = \"error\"", "unused"),
        ("device = \"null\"\n[scaler]\nkind = \"dynamic\"\ngrowth = 2", "scaler.growth"),
        ("device = \"null\"\n[scaler]\nkind = \"dynamic\"\nbackoff = 0.5", "scaler.backoff"),
        ("device = \"null\"\n[scaler]\nkind = \"dynamic\"\ninterval = 3", "scaler.interval"),
        ("device = \"null\"\n[scaler]\nkind = \"dynamic\"\nmin = 0.5", "scaler.min"),
        ("scaler = \"constant\"\ncheck_for_nan_in_grad = true", "check_for_nan_in_grad"),
        ("scaler = \"dynamic\"\non_nonfinite = \"error\"", "on_nonfinite"),
        ("[scaler]\nkind = \"constant\"\ngrowth = 2", "scaler.growth"),
        ("[scaler]\nkind = \"dynamic\"\nscale = 2", "scaler.scale"),
        ("[scaler]\ninitial = 2", "scaler.initial"),
    ] {
        let message = refusal(text);
        assert!(message.contains(&format!("`{key}` is set but never read")), "{text}: {message}");
        let told = !text.contains("scaler = \"constant\"") || message.contains("inf is normal");
        assert!(told, "{message}");
    }
    for text in [
        "overlap = \"none\"",
        "overlap = \"chain\"",
        "device = \"null\"",
        // What the device starts from is read there: it is what the engine and its state tell.
        "device = \"null\"\n[scaler]\nkind = \"dynamic\"\ninitial = 0.5\nhysteresis = 3",
        "device = \"null\"\n[scaler]\nkind = \"constant\"\nscale = 8",
        "scaler = \"constant\"",
        "",
    ] {
        Config::from_toml(text).unwrap();
    }
    assert!(Config::new().overlap(Overlap::None).credits(Credits::Unlimited).validate().is_err());
}

fn with(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::from_variables(Config::new(), variables.iter().copied())
}

#[test]
fn every_key_has_an_environment_variable_of_its_own() {
    let variables: std::collections::BTreeSet<String> = KEYS.iter().map(gatherflow::Key::variable).collect();
    assert_eq!(variables.len(), KEYS.len());
    assert!(variables.contains("GATHERFLOW_SCALER_KIND") && variables.contains("GATHERFLOW_DEADLINES_SILENCE_S"));
    let config = with(&[
        ("GATHERFLOW_OVERLAP", "chain"),
        ("GATHERFLOW_SCALER_KIND", "dynamic"),
        ("GATHERFLOW_SCALER_INTERVAL", "7"),
        ("GATHERFLOW_BETAS", "[0.5, 0.75]"),
        ("GATHERFLOW_EMULATE", "1gbit,200us"),
        ("GATHERFLOW_STORAGE", "shared"),
    ]);
    let text = "overlap = \"chain\"\nstorage = \"shared\"\nbetas = [0.5, 0.75]\nemulate = \"1gbit,200us\"\n\
                [scaler]\nkind = \"dynamic\"\ninterval = 7";
    assert_eq!(format!("{:?}", config.unwrap()), format!("{:?}", Config::from_toml(text).unwrap()));
    assert!(with(&[("GATHERFLOW_SCALER", "constant")]).unwrap().is_explicit("scaler.kind"));
}

#[test]
fn an_unknown_variable_is_refused_by_name_with_the_nearest_one_and_others_are_left_alone() {
    for (variable, hint) in [
        ("GATHERFLOW_CREDIT", "did you mean `GATHERFLOW_CREDITS`?"),
        ("GATHERFLOW_SCALER_GROTH", "did you mean `GATHERFLOW_SCALER_GROWTH`?"),
        ("GATHERFLOW_overlap", "after GATHERFLOW_ comes a key in capitals"),
        ("GATHERFLOW_", "after GATHERFLOW_"),
    ] {
        let message = with(&[(variable, "1")]).unwrap_err().to_string();
        assert!(message.contains(&format!("`{variable}`")) && message.contains(hint), "{message}");
    }
    let others = [
        ("GATHERFLOW_NCCL", "/lib/libnccl.so"),
        ("GATHERFLOW_BENCH_NUMEL", "9"),
        ("GATHERFLOW_MEMORY_MB", "9"),
        ("GATHERFLOW_PROPERTY_SECONDS", "9"),
        ("GATHERFLOW_SOAK_SECONDS", "9"),
        ("GATHERFLOW_TRAIN_GPT_SETTLED", "1"),
        ("GATHERFLOWER", "1"),
        ("CREDITS", "0"),
    ];
    assert_eq!(format!("{:?}", with(&others).unwrap()), format!("{:?}", Config::new()));
}

#[test]
fn a_variable_is_checked_as_any_value_and_counts_as_set_explicitly() {
    let refusal = |variables: &[(&str, &str)]| with(variables).unwrap_err().to_string();
    assert_eq!(
        refusal(&[("GATHERFLOW_CREDITS", "0")]),
        "environment variable `GATHERFLOW_CREDITS`: configuration key `credits` = 0: expected a number of buckets from 1 to \
         4294967294, or \"unlimited\""
    );
    let dead = with(&[("GATHERFLOW_OVERLAP", "none"), ("GATHERFLOW_CREDITS", "3")]).unwrap().validate();
    let dead = dead.unwrap_err().to_string();
    assert!(dead.contains("`credits` is set but never read"), "{dead}");
    let both = refusal(&[("GATHERFLOW_BUCKET_SIZE", "3"), ("GATHERFLOW_NUM_BUCKETS", "3")]);
    assert!(both.contains("exclude each other"), "{both}");
}

#[test]
fn each_layer_overrides_the_ones_before_it_key_by_key() {
    let file = Config::from_toml("bucket_size = 64\nlr = 0.5\neps = 0.25").unwrap();
    let variables = [("GATHERFLOW_NUM_BUCKETS", "4"), ("GATHERFLOW_LR", "0.125")];
    let mut config = Config::from_variables(file, variables).unwrap();
    config.set_layer([("bucket_size", "128")]).unwrap();
    let expected = Config::from_toml("bucket_size = 128\nlr = 0.125\neps = 0.25").unwrap();
    assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    assert!(config.set_layer([("credit", "1")]).unwrap_err().to_string().contains("`credits`"));
}

#[test]
fn only_the_last_layer_decides_what_is_never_read() {
    let layered = |file: &str, variable: (&str, &str), flag: Option<(&str, &str)>| {
        let mut config = Config::from_variables(Config::from_toml(file).unwrap(), [variable]).unwrap();
        config.set_layer(flag).unwrap();
        config.validate().map(|()| config)
    };
    let credits = ("GATHERFLOW_CREDITS", "2");
    // A later layer brings a key to life.
    assert!(layered("overlap = \"chain\"", credits, Some(("overlap", "window"))).unwrap().is_explicit("credits"));
    let dead = layered("overlap = \"chain\"", credits, None).unwrap_err().to_string();
    assert!(dead.contains("`credits` is set but never read"), "{dead}");
    // A later layer's mode drops the keys of earlier ones that it never reads, but not those of its own or later layers.
    assert!(!layered("credits = 4", ("GATHERFLOW_OVERLAP", "none"), None).unwrap().is_explicit("credits"));
    assert!(!layered("overlap = \"window\"", credits, Some(("overlap", "none"))).unwrap().is_explicit("credits"));
    assert!(layered("", ("GATHERFLOW_OVERLAP", "none"), Some(("credits", "4"))).is_err());
    assert!(layered("", ("GATHERFLOW_SCALER_GROWTH", "4"), None).is_err(), "a default is no layer");
    assert!(!layered("unused = \"error\"", credits, Some(("lr", "0.5"))).unwrap().is_explicit("overlap"));
    let unscaled = layered("on_nonfinite = \"error\"", ("GATHERFLOW_SCALER", "dynamic"), None);
    assert!(!unscaled.unwrap().is_explicit("on_nonfinite"));
}

#[test]
fn a_scaler_that_is_no_table_and_a_number_of_300_digits_are_refused_in_short() {
    assert_eq!(
        refusal("scaler = 3"),
        "configuration key `scaler` = 3: expected a table with keys of kind, scale, initial, min, growth, backoff, \
         interval, hysteresis"
    );
    assert!(refusal("deadlines = 3").contains("start_up_s"));
    assert_eq!(refusal("lr = 1e300"), "configuration key `lr` = 1e300: expected a number from 0, below 3.4e38");
    assert!(Config::new().lr(1e300).validate().unwrap_err().to_string().contains("= 1e300:"));
    assert!(refusal(&format!("overlap = \"{}\"", "x".repeat(5000))).len() < 200);
}

#[test]
fn a_file_is_named_once_in_what_is_wrong_with_it() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong.toml");
    std::fs::write(&path, "credits = 0").unwrap();
    for (path, says) in [(path.as_path(), "`credits` = 0"), ("/nowhere/config.toml".as_ref(), "cannot read")] {
        let message = Config::from_file(path).unwrap_err().to_string();
        assert!(message.contains(says) && message.matches(path.to_str().unwrap()).count() == 1, "{message}");
    }
}

fn model(dtype: DType) -> Model {
    let mut model = Model::new();
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit").unwrap();
    model.param(unit, "half", &[4], dtype).unwrap();
    model
}

#[test]
fn numbers_that_are_infinite_or_zero_in_f32_are_refused_by_name() {
    for (key, value) in [("lr", "1e39"), ("eps", "1e-46"), ("eps", "0.0"), ("weight_decay", "1e300")] {
        let text = refusal(&format!("{key} = {value}"));
        assert!(text.contains(key), "{text}");
    }
    let mut model = gatherflow::Model::new();
    for group in [
        gatherflow::Group { eps: Some(1e-46), ..gatherflow::Group::default() },
        gatherflow::Group { lr: Some(1e39), ..gatherflow::Group::default() },
    ] {
        let message = model.group(group).unwrap_err().to_string();
        assert!(message.contains("out of range") && message.len() < 60, "{message}");
    }
}

#[test]
fn a_first_loss_scale_below_the_smallest_is_refused_for_the_dynamic_scaler() {
    let text = refusal("scaler = { kind = \"dynamic\", initial = 8, min = 1e10 }");
    assert!(text.contains("`scaler.initial` = 8.0: expected at least `scaler.min`, which is 10000000000.0"), "{text}");
    assert!(refusal("scaler = { kind = \"dynamic\", initial = 0.5 }").contains("which is 1.0"));
    Config::from_toml("scaler = { kind = \"dynamic\", initial = 0.5, min = 0.5 }").unwrap();
}

#[test]
fn f16_parameters_without_a_scaler_are_refused_by_name() {
    let error = model(DType::F16).plan(2, &Config::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("`half` is f16") && !error.is_fatal(), "{error}");
    model(DType::F16).plan(2, &Config::from_toml("scaler = \"constant\"").unwrap()).unwrap();
    model(DType::Bf16).plan(2, &Config::new()).unwrap();
}

#[test]
fn an_emulated_link_of_one_rank_and_another_number_of_ranks_are_refused() {
    let emulated = Config::from_toml("emulate = \"1gbit,200us\"").unwrap();
    assert!(model(DType::F32).plan(1, &emulated).unwrap_err().to_string().contains("`emulate`"));
    model(DType::F32).plan(2, &emulated).unwrap();
    let three = Config::new().ranks(3);
    assert!(model(DType::F32).plan(2, &three).unwrap_err().to_string().contains("`ranks` = 3, but 2 ranks"));
}

#[test]
fn command_line_flags_set_keys_as_text() {
    let mut config = Config::new();
    config.set("overlap", "chain").unwrap();
    assert_eq!(config.overlap_mode(), Overlap::Chain);
    config.set("num_buckets", "12").unwrap();
    config.set("emulate", "1gbit,200us").unwrap();
    assert!(config.set("num_buckets", "twelve").unwrap_err().to_string().contains("twelve"));
    assert!(config.is_explicit("num_buckets") && !config.is_explicit("credits"));
}

#[test]
fn documented_defaults_are_what_a_default_config_holds() {
    let default = format!("{:?}", Config::new());
    for key in KEYS {
        let mut config = Config::new();
        if config.set(key.name, key.default).is_ok() {
            let explicit = format!("{{\"{}\"}}", key.name);
            assert_eq!(format!("{config:?}").replace(&explicit, "{}"), default, "{}: {}", key.name, key.default);
        }
    }
}

/// The numbers of the specification (L4, T1, T3, T5, F1 and the choices beside them), which neither code nor documentation may leave.
#[test]
fn the_defaults_are_those_of_the_specification() {
    let default = format!("{:?}", Config::new()).replace(" }", ",");
    for field in [
        "device: \"cpu\"",
        "overlap: Window",
        "credits: Buckets(3)",
        "credits_bytes: None",
        "first_gather: Step",
        "overlap_grad_reduce: true",
        "skip: Host",
        "grad_dtype: F32",
        "gather_group_bytes: 0",
        "layout: Standard",
        "bandwidth_alignment: false",
        "storage: Views",
        "betas: (0.9, 0.999)",
        "eps: 1e-8",
        "weight_decay: 0.01",
        "adam_w: true",
        "max_norm: 1.0",
        "norm_type: P(2.0)",
        "on_nonfinite: Skip",
        "check_for_nan_in_grad: false",
        "unused: Zero",
        "scaler: None",
        "initial: 4294967296.0",
        "min: 1.0",
        "growth: 2.0",
        "backoff: 0.5",
        "interval: 1000",
        "hysteresis: 2",
        "steps_in_flight: 2",
        "start_up: 600s",
        "collective: 600s",
        "silence: 600s",
        "start_params: Broadcast",
    ] {
        assert!(default.contains(&format!(" {field},")), "{field} is not in {default}");
    }
    for (ranks, size) in [(1, 40_000_000), (2, 40_000_000), (40, 40_000_000), (41, 41_000_000), (512, 512_000_000)] {
        assert_eq!(model(DType::F32).plan(ranks, &Config::new()).unwrap().bucket_size(), size, "{ranks} ranks");
    }
}
