//! What a user embeds.

#[cfg(feature = "candle")]
pub mod candle;
