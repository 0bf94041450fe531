//! What the kernels are measured against: a plain-store triad and a plain read, on the widest instruction set.
//!
//! Contains unsafe code: calls of functions compiled for a detected instruction set.

/// `a[i] = b[i] + s * c[i]` with ordinary stores.
pub(crate) fn triad(a: &mut [f32], b: &[f32], c: &[f32], s: f32) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: detected.
            return unsafe { triad_avx512(a, b, c, s) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: detected.
            return unsafe { triad_avx2(a, b, c, s) };
        }
    }
    triad_loop(a, b, c, s);
}

/// The exclusive or of all bits: reads everything and costs next to nothing else.
pub(crate) fn read(a: &[f32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: detected.
            return unsafe { read_avx512(a) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: detected.
            return unsafe { read_avx2(a) };
        }
    }
    read_loop(a)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn triad_avx512(a: &mut [f32], b: &[f32], c: &[f32], s: f32) {
    triad_loop(a, b, c, s);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn triad_avx2(a: &mut [f32], b: &[f32], c: &[f32], s: f32) {
    triad_loop(a, b, c, s);
}

#[inline(always)]
fn triad_loop(a: &mut [f32], b: &[f32], c: &[f32], s: f32) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + s * c;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_avx512(a: &[f32]) -> u32 {
    read_loop(a)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(a: &[f32]) -> u32 {
    read_loop(a)
}

#[inline(always)]
fn read_loop(a: &[f32]) -> u32 {
    a.iter().fold(0, |bits, value| bits ^ value.to_bits())
}
