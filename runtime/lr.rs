//! Learning rates: a value, or a function of t.
//!
//! t counts a group's updated steps, the first being 1, so schedules stand still over skipped steps (SPEC T8). Where
//! outcomes are not known yet, several t are possible for the next step: the function is evaluated for each of them, on the
//! thread that calls `step`. Ranks compare what it gives for a t that they all can name: the number of steps so far + 1.

use std::sync::Arc;

use crate::actors::LrRow;
use crate::error::Error;

/// A learning rate.
#[derive(Clone)]
#[non_exhaustive]
pub enum Lr {
    /// The same at every step.
    Value(f64),
    /// A function of t (the first step is 1).
    Schedule(Arc<dyn Fn(u64) -> f64 + Send + Sync>),
}

impl Lr {
    /// A function of t, which counts updated steps from 1. It must give the same on every rank, and is asked for each t that the next
    /// step can still have, and for the number of steps so far + 1, skipped ones included, for which ranks compare what it gives: where
    /// it reads a table, let it give the last entry beyond its end.
    ///
    /// ```
    /// let warm_up = gatherflow::Lr::schedule(|t| 1e-3 * (t as f64 / 100.0).min(1.0));
    /// assert_eq!(warm_up.at(50), 5e-4);
    /// ```
    pub fn schedule(of_t: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        Self::Schedule(Arc::new(of_t))
    }

    /// The learning rate at t.
    pub fn at(&self, t: u64) -> f64 {
        match self {
            Self::Value(value) => *value,
            Self::Schedule(of_t) => of_t(t),
        }
    }

    /// The learning rates of `possible` values of t from `first_t`.
    pub(crate) fn row(&self, multiplier: f64, first_t: u64, possible: u64, group: usize) -> Result<LrRow, Error> {
        let values: Vec<f64> = (first_t..first_t + possible).map(|t| self.at(t) * multiplier).collect();
        match values.iter().position(|lr| !usable(*lr)) {
            None => Ok(LrRow { first_t, values }),
            Some(at) => Err(Error::misuse(format!(
                "the learning rate of group {group} at t = {} is {}: it must be finite and not negative",
                first_t + at as u64,
                values[at]
            ))),
        }
    }
}

/// Whether a learning rate can be used: Adam runs in f32.
pub(crate) fn usable(lr: f64) -> bool {
    (0.0..f64::from(f32::MAX)).contains(&lr)
}

impl From<f64> for Lr {
    fn from(value: f64) -> Self {
        Self::Value(value)
    }
}

impl std::fmt::Debug for Lr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Value(value) => write!(f, "Value({value})"),
            Self::Schedule(_) => f.write_str("Schedule(..)"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_schedule_is_evaluated_for_each_t_still_possible() {
        let row = Lr::schedule(|t| t as f64).row(0.5, 3, 2, 0).unwrap();
        assert_eq!((row.first_t, row.values), (3, vec![1.5, 2.0]));
    }

    #[test]
    fn a_schedule_that_gives_nan_is_an_error_naming_group_and_t() {
        let error = Lr::schedule(|t| if t == 4 { f64::NAN } else { 1.0 }).row(1.0, 3, 2, 7).unwrap_err();
        assert!(error.to_string().contains("group 7 at t = 4"), "{error}");
    }
}
