//! All machines of one rank, made from a plan.

use gatherflow_kernels::Event;

use crate::bucket::Bucket;
use crate::communicator::Communicator;
use crate::copies::CopySet;
use crate::drill::Drill;
use crate::lowering::Lowering;
use crate::optimizer::Optimizer;
use crate::plan::{BucketId, Plan, Rank};
use crate::prehook::PreHook;
use crate::sequence::Sequence;
use crate::session::SessionConfig;
use crate::supervisor::Supervisor;

/// The five kinds of machines of one rank.
#[derive(Debug)]
pub(crate) struct Machines {
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) prehook: PreHook,
    pub(crate) optimizer: Optimizer,
    pub(crate) communicator: Communicator,
    pub(crate) supervisor: Supervisor,
}

impl Machines {
    /// The machines of `rank`, at version 0. `started` is behind the start-up work, `first_seq` collectives came before.
    pub(crate) fn new(
        plan: &Plan,
        config: &SessionConfig,
        lowering: &Lowering,
        rank: usize,
        started: &Event,
        first_seq: u64,
    ) -> Self {
        let order = plan.gather_order();
        let wire = lowering.wire();
        let bytes: Vec<u64> = order.iter().map(|bucket| wire[bucket.0 as usize].gather_bytes).collect();
        let mut issued = order.to_vec();
        if let Some((first, second)) = config.drill.as_ref().and_then(Drill::swapped) {
            issued.swap(first, second);
        }
        let sequence = Sequence::new(issued, wire, lowering.small_bytes(), first_seq)
            .staged(lowering.staged_wire(), plan.numbers())
            .in_calls(plan.call_ends().to_vec());
        let bucket = |b: &crate::plan::BucketPlan| {
            Bucket::new(b.id, b.params.len() as u32, config.overlap_grad_reduce, started.clone())
                .stored(plan.storage())
                .searching(config.check_for_nan_in_grad)
        };
        Self {
            buckets: plan.buckets().iter().map(bucket).collect(),
            prehook: PreHook::new(order.to_vec(), bytes, config.overlap, config.credits, plan.ranks() > 1)
                .starting(config.first_gather)
                .in_calls(plan.call_ends().to_vec()),
            optimizer: Optimizer::new(config.groups.clone(), order.to_vec())
                .deciding(config.skip)
                .summing(copy_sets(plan)),
            communicator: Communicator::new(sequence, order.len(), config.check_order_every),
            supervisor: Supervisor::new(rank, plan.ranks()).alike(plan.stage_members(Rank(rank))),
        }
    }
}

/// This rank's copies of each weight, and which weights other stages have too.
fn copy_sets(plan: &Plan) -> Vec<CopySet> {
    let staged =
        |first: &BucketId| plan.staged_here().find(|(_, bucket)| bucket == first).map(|(weight, _)| weight as u32);
    let set = |buckets: &Vec<BucketId>| CopySet { buckets: buckets.clone(), staged: buckets.first().and_then(staged) };
    plan.copies().iter().map(set).collect()
}
