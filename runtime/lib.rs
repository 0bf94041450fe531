//! What a user embeds.
