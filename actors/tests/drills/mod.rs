//! Ranks as threads in which something goes wrong: how each of them ends, that none of its calls took longer than
//! deadlines allow, and that nothing is left.
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use gatherflow_actors::control::ControlMsg;
use gatherflow_actors::drill::{Drill, Fault};
use gatherflow_actors::plan::{BucketId, ParamId, Plan, Storage, UnitId};
use gatherflow_actors::{ActorName, Deadlines, Driver, Ranks, Seat, Session, SessionConfig, StepRequest};
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::null::{Script, updated_report};
use gatherflow_kernels::{Cause, Failure, FailureKind, Lease, Link, OpenOptions};

use crate::scenario::{Scenario, Shape};

/// No step here takes longer; what does hangs.
pub const LIMIT: Duration = Duration::from_secs(20);

/// The deadlines of drills.
pub const DEADLINES: Deadlines = Deadlines {
    start_up: Duration::from_secs(5),
    collective: Duration::from_millis(300),
    silence: Duration::from_millis(500),
};

/// No call of a rank takes as long: 1 s less than the backstop of every wait, which ends what nothing else has ended.
fn longest_call(deadlines: &Deadlines) -> Duration {
    let backstop = deadlines.collective.max(deadlines.silence).saturating_mul(4).saturating_add(Duration::from_secs(2));
    backstop.saturating_sub(Duration::from_secs(1))
}

/// How long this process has run. A thread counts the pieces that it slept, so the time in which others have the
/// machine, or it stands still, hardly counts.
fn running() -> Duration {
    const PIECE: Duration = Duration::from_millis(10);
    static COUNTING: Once = Once::new();
    static PIECES: AtomicU32 = AtomicU32::new(0);
    COUNTING.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(PIECE);
                PIECES.fetch_add(1, Ordering::SeqCst);
            }
        });
    });
    PIECE * PIECES.load(Ordering::SeqCst)
}

/// Measures one rank's calls into its session, its end included.
#[derive(Default)]
struct Calls {
    since: Option<Duration>,
    longest: Duration,
}

impl Calls {
    fn begin(&mut self) {
        self.end();
        self.since = Some(running());
    }

    fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.longest = self.longest.max(running().saturating_sub(since));
        }
    }
}

/// One rank's part in a run.
#[derive(Clone, Default)]
pub struct Part {
    pub drill: Option<Drill>,
    pub before_work: Option<BeforeWork>,
    /// Called before each of the executor's calls with the step and the number of calls before it in this step.
    pub before_call: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Drop the session before this call: `(step, calls before it)`.
    pub leave_at: Option<(u64, u64)>,
    /// Another model than the others.
    pub plan: Option<Arc<Plan>>,
    pub change: Option<fn(&mut SessionConfig)>,
    /// This rank's seat stays where it is for so long, and nobody starts.
    pub never_starts: Option<Duration>,
    /// Tell the others a wrong digest of this step.
    pub forges: Option<u64>,
    pub fails_in_init: bool,
    /// The step whose calls are running.
    pub at_step: Arc<AtomicU64>,
}

/// Tests count threads of the process and measure time, so those of one file run one after the other.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn actors() -> Vec<ActorName> {
    let buckets = (0..3).map(|i| ActorName::Bucket(BucketId(i)));
    buckets.chain([ActorName::PreHook, ActorName::Optimizer, ActorName::Communicator, ActorName::Supervisor]).collect()
}

/// How many messages each actor of one rank takes in a healthy run.
pub fn messages(scenario: &Scenario) -> BTreeMap<ActorName, u64> {
    let counts = Arc::new(Mutex::new(BTreeMap::new()));
    let counting = counts.clone();
    let mut parts = vec![Part::default(); scenario.shape.ranks];
    parts[0].drill = Some(Drill::before_message(move |actor| {
        *counting.lock().unwrap().entry(actor).or_insert(0) += 1;
        Fault::Nothing
    }));
    let ends = run("counting", scenario, "cpu", parts);
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
    let counts = counts.lock().unwrap();
    assert_eq!(counts.len(), actors().len(), "every actor hears something: {counts:?}");
    counts.clone()
}

/// A drill that lets `actor` have its fault at its `nth` message. What comes back tells at which of the executor's steps
/// that happened, plus 1.
pub fn at_message(actor: ActorName, nth: u64, fault: Fault, at_step: &Arc<AtomicU64>) -> (Drill, Arc<AtomicU64>) {
    let (count, fired, at_step) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)), at_step.clone());
    let fires = fired.clone();
    let drill = Drill::before_message(move |heard| {
        if heard != actor || count.fetch_add(1, Ordering::SeqCst) != nth {
            return Fault::Nothing;
        }
        fires.store(at_step.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
        fault.clone()
    });
    (drill, fired)
}

/// Counts pieces of work and lets one have its fault.
pub fn at_work(nth: u64, inject: Inject) -> (BeforeWork, Arc<AtomicU64>) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let hook =
        BeforeWork::new(
            move |_| {
                if counted.fetch_add(1, Ordering::SeqCst) == nth { inject.clone() } else { Inject::Nothing }
            },
        );
    (hook, count)
}

/// How a rank ended.
#[derive(Clone, Debug)]
pub enum End {
    /// Everything went well, close included.
    Closed,
    /// The first call that failed, and all after it, said this.
    Failed(Cause),
    /// It left in the middle, as it was told to.
    Left,
}

impl End {
    pub fn cause(&self) -> &Cause {
        match self {
            Self::Failed(cause) => cause,
            other => panic!("the rank should have failed, but it ended as {other:?}"),
        }
    }
}

/// A small model: three buckets of one parameter each, three steps.
pub fn scenario(ranks: usize) -> Scenario {
    Scenario { shape: Shape::regular(ranks, 3, 1, 100, 100), steps: 3, credits: 1, ..Scenario::plain() }
}

/// The same, gathered in two calls into the memory of the gradients.
pub fn in_calls(ranks: usize) -> Scenario {
    let scenario = scenario(ranks).stored(Storage::Shared);
    Scenario { call_bytes: 600, ..scenario }
}

/// Two copies of the model on two ranks each: one bucket of all, one of replicas and one of experts, on one rank each.
pub fn in_groups() -> Scenario {
    let mut scenario = scenario(4);
    scenario.shape = Shape { model_parallel: 2, shard_group: vec![0, 1, 2], ..scenario.shape };
    scenario
}

/// Two stages of two ranks each, with copies of a weight on both and two parameters more on the first.
pub fn in_stages() -> Scenario {
    let mut scenario = scenario(4);
    let regular = Shape::regular(4, 4, 1, 100, 100);
    let shared = vec![Some(0), None, None, Some(0)];
    let units = vec![vec![0], vec![1, 2], vec![3]];
    scenario.shape = Shape { model_parallel: 2, stages: 2, shared, units, ..regular };
    scenario
}

/// Runs all ranks; `parts` has one entry per rank.
pub fn run(label: &str, scenario: &Scenario, device: &'static str, parts: Vec<Part>) -> Vec<End> {
    run_over(label, scenario, device, parts, DEADLINES, None)
}

/// As [`run`], with other deadlines and an emulated link. However a rank ends, none of its calls was left to the
/// backstop.
pub fn run_over(
    label: &str,
    scenario: &Scenario,
    device: &'static str,
    parts: Vec<Part>,
    deadlines: Deadlines,
    link: Option<Link>,
) -> Vec<End> {
    let plans = scenario.plans();
    let seats = Ranks::local(parts.len(), link).expect("ranks");
    let count = parts.len();
    let at_steps: Vec<_> = parts.iter().map(|part| part.at_step.clone()).collect();
    let progress = || at_steps.iter().map(|at| at.load(Ordering::SeqCst)).sum::<u64>();
    let (sender, ends) = channel();
    for (seat, part) in seats.into_iter().zip(parts) {
        let (scenario, sender) = (scenario.clone(), sender.clone());
        let plan = part.plan.clone().unwrap_or_else(|| plans[seat.rank()].clone());
        std::thread::spawn(move || {
            let (rank, mut calls) = (seat.rank(), Calls::default());
            let run =
                std::panic::AssertUnwindSafe(|| one_rank(&scenario, seat, &plan, device, &part, deadlines, &mut calls));
            let end = std::panic::catch_unwind(run);
            calls.end();
            drop(sender.send((rank, end, calls.longest)));
        });
    }
    drop(sender);
    let (mut all, mut seen): (Vec<Option<End>>, u64) = (vec![None; count], 0);
    while all.iter().any(Option::is_none) {
        match ends.recv_timeout(LIMIT) {
            Ok((rank, Ok(end), longest)) => {
                assert!(longest < longest_call(&deadlines), "{label}: a call of rank {rank} took {longest:?}: {end:?}");
                all[rank] = Some(end);
            }
            Ok((rank, Err(_), _)) => panic!("{label}: the user's thread of rank {rank} panicked"),
            Err(_) if progress() > seen => seen = progress(),
            Err(error) => panic!("{label}: hangs ({error}); so far {all:?}"),
        }
    }
    all.into_iter().flatten().collect()
}

fn one_rank(
    scenario: &Scenario,
    seat: Seat,
    plan: &Arc<Plan>,
    device: &str,
    part: &Part,
    deadlines: Deadlines,
    watch: &mut Calls,
) -> End {
    if let Some(time) = part.never_starts {
        std::thread::sleep(time);
        return End::Left;
    }
    let mut config = SessionConfig { drill: part.drill.clone(), deadlines, ..scenario.config(Driver::Actors) };
    if let Some(change) = part.change {
        change(&mut config);
    }
    let skipped = scenario.skipped.clone();
    let script = Script(Arc::new(move |step| {
        let mut report = updated_report();
        report.updated = !skipped.contains(&step);
        report
    }));
    let options = OpenOptions {
        script: Some(script),
        device: device.into(),
        before_work: part.before_work.clone(),
        issue_on_thread: scenario.issue_on_thread,
        wait_limit: LIMIT,
        ..OpenOptions::default()
    };
    if let Some(step) = part.forges {
        seat.control().tell_others(&ControlMsg::Digest { from: seat.rank(), step, digest: 7 });
    }
    let mut init = |_, _: &mut Lease| {
        let failure = part.fails_in_init.then(|| Arc::new(Failure::new(FailureKind::StartUp, 1, "no file")));
        failure.map_or(Ok(()), Err)
    };
    watch.begin();
    let session = match Session::start(seat, plan.clone(), config, options, &mut init) {
        Ok(session) => session,
        Err(cause) => return End::Failed(cause),
    };
    for step in 0..scenario.steps {
        part.at_step.store(step, Ordering::SeqCst);
        let left = std::cell::Cell::new(false);
        let mut before_call = |calls: u64| {
            watch.end();
            if part.leave_at.is_some_and(|at| at <= (step, calls)) {
                // The calls that follow must not be made: the session is gone for them.
                left.set(true);
                watch.begin();
                std::panic::resume_unwind(Box::new("left"));
            }
            if let Some(before_call) = &part.before_call {
                before_call(step, calls);
            }
            watch.begin();
        };
        let calls = std::panic::AssertUnwindSafe(|| scenario.step(&session, step, &mut before_call));
        match std::panic::catch_unwind(calls) {
            Ok(Ok(())) => {}
            Ok(Err(cause)) => return failed(&session, cause, watch),
            Err(_) if left.get() => return End::Left,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    watch.begin();
    match session.close() {
        Ok(()) => End::Closed,
        Err(cause) => failed(&session, cause, watch),
    }
}

/// Every call after a failure says the same.
fn failed(session: &Session, cause: Cause, watch: &mut Calls) -> End {
    watch.begin();
    let mut said = vec![
        ("failed", session.failed().map_or(Ok(()), Err)),
        ("enter", session.enter(UnitId(0))),
        ("param_ready", session.param_ready(ParamId(0))),
        ("all_ready", session.all_ready()),
        ("gradient_free", session.gradient_free(ParamId(0))),
        ("gradient_complete", session.gradient_complete(ParamId(0), session.device().record(session.executor()))),
        ("step", session.step(StepRequest::default()).map(drop)),
        ("close", session.close()),
        ("enter after close", session.enter(UnitId(0))),
    ];
    if let Poll::Ready(ready) = session.poll_ready(ParamId(0), Waker::noop()) {
        said.push(("poll_ready", ready));
    } else {
        panic!("poll_ready is pending after a failure");
    }
    for (call, result) in said {
        assert_eq!(result.expect_err(call).to_string(), cause.to_string(), "{call}");
    }
    // What is left is the end of the session.
    watch.begin();
    End::Failed(cause)
}

/// Threads of this process that belong to sessions.
pub fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("linux").flatten();
    tasks.filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|name| name.starts_with("gf-"))).count()
}

/// All threads of ended sessions are given back, within the limit.
pub fn nothing_is_left(label: &str) {
    let deadline = Instant::now() + LIMIT;
    while threads() > 0 {
        assert!(Instant::now() < deadline, "{label}: {} threads are left", threads());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// After whatever happened, new sessions in this process work.
pub fn a_new_session_works(ranks: usize) {
    let parts = vec![Part::default(); ranks];
    let deadlines = Deadlines { start_up: LIMIT, collective: LIMIT, silence: LIMIT };
    let ends = run_over("a new session", &scenario(ranks), "cpu", parts, deadlines, None);
    assert!(ends.iter().all(|end| matches!(end, End::Closed)), "{ends:?}");
    nothing_is_left("a new session");
}

/// Every rank failed, with the same cause; returns it.
pub fn one_cause(label: &str, ends: &[End]) -> Cause {
    let cause = ends[0].cause().clone();
    for end in ends {
        assert_eq!(end.cause().to_string(), cause.to_string(), "{label}");
    }
    cause
}
