//! One rank: its machines, their mailboxes, what they publish, and the rules checked at every turn.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use gatherflow_actors::action::{Action, Letter, Op, Publication, WrongTransition};
use gatherflow_actors::bucket::{Bucket, BucketMsg};
use gatherflow_actors::communicator::{Communicator, CommunicatorMsg};
use gatherflow_actors::control::ControlMsg;
use gatherflow_actors::optimizer::{CopySet, Optimizer, OptimizerMsg};
use gatherflow_actors::plan::{BucketId, Numbers};
use gatherflow_actors::prehook::{PreHook, PreHookMsg};
use gatherflow_actors::sequence::{Sequence, WireBucket, WireStaged};
use gatherflow_actors::supervisor::{Supervisor, SupervisorMsg};
use gatherflow_actors::{Credits, FirstGather, Group, Overlap, Skip};
use gatherflow_kernels::adam::AdamRows;
use gatherflow_kernels::null::updated_report;
use gatherflow_kernels::verdict::StepReport;
use gatherflow_kernels::{CollectiveKey, CollectiveKind, DType, Event};

use super::executor::Executor;
use super::turn::{Posted, Slot, Turn};
use super::{Fault, Setup, Violation};

/// What truly was demanded of a version, told by its causes and not by the pre-hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Demanded {
    pub entered: u32,
    pub forced: u32,
    pub waited: u32,
}

impl Demanded {
    pub fn entered(entered: u32) -> Self {
        Self { entered, ..Self::default() }
    }

    pub fn forced(forced: u32) -> Self {
        Self { forced, ..Self::default() }
    }

    pub fn waited(waited: u32) -> Self {
        Self { entered: waited, waited, ..Self::default() }
    }
}

/// What is shared with the executor, in flight, or kept to check the rules.
#[derive(Clone, Debug, Hash)]
pub struct Facts {
    /// Per position, the version that may be read and how many collectives its event is behind.
    pub ready: Vec<(u64, u64)>,
    pub free: Vec<(u64, u64)>,
    pub finished: u64,
    pub demand: (u64, u32),
    pub waited: (u64, u32),
    pub wants_demand: bool,
    /// `(step, collectives it is behind)`, oldest first.
    pub judging: VecDeque<(u64, u64)>,
    /// With the issuing thread.
    pub issuing: VecDeque<CollectiveKey>,
    pub issued: Vec<CollectiveKey>,
    pub truth: Vec<Demanded>,
    let_go: (u64, u32),
    held: Option<CollectiveKey>,
    /// The optimizer's stream: how many collectives its newest work is behind.
    stream: u64,
}

/// One rank of the model.
#[derive(Clone)]
pub struct Rank {
    pub setup: Rc<Setup>,
    pub me: usize,
    buckets: Vec<Slot<Bucket>>,
    prehook: Slot<PreHook>,
    optimizer: Slot<Optimizer>,
    communicator: Slot<Communicator>,
    supervisor: Slot<Supervisor>,
    /// The buckets', the pre-hook's, the optimizer's, the communicator's.
    mail: Vec<VecDeque<Rc<Posted>>>,
    pub facts: Facts,
    pub executor: Executor,
    /// Words to peers (all of them if `None`) said in this turn.
    pub said: Vec<(Option<usize>, ControlMsg)>,
    /// In which order letters were posted, for who delivers them so.
    posted: VecDeque<usize>,
}

/// The bucket whose reduce is followed by a sum over other groups.
const SUMMED: usize = 1;

impl Rank {
    pub fn new(setup: &Rc<Setup>, me: usize) -> Self {
        let n = setup.buckets();
        let order: Vec<BucketId> = (0..n).map(|position| setup.bucket_at(position)).collect();
        let wire = WireBucket {
            reduce_bytes: 8,
            reduce_dtype: DType::F32,
            gather_bytes: 4,
            gather_dtype: DType::Bf16,
            shard_bytes: 4,
            group: 0,
            sums: [0; 2],
        };
        let wire = |bucket: usize| if bucket == SUMMED { WireBucket { sums: [2, 0], ..wire } } else { wire };
        let mut sequence = Sequence::new(order.clone(), (0..n).map(wire).collect(), 128, 0);
        // The first and the last bucket are copies of one weight.
        let mut copies = Vec::new();
        if n > 1 {
            let buckets = vec![BucketId(0), BucketId::from_index(n - 1)];
            copies.push(CopySet { buckets, staged: setup.staged.then_some(0) });
        }
        if setup.sums_over_stages() {
            // An event's number is how many collectives must be issued for it: none is left out.
            let sums = u64::from(n > SUMMED);
            let numbers = Numbers { start: 0, reduces: n as u64 + sums, staged: 1, gathers: n as u64 };
            sequence = sequence.staged(vec![WireStaged { weight: 0, shard_bytes: 4, group: 4 }], numbers);
        }
        let bucket = |id: usize| {
            let members = setup.members[setup.position(BucketId::from_index(id))];
            let bucket = Bucket::new(BucketId::from_index(id), members, setup.overlap_grad_reduce, Event::done(0));
            Slot::new(bucket.stored(setup.storage))
        };
        let more = u32::from(setup.fault == Some((Fault::OneCreditMore, me)));
        let (mode, credits) = setup.modes[me];
        let credits = Credits { buckets: credits.saturating_add(more), bytes: None };
        let planted = |fault| setup.fault == Some((fault, me));
        let first = if planted(Fault::NeverShut) { FirstGather::Step } else { setup.first_gather[me] };
        let prehook = PreHook::new(order.clone(), vec![4; n], mode, credits, setup.ranks() > 1).starting(first);
        let skip = if planted(Fault::HostDecides) { Skip::Host } else { setup.skip };
        let optimizer = Optimizer::new(vec![Group::default()], order).deciding(skip).summing(copies);
        Self {
            setup: setup.clone(),
            me,
            buckets: (0..n).map(bucket).collect(),
            prehook: Slot::new(prehook),
            optimizer: Slot::new(optimizer),
            communicator: Slot::new(Communicator::new(sequence, n, setup.compare_every)),
            supervisor: Slot::new(Supervisor::new(me, setup.ranks())),
            mail: vec![VecDeque::new(); n + 3],
            facts: Facts {
                ready: vec![(0, 0); n],
                free: vec![(0, 0); n],
                finished: 0,
                demand: (0, 0),
                waited: (0, 0),
                wants_demand: false,
                judging: VecDeque::new(),
                issuing: VecDeque::new(),
                issued: Vec::new(),
                truth: vec![Demanded::default(); setup.steps as usize + 1],
                let_go: (0, 0),
                held: None,
                stream: 0,
            },
            executor: Executor::new(setup),
            said: Vec::new(),
            posted: VecDeque::new(),
        }
    }

    /// The hash of everything that decides what can happen next, or whether a rule was broken.
    pub fn fingerprint(&mut self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for bucket in &mut self.buckets {
            bucket.fingerprint().hash(&mut hasher);
        }
        self.prehook.fingerprint().hash(&mut hasher);
        self.optimizer.fingerprint().hash(&mut hasher);
        self.communicator.fingerprint().hash(&mut hasher);
        self.supervisor.fingerprint().hash(&mut hasher);
        for mailbox in &self.mail {
            mailbox.len().hash(&mut hasher);
            for posted in mailbox {
                posted.fingerprint().hash(&mut hasher);
            }
        }
        self.facts.hash(&mut hasher);
        self.executor.hash(&mut hasher);
        hasher.finish()
    }

    pub fn mailboxes(&self) -> usize {
        self.mail.len()
    }

    pub fn has_mail(&self, mailbox: usize) -> bool {
        !self.mail[mailbox].is_empty()
    }

    /// What is at rest here: whether anything is left to do without the executor.
    pub fn is_quiet(&self) -> bool {
        self.mail.iter().all(VecDeque::is_empty) && self.facts.issuing.is_empty() && self.facts.judging.is_empty()
    }

    /// Who waits for what, for the report of a deadlock.
    pub fn describe(&self) -> String {
        let mail: Vec<_> = self.mail.iter().flatten().map(|posted| &posted.letter).collect();
        format!("rank {} {:?} {:?} mail {mail:?}", self.me, self.executor, self.facts)
    }

    pub fn planted(&self, fault: Fault) -> bool {
        self.setup.fault == Some((fault, self.me))
    }

    fn turn(&self) -> Turn {
        Turn {
            actions: Vec::new(),
            wants_demand: None,
            stream: self.facts.stream,
            demand: self.facts.demand,
            waited: self.facts.waited,
            on_thread: self.setup.issue_on_thread,
        }
    }

    /// Delivers the oldest letter of a mailbox. `true` if that commutes with everything else that may happen: it
    /// changed nothing but its actor's own state and what that has enqueued, or told that gradients are free, for
    /// which an executor waits without looking twice.
    pub fn deliver(&mut self, mailbox: usize) -> Result<bool, Violation> {
        let Some(posted) = self.mail[mailbox].pop_front() else { return Ok(true) };
        let mut turn = self.turn();
        let mut wanted = false;
        let result = match &posted.letter {
            Letter::Bucket(bucket, message) => turn.take(self.buckets[bucket.index()].machine(), message.clone()),
            Letter::PreHook(message) => {
                wanted = self.facts.wants_demand;
                turn.take(self.prehook.machine(), message.clone())
            }
            Letter::Optimizer(message) => turn.take(self.optimizer.machine(), message.clone()),
            Letter::Communicator(message) => {
                if let CommunicatorMsg::Reduce { step, .. } = message {
                    self.demanded(*step, Demanded::forced(self.setup.buckets() as u32));
                }
                turn.take(self.communicator.machine(), message.clone())
            }
            Letter::Supervisor(message) => turn.take(self.supervisor.machine(), message.clone()),
        };
        let own = |action: &Action| {
            matches!(action, Action::Enqueue { .. } | Action::Publish(Publication::GradientsFree { .. }))
        };
        let silent = turn.actions.iter().all(own) && !wanted && !turn.wants_demand.unwrap_or(false);
        self.carry_out(result, turn)?;
        Ok(silent)
    }

    fn carry_out(&mut self, result: Result<(), WrongTransition>, turn: Turn) -> Result<(), Violation> {
        result.map_err(|error| Violation::WrongTransition(error.to_string()))?;
        self.facts.stream = turn.stream;
        if let Some(wants) = turn.wants_demand {
            self.facts.wants_demand = wants;
        }
        turn.actions.into_iter().try_for_each(|action| self.perform(action))
    }

    fn perform(&mut self, action: Action) -> Result<(), Violation> {
        match action {
            Action::Send(letter) => self.post(letter)?,
            Action::Enqueue { op: Op::Adam { rows, .. }, .. } => self.check_rows(&rows)?,
            Action::Enqueue { .. } | Action::Publish(Publication::PeakAhead(_) | Publication::Judged { .. }) => {}
            Action::Issue { key, .. } if self.setup.issue_on_thread => self.facts.issuing.push_back(key),
            Action::Issue { key, .. } => self.issue(key)?,
            Action::WhenVerdict { event, step } => self.facts.judging.push_back((step, event.id())),
            Action::LetGo { bucket, version, .. } => self.let_go(bucket, version)?,
            Action::Publish(Publication::Ready { bucket, version, event }) => {
                let position = self.setup.position(bucket);
                self.facts.ready[position] = (version, event.id());
            }
            Action::Publish(Publication::GradientsFree { bucket, version, event }) => {
                let position = self.setup.position(bucket);
                self.facts.free[position] = (version, event.id());
            }
            Action::Publish(Publication::Outcome(outcome)) => self.facts.finished = outcome.step + 1,
            Action::Announce(ControlMsg::Demand { .. }) if self.planted(Fault::AnnouncementLost) => {}
            Action::Announce(message) => self.said.push((None, message)),
            Action::Tell { to, message } => self.said.push((Some(to), message)),
            Action::Poison(cause) => return Err(Violation::Poisoned(cause.to_string())),
        }
        Ok(())
    }

    /// Puts a letter into its mailbox; the supervisor's is answered at once.
    pub fn post(&mut self, letter: Letter) -> Result<(), Violation> {
        let n = self.buckets.len();
        let mut letter = letter;
        let mailbox = match &mut letter {
            Letter::Bucket(bucket, message) => {
                let (position, index) = (self.setup.position(*bucket), bucket.index());
                match message {
                    BucketMsg::Updated { version, .. } if self.planted(Fault::ReadyBeforeItsGather) => {
                        self.facts.ready[position] = (*version, 0);
                    }
                    BucketMsg::Updated { version, .. } if self.planted(Fault::FreeBeforeItsGather) => {
                        self.facts.free[position] = (*version, 0);
                    }
                    BucketMsg::ReduceIssued { step, .. } if self.planted(Fault::FreeBeforeAdam) => {
                        self.facts.free[position] = (*step + 1, 0);
                    }
                    _ => {}
                }
                index
            }
            Letter::PreHook(message) => {
                let lost = match message {
                    PreHookMsg::Drain { .. } => self.planted(Fault::DrainLost) && !self.executor.is_closing(),
                    PreHookMsg::PeerDemand { version, .. } => {
                        *version > self.prehook.machine.version() && self.planted(Fault::EarlyPeerDemandLost)
                    }
                    PreHookMsg::Awaited { .. } => self.planted(Fault::AwaitedLost),
                    PreHookMsg::StepFinished { version, .. } => {
                        self.facts.let_go = (*version, 0);
                        false
                    }
                    _ => false,
                };
                if lost {
                    return Ok(());
                }
                if let PreHookMsg::Gathered { .. } = message
                    && self.planted(Fault::GatheredTwice)
                {
                    self.put(n, Letter::PreHook(message.clone()));
                }
                n
            }
            Letter::Optimizer(OptimizerMsg::Resume { .. }) if self.planted(Fault::ResumeLost) => return Ok(()),
            Letter::Optimizer(_) => n + 1,
            Letter::Communicator(message) => {
                if let CommunicatorMsg::Verdict { updated, .. } = message {
                    if self.planted(Fault::VerdictLost) {
                        return Ok(());
                    }
                    *updated |= self.planted(Fault::SkipUnheard);
                }
                n + 2
            }
            Letter::Supervisor(message) => {
                let (mut turn, message) = (self.turn(), message.clone());
                let result = turn.take(self.supervisor.machine(), message);
                turn.wants_demand = None;
                return self.carry_out(result, turn);
            }
        };
        self.put(mailbox, letter);
        Ok(())
    }

    fn put(&mut self, mailbox: usize, letter: Letter) {
        self.mail[mailbox].push_back(Rc::new(Posted::new(letter)));
        self.posted.push_back(mailbox);
    }

    /// C1, against what truly was demanded: a turn of the pre-hook may only let go what its causes allow.
    fn let_go(&mut self, bucket: BucketId, version: u64) -> Result<(), Violation> {
        let truth = self.facts.truth[version as usize];
        let position = self.setup.position(bucket) as u32;
        if self.facts.let_go != (version, position) {
            let expected = self.facts.let_go;
            return Err(Violation::WrongCount(format!(
                "the gather at position {position} of version {version} was let go, expected {expected:?}"
            )));
        }
        let (mode, credits) = self.setup.modes[self.me];
        let allowed = match mode {
            Overlap::None => true,
            Overlap::Chain => position <= truth.waited || position < truth.forced,
            Overlap::Window => position < truth.entered.max(truth.forced).saturating_add(credits),
        };
        if !allowed {
            return Err(Violation::CreditsExceeded(format!(
                "rank {} let the gather at position {position} of version {version} go with {truth:?}",
                self.me
            )));
        }
        if self.setup.opens(self.me)
            && self.executor.opened < version
            && truth.entered.max(truth.forced).max(truth.waited) == 0
        {
            return Err(Violation::NotOpened(format!("rank {}: position {position} of version {version}", self.me)));
        }
        self.facts.let_go.1 += 1;
        if self.facts.let_go.1 == self.setup.buckets() as u32 {
            self.facts.truth[version as usize] = Demanded::default();
        }
        self.post(Letter::Bucket(bucket, BucketMsg::Gather { version, entry: None }))?;
        if self.planted(Fault::ChainRunsAhead) && (position as usize) + 1 < self.setup.buckets() {
            let next = self.setup.bucket_at(position as usize + 1);
            return self.let_go(next, version);
        }
        Ok(())
    }

    /// Remembers a cause of gathers to go, while it can matter.
    pub fn demanded(&mut self, version: u64, what: Demanded) {
        let all = (version, self.setup.buckets() as u32);
        let over = version < self.facts.let_go.0 || self.facts.let_go == all;
        if over || version == 0 || !self.setup.gathered(version - 1) {
            return;
        }
        if let Some(truth) = self.facts.truth.get_mut(version as usize) {
            truth.entered = truth.entered.max(what.entered);
            truth.forced = truth.forced.max(what.forced);
            truth.waited = truth.waited.max(what.waited);
        }
    }

    /// T1, T8: the row that the device will pick has the learning rate of its t, which is as many tenths.
    fn check_rows(&self, rows: &AdamRows) -> Result<(), Violation> {
        let Some((step, _)) = self.facts.judging.back().copied() else { return Ok(()) };
        // The device counts its own updates, and t goes on from the state.
        let (from, of_state) = self.executor.resumed;
        let t = of_state + self.setup.updates(from..=step);
        let found = rows.at(self.setup.updates(0..=step)).map(|rows| (rows[0].lr * 10.0).round() as u64);
        if !self.setup.updated(step) || found == Some(t) {
            return Ok(());
        }
        Err(Violation::WrongRow(format!("rank {}, step {step} with t = {t} got {found:?} of {rows:?}", self.me)))
    }

    /// A collective leaves this rank.
    fn issue(&mut self, key: CollectiveKey) -> Result<(), Violation> {
        let gather = |position| key.kind == CollectiveKind::Gather && self.setup.bucket_at(position).0 == key.bucket;
        if self.planted(Fault::GathersSwapped) && gather(0) {
            self.facts.held = Some(key);
            return Ok(());
        }
        self.note_issued(key)?;
        if self.planted(Fault::ReducedTwice) && key.kind == CollectiveKind::Reduce {
            self.note_issued(key)?;
        }
        match self.facts.held.take() {
            Some(held) => self.note_issued(held),
            None => Ok(()),
        }
    }

    fn note_issued(&mut self, key: CollectiveKey) -> Result<(), Violation> {
        let same = |k: &&CollectiveKey| (k.kind, k.bucket, k.version) == (key.kind, key.bucket, key.version);
        if let Some(first) = self.facts.issued.iter().find(same) {
            return Err(Violation::WrongCount(format!("rank {} issued {key} after {first}", self.me)));
        }
        self.facts.issued.push(key);
        Ok(())
    }

    /// The issuing thread issues the next collective. `false` if there is none.
    pub fn issue_next(&mut self) -> Result<bool, Violation> {
        let Some(key) = self.facts.issuing.pop_front() else { return Ok(false) };
        self.issue(key)?;
        self.post(Letter::Communicator(CommunicatorMsg::Issued { key, event: Event::done(key.seq + 1) }))?;
        Ok(true)
    }

    /// The verdict arrives, if the device can know it. `others`: how many collectives every other rank has issued.
    pub fn judge(&mut self, others: u64) -> Result<bool, Violation> {
        let known = self.facts.judging.iter().take_while(|(_, behind)| *behind <= others).count();
        let swapped = self.planted(Fault::VerdictsSwapped) && known > 1;
        let Some((step, _)) = (known > 0).then(|| self.facts.judging.remove(usize::from(swapped))).flatten() else {
            return Ok(false);
        };
        let updated = self.setup.updated(step) || self.planted(Fault::VerdictMistold);
        let report = StepReport { updated, ..updated_report() };
        self.post(Letter::Optimizer(OptimizerMsg::Verdict { step, report: Box::new(report) }))?;
        Ok(true)
    }

    /// A peer's word arrives.
    pub fn hear(&mut self, word: ControlMsg) -> Result<(), Violation> {
        if let ControlMsg::Demand { version, demanded, .. } = word {
            self.demanded(version, Demanded::forced(demanded));
        }
        self.post(Letter::Supervisor(SupervisorMsg::Control(word)))
    }

    /// Delivers all letters in the order in which they were posted, as the plain loop does.
    pub fn settle(&mut self) -> Result<(), Violation> {
        loop {
            while let Some(mailbox) = self.posted.pop_front() {
                self.deliver(mailbox)?;
            }
            if !self.issue_next()? {
                return Ok(());
            }
        }
    }

    /// Forgets in which order letters were posted: whoever delivers them in any order does not ask.
    pub fn forget_order(&mut self) {
        self.posted.clear();
    }

    /// What a finished rank must have issued (O1): every bucket once, in order, no gather in a step that the host skips.
    pub fn check_the_end(&self) -> Result<(), Violation> {
        let mut expected = Vec::new();
        for step in 0..self.setup.steps {
            let positions = 0..self.setup.buckets();
            let named = |kind, position, version| (kind, self.setup.bucket_at(position).0, version);
            expected.extend(positions.clone().rev().flat_map(|p| {
                let sum = named(CollectiveKind::Sum, p, step);
                let sum = (self.setup.bucket_at(p).0 as usize == SUMMED).then_some(sum);
                std::iter::once(named(CollectiveKind::Reduce, p, step)).chain(sum)
            }));
            if self.setup.sums_over_stages() {
                expected.push((CollectiveKind::StagedSum, 0, step));
            }
            expected.push((CollectiveKind::Small, CollectiveKey::NO_BUCKET, step));
            if self.setup.gathered(step) {
                expected.extend(positions.map(|p| named(CollectiveKind::Gather, p, step + 1)));
            }
        }
        let issued: Vec<_> = self.facts.issued.iter().map(|key| (key.kind, key.bucket, key.version)).collect();
        if issued == expected {
            return Ok(());
        }
        Err(Violation::WrongCount(format!("rank {} issued {issued:?}, expected {expected:?}", self.me)))
    }
}
