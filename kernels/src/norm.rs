//! Partial gradient norms with zero counts and a non-finite search, in one read with a fixed summation tree.

/// An owned piece of a parameter in a reduced shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormPiece {
    /// First element, counted from the shard's start.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// The parameter's number in the plan.
    pub param: u32,
    /// Whether norm and zero count include it (SPEC T2a); the non-finite search always does.
    pub counted: bool,
}

/// What one shard gives: [`Partial::BYTES`] bytes in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Partial {
    /// Sum of squares over counted pieces.
    pub sum_squares: f64,
    /// Largest absolute value over counted pieces.
    pub max_abs: f64,
    /// Zero elements over counted pieces.
    pub zeros: u64,
    /// First parameter with a non-finite element.
    pub nonfinite: Option<u32>,
}

impl Partial {
    /// Size in memory.
    pub const BYTES: usize = 32;
}

/// The partial of one shard.
pub fn partial(grad: &[f32], pieces: &[NormPiece]) -> Partial {
    let _ = (grad, pieces);
    unimplemented!()
}
