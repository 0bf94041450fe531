//! One monotonic clock for all spans: nanoseconds since the first call in this process; and the end of a wait.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

static START: OnceLock<Instant> = OnceLock::new();

/// Nanoseconds since this process first asked for the time.
pub fn now_ns() -> u64 {
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// When a wait of at most `limit` from now is over. A limit beyond what the system's clock can tell is a hundred years.
pub fn deadline(limit: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_hours(24 * 365 * 100);
    let now = Instant::now();
    now.checked_add(limit).unwrap_or_else(|| now + LONGEST)
}
