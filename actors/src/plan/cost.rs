//! Counts how often the plan's loops touch a parameter or a bucket, in tests only: rule L11 is about counts, not times.

#[cfg(test)]
thread_local! {
    static TICKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// One parameter or bucket was touched.
#[inline]
pub(super) fn tick() {
    #[cfg(test)]
    TICKS.with(|t| t.set(t.get() + 1));
}

/// How many were touched on this thread while `f` ran.
#[cfg(test)]
pub(super) fn count<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = TICKS.get();
    let out = f();
    (out, TICKS.get() - before)
}
