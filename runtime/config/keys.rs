//! The table of keys: name, values, default, meaning, and how a TOML value gets into the config.
//!
//! One row per key and nothing about keys elsewhere, so that the documentation cannot drift from what is read.

use std::fmt::Write;
use std::time::Duration;

use toml::Value;

use super::{Config, Credits, Layout, ScalerKind, Unused};
use crate::actors::{Average, DType, FirstGather, Link, NormType, OnNonFinite, Overlap, Skip, StartParams, Storage};

/// One configuration key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Key {
    /// As written in TOML; a dot means a table.
    pub name: &'static str,
    /// What it can be.
    pub values: &'static str,
    /// What it is when left out.
    pub default: &'static str,
    /// What it does and who reads it.
    pub help: &'static str,
    /// Stores a value; `None` if it does not fit.
    pub(super) set: fn(&mut Config, &Value) -> Option<()>,
}

const SECONDS: &str = "seconds above 0 and below 1.8e19";

/// Every key, in the order in which one meets them.
pub const KEYS: &[Key] = &[
    Key {
        name: "ranks",
        values: "a number of ranks from 1",
        default: "as many as are started",
        help: "refuses to start with another number of ranks",
        set: |c, v| put(&mut c.ranks, count(v).map(Some)),
    },
    Key {
        name: "model_parallel",
        values: "a number of ranks from 1 that divides theirs",
        default: "1",
        help: "so many adjacent ranks share one copy of the model; parameters are divided among every so-many-th rank",
        set: |c, v| put(&mut c.model_parallel, count(v)),
    },
    Key {
        name: "pipeline_parallel",
        values: "a number of stages from 1 that divides model_parallel",
        default: "1",
        help: "the ranks that share a copy of the model are so many pipeline stages, each with chunks of its own",
        set: |c, v| put(&mut c.pipeline_parallel, count(v)),
    },
    Key {
        name: "device",
        values: "\"cpu\" or \"null\"",
        default: "\"cpu\"",
        help: "where the work runs; null only logs it: every step has the verdict of a script (updated, unless tests give \
               another), so what ranks say of a step, or a request to stop, is not heard there",
        set: |c, v| put(&mut c.device, one_of(v, &["cpu", "null"])),
    },
    Key {
        name: "transport",
        values: "\"local\"",
        default: "\"local\"",
        help: "what carries collectives; local: ranks are threads of one process",
        set: |c, v| put(&mut c.transport, one_of(v, &["local"])),
    },
    Key {
        name: "emulate",
        values: "bandwidth and latency such as \"1gbit,200us\"",
        default: "no emulated link",
        help: "every rank's collectives share a link of this speed; not with one rank, not on the null device",
        set: |c, v| put(&mut c.emulate, Link::parse(v.as_str()?).ok().map(Some)),
    },
    Key {
        name: "overlap",
        values: "\"none\", \"chain\" or \"window\"",
        default: "\"window\"",
        help: "when parameters are gathered: all before step returns, one after the other in forward, or ahead of forward \
               as far as credits reach",
        set: |c, v| {
            c.overlap = match v.as_str()? {
                "none" => Overlap::None,
                "chain" => Overlap::Chain,
                "window" => Overlap::Window,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "credits",
        values: "a number of buckets from 1 to 4294967294, or \"unlimited\"",
        default: "3",
        help: "how far gathers run ahead of what forward has entered; overlap window only",
        set: |c, v| {
            c.credits = match v {
                Value::String(s) if s == "unlimited" => Credits::Unlimited,
                _ => Credits::Buckets(u32::try_from(count(v)?).ok().filter(|n| *n < u32::MAX)?),
            };
            Some(())
        },
    },
    Key {
        name: "credits_bytes",
        values: "a number of bytes from 1",
        default: "no bound but credits",
        help: "how many bytes gathers run ahead of what forward has entered; a bucket above it is gathered on demand only; \
               overlap window only",
        set: |c, v| put(&mut c.credits_bytes, count(v).map(|n| Some(n as u64))),
    },
    Key {
        name: "first_gather",
        values: "\"step\", \"zero_grad\" or \"forward\"",
        default: "\"step\"",
        help: "where the first gathers of new parameters may start: with the end of the step, at zero_grad, or when forward \
               enters a unit; what is demanded starts all the same; overlap chain and window only",
        set: |c, v| {
            c.first_gather = match v.as_str()? {
                "step" => FirstGather::Step,
                "zero_grad" => FirstGather::ZeroGrad,
                "forward" => FirstGather::Forward,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "gather_group_bytes",
        values: "a number of bytes from 1",
        default: "every bucket by itself",
        help: "neighbours in gather order are gathered in one call of at most this many bytes, which pays one latency; a call is \
               demanded and let go as a whole",
        set: |c, v| put(&mut c.gather_group_bytes, count(v)),
    },
    Key {
        name: "overlap_grad_reduce",
        values: "true or false",
        default: "true",
        help: "reduce a bucket as soon as its gradients are complete, or all of them in step",
        set: |c, v| put(&mut c.overlap_grad_reduce, v.as_bool()),
    },
    Key {
        name: "skip",
        values: "\"host\" or \"device\"",
        default: "\"host\"",
        help: "who decides that a step is skipped: the host, before it lets gathers go (a skipped step has none), or the device, \
               so that the host waits for no verdict (gathers of a skipped step move unchanged bytes); same bits",
        set: |c, v| {
            c.skip = match v.as_str()? {
                "host" => Skip::Host,
                "device" => Skip::Device,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "grad_dtype",
        values: "\"f32\", \"bf16\" or \"f16\"",
        default: "\"f32\"",
        help: "element type of gradients, in memory and on the wire, of parameters that do not set their own: f32 or the \
               parameter's own type, any for f32 parameters; sums over ranks are f32",
        set: |c, v| put(&mut c.grad_dtype, DType::parse(v.as_str()?)),
    },
    Key {
        name: "bucket_size",
        values: "a number of elements from 1; not together with num_buckets",
        default: "max(40 000 000, 1 000 000 x d), d being ranks / model_parallel",
        help: "a bucket closes once it holds this many elements; parameters are never split",
        set: |c, v| put(&mut c.bucket_size, count(v).map(Some)),
    },
    Key {
        name: "num_buckets",
        values: "a number of buckets from 1; not together with bucket_size",
        default: "by bucket_size",
        help: "cut so that there are about this many buckets; there may be fewer",
        set: |c, v| put(&mut c.num_buckets, count(v).map(Some)),
    },
    Key {
        name: "layout",
        values: "\"standard\" or \"reference\"",
        default: "\"standard\"",
        help: "parameters start at multiples of 64 elements and buckets end at multiples of lcm(d, 128), or without gaps and at \
               multiples of d, as in files of Megatron-LM's distributed optimizer; d is ranks / model_parallel, or the number of \
               ranks of the shard group that a parameter names",
        set: |c, v| {
            c.layout = match v.as_str()? {
                "standard" => Layout::Standard,
                "reference" => Layout::Reference,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "bandwidth_alignment",
        values: "true or false",
        default: "false",
        help: "align bucket ends to 65 536 elements, as NCCL likes it; layout standard only",
        set: |c, v| put(&mut c.bandwidth_alignment, v.as_bool()),
    },
    Key {
        name: "storage",
        values: "\"views\" or \"shared\"",
        default: "\"views\"",
        help: "where gathers land: in the model's parameters, or in the memory of their gradients, from where they are copied out \
               while the gradients are zeroed; same bits. `plan` prints the memory of both: views takes less. Choose shared \
               where no gather may write to what the model reads; not with gradients smaller than their parameters",
        set: |c, v| {
            c.storage = match v.as_str()? {
                "views" => Storage::Views,
                "shared" => Storage::Shared,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "lr",
        values: "a number from 0, below 3.4e38",
        default: "0.001",
        help: "learning rate of groups that do not set their own, until set_lr",
        set: |c, v| put(&mut c.lr, number(v, 0.0..f64::from(f32::MAX))),
    },
    Key {
        name: "betas",
        values: "two numbers in [0, 1)",
        default: "[0.9, 0.999]",
        help: "decay of Adam's moments, for groups that do not set their own",
        set: |c, v| match v.as_array()?.as_slice() {
            [a, b] => put(&mut c.betas, number(a, 0.0..1.0).zip(number(b, 0.0..1.0))),
            _ => None,
        },
    },
    Key {
        name: "eps",
        values: "a number from 1.2e-38, below 3.4e38",
        default: "1e-8",
        help: "added to the root of the second moment, for groups that do not set their own",
        set: |c, v| put(&mut c.eps, number(v, f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX))),
    },
    Key {
        name: "weight_decay",
        values: "a number from 0, below 3.4e38",
        default: "0.01",
        help: "weight decay of groups that do not set their own",
        set: |c, v| put(&mut c.weight_decay, number(v, 0.0..f64::from(f32::MAX))),
    },
    Key {
        name: "adam_w",
        values: "true or false",
        default: "true",
        help: "decoupled weight decay; false adds it to the gradient",
        set: |c, v| put(&mut c.adam_w, v.as_bool()),
    },
    Key {
        name: "max_norm",
        values: "a finite number from 0; 0 turns clipping off",
        default: "1.0",
        help: "gradients are scaled down to this norm; not on the null device",
        set: |c, v| put(&mut c.max_norm, number(v, 0.0..f64::INFINITY)),
    },
    Key {
        name: "norm_type",
        values: "a power from 0.1 to 7, or \"inf\"",
        default: "2",
        help: "which norm of the gradients is told and clipped by: the root of the sum of powers, or the largest absolute value; \
               1, 2 and inf cost one fast read, others much more arithmetic. Not any power: beyond 7 those of f32 gradients \
               overflow f64, below 0.1 the root does. Not on the null device",
        set: |c, v| {
            c.norm_type = match v {
                Value::String(s) if s == "inf" => NormType::Inf,
                Value::Float(p) if *p == f64::INFINITY => NormType::Inf,
                _ => NormType::P(power(v)?),
            };
            Some(())
        },
    },
    Key {
        name: "average",
        values: "\"ranks\" or \"weight\"",
        default: "\"ranks\"",
        help: "divide summed gradients by the number of ranks, or by the sum of the weights they give to set_weight; \
               not on the null device",
        set: |c, v| {
            c.average = match v.as_str()? {
                "ranks" => Average::Ranks(1),
                "weight" => Average::Weight,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "on_nonfinite",
        values: "\"skip\" or \"error\"",
        default: "\"skip\"",
        help: "what a gradient with inf or nan, or one above 2^63 once averaged and clipped, does besides skipping the step; \
               without a scaler only, not on the null device",
        set: |c, v| {
            c.on_nonfinite = match v.as_str()? {
                "skip" => OnNonFinite::Skip,
                "error" => OnNonFinite::Error,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "check_for_nan_in_grad",
        values: "true or false",
        default: "false",
        help: "look at each rank's own gradients before they are reduced, and skip the step with an error that names rank, bucket \
               and parameter of one with inf or nan; costs one more read of all gradients; without a scaler only, not on the \
               null device",
        set: |c, v| put(&mut c.check_for_nan_in_grad, v.as_bool()),
    },
    Key {
        name: "unused",
        values: "\"zero\" or \"error\"",
        default: "\"zero\"",
        help: "what a trainable parameter without a gradient counts as; not on the null device",
        set: |c, v| {
            c.unused = match v.as_str()? {
                "zero" => Unused::Zero,
                "error" => Unused::Error,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "scaler.kind",
        values: "\"none\", \"constant\" or \"dynamic\"",
        default: "\"none\"",
        help: "loss scaler; f16 parameters need one. `scaler = \"dynamic\"` is short for it",
        set: |c, v| {
            c.scaler = match v.as_str()? {
                "none" => ScalerKind::None,
                "constant" => ScalerKind::Constant,
                "dynamic" => ScalerKind::Dynamic,
                _ => return None,
            };
            Some(())
        },
    },
    Key {
        name: "scaler.scale",
        values: "a number from 1.2e-38, below 3.4e38",
        default: "65536",
        help: "the scale of the constant scaler",
        set: |c, v| put(&mut c.scale, scale(v)),
    },
    Key {
        name: "scaler.initial",
        values: "a number from 1.2e-38, below 3.4e38, at least scaler.min",
        default: "4294967296",
        help: "the first scale of the dynamic scaler",
        set: |c, v| put(&mut c.initial, scale(v)),
    },
    Key {
        name: "scaler.min",
        values: "a number from 1.2e-38, below 3.4e38",
        default: "1",
        help: "the smallest scale of the dynamic scaler; not on the null device",
        set: |c, v| put(&mut c.min, scale(v)),
    },
    Key {
        name: "scaler.growth",
        values: "a number from 1, below 3.4e38",
        default: "2",
        help: "factor on the dynamic scale after `interval` good steps; not on the null device",
        set: |c, v| put(&mut c.growth, number(v, 1.0..f64::from(f32::MAX))),
    },
    Key {
        name: "scaler.backoff",
        values: "a number above 0 and below 1",
        default: "0.5",
        help: "factor on the dynamic scale after `hysteresis` bad steps; not on the null device",
        set: |c, v| put(&mut c.backoff, number(v, f64::from(f32::MIN_POSITIVE)..1.0)),
    },
    Key {
        name: "scaler.interval",
        values: "a number of steps from 1 to 4294967295",
        default: "1000",
        help: "good steps in a row before the dynamic scale grows; not on the null device",
        set: |c, v| put(&mut c.interval, u32::try_from(count(v)?).ok()),
    },
    Key {
        name: "scaler.hysteresis",
        values: "a number of steps from 1 to 2147483647",
        default: "2",
        help: "bad steps before the dynamic scale backs off; refilled by growth only",
        set: |c, v| put(&mut c.hysteresis, u32::try_from(count(v)?).ok().filter(|n| i32::try_from(*n).is_ok())),
    },
    Key {
        name: "steps_in_flight",
        values: "a number of steps from 1 to 64",
        default: "2",
        help: "step blocks while this many outcomes are unknown",
        set: |c, v| put(&mut c.steps_in_flight, u32::try_from(count(v)?).ok().filter(|n| *n <= 64)),
    },
    Key {
        name: "deadlines.start_up_s",
        values: SECONDS,
        default: "600",
        help: "how long ranks wait for each other at the start",
        set: |c, v| put(&mut c.start_up, seconds(v)),
    },
    Key {
        name: "deadlines.collective_s",
        values: SECONDS,
        default: "600",
        help: "how long a collective may take from the last sign of progress of the peer waited for",
        set: |c, v| put(&mut c.collective, seconds(v)),
    },
    Key {
        name: "deadlines.silence_s",
        values: SECONDS,
        default: "600",
        help: "how long a rank may be silent before it counts as lost",
        set: |c, v| put(&mut c.silence, seconds(v)),
    },
    Key {
        name: "check_order_every",
        values: "a number of steps; 0 never",
        default: "100",
        help: "ranks compare the order of their collectives",
        set: |c, v| put(&mut c.check_order_every, u64::try_from(v.as_integer()?).ok()),
    },
    Key {
        name: "start_params",
        values: "\"broadcast\" or \"check\"",
        default: "\"broadcast\"",
        help: "take rank 0's initial parameters, or refuse to start if they differ",
        set: |c, v| {
            c.start_params = match v.as_str()? {
                "broadcast" => StartParams::Broadcast,
                "check" => StartParams::Check,
                _ => return None,
            };
            Some(())
        },
    },
];

/// All keys as a Markdown table.
pub fn config_table() -> String {
    let mut text = String::from("| key | values | default | meaning |\n| --- | --- | --- | --- |\n");
    for key in KEYS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{}` | {} | {} | {} |", key.name, key.values, key.default, key.help);
    }
    text
}

fn put<T>(slot: &mut T, value: Option<T>) -> Option<()> {
    *slot = value?;
    Some(())
}

fn count(value: &Value) -> Option<usize> {
    usize::try_from(value.as_integer()?).ok().filter(|n| *n > 0)
}

fn number(value: &Value, range: std::ops::Range<f64>) -> Option<f64> {
    let number = match value {
        Value::Integer(n) => *n as f64,
        Value::Float(x) => *x,
        _ => return None,
    };
    range.contains(&number).then_some(number)
}

/// A power whose sums over f32 gradients fit f64.
fn power(value: &Value) -> Option<f64> {
    number(value, 0.0..f64::INFINITY).filter(|p| NormType::POWERS.contains(p))
}

/// A loss scale: it is an f32 on the device.
fn scale(value: &Value) -> Option<f64> {
    number(value, f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX))
}

fn seconds(value: &Value) -> Option<Duration> {
    Duration::try_from_secs_f64(number(value, f64::MIN_POSITIVE..f64::INFINITY)?).ok()
}

fn one_of(value: &Value, known: &[&str]) -> Option<String> {
    let name = value.as_str()?;
    known.contains(&name).then(|| name.to_owned())
}
