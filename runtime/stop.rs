//! A wish to stop, from anywhere: another thread, or a signal handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks all ranks to stop. Get one from [`Engine::stop_flag`](crate::Engine::stop_flag); clones are the same flag.
///
/// The next step of its engine carries the wish to every rank, and all see it in the outcome of that same step
/// ([`Outcome::stop`](crate::Outcome::stop)). [`request`](Self::request) is one atomic store, so a signal handler may call
/// it on a flag that outlives it, one in a static, say; clone and drop belong outside of the handler.
///
/// ```
/// use std::sync::OnceLock;
///
/// static STOP: OnceLock<gatherflow::StopFlag> = OnceLock::new();
/// extern "C" fn on_signal(_signal: i32) {
///     if let Some(stop) = STOP.get() {
///         stop.request();
///     }
/// }
/// # let engine_stop_flag = gatherflow::StopFlag::default();
/// STOP.get_or_init(|| engine_stop_flag.clone()); // of engine.stop_flag()
/// on_signal(15);
/// assert!(engine_stop_flag.is_requested());
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Asks to stop. Async-signal-safe.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a wish waits for the next step.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// The wish, for the step that carries it.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}
