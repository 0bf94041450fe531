//! The losses that ranks tell, made means over ranks.

use std::collections::VecDeque;

/// Of every step that all ranks have taken, the mean over ranks.
#[derive(Debug)]
pub(crate) struct Losses {
    ranks: usize,
    means: Vec<f64>,
    /// Of the steps behind those, what each rank has told.
    open: VecDeque<Vec<Option<f64>>>,
}

impl Losses {
    pub(crate) fn of(ranks: usize) -> Self {
        Self { ranks, means: Vec::new(), open: VecDeque::new() }
    }

    /// One rank's loss of a step; each rank tells its steps in order. Whether that makes a mean: all ranks have told of the step.
    /// Sums are in rank order, whoever comes first, so that a run can be repeated to the bit.
    pub(crate) fn add(&mut self, step: usize, rank: usize, loss: f64) -> bool {
        let ahead = step - self.means.len();
        while self.open.len() <= ahead {
            self.open.push_back(vec![None; self.ranks]);
        }
        self.open[ahead][rank] = Some(loss);
        let Some(all) = self.open.pop_front_if(|told| told.iter().all(Option::is_some)) else { return false };
        self.means.push(all.iter().flatten().sum::<f64>() / self.ranks as f64);
        true
    }

    /// How many steps all ranks have taken.
    pub(crate) fn steps(&self) -> usize {
        self.means.len()
    }

    /// Of the first step.
    pub(crate) fn first(&self) -> f64 {
        self.means.first().copied().unwrap_or(f64::NAN)
    }

    /// Mean over the last ten steps, or all if there are fewer.
    pub(crate) fn last(&self) -> f64 {
        let tail = &self.means[self.means.len().saturating_sub(10)..];
        tail.iter().sum::<f64>() / tail.len().max(1) as f64
    }
}
