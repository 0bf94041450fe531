//! How a session starts: memory, initial parameters, agreement with the other ranks, masters, actors.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gatherflow_kernels::verdict::Scalars;
use gatherflow_kernels::work::Cast;
use gatherflow_kernels::{
    AccessMode, Cause, Collective, CollectiveKey, CollectiveKind, CollectiveOp, DType, DeviceError, Event, Failure,
    FailureKind, Lease, OpenOptions, StreamKind, Work, open,
};
use parking_lot::Mutex;

use super::{BucketSide, Driver, Session, SessionConfig, StartParams, UnitFace};
use crate::action::Letter;
use crate::control::{Agreement, Control, Seat};
use crate::face::Face;
use crate::hands::{Hands, Issued, Post, Streams};
use crate::inline::Inline;
use crate::issuer::Issuer;
use crate::lowering::Lowering;
use crate::machines::Machines;
use crate::plan::{ParamId, Plan, Purpose};
use crate::recorder::Recorder;
use crate::shell::{ActorThread, Directory};
use crate::supervisor::SupervisorMsg;

/// Fills one parameter's memory at the start.
pub(super) type Init<'a> = &'a mut dyn FnMut(ParamId, &mut Lease) -> Result<(), Cause>;

impl Session {
    /// Starts one rank: allocates what the plan lists, calls `init` once per parameter (frozen ones too), meets the other
    /// ranks, makes parameters equal, makes the masters and starts the actors.
    ///
    /// # Errors
    /// Whatever of this fails, with its reason; ranks that disagree all get the same error.
    pub fn start(
        seat: Seat,
        plan: Arc<Plan>,
        config: SessionConfig,
        options: OpenOptions,
        init: Init<'_>,
    ) -> Result<Arc<Self>, Cause> {
        // A rank that cannot start tells why, before it leaves its seat and is only missed.
        let session = start(&seat, plan, config, options, init).map_err(|cause| seat.control().first_cause(&cause))?;
        seat.taken();
        Ok(session)
    }
}

fn start(
    seat: &Seat,
    plan: Arc<Plan>,
    config: SessionConfig,
    options: OpenOptions,
    init: Init<'_>,
) -> Result<Arc<Session>, Cause> {
    let control = seat.control();
    let rank = seat.rank();
    let fail = |message: String| Arc::new(Failure::new(FailureKind::StartUp, rank, message));
    let device_error = |e: DeviceError| match e {
        DeviceError::Poisoned(cause) => cause,
        other => fail(other.to_string()),
    };
    if plan.ranks() != seat.ranks() {
        return Err(fail(format!("the plan is for {} ranks but there are {}", plan.ranks(), seat.ranks())));
    }
    if config.driver == Driver::Inline && options.device != "null" {
        return Err(fail(format!("the inline driver runs on the null device only, not on {:?}", options.device)));
    }
    let opened = open(&options, &seat.place()).map_err(device_error)?;
    let (device, mut comm) = (opened.device, opened.comm);
    let lowering = Lowering::new(&plan, rank, device.as_ref(), config.rule, config.scaler).map_err(device_error)?;
    let streams = Streams {
        executor: device.stream(StreamKind::Executor).map_err(device_error)?,
        optimizer: device.stream(StreamKind::Optimizer).map_err(device_error)?,
        reduce: device.stream(StreamKind::Reduce).map_err(device_error)?,
        gather: device.stream(StreamKind::Gather).map_err(device_error)?,
    };
    for param in plan.params() {
        let range = lowering.param(param.id);
        let mut lease = device.lease(range, AccessMode::Write).map_err(|e| fail(e.to_string()))?;
        init(param.id, &mut lease)?;
    }
    {
        let mut lease = device.lease(lowering.scalars(), AccessMode::Write).map_err(|e| fail(e.to_string()))?;
        let bytes = lease.as_mut_bytes().map_err(|e| fail(e.to_string()))?;
        bytes.copy_from_slice(&Scalars::initial(&config.scaler).to_bytes());
    }

    // The inline driver runs ranks one after the other on one thread: they cannot meet.
    let meets = config.driver == Driver::Actors;
    let mut lines = agreement(&plan, &config);
    if config.start_params == StartParams::Check {
        let hash = parameter_hash(&plan, &lowering, device.as_ref()).map_err(|e| fail(e.to_string()))?;
        lines.push(("hash of the initial parameters".into(), format!("{hash:016x}")));
    }
    if meets {
        control.meet(lines, config.deadlines.start_up)?;
    }
    let mut seq = 0;
    if config.start_params == StartParams::Broadcast && plan.ranks() > 1 {
        for allocation in plan.memory().allocations {
            let dtype = match allocation.purpose {
                Purpose::Params(buffer) => plan.buffer(buffer).dtype,
                Purpose::Frozen(buffer) => plan.frozen()[buffer.0 as usize].dtype,
                _ => continue,
            };
            let Some(range) = lowering.allocation(allocation.purpose) else { continue };
            let key = CollectiveKey {
                seq,
                kind: CollectiveKind::StartUp,
                bucket: CollectiveKey::NO_BUCKET,
                bytes: range.bytes() as u64,
                dtype,
                version: 0,
            };
            let op = CollectiveOp::Broadcast { range, root: 0 };
            comm.issue(streams.gather, Collective { key, op }).map_err(device_error)?;
            seq += 1;
        }
    }
    let shared = device.record(streams.gather);
    device.wait(streams.optimizer, &shared).map_err(device_error)?;
    for bucket in plan.buckets() {
        let memory = lowering.bucket(bucket.id);
        if memory.dtype != DType::F32 {
            let cast = Cast { src: memory.param_shard, from: memory.dtype, dst: memory.master, to: DType::F32 };
            device.enqueue(streams.optimizer, Work::Cast(cast)).map_err(device_error)?;
        }
    }
    let started = device.record(streams.optimizer);
    await_start(&started, &control, config.deadlines.start_up)?;
    device.wait(streams.executor, &started).map_err(device_error)?;
    control.board().issued.store(seq, std::sync::atomic::Ordering::SeqCst);

    let face = Arc::new(Face::new(rank, plan.buckets().len(), &started));
    let machines = Machines::new(&plan, &config, &lowering, rank, &started, seq);
    let hands = Arc::new(Hands {
        device,
        lowering,
        streams,
        face: face.clone(),
        control: control.clone(),
        issued: Issued::default(),
        outstanding: Mutex::default(),
        lists: Mutex::default(),
        stopping: AtomicBool::new(false),
        dropped_edge: config.dropped_edge,
        drill: config.drill.clone(),
    });
    let (post, actors): (Arc<dyn Post>, _) = match config.driver {
        Driver::Inline => {
            let inline = Inline::new(&hands);
            let post: Arc<dyn Post> = inline.clone();
            inline.start(machines, Issuer::start(comm, &hands, &post).map_err(device_error)?);
            (post, None)
        }
        Driver::Actors => {
            let directory = Arc::new(Directory::default());
            let post: Arc<dyn Post> = directory.clone();
            let issuer = Issuer::start(comm, &hands, &post).map_err(device_error)?;
            let actors = ActorThread::start(machines, &hands, &directory, issuer, config.deadlines)?;
            (post, Some(actors))
        }
    };
    let inbox = post.clone();
    control.open_inbox(Box::new(move |message| {
        inbox.post(Letter::Supervisor(SupervisorMsg::Control(message)));
    }));
    let units = plan.units().iter().map(|unit| UnitFace {
        buckets: unit.buckets.clone().into(),
        demand: unit.demand,
        seen: AtomicU64::new(0),
    });
    let buckets = plan.buckets().iter().map(|bucket| BucketSide {
        demand: bucket.position.0 + 1,
        members: bucket.params.len() as u32,
        reported: AtomicU32::new(0),
        seen: AtomicU64::new(0),
        free: AtomicU64::new(0),
    });
    Ok(Arc::new(Session {
        units: units.collect(),
        buckets: buckets.collect(),
        plan,
        config,
        hands,
        face,
        post,
        actors: Mutex::new(actors),
        steps: AtomicU64::new(0),
        chain: Mutex::new((0, 0)),
        recorder: Recorder::new(),
        closed: OnceLock::new(),
    }))
}

/// What must be the same on every rank. Overlap modes and credits need not be: they decide when, never which.
fn agreement(plan: &Plan, config: &SessionConfig) -> Agreement {
    let mut lines = vec![("number of parameters".to_string(), plan.params().len().to_string())];
    for param in plan.params() {
        let flags = if param.trainable { "trainable" } else { "frozen" };
        let value = format!("{:?} {} {flags}, group {}", param.shape, param.dtype, param.group);
        lines.push((format!("parameter {}", param.name), value));
    }
    lines.push(("plan".into(), format!("{:016x}", plan.fingerprint())));
    lines.push(("averaging, clipping and policies".into(), format!("{:?}", config.rule)));
    lines.push(("loss scaler".into(), format!("{:?}", config.scaler)));
    lines.push(("optimizer groups".into(), format!("{:?}", config.groups)));
    lines.push(("check_order_every".into(), config.check_order_every.to_string()));
    lines.push(("start_params".into(), format!("{:?}", config.start_params)));
    lines
}

fn parameter_hash(
    plan: &Plan,
    lowering: &Lowering,
    device: &dyn gatherflow_kernels::Device,
) -> Result<u64, gatherflow_kernels::LeaseError> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for param in plan.params() {
        let lease = device.lease(lowering.param(param.id), AccessMode::Read)?;
        hash = lease.as_bytes().iter().fold(hash, |h, byte| (h ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    }
    Ok(hash)
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
        let left = control.boards().iter().position(|b| b.left.load(std::sync::atomic::Ordering::SeqCst));
        if let Some(rank) = left {
            let message = format!("rank {rank} left during start-up");
            return Err(Arc::new(Failure::new(FailureKind::RankLost, rank, message)));
        }
        if waited >= limit {
            let message = format!("start-up did not finish within {} s (deadline `start_up`)", limit.as_secs_f64());
            return Err(Arc::new(Failure::new(FailureKind::Deadline, control.rank(), message)));
        }
    }
}
