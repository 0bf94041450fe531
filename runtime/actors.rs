//! What this crate takes from the crates below, in one list.

pub(crate) use gatherflow_actors::busy::{Busy, WARNING as BUSY_WARNING};
pub(crate) use gatherflow_actors::control::Line;
pub(crate) use gatherflow_actors::drill::Drill;
pub(crate) use gatherflow_actors::plan::{
    Across, Alignment, BucketId, Bucketing, ChunkSpec, ParamId, ParamPlan, ParamSpec, Pipeline, Plan, PlanError,
    PlanInput, Range, Rank as PlanRank, ShardGroupSpec, Storage, SumOver, UnitId, UnitSpec,
};
pub(crate) use gatherflow_actors::session::Resumed;
pub(crate) use gatherflow_actors::{
    Counters, Credits, Deadlines, Driver, Edge, FirstGather, Group, LrRow, Overlap, Ranks, Seat, Session,
    SessionConfig, Skip, StartParams, StepOutcome, StepRequest, StepTimes,
};
pub(crate) use gatherflow_kernels::fnv::Fnv;
pub(crate) use gatherflow_kernels::norm::NormType;
pub(crate) use gatherflow_kernels::verdict::{
    Average, HostVerdict, OnNonFinite, Scalars, ScalerRule, Spoiled, VerdictRule,
};
pub(crate) use gatherflow_kernels::{
    Access, AccessMode, BufRange, Cause, DType, Device, Element, Event, Failure, FailureKind, Lease, LeaseError, Link,
    OpenOptions, StreamId,
};
