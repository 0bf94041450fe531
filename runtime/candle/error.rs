//! Errors of the engine on their way through candle.

use candle_core::Error as CandleError;

use crate::error::Error;

/// Wraps an error of the engine so that [`cause`] finds it again.
pub(super) fn lift(error: Error) -> CandleError {
    let context = error.to_string();
    CandleError::WrappedContext { wrapped: Box::new(error), context }
}

/// The error of the engine inside an error of candle, or candle's own as a misuse with it as the source.
pub(super) fn lower(error: CandleError) -> Error {
    match cause(&error) {
        Some(inner) => inner.clone(),
        None => Error::misuse(error.to_string()).because(error),
    }
}

/// Lets `?` carry errors of the engine through functions that return candle's [`candle_core::Result`]; [`cause`] finds
/// them again.
impl From<Error> for CandleError {
    fn from(error: Error) -> Self {
        lift(error)
    }
}

/// The error of the engine inside an error of candle, if that is what stopped an operation.
///
/// A caller that gets `Some` handles it like any other error of the engine (it may be fatal); `None` means that candle
/// itself or a shape was wrong.
pub fn cause(error: &CandleError) -> Option<&Error> {
    match error {
        CandleError::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
        CandleError::Context { inner, .. }
        | CandleError::WithPath { inner, .. }
        | CandleError::WithBacktrace { inner, .. } => cause(inner),
        _ => None,
    }
}
