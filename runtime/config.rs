//! What a user can choose: [`Config`], from TOML, from the environment or by builder.
//!
//! Every key is in [`KEYS`], with its values, default and meaning; the README's table and `gatherflow --help` are printed
//! from there. A config remembers which keys were set **explicitly**: one that the chosen device or mode never reads is an
//! error at start-up (rule K1), while defaults never are. Unknown keys are refused by name, with the nearest one as a hint.

mod builder;
mod check;
mod keys;
mod parse;
mod variables;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::actors::{Average, DType, FirstGather, Link, NormType, OnNonFinite, Overlap, Skip, StartParams, Storage};
pub use keys::{KEYS, Key, config_table};

/// How far gathers may run ahead of what the executor has demanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Credits {
    /// At most this many buckets.
    Buckets(u32),
    /// As far as there is something to gather.
    Unlimited,
}

/// What happens to a step in which a trainable parameter got no gradient (SPEC P7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unused {
    /// Its gradient counts as zero.
    Zero,
    /// Every rank skips the step and returns an error that names it.
    Error,
}

/// How parameters lie in their buffers (SPEC L5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Parameters at multiples of 64 elements, bucket ends at multiples of lcm(ranks, 128).
    Standard,
    /// Without gaps, bucket ends at multiples of the number of ranks: as in files of Megatron-LM's distributed optimizer of
    /// November 2023.
    Reference,
}

/// Which loss scaler (SPEC T5, T6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScalerKind {
    /// No loss scale.
    None,
    /// The scale never moves.
    Constant,
    /// The scale grows while gradients stay finite and backs off when they do not.
    Dynamic,
}

/// The choices of one run. The same on every rank.
///
/// ```
/// use gatherflow::Config;
///
/// let config = Config::from_toml("overlap = \"window\"\ncredits = 4\nnum_buckets = 12")?;
/// assert!(Config::from_toml("credit = 4").unwrap_err().to_string().contains("did you mean `credits`?"));
/// # Ok::<(), gatherflow::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)]
pub struct Config {
    pub(crate) explicit: BTreeSet<&'static str>,
    pub(crate) ranks: Option<usize>,
    pub(crate) model_parallel: usize,
    pub(crate) pipeline_parallel: usize,
    pub(crate) device: String,
    pub(crate) transport: String,
    pub(crate) emulate: Option<Link>,
    pub(crate) overlap: Overlap,
    pub(crate) credits: Credits,
    pub(crate) credits_bytes: Option<u64>,
    pub(crate) first_gather: FirstGather,
    pub(crate) overlap_grad_reduce: bool,
    pub(crate) skip: Skip,
    pub(crate) grad_dtype: DType,
    pub(crate) bucket_size: Option<usize>,
    pub(crate) num_buckets: Option<usize>,
    /// 0: every bucket by itself.
    pub(crate) gather_group_bytes: usize,
    pub(crate) layout: Layout,
    pub(crate) bandwidth_alignment: bool,
    pub(crate) storage: Storage,
    pub(crate) lr: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) adam_w: bool,
    pub(crate) max_norm: f64,
    pub(crate) norm_type: NormType,
    pub(crate) average: Average,
    pub(crate) on_nonfinite: OnNonFinite,
    pub(crate) check_for_nan_in_grad: bool,
    pub(crate) unused: Unused,
    pub(crate) scaler: ScalerKind,
    pub(crate) scale: f64,
    pub(crate) initial: f64,
    pub(crate) min: f64,
    pub(crate) growth: f64,
    pub(crate) backoff: f64,
    pub(crate) interval: u32,
    pub(crate) hysteresis: u32,
    pub(crate) steps_in_flight: u32,
    pub(crate) start_up: Duration,
    pub(crate) collective: Duration,
    pub(crate) silence: Duration,
    pub(crate) check_order_every: u64,
    pub(crate) start_params: StartParams,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            explicit: BTreeSet::new(),
            ranks: None,
            model_parallel: 1,
            pipeline_parallel: 1,
            device: "cpu".into(),
            transport: "local".into(),
            emulate: None,
            overlap: Overlap::Window,
            credits: Credits::Buckets(3),
            credits_bytes: None,
            first_gather: FirstGather::Step,
            overlap_grad_reduce: true,
            skip: Skip::Host,
            grad_dtype: DType::F32,
            bucket_size: None,
            num_buckets: None,
            gather_group_bytes: 0,
            layout: Layout::Standard,
            bandwidth_alignment: false,
            storage: Storage::Views,
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.01,
            adam_w: true,
            max_norm: 1.0,
            norm_type: NormType::P(2.0),
            average: Average::Ranks(1),
            on_nonfinite: OnNonFinite::Skip,
            check_for_nan_in_grad: false,
            unused: Unused::Zero,
            scaler: ScalerKind::None,
            scale: 65536.0,
            initial: 4_294_967_296.0,
            min: 1.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 1000,
            hysteresis: 2,
            steps_in_flight: 2,
            start_up: Duration::from_mins(10),
            collective: Duration::from_mins(10),
            silence: Duration::from_mins(10),
            check_order_every: 100,
            start_params: StartParams::Broadcast,
        }
    }
}

/// A configuration was refused. Each message names the key and says what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {reason}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The contents of a file do not fit.
    #[error("{}: {reason}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What does not fit.
        reason: Box<ConfigError>,
    },
    /// The text is not TOML.
    #[error("the configuration is not valid TOML: {reason}")]
    Syntax {
        /// What the parser said, with the line.
        reason: String,
    },
    /// No such key.
    #[error("unknown configuration key `{key}`; {hint}")]
    UnknownKey {
        /// The key as it was given.
        key: String,
        /// The nearest key, or all of them.
        hint: String,
    },
    /// An environment variable of this project's that names no key.
    #[error("unknown environment variable `{name}`; {hint}")]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The nearest variable, or how they are named.
        hint: String,
    },
    /// The value of an environment variable does not fit.
    #[error("environment variable `{name}`: {reason}")]
    Variable {
        /// The variable.
        name: String,
        /// What does not fit.
        reason: Box<ConfigError>,
    },
    /// A value of the wrong type or out of range.
    #[error("configuration key `{key}` = {value}: expected {expected}")]
    BadValue {
        /// Which key.
        key: String,
        /// What was given.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// TOML has several ways to write a key, and two of them were used.
    #[error("configuration key `{key}` sets what another line has set already: leave one of them out")]
    Twice {
        /// The key, or its table.
        key: String,
    },
    /// Two keys that exclude each other.
    #[error("configuration keys `{first}` and `{second}` exclude each other: leave one of them out")]
    Conflict {
        /// One of them.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A key was set that nothing reads (rule K1).
    #[error("configuration key `{key}` is set but never read: {reason}; leave it out")]
    Dead {
        /// Which key.
        key: &'static str,
        /// Why nothing reads it.
        reason: String,
    },
    /// `f16` gradients underflow without a loss scale (SPEC T6).
    #[error("parameter `{param}` {what}, which needs a loss scaler: set `scaler = \"dynamic\"` or use bf16")]
    F16WithoutScaler {
        /// The first such parameter.
        param: String,
        /// `is f16` or `has f16 gradients`.
        what: &'static str,
    },
    /// The job is of another size than the configuration says.
    #[error(
        "configuration key `ranks` = {configured}, but {started} ranks were started: make them equal or leave the key out"
    )]
    Ranks {
        /// What the key says.
        configured: usize,
        /// How many there are.
        started: usize,
    },
    /// The ranks were made with another link than the configuration says.
    #[error(
        "configuration key `emulate` differs from the link that the ranks were made with: make them with `Ranks::with_config`"
    )]
    LinkDiffers,
}
