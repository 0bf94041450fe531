//! Who says when: the plan, the messages, one file per actor, the recorder.
#![forbid(unsafe_code)]

pub mod plan;
