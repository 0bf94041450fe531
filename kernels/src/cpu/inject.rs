//! What tests let go wrong, or be late, on a cpu device.

use std::sync::Arc;
use std::time::Duration;

use crate::work::Work;

/// What happens before a piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inject {
    /// Nothing: the work runs.
    Nothing,
    /// The stream sleeps first. Poison does not wake it: it is a stuck stream.
    Delay(Duration),
    /// The work fails, with this reason.
    Fail(String),
    /// The work panics.
    Panic,
}

/// Called before each piece of work, on the thread that runs it.
#[derive(Clone)]
pub struct BeforeWork(pub Arc<dyn Fn(&Work) -> Inject + Send + Sync>);

impl BeforeWork {
    /// From a function.
    pub fn new(hook: impl Fn(&Work) -> Inject + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }
}

impl std::fmt::Debug for BeforeWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BeforeWork(..)")
    }
}
