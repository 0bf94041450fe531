//! The communicator: the only one that issues collectives, in the one order (rule O1).
//!
//! Owns the [`Sequence`] and the requests that came early. Readiness, demand and credits decide *when* the next
//! collective is issued, never *which*. The first reduce of a step first issues all pending gathers: it asks the pre-hook
//! to let them go. Hears from buckets (reduce, gather) and the optimizer (small, verdict); answers each with the event
//! behind what was issued; a reduce is over with the last of the sums that follow it. Its digest of the order goes to the
//! supervisor every n steps (rule O2).

use std::collections::VecDeque;

use gatherflow_kernels::{CollectiveKey, CollectiveKind, Event};

use crate::action::{Action, After, Letter, Machine, WrongTransition};
use crate::bucket::BucketMsg;
use crate::optimizer::OptimizerMsg;
use crate::plan::BucketId;
use crate::prehook::PreHookMsg;
use crate::sequence::{Entry, Sequence};
use crate::supervisor::SupervisorMsg;

/// What the communicator hears.
#[derive(Clone, Debug)]
pub enum CommunicatorMsg {
    /// Bucket: its gradients are complete.
    Reduce {
        /// The step.
        step: u64,
        /// Which bucket.
        bucket: BucketId,
        /// Start behind these.
        after: After,
    },
    /// Optimizer: its copies of a weight that other pipeline stages have too are reduced and summed.
    StagedSum {
        /// The step.
        step: u64,
        /// The number of the weight.
        weight: u32,
        /// Start behind these.
        after: After,
    },
    /// Optimizer: this rank's record is enqueued.
    Small {
        /// The step.
        step: u64,
        /// Start behind these.
        after: After,
    },
    /// Optimizer: the verdict of a step is known.
    Verdict {
        /// The step.
        step: u64,
        /// Whether gathers follow.
        updated: bool,
    },
    /// Bucket: it was told to gather.
    Gather {
        /// The version.
        version: u64,
        /// Which bucket.
        bucket: BucketId,
        /// Start behind these.
        after: After,
    },
    /// Own feedback: a collective was issued.
    Issued {
        /// Which.
        key: CollectiveKey,
        /// Behind it.
        event: Event,
    },
}

/// How many entries are kept for naming the first difference between two ranks.
const HISTORY: usize = 4096;

/// The state machine of the communicator.
#[derive(Clone, Debug)]
pub struct Communicator {
    sequence: Sequence,
    /// Early requests, by bucket.
    reduces: Vec<Option<(u64, After)>>,
    gathers: Vec<Option<(u64, After)>>,
    /// By weight; the few that were asked for early.
    staged: Vec<(u64, u32, After)>,
    small: Option<(u64, After)>,
    drained: u64,
    compare_every: u64,
    history: VecDeque<CollectiveKey>,
    /// Issued in one call with a later one, whose event is theirs too.
    unanswered: VecDeque<CollectiveKey>,
}

impl Communicator {
    /// A communicator at the start of a sequence over `buckets` buckets. The digest goes out after every `compare_every`th
    /// step (0: never).
    pub fn new(sequence: Sequence, buckets: usize, compare_every: u64) -> Self {
        Self {
            sequence,
            reduces: vec![None; buckets],
            gathers: vec![None; buckets],
            staged: Vec::new(),
            small: None,
            drained: 0,
            compare_every,
            history: VecDeque::new(),
            unanswered: VecDeque::new(),
        }
    }

    /// The sequence and its digest.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    fn wrong(&self, message: &CommunicatorMsg) -> WrongTransition {
        WrongTransition {
            actor: "communicator actor",
            bucket: None,
            state: format!("{:?} is next", self.sequence.next()),
            message: format!("{message:?}"),
        }
    }

    /// Issues what is next for as long as it was asked for.
    fn advance(&mut self, actions: &mut Vec<Action>) {
        loop {
            let version = self.sequence.step() + 1;
            let asked = |bucket: &BucketId| self.gathers[bucket.index()].as_ref().is_some_and(|r| r.0 == version);
            // Requests mostly come in order, so the last one tells most.
            if !self.sequence.begun_call().iter().rev().all(asked) {
                return;
            }
            let more = self.sequence.is_in_call();
            let taken = match self.sequence.next() {
                Entry::Reduce { step, bucket } => take(&mut self.reduces[bucket.0 as usize], step),
                // Behind its reduce on the same stream, and asked for with it.
                Entry::Sum { .. } => Some(After::new()),
                Entry::StagedSum { step, weight } => {
                    let asked = self.staged.iter().position(|early| (early.0, early.1) == (step, weight));
                    asked.map(|early| self.staged.swap_remove(early).2)
                }
                Entry::Small { step } => take(&mut self.small, step),
                Entry::Gather { version, bucket } => take(&mut self.gathers[bucket.0 as usize], version),
                Entry::AwaitVerdict { .. } => None,
            };
            let Some(after) = taken else { return };
            let step = self.sequence.step();
            let Some(key) = self.sequence.advance() else { return };
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(key);
            if more {
                self.unanswered.push_back(key);
            }
            actions.push(Action::Issue { key, after, more });
            if self.sequence.step() != step {
                self.step_over(step, actions);
            }
        }
    }

    fn step_over(&mut self, step: u64, actions: &mut Vec<Action>) {
        if self.compare_every > 0 && (step + 1).is_multiple_of(self.compare_every) {
            actions.push(Action::Send(Letter::Supervisor(SupervisorMsg::Digest {
                step,
                digest: self.sequence.digest(),
                history: self.history.drain(..).collect(),
            })));
        }
    }

    /// A reduce that came while gathers are pending: they go first.
    fn drain_before(&mut self, step: u64, actions: &mut Vec<Action>) {
        if step > self.drained && self.sequence.step() < step {
            self.drained = step;
            actions.push(Action::Send(Letter::PreHook(PreHookMsg::Drain { version: step })));
        }
    }
}

/// Tells who asked for a collective that it was issued.
fn answer(key: CollectiveKey, event: Event, actions: &mut Vec<Action>) {
    let bucket = BucketId(key.bucket);
    actions.push(Action::Send(match key.kind {
        CollectiveKind::Reduce | CollectiveKind::Sum => {
            Letter::Bucket(bucket, BucketMsg::ReduceIssued { step: key.version, event })
        }
        CollectiveKind::Gather => Letter::Bucket(bucket, BucketMsg::GatherIssued { version: key.version, event }),
        CollectiveKind::StagedSum => {
            Letter::Optimizer(OptimizerMsg::StagedSummed { step: key.version, weight: key.bucket, event })
        }
        _ => Letter::Optimizer(OptimizerMsg::SmallIssued { step: key.version, event }),
    }));
}

fn take(slot: &mut Option<(u64, After)>, wanted: u64) -> Option<After> {
    slot.take_if(|(number, _)| *number == wanted).map(|(_, after)| after)
}

impl Machine for Communicator {
    type Msg = CommunicatorMsg;

    fn on(&mut self, message: CommunicatorMsg, actions: &mut Vec<Action>) -> Result<(), WrongTransition> {
        match message {
            CommunicatorMsg::Reduce { step, bucket, after }
                if step >= self.sequence.step() && self.reduces[bucket.0 as usize].is_none() =>
            {
                self.reduces[bucket.0 as usize] = Some((step, after));
                self.drain_before(step, actions);
            }
            CommunicatorMsg::StagedSum { step, weight, after }
                if step >= self.sequence.step() && !self.staged.iter().any(|early| early.1 == weight) =>
            {
                self.staged.push((step, weight, after));
            }
            CommunicatorMsg::Small { step, after } if step >= self.sequence.step() && self.small.is_none() => {
                self.small = Some((step, after));
            }
            CommunicatorMsg::Gather { version, bucket, after }
                if version == self.sequence.step() + 1 && self.gathers[bucket.0 as usize].is_none() =>
            {
                self.gathers[bucket.0 as usize] = Some((version, after));
            }
            CommunicatorMsg::Verdict { step, updated } if self.sequence.verdict(step, updated) => {
                if self.sequence.step() != step {
                    self.step_over(step, actions);
                }
            }
            CommunicatorMsg::Issued { key, event } => {
                let reduction = matches!(key.kind, CollectiveKind::Reduce | CollectiveKind::Sum);
                if reduction && !self.sequence.ends_reduction(&key) {
                    return Ok(());
                }
                while let Some(earlier) = self.unanswered.pop_front_if(|earlier| earlier.seq < key.seq) {
                    answer(earlier, event.clone(), actions);
                }
                answer(key, event, actions);
                return Ok(());
            }
            message => return Err(self.wrong(&message)),
        }
        self.advance(actions);
        Ok(())
    }

    fn issued(key: CollectiveKey, event: Event) -> Option<CommunicatorMsg> {
        Some(CommunicatorMsg::Issued { key, event })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::plan::{JOB, Numbers};
    use crate::sequence::{WireBucket, WireStaged};
    use gatherflow_kernels::DType;

    /// Over three buckets; the gather order is 0, 1, 2.
    fn communicator(compare_every: u64) -> Communicator {
        with_sums([JOB; 2], compare_every)
    }

    /// The same, with sums behind the reduce of bucket 1.
    fn with_sums(sums: [u32; 2], compare_every: u64) -> Communicator {
        let wire = |bucket: u32| WireBucket {
            reduce_bytes: 8,
            reduce_dtype: DType::F32,
            gather_bytes: 4,
            gather_dtype: DType::Bf16,
            shard_bytes: 4,
            group: JOB,
            sums: if bucket == 1 { sums } else { [JOB; 2] },
        };
        let sequence = Sequence::new((0..3).map(BucketId).collect(), (0..3).map(wire).collect(), 128, 0);
        Communicator::new(sequence, 3, compare_every)
    }

    fn reduce(step: u64, bucket: u32) -> CommunicatorMsg {
        CommunicatorMsg::Reduce { step, bucket: BucketId(bucket), after: vec![] }
    }

    fn gather(version: u64, bucket: u32) -> CommunicatorMsg {
        CommunicatorMsg::Gather { version, bucket: BucketId(bucket), after: vec![] }
    }

    fn small(step: u64) -> CommunicatorMsg {
        CommunicatorMsg::Small { step, after: vec![] }
    }

    fn verdict(step: u64, updated: bool) -> CommunicatorMsg {
        CommunicatorMsg::Verdict { step, updated }
    }

    fn say(communicator: &mut Communicator, message: CommunicatorMsg) -> Vec<String> {
        let mut actions = Vec::new();
        communicator.on(message, &mut actions).unwrap();
        let word = |action: &Action| match action {
            Action::Issue { key, .. } if key.bucket == CollectiveKey::NO_BUCKET => format!("{}:small", key.seq),
            Action::Issue { key, .. } => format!("{}:{:?} {}", key.seq, key.kind, key.bucket).to_lowercase(),
            Action::Send(Letter::PreHook(PreHookMsg::Drain { version })) => format!("drain {version}"),
            Action::Send(Letter::Supervisor(SupervisorMsg::Digest { step, history, .. })) => {
                format!("digest {step} of {}", history.len())
            }
            other => format!("{other:?}"),
        };
        actions.iter().map(word).collect()
    }

    fn reduces_of(c: &mut Communicator, step: u64) {
        for bucket in [2, 1, 0] {
            say(c, reduce(step, bucket));
        }
    }

    #[test]
    fn requests_in_any_order_are_issued_in_the_one_order() {
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for reduces in orders {
            for gathers in orders {
                let mut c = communicator(0);
                let mut issued = Vec::new();
                for bucket in reduces {
                    issued.extend(say(&mut c, reduce(0, bucket)));
                }
                issued.extend(say(&mut c, small(0)));
                issued.extend(say(&mut c, verdict(0, true)));
                for bucket in gathers {
                    issued.extend(say(&mut c, gather(1, bucket)));
                }
                let order =
                    ["0:reduce 2", "1:reduce 1", "2:reduce 0", "3:small", "4:gather 0", "5:gather 1", "6:gather 2"];
                assert_eq!(issued, order, "{reduces:?} {gathers:?}");
            }
        }
    }

    #[test]
    fn sums_over_stages_wait_for_all_reduces_and_go_by_weight() {
        let numbers = Numbers { start: 0, reduces: 5, staged: 3, gathers: 3 };
        let sum = |weight| WireStaged { weight, shard_bytes: 4, group: 8 };
        let mut c = communicator(0);
        c.sequence = c.sequence.clone().staged(vec![sum(0), sum(2)], numbers);
        let ask = |step, weight| CommunicatorMsg::StagedSum { step, weight, after: vec![] };
        assert!(say(&mut c, ask(0, 2)).is_empty());
        let twice = c.on(ask(0, 2), &mut Vec::new()).unwrap_err().to_string();
        assert!(twice.contains("StagedSum"), "{twice}");
        say(&mut c, small(0));
        reduces_of(&mut c, 0);
        assert_eq!(say(&mut c, ask(0, 0)), ["5:stagedsum 0", "7:stagedsum 2", "8:small"]);
    }

    #[test]
    fn the_small_one_waits_for_the_last_reduce_and_gathers_for_the_verdict() {
        let mut c = communicator(0);
        assert!(say(&mut c, small(0)).is_empty());
        say(&mut c, reduce(0, 2));
        say(&mut c, reduce(0, 1));
        assert_eq!(say(&mut c, reduce(0, 0)), ["2:reduce 0", "3:small"]);
        assert!(say(&mut c, gather(1, 0)).is_empty());
        assert_eq!(say(&mut c, verdict(0, true)), ["4:gather 0"]);
    }

    #[test]
    fn the_first_reduce_of_the_next_step_drains_pending_gathers_once() {
        let mut c = communicator(0);
        reduces_of(&mut c, 0);
        say(&mut c, small(0));
        say(&mut c, verdict(0, true));
        say(&mut c, gather(1, 0));
        assert_eq!(say(&mut c, reduce(1, 1)), ["drain 1"]);
        assert!(say(&mut c, reduce(1, 2)).is_empty(), "asked already");
        assert_eq!(say(&mut c, gather(1, 1)), ["5:gather 1"]);
        assert_eq!(say(&mut c, gather(1, 2)), ["6:gather 2", "7:reduce 2", "8:reduce 1"]);
    }

    #[test]
    fn sums_follow_their_reduce_at_once_and_the_bucket_hears_of_the_last() {
        let mut c = with_sums([2, 4], 0);
        assert!(say(&mut c, reduce(0, 1)).is_empty());
        assert_eq!(say(&mut c, reduce(0, 2)), ["0:reduce 2", "1:reduce 1", "2:sum 1", "3:sum 1"]);
        let mut heard = |kind, bucket, group| {
            let key = CollectiveKey { seq: 0, kind, bucket, bytes: 1, dtype: DType::F32, version: 0, group };
            say(&mut c, CommunicatorMsg::Issued { key, event: Event::done(7) }).len()
        };
        assert_eq!(heard(CollectiveKind::Reduce, 2, 0), 1);
        assert_eq!(heard(CollectiveKind::Reduce, 1, 0), 0, "its sums are to come");
        assert_eq!(heard(CollectiveKind::Sum, 1, 2), 0);
        assert_eq!(heard(CollectiveKind::Sum, 1, 4), 1);
    }

    #[test]
    fn a_skipped_step_goes_on_with_the_next_reduces() {
        let mut c = communicator(0);
        reduces_of(&mut c, 0);
        say(&mut c, small(0));
        assert!(say(&mut c, verdict(0, false)).is_empty());
        assert_eq!(say(&mut c, reduce(1, 2)), ["4:reduce 2"]);
    }

    #[test]
    fn the_digest_goes_out_after_every_nth_step_with_the_entries_since_the_last_one() {
        let mut c = communicator(2);
        for step in 0..4 {
            reduces_of(&mut c, step);
            say(&mut c, small(step));
            let words = say(&mut c, verdict(step, false));
            let expected = if step % 2 == 1 { vec![format!("digest {step} of 8")] } else { vec![] };
            assert_eq!(words, expected);
        }
        let mut updated = communicator(1);
        reduces_of(&mut updated, 0);
        say(&mut updated, small(0));
        say(&mut updated, verdict(0, true));
        say(&mut updated, gather(1, 0));
        say(&mut updated, gather(1, 1));
        assert_eq!(say(&mut updated, gather(1, 2)), ["6:gather 2", "digest 0 of 7"]);
    }

    #[test]
    fn a_call_is_issued_once_all_of_it_was_asked_for_and_its_event_is_everybodys() {
        let mut c = communicator(0);
        c.sequence = c.sequence.clone().in_calls(vec![2, 2, 3]);
        let mut issue = |message| {
            let mut actions = Vec::new();
            c.on(message, &mut actions).unwrap();
            let issued = |action| match action {
                Action::Issue { key, more, .. } => Some((key, more)),
                _ => None,
            };
            actions.into_iter().filter_map(issued).collect::<Vec<_>>()
        };
        for bucket in [2, 1, 0] {
            issue(CommunicatorMsg::Reduce { step: 0, bucket: BucketId(bucket), after: Vec::new() });
        }
        issue(CommunicatorMsg::Small { step: 0, after: Vec::new() });
        issue(CommunicatorMsg::Verdict { step: 0, updated: true });
        let gather = |bucket| CommunicatorMsg::Gather { version: 1, bucket: BucketId(bucket), after: Vec::new() };
        assert!(issue(gather(1)).is_empty());
        assert!(issue(gather(2)).is_empty());
        let issued = issue(gather(0));
        let parts: Vec<_> = issued.iter().map(|(key, more)| (key.bucket, *more)).collect();
        assert_eq!(parts, [(0, true), (1, false), (2, false)]);
        let mut answered = |key| {
            let mut actions = Vec::new();
            c.on(CommunicatorMsg::Issued { key, event: Event::done(7) }, &mut actions).unwrap();
            let bucket = |action| match action {
                Action::Send(Letter::Bucket(id, BucketMsg::GatherIssued { version: 1, event })) => (id.0, event.id()),
                other => panic!("{other:?}"),
            };
            actions.into_iter().map(bucket).collect::<Vec<_>>()
        };
        assert_eq!(answered(issued[1].0), [(0, 7), (1, 7)]);
        assert_eq!(answered(issued[2].0), [(2, 7)]);
    }

    #[test]
    fn what_was_issued_goes_to_who_asked() {
        let mut c = communicator(0);
        let wire =
            |kind, bucket| CollectiveKey { seq: 0, kind, bucket, bytes: 1, dtype: DType::F32, version: 3, group: 0 };
        let mut told = |kind, bucket| {
            let mut actions = Vec::new();
            let event = Event::done(0);
            c.on(CommunicatorMsg::Issued { key: wire(kind, bucket), event }, &mut actions).unwrap();
            format!("{:?}", actions.pop().unwrap())
        };
        assert!(told(CollectiveKind::Reduce, 1).contains("Bucket(BucketId(1), ReduceIssued { step: 3"));
        assert!(told(CollectiveKind::Gather, 2).contains("Bucket(BucketId(2), GatherIssued { version: 3"));
        assert!(told(CollectiveKind::StagedSum, 4).contains("Optimizer(StagedSummed { step: 3, weight: 4"));
        assert!(told(CollectiveKind::Small, CollectiveKey::NO_BUCKET).contains("Optimizer(SmallIssued { step: 3"));
    }

    #[test]
    fn what_the_state_does_not_allow_names_what_is_next_and_the_message() {
        let refuses = |c: &mut Communicator, wrong: Vec<CommunicatorMsg>, next: &str| {
            for message in wrong {
                let text = c.on(message.clone(), &mut Vec::new()).unwrap_err().to_string();
                assert!(text.contains("communicator actor") && text.contains(next), "{text}");
                assert!(text.contains(&format!("{message:?}")), "{text}");
            }
        };
        let mut c = communicator(0);
        refuses(&mut c, vec![verdict(0, true), gather(0, 0), gather(2, 0)], "Reduce { step: 0, bucket: BucketId(2) }");
        say(&mut c, reduce(0, 0));
        refuses(&mut c, vec![reduce(0, 0), reduce(1, 0)], "Reduce { step: 0, bucket: BucketId(2) }");
        say(&mut c, reduce(0, 1));
        say(&mut c, reduce(0, 2));
        say(&mut c, small(0));
        refuses(&mut c, vec![verdict(1, true)], "AwaitVerdict { step: 0 }");
        say(&mut c, verdict(0, true));
        say(&mut c, gather(1, 1));
        refuses(
            &mut c,
            vec![gather(1, 1), gather(2, 0), verdict(0, true)],
            "Gather { version: 1, bucket: BucketId(0) }",
        );
        say(&mut c, gather(1, 0));
        say(&mut c, gather(1, 2));
        refuses(&mut c, vec![reduce(0, 0), small(0), gather(1, 0)], "Reduce { step: 1, bucket: BucketId(2) }");
    }
}
