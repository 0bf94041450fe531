//! Which copies of a weight are reduced already: the optimizer sums them once all are (SPEC T0).

use gatherflow_kernels::Event;

use crate::action::{After, Edge};
use crate::plan::BucketId;

/// The sets of copies of one model, and how far each has come in this step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    sets: Vec<Vec<BucketId>>,
    /// By set: behind the reduces so far.
    reduced: Vec<After>,
}

impl Copies {
    pub(crate) fn new(sets: Vec<Vec<BucketId>>) -> Self {
        Self { reduced: vec![After::new(); sets.len()], sets }
    }

    /// The set of a bucket, if it is a copy.
    pub(crate) fn set_of(&self, bucket: BucketId) -> Option<usize> {
        self.sets.iter().position(|set| set.contains(&bucket))
    }

    /// One more of a set's copies is reduced. With the last one: what the sum has to wait for, and of which buckets it is.
    pub(crate) fn reduced(&mut self, set: usize, event: Event) -> Option<(After, &[BucketId])> {
        self.reduced[set].push((Edge::T0, event));
        let complete = self.reduced[set].len() == self.sets[set].len();
        complete.then(|| (std::mem::take(&mut self.reduced[set]), self.sets[set].as_slice()))
    }
}
