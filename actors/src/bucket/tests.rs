//! Every state of a bucket, and what it refuses.

#![allow(clippy::unwrap_used)]

use super::*;

fn event(id: u64) -> Event {
    Event::done(id)
}

/// What a machine asked for, one word an action; events by number.
fn words(actions: &[Action]) -> Vec<String> {
    let ids = |after: &After| after.iter().map(|(edge, event)| format!("{edge:?}:{}", event.id())).collect::<Vec<_>>();
    let word = |action: &Action| match action {
        Action::Send(Letter::Communicator(CommunicatorMsg::Reduce { step, after, .. })) => {
            format!("reduce {step} {}", ids(after).join(" "))
        }
        Action::Send(Letter::Communicator(CommunicatorMsg::Gather { version, after, .. })) => {
            format!("gather {version} {}", ids(after).join(" "))
        }
        Action::Send(Letter::Optimizer(OptimizerMsg::ShardReduced { step, event, gathered, .. })) => {
            format!("reduced {step} {} gathered {}", event.id(), gathered.id())
        }
        Action::Send(Letter::PreHook(PreHookMsg::Gathered { version, .. })) => format!("gathered {version}"),
        Action::Enqueue { op: Op::ZeroGradients { params, .. }, after } => {
            format!("zero {} {}", params.len(), ids(after).join(" "))
        }
        Action::Enqueue { op: Op::ZeroBucket { .. }, after } => format!("zero bucket {}", ids(after).join(" ")),
        Action::Enqueue { op: Op::FindNonFinite { .. }, after } => format!("search {}", ids(after).join(" ")),
        Action::Publish(Publication::Ready { version, event, .. }) => format!("ready {version} {}", event.id()),
        Action::Publish(Publication::GradientsFree { version, event, .. }) => {
            format!("free {version} {}", event.id())
        }
        other => format!("{other:?}"),
    };
    actions.iter().map(word).collect()
}

fn say(bucket: &mut Bucket, message: BucketMsg) -> Vec<String> {
    let mut actions = Vec::new();
    bucket.on(message, &mut actions).unwrap();
    words(&actions)
}

fn complete(step: u64, id: u64) -> BucketMsg {
    BucketMsg::GradientComplete { step, event: event(id) }
}

fn updated(version: u64, id: u64) -> BucketMsg {
    BucketMsg::Updated { version, adam: event(id), readers: std::sync::Arc::from([event(30), event(31)]) }
}

fn bucket(members: u32, overlap: bool) -> Bucket {
    Bucket::new(BucketId(4), members, overlap, event(1))
}

#[test]
fn a_step_goes_through_every_state_with_its_edges() {
    let mut b = bucket(2, true);
    assert_eq!((b.params(), b.grads()), (Params::Ready(0), Grads::Empty));
    assert!(say(&mut b, complete(0, 10)).is_empty());
    assert_eq!(b.grads(), Grads::Accumulating { missing: 1 });
    assert_eq!(say(&mut b, complete(0, 11)), ["reduce 0 E1:10 E1:11"]);
    assert_eq!(b.grads(), Grads::Complete);
    assert_eq!(say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(12) }), ["reduced 0 12 gathered 1"]);
    assert_eq!(b.grads(), Grads::Reduced);
    assert_eq!(say(&mut b, updated(1, 13)), ["free 1 13"]);
    assert_eq!((b.params(), b.grads()), (Params::Updated(1), Grads::Empty));
    let gather = BucketMsg::Gather { version: 1, entry: Some(event(14)) };
    assert_eq!(say(&mut b, gather), ["gather 1 E4:13 E4:30 E4:31 E8:14"]);
    let issued = BucketMsg::GatherIssued { version: 1, event: event(15) };
    assert_eq!(say(&mut b, issued), ["ready 1 15", "gathered 1"]);
    assert_eq!(b.params(), Params::Ready(1));
    // The next step's reduce hands on what Adam has to wait for: the gather.
    say(&mut b, complete(1, 20));
    say(&mut b, complete(1, 21));
    assert_eq!(say(&mut b, BucketMsg::ReduceIssued { step: 1, event: event(22) }), ["reduced 1 22 gathered 15"]);
}

#[test]
fn with_storage_shared_gradients_are_free_behind_the_gather_and_nothing_of_the_next_step_comes_before_it() {
    let mut b = bucket(1, true).stored(Storage::Shared);
    say(&mut b, complete(0, 10));
    say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(11) });
    assert!(say(&mut b, updated(1, 12)).is_empty());
    let close = BucketMsg::Close { step: 1, zero: vec![ParamId(1)], writes: vec![] };
    let written = BucketMsg::Close { step: 1, zero: vec![], writes: vec![event(13)] };
    for early in [complete(1, 13), written] {
        assert!(b.on(early, &mut Vec::new()).is_err());
    }
    say(&mut b, BucketMsg::Gather { version: 1, entry: None });
    let issued = BucketMsg::GatherIssued { version: 1, event: event(14) };
    assert_eq!(say(&mut b, issued), ["free 1 14", "ready 1 14", "gathered 1"]);
    assert_eq!(say(&mut b, close), ["zero 1 E6:14"]);
}

#[test]
fn with_storage_shared_a_close_before_the_gather_waits_for_it() {
    let mut b = bucket(1, true).stored(Storage::Shared);
    say(&mut b, complete(0, 10));
    say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(11) });
    say(&mut b, updated(1, 12));
    let close = || BucketMsg::Close { step: 1, zero: vec![ParamId(1)], writes: vec![] };
    assert!(say(&mut b, close()).is_empty());
    assert!(b.on(close(), &mut Vec::new()).is_err(), "once a step");
    assert!(b.on(complete(1, 13), &mut Vec::new()).is_err());
    assert_eq!(b.grads(), Grads::Empty);
    say(&mut b, BucketMsg::Gather { version: 1, entry: None });
    let issued = BucketMsg::GatherIssued { version: 1, event: event(14) };
    assert_eq!(say(&mut b, issued), ["free 1 14", "ready 1 14", "gathered 1", "zero 1 E6:14"]);
    assert_eq!(say(&mut b, BucketMsg::Zeroed { event: event(15) }), ["reduce 1 E1:15"]);
}

#[test]
fn with_storage_shared_a_skipped_step_zeroes_the_gradients_behind_adam() {
    let mut b = bucket(1, true).stored(Storage::Shared);
    say(&mut b, complete(0, 10));
    say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(11) });
    let skipped = BucketMsg::Skipped { version: 1, adam: event(12) };
    assert_eq!(say(&mut b, skipped), ["zero bucket E6:12", "ready 1 12"]);
    assert_eq!(say(&mut b, BucketMsg::Zeroed { event: event(13) }), ["free 1 13"]);
    let close = BucketMsg::Close { step: 1, zero: vec![ParamId(1)], writes: vec![] };
    assert_eq!(say(&mut b, close), ["zero 1 E6:13"]);
}

#[test]
fn gradients_of_the_next_step_may_complete_before_the_gather() {
    let mut b = bucket(1, true);
    say(&mut b, complete(0, 10));
    say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(11) });
    say(&mut b, updated(1, 12));
    assert_eq!(say(&mut b, complete(1, 13)), ["reduce 1 E1:13"]);
    say(&mut b, BucketMsg::Gather { version: 1, entry: None });
    say(&mut b, BucketMsg::GatherIssued { version: 1, event: event(14) });
    assert_eq!((b.params(), b.grads()), (Params::Ready(1), Grads::Complete));
}

#[test]
fn close_zeroes_what_nobody_wrote_behind_the_last_adam_and_then_reduces() {
    let mut b = bucket(3, true);
    say(&mut b, complete(0, 10));
    let close = BucketMsg::Close { step: 0, zero: vec![ParamId(1)], writes: vec![event(11)] };
    assert_eq!(say(&mut b, close), ["zero 1 E6:1"]);
    assert_eq!(say(&mut b, BucketMsg::Zeroed { event: event(12) }), ["reduce 0 E1:10 E1:11 E1:12"]);
    let mut untouched = bucket(3, true);
    let close = BucketMsg::Close { step: 0, zero: vec![], writes: vec![event(11)] };
    assert_eq!(say(&mut untouched, close), ["reduce 0 E1:11"]);
}

#[test]
fn a_search_for_what_is_not_finite_comes_behind_all_writes_and_before_the_reduce() {
    let searched = || BucketMsg::Searched { event: event(40) };
    let mut b = bucket(1, true).searching(true);
    assert_eq!(say(&mut b, complete(0, 10)), ["search E1:10"]);
    assert_eq!(say(&mut b, searched()), ["reduce 0 E1:40"]);
    let mut late = bucket(1, false).searching(true);
    assert!(say(&mut late, complete(0, 10)).is_empty());
    assert_eq!(say(&mut late, BucketMsg::Close { step: 0, zero: vec![], writes: vec![] }), ["search E1:10"]);
    let mut zeroed = bucket(2, true).searching(true);
    let close = BucketMsg::Close { step: 0, zero: vec![ParamId(1)], writes: vec![event(11)] };
    assert_eq!(say(&mut zeroed, close), ["zero 1 E6:1"]);
    assert_eq!(say(&mut zeroed, BucketMsg::Zeroed { event: event(12) }), ["search E1:11 E1:12"]);
    assert!(bucket(1, true).on(searched(), &mut Vec::new()).is_err(), "nobody asked");
}

#[test]
fn without_reduce_overlap_a_complete_bucket_waits_for_the_close() {
    let mut b = bucket(1, false);
    assert!(say(&mut b, complete(0, 10)).is_empty());
    assert_eq!(b.grads(), Grads::Complete);
    let close = BucketMsg::Close { step: 0, zero: vec![], writes: vec![] };
    assert_eq!(say(&mut b, close), ["reduce 0 E1:10"]);
}

#[test]
fn a_skipped_step_is_ready_behind_the_pass_that_did_nothing() {
    let mut b = bucket(1, true);
    say(&mut b, complete(0, 10));
    say(&mut b, BucketMsg::ReduceIssued { step: 0, event: event(11) });
    let skipped = BucketMsg::Skipped { version: 1, adam: event(12) };
    assert_eq!(say(&mut b, skipped), ["free 1 12", "ready 1 12"]);
    assert_eq!((b.params(), b.grads()), (Params::Ready(1), Grads::Empty));
}

#[test]
fn what_the_state_does_not_allow_names_bucket_state_and_message_and_changes_nothing() {
    let skipped = |version| BucketMsg::Skipped { version, adam: event(9) };
    let close = |step| BucketMsg::Close { step, zero: vec![], writes: vec![] };
    let reduce = |step| BucketMsg::ReduceIssued { step, event: event(9) };
    let gather = |version| BucketMsg::Gather { version, entry: None };
    let issued = |version| BucketMsg::GatherIssued { version, event: event(9) };
    let at = |messages: Vec<BucketMsg>| {
        let mut b = bucket(1, true);
        for message in messages {
            say(&mut b, message);
        }
        b
    };
    let cases: Vec<(Vec<BucketMsg>, Vec<BucketMsg>)> = vec![
        (
            vec![],
            vec![
                complete(1, 9),
                close(1),
                reduce(0),
                updated(1, 9),
                skipped(1),
                gather(0),
                gather(1),
                issued(0),
                BucketMsg::Zeroed { event: event(9) },
            ],
        ),
        (vec![complete(0, 1)], vec![complete(0, 9), close(0), reduce(1), updated(1, 9), gather(1)]),
        (vec![complete(0, 1), reduce(0)], vec![complete(0, 9), reduce(0), close(0), updated(2, 9), skipped(0)]),
        (
            vec![complete(0, 1), reduce(0), updated(1, 2)],
            vec![complete(0, 9), updated(1, 9), updated(2, 9), gather(0), gather(2), issued(1)],
        ),
        (vec![complete(0, 1), reduce(0), updated(1, 2), gather(1)], vec![gather(1), issued(2)]),
        (vec![complete(0, 1), reduce(0), updated(1, 2), gather(1), issued(1)], vec![gather(1), issued(1)]),
    ];
    for (before, wrong) in cases {
        for message in wrong {
            let mut b = at(before.clone());
            let (params, grads) = (b.params(), b.grads());
            let mut actions = Vec::new();
            let error = b.on(message.clone(), &mut actions).unwrap_err();
            assert_eq!(error.bucket, Some(BucketId(4)));
            let text = error.to_string();
            let (variant, state) = (format!("{message:?}"), format!("{params:?}, {grads:?}"));
            let variant = variant.split([' ', '{']).next().unwrap();
            assert!(text.contains("bucket 4") && text.contains(variant) && text.contains(&state), "{text}");
            assert!(actions.is_empty());
            assert_eq!((b.params(), b.grads()), (params, grads), "{text}");
        }
    }
}
