//! The emulated link, read from text: bandwidth and latency.

use std::time::Duration;

use super::ConfigError;
use crate::actors::Link;

/// Reads `"1gbit,200us"`: a bandwidth (`gbit`, `mbit`, `kbit`, or `gb`, `mb`, `kb` for bytes, per second and direction) and
/// a latency per collective (`s`, `ms`, `us`; 0 if left out).
///
/// # Errors
/// [`ConfigError::BadValue`] for `emulate`.
pub fn parse_link(text: &str) -> Result<Link, ConfigError> {
    let bad = || ConfigError::BadValue {
        key: "emulate".into(),
        value: format!("{text:?}"),
        expected: "bandwidth and latency such as \"1gbit,200us\"".into(),
    };
    let (bandwidth, latency) = text.split_once(',').unwrap_or((text, "0s"));
    const BANDWIDTH: [(&str, f64); 6] =
        [("gbit", 1e9 / 8.0), ("mbit", 1e6 / 8.0), ("kbit", 1e3 / 8.0), ("gb", 1e9), ("mb", 1e6), ("kb", 1e3)];
    const LATENCY: [(&str, f64); 3] = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0)];
    let bytes_per_second = quantity(bandwidth, &BANDWIDTH).filter(|b| *b > 0.0).ok_or_else(bad)?;
    let latency = quantity(latency, &LATENCY).and_then(|s| Duration::try_from_secs_f64(s).ok()).ok_or_else(bad)?;
    Ok(Link { bytes_per_second, latency })
}

fn quantity(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim().to_ascii_lowercase();
    let (number, factor) = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
}
