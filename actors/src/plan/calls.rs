//! Gathers that are issued as one call: runs of whole buckets in gather order.
//!
//! A call pays the latency of a collective once and is the step in which gathers are let go: a unit that demands one of its
//! gathers demands the call. Bits do not change, and neither does the order of collectives.

use super::{Plan, Position};

impl Plan {
    /// The same plan, with neighbours in the gather order gathered in one call as long as the call has at most so many bytes.
    /// A bucket above that is a call of its own, as every bucket is with 0.
    #[must_use]
    pub fn with_gather_calls(mut self, bytes: usize) -> Self {
        let (mut starts, mut held) = (Vec::new(), usize::MAX);
        for (position, id) in self.order.iter().enumerate() {
            let bucket = self.bucket(*id);
            let size = bucket.numel().saturating_mul(self.buffer(bucket.buffer).dtype.bytes());
            held = held.saturating_add(size);
            if held > bytes {
                starts.push(position as u32);
                held = size;
            }
        }
        starts.push(self.order.len() as u32);
        self.call_bytes = bytes;
        self.call_ends = starts.windows(2).flat_map(|call| (call[0]..call[1]).map(|_| call[1])).collect();
        for unit in &mut self.units {
            let last = unit.buckets.iter().map(|bucket| self.buckets[bucket.index()].position.index()).max();
            unit.demand = last.map_or(0, |last| self.call_ends[last]);
        }
        self
    }

    /// By position in the gather order: the position after the last gather of the same call.
    pub fn call_ends(&self) -> &[u32] {
        &self.call_ends
    }

    /// How many gathers of the order come with the one at this position, itself included: what a reader of its bucket demands.
    pub fn demand(&self, position: Position) -> u32 {
        self.call_ends[position.index()]
    }

    /// How many calls all gathers of a step take.
    pub fn calls(&self) -> usize {
        self.call_ends.iter().enumerate().filter(|(position, end)| position + 1 == **end as usize).count()
    }
}
