//! Arithmetic that takes a set time on an idle core: what a bench computes with.

use std::hint::black_box;
use std::time::Instant;

/// So many rounds of arithmetic take the time that it was calibrated for.
#[derive(Clone, Copy)]
pub(crate) struct Spin(u64);

impl Spin {
    /// One call of [`Spin::run`] takes so many seconds here, by the fastest of 20 trials.
    pub(crate) fn calibrate(seconds: f64) -> Self {
        let mut rounds = 1_000_000;
        let mut fastest = f64::MAX;
        for _ in 0..20 {
            let from = Instant::now();
            Self(rounds).run();
            let time = from.elapsed().as_secs_f64();
            fastest = fastest.min(time / rounds as f64);
            rounds = (seconds / fastest) as u64;
        }
        Self(rounds)
    }

    pub(crate) fn run(self) {
        let mut x = 1_u64;
        for _ in 0..self.0 {
            x = black_box(x).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        }
        black_box(x);
    }
}
