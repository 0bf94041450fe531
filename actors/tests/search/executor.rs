//! The executor as a script, and the waits of the session around it.
//!
//! It follows `session/executor.rs` call by call: what is posted, what is left in atomics, and where it blocks. A
//! step ends where something was posted or left for others to see, or where it blocks; in between it only looks at
//! what is published, and what is published never goes back. One thread executes.

use gatherflow_actors::action::Letter;
use gatherflow_actors::bucket::BucketMsg;
use gatherflow_actors::control::ControlMsg;
use gatherflow_actors::optimizer::{CloseBucket, OptimizerMsg, StepStart};
use gatherflow_actors::plan::{ParamId, Storage};
use gatherflow_actors::prehook::PreHookMsg;
use gatherflow_actors::{FirstGather, LrRow, Overlap, Skip};
use gatherflow_kernels::verdict::HostVerdict;
use gatherflow_kernels::{CollectiveKind, Event};

use super::rank::{Demanded, Rank};
use super::{Fault, Setup, Violation};

/// One call of a training program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// `zero_grad`.
    Zero,
    /// Enter a unit.
    Enter(usize),
    /// Begin the gathers of a unit, and go on.
    Prefetch(usize),
    /// Await the future of a parameter of the bucket at this position.
    Ready(usize),
    /// Write the gradient of one parameter of the bucket at this position, and report it complete.
    Write(usize),
    /// `step`. Parameters that were not written count as zero.
    Step,
    /// Tell the other ranks, past the engine, that this rank got here.
    Signal,
    /// Wait until rank 0 has signalled so often.
    Await(u32),
    /// Wait for all outcomes and gathers.
    Flush,
    /// Go on from a state after so many updated steps; behind a flush, and before any gradient of the next step.
    Resume(u64),
    /// Flush, and end.
    Close,
}

/// Where an executor is, and what it remembers.
#[derive(Clone, Debug, Hash)]
pub struct Executor {
    next: usize,
    stage: Stage,
    pub steps: u64,
    /// Gradients reported in this step, by position.
    reported: Vec<u32>,
    /// 1 + the version for which it has waited.
    unit_seen: Vec<u64>,
    bucket_seen: Vec<u64>,
    chain: (u64, u32),
    /// The newest version whose gathers may start, and with it those of all before.
    pub opened: u64,
    pub signalled: u32,
    /// The steps behind the last state that it went on from, and that state's updated steps.
    pub resumed: (u64, u64),
    closing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Begin,
    /// The demand is left for the pre-hook to see.
    Raised,
    /// The pre-hook was asked; it is told that nobody waits for what comes before.
    Asked,
    /// A future is pending.
    Pending,
    /// In a chain: a wait ended, and that is left for the pre-hook to see.
    WaitEnded,
    /// Storage `shared`: waiting for the gradients of a position to be free; `raised`: the demand for its gather is left for the
    /// pre-hook to see; `asked`: it was asked for.
    Freeing {
        position: usize,
        raised: bool,
        asked: bool,
    },
    /// Waiting for the last of all buckets, which comes last.
    ForLast,
    /// It waits for buckets one after the other; `asking`: it has asked for this one; `asked`: for one before it.
    Waiting {
        bucket: usize,
        asking: bool,
        asked: bool,
    },
}

/// How a look at a bucket ends.
enum Look {
    Ready,
    Asked,
    Blocked,
}

impl Executor {
    pub fn new(setup: &Setup) -> Self {
        Self {
            next: 0,
            stage: Stage::Begin,
            steps: 0,
            reported: vec![0; setup.buckets()],
            unit_seen: vec![0; setup.units.len()],
            bucket_seen: vec![0; setup.buckets()],
            chain: (0, 0),
            opened: 0,
            signalled: 0,
            resumed: (0, 0),
            closing: false,
        }
    }

    /// It has begun to close: what it drains then is its own doing.
    pub fn is_closing(&self) -> bool {
        self.closing
    }
}

impl Rank {
    pub fn is_finished(&self) -> bool {
        self.executor.next == self.setup.scripts[self.me].len()
    }

    /// The executor's next step. `false` if it is blocked or finished; nothing has changed then. `others`: how many
    /// collectives every other rank has issued; `signalled`: how often rank 0 has signalled.
    pub fn execute(&mut self, others: u64, signalled: u32) -> Result<bool, Violation> {
        let setup = self.setup.clone();
        let Some(op) = setup.scripts[self.me].get(self.executor.next) else { return Ok(false) };
        match op {
            Op::Zero => {
                if setup.first_gather[self.me] == FirstGather::ZeroGrad {
                    self.open_gathers()?;
                }
                Ok(self.done())
            }
            Op::Enter(unit) => self.enter(*unit, others),
            Op::Prefetch(unit) => {
                let chain = setup.modes[self.me].0 == Overlap::Chain;
                self.begin(&setup.units[*unit], setup.demand(*unit), chain, false, others)
            }
            Op::Ready(position) => self.begin(&[*position], *position as u32 + 1, true, true, others),
            Op::Write(position) => self.write(*position, others),
            Op::Step => self.step(others),
            Op::Signal => {
                self.executor.signalled += 1;
                Ok(self.done())
            }
            Op::Await(count) => Ok(signalled >= *count && self.done()),
            Op::Flush => self.flush(others),
            Op::Resume(t) => {
                self.executor.resumed = (self.executor.steps, *t);
                self.post(Letter::Optimizer(OptimizerMsg::Resume { t: vec![*t] }))?;
                Ok(self.done())
            }
            Op::Close => {
                self.executor.closing |= self.facts.finished >= self.executor.steps;
                self.flush(others)
            }
        }
    }

    fn done(&mut self) -> bool {
        self.executor.next += 1;
        self.executor.stage = Stage::Begin;
        true
    }

    /// Tells the pre-hook once a version that its gathers may start, unless that went with the step.
    fn open_gathers(&mut self) -> Result<bool, Violation> {
        let (version, by_entry) = (self.executor.steps, true);
        if !self.setup.opens(self.me) || self.executor.opened >= version {
            return Ok(false);
        }
        self.executor.opened = version;
        self.post(Letter::PreHook(PreHookMsg::Open { version, by_entry }))?;
        Ok(true)
    }

    /// Demands the first gathers and waits for none of them, unless `stays`: then for all of these buckets.
    fn begin(
        &mut self,
        positions: &[usize],
        demanded: u32,
        awaited: bool,
        stays: bool,
        others: u64,
    ) -> Result<bool, Violation> {
        let version = self.executor.steps;
        let there =
            |position: &usize| self.facts.ready[*position].0 >= version && self.facts.ready[*position].1 <= others;
        let ready = positions.iter().all(there);
        match self.executor.stage {
            Stage::Begin if ready || !stays && self.setup.modes[self.me].0 == Overlap::None => return Ok(self.done()),
            Stage::Begin => {
                self.facts.demand = self.facts.demand.max((version, demanded));
                self.demanded(version, Demanded::entered(demanded));
                self.executor.stage = Stage::Raised;
            }
            Stage::Raised => {
                if self.take_wants_demand() || self.setup.ranks() > 1 {
                    self.post(Letter::PreHook(PreHookMsg::Demand { version, demanded, announce: true }))?;
                }
                if !awaited {
                    return Ok(self.done());
                }
                self.executor.stage = Stage::Asked;
            }
            Stage::Asked => {
                self.demanded(version, Demanded::forced(demanded));
                self.post(Letter::PreHook(PreHookMsg::Awaited { version, demanded }))?;
                self.executor.stage = Stage::Pending;
                return Ok(stays || self.done());
            }
            _ => return Ok(ready && self.done()),
        }
        Ok(true)
    }

    fn enter(&mut self, unit: usize, others: u64) -> Result<bool, Violation> {
        let (setup, version) = (self.setup.clone(), self.executor.steps);
        let demanded = setup.demand(unit);
        let mut moved = false;
        let begins = self.executor.stage == Stage::Begin && self.executor.unit_seen[unit] <= version;
        if begins && self.open_gathers()? {
            return Ok(true);
        }
        match self.executor.stage {
            Stage::Begin if self.executor.unit_seen[unit] > version => return Ok(self.done()),
            Stage::Begin => {
                self.facts.demand = self.facts.demand.max((version, demanded));
                self.demanded(version, Demanded::entered(demanded));
                self.executor.stage = Stage::Raised;
                return Ok(true);
            }
            Stage::Raised => {
                self.executor.stage = Stage::Waiting { bucket: 0, asking: false, asked: false };
                moved = true;
            }
            Stage::WaitEnded => {
                let waited = self.executor.chain.1;
                self.executor.stage = Stage::Waiting { bucket: 0, asking: false, asked: false };
                if self.take_wants_demand() {
                    self.post(Letter::PreHook(PreHookMsg::WaitEnded { version, waited }))?;
                    return Ok(true);
                }
                moved = true;
            }
            Stage::Freeing { .. } | Stage::ForLast | Stage::Waiting { .. } | Stage::Asked | Stage::Pending => {}
        }
        if setup.modes[self.me].0 == Overlap::Chain {
            match self.follow_chain(version, demanded, others)? {
                None => {}
                Some(Look::Blocked) => return Ok(moved),
                Some(Look::Asked | Look::Ready) => return Ok(true),
            }
        }
        while let Stage::Waiting { bucket, .. } = self.executor.stage {
            let Some(&position) = setup.units[unit].get(bucket) else { break };
            match self.look(position, version, Some(demanded), others)? {
                Look::Blocked => return Ok(moved),
                Look::Asked => return Ok(true),
                Look::Ready => moved = true,
            }
            let asked = matches!(self.executor.stage, Stage::Waiting { asking, asked, .. } if asking || asked);
            self.executor.stage = Stage::Waiting { bucket: bucket + 1, asking: false, asked };
        }
        let asked = matches!(self.executor.stage, Stage::Waiting { asked: true, .. });
        if !asked && setup.modes[self.me].0 == Overlap::Window && self.take_wants_demand() {
            self.post(Letter::PreHook(PreHookMsg::Demand { version, demanded, announce: false }))?;
        }
        self.executor.unit_seen[unit] = version + 1;
        Ok(self.done())
    }

    /// The next wait of a chain; `None` if this unit needs no more.
    fn follow_chain(&mut self, version: u64, demanded: u32, others: u64) -> Result<Option<Look>, Violation> {
        if self.executor.chain.0 < version {
            self.executor.chain = (version, 0);
        }
        let position = self.executor.chain.1;
        if position >= demanded {
            return Ok(None);
        }
        let look = self.look(position as usize, version, Some(position + 1), others)?;
        if matches!(look, Look::Ready) {
            let waited = position + 1;
            self.executor.chain.1 = waited;
            self.facts.waited = self.facts.waited.max((version, waited));
            self.demanded(version, Demanded::waited(waited));
            self.executor.stage = Stage::WaitEnded;
        }
        Ok(Some(look))
    }

    fn take_wants_demand(&mut self) -> bool {
        std::mem::take(&mut self.facts.wants_demand)
    }

    /// Looks at a bucket and asks for it once if it must wait.
    fn look(&mut self, position: usize, version: u64, ask: Option<u32>, others: u64) -> Result<Look, Violation> {
        if self.executor.bucket_seen[position] > version {
            return Ok(Look::Ready);
        }
        let (ready, behind) = self.facts.ready[position];
        if ready >= version && behind <= others {
            self.check_fresh(position, version, others)?;
            self.executor.bucket_seen[position] = version + 1;
            return Ok(Look::Ready);
        }
        match (ask, self.executor.stage) {
            (Some(demanded), Stage::Waiting { bucket, asking: false, asked }) => {
                self.executor.stage = Stage::Waiting { bucket, asking: true, asked };
                if self.take_wants_demand() || self.setup.ranks() > 1 {
                    self.post(Letter::PreHook(PreHookMsg::Demand { version, demanded, announce: true }))?;
                }
                Ok(Look::Asked)
            }
            _ => Ok(Look::Blocked),
        }
    }

    /// V2: what is read now has the bytes of `version`, told by what all ranks issued and not by what is published.
    fn check_fresh(&self, position: usize, version: u64, others: u64) -> Result<(), Violation> {
        let what = || format!("rank {} reads position {position} at version {version}", self.me);
        self.lacks(position, version, others).map_or(Ok(()), |why| {
            let what = what();
            Err(Violation::StaleRead(format!("{what}: {why}")))
        })
    }

    /// What a position still lacks to be at `version`.
    fn lacks(&self, position: usize, version: u64, others: u64) -> Option<&'static str> {
        if version > self.facts.finished && self.setup.skip == Skip::Host {
            return Some("the verdict of the step before is not known");
        }
        // A step that the host skips keeps the bytes of the version before.
        let newest = (1..=version).rev().find(|v| self.setup.gathered(v - 1))?;
        let bucket = self.setup.bucket_at(position).0;
        let gather = |k: &gatherflow_kernels::CollectiveKey| {
            (k.kind, k.bucket, k.version) == (CollectiveKind::Gather, bucket, newest)
        };
        match self.facts.issued.iter().position(gather) {
            None => Some("its gather was not issued"),
            Some(index) if index as u64 >= others => Some("a peer has not issued its gather"),
            Some(_) => None,
        }
    }

    /// Looks whether gradients are free; where their memory is still to be gathered in, asks for that once, in two steps.
    fn look_free(&mut self, position: usize, others: u64) -> Result<Look, Violation> {
        let (setup, step) = (self.setup.clone(), self.executor.steps);
        let (free, behind) = self.facts.free[position];
        if free >= step && behind <= others {
            let lack = match setup.storage {
                Storage::Shared => self.lacks(position, step, others),
                _ => (!self.is_used(step)).then_some("the step before has not used them"),
            };
            let what = || format!("rank {} writes the gradients of position {position} in step {step}", self.me);
            return lack.map_or(Ok(Look::Ready), |why| Err(Violation::EarlyWrite(format!("{}: {why}", what()))));
        }
        let (raised, asked) = match self.executor.stage {
            Stage::Freeing { position: at, raised, asked } if at == position => (raised, asked),
            _ => (false, false),
        };
        if asked || free >= step || setup.storage == Storage::Views {
            return Ok(Look::Blocked);
        }
        let (demanded, chain) = (position as u32 + 1, setup.modes[self.me].0 == Overlap::Chain);
        self.executor.stage = Stage::Freeing { position, raised: true, asked: raised };
        if !raised {
            self.facts.demand = self.facts.demand.max((step, demanded));
            let forced = if chain { demanded } else { 0 };
            self.demanded(step, Demanded { entered: demanded, forced, waited: 0 });
            return Ok(Look::Asked);
        }
        if self.take_wants_demand() || setup.ranks() > 1 {
            self.post(Letter::PreHook(PreHookMsg::Demand { version: step, demanded, announce: true }))?;
        }
        if chain {
            self.post(Letter::PreHook(PreHookMsg::Awaited { version: step, demanded }))?;
        }
        Ok(Look::Asked)
    }

    fn write(&mut self, position: usize, others: u64) -> Result<bool, Violation> {
        match self.look_free(position, others)? {
            Look::Ready => {}
            Look::Asked => return Ok(true),
            Look::Blocked => return Ok(false),
        }
        let step = self.executor.steps;
        self.executor.reported[position] += 1;
        let message = BucketMsg::GradientComplete { step, event: Event::done(0) };
        self.post(Letter::Bucket(self.setup.bucket_at(position), message))?;
        Ok(self.done())
    }

    /// The step before has used its gradients: its Adam is enqueued and, where the host decides, its verdict is known.
    fn is_used(&self, step: u64) -> bool {
        let small = |k: &gatherflow_kernels::CollectiveKey| k.kind == CollectiveKind::Small && k.version + 1 == step;
        match self.setup.skip {
            Skip::Host => self.facts.finished >= step,
            Skip::Device => step == 0 || self.facts.issued.iter().any(small),
        }
    }

    fn step(&mut self, others: u64) -> Result<bool, Violation> {
        if !matches!(self.executor.stage, Stage::Begin) {
            return self.await_all(others);
        }
        let (setup, step) = (self.setup.clone(), self.executor.steps);
        if step - self.facts.finished.min(step) >= setup.steps_in_flight {
            return Ok(false);
        }
        let unwritten = |position: &usize| self.executor.reported[*position] < setup.members[*position];
        let mut shared = (0..setup.buckets()).filter(|_| setup.storage == Storage::Shared).filter(unwritten);
        if shared.any(|position| self.facts.free[position].0 < step) {
            self.demanded(step, Demanded::forced(setup.buckets() as u32));
            self.post(Letter::PreHook(PreHookMsg::Drain { version: step }))?;
            self.announce(step);
        }
        let mut close = Vec::new();
        for position in (0..setup.buckets()).rev() {
            let missing = setup.members[position] - std::mem::take(&mut self.executor.reported[position]);
            if missing > 0 || !setup.overlap_grad_reduce {
                let zero = (0..missing).map(ParamId).collect();
                close.push(CloseBucket { bucket: setup.bucket_at(position), zero, writes: Vec::new() });
            }
        }
        let last_t = setup.steps + self.executor.resumed.1;
        let lrs = vec![LrRow { first_t: 1, values: (1..=last_t).map(|t| t as f64 / 10.0).collect() }];
        let (host, readers) = (HostVerdict::default(), std::sync::Arc::from([]));
        let start = StepStart { step, lrs, host, close, readers, scale_read: None };
        self.post(Letter::Optimizer(OptimizerMsg::Step(Box::new(start))))?;
        self.executor.steps += 1;
        if setup.modes[self.me].0 == Overlap::None {
            self.announce(step + 1);
            self.executor.stage = Stage::ForLast;
            return Ok(true);
        }
        Ok(self.done())
    }

    /// Tells the peers, past the actors, that all gathers are waited for.
    fn announce(&mut self, version: u64) {
        if self.setup.ranks() > 1 {
            let demanded = self.setup.buckets() as u32;
            self.said.push((None, ControlMsg::Demand { from: self.me, version, demanded }));
        }
    }

    /// Waits for the last bucket to be published, then for each, without asking.
    fn await_all(&mut self, others: u64) -> Result<bool, Violation> {
        let (version, n) = (self.executor.steps, self.setup.buckets());
        let from = match self.executor.stage {
            Stage::Waiting { bucket, .. } => bucket,
            _ if self.facts.ready[n - 1].0 < version => return Ok(false),
            _ => 0,
        };
        for position in from..n {
            if matches!(self.look(position, version, None, others)?, Look::Blocked) {
                let moved = position > from || self.executor.stage == Stage::ForLast;
                self.executor.stage = Stage::Waiting { bucket: position, asking: false, asked: false };
                return Ok(moved);
            }
        }
        Ok(self.done())
    }

    /// Waits for the last outcome, then for all gathers, of which the pre-hook and the peers are told.
    fn flush(&mut self, others: u64) -> Result<bool, Violation> {
        let (version, total) = (self.executor.steps, self.setup.buckets() as u32);
        if self.executor.stage != Stage::Begin {
            let moved = self.await_all(others)?;
            if self.executor.stage == Stage::Begin {
                self.executor.chain = (version, total);
            }
            return Ok(moved);
        }
        if self.planted(Fault::ResumedEarly) && !self.executor.closing {
            return Ok(self.done());
        }
        if self.facts.finished < version {
            return Ok(false);
        }
        self.demanded(version, Demanded::forced(total));
        self.post(Letter::PreHook(PreHookMsg::Drain { version }))?;
        self.announce(version);
        self.executor.stage = Stage::ForLast;
        Ok(true)
    }
}
