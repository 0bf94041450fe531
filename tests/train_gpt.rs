//! The example as a user meets it: its JSON is a contract, runs can be repeated, and bad input ends with exit code 2.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

#[path = "../examples/train_gpt/losses.rs"]
mod losses;

/// Beside the tests, where `cargo test` puts examples; built here if only this test was asked for.
fn built(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().with_file_name("examples").join(name);
    let path = path.with_extension(std::env::consts::EXE_EXTENSION);
    if !path.exists() {
        let profile: &[&str] = if cfg!(debug_assertions) { &[] } else { &["--release"] };
        let build = ["build", "--example", name];
        assert!(Command::new(env!("CARGO")).args(build).args(profile).status().unwrap().success());
    }
    path
}

fn example() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| built("train_gpt"))
}

fn file(name: &str, bytes: &[u8]) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn train_gpt(flags: &[&str]) -> Output {
    Command::new(example()).args(flags).output().unwrap()
}

const SMALL: &[&str] = &["--layers=1", "--width=32", "--seq=24", "--batch=2", "--steps=12", "--num-buckets=4"];

fn result(name: &str, flags: &[&str]) -> Value {
    result_and_texts(name, flags).0
}

/// The JSON, and what is on standard output and standard error.
fn result_and_texts(name: &str, flags: &[&str]) -> (Value, String, String) {
    let json = file(&format!("{name}.json"), b"");
    let text = file(&format!("{name}.txt"), "the quick brown fox jumps over the lazy dog\n".repeat(40).as_bytes());
    let output = train_gpt(&[SMALL, flags, &["--data", &text, "--json", &json]].concat());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{flags:?}: {message}");
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.lines().last().unwrap().starts_with("is it overlapping?"), "{answer}");
    (serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap(), answer, message)
}

fn refused(flags: &[&str], names: &str) {
    let output = train_gpt(flags);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {message}");
    assert!(message.contains(names), "{flags:?} should name {names:?}: {message}");
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn what_cannot_overlap_is_said_once_at_the_start() {
    let text = file("hint.txt", "the quick brown fox jumps over the lazy dog\n".repeat(40).as_bytes());
    for (flags, hint) in [
        (&["--num-buckets=1", "--dtype=f32"][..], "note: one bucket: its gather has no other unit to hide under"),
        (&["--ranks=1"], "note: one rank: no communication, so there is nothing to hide"),
    ] {
        let all = ["--layers=1", "--width=32", "--seq=24", "--batch=2", "--steps=2", "--data", &text];
        let output = train_gpt(&[&all, flags].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.matches(hint).count() == 1, "{flags:?}: {said}");
        assert!(said.find(hint) < said.find("step 1/2"), "{said}");
        assert!(!said.contains("asked for, "), "nobody asked for a number of buckets that did not come out: {said}");
    }
}

#[test]
fn the_names_in_the_json_are_a_contract() {
    let result = result("contract", &[]);
    let mut names: Vec<&str> = result.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    let mut contract: Vec<&str> = "ranks steps overlap storage dtype buckets loss_first loss_last grad_norm_last \
        params_hash gathers reduces skipped_steps step_ms_median compute_ms_median gather_ms_median reduce_ms_median \
        exposed_gather_ms_median exposed_reduce_ms_median hidden_share tokens_per_s peak_ahead_bytes"
        .split_whitespace()
        .collect();
    contract.sort_unstable();
    assert_eq!(names, contract);
    assert_eq!((&result["ranks"], &result["steps"], &result["overlap"]), (&2.into(), &12.into(), &"window".into()));
    assert_eq!((&result["storage"], &result["dtype"]), (&"views".into(), &"bf16".into()));
    let buckets = result["buckets"].as_u64().unwrap();
    assert_eq!(result["reduces"].as_u64().unwrap(), 12 * buckets);
    assert_eq!(result["gathers"].as_u64().unwrap(), 12 * buckets);
    assert!(result["loss_last"].as_f64().unwrap() < result["loss_first"].as_f64().unwrap());
}

#[test]
fn losses_are_means_over_ranks_and_the_last_one_is_of_the_last_ten_steps() {
    let of =
        |step: usize, rank: usize| [[2.0, 1e17, 1.0], [40.0, -1e17, 5.0]][rank % 2][step.min(2)] * (rank + 1) as f64;
    let told = |order: &dyn Fn(usize) -> Vec<usize>, steps: usize, ranks: usize| {
        let mut losses = losses::Losses::of(ranks);
        for step in 0..steps {
            let order = order(step);
            let made: Vec<bool> = order.iter().map(|rank| losses.add(step, *rank, of(step, *rank))).collect();
            assert_eq!(made.iter().filter(|made| **made).count(), 1, "one mean a step");
        }
        assert_eq!(losses.steps(), steps);
        [losses.first(), losses.last()].map(f64::to_bits)
    };
    let mean = |step: usize, ranks: usize| (0..ranks).map(|rank| of(step, rank)).sum::<f64>() / ranks as f64;
    for (steps, ranks) in [(1, 1), (1, 2), (9, 2), (10, 3), (12, 3), (13, 2)] {
        let tail: Vec<f64> = (steps.max(10) - 10..steps).map(|step| mean(step, ranks)).collect();
        let expected = [mean(0, ranks), tail.iter().sum::<f64>() / tail.len() as f64].map(f64::to_bits);
        assert_eq!(told(&|_| (0..ranks).collect(), steps, ranks), expected, "{steps} steps, {ranks} ranks");
        let turned = |step: usize| (0..ranks).map(|rank| (rank + step) % ranks).rev().collect();
        assert_eq!(told(&turned, steps, ranks), expected, "whoever comes first");
    }
    // A rank may be some steps ahead.
    let mut losses = losses::Losses::of(2);
    assert!([0, 1, 2].iter().all(|step| !losses.add(*step, 1, *step as f64)) && losses.first().is_nan());
    assert!(losses.add(0, 0, 3.0) && losses.add(1, 0, 3.0) && losses.steps() == 2);
    assert_eq!([losses.first(), losses.last()].map(f64::to_bits), [1.5, 1.75].map(f64::to_bits));
}

/// The first line of progress is of the first step, and each of the last ten.
#[test]
fn the_losses_of_the_result_are_those_that_progress_has_shown() {
    let (result, answer, progress) = result_and_texts("losses", &["--seed", "7"]);
    let shown = |line: &str| line.split("  ").find_map(|part| part.strip_prefix("loss ").map(str::to_owned)).unwrap();
    let lines: Vec<String> = progress.lines().filter(|line| line.starts_with("step ")).map(shown).collect();
    assert_eq!(lines.len(), 12, "{progress}");
    let [first, last] = ["loss_first", "loss_last"].map(|name| format!("{:.3}", result[name].as_f64().unwrap()));
    assert_eq!((&lines[0], lines.last().unwrap()), (&first, &last), "{progress}");
    assert!(answer.starts_with(&format!("loss {first} -> {last} in 12 steps, ")), "none is skipped: {answer}");
}

#[test]
fn a_seed_gives_the_same_bits_again_in_every_overlap_mode_and_storage() {
    let of = |name: &str, flags: &[&str]| {
        let result = result(name, flags);
        [&result["params_hash"], &result["loss_last"], &result["grad_norm_last"]].map(Clone::clone)
    };
    let window = of("window", &["--seed", "7"]);
    assert_eq!(window, of("again", &["--seed", "7"]));
    assert_eq!(window, of("none", &["--seed", "7", "--overlap", "none"]));
    assert_eq!(window, of("chain", &["--seed", "7", "--overlap", "chain"]));
    assert_eq!(window, of("late", &["--seed", "7", "--overlap-grad-reduce", "false", "--credits", "unlimited"]));
    let shared = ["--seed", "7", "--storage", "shared"];
    assert_eq!(window, of("shared", &shared));
    assert_eq!(window, of("shared chain", &[&shared[..], &["--overlap", "chain", "--accumulate", "1"]].concat()));
    assert_eq!(result("shared name", &shared)["storage"], "shared");
    assert_ne!(window[0], of("other", &["--seed", "8"])[0]);
}

#[test]
fn every_dtype_and_number_of_ranks_and_microbatches_trains() {
    let bf16_gradients = file("bf16.toml", b"grad_dtype = \"bf16\"");
    let f16_gradients = file("f16.toml", b"grad_dtype = \"f16\"\nscaler = { kind = \"dynamic\", initial = 256 }");
    for (name, flags) in [
        ("bf16 gradients", &["--config", &bf16_gradients, "--accumulate", "2"][..]),
        ("f16 gradients", &["--config", &f16_gradients, "--dtype", "f16"]),
        ("f32", &["--dtype", "f32", "--ranks", "3"]),
        ("alone", &["--ranks", "1", "--vocab", "300"]),
    ] {
        let result = result(name, flags);
        assert!(result["loss_last"].as_f64().unwrap() < result["loss_first"].as_f64().unwrap(), "{name}");
        assert_eq!(result["skipped_steps"], 0, "{name}");
    }
}

#[test]
fn f16_comes_down_from_two_to_the_32_by_skipping_and_learns() {
    let flags = ["--dtype", "f16", "--accumulate", "2", "--steps", "60"];
    let (window, answer, _) = result_and_texts("f16", &flags);
    let skipped = window["skipped_steps"].as_u64().unwrap();
    assert!(answer.contains(&format!(" in 60 steps, {skipped} of them skipped, ")), "{answer}");
    assert!((5..30).contains(&skipped), "{skipped}");
    let buckets = window["buckets"].as_u64().unwrap();
    assert_eq!(window["gathers"].as_u64().unwrap(), (60 - skipped) * buckets, "a skipped step gathers nothing");
    assert_eq!(window["reduces"].as_u64().unwrap(), 60 * buckets);
    assert!(window["loss_last"].as_f64().unwrap() < 0.8 * window["loss_first"].as_f64().unwrap());
    let none = result("f16-none", &[&flags[..], &["--overlap", "none"]].concat());
    assert_eq!(none["params_hash"], window["params_hash"]);
}

#[test]
fn flags_override_the_configuration_file() {
    let config = file("flags.toml", b"bucket_size = 1\noverlap = \"chain\"\nmax_norm = 0.5\n");
    let overridden = result("flags", &["--config", &config, "--overlap", "window"]);
    assert_eq!(overridden["overlap"], "window");
    assert_eq!(overridden["buckets"], result("plain", &[])["buckets"]);
}

#[test]
fn variables_of_the_environment_are_read() {
    for (value, names) in [("sideways", "`GATHERFLOW_OVERLAP`"), ("none", "`credits`")] {
        let mut command = Command::new(example());
        let output = command.args(["--credits", "4"]).env("GATHERFLOW_OVERLAP", value).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{value}: {message}");
        assert!(message.contains(names), "{value}: {message}");
    }
}

#[test]
fn bad_input_is_refused_with_exit_code_2_and_named() {
    let short = file("short.txt", b"too short");
    refused(&["--data", &short, "--seq", "9"], "9 bytes");
    refused(&["--data", "/dev/zero"], "give at most 1 GiB");
    refused(&["--data", "no/such/file.txt"], "no/such/file.txt");
    refused(&["--config", "no/such/file.toml"], "no/such/file.toml");
    refused(&["--config", &file("bad.toml", b"credits = ")], "bad.toml");
    refused(&["--config", &file("unknown.toml", b"credit = 3")], "credits");
    refused(&["--json", "no/such/folder/out.json"], "no/such/folder/out.json");
    refused(&["--credits", "0"], "credits");
    refused(&["--credits", "4", "--overlap", "none"], "credits");
    refused(&["--bucket-size", "0"], "bucket_size");
    refused(&["--bucket-size", "9", "--num-buckets", "9"], "--num-buckets");
    refused(&["--overlap", "sometimes"], "overlap");
    refused(&["--emulate", "fast"], "emulate");
    refused(&["--dtype", "f64"], "f64");
    refused(&["--ranks", "0"], "--ranks");
    refused(&["--steps", "0"], "--steps");
    refused(&["--vocab", "100"], "--vocab");
    refused(&["--no-such-flag"], "--no-such-flag");
}

#[test]
fn one_step_is_measured() {
    let json = file("one.json", b"");
    let output = train_gpt(&["--layers=1", "--width=32", "--seq=24", "--batch=2", "--steps=1", "--json", &json]);
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.contains("is it overlapping?") && !answer.contains("no step was measured"), "{answer}");
    let result: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert!(result["step_ms_median"].as_f64().is_some_and(|ms| ms > 0.0), "{result}");
}

#[test]
fn a_device_that_computes_nothing_is_refused() {
    refused(&["--config", &file("null.toml", b"device = \"null\"")], "`device`");
}

#[test]
fn ranks_that_share_a_copy_of_the_model_are_refused_where_each_has_data_of_its_own() {
    refused(&["--ranks", "4", "--config", &file("parallel.toml", b"model_parallel = 2")], "`model_parallel`");
}

#[test]
fn counts_that_no_machine_has_room_for_are_refused_by_name() {
    for flag in ["--steps", "--batch", "--layers", "--ranks", "--seq", "--width", "--vocab", "--accumulate"] {
        for count in ["18446744073709551615", "9999999999"] {
            refused(&[flag, count], flag);
        }
    }
    refused(&["--layers", "10000", "--width", "65536"], "--layers");
    refused(&["--config", &file("ranks.toml", b"ranks = 100000")], "`ranks`");
}

/// Neither standard output nor standard error takes anything here.
#[cfg(target_os = "linux")]
#[test]
fn the_result_is_in_the_file_where_nothing_can_be_printed() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let text = file("full.txt", "the quick brown fox jumps over the lazy dog\n".repeat(40).as_bytes());
    let json = file("full.json", b"");
    let mut command = Command::new(example());
    command.args(SMALL).args(["--data", &text, "--json", &json]).stdout(full()).stderr(full());
    assert_eq!(command.status().unwrap().code(), Some(1));
    let result: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(result["steps"], 12);
}

#[test]
fn the_executor_without_a_framework_refuses_bad_arguments_by_name() {
    let bad = [
        (&["bogus"][..], "`overlap`"),
        (&["window", "abc"], "steps = `abc`"),
        (&["window", "3", "x"], "megabytes = `x`"),
        (&["window", "3", "0", "more"], "`more`"),
    ];
    for (arguments, names) in bad {
        let output = Command::new(built("custom_executor")).args(arguments).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.starts_with("error: ") && message.contains(names), "{message}");
    }
}

#[test]
fn the_candle_program_ends_with_the_same_parameters_on_both_ranks() {
    let output = Command::new(built("candle_vars")).output().unwrap();
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{answer}");
    let told = |name: &str| answer.lines().filter_map(|line| line.split_once(name)).collect::<Vec<_>>();
    let (sizes, losses) = (told(", squared size of the second layer "), told("last loss "));
    assert!(sizes.len() == 2 && sizes[0].1 == sizes[1].1, "{answer}");
    let loss = |text: &str| text.split(',').next().unwrap().parse::<f64>().unwrap();
    assert!(losses.iter().all(|(_, text)| loss(text) < 0.1), "{answer}");
}
