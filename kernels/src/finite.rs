//! The search for non-finite gradients of one rank before they are reduced (SPEC T9): one more read of a whole bucket.
//!
//! After the reduction nobody can tell whose gradient it was. What is found goes behind the bucket's norm partial, from there into
//! the rank's record ([`crate::verdict::fold`]) and so to all ranks.
#![allow(clippy::inline_always)] // see `isa`

use crate::dtype::Element;
use crate::isa::{self, Body, Isa};
use crate::norm::NormPiece;

/// Elements between two looks at what was found.
const BLOCK: usize = 4096;

/// The parameter of the first piece with a non-finite element.
///
/// # Panics
/// If a piece is not inside `grad`.
pub fn first_nonfinite<T: Element>(grad: &[T], pieces: &[NormPiece]) -> Option<u32> {
    first_nonfinite_on(Isa::widest(), grad, pieces)
}

/// [`first_nonfinite`] on a given instruction set.
///
/// # Panics
/// If a piece is not inside `grad`.
pub fn first_nonfinite_on<T: Element>(isa: Isa, grad: &[T], pieces: &[NormPiece]) -> Option<u32> {
    let bad = |piece: &&NormPiece| isa::run(isa, Search { grad: &grad[piece.start..piece.end] });
    pieces.iter().find(bad).map(|piece| piece.param)
}

struct Search<'a, T> {
    grad: &'a [T],
}

impl<T: Element> Body for Search<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        self.grad.chunks(BLOCK).any(|block| {
            // Without a branch in the loop: nearly all gradients are finite.
            let mut found = false;
            for g in block {
                found |= !g.to_f32().is_finite();
            }
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn finds<T: Element>() {
        let piece = |start, end, param| NormPiece { start, end, param, counted: param != 6 };
        let pieces = [piece(0, 100, 5), piece(128, 9000, 6), piece(9000, 9001, 4)];
        let all = |x: f32| vec![T::from_f32(x); 9100];
        for largest in [0.0, 60000.0, -60000.0] {
            assert_eq!(first_nonfinite(&all(largest), &pieces), None);
        }
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for (at, expected) in [
                (0, Some(5)),
                (99, Some(5)),
                (100, None),
                (128, Some(6)),
                (8999, Some(6)),
                (9000, Some(4)),
                (9001, None),
            ] {
                let mut grad = all(1.0);
                grad[at] = T::from_f32(bad);
                for isa in Isa::available() {
                    assert_eq!(first_nonfinite_on(isa, &grad, &pieces), expected, "{bad} at {at}");
                }
                grad[0] = T::from_f32(bad);
                assert_eq!(first_nonfinite(&grad, &pieces), Some(5), "the first one is named");
            }
        }
        assert_eq!(first_nonfinite::<T>(&[], &[]), None);
    }

    #[test]
    fn the_first_parameter_with_a_nonfinite_gradient_is_named_in_every_dtype_and_padding_is_not_looked_at() {
        finds::<f32>();
        finds::<bf16>();
        finds::<f16>();
    }
}
