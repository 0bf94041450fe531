//! Host slices, checked at run time.
//!
//! Every allocation is divided into cells, each with one atomic: free, some readers, or one writer. A [`Lease`] and every
//! piece of work that runs hold the cells they touch, so a host slice can never alias running work, whatever the callers
//! do. A lease on part of a cell holds the whole cell. Rule V3 (types) makes the check never fail.
//!
//! The memory itself lives in `arena` (shared by the cpu and the null device), what running work holds in `hold`. Taking
//! a lease costs a binary search over the ends of the cells and one atomic per cell touched; nothing is allocated. A
//! refusal is a [`LeaseError`] that names the range; nothing stays held after it.
//!
//! This file contains unsafe code: the slices into the memory behind buffers.

mod arena;
mod hold;

pub(crate) use arena::Arena;
pub(crate) use hold::{Holds, Operands};

use crate::buffer::BufRange;
use crate::device::AccessMode;
use crate::dtype::Element;
use crate::error::LeaseError;
use arena::Hold;

/// A host slice into a buffer, given back on drop. A read lease can be shared, a write lease is exclusive.
///
/// It keeps its memory alive: it may outlive the device.
#[derive(Debug)]
pub struct Lease {
    hold: Hold,
}

impl Lease {
    /// What is leased.
    pub fn range(&self) -> BufRange {
        self.hold.range
    }

    /// How it is leased.
    pub fn mode(&self) -> AccessMode {
        self.hold.mode
    }

    /// The range as elements.
    ///
    /// # Errors
    /// [`LeaseError::Misaligned`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T], LeaseError> {
        let numel = self.hold.numel::<T>()?;
        // SAFETY: in bounds and aligned (`numel`), every bit pattern is a `T` (sealed trait), the memory is initialised
        // and lives as long as the hold. The held cells keep writers away, and `&self` keeps `as_mut_slice` away.
        Ok(unsafe { std::slice::from_raw_parts(self.hold.start().cast::<T>(), numel) })
    }

    /// The range as elements, writable.
    ///
    /// # Errors
    /// [`LeaseError::Misaligned`]; [`LeaseError::Conflict`] on a read lease.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], LeaseError> {
        self.writable()?;
        let numel = self.hold.numel::<T>()?;
        // SAFETY: as in `as_slice`; the held cells are held for writing, so nobody else has a slice, and `&mut self`
        // makes this the only one of this lease.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.hold.start().cast::<T>(), numel) })
    }

    /// The range as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: in bounds; bytes need no alignment; see `as_slice`.
        unsafe { std::slice::from_raw_parts(self.hold.start(), self.hold.range.bytes()) }
    }

    /// The range as bytes, writable.
    ///
    /// # Errors
    /// [`LeaseError::Conflict`] on a read lease.
    pub fn as_mut_bytes(&mut self) -> Result<&mut [u8], LeaseError> {
        self.writable()?;
        // SAFETY: in bounds; bytes need no alignment; see `as_mut_slice`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.hold.start(), self.hold.range.bytes()) })
    }

    fn writable(&self) -> Result<(), LeaseError> {
        match self.hold.mode {
            AccessMode::Write => Ok(()),
            AccessMode::Read => Err(LeaseError::Conflict {
                range: self.hold.range,
                wanted: AccessMode::Write,
                held: "reading, by this lease",
            }),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.hold.release(&|_| false);
    }
}

#[cfg(test)]
mod tests;
