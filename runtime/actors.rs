//! What this crate takes from the crates below, in one list.

pub use gatherflow_actors::plan::{
    Alignment, BucketId, Bucketing, ChunkSpec, ParamId, ParamSpec, Plan, PlanError, PlanInput, ShardGroup, UnitId,
    UnitSpec,
};
pub use gatherflow_kernels::verdict::{
    Average, HostVerdict, OnNonFinite, ScalerRule, Spoiled, StepReport, VerdictRule,
};
pub use gatherflow_kernels::{
    Access, AccessMode, BufRange, Cause, DType, Device, DeviceError, Element, Event, Failure, FailureKind, Lease,
    LeaseError, Link, OpenOptions, StreamId,
};
pub use stub::*;

mod stub {
    #![allow(unused, unreachable_pub, missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic)]
    use super::*;
    use std::sync::Arc;
    use std::task::{Poll, Waker};
    use std::time::Duration;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Overlap {
        None,
        Chain,
        Window,
    }
    #[derive(Clone, Copy, Debug)]
    pub struct Credits {
        pub buckets: u32,
        pub bytes: Option<u64>,
    }
    #[derive(Clone, Copy, Debug)]
    pub struct Deadlines {
        pub start_up: Duration,
        pub collective: Duration,
        pub silence: Duration,
    }
    #[derive(Clone, Copy, Debug)]
    pub struct Group {
        pub betas: (f64, f64),
        pub eps: f64,
        pub weight_decay: f64,
        pub decoupled: bool,
    }
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StartParams {
        Broadcast,
        Check,
    }
    #[derive(Clone, Debug)]
    pub struct SessionConfig {
        pub overlap: Overlap,
        pub credits: Credits,
        pub overlap_grad_reduce: bool,
        pub rule: VerdictRule,
        pub scaler: ScalerRule,
        pub groups: Vec<Group>,
        pub steps_in_flight: u32,
        pub deadlines: Deadlines,
        pub check_order_every: u64,
        pub start_params: StartParams,
    }
    #[derive(Debug)]
    pub struct Seat {}
    pub struct Ranks;
    impl Ranks {
        pub fn local(ranks: usize, link: Option<Link>) -> Result<Vec<Seat>, DeviceError> {
            unimplemented!()
        }
    }
    impl Seat {
        pub fn rank(&self) -> usize {
            unimplemented!()
        }
        pub fn ranks(&self) -> usize {
            unimplemented!()
        }
    }
    #[derive(Debug)]
    pub struct Session {}
    #[derive(Debug)]
    pub struct LrRow {
        pub first_t: u64,
        pub values: Vec<f64>,
    }
    pub struct StepRequest {
        pub lrs: Vec<LrRow>,
        pub host: HostVerdict,
        pub unwritten: Vec<ParamId>,
        pub unfinished: Vec<(ParamId, Event)>,
    }
    #[derive(Clone, Debug)]
    pub struct StepOutcome {
        pub report: StepReport,
        pub lrs: Vec<f64>,
        pub t: Vec<u64>,
    }
    #[derive(Clone, Debug)]
    pub struct StepTimes {
        pub step: u64,
        pub step_ns: u64,
        pub compute_ns: u64,
        pub gather_ns: u64,
        pub reduce_ns: u64,
        pub exposed_gather_ns: u64,
        pub exposed_reduce_ns: u64,
        pub slowest: Option<(BucketId, u64)>,
    }
    #[derive(Clone, Copy, Debug)]
    pub struct Counters {
        pub gathers: u64,
        pub reduces: u64,
        pub skipped_steps: u64,
        pub peak_ahead_bytes: u64,
        pub order_digest: u64,
    }
    impl Session {
        pub fn start(
            seat: Seat,
            plan: Arc<Plan>,
            config: SessionConfig,
            open: OpenOptions,
            init: &mut dyn FnMut(ParamId, &mut Lease) -> Result<(), Cause>,
        ) -> Result<Arc<Session>, Cause> {
            unimplemented!()
        }
        pub fn plan(&self) -> &Arc<Plan> {
            unimplemented!()
        }
        pub fn device(&self) -> &Arc<dyn Device> {
            unimplemented!()
        }
        pub fn executor(&self) -> StreamId {
            unimplemented!()
        }
        pub fn param_range(&self, _: ParamId) -> BufRange {
            unimplemented!()
        }
        pub fn grad_range(&self, _: ParamId) -> Option<BufRange> {
            unimplemented!()
        }
        pub fn steps(&self) -> u64 {
            unimplemented!()
        }
        pub fn enter(&self, unit: UnitId) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn param_ready(&self, param: ParamId) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn poll_ready(&self, param: ParamId, waker: &Waker) -> Poll<Result<(), Cause>> {
            unimplemented!()
        }
        pub fn all_ready(&self) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn gradient_free(&self, param: ParamId) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn gradient_complete(&self, param: ParamId, event: Event) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn step(&self, request: StepRequest) -> Result<u64, Cause> {
            unimplemented!()
        }
        pub fn outcome(&self, step: u64) -> Result<Arc<StepOutcome>, Cause> {
            unimplemented!()
        }
        pub fn poll_outcome(&self, step: u64, waker: &Waker) -> Poll<Result<Arc<StepOutcome>, Cause>> {
            unimplemented!()
        }
        pub fn failed(&self) -> Option<Cause> {
            unimplemented!()
        }
        pub fn close(&self) -> Result<(), Cause> {
            unimplemented!()
        }
        pub fn take_times(&self) -> Vec<StepTimes> {
            unimplemented!()
        }
        pub fn counters(&self) -> Counters {
            unimplemented!()
        }
    }
}
