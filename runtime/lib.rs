//! What a user embeds.
#![forbid(unsafe_code)]

mod actors;
mod config;
mod engine;
mod error;
mod gradients;
mod guard;
mod lr;
mod model;
mod outcome;
mod owned;
mod pass;
mod ranks;
mod report;
mod shared;

pub use gatherflow_actors::plan::{BucketId, ParamId, Plan, PlanError, UnitId};
pub use gatherflow_actors::{Counters, Overlap, StartParams, StepTimes};
pub use gatherflow_kernels::verdict::{Average, OnNonFinite};
pub use gatherflow_kernels::{DType, Element, Link};

pub use config::{Config, ConfigError, Credits, KEYS, Key, ScalerKind, Unused, table};
#[doc(hidden)]
pub use engine::Internals;
pub use engine::{Engine, ParamMut, Ready};
pub use error::{Error, ErrorKind};
pub use guard::{Grad, OwnedGrad, OwnedRead, Read, WriteMode};
pub use half::{bf16, f16};
pub use lr::Lr;
pub use model::{ChunkId, Group, GroupId, Model, ModelError, ParamInfo, ParamOptions};
pub use outcome::{Outcome, StepHandle};
pub use owned::OwnedPass;
pub use pass::{Back, Mode, Pass, UnitGuard};
pub use ranks::{Rank, Ranks};
pub use report::Report;
