//! State out of the file that Megatron-LM's distributed optimizer saves (SPEC D2).
//!
//! Such a file has no names: of each chunk it holds masters and moments bucket by bucket, padding included. So the plan is made
//! with which it was saved, from the model, the number of data-parallel ranks and the bucket size; every length is compared with
//! it, and parameters are cut out of that. All parameters of a chunk lie in one buffer there, whatever their types, copies of a
//! weight in the bucket that they fall into.
//!
//! | file | idea |
//! | --- | --- |
//! | `torch` | what `torch.save` writes |
//! | `pickle` | the part of it that says what is where |
//! | `error` | what can be wrong, by name |

mod error;
mod pickle;
mod torch;

use std::path::PathBuf;

use super::{FIELDS, GroupState, Piece, ScalerState, State, StateFileError, StateFileProblem, tensors};
use crate::actors::{Alignment, BucketId, Bucketing, DType, ParamId, Plan, PlanInput, Range, SumOver};
use crate::config::Config;
use crate::error::Error;
use crate::model::{Model, ModelError};
pub use error::MegatronProblem;
use pickle::{Id, Pickle, Tensor, Value};
use torch::TorchFile;

const FIELD_NAMES: [&str; FIELDS] = ["param", "exp_avg", "exp_avg_sq"];

/// A file that Megatron-LM's distributed optimizer of November 2023 or before saved (`distrib_opt.pt`), with what it does not say
/// of itself.
///
/// ```no_run
/// # fn model() -> gatherflow::Model { gatherflow::Model::new() }
/// use gatherflow::{Config, MegatronFile};
///
/// // Saved by 8 data-parallel ranks with overlapping reduces, after 1000 successful steps.
/// let file = MegatronFile::new("iter_0001000/mp_rank_00/distrib_opt.pt", 8, 1000).bucket_size(40_000_000);
/// let whole = file.import(&model(), &Config::new())?;
/// whole.save("iter_0001000.safetensors")?;
/// # Ok::<(), gatherflow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MegatronFile {
    path: PathBuf,
    ranks: usize,
    bucket_size: Option<usize>,
    t: u64,
    scaler: Option<ScalerState>,
}

impl MegatronFile {
    /// The file, the number of data-parallel ranks that saved it, and the number of successful steps before, which is in the
    /// checkpoint's common part (`step` of the optimizer's groups).
    pub fn new(path: impl Into<PathBuf>, ranks: usize, t: u64) -> Self {
        Self { path: path.into(), ranks, bucket_size: None, t, scaler: None }
    }

    /// The bucket size with which it was saved: 40 000 000 with `--overlap-grad-reduce`, unless the program said otherwise. Without
    /// that, and on later chunks, there is one bucket.
    #[must_use]
    pub fn bucket_size(mut self, numel: usize) -> Self {
        self.bucket_size = Some(numel);
        self
    }

    /// Where the loss scaler stood, from the checkpoint's common part (`grad_scaler`).
    #[must_use]
    pub fn scaler(mut self, scaler: ScalerState) -> Self {
        self.scaler = Some(scaler);
        self
    }

    /// Takes the state of a model out of it, whole. Parameters are registered in the order of Megatron's `parameters()`, chunks in
    /// that of its model chunks. Hyperparameters are those of the model's groups and the configuration; [`State::steps`] counts
    /// successful steps only. The file is of one model-parallel rank, so the state is of a model without such.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::ErrorKind::State): what is wrong with the file, by chunk, bucket and tensor. A model that has no
    /// plan for so many ranks.
    pub fn import(&self, model: &Model, config: &Config) -> Result<State, Error> {
        let input = input(model, self.ranks);
        let own = Plan::new(&input).map_err(ModelError::from)?;
        let mut state = State { steps: self.t, scaler: self.scaler, ..State::default() };
        state.groups = model.groups.iter().map(|group| GroupState::new(group, config, self.t)).collect();
        state.tensors = tensors(&own).collect();
        let plan = |bucketing| Plan::new(&as_megatron(&input, bucketing)).map_err(ModelError::from);
        let plans = [plan(self.bucket_size.map_or(Bucketing::Whole, Bucketing::Size))?, plan(Bucketing::Whole)?];
        let mut params =
            self.params(&plans).map_err(|problem| Error::from(StateFileError::new(&self.path, problem)))?;
        for tensor in &mut state.tensors {
            let Some(id) = model.find(&tensor.name) else { continue };
            let [master, exp_avg, exp_avg_sq] = std::mem::take(&mut params[id.index()]);
            tensor.pieces = vec![Piece { start: 0, master, exp_avg, exp_avg_sq }];
        }
        Ok(state)
    }

    /// Masters and moments of every parameter.
    fn params(&self, plans: &[Plan; 2]) -> Result<Vec<[Vec<f32>; FIELDS]>, StateFileProblem> {
        let mut file = TorchFile::open(&self.path)?;
        let mut params = vec![<[Vec<f32>; FIELDS]>::default(); plans[0].params().len()];
        let chunks: Vec<usize> = plans[0].buffers().iter().map(|buffer| buffer.chunk).collect();
        check_chunks(&file.pickle, &chunks)?;
        for chunk in chunks {
            for (field, name) in FIELD_NAMES.into_iter().enumerate() {
                for (plan, part) in self.parts(&file.pickle, plans, chunk, name)? {
                    let numel = part.range.len();
                    let content = |what| MegatronProblem::Content { place: part.place.clone(), what };
                    let found = file.numel(part.tensor).map_err(content)?;
                    if found != numel {
                        return Err(self.differs(part.place, "elements", found, numel).into());
                    }
                    let values = file.read(part.tensor, numel).map_err(content)?;
                    for param in part.params {
                        let range = plan.param(*param).home.range();
                        let (start, end) = (range.start - part.range.start, range.end - part.range.start);
                        params[param.index()][field] = values[start..end].to_vec();
                    }
                }
            }
        }
        Ok(params)
    }

    /// How one field of a chunk is stored: bucket by bucket, or in older files all buckets one after the other.
    fn parts<'p>(
        &self,
        pickle: &Pickle,
        [bucketed, whole]: &'p [Plan; 2],
        chunk: usize,
        name: &str,
    ) -> Result<Vec<(&'p Plan, Part<'p>)>, MegatronProblem> {
        let place = format!("chunk {chunk}, `{name}`");
        let content = |what: &str| MegatronProblem::Content { place: place.clone(), what: what.into() };
        let stored = of_chunk(pickle, chunk)?.and_then(|dict| pickle.get(dict, name));
        let stored = stored.ok_or_else(|| content("it is not there"))?;
        let tensor = |id: Id| match pickle.value(id) {
            Value::Tensor(tensor) => Ok(*tensor),
            _ => Err(content("it is no tensor")),
        };
        let buffer = |plan: &'p Plan| plan.buffers().iter().find(|buffer| buffer.chunk == chunk);
        let Value::List(items) = pickle.value(stored) else {
            let tensor = tensor(stored)?;
            // Later chunks have one bucket whatever the bucket size.
            let plan = if chunk == 0 { bucketed } else { whole };
            let all = buffer(plan).map(|buffer| Part {
                range: Range::new(0, buffer.numel),
                params: &buffer.params,
                tensor,
                place: place.clone(),
            });
            return Ok(all.into_iter().map(|part| (plan, part)).collect());
        };
        // One bucket is one whatever the bucket size.
        let plan = if items.len() == 1 { whole } else { bucketed };
        let buckets: Vec<BucketId> = buffer(plan).map_or_else(Vec::new, |buffer| buffer.buckets().collect());
        if buckets.len() != items.len() {
            return Err(self.differs(place, "buckets", items.len(), buckets.len()));
        }
        let part = |(number, (bucket, item)): (usize, (&BucketId, &Id))| {
            let bucket = plan.bucket(*bucket);
            let place = format!("chunk {chunk}, bucket {number}, `{name}`");
            Ok((plan, Part { range: bucket.range, params: &bucket.params, tensor: tensor(*item)?, place }))
        };
        buckets.iter().zip(items).enumerate().map(part).collect()
    }

    fn differs(&self, place: String, unit: &'static str, found: usize, planned: usize) -> MegatronProblem {
        let Self { ranks, bucket_size, .. } = *self;
        MegatronProblem::Differs { place, unit, found, planned, ranks, bucket_size }
    }
}

/// A tensor of the file, and what lies in it.
struct Part<'p> {
    /// Which elements of the chunk's buffer it has.
    range: Range,
    params: &'p [ParamId],
    tensor: Tensor,
    place: String,
}

/// The file has these chunks, and nothing else but the lengths of its buckets, which its tensors have too.
fn check_chunks(pickle: &Pickle, chunks: &[usize]) -> Result<(), MegatronProblem> {
    for (key, value) in root(pickle)? {
        let unknown = match pickle.value(*key) {
            Value::Text(text) if text == "per_bucket_numel" => continue,
            Value::Int(chunk) if chunks.iter().any(|known| *chunk == *known as i64) => continue,
            Value::Int(chunk) => match pickle.value(*value) {
                Value::Dict(items) if items.is_empty() => continue,
                _ => format!("chunk {chunk}, where the model trains nothing"),
            },
            Value::Text(text) => format!("`{text}`"),
            _ => "a key that is neither text nor number".into(),
        };
        return Err(MegatronProblem::Content { place: "its dict".into(), what: format!("it has {unknown}") });
    }
    Ok(())
}

fn root(pickle: &Pickle) -> Result<&[(Id, Id)], MegatronProblem> {
    match pickle.value(pickle.root) {
        Value::Dict(items) => Ok(items),
        _ => Err(MegatronProblem::Content { place: "its pickle".into(), what: "it is no dict".into() }),
    }
}

/// Masters and moments of a chunk, if it is there. They are under the element type of its gradients, of which there is one.
fn of_chunk(pickle: &Pickle, chunk: usize) -> Result<Option<&[(Id, Id)]>, MegatronProblem> {
    let is_chunk = |id: Id| matches!(pickle.value(id), Value::Int(number) if *number == chunk as i64);
    let Some((_, of_chunk)) = root(pickle)?.iter().rev().find(|(key, _)| is_chunk(*key)) else { return Ok(None) };
    let fields = match pickle.value(*of_chunk) {
        Value::Dict(types) => match types[..] {
            [(dtype, fields)] if matches!(pickle.value(dtype), Value::Global(_)) => Some(pickle.value(fields)),
            _ => None,
        },
        _ => None,
    };
    let Some(Value::Dict(fields)) = fields else {
        let what = "it is no dict of one element type of gradients".into();
        return Err(MegatronProblem::Content { place: format!("chunk {chunk}"), what });
    };
    Ok(Some(fields))
}

/// The model as it is saved: a file knows no experts, and masters are f32 whatever the parameter is.
fn input(model: &Model, ranks: usize) -> PlanInput {
    let mut input = model.plan_input(0, ranks, &Config::new());
    input.shard_groups.clear();
    for param in &mut input.params {
        (param.dtype, param.grad_dtype) = (DType::F32, DType::F32);
        (param.shard_group, param.sum_over) = (0, SumOver::Nothing);
    }
    input
}

/// The same without the buckets of their own that copies of a weight have here, laid out as Megatron-LM does.
fn as_megatron(input: &PlanInput, bucketing: Bucketing) -> PlanInput {
    let mut input = PlanInput { bucketing, alignment: Alignment::Reference, ..input.clone() };
    for param in &mut input.params {
        (param.shared, param.shared_embedding) = (None, false);
    }
    input
}
