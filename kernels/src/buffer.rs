//! Flat allocations and byte ranges of them.

/// Names an allocation of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// An allocation of a device: an opaque id and a length in bytes. The memory lives as long as the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Which allocation.
    pub id: BufferId,
    /// Its length in bytes.
    pub bytes: usize,
}

/// A half-open byte range `[start, end)` of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufRange {
    /// Which allocation.
    pub buffer: BufferId,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

impl Buffer {
    /// The whole buffer as a range.
    pub fn whole(&self) -> BufRange {
        self.range(0, self.bytes)
    }

    /// Bytes `[start, end)` of this buffer. Devices check bounds when the range is used.
    pub fn range(&self, start: usize, end: usize) -> BufRange {
        BufRange { buffer: self.id, start, end }
    }
}

impl BufRange {
    /// Length in bytes (0 if the range is inverted).
    pub fn bytes(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// The sub-range `[start, end)`, counted in bytes from this range's start.
    #[must_use]
    pub fn sub(&self, start: usize, end: usize) -> Self {
        Self { buffer: self.buffer, start: self.start + start, end: self.start + end }
    }

    /// Whether the two ranges share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.buffer == other.buffer && self.start < other.end && other.start < self.end
    }

    /// Whether `other` lies inside this range.
    pub fn contains(&self, other: &Self) -> bool {
        self.buffer == other.buffer && self.start <= other.start && other.end <= self.end
    }
}

impl std::fmt::Display for BufRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "buffer {} bytes {}..{}", self.buffer.0, self.start, self.end)
    }
}
