//! What the README says of configuration and commands is what the code does. Its example is a doc test of the library.
#![allow(missing_docs)]

const README: &str = include_str!("../README.md");

#[test]
fn the_configuration_table_is_the_code_s_own() {
    let table = gatherflow::config_table();
    assert!(README.contains(table.trim_end()), "put this table into README.md:\n{table}");
}

#[test]
fn the_two_commands_are_those_that_ci_runs() {
    let ci = include_str!("../.ci/run");
    for command in ["cargo test --workspace", "cargo run --release"] {
        assert!(README.contains(command) && ci.contains(command), "{command}");
    }
}
