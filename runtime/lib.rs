//! Data-parallel training whose communication hides behind compute: what a user embeds.
//!
//! Each rank keeps 1/d of the optimizer state (ZeRO-1). Gradients are reduced bucket by bucket while backward still runs,
//! each rank updates its shard with one fused Adam pass, and the new parameters are gathered bucket by bucket while the
//! next forward already runs. Readiness belongs to the parameter: reading one at an old version is impossible.
//!
//! Bring your own model code. Register its parameters in forward order ([`Model`]), start one [`Engine`] per rank, and in
//! each microbatch enter the units of a [`Pass`], read parameters, write gradients; then [`step`](Engine::step).
//!
//! ```
//! use gatherflow::{Config, DType, Engine, Error, Mode, Model, Rank, Ranks};
//!
//! fn train(rank: Rank) -> Result<u64, Error> {
//!     let mut model = Model::new();
//!     let chunk = model.chunk();
//!     let unit = model.unit(chunk, "layer")?;
//!     let w = model.param(unit, "layer.weight", &[4, 4], DType::F32)?;
//!     let mut engine = Engine::new(rank, model, Config::new(), |_param, memory| memory.fill_with(|_| 0.5))?;
//!     for _step in 0..3 {
//!         let pass = engine.pass(chunk, 0, true, Mode::Train)?; // microbatch 0 is the last one of this step
//!         let weight = pass.enter(unit)?.read::<f32>(w)?.to_vec(); // waits for this unit's parameters only
//!         let back = pass.backward(unit)?; // forward and loss are yours
//!         let mut gradient = back.grad::<f32>(w)?; // the gradient's own memory; the first write overwrites
//!         gradient.copy_from_slice(&weight);
//!         gradient.complete();
//!         back.leave()?; // complete: its reduction starts, while the rest of backward would still run
//!         assert!(engine.step()?.outcome()?.updated);
//!     }
//!     let hash = engine.params_hash();
//!     engine.close()?;
//!     hash
//! }
//!
//! let ranks: Vec<_> = Ranks::local(2)?.into_iter().map(|rank| std::thread::spawn(|| train(rank))).collect();
//! let hashes: Result<Vec<u64>, Error> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
//! assert!(hashes?.windows(2).all(|pair| pair[0] == pair[1]));
//! # Ok::<(), Error>(())
//! ```
//!
//! | to | see |
//! | --- | --- |
//! | describe the model | [`Model`], [`ParamOptions`], [`Group`], [`Lr`] |
//! | choose | [`Config`], [`KEYS`] (all keys with their defaults) |
//! | run | [`Ranks`], [`Engine`], [`Pass`], [`Read`], [`Grad`], [`StepHandle`], [`Outcome`] |
//! | write an adapter that needs `'static` | [`OwnedPass`], [`OwnedRead`], [`OwnedGrad`] |
//! | stop all ranks together, or keep them waiting | [`StopFlag`], [`Busy`] |
//! | take the optimizer's state, and go on from it on any number of ranks | [`State`], [`Engine::state`], [`Engine::load_state`] |
//! | keep it in a file, or take it from one of Megatron-LM | [`State::save`], [`State::open`], `MegatronFile` (feature `torch`) |
//! | know what went wrong | [`Error`], [`ErrorKind`] |
//! | know whether it overlaps | [`Report`], [`Counters`] |
//!
//! Logs go through `tracing` under targets `gatherflow::*`; nothing is printed. Nothing here names a device or a
//! transport: the configuration does.
#![forbid(unsafe_code)]

mod actors;
#[cfg(feature = "candle")]
pub mod candle;
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
mod state;
mod stop;

pub use gatherflow_actors::busy::Busy;
pub use gatherflow_actors::plan::{Across, BucketId, ParamId, Plan, PlanError, Storage, SumOver, UnitId};
pub use gatherflow_actors::{Counters, FirstGather, Overlap, Skip, StartParams, StepTimes};
pub use gatherflow_kernels::norm::NormType;
pub use gatherflow_kernels::verdict::{Average, OnNonFinite};
pub use gatherflow_kernels::{DType, Element, Link};

pub use config::{Config, ConfigError, Credits, KEYS, Key, Layout, ScalerKind, Unused, config_table};
#[doc(hidden)]
pub use engine::Internals;
pub use engine::{Engine, ParamMut, Ready, Swapped};
pub use error::{Error, ErrorKind};
pub use guard::{Grad, OwnedGrad, OwnedRead, Read, WriteMode};
pub use half::{bf16, f16};
pub use lr::Lr;
pub use model::{ChunkId, Group, GroupId, Model, ModelError, ParamInfo, ParamOptions, ShardGroup, ShardGroupId};
pub use outcome::{Outcome, StepHandle};
pub use owned::OwnedPass;
pub use pass::{Back, Mode, Pass, UnitGuard};
pub use ranks::{Rank, Ranks};
pub use report::Report;
pub use state::{
    GroupState, Part, Piece, ScalerState, State, StateError, StateFileError, StateFileProblem, TensorState,
};
#[cfg(feature = "torch")]
pub use state::{MegatronFile, MegatronProblem};
pub use stop::StopFlag;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
