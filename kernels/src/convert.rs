//! Fill and cast between element types, with run-time dispatch to the widest instruction set.
//!
//! Owns the conversions between f32 and the 16-bit formats (`narrow`), which [`crate::Element`] and so the Adam loop use.
//! Devices call it for [`crate::work::Fill`] and [`crate::work::Cast`]. Same bits as crate `half` on every instruction
//! set. One pass over memory.
#![allow(clippy::inline_always)] // see `isa`

pub(crate) mod narrow;

use crate::dtype::Element;
use crate::isa::{self, Body, Isa};

/// Sets every element to `value`, rounded to nearest even. NaN stays NaN.
pub fn fill<T: Element>(dst: &mut [T], value: f32) {
    dst.fill(T::from_f32(value));
}

/// Converts every element, rounding to nearest even. NaN stays NaN and becomes quiet where the type changes.
///
/// # Panics
/// If the lengths differ.
pub fn cast<S: Element, D: Element>(src: &[S], dst: &mut [D]) {
    cast_on(Isa::widest(), src, dst);
}

/// [`cast`] on a given instruction set.
///
/// # Panics
/// If the lengths differ.
pub fn cast_on<S: Element, D: Element>(isa: Isa, src: &[S], dst: &mut [D]) {
    assert_eq!(src.len(), dst.len(), "a cast is from as many elements as to");
    isa::run(isa, Cast { src, dst });
}

struct Cast<'a, S, D> {
    src: &'a [S],
    dst: &'a mut [D],
}

impl<S: Element, D: Element> Body for Cast<'_, S, D> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (d, s) in self.dst.iter_mut().zip(self.src) {
            *d = D::from_f32(s.to_f32());
        }
    }
}
