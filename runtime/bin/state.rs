//! `gatherflow import` and `gatherflow state`: files of optimizer state.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use gatherflow::{MegatronFile, ScalerState, State, TensorState};

use super::{configuration, read_model};

#[derive(Args)]
#[command(after_help = IMPORT_HELP)]
pub(crate) struct ImportArgs {
    /// The file of Megatron-LM's distributed optimizer, as a rule `distrib_opt.pt`
    file: PathBuf,
    /// The model description (TOML, see `gatherflow plan --help`): chunks, and parameters as registered
    #[arg(long, value_name = "MODEL.toml")]
    model: PathBuf,
    /// How many data-parallel ranks saved it
    #[arg(long, value_name = "N")]
    ranks: usize,
    /// The bucket size with which it was saved: 40000000 with --overlap-grad-reduce; without that leave it out
    #[arg(long, value_name = "ELEMENTS")]
    bucket_size: Option<usize>,
    /// How many steps were successful before: `step` of the optimizer's groups in the common checkpoint
    #[arg(long, value_name = "T")]
    step: u64,
    /// Where the loss scaler stood: `scale`, `growth_tracker`, `hysteresis_tracker` of `grad_scaler` in the common checkpoint
    #[arg(long, value_name = "SCALE,GROWTH,HYSTERESIS", value_parser = scaler)]
    scaler: Option<ScalerState>,
    /// A configuration file whose hyperparameters are written beside the state
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,
    /// Where the state goes; a file of that name is replaced when the new one is complete
    #[arg(long, value_name = "STATE.safetensors")]
    out: PathBuf,
}

const IMPORT_HELP: &str = "\
The file has no names: of each chunk it holds masters and moments bucket by bucket. So the parameters must be described in
the order of the modules' parameters(), and ranks and bucket size given as they were when it was saved; what differs is refused
with both lengths. The file is of one model-parallel rank. Nothing in it is run.

Example:
  gatherflow import iter_0001000/mp_rank_00/distrib_opt.pt --model model.toml --ranks 8 --bucket-size 40000000 \\
      --step 1000 --out iter_0001000.safetensors
  gatherflow state iter_0001000.safetensors

In the program: engine.load_state(&State::open(\"iter_0001000.safetensors\")?)? on every rank, however many there are.";

#[derive(Args)]
#[command(
    after_help = "The file is read as a whole and checked on the way. Python reads it too: safetensors.torch.load_file(FILE)."
)]
pub(crate) struct StateArgs {
    /// A file that `State::save` or `gatherflow import` wrote
    file: PathBuf,
}

fn scaler(text: &str) -> Result<ScalerState, String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let parsed = match parts[..] {
        [scale, growth, hysteresis] => scale.parse().ok().zip(growth.parse().ok()).zip(hysteresis.parse().ok()),
        _ => None,
    };
    let ((scale, growth), hysteresis): ((f32, u32), i32) =
        parsed.ok_or("expected three numbers such as 65536,100,2")?;
    if !(scale.is_finite() && scale > 0.0) {
        return Err(format!("the scale is {scale}: it must be finite and above 0"));
    }
    Ok(ScalerState::new(scale, growth, hysteresis))
}

pub(crate) fn import(args: &ImportArgs) -> Result<String, String> {
    let config = configuration(args.config.as_deref())?;
    let model = read_model(&args.model)?;
    let mut file = MegatronFile::new(&args.file, args.ranks, args.step);
    file = args.bucket_size.map_or(file.clone(), |numel| file.bucket_size(numel));
    file = args.scaler.map_or(file.clone(), |scaler| file.scaler(scaler));
    let state = file.import(&model, &config).map_err(|e| e.to_string())?;
    state.save(&args.out).map_err(|e| e.to_string())?;
    Ok(format!("wrote {}\n{}", args.out.display(), describe(&state)))
}

pub(crate) fn state(args: &StateArgs) -> Result<String, String> {
    State::open(&args.file).map(|state| describe(&state)).map_err(|e| e.to_string())
}

/// Writing to a string cannot fail.
fn describe(state: &State) -> String {
    let mut text = format!("steps: {}\n", state.steps);
    for (number, group) in state.groups.iter().enumerate() {
        let _ = writeln!(
            text,
            "group {number}: t {}, lr {:?} x {:?}, betas {:?}, eps {:?}, weight decay {:?}{}",
            group.t,
            group.lr,
            group.lr_multiplier,
            group.betas,
            group.eps,
            group.weight_decay,
            if group.adam_w { "" } else { " in the gradient" },
        );
    }
    let _ = match state.scaler {
        Some(scaler) => writeln!(
            text,
            "loss scaler: scale {}, {} good steps since it moved, backs off after {} bad ones",
            scaler.scale, scaler.growth_counter, scaler.hysteresis
        ),
        None => writeln!(text, "loss scaler: none"),
    };
    let here: usize = state.tensors.iter().map(elements).sum();
    let all: usize = state.tensors.iter().map(numel).fold(0, usize::saturating_add);
    let what = if here == all {
        "a whole".into()
    } else {
        format!("a part, {here} of them: merge it with those of all ranks")
    };
    let _ = writeln!(text, "tensors: {}, of {all} elements; {what}\n", state.tensors.len());
    let rows = state.tensors.iter().map(|tensor| (title(tensor), format!("{:?}", tensor.shape)));
    let rows: Vec<(String, String)> = std::iter::once(("tensor".into(), "shape".into())).chain(rows).collect();
    let width = |column: fn(&(String, String)) -> &String| rows.iter().map(|row| column(row).chars().count()).max();
    let (first, second) = (width(|row| &row.0).unwrap_or(0), width(|row| &row.1).unwrap_or(0));
    let _ = writeln!(text, "{:first$}  {:second$}  group  elements here", rows[0].0, rows[0].1);
    for (tensor, (title, shape)) in state.tensors.iter().zip(&rows[1..]) {
        let ranges = tensor.pieces.iter().map(|piece| format!("{}..{}", piece.start, piece.start + piece.master.len()));
        let here = match elements(tensor) {
            0 => "none".into(),
            here if here == numel(tensor) => "all".into(),
            _ => ranges.collect::<Vec<_>>().join(", "),
        };
        let _ = writeln!(text, "{title:first$}  {shape:second$}  {:<5}  {here}", tensor.group);
    }
    text
}

fn title(tensor: &TensorState) -> String {
    let part = tensor.part.to_string();
    if part.is_empty() { tensor.name.clone() } else { format!("{} ({part})", tensor.name) }
}

fn elements(tensor: &TensorState) -> usize {
    tensor.pieces.iter().map(|piece| piece.master.len()).sum()
}

fn numel(tensor: &TensorState) -> usize {
    tensor.shape.iter().fold(1, |n, d| n.saturating_mul(*d))
}
