//! A wish to stop, from anywhere: another thread, or a signal handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Asks all ranks to stop. Get one from [`Engine::stop_flag`](crate::Engine::stop_flag); clones are the same flag.
///
/// The next step of its engine carries the wish to every rank, and all see it in the outcome of that same step
/// ([`Outcome::stop`](crate::Outcome::stop)). Steps go on carrying it until an outcome has told it on the rank that asked: an
/// error about a step does not. [`request`](Self::request) is one atomic store, so a signal handler may call
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

    /// Whether there is a wish that no outcome has told yet.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The flag of an engine, and the first step that carried its wish.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    pub(crate) flag: StopFlag,
    carried: Mutex<Option<u64>>,
}

impl Wish {
    /// Whether this step carries a wish.
    pub(crate) fn carry(&self, step: u64) -> bool {
        let mut carried = self.carried.lock();
        let wished = self.flag.is_requested();
        if wished {
            carried.get_or_insert(step);
        }
        wished
    }

    /// The caller is about to see an outcome with a wish in it: it is this rank's, unless no step up to that one carried it.
    pub(crate) fn told(&self, step: u64) {
        let mut carried = self.carried.lock();
        if carried.is_some_and(|first| first <= step) {
            *carried = None;
            self.flag.0.store(false, Ordering::SeqCst);
        }
    }
}
