//! Who says when: the plan, the messages, one file per actor, the recorder.
//!
//! A rank's training step is a flow of messages between five kinds of actors. Each is a pure state machine (no clock, no
//! I/O, no async) inside a thin shell:
//!
//! | file | actor or idea |
//! | --- | --- |
//! | [`plan`] | the whole static layout: buffers, buckets, shards, places, the order of gathers |
//! | [`bucket`] | one per bucket: readiness of its parameters and gradients (rule V1) |
//! | [`prehook`] | where forward is; demand and credits (rule C1) |
//! | [`optimizer`], `copies` | sums over copies, norm, verdict, fused Adam |
//! | [`communicator`], [`sequence`] | the one order of all collectives (rules O1, O2) |
//! | [`supervisor`], [`control`] | the first cause, deadlines, and what ranks tell each other |
//! | [`busy`] | ranks that evaluate or save while others wait for them |
//! | [`action`] | what machines may ask for, and the edges E1 to E8 that every wait names |
//! | [`lowering`] | from names to `Work` over memory |
//! | [`face`] | readiness as the executor sees it: atomics and a place to park |
//! | [`session`] | one rank, running |
//!
//! Nothing here names a device or a transport.
#![forbid(unsafe_code)]

pub mod action;
pub mod bucket;
pub mod busy;
pub mod communicator;
pub mod control;
mod copies;
#[doc(hidden)]
pub mod drill;
pub mod face;
mod hands;
mod inline;
mod issuer;
pub mod lowering;
mod machines;
pub mod optimizer;
mod patience;
pub mod plan;
pub mod prehook;
mod recorder;
pub mod sequence;
pub mod session;
mod shell;
pub mod supervisor;

pub use action::{ActorName, Edge, StepOutcome};
pub use control::{Ranks, Seat};
pub use optimizer::{Group, LrRow, Skip};
pub use prehook::{Credits, FirstGather, Overlap};
pub use session::{Counters, Driver, Session, SessionConfig, StartParams, StepRequest, StepTimes};
pub use supervisor::Deadlines;
