//! Records and scalars in device memory: little-endian words, so that ranks and devices agree on the layout.

use super::{HostVerdict, RankRecord, Scalars, Spoiled};
use crate::norm::{param_from_u64, param_to_u64, words};

const ABANDONED: u32 = 1;
const UNUSED: u32 = 2;
const NON_FINITE: u32 = 3;

impl RankRecord {
    /// Size in memory.
    pub const BYTES: usize = 80;

    /// Ten 64-bit words: `sum_powers`, `max_abs`, `zeros`, non-finite parameter + 1 (0: none), `largest`, `largest_in`, weight, kind
    /// and parameter of what spoils the step (lower and upper half; kind 0: nothing), stop, hash of what must be alike.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let (kind, param) = match self.host.spoiled {
            None => (0, 0),
            Some(Spoiled::Abandoned { param }) => (ABANDONED, param),
            Some(Spoiled::Unused { param }) => (UNUSED, param),
            Some(Spoiled::NonFinite { param }) => (NON_FINITE, param),
        };
        from_words([
            self.sum_powers.to_bits(),
            self.max_abs.to_bits(),
            self.zeros,
            param_to_u64(self.nonfinite),
            self.largest.to_bits(),
            u64::from(self.largest_in),
            self.host.weight.to_bits(),
            u64::from(kind) | u64::from(param) << 32,
            u64::from(self.host.stop),
            self.host.alike,
        ])
    }

    /// The inverse of [`RankRecord::to_bytes`]. An unknown kind of spoiling reads as [`Spoiled::Abandoned`]: the step is not
    /// taken.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let [sum_powers, max_abs, zeros, nonfinite, largest, largest_in, weight, spoiled, stop, alike] = words(bytes);
        let param = (spoiled >> 32) as u32;
        let spoiled = match spoiled as u32 {
            0 => None,
            UNUSED => Some(Spoiled::Unused { param }),
            NON_FINITE => Some(Spoiled::NonFinite { param }),
            _ => Some(Spoiled::Abandoned { param }),
        };
        Self {
            sum_powers: f64::from_bits(sum_powers),
            max_abs: f64::from_bits(max_abs),
            zeros,
            nonfinite: param_from_u64(nonfinite),
            largest: f64::from_bits(largest),
            largest_in: largest_in as u32,
            host: HostVerdict { spoiled, weight: f64::from_bits(weight), stop: stop != 0, alike },
        }
    }
}

impl Scalars {
    /// Size in memory: a cache line.
    pub const BYTES: usize = 64;

    /// Eight 64-bit words: `factor`, then in halves `skip` and `scale`, `growth_counter` and `hysteresis`, then `updates`, then
    /// zeros.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let halves = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        from_words([
            self.factor.to_bits(),
            halves(u32::from(self.skip), self.scale.to_bits()),
            halves(self.growth_counter, self.hysteresis.cast_unsigned()),
            self.updates,
            0,
            0,
            0,
            0,
        ])
    }

    /// The inverse of [`Scalars::to_bytes`].
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let [first, second, third, updates, ..]: [u64; 8] = words(bytes);
        Self {
            factor: f64::from_bits(first),
            skip: second as u32 != 0,
            scale: f32::from_bits((second >> 32) as u32),
            growth_counter: third as u32,
            hysteresis: ((third >> 32) as u32).cast_signed(),
            updates,
        }
    }
}

fn from_words<const WORDS: usize, const BYTES: usize>(words: [u64; WORDS]) -> [u8; BYTES] {
    const { assert!(BYTES == 8 * WORDS) };
    let mut bytes = [0; BYTES];
    for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_from_its_bytes() {
        let kinds =
            [Spoiled::Abandoned { param: 7 }, Spoiled::Unused { param: u32::MAX }, Spoiled::NonFinite { param: 0 }];
        for spoiled in kinds.map(Some).into_iter().chain([None]) {
            for nonfinite in [None, Some(0), Some(u32::MAX)] {
                for stop in [false, true] {
                    let host = HostVerdict { spoiled, weight: 123.5, stop, alike: 0xfeed_0000_beef };
                    let (largest, largest_in) = (4.5, u32::MAX - 1);
                    let (sum_powers, max_abs, zeros) = (1e70, 3.0, u64::MAX);
                    let record = RankRecord { sum_powers, max_abs, zeros, nonfinite, largest, largest_in, host };
                    assert_eq!(RankRecord::from_bytes(&record.to_bytes()), record);
                }
            }
        }
    }

    #[test]
    fn scalars_come_back_from_their_bytes() {
        for (skip, hysteresis) in [(false, 2), (true, -5)] {
            let scalars =
                Scalars { factor: 0.3, skip, scale: 65536.0, growth_counter: 999, hysteresis, updates: u64::MAX - 7 };
            assert_eq!(Scalars::from_bytes(&scalars.to_bytes()), scalars);
        }
    }

    #[test]
    fn fresh_memory_reads_as_an_empty_record_and_poisoned_memory_as_a_spoiled_one() {
        assert_eq!(RankRecord::from_bytes(&[0; RankRecord::BYTES]), RankRecord::default());
        assert!(RankRecord::from_bytes(&[0xff; RankRecord::BYTES]).host.spoiled.is_some());
    }
}
