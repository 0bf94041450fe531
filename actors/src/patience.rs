//! How long a thread looks for what it waits for before it parks.
//!
//! Waking a parked thread costs both sides 10 to 40 us where the core had gone idle. Who was answered within less than that
//! last time looks for that long; who was not, and would only take time from whoever computes, looks a moment and parks.

use std::sync::atomic::{AtomicBool, Ordering};

use gatherflow_kernels::clock::now_ns;

/// Polls between two looks at the clock, and all of them where answers take long.
const POLLS: u32 = 64;

/// An answer within this time is worth waiting for awake, in nanoseconds: two wakes of an idle core.
const QUICK_NS: u64 = 100_000;

/// What one waiter knows about the answers it gets.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    quick: AtomicBool,
}

impl Patience {
    /// Polls until there is a value, but not longer than is worth it.
    pub(crate) fn look<T>(&self, poll: impl Fn() -> Option<T>) -> Option<T> {
        let mut until = None;
        loop {
            for _ in 0..POLLS {
                if let Some(value) = poll() {
                    return Some(value);
                }
                std::hint::spin_loop();
            }
            if !self.quick.load(Ordering::Relaxed) {
                return None;
            }
            let now = now_ns();
            if now >= *until.get_or_insert(now + QUICK_NS) {
                return None;
            }
            // Whoever is to answer may be waiting for this very core.
            std::thread::yield_now();
        }
    }

    /// After a look in vain the thread was parked from `since_ns` until now.
    pub(crate) fn parked(&self, since_ns: u64) {
        self.quick.store(now_ns() - since_ns < QUICK_NS, Ordering::Relaxed);
    }
}
