//! Start-up: from model and configuration to a running session.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};

use super::Engine;
use crate::actors::{
    self, Average, Cause, DType, Drill, Driver, Edge, Failure, FailureKind, Lease, LeaseError, OpenOptions, Overlap,
    Session,
};
use crate::config::{Config, ConfigError, Credits};
use crate::error::Error;
use crate::lr::Lr;
use crate::model::{Group, Model, ParamInfo};
use crate::ranks::Rank;
use crate::shared::Shared;

/// A parameter's own memory, to be given its initial values.
#[derive(Debug)]
#[non_exhaustive]
pub enum ParamMut<'a> {
    /// An f32 parameter.
    F32(&'a mut [f32]),
    /// A bf16 parameter.
    Bf16(&'a mut [bf16]),
    /// An f16 parameter.
    F16(&'a mut [f16]),
}

/// What tests and benchmarks may choose beyond the configuration. Device and transport come from the configuration.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Internals {
    /// Script and log of the null device, limits of the cpu device.
    pub open: OpenOptions,
    /// Who runs the machines.
    pub driver: Driver,
    /// An edge whose waits are left out.
    pub dropped_edge: Option<Edge>,
    /// What goes wrong, or is late, before a message.
    pub drill: Option<Drill>,
    /// How often to warn of a busy rank.
    pub busy_warning: Duration,
}

impl Default for Internals {
    fn default() -> Self {
        Self {
            open: OpenOptions::default(),
            driver: Driver::Actors,
            dropped_edge: None,
            drill: None,
            busy_warning: actors::BUSY_WARNING,
        }
    }
}

impl ParamMut<'_> {
    /// Sets every element to `value(index)`, rounded to the parameter's dtype.
    pub fn fill_with(self, mut value: impl FnMut(usize) -> f32) {
        match self {
            Self::F32(out) => out.iter_mut().enumerate().for_each(|(i, x)| *x = value(i)),
            Self::Bf16(out) => out.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(value(i))),
            Self::F16(out) => out.iter_mut().enumerate().for_each(|(i, x)| *x = f16::from_f32(value(i))),
        }
    }
}

impl Engine {
    /// Starts this rank: allocates, calls `init` once per parameter, meets the other ranks (model and configuration must
    /// agree), broadcasts rank 0's parameters (or checks that all agree) and makes the masters. Rank 0 logs what cannot help at
    /// this size, such as overlap with a single bucket ([`Plan::hints`](crate::Plan::hints)).
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) and [`ErrorKind::Model`](crate::ErrorKind::Model) name what is
    /// refused; [`ErrorKind::StartUp`](crate::ErrorKind::StartUp) names what ranks disagree about.
    pub fn new(
        rank: Rank,
        model: Model,
        config: Config,
        init: impl FnMut(&ParamInfo, ParamMut<'_>),
    ) -> Result<Self, Error> {
        Self::with_internals(rank, model, config, Internals::default(), init)
    }

    /// As [`Engine::new`], with what configuration does not have: for tests and benchmarks.
    ///
    /// # Errors
    /// As [`Engine::new`].
    #[doc(hidden)]
    pub fn with_internals(
        rank: Rank,
        mut model: Model,
        config: Config,
        internals: Internals,
        mut init: impl FnMut(&ParamInfo, ParamMut<'_>),
    ) -> Result<Self, Error> {
        let ranks = rank.ranks();
        let plan = Arc::new(model.plan_stage(config.stage_of(rank.rank()), ranks, &config)?);
        model.settle(&config);
        if config.is_explicit("emulate") && config.link() != rank.link {
            return Err(ConfigError::LinkDiffers.into());
        }
        let longest = config.collective.max(config.silence).saturating_mul(8);
        let wait_limit = internals.open.wait_limit.max(longest);
        let options = OpenOptions {
            wait_limit,
            device: config.device.clone(),
            transport: config.transport.clone(),
            ..internals.open
        };
        let number = rank.rank();
        let mut give = |param: actors::ParamId, lease: &mut Lease| {
            let info = &model.params()[param.index()];
            let out = param_memory(info.dtype, lease).map_err(|e| -> Cause {
                Arc::new(Failure::new(FailureKind::Device, number, format!("parameter `{}`: {e}", info.name)))
            })?;
            init(info, out);
            Ok(())
        };
        let session_config = actors::SessionConfig {
            driver: internals.driver,
            dropped_edge: internals.dropped_edge,
            drill: internals.drill,
            busy_warning: internals.busy_warning,
            ..session_config(&model, &config, plan.data_parallel())
        };
        let session = Session::start(rank.seat, plan, session_config, options, &mut give)?;
        tracing::info!(
            target: "gatherflow::engine",
            rank = number,
            ranks,
            params = model.params().len(),
            buckets = session.plan().buckets().len(),
            overlap = ?config.overlap,
            "engine started"
        );
        if number == 0 {
            for hint in session.plan().hints() {
                tracing::info!(target: "gatherflow::engine", rank = number, "{hint}");
            }
        }
        let lrs = model.groups.iter().map(|g| Lr::Value(g.lr.unwrap_or(config.lr))).collect();
        let known_t = vec![0; model.groups.len()];
        Ok(Self {
            shared: Arc::new(Shared::new(number, session, model)),
            config,
            lrs,
            weight: 1.0,
            unknown_from: 0,
            known_t,
            times: Vec::new(),
            resumed: (0, 0),
            kept: None,
            not_sync: PhantomData,
        })
    }
}

pub(super) fn param_memory(dtype: DType, lease: &mut Lease) -> Result<ParamMut<'_>, LeaseError> {
    Ok(match dtype {
        DType::Bf16 => ParamMut::Bf16(lease.as_mut_slice()?),
        DType::F16 => ParamMut::F16(lease.as_mut_slice()?),
        _ => ParamMut::F32(lease.as_mut_slice()?),
    })
}

/// Each rank updates its own part of every parameter, so learning rates that differ would go unnoticed.
fn learning_rates(model: &Model, config: &Config) -> Vec<(String, String)> {
    let line = |(number, group): (usize, &Group)| {
        let lr = group.lr.unwrap_or(config.lr);
        (format!("learning rate of group {number}"), format!("{lr} x {}", group.lr_multiplier))
    };
    model.groups.iter().enumerate().map(line).collect()
}

/// `d` is the number of data-parallel ranks.
fn session_config(model: &Model, config: &Config, d: usize) -> actors::SessionConfig {
    let buckets = match (config.overlap, config.credits) {
        (Overlap::Window, Credits::Buckets(n)) => n,
        (Overlap::Window, Credits::Unlimited) => u32::MAX,
        // Unread in the other modes.
        _ => 1,
    };
    let group = |g: &Group| actors::Group {
        betas: g.betas.unwrap_or(config.betas),
        eps: g.eps.unwrap_or(config.eps),
        weight_decay: g.weight_decay.unwrap_or(config.weight_decay),
        decoupled: config.adam_w,
    };
    actors::SessionConfig {
        overlap: config.overlap,
        credits: actors::Credits { buckets, bytes: config.credits_bytes },
        first_gather: config.first_gather,
        overlap_grad_reduce: config.overlap_grad_reduce,
        rule: actors::VerdictRule {
            average: if config.average == Average::Weight { Average::Weight } else { Average::Ranks(d) },
            norm: config.norm_type,
            max_norm: config.max_norm,
            on_nonfinite: config.on_nonfinite,
        },
        scaler: config.scaler_rule(),
        skip: config.skip,
        check_for_nan_in_grad: config.check_for_nan_in_grad,
        groups: model.groups.iter().map(group).collect(),
        steps_in_flight: config.steps_in_flight,
        deadlines: config.deadline_rule(),
        busy_warning: actors::BUSY_WARNING,
        check_order_every: config.check_order_every,
        start_params: config.start_params,
        agree: learning_rates(model, config),
        driver: Driver::Actors,
        dropped_edge: None,
        drill: None,
    }
}
