//! The memory behind buffers: zeroed blocks, divided into cells.
//!
//! Blocks are aligned to 64 bytes; from 2 MiB on to 2 MiB, and the system is asked for huge pages. A block lives as long
//! as the arena or any hold on it, so a leaked stream thread can never touch freed memory. Finding a block takes a read
//! lock that only an allocation takes for writing.
//!
//! This file contains unsafe code: the allocation itself.

use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::Lease;
use crate::buffer::{BufRange, Buffer, BufferId};
use crate::device::AccessMode;
use crate::dtype::Element;
use crate::error::{DeviceError, LeaseError};

const ALIGN: usize = 64;
const HUGE: usize = 2 << 20;

/// A cell with one writer; any other number counts readers.
const WRITER: u32 = u32::MAX;

/// All allocations of one device.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    blocks: RwLock<Vec<Arc<Block>>>,
    bytes: AtomicUsize,
}

/// One allocation.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
    ends: Box<[usize]>,
    cells: Box<[AtomicU32]>,
}

// SAFETY: the memory is reached only under held cells (or by whoever promises as much, see `Holds::memory`), and the
// cells are atomics.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// The cells of one range, held in one mode. Whoever owns it calls `release` once.
#[derive(Debug)]
pub(super) struct Hold {
    block: Arc<Block>,
    cells: Range<usize>,
    pub(super) range: BufRange,
    pub(super) mode: AccessMode,
}

impl Arena {
    /// See [`crate::Device::alloc`]. Cells may be empty (equal ends).
    pub(crate) fn alloc(&self, bytes: usize, cells: &[usize]) -> Result<Buffer, DeviceError> {
        let whole = [bytes];
        let ends = if cells.is_empty() { &whole[..] } else { cells };
        if !ends.is_sorted() || ends.last() != Some(&bytes) {
            return Err(DeviceError::BadCells { bytes });
        }
        let block = Arc::new(Block::new(bytes, ends)?);
        let mut blocks = self.blocks.write();
        let id = u32::try_from(blocks.len()).map_err(|_| DeviceError::OutOfMemory { bytes })?;
        blocks.push(block);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Buffer { id: BufferId(id), bytes })
    }

    /// See [`crate::Device::allocated_bytes`].
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// See [`crate::Device::lease`].
    pub(crate) fn lease(&self, range: BufRange, mode: AccessMode) -> Result<Lease, LeaseError> {
        Ok(Lease { hold: self.hold(range, mode, &|_, _| false)? })
    }

    /// Holds the cells of a range, except those that the caller holds already (`mine`). On an error nothing is held.
    pub(super) fn hold(
        &self,
        range: BufRange,
        mode: AccessMode,
        mine: &dyn Fn(BufferId, usize) -> bool,
    ) -> Result<Hold, LeaseError> {
        let block = self.blocks.read().get(range.buffer.0 as usize).cloned();
        let block = block.ok_or(LeaseError::OutOfBounds { range })?;
        let cells = block.cells_of(range)?;
        for cell in cells.clone() {
            if mine(range.buffer, cell) {
                continue;
            }
            if let Err(held) = block.take(cell, mode) {
                Hold { block, cells: cells.start..cell, range, mode }.release(&|cell| mine(range.buffer, cell));
                return Err(LeaseError::Conflict { range, wanted: mode, held });
            }
        }
        Ok(Hold { block, cells, range, mode })
    }
}

impl Block {
    fn new(bytes: usize, ends: &[usize]) -> Result<Self, DeviceError> {
        let align = if bytes >= HUGE { HUGE } else { ALIGN };
        let out_of_memory = DeviceError::OutOfMemory { bytes };
        let Ok(layout) = Layout::from_size_align(bytes.max(ALIGN), align) else { return Err(out_of_memory) };
        // SAFETY: the layout's size is not zero.
        let start = unsafe { std::alloc::alloc(layout) };
        let start = NonNull::new(start).ok_or(out_of_memory)?;
        if bytes >= HUGE {
            ask_for_huge_pages(start, bytes);
        }
        // SAFETY: the allocation is at least as long as its layout says.
        unsafe { start.write_bytes(0, layout.size()) };
        Ok(Self { start, layout, ends: ends.into(), cells: ends.iter().map(|_| AtomicU32::new(0)).collect() })
    }

    fn cells_of(&self, range: BufRange) -> Result<Range<usize>, LeaseError> {
        let bytes = self.ends.last().copied().unwrap_or(0);
        if range.start > range.end || range.end > bytes {
            return Err(LeaseError::OutOfBounds { range });
        }
        if range.start == range.end {
            return Ok(0..0);
        }
        let first = self.ends.partition_point(|&end| end <= range.start);
        let last = first + self.ends[first..].partition_point(|&end| end < range.end);
        Ok(first..last + 1)
    }

    fn take(&self, cell: usize, mode: AccessMode) -> Result<(), &'static str> {
        let cell = &self.cells[cell];
        let word = |now| if now == WRITER { "writing" } else { "reading" };
        match mode {
            AccessMode::Write => {
                cell.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).map(|_| ()).map_err(word)
            }
            AccessMode::Read => cell
                .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| (now < WRITER - 1).then(|| now + 1))
                .map(|_| ())
                .map_err(word),
        }
    }

    fn give_back(&self, cell: usize, mode: AccessMode) {
        match mode {
            AccessMode::Write => self.cells[cell].store(0, Ordering::Release),
            AccessMode::Read => {
                self.cells[cell].fetch_sub(1, Ordering::Release);
            }
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and nobody holds a part of it: holds own the block.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl Hold {
    /// The range's first byte.
    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: `cells_of` has checked the range against the block's length.
        unsafe { self.block.start.as_ptr().add(self.range.start) }
    }

    /// The range's length in elements, if it is one of aligned elements.
    pub(super) fn numel<T: Element>(&self) -> Result<usize, LeaseError> {
        let size = size_of::<T>();
        if self.range.bytes().is_multiple_of(size) && self.range.start.is_multiple_of(align_of::<T>()) {
            Ok(self.range.bytes() / size)
        } else {
            Err(LeaseError::Misaligned { range: self.range, element_bytes: size })
        }
    }

    /// Whether the range covers this cell.
    pub(super) fn covers(&self, buffer: BufferId, cell: usize) -> bool {
        self.range.buffer == buffer && self.cells.contains(&cell)
    }

    /// Gives the cells back, except those that were not taken by this hold.
    pub(super) fn release(&self, not_taken: &dyn Fn(usize) -> bool) {
        for cell in self.cells.clone() {
            if !not_taken(cell) {
                self.block.give_back(cell, self.mode);
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the range was just allocated and is page-aligned; the advice changes no contents. A refusal is no error.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: NonNull<u8>, _: usize) {}
