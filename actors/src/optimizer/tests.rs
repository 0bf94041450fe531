//! Steps, skips, rows and copies, as the optimizer says them.

#![allow(clippy::unwrap_used)]

use super::*;
use gatherflow_kernels::null::updated_report;

fn event(id: u64) -> Event {
    Event::done(id)
}

fn optimizer(buckets: u32) -> Optimizer {
    // Bucket numbers are not positions: the gather order is descending here.
    Optimizer::new(vec![Group::default(); 2], (0..buckets).rev().map(BucketId).collect())
}

fn step(step: u64, close: Vec<CloseBucket>) -> OptimizerMsg {
    let lrs = vec![LrRow { first_t: 1, values: vec![0.1, 0.2, 0.3] }, LrRow::constant(0.5)];
    let readers = Arc::from([event(90 + step)]);
    OptimizerMsg::Step(Box::new(StepStart {
        step,
        lrs,
        host: HostVerdict::default(),
        close,
        readers,
        scale_read: None,
    }))
}

fn reduced(step: u64, bucket: u32) -> OptimizerMsg {
    let (event, gathered) = (event(10 + u64::from(bucket)), event(50 + u64::from(bucket)));
    OptimizerMsg::ShardReduced { step, bucket: BucketId(bucket), event, gathered }
}

fn verdict(step: u64, updated: bool) -> OptimizerMsg {
    OptimizerMsg::Verdict { step, report: Box::new(StepReport { updated, ..updated_report() }) }
}

fn small(step: u64) -> OptimizerMsg {
    OptimizerMsg::SmallIssued { step, event: event(20) }
}

/// What a message leads to, one word an action, with the feedback of enqueued work fed back as the hands do it.
fn say(optimizer: &mut Optimizer, message: OptimizerMsg) -> Vec<String> {
    let (mut actions, mut words) = (Vec::new(), Vec::new());
    optimizer.on(message, &mut actions).unwrap();
    while !actions.is_empty() {
        for action in std::mem::take(&mut actions) {
            words.push(word(&action));
            if let Action::Enqueue { op, .. } = action {
                let id = match op {
                    Op::Adam { bucket, .. } => 40 + u64::from(bucket.0),
                    _ => 30,
                };
                if let Some(feedback) = Optimizer::enqueued(op, event(id)) {
                    optimizer.on(feedback, &mut actions).unwrap();
                }
            }
        }
    }
    words
}

fn word(action: &Action) -> String {
    let ids = |after: &[(Edge, Event)]| {
        let ids = after.iter().map(|(edge, event)| format!("{edge:?}:{}", event.id()));
        std::iter::once(String::new()).chain(ids).collect::<Vec<_>>().join(" ")
    };
    match action {
        Action::Enqueue { op: Op::NormPartials { bucket }, after } => {
            format!("partials {}{}", bucket.0, ids(after))
        }
        Action::Enqueue { op: Op::SumCopies { set }, after } => format!("sum {set}{}", ids(after)),
        Action::Enqueue { op: Op::SpreadCopies { set }, after } => format!("spread {set}{}", ids(after)),
        Action::Send(Letter::Communicator(CommunicatorMsg::StagedSum { step, weight, after })) => {
            format!("over stages {step} {weight}{}", ids(after))
        }
        Action::Enqueue { op: Op::Fold { .. }, after } => format!("fold{}", ids(after)),
        Action::Enqueue { op: Op::Verdict { step }, after } => format!("verdict {step}{}", ids(after)),
        Action::Enqueue { op: Op::Adam { bucket, rows }, after } => {
            // What was judged last is told by the first group's learning rate in tenths, for each count of updates.
            let lrs = (0..9).filter_map(|n| rows.at(n).map(|rows| format!(" {n}:{}", (rows[0].lr * 10.0) as u32)));
            format!("adam {}{}{}", bucket.0, ids(after), lrs.collect::<String>())
        }
        Action::Publish(Publication::Judged { steps, event }) => format!("judged {steps}:{}", event.id()),
        Action::WhenVerdict { step, event } => format!("when {step}:{}", event.id()),
        Action::Send(Letter::Communicator(CommunicatorMsg::Small { step, after })) => {
            format!("small {step}{}", ids(after))
        }
        Action::Send(Letter::Communicator(CommunicatorMsg::Verdict { step, updated })) => {
            format!("told {step} {updated}")
        }
        Action::Send(Letter::Bucket(bucket, BucketMsg::Close { step, zero, .. })) => {
            format!("close {} {step} {}", bucket.0, zero.len())
        }
        Action::Send(Letter::Bucket(bucket, BucketMsg::Updated { version, adam, readers })) => {
            format!("updated {} {version} {} {}", bucket.0, adam.id(), readers[0].id())
        }
        Action::Send(Letter::Bucket(bucket, BucketMsg::Skipped { version, adam })) => {
            format!("skipped {} {version} {}", bucket.0, adam.id())
        }
        Action::Send(Letter::PreHook(PreHookMsg::StepFinished { version, updated })) => {
            format!("finished {version} {updated}")
        }
        Action::Publish(Publication::Outcome(o)) => format!("outcome {} lr {:?} t {:?}", o.step, o.lrs, o.t),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_step_reduces_folds_judges_and_updates_in_order_with_its_edges() {
    let mut o = optimizer(2);
    assert_eq!(say(&mut o, reduced(0, 0)), ["partials 0 E2:10"]);
    assert!(say(&mut o, step(0, vec![])).is_empty(), "one shard is missing");
    assert_eq!(say(&mut o, reduced(0, 1)), ["partials 1 E2:11", "fold", "small 0 E2:30"]);
    let judged = ["verdict 0 E2:20", "when 0:30", "adam 1 E3:90 E3:51 1:1", "adam 0 E3:90 E3:50 1:1"];
    assert_eq!(say(&mut o, small(0)), judged, "Adam by place, behind readers and gathers");
    let finished = [
        "updated 1 1 41 90",
        "updated 0 1 40 90",
        "told 0 true",
        "finished 1 true",
        "outcome 0 lr [0.1, 0.5] t [1, 1]",
    ];
    assert_eq!(say(&mut o, verdict(0, true)), finished, "buckets hear of it before the pre-hook lets them go");
}

#[test]
fn copies_are_summed_behind_the_last_of_their_reduces_and_measured_behind_the_sum() {
    let set = CopySet { buckets: vec![BucketId(0), BucketId(2)], staged: None };
    let mut o = optimizer(3).summing(vec![set]);
    for number in 0..2 {
        assert!(say(&mut o, reduced(number, 2)).is_empty(), "its copy is to come");
        assert_eq!(say(&mut o, reduced(number, 1)), ["partials 1 E2:11"]);
        say(&mut o, step(number, vec![]));
        let words = say(&mut o, reduced(number, 0));
        assert_eq!(words[..4], ["sum 0 T0:12 T0:10", "spread 0", "partials 0", "partials 2"]);
        assert_eq!(words[4], "fold");
        say(&mut o, small(number));
        say(&mut o, verdict(number, number == 1));
    }
}

#[test]
fn copies_that_other_stages_have_too_are_summed_over_stages_between_sum_and_spread() {
    let two = CopySet { buckets: vec![BucketId(0), BucketId(2)], staged: Some(7) };
    let one = CopySet { buckets: vec![BucketId(1)], staged: Some(3) };
    let mut o = optimizer(3).summing(vec![two, one]);
    let summed = |step, weight, id| OptimizerMsg::StagedSummed { step, weight, event: event(id) };
    for number in 0..2 {
        say(&mut o, reduced(number, 2));
        assert_eq!(say(&mut o, reduced(number, 1)), [format!("over stages {number} 3 T0:11")]);
        say(&mut o, step(number, vec![]));
        let words = say(&mut o, reduced(number, 0));
        assert_eq!(words, ["sum 0 T0:12 T0:10".to_owned(), format!("over stages {number} 7 T0:30")]);
        assert_eq!(say(&mut o, summed(number, 3, 60)), ["spread 1 T0:60", "partials 1"], "one is still to come");
        let words = say(&mut o, summed(number, 7, 61));
        assert_eq!(words[..4], ["spread 0 T0:61", "partials 0", "partials 2", "fold"]);
        say(&mut o, small(number));
        say(&mut o, verdict(number, number == 1));
    }
    let unknown = o.on(summed(2, 5, 62), &mut Vec::new());
    assert!(unknown.unwrap_err().to_string().contains("StagedSummed"), "no such weight");
}

#[test]
fn the_last_shard_may_come_before_step_is_called() {
    let mut o = optimizer(1);
    assert_eq!(say(&mut o, reduced(0, 0)), ["partials 0 E2:10"]);
    assert_eq!(say(&mut o, step(0, vec![])), ["fold", "small 0 E2:30"]);
}

#[test]
fn a_rank_without_buckets_still_has_a_record_and_a_verdict() {
    let mut o = optimizer(0);
    assert_eq!(say(&mut o, step(0, vec![])), ["fold", "small 0 E2:30"]);
    assert_eq!(say(&mut o, small(0)), ["verdict 0 E2:20", "when 0:30"]);
    assert_eq!(say(&mut o, verdict(0, true)).last().unwrap(), "outcome 0 lr [0.1, 0.5] t [1, 1]");
}

#[test]
fn step_closes_what_still_waits_for_gradients() {
    let mut o = optimizer(2);
    let close = |bucket, zero| CloseBucket { bucket: BucketId(bucket), zero, writes: vec![] };
    let words = say(&mut o, step(0, vec![close(1, vec![ParamId(3)]), close(0, vec![])]));
    assert_eq!(words, ["close 1 0 1", "close 0 0 0"]);
}

#[test]
fn a_skipped_step_counts_no_t_and_uses_the_same_learning_rate_again() {
    let mut o = optimizer(1);
    for (number, updated, outcome) in [
        (0, false, "outcome 0 lr [0.1, 0.5] t [0, 0]"),
        (1, true, "outcome 1 lr [0.1, 0.5] t [1, 1]"),
        (2, false, "outcome 2 lr [0.2, 0.5] t [1, 1]"),
        (3, true, "outcome 3 lr [0.2, 0.5] t [2, 2]"),
    ] {
        say(&mut o, reduced(number, 0));
        say(&mut o, step(number, vec![]));
        say(&mut o, small(number));
        let words = say(&mut o, verdict(number, updated));
        let kind = if updated { "updated" } else { "skipped" };
        assert!(words[0].starts_with(kind), "{words:?}");
        assert!(words.contains(&format!("told {number} {updated}")), "{words:?}");
        assert_eq!(words.last().unwrap(), outcome);
    }
}

#[test]
fn steps_called_ahead_begin_one_after_the_other() {
    let mut o = optimizer(1);
    let close = || vec![CloseBucket { bucket: BucketId(0), zero: vec![], writes: vec![] }];
    assert_eq!(say(&mut o, step(0, close())), ["close 0 0 0"]);
    assert!(say(&mut o, step(1, close())).is_empty());
    assert!(say(&mut o, step(2, close())).is_empty());
    for number in 0..3 {
        say(&mut o, reduced(number, 0));
        say(&mut o, small(number));
        let words = say(&mut o, verdict(number, true));
        let next = format!("close 0 {} 0", number + 1);
        assert_eq!(words.last() == Some(&next), number < 2, "{words:?}");
        assert!(words[0].ends_with(&format!("{}", 90 + number)), "with its own readers: {words:?}");
    }
}

#[test]
fn where_the_device_decides_a_step_is_over_once_adam_is_enqueued_and_rows_cover_what_is_unknown() {
    let mut o = optimizer(1).deciding(Skip::Device);
    let released = |number: u64| {
        let version = number + 1;
        [
            format!("updated 0 {version} 40 {}", 90 + number),
            format!("told {number} true"),
            format!("finished {version} true"),
        ]
    };
    let take = |o: &mut Optimizer, number| {
        say(o, reduced(number, 0));
        say(o, step(number, vec![]));
        say(o, small(number))
    };
    let rows = |words: &[String]| words[3].split("50").nth(1).unwrap().to_owned();
    for (number, expected) in [(0, " 1:1"), (1, " 1:1 2:2"), (2, " 1:1 2:2 3:3")] {
        let words = take(&mut o, number);
        assert_eq!(
            words[..3],
            [format!("verdict {number} E2:20"), format!("judged {}:30", number + 1), format!("when {number}:30")]
        );
        assert_eq!((rows(&words).as_str(), &words[4..]), (expected, &released(number)[..]));
    }
    // Nothing but the outcome is left to tell, also of a skipped step.
    assert_eq!(say(&mut o, verdict(0, false)), ["outcome 0 lr [0.1, 0.5] t [0, 0]"]);
    assert_eq!(say(&mut o, verdict(1, true)), ["outcome 1 lr [0.1, 0.5] t [1, 1]"]);
    assert_eq!(rows(&take(&mut o, 3)), " 2:2 3:3", "one is updated, one unknown");
    assert_eq!(say(&mut o, verdict(2, false)), ["outcome 2 lr [0.2, 0.5] t [1, 1]"]);
    assert_eq!(say(&mut o, verdict(3, true)), ["outcome 3 lr [0.2, 0.5] t [2, 2]"]);
    assert_eq!(rows(&take(&mut o, 4)), " 3:3", "all are known");
    let text = o.on(verdict(5, true), &mut Vec::new()).unwrap_err().to_string();
    assert!(text.contains("step 5, Reducing"), "outcomes come in order: {text}");
}

#[test]
fn where_the_device_decides_a_rank_without_buckets_goes_on_at_once() {
    let mut o = optimizer(0).deciding(Skip::Device);
    say(&mut o, step(0, vec![]));
    let words = say(&mut o, small(0));
    assert_eq!(words, ["verdict 0 E2:20", "judged 1:30", "when 0:30", "told 0 true", "finished 1 true"]);
    assert_eq!(say(&mut o, verdict(0, true)), ["outcome 0 lr [0.1, 0.5] t [1, 1]"]);
}

#[test]
fn the_verdict_comes_behind_the_executors_read_of_the_loss_scale() {
    let mut o = optimizer(0);
    let OptimizerMsg::Step(mut start) = step(0, vec![]) else { return };
    start.scale_read = Some(event(70));
    say(&mut o, OptimizerMsg::Step(start));
    assert_eq!(say(&mut o, small(0))[0], "verdict 0 E2:20 E7:70");
}

#[test]
fn learning_rates_beyond_the_row_are_its_nearest_end() {
    let row = LrRow { first_t: 5, values: vec![1.0, 2.0] };
    assert_eq!([1, 5, 6, 7, 99].map(|t| row.at(t) as u64), [1, 1, 2, 2, 2]);
    assert_eq!(LrRow { first_t: 1, values: vec![] }.at(1).to_bits(), 0);
}

#[test]
fn what_the_state_does_not_allow_names_state_and_message() {
    let refuses = |o: &mut Optimizer, wrong: Vec<OptimizerMsg>, state: &str| {
        for message in wrong {
            let text = o.on(message.clone(), &mut Vec::new()).unwrap_err().to_string();
            let debug = format!("{message:?}");
            let variant = debug.split([' ', '{', '(']).next().unwrap();
            assert!(text.contains("optimizer actor") && text.contains(variant), "{text}");
            assert!(text.contains(state), "{text} has no {state}");
        }
    };
    let judged = OptimizerMsg::Judged { step: 0, event: event(1) };
    let adam = OptimizerMsg::AdamEnqueued { bucket: BucketId(0), event: event(1) };
    let mut o = optimizer(1);
    let folded = OptimizerMsg::Folded { event: event(1) };
    let wrong = vec![reduced(1, 0), step(2, vec![]), small(0), verdict(0, true), folded, judged.clone()];
    refuses(&mut o, wrong, "step 0, Reducing, 0 of 1 shards reduced, step not called");
    say(&mut o, reduced(0, 0));
    refuses(&mut o, vec![reduced(0, 0)], "1 of 1 shards reduced, step not called");
    say(&mut o, step(0, vec![]));
    let wrong = vec![step(0, vec![]), step(2, vec![]), small(1), verdict(0, true), adam.clone()];
    refuses(&mut o, wrong, "step 0, Exchanging, 1 of 1 shards reduced, step called");
    say(&mut o, small(0));
    refuses(&mut o, vec![small(0), judged, adam, verdict(1, true), reduced(0, 0)], "Judging");
    say(&mut o, verdict(0, true));
    refuses(&mut o, vec![verdict(0, true), reduced(0, 0)], "step 1, Reducing");
}

#[test]
fn a_resumed_optimizer_counts_on_from_the_loaded_t_and_only_between_steps() {
    let mut optimizer = optimizer(1);
    say(&mut optimizer, OptimizerMsg::Resume { t: vec![7, 40] });
    say(&mut optimizer, step(0, vec![]));
    let refused = |optimizer: &mut Optimizer, t| {
        let error = optimizer.on(OptimizerMsg::Resume { t }, &mut Vec::new()).unwrap_err();
        assert!(error.message.starts_with("Resume"), "{error}");
    };
    refused(&mut optimizer, vec![0, 0]);
    for message in [reduced(0, 0), small(0), verdict(0, true)] {
        say(&mut optimizer, message);
    }
    assert_eq!(optimizer.t(), [8, 41]);
    refused(&mut optimizer, vec![0]);
    say(&mut optimizer, reduced(1, 0));
    refused(&mut optimizer, vec![0, 0]);
    assert_eq!(optimizer.t(), [8, 41]);
}
