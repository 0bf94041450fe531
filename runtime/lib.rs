//! What a user embeds.
#![forbid(unsafe_code)]

mod actors;
mod config;
mod error;
mod model;

pub use actors::{
    Average, BucketId, DType, Element, Link, OnNonFinite, Overlap, ParamId, Plan, PlanError, StartParams, UnitId,
};
pub use config::{Config, ConfigError, Credits, KEYS, Key, ScalerKind, Unused, parse_link, table};
pub use error::{Error, ErrorKind};
pub use model::{ChunkId, Group, GroupId, Model, ModelError, ParamInfo, ParamOptions};
