//! What one rank sees in one step, compared with the reference: reads, losses, and the writing of gradients. The engine is no
//! `Sync`; this is, so several threads can work on passes of one engine.

use gatherflow::{Back, DType, Element, Engine, Grad, ParamId, ParamInfo, Plan, UnitGuard, WriteMode};
use half::{bf16, f16};

use super::{Expected, Job};

#[derive(Clone, Copy)]
pub struct Sight<'a> {
    pub job: &'a Job<'a>,
    pub expected: &'a Expected,
    /// As the engine knows them.
    pub params: &'a [ParamInfo],
    pub plan: &'a Plan,
    pub rank: usize,
    pub step: u64,
    pub two_writers: bool,
}

/// A parameter's values, from whatever guard.
macro_rules! values {
    ($source:expr, $sight:expr, $param:expr) => {
        match $sight.params[$param.index()].dtype {
            DType::Bf16 => widened(&$source.read::<bf16>($param).unwrap()),
            DType::F16 => widened(&$source.read::<f16>($param).unwrap()),
            _ => widened(&$source.read::<f32>($param).unwrap()),
        }
    };
}

impl Sight<'_> {
    /// Values that were read must be those of the current version.
    fn check(&self, param: ParamId, values: Vec<f32>, wherefrom: &str) -> Vec<f32> {
        let expected = self.expected.on_rank(self.rank, self.step, param);
        let what = || format!("`{}` read {wherefrom} on rank {}", self.params[param.index()].name, self.rank);
        same_bits(&values, expected, &|| format!("{} at version {}", what(), self.step));
        values
    }

    pub fn in_unit(&self, unit: &UnitGuard<'_>, param: ParamId) -> Vec<f32> {
        self.check(param, values!(unit, self, param), "in its unit")
    }

    pub fn in_backward(&self, back: &Back<'_>, param: ParamId) -> Vec<f32> {
        self.check(param, values!(back, self, param), "in backward")
    }

    pub fn outside(&self, engine: &Engine, param: ParamId) -> Vec<f32> {
        self.check(param, values!(engine, self, param), "outside all units")
    }

    pub fn check_loss(&self, loss: f64) {
        let expected = self.expected.losses[self.step as usize][self.rank];
        assert_eq!(loss.to_bits(), expected.to_bits(), "loss of step {}: {loss}, expected {expected}", self.step);
    }

    /// Begins to write a gradient and does not say that it is complete.
    pub fn abandon(&self, back: &Back<'_>, param: ParamId) {
        match self.params[param.index()].grad_dtype() {
            DType::Bf16 => drop(back.grad::<bf16>(param).unwrap()),
            DType::F16 => drop(back.grad::<f16>(param).unwrap()),
            _ => drop(back.grad::<f32>(param).unwrap()),
        }
    }

    pub fn write_all(&self, back: &Back<'_>, gradients: &[(ParamId, Vec<f32>)]) {
        let write = |(param, gradient): &(ParamId, Vec<f32>)| {
            let sparse = self.job.net.is_sparse(*param);
            match self.params[param.index()].grad_dtype() {
                DType::Bf16 => write::<bf16>(back, *param, sparse, gradient),
                DType::F16 => write::<f16>(back, *param, sparse, gradient),
                _ => write::<f32>(back, *param, sparse, gradient),
            }
        };
        if !self.two_writers {
            return gradients.iter().for_each(write);
        }
        let (one, other) = gradients.split_at(gradients.len() / 2);
        std::thread::scope(|scope| {
            scope.spawn(|| one.iter().for_each(write));
            other.iter().for_each(write);
        });
    }
}

fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

fn write<T: Element>(back: &Back<'_>, param: ParamId, sparse: bool, gradient: &[f32]) {
    if sparse {
        return add_even(back.grad_zeroed::<T>(param).unwrap(), gradient);
    }
    let mut guard = back.grad::<T>(param).unwrap();
    let overwrite = guard.mode() == WriteMode::Overwrite;
    for (memory, g) in guard.iter_mut().zip(gradient) {
        *memory = T::from_f32(if overwrite { *g } else { memory.to_f32() + g });
    }
    guard.complete();
}

fn add_even<T: Element>(mut guard: Grad<'_, T>, gradient: &[f32]) {
    assert_eq!(guard.mode(), WriteMode::Accumulate);
    guard.iter_mut().zip(gradient).step_by(2).for_each(|(memory, g)| *memory = T::from_f32(memory.to_f32() + g));
    guard.complete();
}

/// Equal bit for bit, or names the first element that is not.
pub fn same_bits(found: &[f32], expected: &[f32], what: &dyn Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    if let Some(i) = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits()) {
        panic!("{}: element {i} is {:?}, expected {:?}", what(), found[i], expected[i]);
    }
}
