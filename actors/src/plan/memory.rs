//! Which allocations a rank makes, in bytes, and into which cells they are divided, in each storage (SPEC P5).
//!
//! The runtime allocates exactly these, so what the plan prints is what is allocated. Cells are the ranges that are
//! leased and checked as one; they follow what is worked on at once: buckets, gradients of parameters, shards.
//!
//! With storage `shared` a gather lands at the front of its bucket's gradients, from where the parameters are copied to the
//! memory that the model reads. What it sends cannot lie there too: rank 0's shard would lie on gradients that its own Adam
//! has not read. So Adam writes 16-bit parameters to a staging shard; f32 ones are sent from their own masters, which lie in
//! the model's memory. Staging is as large as what a rank owns, whatever the number of buckets.

use gatherflow_kernels::DType;
use gatherflow_kernels::norm::Partial;
use gatherflow_kernels::verdict::{RankRecord, Scalars};

use super::Plan;
use super::check::fits;
use super::ids::{BufferIndex, FrozenIndex, ParamId};
use super::input::Storage;
use super::layout::BufferPlan;

const F32: usize = DType::F32.bytes();

/// What an allocation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Purpose {
    /// The parameters of a buffer, in their own dtype: what the model reads. One cell per bucket.
    Params(BufferIndex),
    /// The gradients of a buffer; with storage `shared` gathers land there. One cell per parameter, with the padding
    /// behind it.
    Grads(BufferIndex),
    /// Reduced gradients in f32, where gradients are not: else they are reduced in place. One cell per shard.
    Reduced(BufferIndex),
    /// The f32 masters of 16-bit parameters. One cell per shard.
    Master(BufferIndex),
    /// Storage `shared`: what Adam writes of 16-bit parameters and the gather sends, in their dtype. One cell per shard.
    Staging(BufferIndex),
    /// First moments, f32. One cell per shard.
    ExpAvg(BufferIndex),
    /// Second moments, f32. One cell per shard.
    ExpAvgSq(BufferIndex),
    /// Frozen parameters. One cell per parameter, with the padding behind it.
    Frozen(FrozenIndex),
    /// One norm partial per bucket, by bucket number. Empty where nothing is trained.
    Partials,
    /// One record per rank.
    Records,
    /// The step's scalars.
    Scalars,
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Params(b) => write!(f, "parameters of {b}"),
            Self::Grads(b) => write!(f, "gradients of {b}"),
            Self::Reduced(b) => write!(f, "reduced gradients of {b}"),
            Self::Master(b) => write!(f, "masters of {b}"),
            Self::Staging(b) => write!(f, "staging of {b}"),
            Self::ExpAvg(b) => write!(f, "exp_avg of {b}"),
            Self::ExpAvgSq(b) => write!(f, "exp_avg_sq of {b}"),
            Self::Frozen(b) => write!(f, "{b}"),
            Self::Partials => f.write_str("norm partials"),
            Self::Records => f.write_str("rank records"),
            Self::Scalars => f.write_str("scalars"),
        }
    }
}

/// One allocation of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// What it is for; prints as its name.
    pub purpose: Purpose,
    /// Its size.
    pub bytes: usize,
    /// Ascending end offsets of its cells in bytes; the last is `bytes`. Empty where `bytes` is 0.
    pub cells: Vec<usize>,
}

impl Allocation {
    fn new(purpose: Purpose, cells: Vec<usize>) -> Self {
        Self { purpose, bytes: cells.last().copied().unwrap_or(0), cells }
    }
}

/// All allocations of a rank, in the order in which they are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The allocations.
    pub allocations: Vec<Allocation>,
}

impl Memory {
    /// The allocation for this purpose, if the plan has one.
    pub fn get(&self, purpose: Purpose) -> Option<&Allocation> {
        self.allocations.iter().find(|a| a.purpose == purpose)
    }

    /// Bytes of all staging shards together; 0 with storage `views`.
    pub fn staging_bytes(&self) -> usize {
        let staging = self.allocations.iter().filter(|a| matches!(a.purpose, Purpose::Staging(_)));
        staging.map(|a| a.bytes).sum()
    }

    /// Bytes of all allocations together.
    pub fn total_bytes(&self) -> usize {
        self.allocations.iter().map(|a| a.bytes).sum()
    }
}

impl Plan {
    /// What a rank allocates. All ranks own equally much, so it is the same on every rank.
    pub fn memory(&self) -> Memory {
        self.allocations(self.storage)
    }

    /// What a rank would allocate with this storage; `None` if some parameter does not fit into its gradient's memory.
    pub fn memory_with(&self, storage: Storage) -> Option<Memory> {
        let possible = storage == Storage::Views || self.buffers().iter().all(|b| fits(b.dtype, b.grad_dtype));
        possible.then(|| self.allocations(storage))
    }

    fn allocations(&self, storage: Storage) -> Memory {
        let mut allocations = Vec::new();
        for buffer in self.buffers() {
            let index = buffer.index;
            let ends = buffer.buckets().map(|b| self.bucket(b).range.end);
            let params = ends.map(|end| end * buffer.dtype.bytes()).collect();
            allocations.push(Allocation::new(Purpose::Params(index), params));
            allocations.push(Allocation::new(Purpose::Grads(index), self.gradient_cells(buffer)));
            let shards: Vec<usize> =
                buffer.buckets().map(|b| self.bucket(b)).map(|b| (b.shard_start + b.shard_numel) * F32).collect();
            if buffer.grad_dtype != DType::F32 {
                allocations.push(Allocation::new(Purpose::Reduced(index), shards.clone()));
            }
            if buffer.dtype != DType::F32 {
                allocations.push(Allocation::new(Purpose::Master(index), shards.clone()));
                if storage == Storage::Shared {
                    let staging = shards.iter().map(|end| end / F32 * buffer.dtype.bytes()).collect();
                    allocations.push(Allocation::new(Purpose::Staging(index), staging));
                }
            }
            allocations.push(Allocation::new(Purpose::ExpAvg(index), shards.clone()));
            allocations.push(Allocation::new(Purpose::ExpAvgSq(index), shards));
        }
        for frozen in self.frozen() {
            let cells = self.cells_of(&frozen.params, frozen.numel, frozen.dtype.bytes());
            allocations.push(Allocation::new(Purpose::Frozen(frozen.index), cells));
        }
        let slots = |count: usize, bytes: usize| (1..=count).map(|i| i * bytes).collect();
        allocations.push(Allocation::new(Purpose::Partials, slots(self.buckets().len(), Partial::BYTES)));
        allocations.push(Allocation::new(Purpose::Records, slots(self.ranks(), RankRecord::BYTES)));
        allocations.push(Allocation::new(Purpose::Scalars, vec![Scalars::BYTES]));
        Memory { allocations }
    }

    fn gradient_cells(&self, buffer: &BufferPlan) -> Vec<usize> {
        self.cells_of(&buffer.params, buffer.numel, buffer.grad_dtype.bytes())
    }

    /// One cell per parameter, each reaching to the start of the next: bucket ends are such starts.
    fn cells_of(&self, params: &[ParamId], numel: usize, element_bytes: usize) -> Vec<usize> {
        let starts = params.iter().skip(1).map(|p| self.param(*p).home.range().start);
        starts.chain(params.first().map(|_| numel)).map(|end| end * element_bytes).collect()
    }
}
