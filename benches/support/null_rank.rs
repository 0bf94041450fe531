//! One rank on the null device, one parameter per bucket and unit: what is left is what the runtime itself costs.

use std::sync::Arc;
use std::time::Duration;

use gatherflow_actors::plan::{
    Alignment, Bucketing, ChunkSpec, ParamId, ParamSpec, Pipeline, Plan, PlanInput, Storage, UnitId, UnitSpec,
};
use gatherflow_actors::{
    Credits, Deadlines, Driver, FirstGather, Group, LrRow, Overlap, Ranks, Session, SessionConfig, Skip, StartParams,
    StepRequest,
};
use gatherflow_kernels::norm::NormType;
use gatherflow_kernels::verdict::{Average, HostVerdict, OnNonFinite, ScalerRule, VerdictRule};
use gatherflow_kernels::{Cause, DType, OpenOptions};

/// Elements of a parameter: one bucket of the smallest size.
pub(crate) const NUMEL: usize = 64;

/// A session whose bucket i holds the one parameter of unit i.
pub(crate) struct NullRank {
    pub(crate) session: Arc<Session>,
    buckets: u32,
}

impl NullRank {
    pub(crate) fn start(buckets: u32, overlap: Overlap, credits: u32, driver: Driver) -> Self {
        let seat = Ranks::local(1, None).expect("one rank").remove(0);
        let options = OpenOptions { device: "null".into(), keep_log: false, ..OpenOptions::default() };
        let config = config(overlap, credits, driver);
        let session = Session::start(seat, Arc::new(plan(buckets)), config, options, &mut |_, _| Ok(()));
        Self { session: session.expect("the null device starts"), buckets }
    }

    pub(crate) fn units(&self) -> impl DoubleEndedIterator<Item = UnitId> + use<> {
        (0..self.buckets).map(UnitId)
    }

    /// Forward enters all units.
    pub(crate) fn forward(&self) -> Result<(), Cause> {
        self.units().try_for_each(|unit| self.session.enter(unit))
    }

    /// Backward completes all gradients, the last layer's first; then `step`. Returns its number.
    pub(crate) fn backward_and_step(&self) -> Result<u64, Cause> {
        let (device, executor) = (self.session.device(), self.session.executor());
        for index in (0..self.buckets).rev() {
            self.session.gradient_complete(ParamId(index), device.record(executor))?;
        }
        self.session.step(StepRequest {
            lrs: vec![LrRow::constant(1e-3)],
            host: HostVerdict::default(),
            unwritten: Vec::new(),
            unfinished: Vec::new(),
        })
    }

    /// A whole step, up to its outcome.
    pub(crate) fn step(&self) -> Result<(), Cause> {
        self.forward()?;
        let step = self.backward_and_step()?;
        self.session.outcome(step).map(drop)
    }
}

impl Drop for NullRank {
    fn drop(&mut self) {
        if let Err(cause) = self.session.close() {
            eprintln!("closing failed: {cause}");
        }
    }
}

fn plan(buckets: u32) -> Plan {
    let unit = |i: u32| UnitSpec { name: format!("unit {i}"), params: vec![ParamId(i)] };
    let input = PlanInput {
        chunks: vec![ChunkSpec { units: (0..buckets).map(unit).collect() }],
        ranks: 1,
        params: (0..buckets).map(|i| ParamSpec::new(format!("p{i}"), [NUMEL], DType::Bf16)).collect(),
        groups: 1,
        bucketing: Bucketing::Size(1),
        alignment: Alignment::default(),
        storage: Storage::Views,
        model_parallel: 1,
        pipeline: Pipeline::default(),
        shard_groups: Vec::new(),
    };
    let plan = Plan::new(&input).expect("a legal model");
    assert_eq!(plan.buckets().len(), buckets as usize, "one parameter per bucket");
    plan
}

fn config(overlap: Overlap, credits: u32, driver: Driver) -> SessionConfig {
    let limit = Duration::from_mins(1);
    SessionConfig {
        agree: Vec::new(),
        overlap,
        credits: Credits { buckets: credits, bytes: None },
        first_gather: FirstGather::Step,
        overlap_grad_reduce: true,
        rule: VerdictRule {
            average: Average::Ranks(1),
            norm: NormType::default(),
            max_norm: 1.0,
            on_nonfinite: OnNonFinite::Skip,
        },
        scaler: ScalerRule::None,
        groups: vec![Group::default()],
        skip: Skip::Host,
        check_for_nan_in_grad: false,
        steps_in_flight: 2,
        deadlines: Deadlines { start_up: limit, collective: limit, silence: limit },
        busy_warning: limit,
        check_order_every: 100,
        start_params: StartParams::Broadcast,
        driver,
        dropped_edge: None,
        drill: None,
    }
}
