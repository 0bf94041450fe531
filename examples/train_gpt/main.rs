//! Trains a byte-level GPT on real text with two ranks in one process, its gathers hidden under the forward pass.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --emulate 1gbit,200us --overlap none --json out.json
//! ```
//!
//! Exit codes: 0; 1 where the run itself failed; 2 where an argument, a file, the text or the configuration is refused.
//!
//! | module | idea |
//! | --- | --- |
//! | [`options`] | flags, and the configuration they make |
//! | [`text`] | the bytes to learn from, and reproducible batches of them |
//! | [`model`] | the GPT: what is registered, and the forward pass over the candle adapter |
//! | [`rank`] | one rank's thread: forward, backward, step |
//! | [`losses`] | the losses that ranks tell, made means |
//! | [`run`] | all ranks together: progress, the result |
//! | [`process`] | the environment that the process wants to run in, and its standard error |

mod losses;
mod model;
mod options;
mod process;
mod rank;
mod run;
mod text;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    process::settle();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match run::run(&options::Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(run::Failure::Refused(message)) => {
            process::say(&format!("error: {message}"));
            ExitCode::from(2)
        }
        Err(run::Failure::Broken(message)) => {
            process::say(&format!("error: {message}"));
            ExitCode::FAILURE
        }
    }
}
