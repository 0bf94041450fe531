//! What ranks compare at start-up: whether they have planned the same model, and if not, what differs first.
//!
//! Hashes are 64-bit FNV-1a over a fixed encoding (little-endian words, strings with their length in front), equal on
//! every machine. This rank's own number is not in it.

use gatherflow_kernels::fnv::Fnv;

use super::error::PlanError;
use super::layout::end_alignment;
use super::{Home, ParamPlan, Plan, Rank};

/// The part of a plan that ranks compare.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Summary {
    /// The number of ranks.
    pub ranks: u64,
    /// How many of them share a copy of the model.
    pub model_parallel: u64,
    /// How many pipeline stages those are, and which one this is.
    pub pipeline: [u64; 2],
    /// Hash of the shard groups.
    pub shard_groups: u64,
    /// Number of optimizer groups.
    pub groups: u64,
    /// Elements at which a bucket closes.
    pub bucket_size: u64,
    /// Bucket ends are multiples of this many elements.
    pub end_align: u64,
    /// One hash per parameter: name, shape, types, group, marks, chunk.
    pub params: Vec<u64>,
    /// One hash per unit: chunk, name, parameters.
    pub units: Vec<u64>,
    /// Hash of all buckets, all parameters' places in them, and the gather order.
    pub layout: u64,
}

impl Summary {
    /// One number for all of it.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Fnv::new();
        let heads = [self.ranks, self.model_parallel, self.shard_groups, self.groups, self.bucket_size, self.end_align];
        hash.words(heads);
        hash.words(self.pipeline);
        hash.word(self.layout);
        for list in [&self.params, &self.units] {
            hash.word(list.len() as u64);
            hash.words(list.iter().copied());
        }
        hash.finish()
    }
}

impl Plan {
    /// What this rank compares with the others.
    pub fn summary(&self) -> Summary {
        let mut layout = Fnv::new();
        for bucket in &self.buckets {
            let words = [bucket.buffer.index(), bucket.range.start, bucket.range.end, bucket.place.index()];
            layout.words(words.map(|word| word as u64));
        }
        for param in &self.params {
            let (range, bucket) = (param.home.range(), param.home.bucket());
            let words = [bucket.map_or(u64::MAX, |b| u64::from(b.0)), range.start as u64, range.end as u64];
            layout.words(words);
        }
        layout.words(self.order.iter().map(|bucket| u64::from(bucket.0)));
        layout.words(self.call_ends.iter().map(|end| u64::from(*end)));
        let units = self.units.iter().map(|unit| {
            let mut hash = Fnv::new();
            hash.word(unit.chunk as u64);
            hash.text(&unit.name);
            hash.words(unit.params.iter().map(|param| u64::from(param.0)));
            hash.finish()
        });
        let mut shard_groups = Fnv::new();
        for group in &self.shard_groups {
            shard_groups.text(group.name.as_deref().unwrap_or_default());
            let words = [group.ranks, group.across as usize, group.average_over];
            shard_groups.words(words.map(|word| word as u64));
        }
        Summary {
            ranks: self.ranks as u64,
            model_parallel: self.model_parallel as u64,
            pipeline: [self.pipeline.stages, self.pipeline.stage].map(|n| n as u64),
            shard_groups: shard_groups.finish(),
            groups: self.groups as u64,
            bucket_size: self.bucket_size as u64,
            end_align: end_alignment(self.data_parallel(), self.alignment) as u64,
            params: self.params.iter().map(param_hash).collect(),
            units: units.collect(),
            layout: layout.finish(),
        }
    }

    /// A number that is equal on ranks with the same plan, and hardly ever otherwise. It does not depend on the rank.
    pub fn fingerprint(&self) -> u64 {
        self.summary().fingerprint()
    }

    /// Compares this plan with what another rank says of its own.
    ///
    /// # Errors
    /// [`PlanError::Differs`] names the rank and the first thing that differs: a number of the configuration, else a
    /// parameter, else a unit.
    pub fn agrees_with(&self, rank: Rank, other: &Summary) -> Result<(), PlanError> {
        let own = self.summary();
        if own == *other {
            return Ok(());
        }
        let numbers = [
            ("the number of ranks", own.ranks, other.ranks),
            ("the number of model-parallel ranks", own.model_parallel, other.model_parallel),
            ("the number of pipeline stages", own.pipeline[0], other.pipeline[0]),
            ("the pipeline stage", own.pipeline[1], other.pipeline[1]),
            ("the number of optimizer groups", own.groups, other.groups),
            ("the alignment of bucket ends", own.end_align, other.end_align),
        ];
        let differs = |what: String| Err(PlanError::Differs { rank: rank.0, what });
        if let Some((what, here, there)) = numbers.into_iter().find(|(_, here, there)| here != there) {
            return differs(format!("{what} ({here} here, {there} there)"));
        }
        if own.shard_groups != other.shard_groups {
            return differs("the shard groups".into());
        }
        if let Some(at) = first_difference(&own.params, &other.params) {
            return differs(match self.params.get(at) {
                Some(param) if at < other.params.len() => {
                    format!("parameter {at} (here `{}`, shape {:?}, {})", param.name, param.shape, param.dtype)
                }
                Some(param) => format!("the number of parameters (there is no `{}` there)", param.name),
                None => format!("the number of parameters ({at} here, {} there)", other.params.len()),
            });
        }
        if let Some(at) = first_difference(&own.units, &other.units) {
            return differs(match self.units.get(at) {
                Some(unit) if at < other.units.len() => format!("unit {at} (here `{}`) or what it uses", unit.name),
                Some(unit) => format!("the number of units (there is no `{}` there)", unit.name),
                None => format!("the number of units ({at} here, {} there)", other.units.len()),
            });
        }
        if own.bucket_size != other.bucket_size {
            return differs(format!("the bucket size ({} here, {} there)", own.bucket_size, other.bucket_size));
        }
        differs("how the same model is laid out (another version of this library?)".into())
    }
}

impl ParamPlan {
    /// What must be the same on every rank, for people to read.
    pub(crate) fn traits(&self) -> String {
        let trained = format!("{} gradients, group {}", self.grad_dtype, self.group);
        let mut text = format!("{:?} {}, {}", self.shape, self.dtype, if self.trainable { &trained } else { "frozen" });
        let marks = [
            (self.shard_group > 0).then(|| format!("shard group {}", self.shard_group)),
            self.tensor_parallel.then(|| "tensor-parallel".into()),
            self.shared_embedding.then(|| "a bucket of its own".into()),
            self.shared.as_ref().map(|shared| format!("a copy of `{shared}`")),
        ];
        marks.into_iter().flatten().for_each(|mark| text.extend([", ", &mark]));
        text
    }
}

/// The first index at which two lists differ; the end of the shorter one counts.
fn first_difference(a: &[u64], b: &[u64]) -> Option<usize> {
    let common = a.iter().zip(b).position(|(a, b)| a != b);
    common.or_else(|| (a.len() != b.len()).then(|| a.len().min(b.len())))
}

fn param_hash(param: &ParamPlan) -> u64 {
    let mut hash = Fnv::new();
    hash.text(&param.name);
    hash.word(param.shape.len() as u64);
    hash.words(param.shape.iter().map(|&dim| dim as u64));
    hash.text(param.dtype.name());
    hash.word(param.chunk as u64);
    hash.word(param.shard_group as u64);
    hash.word(u64::from(param.shared_embedding) | u64::from(param.tensor_parallel) << 1);
    hash.word(param.sum_over as u64);
    match &param.shared {
        Some(shared) => hash.text(shared),
        None => hash.word(u64::MAX),
    }
    // Gradient type and group of a frozen parameter are never read.
    match param.home {
        Home::Frozen { .. } => hash.word(u64::MAX),
        Home::Bucket { .. } => {
            hash.text(param.grad_dtype.name());
            hash.word(param.group as u64);
        }
    }
    hash.finish()
}
