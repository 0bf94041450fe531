//! What a collective does on one rank, reduced to what ranks compare and what copying needs, and checked.
//!
//! In place means exactly that: the part of one range that the other is. Any other overlap is refused, because copying
//! relies on it: in phase 2 a rank writes only bytes that no peer reads.

use crate::collective::{Collective, CollectiveOp, HostMemory};
use crate::dtype::DType;
use crate::error::CommError;

/// The operation without its memory: what ranks must agree on besides the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// `recv` gets every rank's `part` bytes.
    AllGather { part: usize },
    /// `recv` gets the sum of `numel` elements.
    ReduceScatter { numel: usize, dtype: DType },
    /// Everyone gets the root's bytes.
    Broadcast { bytes: usize, root: usize },
}

impl Shape {
    /// The shape of a collective of `world` ranks on this rank.
    ///
    /// # Errors
    /// [`CommError::Shape`] if the memory does not fit the operation.
    pub(super) fn of(
        collective: &Collective,
        memory: &HostMemory,
        rank: usize,
        world: usize,
    ) -> Result<Self, CommError> {
        let fit = match &collective.op {
            CollectiveOp::AllGather { .. } => all_gather(memory, rank, world),
            CollectiveOp::ReduceScatter { dtype, .. } => reduce_scatter(memory, *dtype, rank, world),
            CollectiveOp::Broadcast { root, .. } if *root >= world => {
                Err(format!("broadcast from rank {root}, but there are {world} ranks"))
            }
            CollectiveOp::Broadcast { .. } if memory.send_bytes != memory.recv_bytes => Err(different(memory)),
            CollectiveOp::Broadcast { root, .. } => Ok(Self::Broadcast { bytes: memory.recv_bytes, root: *root }),
        };
        fit.map_err(|reason| CommError::Shape { seq: collective.key.seq, reason })
    }

    /// Bytes that cross one direction of a link: as a ring moves them.
    pub(super) fn wire_bytes(self, world: usize) -> f64 {
        let ring = world.saturating_sub(1) as f64;
        match self {
            Self::AllGather { part } => ring * part as f64,
            Self::ReduceScatter { numel, dtype } => ring * (numel * dtype.bytes()) as f64,
            Self::Broadcast { bytes, .. } => bytes as f64,
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllGather { part } => write!(f, "all-gather of {part} bytes per rank"),
            Self::ReduceScatter { numel, dtype } => write!(f, "reduce-scatter to {numel} elements from {dtype}"),
            Self::Broadcast { bytes, root } => write!(f, "broadcast of {bytes} bytes from rank {root}"),
        }
    }
}

fn all_gather(memory: &HostMemory, rank: usize, world: usize) -> Result<Shape, String> {
    let part = memory.send_bytes;
    if part.checked_mul(world) != Some(memory.recv_bytes) {
        return Err(format!("all-gather of {part} bytes on {world} ranks into {} bytes", memory.recv_bytes));
    }
    let (send, recv) = (memory.send.addr(), memory.recv.addr());
    apart_or_at((send, part), (recv, memory.recv_bytes), recv + rank * part)?;
    Ok(Shape::AllGather { part })
}

fn reduce_scatter(memory: &HostMemory, dtype: DType, rank: usize, world: usize) -> Result<Shape, String> {
    let (send, recv) = (memory.send.addr(), memory.recv.addr());
    let numel = memory.recv_bytes / 4;
    let slot = numel * dtype.bytes();
    if !memory.recv_bytes.is_multiple_of(4) || slot.checked_mul(world) != Some(memory.send_bytes) {
        let (from, to) = (memory.send_bytes, memory.recv_bytes);
        return Err(format!("reduce-scatter of {from} bytes of {dtype} on {world} ranks into {to} bytes of f32"));
    }
    if !recv.is_multiple_of(4) || !send.is_multiple_of(dtype.bytes()) {
        return Err(format!("reduce-scatter on memory that is not aligned to {dtype} and f32"));
    }
    let in_place = if dtype == DType::F32 { send + rank * slot } else { usize::MAX };
    apart_or_at((recv, memory.recv_bytes), (send, memory.send_bytes), in_place)?;
    Ok(Shape::ReduceScatter { numel, dtype })
}

/// The small range may lie outside the large one, or start where in place means.
fn apart_or_at(small: (usize, usize), large: (usize, usize), in_place: usize) -> Result<(), String> {
    let apart = small.1 == 0 || small.0 + small.1 <= large.0 || large.0 + large.1 <= small.0;
    if apart || small.0 == in_place {
        return Ok(());
    }
    Err("send and receive overlap, but not in place (the rank's own slot)".into())
}

fn different(memory: &HostMemory) -> String {
    format!("broadcast of {} bytes into {} bytes", memory.send_bytes, memory.recv_bytes)
}
