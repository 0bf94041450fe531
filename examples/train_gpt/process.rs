//! Settings that are read from the environment when a process starts.
//!
//! - One thread per rank for tensor libraries: ranks fight for cores otherwise.
//! - glibc's allocator gives the activations back to the system at the end of each step and faults them in again in the
//!   next one, unless it is told to keep them.
//!
//! Both must be there before `main`, so the program starts itself once more where they are missing. What the user set
//! stays. Elsewhere than on unix nothing happens.

use std::io::Write;

/// Names and values; the first is also the mark that this was done.
#[cfg(unix)]
const WANTED: [(&str, &str); 6] = [
    ("GATHERFLOW_TRAIN_GPT_SETTLED", "1"),
    ("RAYON_NUM_THREADS", "1"),
    ("CANDLE_NUM_THREADS", "1"),
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "1073741824"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
];

/// Starts the program again with the environment it wants, if it has not got it. Carries on as it is where that fails.
#[cfg(unix)]
pub(crate) fn settle() {
    use std::os::unix::process::CommandExt;
    if std::env::var_os(WANTED[0].0).is_some() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let missing = WANTED.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let error = std::process::Command::new(program).args(std::env::args_os().skip(1)).envs(missing.copied()).exec();
    say(&format!("warning: the program could not be started with its settings ({error}); it will be slower"));
}

/// Nothing to do here.
#[cfg(not(unix))]
pub(crate) fn settle() {}

/// A line on standard error. Where nobody can read it, training goes on.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
