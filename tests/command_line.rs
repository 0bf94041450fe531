//! The command line teaches, and refuses bad input with exit code 2 and a message that names it.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::{Command, Output};

fn gatherflow(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gatherflow")).args(arguments).output().unwrap()
}

fn file(name: &str, text: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn refused(arguments: &[&str], names: &str) {
    let output = gatherflow(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert!(message.contains(names), "{arguments:?} should name {names:?}: {message}");
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn help_lists_every_configuration_key() {
    let output = gatherflow(&["--help"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for key in gatherflow::KEYS {
        assert!(text.contains(key.name) && text.contains(key.help), "{}", key.name);
    }
}

#[test]
fn the_model_description_in_the_help_is_one_and_all_its_fields_are_named() {
    let help = String::from_utf8(gatherflow(&["plan", "--help"]).stdout).unwrap();
    let (_, example) = help.split_once("\n\n  [[").unwrap();
    let (example, _) = example.split_once("\n\n").unwrap();
    let output = gatherflow(&["plan", &file("help.toml", &format!("[[{example}")), "--ranks", "4"]);
    assert!(output.status.success(), "{}", String::from_utf8(output.stderr).unwrap());
    // The parser lists what it takes.
    let unknown = "[[chunk]]\n[[chunk.unit]]\nname = \"u\"\nparams = [{ fields = 1 }]\n[[shard_group]]\nfields = 1";
    let output = gatherflow(&["plan", &file("fields.toml", unknown)]);
    let message = String::from_utf8(output.stderr).unwrap();
    let fields: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
    assert!(fields.contains(&"shape") && fields.contains(&"shard_group"), "{message}");
    for field in fields {
        assert!(help.contains(field), "{field} is not in {help}");
    }
}

#[test]
fn plan_prints_a_gpt_for_people_and_as_json() {
    let text = gatherflow(&["plan", "--gpt", "2,64,256", "--ranks", "2", "--num-buckets", "4"]);
    assert!(text.status.success());
    assert!(String::from_utf8(text.stdout).unwrap().contains("bucket"));
    let json = gatherflow(&["plan", "--gpt", "2,64,256", "--ranks", "2", "--bucket-size", "10000", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let numel =
        |key: &str| -> u64 { plan["buckets"].as_array().unwrap().iter().map(|b| b[key].as_u64().unwrap()).sum() };
    assert_eq!(numel("param_numel"), plan["numel"].as_u64().unwrap(), "every element is in one bucket");
    assert_eq!(numel("shard_numel") * 2, numel("numel"), "two ranks own all of it");
    assert!(plan["buckets"].as_array().unwrap().len() > 4);
}

#[test]
fn plan_prints_the_memory_of_both_storages_with_staging() {
    let plan = |flags: &[&str], storage: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gatherflow"));
        command.args(["plan", "--gpt", "2,64,256"]).args(flags).env("GATHERFLOW_STORAGE", storage);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let json = |storage: &str| serde_json::from_str::<serde_json::Value>(&plan(&["--json"], storage)).unwrap();
    let (views, shared) = (json("views"), json("shared"));
    assert_eq!(views["of_storage"], shared["of_storage"], "both are told whichever is chosen");
    for (name, plan) in [("views", &views), ("shared", &shared)] {
        assert_eq!(
            (plan["storage"].as_str(), &plan["total_bytes"]),
            (Some(name), &plan["of_storage"][name]["total_bytes"])
        );
    }
    let staging = shared["of_storage"]["shared"]["staging_bytes"].as_u64().unwrap();
    let listed = shared["memory_bytes"].as_object().unwrap().iter().filter(|(name, _)| name.starts_with("staging"));
    assert_eq!(listed.map(|(_, bytes)| bytes.as_u64().unwrap()).sum::<u64>(), staging);
    assert_eq!(views["total_bytes"].as_u64().unwrap() + staging, shared["total_bytes"].as_u64().unwrap());
    assert!(plan(&[], "views").contains("storage shared: ") && plan(&[], "shared").contains("storage views: "));
}

#[test]
fn plan_reads_a_model_and_a_configuration() {
    let model = file(
        "good.toml",
        "[[chunk]]\n[[chunk.unit]]\nname = \"u\"\nparams = [{ name = \"w\", shape = [8, 8], dtype = \"bf16\" }]",
    );
    let config = file("config.toml", "ranks = 4\nbucket_size = 10");
    let json = gatherflow(&["plan", &model, "--config", &config, "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((plan["ranks"].as_u64(), plan["numel"].as_u64()), (Some(4), Some(64)));
}

#[test]
fn variables_of_the_environment_come_between_file_and_flags() {
    let config = file("layers.toml", "ranks = 4\nbucket_size = 10");
    let plan = |variables: &[(&str, &str)], flags: &[&str]| -> serde_json::Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gatherflow"));
        command.args(["plan", "--gpt", "2,64,256", "--json", "--config", &config]).args(flags);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(plan(&[], &[])["ranks"], 4);
    let variables = [("GATHERFLOW_RANKS", "3"), ("GATHERFLOW_NUM_BUCKETS", "1")];
    let layered = plan(&variables, &[]);
    assert_eq!((layered["ranks"].as_u64(), layered["buckets"].as_array().unwrap().len()), (Some(3), 2));
    assert_eq!(plan(&variables, &["--ranks", "2"])["ranks"], 2);
    let mut command = Command::new(env!("CARGO_BIN_EXE_gatherflow"));
    let output = command.args(["plan", "--gpt", "2,64,256"]).env("GATHERFLOW_NUM_BUCKET", "1").output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(message.contains("`GATHERFLOW_NUM_BUCKET`; did you mean `GATHERFLOW_NUM_BUCKETS`?"), "{message}");
}

#[test]
fn bad_arguments_are_refused_by_name() {
    refused(&["plan"], "no model: give a model description or --gpt");
    refused(&["plan", "--gpt", "1,2"], "three whole numbers");
    refused(&["plan", "--gpt", "1,0,3"], "--gpt: parameter `embed.tokens`");
    refused(&["plan", "--gpt", "1,18446744073709551615,3"], "the number of elements must fit in 64 bits");
    refused(&["plan", "--gpt", "999999999,208,256"], "999999999 layers");
    refused(&["plan", "--gpt", "1,8,8", "--ranks", "0"], "`ranks` = 0");
    refused(&["plan", "--gpt", "1,8,8", "--num-buckets", "0"], "`num_buckets` = 0");
    refused(&["plan", "--gpt", "1,8,8", "--bucket-size", "0"], "`bucket_size` = 0");
    refused(&["plan", "--gpt", "1,8,8", "--num-buckets", "2", "--bucket-size", "2"], "exclude each other");
    refused(&["plan", "--gpt", "1,8,8", "--overlap", "window"], "--overlap");
    refused(&["plans"], "plan");
}

#[test]
fn bad_files_are_refused_by_name() {
    refused(&["plan", "/nowhere/model.toml"], "/nowhere/model.toml");
    refused(&["plan", "--gpt", "1,8,8", "--config", "/nowhere/config.toml"], "/nowhere/config.toml");
    let unit = |params: &str| format!("[[chunk]]\n[[chunk.unit]]\nname = \"u\"\nparams = [{params}]");
    let model = |name: &str, params: &str| file(name, &unit(params));
    let w = "{ name = \"w\", shape = [2], dtype = \"f32\" }";
    refused(
        &["plan", &model("dtype.toml", "{ name = \"w\", shape = [2], dtype = \"f64\" }")],
        "unsupported dtype `f64`",
    );
    refused(&["plan", &model("twice.toml", &format!("{w}, {w}"))], "`w` is registered twice");
    refused(&["plan", &model("shape.toml", "{ name = \"w\", shape = [0], dtype = \"f32\" }")], "impossible shape [0]");
    refused(&["plan", &model("field.toml", "{ nam = \"w\" }")], "nam");
    let shared =
        |name: &str, n: usize| format!("{{ name = \"{name}\", shape = [{n}], dtype = \"f32\", shared = \"s\" }}");
    refused(&["plan", &model("disagree.toml", &format!("{}, {}", shared("a", 2), shared("b", 3)))], "shapes disagree");
    refused(&["plan", &file("uses.toml", &format!("{}\nuses = [\"v\"]", unit(w)))], "`v`");
    refused(
        &["plan", &model("group.toml", &w.replace(" }", ", group = \"g\" }"))],
        "names group `g`, which is not declared",
    );
    refused(&["plan", &file("bad_group.toml", "chunk = []\n[[group]]\nname = \"g\"\neps = -1.0")], "eps");
    refused(&["plan", &file("syntax.toml", "[[chunk")], "syntax.toml");
    refused(&["plan", &file("no_units.toml", "chunk = []")], "no units");
    let config = file("bad_config.toml", "credits = 0");
    refused(&["plan", "--gpt", "1,8,8", "--config", &config], "`credits` = 0");
}

/// The chunks of `tests/golden/megatron`, whose `make.py` says what is in it; the packaged crate goes without.
const MEGATRON: &str = "
[[group]]
name = \"biases\"
weight_decay = 0.0
[[chunk]]
[[chunk.unit]]
name = \"first\"
params = [{ name = \"embed.table\", shape = [7, 3], dtype = \"bf16\" }, { name = \"first.weight\", shape = [4, 5], dtype = \"bf16\" }]
[[chunk.unit]]
name = \"bias\"
params = [{ name = \"first.bias\", shape = [5], dtype = \"f32\", group = \"biases\" }]
[[chunk]]
[[chunk.unit]]
name = \"second\"
params = [{ name = \"second.weight\", shape = [3, 3], dtype = \"bf16\" }, { name = \"head.bias\", shape = [7], dtype = \"f32\" }]
";

#[test]
fn import_makes_a_file_of_state_that_state_prints() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/megatron/buckets.pt");
    let (model, out) = (file("megatron.toml", MEGATRON), file("imported_by_command.safetensors", "an older file"));
    let import = ["import", golden, "--model", &model, "--ranks", "4", "--step", "1000", "--out", &out];
    let done = gatherflow(&[&import[..], &["--bucket-size", "16", "--scaler", "512,7,1"]].concat());
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8(done.stderr).unwrap());
    let state = gatherflow(&["state", &out]);
    let printed = String::from_utf8(state.stdout).unwrap();
    assert_eq!(text, format!("wrote {out}\n{printed}"));
    for line in [
        "steps: 1000",
        "group 0: t 1000, lr 0.001 x 1.0, betas (0.9, 0.999), eps 1e-8, weight decay 0.01",
        "group 1: t 1000, lr 0.001 x 1.0, betas (0.9, 0.999), eps 1e-8, weight decay 0.0",
        "loss scaler: scale 512, 7 good steps since it moved, backs off after 1 bad ones",
        "tensors: 5, of 62 elements; a whole",
        "embed.table    [7, 3]  0      all",
        "first.bias     [5]     1      all",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "no line {line:?} in {printed}");
    }
    let whole = gatherflow::State::open(&out).unwrap();
    assert_eq!(whole.tensors[4].pieces[0].master[6].to_bits(), 5006.5_f32.to_bits());
    refused(&import, "buckets.pt: chunk 0, `param` has 2 buckets, and 1 by the model on 4 ranks with one bucket");
    refused(&[&import[..], &["--bucket-size", "16", "--scaler", "512,7"]].concat(), "three numbers");
    refused(&[&import[..], &["--bucket-size", "16", "--scaler", "inf,7,1"]].concat(), "finite and above 0");
    refused(&[&import[..], &["--bucket-size", "0"]].concat(), "bucket");
    assert!(gatherflow::State::open(&out).is_ok(), "what was refused left the file as it was");
    refused(&["import", golden], "--model");
    refused(
        &["import", &model, "--model", &model, "--ranks", "4", "--step", "1", "--out", &out],
        "is no file of torch.save",
    );
    refused(&["import", golden, "--model", golden, "--ranks", "4", "--step", "1", "--out", &out], "buckets.pt: ");
    let nowhere = ["import", golden, "--model", &model, "--ranks", "4", "--step", "1", "--bucket-size", "16"];
    refused(
        &[&nowhere[..], &["--out", "/nowhere/state.safetensors"]].concat(),
        "/nowhere/state.safetensors: cannot be written",
    );
}

#[test]
fn state_tells_a_part_from_a_whole_and_refuses_other_files() {
    let out = file("part.safetensors", "");
    let mut model = gatherflow::Model::new();
    let chunk = model.chunk();
    let unit = model.unit(chunk, "layer").unwrap();
    model.param(unit, "layer.weight", &[10, 20], gatherflow::DType::Bf16).unwrap();
    let ranks = gatherflow::Ranks::local(2).unwrap();
    std::thread::scope(|scope| {
        for rank in ranks {
            let (model, out) = (model.clone(), out.clone());
            scope.spawn(move || {
                let first = rank.rank() == 0;
                let config = gatherflow::Config::new().adam_w(false);
                let mut engine = gatherflow::Engine::new(rank, model, config, |_, out| out.fill_with(|_| 1.0)).unwrap();
                let part = engine.state().unwrap();
                if first {
                    part.save(out).unwrap();
                }
                engine.close().unwrap();
            });
        }
    });
    let printed = String::from_utf8(gatherflow(&["state", &out]).stdout).unwrap();
    for line in [
        "loss scaler: none",
        "group 0: t 0, lr 0.001 x 1.0, betas (0.9, 0.999), eps 1e-8, weight decay 0.01 in the gradient",
        "tensors: 1, of 200 elements; a part, 128 of them: merge it with those of all ranks",
        "layer.weight  [10, 20]  0      0..128",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "no line {line:?} in {printed}");
    }
    refused(&["state", "/nowhere/state.safetensors"], "/nowhere/state.safetensors: cannot be read");
    refused(&["state", &file("no_state.toml", "ranks = 4")], "no_state.toml: is no safetensors file");
    refused(&["state"], "<FILE>");
}
