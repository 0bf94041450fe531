//! 16-bit floats by integer arithmetic without branches, so that loops over them vectorise.
//!
//! Bit-equal to the conversions of crate `half`, which are those of the hardware: round to nearest, ties to even;
//! overflow to infinity; subnormals kept; a NaN keeps its sign and upper payload bits and becomes quiet.
#![allow(clippy::inline_always)] // see `isa`

/// Exact.
#[inline(always)]
pub(crate) fn f32_from_bf16(bits: u16) -> f32 {
    let wide = u32::from(bits) << 16;
    let is_nan = wide & 0x7fff_ffff > 0x7f80_0000;
    f32::from_bits(wide | (u32::from(is_nan) << 22))
}

/// Rounds to nearest, ties to even.
#[inline(always)]
pub(crate) fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    // Selected before narrowing: a select of 16-bit lanes costs a second pass over the vector.
    let chosen = if is_nan { bits | 0x0040_0000 } else { rounded };
    (chosen >> 16) as u16
}

/// Exact.
#[inline(always)]
pub(crate) fn f32_from_f16(bits: u16) -> f32 {
    // 2^-14: the smallest normal f16, as f32.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let wide = u32::from(bits);
    let sign = (wide & 0x8000) << 16;
    let magnitude = (wide & 0x7fff) << 13;
    let normal = magnitude + ((127 - 15) << 23);
    // An f16 exponent of all ones becomes an f32 exponent of all ones.
    let special = magnitude + ((255 - 31) << 23);
    // A subnormal is its mantissa as the tail of 2^-14, less 2^-14.
    let subnormal = (f32::from_bits(magnitude + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let is_nan = magnitude > 0x0f80_0000;
    let finite = if magnitude < 0x0080_0000 { subnormal } else { normal };
    let unsigned = if magnitude >= 0x0f80_0000 { special } else { finite };
    f32::from_bits(sign | unsigned | (u32::from(is_nan) << 22))
}

/// Rounds to nearest, ties to even.
#[inline(always)]
pub(crate) fn f16_from_f32(value: f32) -> u16 {
    // 0.5: its last place is 2^-24, the smallest f16 subnormal, so adding it rounds there.
    const ROUNDER: u32 = 126 << 23;
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Exponent rebased from 127 to 15; a carry out of the mantissa moves the exponent, up to infinity.
    let normal = magnitude.wrapping_sub(((127 - 15) << 23) - 0xfff - ((magnitude >> 13) & 1)) >> 13;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ROUNDER)).to_bits().wrapping_sub(ROUNDER);
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let finite = if magnitude < ((127 - 14) << 23) { subnormal } else { normal };
    // 65536 and above.
    let unsigned = if magnitude >= ((127 + 16) << 23) { 0x7c00 } else { finite };
    let unsigned = if magnitude > 0x7f80_0000 { nan } else { unsigned };
    (sign | unsigned) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn widening_gives_the_bits_of_half_for_every_input() {
        for bits in 0..=u16::MAX {
            assert_eq!(f32_from_bf16(bits).to_bits(), bf16::from_bits(bits).to_f32().to_bits(), "bf16 {bits:#06x}");
            assert_eq!(f32_from_f16(bits).to_bits(), f16::from_bits(bits).to_f32_const().to_bits(), "f16 {bits:#06x}");
        }
    }

    #[test]
    fn narrowing_gives_the_bits_of_half_around_every_16_bit_value_and_tie() {
        let check = |bits: u32| {
            let value = f32::from_bits(bits);
            assert_eq!(bf16_from_f32(value), bf16::from_f32(value).to_bits(), "bf16 of {bits:#010x}");
            assert_eq!(f16_from_f32(value), f16::from_f32_const(value).to_bits(), "f16 of {bits:#010x}");
        };
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff]
            {
                check(u32::from(upper) << 16 | lower);
            }
        }
        let mut bits = 1_u32;
        for _ in 0..2_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            check(bits);
        }
    }
}
