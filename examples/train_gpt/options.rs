//! Flags, and the configuration that they make together with a file.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use gatherflow::{Config, DType};

/// Trains a byte-level GPT on text, with its parameters gathered under the forward pass.
#[derive(Debug, Parser)]
#[command(name = "train_gpt", args_override_self = true)]
pub(crate) struct Options {
    /// Number of ranks, each a thread [default: `ranks` of the configuration, else 2]
    #[arg(long, value_name = "N", value_parser = count::<{ MOST_RANKS }>)]
    pub(crate) ranks: Option<usize>,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = count::<1_000_000_000>)]
    pub(crate) steps: usize,
    /// Sequences per rank and microbatch
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count::<65_536>)]
    pub(crate) batch: usize,
    /// Bytes in a sequence
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = count::<65_536>)]
    pub(crate) seq: usize,
    /// Layers, each of an attention and a feed-forward unit
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = count::<10_000>)]
    pub(crate) layers: usize,
    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count::<65_536>)]
    pub(crate) width: usize,
    /// Number of tokens: every byte of the text must be below it
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count::<1_048_576>)]
    pub(crate) vocab: usize,
    /// Element type of the parameters; f16 comes with f16 gradients and a dynamic loss
    /// scaler, whose first steps are skipped while it comes down from 2^32
    #[arg(long, default_value = "bf16", value_parser = dtypes())]
    pub(crate) dtype: DType,
    /// Microbatches per step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<1_000_000>)]
    pub(crate) accumulate: usize,
    /// When parameters are gathered: none, chain or window [default: window]
    #[arg(long, value_name = "MODE")]
    overlap: Option<String>,
    /// How many buckets gathers may run ahead, or `unlimited` [default: 3]
    #[arg(long, value_name = "N")]
    credits: Option<String>,
    /// Close a bucket once it holds this many elements
    #[arg(long, value_name = "ELEMENTS", conflicts_with = "num_buckets")]
    bucket_size: Option<String>,
    /// Cut into about this many buckets [default: as many as give 12 and one per unit]
    #[arg(long, value_name = "N")]
    num_buckets: Option<String>,
    /// Reduce gradients during backward [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    overlap_grad_reduce: Option<String>,
    /// Where gathered parameters land: views or shared [default: views]
    #[arg(long, value_name = "STORAGE")]
    storage: Option<String>,
    /// Emulate a link of this bandwidth and latency
    #[arg(long, value_name = "1gbit,200us")]
    emulate: Option<String>,
    /// Seed of initial parameters and batches
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// A configuration file (`gatherflow --help` lists the keys); GATHERFLOW_* variables and flags override it
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,
    /// The text to learn from [default: sources and documents of this repository]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Write the result to this file as one JSON object
    #[arg(long, value_name = "OUT")]
    pub(crate) json: Option<PathBuf>,
}

/// The most ranks: each is a few threads.
const MOST_RANKS: usize = 1024;

/// Most numbers that parameters and activations of all ranks may have together, roughly: 64 GiB in f32.
const MOST_NUMBERS: f64 = (1_u64 << 34) as f64;

fn count<const MOST: usize>(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=MOST).contains(n));
    number.ok_or_else(|| format!("expected a whole number from 1 to {MOST}"))
}

fn dtypes() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["bf16", "f16", "f32"]).try_map(|name| DType::parse(&name).ok_or("unknown"))
}

impl Options {
    /// The configuration of the file, the `GATHERFLOW_*` variables over it, the flags over those, and what this program prefers where neither says anything.
    ///
    /// # Errors
    /// A sentence that names the file or the key.
    pub(crate) fn config(&self) -> Result<Config, String> {
        let mut config = Config::from_env(self.file()?).map_err(|e| e.to_string())?;
        let ranks = self.ranks.map(|n| n.to_string());
        let flags = [
            ("ranks", &ranks),
            ("overlap", &self.overlap),
            ("credits", &self.credits),
            ("bucket_size", &self.bucket_size),
            ("num_buckets", &self.num_buckets),
            ("overlap_grad_reduce", &self.overlap_grad_reduce),
            ("storage", &self.storage),
            ("emulate", &self.emulate),
        ];
        let flags = flags.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?)));
        config.set_layer(flags).map_err(|e| e.to_string())?;
        let mut prefer = |key: &str, value: &str| {
            if config.is_explicit(key) { Ok(()) } else { config.set(key, value).map_err(|e| e.to_string()) }
        };
        prefer("betas", "[0.9, 0.95]")?;
        prefer("lr", "0.002")?;
        if self.dtype == DType::F16 {
            prefer("scaler.kind", "dynamic")?;
            prefer("grad_dtype", "f16")?;
        }
        config.validate().map_err(|e| e.to_string())?;
        self.check(&config)?;
        Ok(config)
    }

    /// Refuses what the engine would take, but this program cannot train with.
    fn check(&self, config: &Config) -> Result<(), String> {
        if config.device_name() == "null" {
            return Err(
                "configuration key `device` = \"null\" computes nothing, so nothing would be trained: leave it \
                        out (`gatherflow plan` shows a layout without training)"
                    .to_owned(),
            );
        }
        if config.model_parallel_ranks() > 1 {
            return Err(
                "configuration key `model_parallel`: this program trains a whole model on every rank, each with data of \
                        its own: leave it out"
                    .to_owned(),
            );
        }
        let ranks = config.configured_ranks().unwrap_or(2);
        if ranks > MOST_RANKS {
            return Err(format!("configuration key `ranks` = {ranks}: expected at most {MOST_RANKS}"));
        }
        let [layers, width, vocab, seq, batch] =
            [self.layers, self.width, self.vocab, self.seq, self.batch].map(|n| n as f64);
        let params = width * (12.0 * layers * width + 2.0 * vocab + seq);
        let activations = batch * seq * (12.0 * layers * width + vocab);
        let numbers = ranks as f64 * (params + activations);
        if numbers > MOST_NUMBERS {
            return Err(format!(
                "parameters and activations would be about {numbers:.0e} numbers, and this program goes up to \
                 {MOST_NUMBERS:.0e}: make --layers, --width, --vocab, --batch, --seq or --ranks smaller"
            ));
        }
        Ok(())
    }

    fn file(&self) -> Result<Config, String> {
        let Some(path) = &self.config else { return Ok(Config::new()) };
        Config::from_file(path).map_err(|e| e.to_string())
    }
}
