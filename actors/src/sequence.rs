//! The order of all collectives of a rank (rule O1) and its running digest (rule O2).
//!
//! A pure function of the plan and the verdicts: per step the reduces by place descending, each followed by the sums of its
//! reduced shard over other groups, the sums of weights over pipeline stages, the small all-gather, and, if the step was updated,
//! the gathers by place ascending. Nothing here decides *when*; the cursor only says which is next.
//!
//! Collectives are numbered. Each kind has so many numbers in a step as the stage with most of it needs, so that what concerns
//! several stages has the same number on each ([`Numbers`]).

use gatherflow_kernels::fnv::Fnv;
use gatherflow_kernels::{CollectiveKey, CollectiveKind, DType};

use crate::plan::{BucketId, JOB, Numbers};

/// What one bucket's collectives look like to ranks that compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireBucket {
    /// Bytes of the reduce.
    pub reduce_bytes: u64,
    /// Element type of the reduce.
    pub reduce_dtype: DType,
    /// Bytes of the gather.
    pub gather_bytes: u64,
    /// Element type of the gather.
    pub gather_dtype: DType,
    /// Bytes of this rank's reduced shard.
    pub shard_bytes: u64,
    /// The division of the ranks over which it is reduced and gathered.
    pub group: u32,
    /// The divisions over which its reduced shards are summed, one after the other; [`JOB`] is none.
    pub sums: [u32; 2],
}

impl WireBucket {
    fn sum(&self, index: usize) -> Option<u32> {
        self.sums.get(index).copied().filter(|group| *group != JOB)
    }
}

/// What the sum of a weight over stages looks like to ranks that compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireStaged {
    /// The number of the weight, the same on every stage.
    pub weight: u32,
    /// Bytes of this rank's reduced shard.
    pub shard_bytes: u64,
    /// The division of the ranks that take part.
    pub group: u32,
}

/// Which collective comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// The reduce of a bucket in this step.
    Reduce {
        /// The step.
        step: u64,
        /// Which bucket.
        bucket: BucketId,
    },
    /// The sum of a bucket's reduced shard over the ranks of other groups that hold the same one.
    Sum {
        /// The step.
        step: u64,
        /// Which bucket.
        bucket: BucketId,
        /// The division of the ranks.
        group: u32,
    },
    /// The sum of a weight over the pipeline stages that have copies of it.
    StagedSum {
        /// The step.
        step: u64,
        /// The number of the weight.
        weight: u32,
    },
    /// The small all-gather of this step.
    Small {
        /// The step.
        step: u64,
    },
    /// Unknown until the host knows this step's verdict.
    AwaitVerdict {
        /// The step.
        step: u64,
    },
    /// The gather of a bucket at this version.
    Gather {
        /// The version.
        version: u64,
        /// Which bucket.
        bucket: BucketId,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Reduces(u32),
    /// The sums behind a reduce: its index, and that of the next sum.
    Sums(u32, usize),
    /// Over stages, by index into what this rank takes part in.
    Staged(u32),
    Small,
    Verdict,
    Gathers(u32),
}

/// The cursor over the sequence of one rank.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Buckets in gather order.
    order: Vec<BucketId>,
    /// By position in it: the position after the last gather of the same call.
    call_ends: Vec<u32>,
    wire: Vec<WireBucket>,
    /// Ascending by weight.
    staged: Vec<WireStaged>,
    numbers: Numbers,
    small_bytes: u64,
    step: u64,
    phase: Phase,
    /// The first number of this step.
    base: u64,
    seq: u64,
    digest: u64,
}

impl Sequence {
    /// A cursor at step 0. `wire` is indexed by bucket; `first_seq` is the first number.
    pub fn new(order: Vec<BucketId>, wire: Vec<WireBucket>, small_bytes: u64, first_seq: u64) -> Self {
        let call_ends = (1..=order.len() as u32).collect();
        let sums: usize = wire.iter().map(|wire| wire.sums.iter().filter(|group| **group != JOB).count()).sum();
        let buckets = order.len() as u64;
        let mut sequence = Self {
            order,
            call_ends,
            wire,
            staged: Vec::new(),
            numbers: Numbers { start: 0, reduces: buckets + sums as u64, staged: 0, gathers: buckets },
            small_bytes,
            step: 0,
            phase: Phase::Small,
            base: first_seq,
            seq: first_seq,
            digest: Fnv::BASIS,
        };
        sequence.enter(sequence.first_phase());
        sequence
    }

    /// The same on one of several pipeline stages: these sums it takes part in, by weight, and so many numbers a step has.
    #[must_use]
    pub fn staged(self, staged: Vec<WireStaged>, numbers: Numbers) -> Self {
        let mut sequence = Self { staged, numbers, ..self };
        sequence.enter(sequence.first_phase());
        sequence
    }

    /// The same, with gathers that are issued together: the plan's [`call_ends`](crate::plan::Plan::call_ends).
    #[must_use]
    pub fn in_calls(self, call_ends: Vec<u32>) -> Self {
        Self { call_ends, ..self }
    }

    /// The buckets of the call that begins with the next gather; none where none begins.
    pub fn begun_call(&self) -> &[BucketId] {
        match self.phase {
            Phase::Gathers(i) if i == 0 || self.call_ends[i as usize - 1] == i => {
                &self.order[i as usize..self.call_ends[i as usize] as usize]
            }
            _ => &[],
        }
    }

    /// Whether the next collective has a later one in its call.
    pub fn is_in_call(&self) -> bool {
        matches!(self.phase, Phase::Gathers(i) if i + 1 < self.call_ends[i as usize])
    }

    /// What is next.
    pub fn next(&self) -> Entry {
        match self.phase {
            Phase::Reduces(i) => Entry::Reduce { step: self.step, bucket: self.reduced(i) },
            Phase::Sums(i, sum) => {
                let bucket = self.reduced(i);
                let group = self.wire[bucket.0 as usize].sum(sum).unwrap_or(JOB);
                Entry::Sum { step: self.step, bucket, group }
            }
            Phase::Staged(i) => Entry::StagedSum {
                step: self.step,
                weight: self.staged.get(i as usize).map_or(u32::MAX, |sum| sum.weight),
            },
            Phase::Small => Entry::Small { step: self.step },
            Phase::Verdict => Entry::AwaitVerdict { step: self.step },
            Phase::Gathers(i) => Entry::Gather { version: self.step + 1, bucket: self.order[i as usize] },
        }
    }

    /// The bucket of the `i`th reduce of a step.
    fn reduced(&self, i: u32) -> BucketId {
        self.order[self.order.len() - 1 - i as usize]
    }

    /// Moves past the next collective and returns what ranks compare; `None` while the verdict is awaited.
    pub fn advance(&mut self) -> Option<CollectiveKey> {
        let entry = self.next();
        let buckets = self.order.len() as u32;
        let (kind, bucket, bytes, dtype, version, group) = match entry {
            Entry::Reduce { step, bucket } => {
                let wire = self.wire[bucket.0 as usize];
                (CollectiveKind::Reduce, bucket.0, wire.reduce_bytes, wire.reduce_dtype, step, wire.group)
            }
            Entry::Sum { step, bucket, group } => {
                let bytes = self.wire[bucket.0 as usize].shard_bytes;
                (CollectiveKind::Sum, bucket.0, bytes, DType::F32, step, group)
            }
            Entry::StagedSum { step, weight } => {
                let (bytes, group) = self.staged_wire(weight).map_or((0, JOB), |sum| (sum.shard_bytes, sum.group));
                (CollectiveKind::StagedSum, weight, bytes, DType::F32, step, group)
            }
            Entry::Small { step } => {
                (CollectiveKind::Small, CollectiveKey::NO_BUCKET, self.small_bytes, DType::F32, step, JOB)
            }
            Entry::AwaitVerdict { .. } => return None,
            Entry::Gather { version, bucket } => {
                let wire = self.wire[bucket.0 as usize];
                (CollectiveKind::Gather, bucket.0, wire.gather_bytes, wire.gather_dtype, version, wire.group)
            }
        };
        let key = CollectiveKey { seq: self.seq, kind, bucket, bytes, dtype, version, group };
        self.digest = digest_of(self.digest, &key);
        self.seq += 1;
        match self.phase {
            Phase::Reduces(i) => self.enter(self.after_reduce(i, 0)),
            Phase::Sums(i, sum) => self.enter(self.after_reduce(i, sum + 1)),
            Phase::Staged(i) if i + 1 < self.staged.len() as u32 => self.enter(Phase::Staged(i + 1)),
            Phase::Staged(_) => self.enter(Phase::Small),
            Phase::Small | Phase::Verdict => self.enter(Phase::Verdict),
            Phase::Gathers(i) if i + 1 < buckets => self.enter(Phase::Gathers(i + 1)),
            Phase::Gathers(_) => self.next_step(),
        }
        Some(key)
    }

    /// Goes to a phase of this step, and to its number where it has one of its own.
    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        let behind_reduces = self.base + self.numbers.reduces;
        match phase {
            Phase::Staged(i) => {
                self.seq = behind_reduces + self.staged.get(i as usize).map_or(0, |sum| sum.weight.into());
            }
            Phase::Small => self.seq = behind_reduces + self.numbers.staged,
            Phase::Reduces(_) | Phase::Sums(..) | Phase::Verdict | Phase::Gathers(_) => {}
        }
    }

    fn staged_wire(&self, weight: u32) -> Option<&WireStaged> {
        self.staged.iter().find(|sum| sum.weight == weight)
    }

    /// Where a step begins.
    fn first_phase(&self) -> Phase {
        if self.order.is_empty() { self.behind_reduces() } else { Phase::Reduces(0) }
    }

    /// What follows all reduces.
    fn behind_reduces(&self) -> Phase {
        if self.staged.is_empty() { Phase::Small } else { Phase::Staged(0) }
    }

    /// What follows a reduce and so many sums.
    fn after_reduce(&self, i: u32, sums: usize) -> Phase {
        match self.wire[self.reduced(i).0 as usize].sum(sums) {
            Some(_) => Phase::Sums(i, sums),
            None if i + 1 < self.order.len() as u32 => Phase::Reduces(i + 1),
            None => self.behind_reduces(),
        }
    }

    /// Whether this collective, a reduce or a sum, is the last one that belongs to the reduction of its bucket.
    pub fn ends_reduction(&self, key: &CollectiveKey) -> bool {
        let sums = self.wire.get(key.bucket as usize).into_iter().flat_map(|wire| wire.sums);
        let last = sums.rev().find(|group| *group != JOB);
        match key.kind {
            CollectiveKind::Sum => last == Some(key.group),
            _ => last.is_none(),
        }
    }

    /// The verdict of `step`: with it the sequence goes on with gathers or with the next step. `false` if it is not awaited.
    pub fn verdict(&mut self, step: u64, updated: bool) -> bool {
        if self.phase != Phase::Verdict || step != self.step {
            return false;
        }
        self.base = self.seq + if updated { self.numbers.gathers } else { 0 };
        if updated && !self.order.is_empty() {
            self.enter(Phase::Gathers(0));
        } else {
            self.next_step();
        }
        true
    }

    fn next_step(&mut self) {
        self.step += 1;
        self.seq = self.base;
        self.enter(self.first_phase());
    }

    /// The step whose collectives are next.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The running digest of everything issued so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

/// FNV-1a over the words of an entry, whole words at a time and each turned so that high bits reach low ones: cheap, the same
/// everywhere, and order-sensitive.
pub fn digest_of(digest: u64, key: &CollectiveKey) -> u64 {
    let head = (key.kind as u64) << 40 | (key.dtype as u64) << 32 | u64::from(key.bucket);
    let words = [key.seq, head, key.bytes, key.version, u64::from(key.group)];
    words.into_iter().fold(digest, |digest, word| (digest ^ word).wrapping_mul(Fnv::PRIME).rotate_left(29))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn sequence(buckets: u32) -> Sequence {
        with_sums(&vec![[JOB; 2]; buckets as usize])
    }

    fn with_sums(sums: &[[u32; 2]]) -> Sequence {
        let wire = |sums: &[u32; 2]| WireBucket {
            reduce_bytes: 8,
            reduce_dtype: DType::F32,
            gather_bytes: 4,
            gather_dtype: DType::Bf16,
            shard_bytes: 4,
            group: 1,
            sums: *sums,
        };
        Sequence::new((0..sums.len() as u32).map(BucketId).collect(), sums.iter().map(wire).collect(), 128, 0)
    }

    fn names(sequence: &mut Sequence, verdicts: &[bool]) -> Vec<String> {
        let mut names = Vec::new();
        for (step, &updated) in verdicts.iter().enumerate() {
            loop {
                while let Some(key) = sequence.advance() {
                    names.push(match key.kind {
                        CollectiveKind::Small => "small".to_string(),
                        CollectiveKind::Sum => format!("sum{} over {}", key.bucket, key.group),
                        kind => format!("{kind:?}{}", key.bucket).to_lowercase(),
                    });
                    if sequence.step() > step as u64 {
                        break;
                    }
                }
                if sequence.step() > step as u64 || !sequence.verdict(step as u64, updated) {
                    break;
                }
                if sequence.step() > step as u64 {
                    break;
                }
            }
        }
        names
    }

    #[test]
    fn reduces_descend_then_the_small_one_then_gathers_ascend() {
        let got = names(&mut sequence(3), &[true]);
        assert_eq!(got, ["reduce2", "reduce1", "reduce0", "small", "gather0", "gather1", "gather2"]);
    }

    #[test]
    fn each_reduce_is_followed_by_the_sums_over_other_groups() {
        let got = names(&mut with_sums(&[[2, 4], [JOB, JOB], [4, JOB]]), &[false, true]);
        let reduces = ["reduce2", "sum2 over 4", "reduce1", "reduce0", "sum0 over 2", "sum0 over 4", "small"];
        assert_eq!(got[..7], reduces);
        assert_eq!(got[7..14], reduces);
        assert_eq!(got[14..], ["gather0", "gather1", "gather2"]);
    }

    /// The numbers and names of two steps, the first one updated.
    fn numbered(mut sequence: Sequence) -> Vec<String> {
        let mut names = Vec::new();
        while sequence.step() < 2 {
            let Some(key) = sequence.advance() else {
                sequence.verdict(sequence.step(), sequence.step() == 0);
                continue;
            };
            names.push(match key.kind {
                CollectiveKind::Small => format!("{} small", key.seq),
                kind => format!("{} {kind:?} {}", key.seq, key.bucket).to_lowercase(),
            });
        }
        names
    }

    #[test]
    fn what_concerns_several_stages_has_the_same_number_on_each() {
        let numbers = Numbers { start: 0, reduces: 3, staged: 2, gathers: 3 };
        let sum = |weight| WireStaged { weight, shard_bytes: 4, group: 8 };
        let most = numbered(sequence(3).staged(vec![sum(0), sum(1)], numbers));
        let few = numbered(sequence(1).staged(vec![sum(1)], numbers));
        let none = numbered(sequence(0).staged(vec![], numbers));
        assert_eq!(most[..5], ["0 reduce 2", "1 reduce 1", "2 reduce 0", "3 stagedsum 0", "4 stagedsum 1"]);
        assert_eq!(most[5..10], ["5 small", "6 gather 0", "7 gather 1", "8 gather 2", "9 reduce 2"]);
        assert_eq!(most.last().unwrap(), "14 small");
        let expected =
            ["0 reduce 0", "4 stagedsum 1", "5 small", "6 gather 0", "9 reduce 0", "13 stagedsum 1", "14 small"];
        assert_eq!(few, expected);
        assert_eq!(none, ["5 small", "14 small"]);
    }

    #[test]
    fn the_last_sum_or_the_lone_reduce_ends_a_reduction() {
        let mut sequence = with_sums(&[[2, 4], [JOB, JOB]]);
        let keys: Vec<_> = (0..4).filter_map(|_| sequence.advance()).collect();
        let ends: Vec<bool> = keys.iter().map(|key| sequence.ends_reduction(key)).collect();
        assert_eq!(ends, [true, false, false, true], "reduce 1; reduce 0 and its two sums");
    }

    #[test]
    fn a_skipped_step_has_no_gathers() {
        let got = names(&mut sequence(2), &[false, true]);
        assert_eq!(got, ["reduce1", "reduce0", "small", "reduce1", "reduce0", "small", "gather0", "gather1"]);
    }

    #[test]
    fn a_rank_without_buckets_still_joins_the_small_all_gather() {
        assert_eq!(names(&mut sequence(0), &[true, false]), ["small", "small"]);
    }

    #[test]
    fn the_digest_tells_order_and_content_apart() {
        let key = CollectiveKey {
            seq: 0,
            kind: CollectiveKind::Reduce,
            bucket: 1,
            bytes: 8,
            dtype: DType::F32,
            version: 0,
            group: 0,
        };
        let other = CollectiveKey { bucket: 2, ..key };
        let forward = digest_of(digest_of(Fnv::BASIS, &key), &other);
        let backward = digest_of(digest_of(Fnv::BASIS, &other), &key);
        assert_ne!(forward, backward);
        for changed in [
            CollectiveKey { seq: 1, ..key },
            CollectiveKey { kind: CollectiveKind::Gather, ..key },
            CollectiveKey { bytes: 9, ..key },
            CollectiveKey { dtype: DType::F16, ..key },
            CollectiveKey { version: 1, ..key },
            CollectiveKey { group: 1, ..key },
        ] {
            assert_ne!(digest_of(Fnv::BASIS, &key), digest_of(Fnv::BASIS, &changed));
        }
    }
}
