//! Refuses what cannot be planned, before anything is laid out. What passes here cannot fail or overflow later.

use std::collections::HashMap;

use gatherflow_kernels::DType;

use super::copies::Traits;
use super::error::PlanError;
use super::ids::ParamId;
use super::input::{Bucketing, ParamSpec, Pipeline, PlanInput, Storage, SumOver};
use super::layout;

/// More ranks than any job has; keeps every alignment far from overflow.
const MOST_RANKS: usize = 1 << 20;

/// Parameters and units are numbered in 32 bits, with room for "none".
const MOST_IDS: usize = (u32::MAX - 1) as usize;

/// Bytes that one padded element may take over all allocations of a rank: parameter, gradient, reduced shard, master,
/// staging and two moments, each at most 4.
const BYTES_PER_ELEMENT: u128 = 28;

pub(super) fn check(input: &PlanInput) -> Result<(), PlanError> {
    counts(input)?;
    groups(input)?;
    match input.bucketing {
        Bucketing::Size(0) => return Err(PlanError::ZeroBucketSize),
        Bucketing::Count(0) => return Err(PlanError::ZeroBuckets),
        Bucketing::Default | Bucketing::Size(_) | Bucketing::Count(_) | Bucketing::Whole => {}
    }
    names(&input.params)?;
    input.params.iter().try_for_each(|param| parameter(param, input))?;
    sizes(input)?;
    uses(input)?;
    shared_copies(input)
}

fn counts(input: &PlanInput) -> Result<(), PlanError> {
    if input.ranks == 0 {
        return Err(PlanError::NoRanks);
    }
    if input.chunks.is_empty() {
        return Err(PlanError::NoUnits);
    }
    if let Some(chunk) = input.chunks.iter().position(|c| c.units.is_empty()) {
        return Err(if input.chunks.len() == 1 { PlanError::NoUnits } else { PlanError::EmptyChunk { chunk } });
    }
    let units = input.chunks.iter().map(|c| c.units.len()).sum();
    let limits =
        [("ranks", input.ranks, MOST_RANKS), ("parameters", input.params.len(), MOST_IDS), ("units", units, MOST_IDS)];
    match limits.into_iter().find(|(_, count, most)| count > most) {
        Some((what, count, most)) => Err(PlanError::TooMany { what, count, most }),
        None => Ok(()),
    }
}

fn groups(input: &PlanInput) -> Result<(), PlanError> {
    let (ranks, model_parallel) = (input.ranks, input.model_parallel);
    if model_parallel == 0 || !ranks.is_multiple_of(model_parallel) {
        return Err(PlanError::ModelParallel { ranks, model_parallel });
    }
    let Pipeline { stage, stages } = input.pipeline;
    if stages == 0 || !model_parallel.is_multiple_of(stages) || stage >= stages {
        return Err(PlanError::Pipeline { stage, stages, model_parallel });
    }
    let d = ranks / model_parallel;
    for (index, group) in input.shard_groups.iter().enumerate() {
        let name = || group.name.clone();
        if input.shard_groups[..index].iter().any(|other| other.name == group.name) {
            return Err(PlanError::ShardGroupTwice { name: name() });
        }
        if group.ranks == 0 || !d.is_multiple_of(group.ranks) {
            return Err(PlanError::ShardGroupRanks { name: name(), ranks: group.ranks, d });
        }
        if group.average_over == Some(0) {
            return Err(PlanError::ShardGroupAverage { name: name() });
        }
    }
    Ok(())
}

fn names(params: &[ParamSpec]) -> Result<(), PlanError> {
    let mut seen = HashMap::with_capacity(params.len());
    for (index, param) in params.iter().enumerate() {
        let second = ParamId::from_index(index);
        if let Some(first) = seen.insert(param.name.as_str(), second) {
            return Err(PlanError::RegisteredTwice { name: param.name.clone(), first, second });
        }
    }
    Ok(())
}

fn parameter(param: &ParamSpec, input: &PlanInput) -> Result<(), PlanError> {
    let name = || param.name.clone();
    if param.shape.is_empty() || param.shape.contains(&0) {
        return Err(PlanError::EmptyShape { name: name(), shape: param.shape.clone() });
    }
    if param.chunk >= input.chunks.len() {
        return Err(PlanError::ChunkOutOfRange { name: name(), chunk: param.chunk, chunks: input.chunks.len() });
    }
    if param.shard_group > input.shard_groups.len() {
        let (group, groups) = (param.shard_group, input.shard_groups.len());
        return Err(PlanError::ShardGroupOutOfRange { name: name(), group, groups });
    }
    if param.tensor_parallel && param.sum_over != SumOver::Nothing {
        return Err(PlanError::SumOverParts { name: name() });
    }
    if !param.trainable {
        return Ok(());
    }
    if param.group >= input.groups {
        return Err(PlanError::GroupOutOfRange { name: name(), group: param.group, groups: input.groups });
    }
    match (param.dtype, param.grad_dtype) {
        (DType::F32, DType::F32 | DType::Bf16 | DType::F16)
        | (DType::Bf16, DType::F32 | DType::Bf16)
        | (DType::F16, DType::F32 | DType::F16) => {}
        (dtype, grad_dtype) => return Err(PlanError::DTypes { name: name(), dtype, grad_dtype }),
    }
    match input.storage {
        Storage::Shared if !fits(param.dtype, param.grad_dtype) => {
            Err(PlanError::DoesNotFit { name: name(), dtype: param.dtype, grad_dtype: param.grad_dtype })
        }
        Storage::Views | Storage::Shared => Ok(()),
    }
}

/// Whether a parameter's elements find room in the memory of its gradient's (SPEC P5).
pub(super) fn fits(dtype: DType, grad_dtype: DType) -> bool {
    dtype.bytes() <= grad_dtype.bytes()
}

/// Every parameter padded as if it closed a bucket, in every allocation, must still be addressable.
fn sizes(input: &PlanInput) -> Result<(), PlanError> {
    let end_align = layout::end_alignment(input.ranks, input.alignment) as u128;
    let mut elements = 0_u128;
    for param in &input.params {
        let numel = param.shape.iter().try_fold(1_u128, |n, &dim| n.checked_mul(dim as u128));
        elements = numel.map_or(u128::MAX, |n| elements.saturating_add(n).saturating_add(end_align));
        if elements.saturating_mul(BYTES_PER_ELEMENT) > isize::MAX as u128 {
            return Err(PlanError::TooLarge { name: param.name.clone(), shape: param.shape.clone() });
        }
    }
    Ok(())
}

fn uses(input: &PlanInput) -> Result<(), PlanError> {
    let mut used = vec![false; input.params.len()];
    for (chunk, units) in input.chunks.iter().map(|c| &c.units).enumerate() {
        for unit in units {
            for &param in &unit.params {
                let Some(used) = used.get_mut(param.index()) else {
                    let (unit, params) = (unit.name.clone(), input.params.len());
                    return Err(PlanError::UnknownParam { unit, chunk, param, params });
                };
                *used = true;
            }
        }
    }
    match used.iter().position(|used| !used) {
        Some(index) => Err(PlanError::UsedByNoUnit { name: input.params[index].name.clone() }),
        None => Ok(()),
    }
}

fn shared_copies(input: &PlanInput) -> Result<(), PlanError> {
    let mut firsts: HashMap<&str, &ParamSpec> = HashMap::new();
    for other in &input.params {
        let Some(shared) = &other.shared else { continue };
        let first = *firsts.entry(shared).or_insert(other);
        if let Some(what) = Traits::of_spec(first, input).difference(&Traits::of_spec(other, input)) {
            let (first, other) = (first.name.clone(), other.name.clone());
            return Err(PlanError::SharedDiffer { shared: shared.clone(), first, other, what });
        }
    }
    Ok(())
}
