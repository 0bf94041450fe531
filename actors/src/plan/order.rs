//! In which order buckets are gathered and reduced, and how much of that order each unit needs (SPEC L9, rules O1, C1).
//!
//! Buckets are put behind the unit of their place, so no sort is needed (L11).

use super::cost;
use super::ids::{BucketId, ParamId, Position, UnitId};
use super::input::PlanInput;
use super::layout::Layout;

/// A unit and what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPlan {
    /// Its number over all chunks.
    pub id: UnitId,
    /// Its name.
    pub name: String,
    /// Its chunk.
    pub chunk: usize,
    /// The parameters it uses, ascending, without repetition.
    pub params: Vec<ParamId>,
    /// The buckets of its trainable parameters, each once, by position in the gather order.
    pub buckets: Vec<BucketId>,
    /// How many gathers of the order it needs: the position of its last bucket + 1, or 0.
    pub demand: u32,
}

/// Units in forward order, and for each parameter the units that use it, ascending.
pub(super) fn uses(input: &PlanInput) -> (Vec<UnitPlan>, Vec<Vec<UnitId>>) {
    let mut users = vec![Vec::new(); input.params.len()];
    let mut units = Vec::new();
    for (chunk, spec) in input.chunks.iter().enumerate() {
        for unit in &spec.units {
            let id = UnitId::from_index(units.len());
            let mut params = unit.params.clone();
            params.sort_unstable();
            params.dedup();
            for param in &params {
                cost::tick();
                users[param.index()].push(id);
            }
            units.push(UnitPlan { id, name: unit.name.clone(), chunk, params, buckets: Vec::new(), demand: 0 });
        }
    }
    (units, users)
}

/// Fills in places, positions and demands; returns the gather order.
pub(super) fn order(layout: &mut Layout, units: &mut [UnitPlan], users: &[Vec<UnitId>]) -> Vec<BucketId> {
    let mut at_place = vec![Vec::new(); units.len()];
    for bucket in &mut layout.buckets {
        let firsts = bucket.params.iter().filter_map(|p| users[p.index()].first());
        cost::tick();
        bucket.place = firsts.copied().inspect(|_| cost::tick()).min().unwrap_or(UnitId(0));
        at_place[bucket.place.index()].push(bucket.id);
    }
    let order: Vec<BucketId> = at_place.into_iter().flatten().collect();
    for (position, id) in order.iter().enumerate() {
        layout.buckets[id.index()].position = Position::from_index(position);
    }
    for unit in units {
        let needed = unit.params.iter().filter_map(|p| layout.homes[p.index()].bucket());
        let mut positions: Vec<Position> =
            needed.inspect(|_| cost::tick()).map(|b| layout.buckets[b.index()].position).collect();
        positions.sort_unstable();
        positions.dedup();
        unit.demand = positions.last().map_or(0, |last| last.0 + 1);
        unit.buckets = positions.into_iter().map(|p| order[p.index()]).collect();
    }
    order
}
