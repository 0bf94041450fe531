//! What running work holds: the cells of all its accesses, all of them or none.
//!
//! Writes are taken first, so where a work's own accesses overlap, writing wins; it never conflicts with itself. Slices
//! come out through [`Operands`], which refuses work whose ranges overlap where it writes; collectives, which may work in
//! place, get raw memory instead.
//!
//! This file contains unsafe code: the slices into held ranges.

use std::marker::PhantomData;

use super::arena::{Arena, Hold};
use crate::buffer::BufRange;
use crate::device::{Access, AccessMode};
use crate::dtype::Element;
use crate::error::{DeviceError, LeaseError};
use crate::work::Work;

/// No work touches more ranges than this (Adam: six).
const MOST: usize = 8;

/// The cells of all accesses of one piece of work, given back on drop.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: [Option<Hold>; MOST],
    len: usize,
}

/// The slices of one piece of work. Each written range is handed out once.
#[derive(Debug)]
pub(crate) struct Operands<'a> {
    holds: &'a Holds,
    taken: [bool; MOST],
    exclusive: PhantomData<&'a mut [u8]>,
}

impl Arena {
    /// Holds everything that the work touches.
    pub(crate) fn hold_all(&self, work: &Work) -> Result<Holds, DeviceError> {
        let mut holds = Holds::default();
        for mode in [AccessMode::Write, AccessMode::Read] {
            let mut result = Ok(());
            work.accesses(&mut |access: Access| {
                if access.mode == mode && result.is_ok() {
                    result = holds.add(self, access);
                }
            });
            result?;
        }
        Ok(holds)
    }
}

impl Holds {
    fn add(&mut self, arena: &Arena, access: Access) -> Result<(), LeaseError> {
        debug_assert!(self.len < MOST, "work with more than {MOST} accesses");
        let earlier = &self.held[..self.len];
        let hold = arena.hold(access.range, access.mode, &|buffer, cell| written(earlier, buffer, cell))?;
        self.held[self.len] = Some(hold);
        self.len += 1;
        Ok(())
    }

    /// The start of a held range. Valid while this lives; the ranges of a collective may overlap.
    pub(crate) fn memory(&self, range: BufRange) -> Result<*mut u8, LeaseError> {
        let hold = self.held.iter().flatten().find(|hold| hold.range == range);
        hold.map(Hold::start).ok_or(LeaseError::OutOfBounds { range })
    }

    /// Slices, for work that may not work in place.
    pub(crate) fn operands(&mut self, work: &'static str) -> Result<Operands<'_>, DeviceError> {
        for (i, hold) in self.held.iter().flatten().enumerate() {
            for other in self.held[..i].iter().flatten() {
                // Writes come first, so of two that conflict the earlier one writes.
                if other.mode == AccessMode::Write && share_bytes(&hold.range, &other.range) {
                    let reason = format!("{} overlaps {}, which is written", hold.range, other.range);
                    return Err(DeviceError::BadWork { work, reason });
                }
            }
        }
        Ok(Operands { holds: self, taken: [false; MOST], exclusive: PhantomData })
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        while self.len > 0 {
            self.len -= 1;
            if let Some(hold) = self.held[self.len].take() {
                let earlier = &self.held[..self.len];
                hold.release(&|cell| written(earlier, hold.range.buffer, cell));
            }
        }
    }
}

impl<'a> Operands<'a> {
    /// A read range as elements.
    pub(crate) fn read<T: Element>(&self, range: BufRange) -> Result<&'a [T], LeaseError> {
        let hold = self.find(range, AccessMode::Read)?.1;
        let numel = hold.numel::<T>()?;
        // SAFETY: in bounds and aligned (`numel`), every bit pattern is a `T`, and the holds, borrowed for 'a, keep the
        // memory alive and other writers away; `operands` has checked that no range written by this work overlaps it.
        Ok(unsafe { std::slice::from_raw_parts(hold.start().cast::<T>(), numel) })
    }

    /// A read range as bytes.
    pub(crate) fn read_bytes(&self, range: BufRange) -> Result<&'a [u8], LeaseError> {
        let hold = self.find(range, AccessMode::Read)?.1;
        // SAFETY: as in `read`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts(hold.start(), range.bytes()) })
    }

    /// A written range as elements; once per range.
    pub(crate) fn write<T: Element>(&mut self, range: BufRange) -> Result<&'a mut [T], LeaseError> {
        let (index, hold) = self.find(range, AccessMode::Write)?;
        let numel = hold.numel::<T>()?;
        self.taken[index] = true;
        // SAFETY: as in `read`; the range is held for writing, overlaps no other range of this work, and `taken` keeps
        // it from being handed out again.
        Ok(unsafe { std::slice::from_raw_parts_mut(hold.start().cast::<T>(), numel) })
    }

    /// A written range as bytes; once per range.
    pub(crate) fn write_bytes(&mut self, range: BufRange) -> Result<&'a mut [u8], LeaseError> {
        let (index, hold) = self.find(range, AccessMode::Write)?;
        self.taken[index] = true;
        // SAFETY: as in `write`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts_mut(hold.start(), range.bytes()) })
    }

    fn find(&self, range: BufRange, mode: AccessMode) -> Result<(usize, &'a Hold), LeaseError> {
        let held = self.holds.held.iter().enumerate().filter_map(|(i, hold)| Some((i, hold.as_ref()?)));
        let mut free = held.filter(|&(i, hold)| hold.range == range && hold.mode == mode && !self.taken[i]);
        free.next().ok_or(LeaseError::OutOfBounds { range })
    }
}

fn written(holds: &[Option<Hold>], buffer: crate::BufferId, cell: usize) -> bool {
    holds.iter().flatten().any(|hold| hold.mode == AccessMode::Write && hold.covers(buffer, cell))
}

fn share_bytes(a: &BufRange, b: &BufRange) -> bool {
    a.bytes() > 0 && b.bytes() > 0 && a.overlaps(b)
}
