//! Phase 2 of a collective: each rank moves or sums its own part, reading its peers' memory.
//!
//! Sums are in rank order and f32, from the wire's element type, a chunk at a time: a chunk of the sum stays in the first
//! cache level while the ranks' chunks stream through, and the loops vectorise.
//!
//! This file contains unsafe code: peers' memory. The one contract, on [`mine`]: all ranks have posted memory that fits
//! the shape ([`super::shape`]) and nobody but these copies touches it until all of them are done.

use half::{bf16, f16};

use super::shape::Shape;
use crate::convert;
use crate::dtype::{DType, Element};

/// One rank's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Post {
    pub(super) send: *const u8,
    pub(super) recv: *mut u8,
}

// SAFETY: the pointers are only used by `mine`, whose contract covers every thread that calls it.
unsafe impl Send for Post {}
// SAFETY: as above.
unsafe impl Sync for Post {}

/// Elements of a sum that are worked on at a time: 8 KiB of f32.
const CHUNK: usize = 2048;

/// Does the part of the member in slot `rank`; `posts` are by slot.
///
/// # Safety
/// Every post fits the shape as `Shape::of` checks it, is valid until all ranks' calls have returned, and nobody else
/// touches it meanwhile.
pub(super) unsafe fn mine(shape: Shape, rank: usize, posts: &[Post]) {
    match shape {
        // SAFETY: the caller's promise.
        Shape::AllGather { part } => unsafe { all_gather(part, rank, posts) },
        // SAFETY: the caller's promise.
        Shape::ReduceScatter { numel, dtype: DType::F32 } => unsafe { sum::<f32>(numel, rank, posts) },
        // SAFETY: the caller's promise.
        Shape::ReduceScatter { numel, dtype: DType::Bf16 } => unsafe { sum::<bf16>(numel, rank, posts) },
        // SAFETY: the caller's promise.
        Shape::ReduceScatter { numel, dtype: DType::F16 } => unsafe { sum::<f16>(numel, rank, posts) },
        // SAFETY: the caller's promise.
        Shape::AllReduce { numel } => unsafe { sum_everywhere(numel, rank, posts) },
        Shape::Broadcast { bytes, root } if root != rank => {
            // SAFETY: `bytes` fits both ranges, which belong to different ranks and so do not overlap; only the root's is
            // read, and only others' are written.
            unsafe { std::ptr::copy_nonoverlapping(posts[root].send, posts[rank].recv, bytes) };
        }
        Shape::Broadcast { .. } => {}
    }
}

/// # Safety
/// As [`mine`].
unsafe fn all_gather(part: usize, rank: usize, posts: &[Post]) {
    for (peer, post) in posts.iter().enumerate() {
        // SAFETY: slot `peer` lies inside `recv`, which has one slot of `part` bytes per rank.
        let slot = unsafe { posts[rank].recv.add(peer * part) };
        if !std::ptr::eq(slot.cast_const(), post.send) {
            // SAFETY: a rank writes its own `recv`; in place only the slots of others, which no peer reads. What is not
            // in place does not overlap.
            unsafe { std::ptr::copy_nonoverlapping(post.send, slot, part) };
        }
    }
}

/// # Safety
/// As [`mine`], with `T` the shape's element type.
unsafe fn sum<T: Element>(numel: usize, rank: usize, posts: &[Post]) {
    if let [only] = posts
        && std::ptr::eq(only.send, only.recv)
    {
        return;
    }
    let mut total = [0.0_f32; CHUNK];
    for start in (0..numel).step_by(CHUNK) {
        let total = &mut total[..CHUNK.min(numel - start)];
        // SAFETY: these elements of slot `rank` lie inside every `send`. In place this rank alone writes them, below.
        unsafe { add_up::<T>(rank * numel + start, posts, total) };
        // SAFETY: `numel` elements fit `recv`; no peer reads them. Copied as bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(total.as_ptr().cast(), posts[rank].recv.add(4 * start), 4 * total.len());
        };
    }
}

/// Each member sums one slice of the elements and writes it to everyone.
///
/// # Safety
/// As [`mine`].
unsafe fn sum_everywhere(numel: usize, rank: usize, posts: &[Post]) {
    if posts.len() == 1 {
        return;
    }
    let (from, to) = (numel * rank / posts.len(), numel * (rank + 1) / posts.len());
    let mut total = [0.0_f32; CHUNK];
    for start in (from..to).step_by(CHUNK) {
        let total = &mut total[..CHUNK.min(to - start)];
        // SAFETY: these elements lie inside every range, in the slice that this member alone touches.
        unsafe { add_up::<f32>(start, posts, total) };
        for post in posts {
            // SAFETY: as above. Copied as bytes.
            unsafe { std::ptr::copy_nonoverlapping(total.as_ptr().cast(), post.recv.add(4 * start), 4 * total.len()) };
        }
    }
}

/// The sum of every member's elements from `start` on, in the members' order.
///
/// # Safety
/// As [`mine`]; the elements lie inside every member's `send`, and nobody writes them meanwhile.
unsafe fn add_up<T: Element>(start: usize, posts: &[Post], total: &mut [f32]) {
    for (peer, post) in posts.iter().enumerate() {
        // SAFETY: the caller's promise; aligned as `Shape::of` has checked.
        let part = unsafe { std::slice::from_raw_parts(post.send.cast::<T>().add(start), total.len()) };
        if peer == 0 {
            convert::cast(part, total);
        } else {
            convert::add(part, total);
        }
    }
}
