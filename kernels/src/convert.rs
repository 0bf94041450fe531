//! Fill, cast between element types, and add to a sum, with run-time dispatch to the widest instruction set.
//!
//! Owns the conversions between f32 and the 16-bit formats (`narrow`), which [`crate::Element`] and so the Adam loop use.
//! Devices call it for [`crate::work::Fill`], [`crate::work::Cast`] and [`crate::work::Add`], the local transport for its sums. Same bits as crate `half` on every instruction
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

/// Adds every element to that of a sum, in f32.
///
/// # Panics
/// If the lengths differ.
pub fn add<T: Element>(part: &[T], total: &mut [f32]) {
    assert_eq!(part.len(), total.len(), "a sum has as many elements as its parts");
    isa::run(Isa::widest(), Add { part, total });
}

struct Add<'a, T> {
    part: &'a [T],
    total: &'a mut [f32],
}

impl<T: Element> Body for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (sum, x) in self.total.iter_mut().zip(self.part) {
            *sum += x.to_f32();
        }
    }
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
