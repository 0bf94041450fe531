//! Which instruction set a loop runs on: the only place where that is decided.
//!
//! A loop is written once, as plain Rust, in `Body::run`. `run` compiles it for every instruction set of the machine's
//! architecture and picks one at run time. [`crate::adam`], [`crate::norm`] and [`crate::convert`] run on the widest.
//!
//! Invariant: the bits do not depend on the choice. Bodies use only single operations that IEEE 754 rounds exactly (add,
//! multiply, divide, square root), in a fixed order, and the compiler fuses none of them. (NaNs stay NaNs; which payload
//! an operation on two NaNs keeps is open, as everywhere in Rust.)
//!
//! This file contains unsafe code: calls of functions compiled for instruction sets that were detected first,
//! and prefetches.
#![allow(clippy::inline_always)] // else loops are compiled for the baseline

/// An instruction set that this machine has. There is no other way to one than detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// All that this machine has, widest first; the last is what the program was compiled for.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::with_capacity(3);
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                all.push(Self(Level::Avx512));
            }
            if has_avx2() {
                all.push(Self(Level::Avx2));
            }
        }
        all.push(Self(Level::Baseline));
        all
    }

    /// The widest that this machine has. Costs a load or two.
    pub fn widest() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Self(Level::Avx512);
            }
            if has_avx2() {
                return Self(Level::Avx2);
            }
        }
        Self(Level::Baseline)
    }

    /// `avx512`, `avx2` or `baseline`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Asks for the cache line at element `at` of the slice, or past its end: a hint without effect on values.
///
/// Loops with many operations per line look ahead less far than memory is slow; this keeps as many lines on their way as in
/// a loop that only reads.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, at);
}

/// A loop with its operands.
pub(crate) trait Body {
    /// What it returns.
    type Output;
    /// The loop. Implementations are `#[inline(always)]`, and so is all that they call: only what is inlined is compiled
    /// for the instruction set.
    fn run(self) -> Self::Output;
}

/// Runs a loop on an instruction set.
pub(crate) fn run<B: Body>(isa: Isa, body: B) -> B::Output {
    match isa.0 {
        Level::Baseline => body.run(),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => {
            // SAFETY: an `Isa` of this level is only made after AVX2 was detected.
            unsafe { run_avx2(body) }
        }
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => {
            // SAFETY: an `Isa` of this level is only made after all features of the function were detected.
            unsafe { run_avx512(body) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<B: Body>(body: B) -> B::Output {
    body.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<B: Body>(body: B) -> B::Output {
    body.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_is_the_first_available_and_the_baseline_the_last() {
        let all = Isa::available();
        assert_eq!(all.first(), Some(&Isa::widest()));
        assert_eq!(all.last().map(|isa| isa.name()), Some("baseline"));
    }
}
