//! Which copies of a weight are reduced already: the optimizer sums them once all are, then over the pipeline stages that have
//! copies too (SPEC T0).

use gatherflow_kernels::Event;

use crate::action::{After, Edge};
use crate::plan::BucketId;

/// This rank's copies of one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopySet {
    /// Their buckets, the first copy's first.
    pub buckets: Vec<BucketId>,
    /// The number of the weight where other pipeline stages have copies too.
    pub staged: Option<u32>,
}

/// The sets of copies of one model, and how far each has come in this step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    sets: Vec<CopySet>,
    /// By bucket, up to the last copy: its set.
    set_of: Vec<Option<usize>>,
    /// By set: behind the reduces so far.
    reduced: Vec<After>,
    /// Sets whose sums are not complete in this step.
    open: usize,
}

impl Copies {
    pub(crate) fn new(sets: Vec<CopySet>) -> Self {
        let mut set_of = Vec::new();
        for (set, bucket) in sets.iter().enumerate().flat_map(|(at, set)| set.buckets.iter().map(move |b| (at, b))) {
            set_of.resize(set_of.len().max(bucket.index() + 1), None);
            set_of[bucket.index()] = Some(set);
        }
        Self { reduced: vec![After::new(); sets.len()], open: sets.len(), sets, set_of }
    }

    /// The set of a bucket, if it is a copy.
    pub(crate) fn set_of(&self, bucket: BucketId) -> Option<usize> {
        self.set_of.get(bucket.index()).copied().flatten()
    }

    pub(crate) fn set(&self, set: usize) -> Option<&CopySet> {
        self.sets.get(set)
    }

    /// The set with a weight that other stages have too.
    pub(crate) fn of_weight(&self, weight: u32) -> Option<usize> {
        self.sets.iter().position(|set| set.staged == Some(weight))
    }

    /// One more of a set's copies is reduced. With the last one: what their sum has to wait for.
    pub(crate) fn reduced(&mut self, set: usize, event: Event) -> Option<After> {
        self.reduced[set].push((Edge::T0, event));
        let complete = self.reduced[set].len() == self.sets[set].buckets.len();
        complete.then(|| std::mem::take(&mut self.reduced[set]))
    }

    /// The sum of a set is enqueued.
    pub(crate) fn summed(&mut self) {
        self.open -= 1;
    }

    /// Whether a sum of this step is still to come.
    pub(crate) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// The next step begins.
    pub(crate) fn begin(&mut self) {
        self.open = self.sets.len();
    }
}
