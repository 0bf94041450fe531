//! One rank's microbatches as a pipeline of two chunks: while backward of a microbatch goes through the first chunk, forward of
//! the next one goes through the second chunk, and passes of both are open.
//!
//! With F and B for forward and backward, the chunk, and the microbatch as an index:
//! ```text
//! F0.0 F1.0 | F0.1 B1.0 (B0.0 beside F1.1) | F0.2 B1.1 (B0.1 beside F1.2) | B1.2 B0.2
//! ```
//! Gradients are added in the same order as one microbatch after the other would, so the bits are those of the serial
//! reference.

use std::sync::Mutex;

use gatherflow::Pass;

use super::sight::Sight;
use super::{At, Net, data_rank, noise_of};

/// How two turns run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Unit by unit, on one thread.
    Alternating,
    /// Each on a thread of its own.
    Threads,
}

/// Microbatch, visit, and parameter within the unit: losses are summed in this order.
type Place = (usize, usize, usize);

/// All passes of a step are open: `passes[microbatch][chunk]`.
pub struct Pipeline<'a> {
    sight: Sight<'a>,
    passes: &'a [Vec<Pass<'a>>],
    scale: f32,
    /// The units of each microbatch, in forward order.
    program: Vec<Vec<usize>>,
    losses: Mutex<Vec<(Place, f64)>>,
}

impl<'a> Pipeline<'a> {
    pub fn new(sight: Sight<'a>, passes: &'a [Vec<Pass<'a>>], scale: f32) -> Self {
        let program = (sight.job.program)(sight.step, data_rank(sight.plan, sight.rank));
        Self { sight, passes, scale, program, losses: Mutex::default() }
    }

    pub fn run(&self, beside: Beside) {
        let last = self.passes.len() - 1;
        self.all(&self.forward(0, 0));
        self.all(&self.forward(0, 1));
        for microbatch in 0..last {
            self.all(&self.forward(microbatch + 1, 0));
            self.all(&self.backward(microbatch, 1));
            let (one, other) = (self.backward(microbatch, 0), self.forward(microbatch + 1, 1));
            match beside {
                Beside::Threads => std::thread::scope(|scope| {
                    scope.spawn(|| self.all(&one));
                    self.all(&other);
                }),
                Beside::Alternating => {
                    for index in 0..one.len().max(other.len()) {
                        self.all(&one[index.min(one.len())..(index + 1).min(one.len())]);
                        self.all(&other[index.min(other.len())..(index + 1).min(other.len())]);
                    }
                }
            }
        }
        self.all(&self.backward(last, 1));
        self.all(&self.backward(last, 0));
        let mut losses = self.losses.lock().unwrap().clone();
        losses.sort_by_key(|(place, _)| *place);
        self.sight.check_loss(losses.iter().fold(0.0, |sum, (_, loss)| sum + loss));
    }

    fn visits(&self, microbatch: usize, chunk: usize) -> Vec<usize> {
        let units = self.program[microbatch].iter().enumerate();
        units.filter(|(_, unit)| self.sight.job.net.units[**unit].chunk == chunk).map(|(visit, _)| visit).collect()
    }

    fn forward(&self, microbatch: usize, chunk: usize) -> Vec<Turn> {
        let visits = self.visits(microbatch, chunk).into_iter();
        visits.map(|visit| Turn { microbatch, visit, backward: false }).collect()
    }

    fn backward(&self, microbatch: usize, chunk: usize) -> Vec<Turn> {
        let visits = self.visits(microbatch, chunk).into_iter().rev();
        visits.map(|visit| Turn { microbatch, visit, backward: true }).collect()
    }

    fn all(&self, turns: &[Turn]) {
        for turn in turns {
            self.take(*turn);
        }
    }

    fn take(&self, Turn { microbatch, visit, backward }: Turn) {
        let Sight { job, plan, rank, step, .. } = self.sight;
        let number = self.program[microbatch][visit];
        let unit = &job.net.units[number];
        let pass = &self.passes[microbatch][unit.chunk];
        if !backward {
            let entered = pass.enter(unit.id).unwrap();
            for (index, param) in unit.params.iter().enumerate() {
                let loss = Net::loss(*param, &self.sight.in_unit(&entered, *param));
                self.losses.lock().unwrap().push(((microbatch, visit, index), loss));
            }
            return;
        }
        let back = pass.backward(unit.id).unwrap();
        let gradient = |param| {
            let at = At { rank: noise_of(plan, rank, param), step, microbatch, visit };
            let values = self.sight.in_backward(&back, param);
            (param, job.net.gradient(at, param, &values, self.scale, false))
        };
        let gradients: Vec<_> = job.net.written(number).map(gradient).collect();
        self.sight.write_all(&back, &gradients);
        back.leave().unwrap();
    }
}

/// Forward or backward of one unit.
#[derive(Clone, Copy)]
struct Turn {
    microbatch: usize,
    visit: usize,
    backward: bool,
}
