//! Element types: the three floating-point formats that parameters and gradients come in.
#![allow(clippy::inline_always)] // see `isa`

use half::{bf16, f16};

use crate::convert::narrow;

/// The element type of a parameter or a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name used in configuration, errors and reports: `f32`, `bf16` or `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The inverse of [`DType::name`]; `None` for any other word.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::F16].into_iter().find(|d| d.name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A Rust type that is the element of a [`DType`]: `f32`, [`half::bf16`] or [`half::f16`].
///
/// Sealed: every bit pattern of these types is a valid value, which leases rely on.
pub trait Element: Copy + Default + PartialEq + std::fmt::Debug + Send + Sync + 'static + sealed::Sealed {
    /// The tag of this type.
    const DTYPE: DType;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Exact.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_bits(narrow::bf16_from_f32(value))
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        narrow::f32_from_bf16(self.to_bits())
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_bits(narrow::f16_from_f32(value))
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        narrow::f32_from_f16(self.to_bits())
    }
}
