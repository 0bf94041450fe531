//! How a session starts: memory, initial parameters, agreement with the other ranks, masters, actors.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gatherflow_kernels::fnv::Fnv;
use gatherflow_kernels::verdict::Scalars;
use gatherflow_kernels::work::Copy;
use gatherflow_kernels::{
    AccessMode, Cause, Collective, CollectiveKey, CollectiveKind, CollectiveOp, Comm, Device, DeviceError, Event,
    Failure, FailureKind, Lease, LeaseError, Members, OpenOptions, Opened, Work, open,
};
use parking_lot::Mutex;

use super::{BucketSide, Driver, Session, SessionConfig, StartParams, UnitFace};
use crate::action::Letter;
use crate::control::{Agreement, Control, Line, Seat};
use crate::face::Face;
use crate::hands::{Hands, Issued, Post, Streams};
use crate::inline::Inline;
use crate::issuer::Issuer;
use crate::lowering::Lowering;
use crate::machines::Machines;
use crate::plan::{Across, ParamId, Pipeline, Plan, PlanError, Purpose, Rank};
use crate::recorder::Recorder;
use crate::shell::{ActorThread, Directory};
use crate::supervisor::SupervisorMsg;

/// Fills one parameter's memory at the start.
pub type Init<'a> = &'a mut dyn FnMut(ParamId, &mut Lease) -> Result<(), Cause>;

impl Session {
    /// Starts one rank: allocates what the plan lists, calls `init` once per parameter (frozen ones too), meets the other
    /// ranks, makes parameters equal, makes the masters and starts the actors.
    ///
    /// # Errors
    /// Whatever of this fails, with its reason; ranks that disagree all get the same error.
    #[allow(clippy::needless_pass_by_value)] // a session is opened once with its options
    pub fn start(
        seat: Seat,
        plan: Arc<Plan>,
        config: SessionConfig,
        options: OpenOptions,
        init: Init<'_>,
    ) -> Result<Arc<Self>, Cause> {
        // A rank that cannot start tells why, before it leaves its seat and is only missed.
        let device_error = |e| start_failure(seat.rank(), e);
        let started = open(&options, &seat.place()).map_err(device_error).and_then(|opened| {
            let device = opened.device.clone();
            // What is enqueued already ends at once, and the threads of the device with it.
            start(&seat, plan, config, &options, opened, init).inspect_err(|cause| device.poison(cause.clone()))
        });
        let session = started.map_err(|cause| seat.control().first_cause(&cause))?;
        seat.taken();
        Ok(session)
    }
}

fn start(
    seat: &Seat,
    plan: Arc<Plan>,
    config: SessionConfig,
    options: &OpenOptions,
    opened: Opened,
    init: Init<'_>,
) -> Result<Arc<Session>, Cause> {
    let control = seat.control();
    let rank = seat.rank();
    let fail = |message: String| Arc::new(Failure::new(FailureKind::StartUp, rank, message));
    let device_error = |e| start_failure(rank, e);
    if plan.ranks() != seat.ranks() {
        return Err(fail(format!("the plan is for {} ranks but there are {}", plan.ranks(), seat.ranks())));
    }
    let (planned, stage) = (plan.pipeline().stage, plan.stage_of(Rank(rank)));
    if planned != stage {
        return Err(fail(format!("the plan is of pipeline stage {planned} but rank {rank} is of stage {stage}")));
    }
    if config.driver == Driver::Inline && !plan.is_joined() {
        return Err(fail("the inline driver runs ranks one after the other: pipeline stages cannot meet there".into()));
    }
    if config.driver == Driver::Inline && options.device != "null" {
        return Err(fail(format!("the inline driver runs on the null device only, not on {:?}", options.device)));
    }
    let plan = join_stages(plan, &control, config.deadlines.start_up)?;
    let (device, mut comm) = (opened.device, opened.comm);
    let lowering = Lowering::new(&plan, rank, device.as_ref(), config.rule, config.scaler).map_err(device_error)?;
    let streams = Streams::of(device.as_ref()).map_err(device_error)?;
    initialise(rank, &plan, &config, &lowering, device.as_ref(), init)?;

    let mut lines = agreement(&plan, rank, &config);
    let hash_error = |e: LeaseError| fail(e.to_string());
    match config.start_params {
        StartParams::Check => {
            let hashes = parameter_hashes("initial parameters", &plan, &lowering, device.as_ref());
            lines.extend(hashes.map_err(hash_error)?);
        }
        StartParams::Broadcast if plan.tensor_parallel() > 1 => {
            lines.push(sources_agree(&plan, rank, &lowering, device.as_ref()).map_err(hash_error)?);
        }
        StartParams::Broadcast => {}
    }
    // The inline driver runs ranks one after the other on one thread: they cannot meet.
    if config.driver == Driver::Actors {
        control.meet(lines, config.deadlines.start_up)?;
    }
    let seq = match config.start_params {
        StartParams::Broadcast => {
            broadcast(&plan, &lowering, streams, device.as_ref(), &mut comm).map_err(device_error)?
        }
        StartParams::Check => 0,
    };
    let started = make_masters(&plan, &lowering, streams, device.as_ref()).map_err(device_error)?;
    await_start(&started, &control, config.deadlines.start_up)?;
    device.wait(streams.executor, &started).map_err(device_error)?;
    control.board().issued.store(seq, Ordering::SeqCst);

    let machines = Machines::new(&plan, &config, &lowering, rank, &started, seq);
    let hands = Arc::new(Hands {
        device,
        lowering,
        streams,
        face: Arc::new(Face::new(rank, plan.buckets().len(), &started)),
        control: control.clone(),
        issued: Issued::default(),
        outstanding: Mutex::default(),
        lists: Mutex::default(),
        judging: Mutex::default(),
        stopping: AtomicBool::new(false),
        dropped_edge: config.dropped_edge,
        drill: config.drill.clone(),
    });
    let (post, actors) = start_actors(machines, comm, &hands, &config)?;
    let inbox = post.clone();
    control.open_inbox(Box::new(move |message| {
        inbox.post(Letter::Supervisor(SupervisorMsg::Control(message)));
    }));
    Ok(Arc::new(session(plan, config, hands, post, actors)))
}

/// What the executor's side remembers, at version 0.
fn session(
    plan: Arc<Plan>,
    config: SessionConfig,
    hands: Arc<Hands>,
    post: Arc<dyn Post>,
    actors: Option<ActorThread>,
) -> Session {
    let units = plan.units().iter().map(|unit| UnitFace {
        buckets: unit.buckets.clone().into(),
        demand: unit.demand,
        seen: AtomicU64::new(0),
    });
    let buckets = plan.buckets().iter().map(|bucket| BucketSide {
        demand: plan.demand(bucket.position),
        members: bucket.params.len() as u32,
        reported: AtomicU32::new(0),
        seen: AtomicU64::new(0),
        free: AtomicU64::new(0),
    });
    Session {
        units: units.collect(),
        buckets: buckets.collect(),
        plan,
        config,
        face: hands.face.clone(),
        hands,
        post,
        actors: Mutex::new(actors),
        steps: AtomicU64::new(0),
        opened: AtomicU64::new(0),
        chain: Mutex::new((0, 0)),
        scale_read: Mutex::default(),
        loaded_scale: Mutex::default(),
        recorder: Recorder::new(),
        closed: OnceLock::new(),
    }
}

/// Hands the machines to whoever runs them.
fn start_actors(
    machines: Machines,
    comm: Comm,
    hands: &Arc<Hands>,
    config: &SessionConfig,
) -> Result<(Arc<dyn Post>, Option<ActorThread>), Cause> {
    let device_error = |e| start_failure(hands.control.rank(), e);
    match config.driver {
        Driver::Inline => {
            let inline = Inline::new(hands);
            let post: Arc<dyn Post> = inline.clone();
            inline.start(machines, Issuer::start(comm, hands, &post).map_err(device_error)?);
            Ok((post, None))
        }
        Driver::Actors => {
            let directory = Arc::new(Directory::default());
            let post: Arc<dyn Post> = directory.clone();
            let issuer = Issuer::start(comm, hands, &post).map_err(device_error)?;
            let actors = ActorThread::start(machines, hands, &directory, issuer, config)?;
            Ok((post, Some(actors)))
        }
    }
}

/// The plan as part of a job of several pipeline stages, whose ranks show each other what they have planned.
fn join_stages(plan: Arc<Plan>, control: &Control, limit: Duration) -> Result<Arc<Plan>, Cause> {
    if plan.is_joined() {
        return Ok(plan);
    }
    let Pipeline { stages, .. } = plan.pipeline();
    let shown = control.show(division_line(&plan), &plan, limit)?;
    // The first rank of each stage speaks for it; that the others have the same plan is compared with everything else.
    let first = |stage: usize| shown[stage * plan.tensor_parallel()].clone();
    let joined = plan.joined((0..stages).map(first).collect());
    let refused = |e: PlanError| Arc::new(Failure::new(FailureKind::StartUp, control.rank(), e.to_string()));
    joined.map(Arc::new).map_err(refused)
}

/// Fills all parameters, copies as the first of them, and the scalars of the first step.
fn initialise(
    rank: usize,
    plan: &Plan,
    config: &SessionConfig,
    lowering: &Lowering,
    device: &dyn Device,
    init: Init<'_>,
) -> Result<(), Cause> {
    let fail = |e: LeaseError| Arc::new(Failure::new(FailureKind::StartUp, rank, e.to_string()));
    for param in plan.params() {
        let mut lease = device.lease(lowering.param(param.id), AccessMode::Write).map_err(fail)?;
        init(param.id, &mut lease)?;
    }
    for param in plan.params() {
        // Copies of a weight start equal, so that equal gradients keep them so.
        let Some(first) = plan.copies_of(param.id).next().filter(|first| *first != param.id) else { continue };
        let first = device.lease(lowering.param(first), AccessMode::Read).map_err(fail)?;
        let mut copy = device.lease(lowering.param(param.id), AccessMode::Write).map_err(fail)?;
        copy.as_mut_bytes().map_err(fail)?.copy_from_slice(first.as_bytes());
    }
    let mut lease = device.lease(lowering.scalars(), AccessMode::Write).map_err(fail)?;
    lease.as_mut_bytes().map_err(fail)?.copy_from_slice(&Scalars::initial(&config.scaler).to_bytes());
    Ok(())
}

/// Every model-parallel rank's parameters are broadcast from ranks of its own: what all of them hold must be the same there.
fn sources_agree(plan: &Plan, rank: usize, lowering: &Lowering, device: &dyn Device) -> Result<Line, LeaseError> {
    let sources = plan.params().iter().filter(|p| !p.tensor_parallel && plan.is_source(Rank(rank), p));
    hash_line("initial parameters", plan.model_parallel_group(), sources.map(|p| p.id), lowering, device)
}

/// The first rank's parameters to all ranks that hold the same. Returns the number of the next collective.
fn broadcast(
    plan: &Plan,
    lowering: &Lowering,
    streams: Streams,
    device: &dyn Device,
    comm: &mut Comm,
) -> Result<u64, DeviceError> {
    let mut seq = 0;
    if plan.ranks() == 1 {
        return Ok(seq);
    }
    for allocation in plan.memory().allocations {
        let (dtype, shard_group) = match allocation.purpose {
            Purpose::Params(buffer) => (plan.buffer(buffer).dtype, plan.buffer(buffer).shard_group),
            Purpose::Frozen(buffer) => {
                let frozen = &plan.frozen()[buffer.0 as usize];
                (frozen.dtype, frozen.shard_group)
            }
            _ => continue,
        };
        let replicas = plan.shard_groups()[shard_group].across == Across::Replicas;
        let group = plan.group_number(if replicas { 0 } else { shard_group });
        let Some(range) = lowering.allocation(allocation.purpose) else { continue };
        let key = CollectiveKey {
            seq,
            kind: CollectiveKind::StartUp,
            bucket: CollectiveKey::NO_BUCKET,
            bytes: range.bytes() as u64,
            dtype,
            version: 0,
            group,
        };
        let op = CollectiveOp::Broadcast { range, root: 0 };
        comm.issue(streams.gather, Collective::new(key, lowering.members(group).clone(), op))?;
        seq += 1;
    }
    let numbers = plan.numbers();
    for (weight, bucket) in plan.staged_here() {
        let memory = lowering.bucket(bucket);
        let key = CollectiveKey {
            seq: numbers.start + weight as u64,
            kind: CollectiveKind::StartUp,
            bucket: CollectiveKey::NO_BUCKET,
            bytes: memory.params.bytes() as u64,
            dtype: memory.dtype,
            version: 0,
            group: plan.staged_group(weight),
        };
        let op = CollectiveOp::Broadcast { range: memory.params, root: 0 };
        comm.issue(streams.gather, Collective::new(key, lowering.members(key.group).clone(), op))?;
        for copy in plan.copies().iter().filter(|set| set[0] == bucket).flat_map(|set| &set[1..]) {
            let dst = lowering.bucket(*copy).params;
            device.enqueue(streams.gather, Work::Copy(Copy { src: memory.params, dst }))?;
        }
    }
    Ok(numbers.start + numbers.staged)
}

/// f32 masters of the owned 16-bit parameters, once those are shared. Returns the event behind them.
fn make_masters(plan: &Plan, lowering: &Lowering, streams: Streams, device: &dyn Device) -> Result<Event, DeviceError> {
    device.wait(streams.optimizer, &device.record(streams.gather))?;
    cast_masters(plan, lowering, streams, device)
}

/// f32 masters of the owned 16-bit parameters, as the optimizer's stream finds those.
pub(super) fn cast_masters(
    plan: &Plan,
    lowering: &Lowering,
    streams: Streams,
    device: &dyn Device,
) -> Result<Event, DeviceError> {
    let mut result = Ok(());
    for bucket in plan.buckets() {
        lowering.follow_params(bucket.id, &mut |work| {
            if result.is_ok() {
                result = device.enqueue(streams.optimizer, work);
            }
        });
    }
    result.map(|()| device.record(streams.optimizer))
}

fn start_failure(rank: usize, error: DeviceError) -> Cause {
    match error {
        DeviceError::Poisoned(cause) => cause,
        other => Arc::new(Failure::new(FailureKind::StartUp, rank, other.to_string())),
    }
}

/// What must be the same on every rank, or on every one of its pipeline stage. Overlap modes and credits need not be: they decide
/// when, never which.
fn agreement(plan: &Plan, rank: usize, config: &SessionConfig) -> Agreement {
    let stage = plan.stage_members(Rank(rank));
    let of_stage = |what: String, value: String| Line { among: stage.clone(), ..Line::new(what, value) };
    let mut lines = vec![division_line(plan)];
    lines.push(of_stage("number of parameters".into(), plan.params().len().to_string()));
    for param in plan.params() {
        lines.push(of_stage(format!("parameter {}", param.name), param.traits()));
    }
    for unit in plan.units() {
        let names: Vec<&str> = unit.params.iter().map(|param| plan.param(*param).name.as_str()).collect();
        lines.push(of_stage(format!("unit {}", unit.name), format!("chunk {}, {}", unit.chunk, names.join(" "))));
    }
    lines.extend(config.agree.iter().map(|(what, value)| Line::new(what, value)));
    for group in &plan.shard_groups()[1..] {
        let value = format!("{} ranks, {:?}, average over {}", group.ranks, group.across, group.average_over);
        lines.push(of_stage(format!("shard group {}", group.name.as_deref().unwrap_or_default()), value));
    }
    lines.push(of_stage("bucket size".into(), plan.bucket_size().to_string()));
    lines.push(Line::new("where parameters start and buckets end (`layout`)", format!("{:?}", plan.alignment())));
    lines.push(of_stage("calls that gather (`gather_group_bytes`)".into(), plan.calls().to_string()));
    lines.push(of_stage("plan".into(), format!("{:016x}", plan.fingerprint())));
    lines.push(Line::new("averaging, clipping and policies", format!("{:?}", config.rule)));
    lines.push(Line::new("check_for_nan_in_grad", config.check_for_nan_in_grad.to_string()));
    lines.push(Line::new("skip", format!("{:?}", config.skip)));
    lines.push(Line::new("loss scaler", format!("{:?}", config.scaler)));
    lines.push(Line::new("optimizer groups", format!("{:?}", config.groups)));
    lines.push(Line::new("check_order_every", config.check_order_every.to_string()));
    lines.push(Line::new("start_params", format!("{:?}", config.start_params)));
    lines
}

/// How the model is divided among ranks: what they must agree on before anything else.
fn division_line(plan: &Plan) -> Line {
    let (ranks, stages) = (plan.model_parallel(), plan.pipeline().stages);
    let value = if stages > 1 { format!("{ranks} in {stages} pipeline stages") } else { ranks.to_string() };
    Line::new("ranks that share a copy of the model", value)
}

/// Hashes of parameters, apart for those that other ranks hold alike. `what` names them.
pub(super) fn parameter_hashes(
    what: &str,
    plan: &Plan,
    lowering: &Lowering,
    device: &dyn Device,
) -> Result<Agreement, LeaseError> {
    let mut held: BTreeMap<u32, Vec<ParamId>> = BTreeMap::new();
    for param in plan.params() {
        plan.holders(param).for_each(|division| held.entry(division).or_default().push(param.id));
    }
    held.into_iter().map(|(division, params)| hash_line(what, division, params, lowering, device)).collect()
}

/// FNV-1a over the bytes of parameters, for the ranks of this rank's part of a division to compare.
fn hash_line(
    what: &str,
    division: u32,
    params: impl IntoIterator<Item = ParamId>,
    lowering: &Lowering,
    device: &dyn Device,
) -> Result<Line, LeaseError> {
    let mut hash = Fnv::new();
    for param in params {
        hash.bytes(device.lease(lowering.param(param), AccessMode::Read)?.as_bytes());
    }
    let among = lowering.members(division).clone();
    let whose = if among == Members::ALL { String::new() } else { format!(" that {among} share") };
    Ok(Line { among, ..Line::new(format!("hash of the {what}{whose}"), format!("{:016x}", hash.finish())) })
}

/// Waits for the start-up work; a rank that leaves meanwhile, or the deadline, ends it.
fn await_start(started: &Event, control: &Control, limit: Duration) -> Result<(), Cause> {
    let slice = Duration::from_millis(20).min(limit);
    let mut waited = Duration::ZERO;
    loop {
        if let Some(result) = started.wait_for(slice) {
            return result;
        }
        waited += slice;
        let left = control.boards().iter().enumerate().find_map(|(rank, board)| Some((rank, board.how_it_left()?)));
        if let Some((rank, left)) = left {
            let message = format!("rank {rank} {left}, during start-up");
            return Err(Arc::new(Failure::new(FailureKind::RankLost, rank, message)));
        }
        if waited >= limit {
            let message = format!("start-up did not finish within {} s (deadline `start_up`)", limit.as_secs_f64());
            return Err(Arc::new(Failure::new(FailureKind::Deadline, control.rank(), message)));
        }
    }
}
