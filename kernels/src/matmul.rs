//! Matrix products over host slices (feature `matmul`): the safe face of the `gemm` crate.
//!
//! Adapters use it to multiply straight into a gradient, which tensor frameworks cannot: they return a product in memory
//! of their own. A [`Matrix`] is a strided view of a slice whose bounds were checked when it was made, so that
//! [`matmul`] itself cannot leave its slices. Single-threaded on purpose: a rank owns one core, and its peers the others.
//!
//! This file contains unsafe code: the call of `gemm`, which takes raw pointers.

/// A strided view of `f32`s, to read: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    data: &'a [f32],
    shape: Shape,
}

/// A strided view of `f32`s, to write; no two elements share a place.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    shape: Shape,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl Shape {
    /// Elements that a slice needs so that every element of the view lies inside it.
    fn span(self) -> Option<usize> {
        if self.rows == 0 || self.cols == 0 {
            return Some(0);
        }
        let down = (self.rows - 1).checked_mul(self.row_stride)?;
        let along = (self.cols - 1).checked_mul(self.col_stride)?;
        down.checked_add(along)?.checked_add(1)
    }

    fn fits(self, len: usize) -> bool {
        self.span().is_some_and(|span| span <= len && isize::try_from(span).is_ok())
    }

    fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

impl<'a> Matrix<'a> {
    /// `rows` rows of `cols` adjacent elements, one row every `row_stride` elements.
    ///
    /// # Panics
    /// If the view does not lie inside `data`.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let shape = Shape { rows, cols, row_stride, col_stride: 1 };
        assert!(shape.fits(data.len()), "a {rows} x {cols} matrix with stride {row_stride} in {} elements", data.len());
        Self { data, shape }
    }

    /// The same elements with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { data: self.data, shape: self.shape.transposed() }
    }
}

impl<'a> MatrixMut<'a> {
    /// `rows` rows of `cols` adjacent elements, one row every `row_stride` elements.
    ///
    /// # Panics
    /// If the view does not lie inside `data`, or its rows overlap.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let shape = Shape { rows, cols, row_stride, col_stride: 1 };
        assert!(shape.fits(data.len()), "a {rows} x {cols} matrix with stride {row_stride} in {} elements", data.len());
        assert!(rows <= 1 || row_stride >= cols, "rows of {cols} elements overlap at stride {row_stride}");
        Self { data, shape }
    }
}

/// What happens to the elements that a product is written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// They are not read: `dst = factor * lhs * rhs`.
    Overwrite,
    /// They are added to: `dst += factor * lhs * rhs`.
    Accumulate,
}

/// Writes `factor * lhs * rhs` to `dst`, or adds it to what is there.
///
/// # Panics
/// If the shapes do not agree.
pub fn matmul(dst: &mut MatrixMut<'_>, onto: Onto, factor: f32, lhs: Matrix<'_>, rhs: Matrix<'_>) {
    let (m, n, k) = (dst.shape.rows, dst.shape.cols, lhs.shape.cols);
    assert!(
        lhs.shape.rows == m && rhs.shape.cols == n && rhs.shape.rows == k,
        "{m} x {n} cannot hold the product of {} x {k} and {} x {}",
        lhs.shape.rows,
        rhs.shape.rows,
        rhs.shape.cols
    );
    let stride = |elements: usize| elements as isize;
    // SAFETY: the constructors checked that every element of the three views lies inside its slice, the slices are
    // borrowed for the whole call, and `dst` is borrowed mutably, so that it aliases neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.data.as_mut_ptr(),
            stride(dst.shape.col_stride),
            stride(dst.shape.row_stride),
            onto == Onto::Accumulate,
            lhs.data.as_ptr(),
            stride(lhs.shape.col_stride),
            stride(lhs.shape.row_stride),
            rhs.data.as_ptr(),
            stride(rhs.shape.col_stride),
            stride(rhs.shape.row_stride),
            1.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: u32) -> Vec<f32> {
        (0..len as u32).map(|i| ((i * 37 + seed * 11) % 23) as f32 - 11.0).collect()
    }

    #[test]
    fn a_product_of_transposed_strided_views_equals_the_definition() {
        let (m, n, k) = (5, 7, 9);
        let (lhs, rhs) = (numbers(k * 8, 1), numbers(n * 12, 2));
        let mut dst = vec![100.0; m * 10];
        let (a, b) = (Matrix::new(&lhs, k, m, 8).transposed(), Matrix::new(&rhs, n, k, 12).transposed());
        matmul(&mut MatrixMut::new(&mut dst, m, n, 10), Onto::Accumulate, 2.0, a, b);
        for i in 0..m {
            for j in 0..10 {
                let product: f32 = (0..k).map(|l| lhs[l * 8 + i] * rhs.get(j * 12 + l).copied().unwrap_or(0.0)).sum();
                let want = if j < n { 100.0 + 2.0 * product } else { 100.0 };
                assert!((dst[i * 10 + j] - want).abs() < 1e-3, "element {i}, {j}: {} for {want}", dst[i * 10 + j]);
            }
        }
    }

    #[test]
    fn overwriting_never_reads_what_was_there() {
        let (lhs, rhs) = (numbers(12, 3), numbers(8, 4));
        let mut dst = vec![f32::NAN; 6];
        let (a, b) = (Matrix::new(&lhs, 3, 4, 4), Matrix::new(&rhs, 4, 2, 2));
        matmul(&mut MatrixMut::new(&mut dst, 3, 2, 2), Onto::Overwrite, 1.0, a, b);
        assert!(dst.iter().all(|x| x.is_finite()));
    }

    #[test]
    #[should_panic(expected = "a 3 x 4 matrix with stride 4 in 11 elements")]
    fn a_view_beyond_its_slice_is_refused() {
        Matrix::new(&[0.0; 11], 3, 4, 4);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn a_destination_whose_rows_overlap_is_refused() {
        MatrixMut::new(&mut [0.0; 20], 3, 4, 2);
    }
}
