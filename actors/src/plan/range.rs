//! Half-open ranges (SPEC L1).

/// The elements (or bytes, where it says so) `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl Range {
    /// `[start, end)`.
    pub const fn new(start: usize, end: usize) -> Self {
        Self { start, end }
    }

    /// Number of elements; 0 if the range is inverted.
    pub const fn len(self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Whether it has no element.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// A range of the same length that starts at `start`.
    #[must_use]
    pub const fn normalize(self, start: usize) -> Self {
        Self { start, end: start + self.len() }
    }

    /// What both ranges have in common, or `None` if that is nothing: an empty range is never stored.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let common = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (!common.is_empty()).then_some(common)
    }

    /// The bytes of these elements, each `element_bytes` wide.
    #[must_use]
    pub const fn bytes(self, element_bytes: usize) -> Self {
        Self { start: self.start * element_bytes, end: self.end * element_bytes }
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::Range;

    #[test]
    fn normalizing_keeps_the_length() {
        assert_eq!(Range::new(10, 17).normalize(3), Range::new(3, 10));
    }

    #[test]
    fn ranges_that_only_touch_have_nothing_in_common() {
        assert_eq!(Range::new(0, 5).intersection(Range::new(5, 9)), None);
        assert_eq!(Range::new(0, 6).intersection(Range::new(5, 9)), Some(Range::new(5, 6)));
    }
}
