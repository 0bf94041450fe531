//! Which copies of a weight are reduced already: the optimizer sums them once all are (SPEC T0).

use gatherflow_kernels::Event;

use crate::action::{After, Edge};
use crate::plan::BucketId;

/// The sets of copies of one model, and how far each has come in this step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    sets: Vec<Vec<BucketId>>,
    /// By bucket, up to the last copy: its set.
    set_of: Vec<Option<usize>>,
    /// By set: behind the reduces so far.
    reduced: Vec<After>,
}

impl Copies {
    pub(crate) fn new(sets: Vec<Vec<BucketId>>) -> Self {
        let mut set_of = Vec::new();
        for (set, bucket) in sets.iter().enumerate().flat_map(|(set, buckets)| buckets.iter().map(move |b| (set, b))) {
            set_of.resize(set_of.len().max(bucket.index() + 1), None);
            set_of[bucket.index()] = Some(set);
        }
        Self { reduced: vec![After::new(); sets.len()], sets, set_of }
    }

    /// The set of a bucket, if it is a copy.
    pub(crate) fn set_of(&self, bucket: BucketId) -> Option<usize> {
        self.set_of.get(bucket.index()).copied().flatten()
    }

    /// One more of a set's copies is reduced. With the last one: what the sum has to wait for, and of which buckets it is.
    pub(crate) fn reduced(&mut self, set: usize, event: Event) -> Option<(After, &[BucketId])> {
        self.reduced[set].push((Edge::T0, event));
        let complete = self.reduced[set].len() == self.sets[set].len();
        complete.then(|| (std::mem::take(&mut self.reduced[set]), self.sets[set].as_slice()))
    }
}
