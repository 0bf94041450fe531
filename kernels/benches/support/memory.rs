//! Arrays under huge pages, and numbers to fill them with.
//!
//! Contains unsafe code: the allocation and its slices.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

const HUGE_PAGE: usize = 2 << 20;

/// Arrays made so far. Each starts a little further into its first page than the last: where all start alike, loads wait for
/// stores to other arrays at the same offset in a page, and all arrays meet in the same cache sets.
static MADE: AtomicUsize = AtomicUsize::new(0);
const STAGGER: usize = 17 * 64;
const STAGGERS: usize = 61;

/// An array under huge pages.
pub(crate) struct Array<T: Copy> {
    allocation: *mut u8,
    start: *mut T,
    len: usize,
    layout: Layout,
}

// SAFETY: an array owns its allocation, as a `Vec` does.
unsafe impl<T: Copy + Send> Send for Array<T> {}
// SAFETY: a shared array only gives shared slices.
unsafe impl<T: Copy + Sync> Sync for Array<T> {}

impl<T: Copy> Array<T> {
    /// `len` elements, each given by its index.
    pub(crate) fn from_fn(len: usize, mut element: impl FnMut(usize) -> T) -> Self {
        let offset = (MADE.fetch_add(1, Ordering::Relaxed) % STAGGERS) * STAGGER;
        let bytes = (offset + len * size_of::<T>()).max(1).next_multiple_of(HUGE_PAGE);
        let layout = Layout::from_size_align(bytes, HUGE_PAGE).expect("sizes of benchmarks are small");
        // SAFETY: the layout is not of size 0.
        let allocation = unsafe { alloc(layout) };
        if allocation.is_null() {
            handle_alloc_error(layout);
        }
        #[cfg(target_os = "linux")]
        {
            // SAFETY: the range is the allocation. The advice changes no contents; a refusal only costs speed.
            unsafe { libc::madvise(allocation.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: `bytes` leaves room for the offset.
        let start = unsafe { allocation.add(offset) }.cast::<T>();
        for i in 0..len {
            // SAFETY: `i` is within the allocation, and the offset is a multiple of a cache line: aligned for every number.
            unsafe { start.add(i).write(element(i)) };
        }
        Self { allocation, start, len, layout }
    }
}

impl<T: Copy> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `from_fn` with this layout.
        unsafe { dealloc(self.allocation, self.layout) };
    }
}

impl<T: Copy> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were written in `from_fn`, and the array is borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Copy> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` elements were written in `from_fn`, and the array is borrowed for this slice alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Numbers of either sign and different sizes, the same in every run.
pub(crate) fn noise(i: usize) -> f32 {
    let mixed = (i as u32).wrapping_mul(2_654_435_761).rotate_left(15).wrapping_mul(2_246_822_519);
    (mixed >> 8) as f32 / (1 << 23) as f32 - 1.0
}
