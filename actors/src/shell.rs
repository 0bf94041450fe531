//! The ractor shells: one thread per rank hosts all its actors on a current-thread runtime.
//!
//! A shell gives each message to its machine and carries out the actions. User code never runs here, and nothing here
//! blocks: the thread must keep hearing deadlines. An actor that fails or panics is reported by ractor to the
//! supervisor's shell, which poisons everything with that cause; if the thread itself ends, its guard does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use gatherflow_kernels::{Cause, CollectiveKind, Failure, FailureKind, clock};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};

use crate::action::{ActorName, Letter, Machine};
use crate::bucket::{Bucket, BucketMsg};
use crate::busy::Warnings;
use crate::communicator::CommunicatorMsg;
use crate::control::Board;
use crate::drill::Drill;
use crate::hands::{Hands, Post};
use crate::issuer::Issuer;
use crate::machines::Machines;
use crate::optimizer::OptimizerMsg;
use crate::patience::Patience;
use crate::plan::BucketId;
use crate::prehook::PreHookMsg;
use crate::session::SessionConfig;
use crate::supervisor::{Deadlines, PeerView, Supervisor, SupervisorMsg, busy_peers, overdue, overdue_verdict};

/// Where the actors of a rank are. Letters posted before they are spawned are dropped; there are none.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    addresses: OnceLock<Addresses>,
    /// Letters so far, and how many of them were handled.
    posted: AtomicU64,
    handled: AtomicU64,
    patience: Patience,
    /// When the actor thread last went to park.
    parked_ns: AtomicU64,
}

impl Directory {
    /// Called when the actor thread has nothing to do: an executor that is quick writes the next letter at once.
    fn linger(&self) {
        let handled = self.handled.load(Ordering::Relaxed);
        self.patience.look(|| (self.posted.load(Ordering::Relaxed) > handled).then_some(()));
        self.parked_ns.store(clock::now_ns(), Ordering::Relaxed);
    }

    fn wake(&self) {
        self.patience.parked(self.parked_ns.load(Ordering::Relaxed));
    }
}

#[derive(Debug)]
struct Addresses {
    buckets: Vec<ActorRef<BucketMsg>>,
    prehook: ActorRef<PreHookMsg>,
    optimizer: ActorRef<OptimizerMsg>,
    communicator: ActorRef<CommunicatorMsg>,
    supervisor: ActorRef<Watch>,
}

impl Post for Directory {
    fn post(&self, letter: Letter) {
        let Some(to) = self.addresses.get() else { return };
        // An actor that is gone has failed or was closed: its supervisor has told everybody who waits.
        match letter {
            Letter::Bucket(bucket, message) => drop(to.buckets[bucket.0 as usize].send_message(message)),
            Letter::PreHook(message) => drop(to.prehook.send_message(message)),
            Letter::Optimizer(message) => drop(to.optimizer.send_message(message)),
            Letter::Communicator(message) => drop(to.communicator.send_message(message)),
            Letter::Supervisor(message) => drop(to.supervisor.send_message(Watch::Said(message))),
        }
        self.posted.fetch_add(1, Ordering::Relaxed);
    }

    fn handled(&self) {
        self.handled.fetch_add(1, Ordering::Relaxed);
    }
}

/// The state of one shell.
struct Running<M: Machine> {
    name: ActorName,
    machine: M,
    hands: Arc<Hands>,
    post: Arc<dyn Post>,
    issuer: Option<Issuer>,
}

impl<M: Machine> Running<M> {
    fn turn(&mut self, message: M::Msg) -> Result<(), Cause> {
        self.hands.turn(self.name, &mut self.machine, message, self.issuer.as_mut(), &self.post)
    }
}

/// The shell of every actor but the supervisor.
struct Shell<M>(std::marker::PhantomData<fn() -> M>);

impl<M: Machine> Actor for Shell<M> {
    type Msg = M::Msg;
    type State = Running<M>;
    type Arguments = Running<M>;

    async fn pre_start(&self, _: ActorRef<M::Msg>, state: Running<M>) -> Result<Running<M>, ActorProcessingErr> {
        Ok(state)
    }

    async fn handle(
        &self,
        _: ActorRef<M::Msg>,
        message: M::Msg,
        state: &mut Running<M>,
    ) -> Result<(), ActorProcessingErr> {
        state.post.handled();
        state.turn(message).map_err(|cause| Box::new(Failure::clone(&cause)) as ActorProcessingErr)
    }
}

/// What the supervisor's shell hears.
#[derive(Debug)]
enum Watch {
    /// A message for the machine.
    Said(SupervisorMsg),
    /// Time passes.
    Tick,
    /// The session closed.
    Stop,
}

/// The supervisor's shell: it also sees failed actors and the time.
struct Watching;

struct WatchState {
    running: Running<Supervisor>,
    deadlines: Deadlines,
    /// Per rank: the progress count last seen, and when it last changed.
    progress: Vec<(u64, u64)>,
    warnings: Warnings,
}

impl WatchState {
    /// A heartbeat, and a look at whether what is outstanding is overdue.
    fn look(&mut self) -> Option<Cause> {
        let hands = &self.running.hands;
        let now = clock::now_ns();
        hands.control.board().alive_ns.store(now, Ordering::Relaxed);
        // The newest collective that each of the two streams has begun, for whoever has to say who is late.
        let (streams, own) = (hands.streams, hands.control.board());
        own.begun_reduce.store(hands.device.begun(streams.reduce), Ordering::Relaxed);
        own.begun_gather.store(hands.device.begun(streams.gather), Ordering::Relaxed);
        // Another rank failed, and its word may still be on its way, or lost. Or the device did, and nobody waits for it.
        if let Some(first) = hands.control.failed().or_else(|| hands.device.failed()) {
            return Some(first);
        }
        let verdict = hands.oldest_verdict();
        let Some((key, since)) = hands.oldest_outstanding() else {
            let (step, since) = verdict?;
            return overdue_verdict(&self.deadlines, now, step, since, hands.control.rank()).map(Arc::new);
        };
        let boards = hands.control.boards();
        let spells: Vec<_> = boards.iter().map(Board::spell).collect();
        let mut views = Vec::with_capacity(boards.len());
        for ((board, seen), spell) in boards.iter().zip(&mut self.progress).zip(&spells) {
            let count = board.progress.load(Ordering::Relaxed);
            if count != seen.0 {
                *seen = (count, now);
            }
            views.push(PeerView {
                issued: board.issued.load(Ordering::SeqCst),
                begun: match key.kind {
                    CollectiveKind::Gather => board.begun_gather.load(Ordering::Relaxed),
                    _ => board.begun_reduce.load(Ordering::Relaxed),
                },
                left: board.how_it_left(),
                abandoned: board.abandoned.load(Ordering::SeqCst).checked_sub(1),
                progress_ns: seen.1,
                alive_ns: board.alive_ns.load(Ordering::Relaxed),
                busy: spell.as_deref(),
            });
        }
        let rank = hands.control.rank();
        let members = hands.lowering.members(key.group);
        for (peer, spell) in busy_peers(now, &key, members, rank, &views) {
            if self.warnings.take_due(peer, since.max(spell.since_ns), now) {
                let left_s = Duration::from_nanos(spell.until_ns - now).as_secs();
                tracing::warn!(
                    target: "gatherflow::supervisor",
                    rank,
                    step = key.of_step(),
                    bucket = key.of_bucket(),
                    busy = peer,
                    reason = %spell.reason,
                    left_s,
                    "waiting for a busy rank in the {key}"
                );
            }
        }
        overdue(&self.deadlines, now, &key, members, since, rank, &views).map(Arc::new)
    }
}

impl Actor for Watching {
    type Msg = Watch;
    type State = WatchState;
    type Arguments = WatchState;

    async fn pre_start(&self, _: ActorRef<Watch>, state: WatchState) -> Result<WatchState, ActorProcessingErr> {
        Ok(state)
    }

    async fn handle(
        &self,
        me: ActorRef<Watch>,
        message: Watch,
        state: &mut WatchState,
    ) -> Result<(), ActorProcessingErr> {
        if matches!(message, Watch::Said(_)) {
            state.running.post.handled();
        }
        let said = match message {
            Watch::Said(_) | Watch::Tick if state.running.hands.stopping.load(Ordering::SeqCst) => None,
            Watch::Said(said) => Some(said),
            Watch::Tick => state.look().map(SupervisorMsg::Failed),
            Watch::Stop => {
                me.stop_children(None);
                me.stop(None);
                None
            }
        };
        if let Some(said) = said
            && let Err(cause) = state.running.turn(said)
        {
            // The supervisor itself failed: nobody is left who would tell the others.
            state.running.hands.fail(&cause);
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Watch>,
        event: SupervisionEvent,
        state: &mut WatchState,
    ) -> Result<(), ActorProcessingErr> {
        let hands = state.running.hands.clone();
        let failure = |what: String| Failure::new(FailureKind::Actor, hands.control.rank(), what);
        let failure = match event {
            SupervisionEvent::ActorFailed(_, error) => match error.downcast::<Failure>() {
                Ok(failure) => *failure,
                Err(other) => failure(format!("an actor panicked: {other}")),
            },
            SupervisionEvent::ActorTerminated(..) if !hands.stopping.load(Ordering::SeqCst) => {
                failure("an actor ended without being told to".into())
            }
            _ => return Ok(()),
        };
        if let Err(cause) = state.running.turn(SupervisorMsg::Failed(Arc::new(failure))) {
            hands.fail(&cause);
        }
        Ok(())
    }
}

/// The actor thread of one rank.
#[derive(Debug)]
pub(crate) struct ActorThread {
    directory: Arc<Directory>,
    thread: Option<JoinHandle<()>>,
}

/// Fails all ranks when the actor thread ends for whatever reason before it was told to.
struct Guard(Arc<Hands>);

impl Drop for Guard {
    fn drop(&mut self) {
        let rank = self.0.control.rank();
        let failure = |kind, message| Arc::new(Failure::new(kind, rank, message));
        if std::thread::panicking() {
            self.0.fail(&failure(FailureKind::Actor, "the actor thread panicked"));
        } else if self.0.stopping.load(Ordering::SeqCst) {
            self.0.face.fail(&failure(FailureKind::Closed, "the engine was closed"));
        } else {
            self.0.fail(&failure(FailureKind::Actor, "the actor thread ended"));
        }
    }
}

impl ActorThread {
    /// Starts the thread and its actors; `post` is the directory through which they hear.
    ///
    /// # Errors
    /// If the thread, its runtime or an actor cannot be started.
    pub(crate) fn start(
        machines: Machines,
        hands: &Arc<Hands>,
        directory: &Arc<Directory>,
        issuer: Issuer,
        config: &SessionConfig,
    ) -> Result<Self, Cause> {
        let rank = hands.control.rank();
        let (deadlines, warning) = (config.deadlines, config.busy_warning);
        let failed = |reason: String| Arc::new(Failure::new(FailureKind::StartUp, rank, reason));
        let (idle, awake, face) = (directory.clone(), directory.clone(), hands.face.clone());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .on_thread_park(move || {
                face.wake_for_facts();
                idle.linger();
            })
            .on_thread_unpark(move || awake.wake())
            .build()
            .map_err(|e| failed(format!("cannot start the actors' runtime: {e}")))?;
        let (started, start) = crossbeam_channel::bounded(1);
        let (thread_hands, thread_directory) = (hands.clone(), directory.clone());
        let thread = std::thread::Builder::new()
            .name(format!("gf-actors-{rank}"))
            .spawn(move || {
                let guard = Guard(thread_hands.clone());
                runtime.block_on(async move {
                    match spawn_all(machines, &thread_hands, &thread_directory, issuer, deadlines, warning).await {
                        Ok((supervisor, joined)) => {
                            let _ = started.send(Ok(()));
                            let mut ticks = tokio::time::interval(deadlines.tick());
                            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                            let mut joined = std::pin::pin!(joined);
                            loop {
                                tokio::select! {
                                    _ = ticks.tick() => {
                                        if thread_hands.drill.as_ref().is_some_and(Drill::thread_ends) {
                                            break;
                                        }
                                        drop(supervisor.send_message(Watch::Tick));
                                    }
                                    _ = &mut joined => break,
                                }
                            }
                        }
                        Err(error) => {
                            thread_hands.stopping.store(true, Ordering::SeqCst);
                            drop(started.send(Err(error)));
                        }
                    }
                });
                drop(guard);
            })
            .map_err(|e| failed(format!("cannot start the actor thread: {e}")))?;
        match start.recv() {
            Ok(Ok(())) => Ok(Self { directory: directory.clone(), thread: Some(thread) }),
            Ok(Err(reason)) => Err(failed(reason)),
            Err(_) => Err(failed("the actor thread ended before it started".into())),
        }
    }

    /// Stops the actors and joins the thread. The hands know that they are stopping.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if let Some(to) = self.directory.addresses.get() {
            drop(to.supervisor.send_message(Watch::Stop));
        }
        if thread.thread().id() != std::thread::current().id() {
            // The thread reports its own panic through its guard.
            let _ = thread.join();
        }
    }
}

fn running<M: Machine>(name: ActorName, machine: M, hands: &Arc<Hands>, post: &Arc<dyn Post>) -> Running<M> {
    Running { name, machine, hands: hands.clone(), post: post.clone(), issuer: None }
}

fn shell<M: Machine>() -> Shell<M> {
    Shell(std::marker::PhantomData)
}

async fn spawn_all(
    machines: Machines,
    hands: &Arc<Hands>,
    directory: &Arc<Directory>,
    issuer: Issuer,
    deadlines: Deadlines,
    warning: Duration,
) -> Result<(ActorRef<Watch>, tokio::task::JoinHandle<()>), String> {
    let post: Arc<dyn Post> = directory.clone();
    let text = |e: ractor::SpawnErr| format!("cannot start an actor: {e}");
    let watch = WatchState {
        running: running(ActorName::Supervisor, machines.supervisor, hands, &post),
        deadlines,
        progress: vec![(0, clock::now_ns()); hands.control.ranks()],
        warnings: Warnings::new(hands.control.ranks(), warning),
    };
    let (supervisor, joined) = Actor::spawn(None, Watching, watch).await.map_err(text)?;
    let parent = || supervisor.get_cell();
    let mut buckets = Vec::with_capacity(machines.buckets.len());
    for (index, bucket) in machines.buckets.into_iter().enumerate() {
        let running = running(ActorName::Bucket(BucketId::from_index(index)), bucket, hands, &post);
        let (address, _) = Actor::spawn_linked(None, shell::<Bucket>(), running, parent()).await.map_err(text)?;
        buckets.push(address);
    }
    let prehook = running(ActorName::PreHook, machines.prehook, hands, &post);
    let (prehook, _) = Actor::spawn_linked(None, shell(), prehook, parent()).await.map_err(text)?;
    let optimizer = running(ActorName::Optimizer, machines.optimizer, hands, &post);
    let (optimizer, _) = Actor::spawn_linked(None, shell(), optimizer, parent()).await.map_err(text)?;
    let mut communicator = running(ActorName::Communicator, machines.communicator, hands, &post);
    communicator.issuer = Some(issuer);
    let (communicator, _) = Actor::spawn_linked(None, shell(), communicator, parent()).await.map_err(text)?;
    let addresses = Addresses { buckets, prehook, optimizer, communicator, supervisor: supervisor.clone() };
    directory.addresses.set(addresses).map_err(|_| "the actors were started twice".to_string())?;
    Ok((supervisor, joined))
}
