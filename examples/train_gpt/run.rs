//! All ranks together: the progress bar and the result.

use std::io::{ErrorKind as IoErrorKind, IsTerminal, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use gatherflow::{Config, Error, ErrorKind, Model, Overlap, Plan, Rank, Ranks};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::losses::Losses;
use crate::model::{Gpt, Shape};
use crate::options::Options;
use crate::process::say;
use crate::rank::{Finished, Job, Stepped, Stopped, train};
use crate::text::Text;

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something the user gave was refused.
    Refused(String),
    /// The run failed.
    Broken(String),
}

/// Without a word from the user: 12 buckets, or as many as there are units, so that the gathers of the first units, under
/// which there is little to hide them, are small. Parameters are never split, so it may take a smaller size than for that many.
/// (A size, because the plan notes numbers that were asked for and did not come out.)
fn with_buckets(mut config: Config, model: &Model, ranks: usize) -> Result<Config, Error> {
    const FEWEST: usize = 12;
    if config.is_explicit("bucket_size") || config.is_explicit("num_buckets") {
        return Ok(config);
    }
    let numel: usize = model.params().iter().map(|p| p.numel).sum();
    for buckets in FEWEST..=4 * FEWEST {
        config = config.bucket_size(numel.div_ceil(buckets));
        let plan = model.plan(ranks, &config)?;
        if plan.buckets().len() >= FEWEST.max(plan.units().len()) {
            break;
        }
    }
    Ok(config)
}

/// Trains and reports.
///
/// # Errors
/// [`Failure`].
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let refused = |e: &dyn std::fmt::Display| Failure::Refused(e.to_string());
    let config = options.config().map_err(Failure::Refused)?;
    let text = Text::load(options.data.as_deref()).map_err(Failure::Refused)?;
    text.check(options.seq, options.vocab).map_err(Failure::Refused)?;
    let shape = Shape { layers: options.layers, width: options.width, vocab: options.vocab, seq: options.seq };
    let mut model = Model::new();
    let gpt = Gpt::register(&mut model, shape, options.dtype).map_err(|e| refused(&e))?;
    let count = config.configured_ranks().unwrap_or(2);
    let config = with_buckets(config, &model, count).map_err(|e| refused(&e))?;
    let plan = model.plan(count, &config).map_err(|e| refused(&e))?;
    let ranks = Ranks::with_config(count, &config).map_err(|e| refused(&e))?;
    if let Some(path) = &options.json {
        // Minutes of training must not end in a file that cannot be written.
        std::fs::write(path, "").map_err(|e| Failure::Refused(format!("cannot write {}: {e}", path.display())))?;
    }
    say(&format!(
        "{} parameters ({}) in {} buckets, {count} ranks, {} bytes of text",
        model.params().iter().map(|p| p.numel).sum::<usize>(),
        options.dtype,
        plan.buckets().len(),
        text.len()
    ));
    for hint in plan.hints() {
        say(&format!("note: {hint}"));
    }
    let job = Job {
        model,
        gpt,
        shape,
        config,
        text,
        steps: options.steps,
        batch: options.batch,
        accumulate: options.accumulate,
        seed: options.seed,
    };
    let result = together(&job, ranks)?;
    if let Some(path) = &options.json {
        let object = format!("{:#}\n", result.json(options, &job, &plan));
        std::fs::write(path, object).map_err(|e| Failure::Broken(format!("cannot write {}: {e}", path.display())))?;
    }
    match std::io::stdout().lock().write_all(result.text().as_bytes()) {
        // A reader that went away (`| head`) is no error.
        Err(e) if e.kind() != IoErrorKind::BrokenPipe => Err(Failure::Broken(format!("cannot write the result: {e}"))),
        _ => Ok(()),
    }
}

struct Outcome {
    losses: Losses,
    elapsed: Duration,
    tokens_per_step: usize,
    ranks: Vec<Finished>,
}

/// A thread for each rank; this one listens.
fn together(job: &Job, ranks: Vec<Rank>) -> Result<Outcome, Failure> {
    let tokens_per_step = ranks.len() * job.batch * job.shape.seq * job.accumulate;
    let (sender, receiver) = channel();
    let start = Instant::now();
    let (losses, ended) = std::thread::scope(|scope| {
        let count = ranks.len();
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                let sender = sender.clone();
                let name = format!("rank {}", rank.rank());
                std::thread::Builder::new().name(name).spawn_scoped(scope, move || train(job, rank, &sender))
            })
            .collect();
        drop(sender);
        let losses = listen(&receiver, job.steps, count, tokens_per_step);
        let ended: Vec<_> = threads
            .into_iter()
            .map(|thread| match thread.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(finished)) => finished.map_err(|e| failure(&e)),
                Ok(Err(_)) => Err(Failure::Broken("a rank panicked".to_owned())),
                Err(e) => Err(Failure::Broken(format!("cannot start a thread: {e}"))),
            })
            .collect();
        (losses, ended)
    });
    let ranks = ended.into_iter().collect::<Result<Vec<_>, _>>()?;
    let hashes: Vec<u64> = ranks.iter().map(|rank| rank.params_hash).collect();
    if hashes.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(Failure::Broken(format!(
            "the ranks ended with different parameters: their hashes are {hashes:x?}"
        )));
    }
    Ok(Outcome { losses, elapsed: start.elapsed(), tokens_per_step, ranks })
}

/// Refused where the user gave something that the engine will not have.
fn failure(stopped: &Stopped) -> Failure {
    match stopped {
        Stopped::Engine(error) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Model) => {
            Failure::Refused(stopped.to_string())
        }
        _ => Failure::Broken(stopped.to_string()),
    }
}

/// Shows progress until all ranks have ended; their losses.
fn listen(receiver: &Receiver<Stepped>, steps: usize, ranks: usize, tokens: usize) -> Losses {
    let bar = ProgressBar::new(steps as u64);
    let style = "{bar:30} {pos}/{len}  {msg}  {eta} left";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    let lines = !std::io::stderr().is_terminal();
    let mut losses = Losses::of(ranks);
    let (mut exposed, mut start) = (0.0, None);
    for stepped in receiver {
        if stepped.rank == 0 {
            exposed = stepped.exposed_ms;
        }
        if !losses.add(stepped.step, stepped.rank, stepped.loss) {
            continue;
        }
        // Rates leave out the first step, which includes the start of the engines.
        let start = *start.get_or_insert_with(Instant::now);
        let rate = (losses.steps() - 1) as f64 * tokens as f64 / start.elapsed().as_secs_f64().max(1e-9);
        let message = format!("loss {:.3}  {rate:.0} tokens/s  exposed {exposed:.1} ms", losses.last());
        if lines && (losses.steps() == steps || losses.steps().is_multiple_of((steps / 10).max(1))) {
            say(&format!("step {}/{steps}  {message}", losses.steps()));
        }
        bar.set_message(message);
        bar.set_position(losses.steps() as u64);
    }
    bar.finish_and_clear();
    losses
}

impl Outcome {
    fn tokens_per_s(&self) -> f64 {
        self.losses.steps() as f64 * self.tokens_per_step as f64 / self.elapsed.as_secs_f64()
    }

    fn text(&self) -> String {
        let skipped = match self.ranks[0].counters.skipped_steps {
            0 => String::new(),
            skipped => format!(", {skipped} of them skipped"),
        };
        format!(
            "loss {:.3} -> {:.3} in {} steps{skipped}, {:.0} s, {:.0} tokens/s\n{}\n",
            self.losses.first(),
            self.losses.last(),
            self.losses.steps(),
            self.elapsed.as_secs_f64(),
            self.tokens_per_s(),
            self.ranks[0].report
        )
    }

    fn json(&self, options: &Options, job: &Job, plan: &Plan) -> serde_json::Value {
        let Finished { report, counters, last, params_hash } = &self.ranks[0];
        json!({
            "ranks": self.ranks.len(),
            "steps": self.losses.steps(),
            "overlap": match job.config.overlap_mode() {
                Overlap::None => "none",
                Overlap::Chain => "chain",
                Overlap::Window => "window",
            },
            "storage": plan.storage().name(),
            "dtype": options.dtype.name(),
            "buckets": plan.buckets().len(),
            "loss_first": self.losses.first(),
            "loss_last": self.losses.last(),
            "grad_norm_last": last.grad_norm,
            "params_hash": format!("{params_hash:016x}"),
            "gathers": counters.gathers,
            "reduces": counters.reduces,
            "skipped_steps": counters.skipped_steps,
            "step_ms_median": report.step_ms,
            "compute_ms_median": report.compute_ms,
            "gather_ms_median": report.gather_ms,
            "reduce_ms_median": report.reduce_ms,
            "exposed_gather_ms_median": report.exposed_gather_ms,
            "exposed_reduce_ms_median": report.exposed_reduce_ms,
            "hidden_share": report.hidden_share,
            "tokens_per_s": self.tokens_per_s(),
            "peak_ahead_bytes": counters.peak_ahead_bytes,
        })
    }
}
