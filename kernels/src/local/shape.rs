//! What a collective does on one rank, reduced to what ranks compare and what copying needs, and checked.
//!
//! In place means exactly that: the part of one range that the other is. Any other overlap is refused, because copying
//! relies on it: in phase 2 a rank writes only bytes that no peer touches.

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
    /// Everyone gets the sum of `numel` elements, f32.
    AllReduce { numel: usize },
    /// Everyone gets the root's bytes.
    Broadcast { bytes: usize, root: usize },
}

impl Shape {
    /// The shape of a collective of `members` ranks on the one in `slot`.
    ///
    /// # Errors
    /// [`CommError::Shape`] if the memory does not fit the operation.
    pub(super) fn of(
        collective: &Collective,
        memory: &HostMemory,
        slot: usize,
        members: usize,
    ) -> Result<Self, CommError> {
        let fit = match &collective.op {
            CollectiveOp::AllGather { .. } => all_gather(memory, slot, members),
            CollectiveOp::ReduceScatter { dtype, .. } => reduce_scatter(memory, *dtype, slot, members),
            CollectiveOp::AllReduce { .. } => all_reduce(memory),
            CollectiveOp::Broadcast { root, .. } if *root >= members => {
                Err(format!("broadcast from rank {root}, but there are {members} ranks"))
            }
            CollectiveOp::Broadcast { .. } if memory.send_bytes != memory.recv_bytes => Err(different(memory)),
            CollectiveOp::Broadcast { root, .. } => Ok(Self::Broadcast { bytes: memory.recv_bytes, root: *root }),
        };
        fit.map_err(|reason| CommError::Shape { seq: collective.key.seq, reason })
    }

    /// Bytes that cross one direction of a link: as a ring moves them.
    pub(super) fn wire_bytes(self, members: usize) -> f64 {
        let ring = members.saturating_sub(1) as f64;
        match self {
            Self::AllReduce { numel } => 2.0 * ring / members as f64 * (4 * numel) as f64,
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
            Self::AllReduce { numel } => write!(f, "all-reduce of {numel} elements"),
            Self::Broadcast { bytes, root } => write!(f, "broadcast of {bytes} bytes from rank {root}"),
        }
    }
}

fn all_gather(memory: &HostMemory, slot: usize, members: usize) -> Result<Shape, String> {
    let part = memory.send_bytes;
    if part.checked_mul(members) != Some(memory.recv_bytes) {
        return Err(format!("all-gather of {part} bytes on {members} ranks into {} bytes", memory.recv_bytes));
    }
    let (send, recv) = (memory.send.addr(), memory.recv.addr());
    apart_or_at((send, part), (recv, memory.recv_bytes), recv + slot * part)?;
    Ok(Shape::AllGather { part })
}

fn reduce_scatter(memory: &HostMemory, dtype: DType, slot: usize, members: usize) -> Result<Shape, String> {
    let (send, recv) = (memory.send.addr(), memory.recv.addr());
    let numel = memory.recv_bytes / 4;
    let part = numel * dtype.bytes();
    if !memory.recv_bytes.is_multiple_of(4) || part.checked_mul(members) != Some(memory.send_bytes) {
        let (from, to) = (memory.send_bytes, memory.recv_bytes);
        return Err(format!("reduce-scatter of {from} bytes of {dtype} on {members} ranks into {to} bytes of f32"));
    }
    if !recv.is_multiple_of(4) || !send.is_multiple_of(dtype.bytes()) {
        return Err(format!("reduce-scatter on memory that is not aligned to {dtype} and f32"));
    }
    let in_place = if dtype == DType::F32 { send + slot * part } else { usize::MAX };
    apart_or_at((recv, memory.recv_bytes), (send, memory.send_bytes), in_place)?;
    Ok(Shape::ReduceScatter { numel, dtype })
}

fn all_reduce(memory: &HostMemory) -> Result<Shape, String> {
    let (from, to) = (memory.send_bytes, memory.recv_bytes);
    if from != to || !to.is_multiple_of(4) || !std::ptr::eq(memory.send, memory.recv) {
        return Err(format!("all-reduce of {from} bytes into {to}: it is of f32 and in place"));
    }
    if !memory.recv.addr().is_multiple_of(4) {
        return Err("all-reduce on memory that is not aligned to f32".into());
    }
    Ok(Shape::AllReduce { numel: to / 4 })
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
