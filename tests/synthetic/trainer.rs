//! One rank of the engine under a synthetic job, compared with the serial reference at each read and each outcome.

use gatherflow::{
    BucketId, Counters, Engine, ErrorKind, GroupId, Internals, Lr, Mode, ParamId, ParamMut, Pass, Rank, State,
    StepHandle, UnitGuard,
};
use gatherflow_actors::plan;
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::{AccessMode, BufRange, Work};

use super::pipeline::{Beside, Pipeline};
use super::sight::{Sight, same_bits};
use super::{At, Expected, Job, Net, Setting, data_rank, decayed, noise_of, start_of};

/// What a rank has to tell when it is done.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    pub counters: Counters,
    pub hash: u64,
}

/// One rank.
pub struct Trainer<'a> {
    pub engine: Engine,
    pub job: &'a Job<'a>,
    pub expected: &'a Expected,
    setting: Setting,
    /// Steps behind the state from which it went on, and the engine's before that.
    resumed: (u64, u64),
    /// Of the steps since then.
    handles: Vec<StepHandle>,
}

impl<'a> Trainer<'a> {
    pub fn start(
        rank: Rank,
        job: &'a Job<'a>,
        setting: &Setting,
        mut internals: Internals,
        expected: &'a Expected,
    ) -> Self {
        let net = job.net;
        internals.open.issue_on_thread = setting.issue_on_thread;
        let delay = setting.verdict_delay;
        if !delay.is_zero() {
            internals.open.before_work = Some(BeforeWork::new(move |work| match work {
                Work::Verdict(_) => Inject::Delay(delay),
                _ => Inject::Nothing,
            }));
        }
        let number = rank.rank();
        // Only the values of the first rank that holds a parameter count, and of the first copy: they are spread.
        let plan = net.model.plan(job.ranks, &job.config(setting)).unwrap();
        let init = |param: &gatherflow::ParamInfo, out: ParamMut<'_>| {
            let (variant, first_rank) = start_of(&plan, number, param.id);
            let counts = first_rank && plan.copies_of(param.id).next().is_none_or(|first| first == param.id);
            out.fill_with(|i| if counts { Net::initial(variant, param.id, i) } else { 7.0 });
        };
        let model = net.model.clone();
        let mut engine = Engine::with_internals(rank, model, job.config(setting), internals, init).unwrap();
        Net::set_lrs(&mut engine);
        Self { engine, job, expected, setting: *setting, resumed: (0, 0), handles: Vec::new() }
    }

    /// Goes on from a state of the same job.
    pub fn load(&mut self, state: &State) {
        self.engine.load_state(state).unwrap();
        self.resumed = (state.steps, self.engine.steps());
        self.handles.clear();
        // Frozen parameters are the model's, and learning rates the program's.
        for step in 0..state.steps {
            if let Some(param) = self.job.written_after(step).filter(|param| !param.options.trainable) {
                self.engine.write_param(param.id, |out| out.fill_with(|i| Net::rewritten(step, i))).unwrap();
            }
        }
        let earlier = (0..state.steps).rev().find_map(|step| self.job.rate_at(step));
        if let Some(rate) = earlier {
            self.engine.set_lr(GroupId(0), Lr::schedule(move |t| decayed(rate, t))).unwrap();
        }
    }

    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Steps of the job so far.
    pub fn steps(&self) -> u64 {
        self.resumed.0 + self.engine.steps() - self.resumed.1
    }

    fn net(&self) -> &'a Net {
        self.job.net
    }

    fn sight(&self) -> Sight<'_> {
        Sight {
            job: self.job,
            expected: self.expected,
            params: self.engine.params(),
            plan: self.engine.plan(),
            rank: self.rank(),
            step: self.steps(),
            two_writers: self.setting.two_writers,
        }
    }

    pub fn in_unit(&self, unit: &UnitGuard<'_>, param: ParamId) -> Vec<f32> {
        self.sight().in_unit(unit, param)
    }

    /// Reads a parameter outside all units.
    pub fn outside(&self, param: ParamId) -> Vec<f32> {
        self.sight().outside(&self.engine, param)
    }

    /// Enters units in forward order, reads all they have and adds to the loss.
    fn forward(&self, passes: &[Pass<'_>], units: &[usize], loss: &mut f64) {
        let net = self.net();
        for unit in units {
            let unit = &net.units[*unit];
            let entered = passes[unit.chunk].enter(unit.id).unwrap();
            for param in &unit.params {
                *loss += Net::loss(*param, &self.in_unit(&entered, *param));
            }
            if !self.setting.pause.is_zero() {
                std::thread::sleep(self.setting.pause);
            }
        }
    }

    fn passes(&self, microbatch: usize, last: bool, mode: Mode) -> Vec<Pass<'_>> {
        self.net().chunks.iter().map(|chunk| self.engine.pass(*chunk, microbatch, last, mode).unwrap()).collect()
    }

    /// All microbatches of a step; `between` runs after each but the last.
    pub fn microbatches_with(&self, between: impl Fn(&Self)) {
        let (net, step) = (self.net(), self.steps());
        let (sight, scale) = (self.sight(), self.loss_scale());
        let plan = self.engine.plan();
        let program = (self.job.program)(step, data_rank(plan, self.rank()));
        let mut overflows = self.job.overflows_at(step, self.rank());
        let mut abandons = self.job.abandons_at(step, self.rank());
        let mut loss = 0.0;
        for (microbatch, units) in program.iter().enumerate() {
            let last = microbatch + 1 == program.len();
            let passes = self.passes(microbatch, last, Mode::Train);
            self.forward(&passes, units, &mut loss);
            for (visit, unit) in units.iter().enumerate().rev() {
                let back = passes[net.units[*unit].chunk].backward(net.units[*unit].id).unwrap();
                let gradient = |param| {
                    let at = At { rank: noise_of(plan, self.rank(), param), step, microbatch, visit };
                    let values = sight.in_backward(&back, param);
                    (param, net.gradient(at, param, &values, scale, std::mem::take(&mut overflows)))
                };
                let gradients: Vec<_> = net.written(*unit).map(gradient).collect();
                let written = match gradients.split_first() {
                    Some(((first, _), others)) if std::mem::take(&mut abandons) => {
                        sight.abandon(&back, *first);
                        others
                    }
                    None => &[],
                    Some(_) => &gradients,
                };
                sight.write_all(&back, written);
                back.leave().unwrap();
            }
            if !last {
                between(self);
            }
        }
        sight.check_loss(loss);
    }

    /// The loss scale of this step's gradients, which is the reference's.
    fn loss_scale(&self) -> f32 {
        let scale = if self.job.scaler.is_some() { self.engine.loss_scale().unwrap() } else { 1.0 };
        let expected = &self.expected.verdicts[self.steps() as usize];
        assert_eq!(scale.to_bits(), expected.loss_scale.to_bits());
        scale
    }

    /// All microbatches of a step as a pipeline: see [`Pipeline`].
    pub fn pipelined(&self, beside: Beside) {
        let microbatches = (self.job.program)(self.steps(), data_rank(self.engine.plan(), self.rank())).len();
        let passes =
            (0..microbatches).map(|microbatch| self.passes(microbatch, microbatch + 1 == microbatches, Mode::Train));
        let passes: Vec<_> = passes.collect();
        Pipeline::new(self.sight(), &passes, self.loss_scale()).run(beside);
    }

    /// Fills all gradients with NaN once the step before has done with them: what the next step reads, it must write first.
    pub fn poison_gradients(&self) {
        let session = self.engine.session();
        for param in self.net().params() {
            let Some(range) = session.grad_range(param.id) else { continue };
            session.gradient_free(param.id).unwrap();
            let mut lease = session.device().lease(range, AccessMode::Write).unwrap();
            // All bits set is a NaN in each of the dtypes.
            lease.as_mut_bytes().unwrap().fill(0xff);
        }
    }

    pub fn step(&mut self) {
        if let Some(weight) = self.job.weight {
            self.engine.set_weight(weight(self.steps(), self.engine.data_parallel().0)).unwrap();
        }
        if let Some(rate) = self.job.rate_at(self.steps()) {
            self.engine.set_lr(GroupId(0), Lr::schedule(move |t| decayed(rate, t))).unwrap();
        }
        let step = self.steps();
        self.handles.push(self.engine.step().unwrap());
        if let Some(param) = self.job.written_after(step) {
            self.engine.write_param(param.id, |out| out.fill_with(|i| Net::rewritten(step, i))).unwrap();
            self.engine.reload_masters().unwrap();
        }
    }

    pub fn train_one(&mut self) {
        self.microbatches_with(|_| ());
        self.step();
    }

    pub fn train(&mut self, steps: u64) {
        (0..steps).for_each(|_| self.train_one());
    }

    /// All that the job has left, then the comparison with the reference.
    pub fn train_to_the_end(mut self) -> Finished {
        self.train(self.job.steps - self.steps());
        self.finish()
    }

    /// Forward through all units; the loss is a function of all weights.
    pub fn evaluate(&self) -> f64 {
        let units: Vec<usize> = (0..self.net().units.len()).collect();
        let mut loss = 0.0;
        self.forward(&self.passes(0, true, Mode::Eval), &units, &mut loss);
        loss
    }

    pub fn outcome(&self, step: u64) -> gatherflow::Outcome {
        let outcome = self.handles[(step - self.resumed.0) as usize].outcome().unwrap();
        let expected = &self.expected.verdicts[step as usize];
        let bits = |norm: Option<f64>| norm.map(f64::to_bits);
        assert_eq!(outcome.updated, expected.updated, "step {step}");
        assert_eq!(
            bits(outcome.grad_norm),
            bits(expected.grad_norm),
            "norm of step {step}: {:?}, expected {:?}",
            outcome.grad_norm,
            expected.grad_norm
        );
        assert_eq!(outcome.zeros, expected.zeros, "zeros of step {step}");
        assert_eq!(outcome.loss_scale.to_bits(), expected.loss_scale.to_bits(), "loss scale of step {step}");
        let rates = |lrs: &[f64]| lrs.iter().map(|lr| lr.to_bits()).collect::<Vec<_>>();
        assert_eq!(rates(&outcome.learning_rates), rates(&expected.learning_rates), "learning rates of step {step}");
        outcome
    }

    /// A step is an error that names the rank whose own gradient was abandoned or not finite.
    fn is_refused(&self, step: u64) {
        let error = self.handles[(step - self.resumed.0) as usize].outcome().unwrap_err();
        let rank = error.rank().unwrap();
        let as_expected = match error.kind() {
            ErrorKind::Abandoned => self.job.abandons_at(step, rank),
            ErrorKind::NonFinite => self.setting.check_for_nan_in_grad && self.job.overflows_at(step, rank),
            _ => false,
        };
        assert!(as_expected, "step {step}: {error}");
    }

    fn check_outcomes(&self) {
        for step in self.resumed.0..self.steps() {
            let names = self.setting.check_for_nan_in_grad && self.job.scaler.is_none();
            let refused = names && !self.expected.verdicts[step as usize].updated;
            if refused || self.job.is_spoiled(step) {
                self.is_refused(step);
            } else {
                self.outcome(step);
            }
        }
    }

    /// Closes while outcomes are unknown and compares them then. There is no hash.
    pub fn close_early(mut self) -> Finished {
        self.engine.close().unwrap();
        self.check_outcomes();
        Finished { counters: self.engine.counters(), hash: 0 }
    }

    /// Compares everything with the reference and closes.
    pub fn finish(mut self) -> Finished {
        self.check_outcomes();
        for param in self.net().params() {
            self.outside(param.id);
        }
        self.engine.ensure_params_ready().unwrap();
        if self.steps() == self.job.steps {
            self.check_state();
        }
        let hash = self.engine.params_hash().unwrap();
        self.engine.close().unwrap();
        Finished { counters: self.engine.counters(), hash }
    }

    /// Masters and moments of what this rank owns are the reference's at the end; padding is zero (SPEC L5).
    fn check_state(&self) {
        let (session, rank) = (self.engine.session(), self.rank());
        for bucket in self.engine.plan().buckets() {
            let memory = session.bucket_memory(bucket.id);
            self.check_shard(bucket.id, "master", memory.master, |w| &w.master);
            self.check_shard(bucket.id, "exp_avg", memory.exp_avg, |w| &w.exp_avg);
            self.check_shard(bucket.id, "exp_avg_sq", memory.exp_avg_sq, |w| &w.exp_avg_sq);
            assert_eq!(memory.master.bytes() / 4, self.engine.plan().shard(plan::Rank(rank), bucket.id).len());
        }
    }

    fn check_shard(
        &self,
        bucket: BucketId,
        what: &str,
        memory: BufRange,
        expected: impl Fn(&crate::reference::Weight) -> &Vec<f32>,
    ) {
        let device = self.engine.session().device();
        let lease = device.lease(memory, AccessMode::Read).unwrap();
        let found = lease.as_slice::<f32>().unwrap();
        let mut wanted = vec![0.0; found.len()];
        for piece in self.engine.plan().owned(plan::Rank(self.rank()), bucket) {
            let of_param =
                &expected(self.expected.state_on(self.rank(), piece.param))[piece.in_param.start..piece.in_param.end];
            wanted[piece.in_shard.start..piece.in_shard.end].copy_from_slice(of_param);
        }
        same_bits(found, &wanted, &|| format!("{what} of {bucket} on rank {}", self.rank()));
    }
}
