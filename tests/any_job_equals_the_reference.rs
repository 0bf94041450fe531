//! Whatever is drawn (a model, ranks, buckets, a mode, forward orders, microbatches, skips, evaluations), every read, loss and
//! outcome, and all state at the end, have the bits of the plain serial optimizer.
//!
//! Draws follow one another for `GATHERFLOW_PROPERTY_SECONDS` (default 10). A failure prints its seed, and the job after it was
//! made as small as it goes; `GATHERFLOW_PROPERTY_SEED` begins with that one.
#![allow(clippy::unwrap_used)]

mod draw;
mod reference;
mod synthetic;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number")))
}

#[test]
fn any_model_order_and_mode_has_the_bits_of_the_serial_reference() {
    let limit = Duration::from_secs(variable("GATHERFLOW_PROPERTY_SECONDS").unwrap_or(10));
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let first = variable("GATHERFLOW_PROPERTY_SEED").unwrap_or_else(now);
    let start = Instant::now();
    let (mut jobs, mut updated, mut skipped) = (0_u64, 0, 0);
    let seen = std::cell::Cell::new((0, 0));
    while start.elapsed() < limit || jobs < 10 {
        let seed = first + jobs;
        let config = Config {
            cases: 1,
            failure_persistence: None,
            max_shrink_time: 20_000,
            max_shrink_iters: 400,
            ..Config::default()
        };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let result = runner.run(&draw::draws(), |draw| {
            seen.set(draw.check());
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(reason, draw)) => {
                panic!("GATHERFLOW_PROPERTY_SEED={seed} fails: {reason}\nthe smallest job found: {draw:#?}")
            }
            Err(error) => panic!("GATHERFLOW_PROPERTY_SEED={seed}: {error}"),
        }
        (jobs, updated, skipped) = (jobs + 1, updated + seen.get().0, skipped + seen.get().1);
    }
    println!("{jobs} jobs from seed {first}: {updated} steps updated, {skipped} skipped");
    // Of a few jobs, all may be of one kind.
    let shows = jobs < 50 || updated > skipped && skipped > 0;
    assert!(shows, "the draws show little: {updated} updated, {skipped} skipped");
}
