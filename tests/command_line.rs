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
    refused(&["plan", &file("syntax.toml", "[[chunk")], "syntax.toml");
    refused(&["plan", &file("no_units.toml", "chunk = []")], "no units");
    let config = file("bad_config.toml", "credits = 0");
    refused(&["plan", "--gpt", "1,8,8", "--config", &config], "`credits` = 0");
}
