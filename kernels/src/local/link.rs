//! The emulated link: what it costs, and how it is written in a configuration.

use std::time::Duration;

/// An emulated link: one per rank and direction, shared by all its collectives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second in each direction.
    pub bytes_per_second: f64,
    /// Latency of one collective.
    pub latency: Duration,
}

/// The text of a link, or its numbers, make no link.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The part before the comma is no bandwidth.
    #[error("{text:?} is no bandwidth; write a number with bit, kbit, mbit, gbit, B, kB, MB or GB, as in 1gbit,200us")]
    BandwidthText {
        /// What was written.
        text: String,
    },
    /// The part after the comma is no latency.
    #[error("{text:?} is no latency; write a number with ns, us, ms or s, as in 1gbit,200us")]
    LatencyText {
        /// What was written.
        text: String,
    },
    /// The bandwidth is not a positive number.
    #[error("a link needs a bandwidth above 0 bytes per second, got {bytes_per_second}")]
    Bandwidth {
        /// What was given.
        bytes_per_second: f64,
    },
    /// The latency is longer than an hour.
    #[error("a link's latency must be at most one hour, got {latency:?}")]
    Latency {
        /// What was given.
        latency: Duration,
    },
}

/// Units of bandwidth: name and bytes per second, the larger first.
const BITS: [(&str, f64); 4] = [("gbit", 1e9 / 8.0), ("mbit", 1e6 / 8.0), ("kbit", 1e3 / 8.0), ("bit", 0.125)];
const BYTES: [(&str, f64); 4] = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)];
/// Units of latency: name and nanoseconds, the larger first; no name ends with a later one but in `s`.
const TIMES: [(&str, f64); 4] = [("ms", 1e6), ("us", 1e3), ("ns", 1.0), ("s", 1e9)];

impl Link {
    /// Reads `BANDWIDTH,LATENCY`, such as `1gbit,200us` or `1.5GB,1ms`. Bandwidth: `bit`, `kbit`, `mbit`, `gbit` (in any
    /// case), `B`, `kB`, `MB`, `GB`, per second, powers of ten. Latency: `ns`, `us`, `ms`, `s`.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn parse(text: &str) -> Result<Self, LinkError> {
        let (bandwidth, latency) = text.split_once(',').unwrap_or((text, ""));
        let (bandwidth, latency) = (bandwidth.trim(), latency.trim());
        let lower = bandwidth.to_ascii_lowercase();
        let bytes_per_second = number(&lower, &BITS)
            .or_else(|| number(bandwidth, &BYTES))
            .ok_or_else(|| LinkError::BandwidthText { text: bandwidth.into() })?;
        let nanoseconds = number(latency, &TIMES)
            .filter(|ns| (0.0..=1e18).contains(ns))
            .ok_or_else(|| LinkError::LatencyText { text: latency.into() })?;
        Self { bytes_per_second, latency: Duration::from_nanos(nanoseconds.round() as u64) }.checked()
    }

    /// This link, if its numbers make sense.
    ///
    /// # Errors
    /// [`LinkError::Bandwidth`], [`LinkError::Latency`].
    pub fn checked(self) -> Result<Self, LinkError> {
        let Self { bytes_per_second, latency } = self;
        if !(bytes_per_second.is_finite() && bytes_per_second > 0.0) {
            return Err(LinkError::Bandwidth { bytes_per_second });
        }
        if latency > Duration::from_hours(1) {
            return Err(LinkError::Latency { latency });
        }
        Ok(self)
    }

    /// What moving so many bytes in one collective takes, in nanoseconds. A call pays its latency once, with its last one.
    pub(super) fn cost_ns(&self, bytes: f64, more: bool) -> u64 {
        let transfer = (bytes / self.bytes_per_second * 1e9) as u64;
        let latency = if more { 0 } else { self.latency.as_nanos() as u64 };
        transfer.saturating_add(latency)
    }
}

impl std::fmt::Display for Link {
    /// As [`Link::parse`] reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rate = self.bytes_per_second;
        let exact =
            BITS.iter().find(|(_, unit)| rate / unit >= 1.0 && (rate / unit * unit).to_bits() == rate.to_bits());
        let (name, unit) = exact.unwrap_or(&("bit", 0.125));
        write!(f, "{}{name},", rate / unit)?;
        let ns = self.latency.as_nanos();
        match ns {
            0 => write!(f, "0us"),
            _ if ns.is_multiple_of(1_000_000_000) => write!(f, "{}s", ns / 1_000_000_000),
            _ if ns.is_multiple_of(1_000_000) => write!(f, "{}ms", ns / 1_000_000),
            _ if ns.is_multiple_of(1_000) => write!(f, "{}us", ns / 1_000),
            _ => write!(f, "{ns}ns"),
        }
    }
}

impl std::str::FromStr for Link {
    type Err = LinkError;
    fn from_str(text: &str) -> Result<Self, LinkError> {
        Self::parse(text)
    }
}

fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (digits, unit) = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
    Some(digits.trim().parse::<f64>().ok()? * unit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::float_cmp)]
    use super::*;

    #[test]
    fn links_read_as_they_are_written() {
        let link = Link::parse("1gbit,200us").unwrap();
        assert_eq!(link, Link { bytes_per_second: 125e6, latency: Duration::from_micros(200) });
        assert_eq!(Link::parse(" 1.5GB , 2 ms ").unwrap().bytes_per_second, 1.5e9);
        assert_eq!(Link::parse("8kbit,0s").unwrap().bytes_per_second, 1000.0);
        assert_eq!(Link::parse("8Mbit,1ns").unwrap().bytes_per_second, 1e6);
        assert_eq!(Link::parse("3B,0.5us").unwrap().latency, Duration::from_nanos(500));
        for text in ["1gbit,200us", "100mbit,5ms", "7bit,0us", "2.5gbit,1s", "3kbit,17ns"] {
            assert_eq!(Link::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn any_link_survives_being_written_and_read() {
        for rate in [1.0, 0.1, 1e9 / 3.0, 123_456_789.123, 1e-3, 7e12] {
            let link = Link { bytes_per_second: rate, latency: Duration::from_nanos(1_234_567) };
            assert_eq!(Link::parse(&link.to_string()), Ok(link));
        }
    }

    #[test]
    fn what_makes_no_link_is_named() {
        for text in
            ["", "gbit,1us", "1,1us", "1gbit", "1gbit,", "1gbit,5", "1gbit,-1us", "1gbit,1h", "x,y", "1gbit,nans"]
        {
            let error = Link::parse(text).unwrap_err();
            assert!(
                matches!(error, LinkError::BandwidthText { .. } | LinkError::LatencyText { .. }),
                "{text}: {error}"
            );
        }
        for text in ["0gbit,1us", "-1gbit,1us", "nangbit,1us", "infgbit,1us"] {
            assert!(matches!(Link::parse(text), Err(LinkError::Bandwidth { .. })), "{text}");
        }
        assert!(matches!(Link::parse("1gbit,7200s"), Err(LinkError::Latency { .. })));
    }
}
