//! The command line of gatherflow.
//!
//! | file | subcommands |
//! | --- | --- |
//! | here | `plan` |
//! | `state` | `import`, `state` |
//!
//! Exit codes: 0, or 2 where an argument, a file or a model is refused; the message names the thing and what to do.

mod state;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use gatherflow::{Config, Model, ParamId, Plan, Storage};

/// Data-parallel training with its communication hidden behind compute.
#[derive(Parser)]
#[command(name = "gatherflow", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print how a model is laid out: buffers, buckets, shards, memory, and the order of all collectives
    ///
    /// Nothing is trained and nothing is allocated, so it works for models of any size.
    Plan(PlanArgs),
    /// Make a file of optimizer state from one of Megatron-LM's distributed optimizer
    Import(state::ImportArgs),
    /// Print what is in a file of optimizer state: steps, groups, loss scaler, tensors
    State(state::StateArgs),
}

#[derive(Args)]
#[command(after_help = MODEL_HELP)]
struct PlanArgs {
    /// The model description (TOML, see below)
    #[arg(conflicts_with = "gpt")]
    model: Option<PathBuf>,
    /// Take the shapes of a GPT with tied embeddings instead of a file
    #[arg(long, value_name = "LAYERS,WIDTH,VOCAB", value_parser = gpt_shape)]
    gpt: Option<[usize; 3]>,
    /// A configuration file (TOML; the keys are listed by `gatherflow --help`)
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,
    /// The number of ranks, model-parallel ones included [default: `ranks` of the configuration, else 2]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Which pipeline stage the description is of, where the configuration has several
    #[arg(long, value_name = "N", default_value_t = 0)]
    stage: usize,
    /// Close a bucket once it holds this many elements
    #[arg(long, value_name = "ELEMENTS")]
    bucket_size: Option<usize>,
    /// Cut into about this many buckets
    #[arg(long, value_name = "N")]
    num_buckets: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const MODEL_HELP: &str = "\
A model description lists units in forward order, each with the parameters it registers (dtype f32, bf16 or f16; optional:
grad_dtype, trainable, shared, shared_embedding, tensor_parallel, sum_over = \"model_parallel\", shard_group, group) and, under `uses`,
those of earlier units that it uses too. Shard groups come first (optional: experts, which hold other parameters on other ranks, and
average_over), and optimizer groups (optional: lr, lr_multiplier, betas, eps, weight_decay), beside the one of all that name none:

  [[shard_group]]
  name = \"experts\"
  ranks = 2
  experts = true
  [[group]]
  name = \"no decay\"
  weight_decay = 0.0
  [[chunk]]
  [[chunk.unit]]
  name = \"embed\"
  params = [{ name = \"embed.table\", shape = [256, 64], dtype = \"bf16\" }]
  [[chunk.unit]]
  name = \"head\"
  params = [{ name = \"head.bias\", shape = [256], dtype = \"f32\", group = \"no decay\" }]
  uses = [\"embed.table\"]
  [[chunk.unit]]
  name = \"mlp\"
  params = [{ name = \"up\", shape = [64, 8], dtype = \"bf16\", shard_group = \"experts\" }]

Examples:
  gatherflow plan model.toml --ranks 8
  gatherflow plan --gpt 6,208,256 --ranks 2 --num-buckets 12";

/// Most layers of `--gpt`: every parameter takes memory here, whatever its size.
const MOST_LAYERS: usize = 10_000;

fn gpt_shape(text: &str) -> Result<[usize; 3], String> {
    let numbers: Result<Vec<usize>, _> = text.split(',').map(|n| n.trim().parse()).collect();
    let shape = numbers.ok().and_then(|n| n.try_into().ok());
    let shape: [usize; 3] = shape.ok_or("expected three whole numbers such as 6,208,256")?;
    if shape[0] > MOST_LAYERS {
        return Err(format!("{} layers: expected at most {MOST_LAYERS}", shape[0]));
    }
    Ok(shape)
}

/// The configuration keys, for the end of `--help`.
fn keys_help() -> String {
    let mut text = String::from(
        "Configuration keys (TOML, or GATHERFLOW_ variables over it: GATHERFLOW_SCALER_KIND=dynamic sets scaler.kind):\n",
    );
    for key in gatherflow::KEYS {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {:<24} {}
{:27}{} [default: {}]",
            key.name, key.help, "", key.values, key.default
        );
    }
    text.push_str(
        "\nRUST_LOG=gatherflow=debug shows what happens. `gatherflow plan --help` explains the first thing to try.",
    );
    text
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let matches = Cli::command().after_help(keys_help()).get_matches();
    let done = Cli::from_arg_matches(&matches).map_err(|e| e.to_string()).and_then(|cli| match cli.command {
        Command::Plan(args) => plan(&args),
        Command::Import(args) => state::import(&args),
        Command::State(args) => state::state(&args),
    });
    match done {
        Ok(text) => print(&text),
        Err(message) => {
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("error: {message}\n"));
            ExitCode::from(2)
        }
    }
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
fn print(text: &str) -> ExitCode {
    match std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("error: cannot write: {e}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// A file, and variables over it.
fn configuration(file: Option<&Path>) -> Result<Config, String> {
    let config = file.map_or(Ok(Config::new()), Config::from_file);
    config.and_then(Config::from_env).map_err(|e| e.to_string())
}

fn read_model(path: &Path) -> Result<Model, String> {
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string());
    let model = text.and_then(|text| Model::from_toml(&text).map_err(|e| e.to_string()));
    model.map_err(|e| format!("{}: {e}", path.display()))
}

fn plan(args: &PlanArgs) -> Result<String, String> {
    let mut config = configuration(args.config.as_deref())?;
    let flags = [("ranks", args.ranks), ("bucket_size", args.bucket_size), ("num_buckets", args.num_buckets)];
    let flags = flags.map(|(key, value)| (key, value.map(|n| n.to_string())));
    config
        .set_layer(flags.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?))))
        .map_err(|e| e.to_string())?;
    let model = match (&args.model, args.gpt) {
        (Some(path), _) => read_model(path)?,
        (None, Some([layers, width, vocab])) => {
            Model::gpt(layers, width, vocab, 128).map_err(|e| format!("--gpt: {e}"))?
        }
        (None, None) => return Err("no model: give a model description or --gpt LAYERS,WIDTH,VOCAB".into()),
    };
    let plan =
        model.plan_stage(args.stage, config.configured_ranks().unwrap_or(2), &config).map_err(|e| e.to_string())?;
    Ok(if args.json { format!("{}\n", json(&plan)) } else { plan.describe() })
}

fn json(plan: &Plan) -> serde_json::Value {
    let name = |id: &ParamId| plan.param(*id).name.as_str();
    let buckets = plan.buckets().iter().map(|bucket| {
        serde_json::json!({
            "bucket": bucket.id.0,
            "buffer": bucket.buffer.0,
            "dtype": plan.buffer(bucket.buffer).dtype.name(),
            "shard_group": plan.shard_group(bucket.id).name,
            "numel": bucket.numel(),
            "param_numel": bucket.param_numel,
            "shard_numel": bucket.shard_numel,
            "place": plan.unit(bucket.place).name,
            "position": bucket.position.0,
            "params": bucket.params.iter().map(name).collect::<Vec<_>>(),
        })
    });
    let memory = plan.memory();
    let of_storage = [Storage::Views, Storage::Shared].map(|storage| {
        let memory = plan.memory_with(storage);
        let bytes =
            memory.map(|m| serde_json::json!({ "total_bytes": m.total_bytes(), "staging_bytes": m.staging_bytes() }));
        (storage.name().to_owned(), bytes.into())
    });
    let allocations = memory.allocations.iter().map(|a| (a.purpose.to_string(), a.bytes.into()));
    serde_json::json!({
        "ranks": plan.ranks(),
        "model_parallel": plan.model_parallel(),
        "pipeline_stage": plan.pipeline().stage,
        "pipeline_stages": plan.pipeline().stages,
        "params": plan.params().len(),
        "numel": plan.params().iter().map(|p| p.numel).sum::<usize>(),
        "buckets": buckets.collect::<Vec<_>>(),
        "gather_order": plan.gather_order().iter().map(|b| b.0).collect::<Vec<_>>(),
        "gather_calls": plan.calls(),
        "memory_bytes": allocations.collect::<serde_json::Map<_, _>>(),
        "total_bytes": memory.total_bytes(),
        "storage": plan.storage().name(),
        "of_storage": serde_json::Map::from_iter(of_storage),
    })
}
