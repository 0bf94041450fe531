//! Work as data: what can be enqueued on a stream, each variant stating what it reads and writes.
//!
//! Devices interpret it, the null device logs it, the checker reads [`Work::accesses`] off it. Ranges are bytes, counts
//! are elements.

use std::sync::Arc;

use crate::adam::AdamRows;
use crate::buffer::BufRange;
use crate::collective::{Collective, CollectiveOp};
use crate::device::{Access, AccessMode};
use crate::dtype::DType;
use crate::norm::{NormPiece, NormType};
use crate::verdict::{HostVerdict, Report, ScalerRule, VerdictRule};

/// Something a stream can do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Work {
    /// Set every element.
    Fill(Fill),
    /// Copy bytes.
    Copy(Copy),
    /// Convert between element types.
    Cast(Cast),
    /// Search of one bucket's own gradients for non-finite elements, before they are reduced.
    FindNonFinite(FindNonFinite),
    /// Add to a sum.
    Add(Add),
    /// Partial gradient norm, zero count and non-finite search over one shard.
    NormPartials(NormPartials),
    /// This rank's partials to its record for the small all-gather.
    Fold(Fold),
    /// All ranks' records to the step's scalars: norm, clip factor, skip, scaler.
    Verdict(Verdict),
    /// The fused Adam pass over one shard.
    Adam(Adam),
    /// A collective; only through [`crate::Comm`].
    Collective(Collective),
}

/// `dst` gets `value`, rounded to `dtype`, in every element.
#[derive(Clone, Debug)]
pub struct Fill {
    /// Written.
    pub dst: BufRange,
    /// Element type of `dst`.
    pub dtype: DType,
    /// The value; NaN poisons.
    pub value: f32,
}

/// `dst` gets the bytes of `src`; equal lengths.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Read.
    pub src: BufRange,
    /// Written.
    pub dst: BufRange,
}

/// `dst` gets the elements of `src`, rounded to nearest even; equal counts.
#[derive(Clone, Debug)]
pub struct Cast {
    /// Read.
    pub src: BufRange,
    /// Element type of `src`.
    pub from: DType,
    /// Written.
    pub dst: BufRange,
    /// Element type of `dst`.
    pub to: DType,
}

/// One read over a bucket's gradients of this rank: see [`crate::finite`].
#[derive(Clone, Debug)]
pub struct FindNonFinite {
    /// Read: the gradients of the whole bucket.
    pub grad: BufRange,
    /// Their element type.
    pub dtype: DType,
    /// The parameters in it, ascending; counted or not.
    pub pieces: Arc<[NormPiece]>,
    /// Written: the end of the bucket's [`crate::norm::Partial`] ([`crate::norm::Partial::LOCAL_BYTES`] bytes).
    pub out: BufRange,
}

/// `sum` gets its elements plus those of `part`, both f32; equal counts.
#[derive(Clone, Debug)]
pub struct Add {
    /// Read.
    pub part: BufRange,
    /// Read and written.
    pub sum: BufRange,
}

/// One read over a reduced shard (f32): see [`crate::norm`].
#[derive(Clone, Debug)]
pub struct NormPartials {
    /// Read: the reduced shard, f32.
    pub grad: BufRange,
    /// Which norm.
    pub norm: NormType,
    /// The owned pieces of parameters in it, ascending.
    pub pieces: Arc<[NormPiece]>,
    /// Every gradient counts as multiplied by this: what [`Adam::ratio`] is.
    pub ratio: f64,
    /// Written: the beginning of the bucket's [`crate::norm::Partial`] ([`crate::norm::Partial::SHARD_BYTES`] bytes).
    pub out: BufRange,
}

/// This rank's partials, in plan order, and the host's verdict become one record.
#[derive(Clone, Debug)]
pub struct Fold {
    /// Read: [`crate::norm::Partial`]s one after the other.
    pub partials: BufRange,
    /// What only the host knows: abandoned gradients, weights.
    pub host: HostVerdict,
    /// Written: this rank's [`crate::verdict::RankRecord`].
    pub out: BufRange,
}

/// All ranks' records become the step's scalars (read by Adam) and the report (read by the host).
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Read: one [`crate::verdict::RankRecord`] per rank, in rank order.
    pub records: BufRange,
    /// Averaging, clipping and policies.
    pub rule: VerdictRule,
    /// The loss scaler.
    pub scaler: ScalerRule,
    /// Read and written: [`crate::verdict::Scalars`].
    pub scalars: BufRange,
    /// Where the host finds the result once the event behind this work is done.
    pub report: Report,
    /// The number of steps before this one (null device: the key of the script).
    pub step: u64,
}

/// The fused Adam pass over one shard: see [`crate::adam`].
#[derive(Clone, Debug)]
pub struct Adam {
    /// Read: the reduced gradient.
    pub grad: BufRange,
    /// Element type of the gradient.
    pub grad_dtype: DType,
    /// Read and written: the f32 master parameters (for f32 parameters their own memory).
    pub master: BufRange,
    /// Read and written: first moment, f32.
    pub exp_avg: BufRange,
    /// Read and written: second moment, f32.
    pub exp_avg_sq: BufRange,
    /// Written: the parameters in their own dtype; `None` where the master is the parameter.
    pub param: Option<(BufRange, DType)>,
    /// Read: [`crate::verdict::Scalars`].
    pub scalars: BufRange,
    /// Multiplies their factor: above 1 where fewer ranks average than the verdict's rule says. 1 changes no bit.
    pub ratio: f64,
    /// Which elements belong to which optimizer group, ascending; elements in no segment are padding.
    pub segments: Arc<[AdamSegment]>,
    /// One row of scalars per optimizer group, for each number of updated steps that is still possible.
    pub rows: AdamRows,
}

/// A run of elements of one optimizer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdamSegment {
    /// First element, counted from the shard's start.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// Index into [`Adam::rows`].
    pub group: usize,
}

impl Work {
    /// A short name for logs and errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fill(_) => "fill",
            Self::Copy(_) => "copy",
            Self::Cast(_) => "cast",
            Self::FindNonFinite(_) => "non-finite search",
            Self::Add(_) => "add",
            Self::NormPartials(_) => "norm partials",
            Self::Fold(_) => "fold",
            Self::Verdict(_) => "verdict",
            Self::Adam(_) => "adam",
            Self::Collective(_) => "collective",
        }
    }

    /// Calls `visit` for every range this work touches on this rank. Ranges may overlap each other (in-place
    /// collectives); that is no conflict of the work with itself.
    pub fn accesses(&self, visit: &mut dyn FnMut(Access)) {
        let mut read = |range: BufRange| visit(Access { range, mode: AccessMode::Read });
        match self {
            Self::Fill(_) => {}
            Self::Copy(w) => read(w.src),
            Self::Cast(w) => read(w.src),
            Self::FindNonFinite(w) => read(w.grad),
            Self::Add(w) => read(w.part),
            Self::NormPartials(w) => read(w.grad),
            Self::Fold(w) => read(w.partials),
            Self::Verdict(w) => read(w.records),
            Self::Adam(w) => {
                read(w.grad);
                read(w.scalars);
            }
            Self::Collective(c) => match &c.op {
                CollectiveOp::AllGather { send, .. } | CollectiveOp::ReduceScatter { send, .. } => read(*send),
                // One access: what it writes it has read.
                CollectiveOp::AllReduce { .. } | CollectiveOp::Broadcast { .. } => {}
            },
        }
        let mut write = |range: BufRange| visit(Access { range, mode: AccessMode::Write });
        match self {
            Self::Fill(w) => write(w.dst),
            Self::Copy(w) => write(w.dst),
            Self::Cast(w) => write(w.dst),
            Self::FindNonFinite(w) => write(w.out),
            Self::Add(w) => write(w.sum),
            Self::NormPartials(w) => write(w.out),
            Self::Fold(w) => write(w.out),
            Self::Verdict(w) => write(w.scalars),
            Self::Adam(w) => {
                write(w.master);
                write(w.exp_avg);
                write(w.exp_avg_sq);
                if let Some((param, _)) = w.param {
                    write(param);
                }
            }
            Self::Collective(c) => match &c.op {
                CollectiveOp::AllGather { recv, .. } | CollectiveOp::ReduceScatter { recv, .. } => write(*recv),
                CollectiveOp::AllReduce { range } | CollectiveOp::Broadcast { range, .. } => write(*range),
            },
        }
    }
}
