//! The command line of gatherflow.
fn main() {}
