//! One rank's thread: forward, backward, step.

use std::sync::mpsc::Sender;

use gatherflow::candle::{Forward, cause};
use gatherflow::{Config, Counters, Engine, Error, GroupId, Lr, Mode, Model, Outcome, Rank, Report, StepHandle};

use crate::model::{Gpt, Shape, initialize};
use crate::text::{Numbers, Text};

/// What all ranks have in common.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) model: Model,
    pub(crate) gpt: Gpt,
    pub(crate) shape: Shape,
    pub(crate) config: Config,
    pub(crate) text: Text,
    pub(crate) steps: usize,
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    pub(crate) seed: u64,
}

/// One rank has taken a step.
#[derive(Debug)]
pub(crate) struct Stepped {
    pub(crate) step: usize,
    /// Mean over its microbatches.
    pub(crate) loss: f64,
    /// Time of the last finished step in which this rank waited for communication.
    pub(crate) exposed_ms: f64,
    pub(crate) rank: usize,
}

/// What a rank has to tell at the end.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) report: Report,
    pub(crate) counters: Counters,
    pub(crate) last: Outcome,
    pub(crate) params_hash: u64,
}

/// What stopped a rank.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The engine.
    Engine(Error),
    /// Candle.
    Candle(candle_core::Error),
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<candle_core::Error> for Stopped {
    fn from(error: candle_core::Error) -> Self {
        match cause(&error) {
            Some(cause) => Self::Engine(cause.clone()),
            None => Self::Candle(error),
        }
    }
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::Candle(error) => error.fmt(f),
        }
    }
}

/// Trains to the end.
///
/// # Errors
/// The first cause, which is the same on all ranks.
pub(crate) fn train(job: &Job, rank: Rank, progress: &Sender<Stepped>) -> Result<Finished, Stopped> {
    let number = rank.rank();
    let mut engine = Engine::new(rank, job.model.clone(), job.config.clone(), |info, out| {
        initialize(info, out, job.seed, job.shape.layers);
    })?;
    let (steps, peak) = (job.steps as u64, job.config.learning_rate());
    for group in 0..=1 {
        engine.set_lr(GroupId(group), Lr::schedule(move |t| peak * warm_up_and_cosine(t, steps)))?;
    }
    let mut last: Option<StepHandle> = None;
    for step in 0..job.steps {
        let loss = microbatches(job, &engine, step)?;
        let handle = engine.step()?;
        // A step behind, so that the host can run ahead; the outcome carries verdicts that are errors by configuration.
        if let Some(last) = last.replace(handle) {
            last.outcome()?;
        }
        let waited = engine.times().last().map_or(0, |t| t.exposed_gather_ns + t.exposed_reduce_ns);
        // Whoever listens is there until all ranks have ended.
        let _ = progress.send(Stepped { step, loss, exposed_ms: waited as f64 / 1e6, rank: number });
    }
    let last = last.ok_or_else(|| candle_core::Error::msg("no step was taken"))?.outcome()?;
    let params_hash = engine.params_hash()?;
    engine.close()?;
    // The times of the last step are known once everything has ended.
    Ok(Finished { report: engine.report(), counters: engine.counters(), last, params_hash })
}

/// Forward and backward of one step; the mean loss.
fn microbatches(job: &Job, engine: &Engine, step: usize) -> Result<f64, Stopped> {
    let factor = f64::from(engine.loss_scale()?) / job.accumulate as f64;
    let mut total = 0.0;
    for microbatch in 0..job.accumulate {
        let seeds = [job.seed, 2, step as u64, engine.rank() as u64, microbatch as u64];
        let batch = job.text.batch(job.batch, job.shape.seq, Numbers::of(&seeds))?;
        let last = microbatch + 1 == job.accumulate;
        let forward = Forward::new(engine.owned_pass(job.gpt.chunk, microbatch, last, Mode::Train)?);
        let loss = job.gpt.loss(&forward, &batch)?;
        total += f64::from(loss.to_scalar::<f32>()?);
        (loss * factor)?.backward()?;
    }
    Ok(total / job.accumulate as f64)
}

/// The share of the peak learning rate at t, from 1: up over 5 % of the run, then half a cosine down to a tenth.
fn warm_up_and_cosine(t: u64, steps: u64) -> f64 {
    let warm_up = (steps / 20).clamp(1, 100);
    if t <= warm_up {
        return t as f64 / warm_up as f64;
    }
    let done = (t - warm_up) as f64 / (steps - warm_up).max(1) as f64;
    0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos())
}
