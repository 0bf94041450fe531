//! Is it overlapping? Step times of many steps, summed up in medians and one line.

use crate::actors::{BucketId, StepTimes};

/// Times per step, in milliseconds, medians over steps; of this rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// How many steps it is about.
    pub steps: usize,
    /// Wall time from one step to the next.
    pub step_ms: f64,
    /// The step less all waits of the executor.
    pub compute_ms: f64,
    /// Time of all gathers of a step.
    pub gather_ms: f64,
    /// Time of all reduces of a step.
    pub reduce_ms: f64,
    /// Time in which the executor waited for gathers.
    pub exposed_gather_ms: f64,
    /// Time in which the executor waited for reduces.
    pub exposed_reduce_ms: f64,
    /// `1 - exposed / total` of gathers over all steps, from 0 to 1; 1 where nothing was gathered.
    pub hidden_share: f64,
    /// The bucket the executor waited longest for in all steps together, and for how long, in milliseconds.
    pub slowest: Option<(BucketId, f64)>,
}

impl Report {
    /// Sums up these steps.
    pub fn of(times: &[StepTimes]) -> Self {
        let median = |of: fn(&StepTimes) -> u64| {
            let mut values: Vec<u64> = times.iter().map(of).collect();
            values.sort_unstable();
            match values.len() {
                0 => 0.0,
                n => milliseconds(values[(n - 1) / 2] + values[n / 2]) / 2.0,
            }
        };
        let total = |of: fn(&StepTimes) -> u64| times.iter().map(of).sum::<u64>();
        let (gathered, exposed) = (total(|t| t.gather_ns), total(|t| t.exposed_gather_ns));
        let hidden_share = if gathered == 0 { 1.0 } else { (1.0 - exposed as f64 / gathered as f64).clamp(0.0, 1.0) };
        let mut waited = std::collections::BTreeMap::new();
        for (bucket, ns) in times.iter().flat_map(|t| &t.waited) {
            *waited.entry(*bucket).or_insert(0) += ns;
        }
        Self {
            steps: times.len(),
            step_ms: median(|t| t.step_ns),
            compute_ms: median(|t| t.compute_ns),
            gather_ms: median(|t| t.gather_ns),
            reduce_ms: median(|t| t.reduce_ns),
            exposed_gather_ms: median(|t| t.exposed_gather_ns),
            exposed_reduce_ms: median(|t| t.exposed_reduce_ns),
            hidden_share,
            slowest: waited.into_iter().max_by_key(|(_, ns)| *ns).map(|(bucket, ns)| (bucket, milliseconds(ns))),
        }
    }
}

fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// The one line that answers it.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.steps == 0 {
            return f.write_str("is it overlapping? no step was measured");
        }
        let answer = match self.hidden_share {
            _ if self.gather_ms == 0.0 => "nothing to hide",
            s if s >= 0.8 => "yes",
            s if s >= 0.2 => "partly",
            _ => "no",
        };
        let reduce_hidden = if self.reduce_ms == 0.0 { 1.0 } else { 1.0 - self.exposed_reduce_ms / self.reduce_ms };
        write!(
            f,
            "is it overlapping? {answer}: step {:.1} ms, compute {:.1} ms, gathers {:.1} ms ({:.0} % hidden), reduces {:.1} ms ({:.0} % hidden)",
            self.step_ms,
            self.compute_ms,
            self.gather_ms,
            self.hidden_share * 100.0,
            self.reduce_ms,
            reduce_hidden.clamp(0.0, 1.0) * 100.0,
        )?;
        match self.slowest {
            Some((bucket, ms)) => {
                write!(f, "; {bucket} was waited for longest: {:.2} ms a step", ms / self.steps as f64)
            }
            None => f.write_str("; no bucket was waited for"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(step: u64, exposed_ms: u64, waited: &[(u32, u64)]) -> StepTimes {
        StepTimes {
            step,
            step_ns: 10_000_000,
            compute_ns: 8_000_000,
            wait_ns: 2_000_000,
            gather_ns: 4_000_000,
            reduce_ns: 2_000_000,
            exposed_gather_ns: exposed_ms * 1_000_000,
            exposed_reduce_ns: 0,
            waited: waited.iter().map(|(bucket, ms)| (BucketId(*bucket), ms * 1_000_000)).collect(),
        }
    }

    #[test]
    fn one_line_says_how_much_was_hidden_and_which_bucket_waits_longest() {
        let report = Report::of(&[times(0, 1, &[(3, 1)]), times(1, 0, &[]), times(2, 2, &[(3, 2)])]);
        assert!((report.hidden_share - 0.75).abs() < 1e-12);
        assert_eq!(report.slowest, Some((BucketId(3), 3.0)));
        let line = report.to_string();
        assert!(line.contains("partly") && line.contains("75 % hidden") && line.contains("bucket 3"), "{line}");
    }

    #[test]
    fn the_bucket_waited_for_longest_is_that_of_all_steps_together_not_of_any_one() {
        let report = Report::of(&[times(0, 4, &[(0, 11), (1, 10)]), times(1, 4, &[(2, 11), (1, 10)])]);
        assert_eq!(report.slowest, Some((BucketId(1), 20.0)));
    }

    #[test]
    fn no_steps_make_no_division_by_zero() {
        assert_eq!(Report::of(&[]).to_string(), "is it overlapping? no step was measured");
    }
}
