//! Host slices, checked at run time.
//!
//! Every allocation is divided into cells, each with one atomic: free, some readers, or one writer. A [`Lease`] and every
//! piece of work that runs hold the cells they touch, so a host slice can never alias running work, whatever the callers
//! do. Rule V3 (types) makes the check never fail.
//!
//! This file contains unsafe code: the memory behind buffers and the slices into it.

use crate::dtype::Element;
use crate::error::LeaseError;

/// A host slice into a buffer, given back on drop. A read lease can be shared, a write lease is exclusive.
#[derive(Debug)]
pub struct Lease {}

impl Lease {
    /// The range as elements.
    ///
    /// # Errors
    /// [`LeaseError::Misaligned`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T], LeaseError> {
        unimplemented!()
    }

    /// The range as elements, writable.
    ///
    /// # Errors
    /// [`LeaseError::Misaligned`]; [`LeaseError::Conflict`] on a read lease.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], LeaseError> {
        unimplemented!()
    }

    /// The range as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        unimplemented!()
    }
}
