//! Words, boards and the first cause between ranks.

#![allow(clippy::unwrap_used)]

use super::*;

const LONG: Duration = Duration::from_secs(20);

fn controls(ranks: usize) -> (Vec<Seat>, Vec<Control>) {
    let seats = Ranks::local(ranks, None).unwrap();
    let controls = seats.iter().map(Seat::control).collect();
    (seats, controls)
}

fn demand(from: usize) -> ControlMsg {
    ControlMsg::Demand { from, version: 1, demanded: 1 }
}

fn cause(rank: usize) -> Cause {
    Arc::new(Failure::new(FailureKind::Device, rank, "it broke"))
}

fn lines(value: &str) -> Agreement {
    vec![Line::new("plan", "a"), Line::new("rule", value)]
}

#[test]
fn messages_wait_until_the_inbox_opens_and_end_when_its_rank_leaves() {
    let (_seats, controls) = controls(3);
    let heard = Arc::new(Mutex::new(Vec::new()));
    controls[0].tell_others(&demand(0));
    let sink = heard.clone();
    controls[1].open_inbox(Box::new(move |message| sink.lock().push(format!("{message:?}"))));
    controls[2].tell(1, demand(2));
    controls[2].tell(7, demand(2));
    assert_eq!(heard.lock().len(), 2);
    controls[1].leave();
    controls[0].tell_others(&demand(0));
    assert_eq!(heard.lock().len(), 2);
}

#[test]
fn a_delivery_holds_no_lock_so_it_may_answer_at_once() {
    let (_seats, controls) = controls(2);
    let heard = Arc::new(AtomicU64::new(0));
    for (rank, own) in controls.iter().enumerate() {
        let (control, heard) = (own.clone(), heard.clone());
        own.open_inbox(Box::new(move |_| {
            if heard.fetch_add(1, Ordering::SeqCst) < 10 {
                control.tell_others(&demand(rank));
            }
        }));
    }
    controls[0].tell_others(&demand(0));
    assert_eq!(heard.load(Ordering::SeqCst), 11);
}

#[test]
fn the_first_cause_of_the_job_is_everybodys() {
    let (_seats, controls) = controls(2);
    assert!(controls[1].failed().is_none());
    assert_eq!(controls[1].first_cause(&cause(1)), cause(1));
    assert_eq!(controls[0].first_cause(&cause(0)), cause(1));
    assert_eq!(controls[0].failed(), Some(cause(1)));
    // Who has vanished neither tells nor hears.
    let (_seats, controls) = self::controls(2);
    controls[1].vanish();
    assert_eq!(controls[1].first_cause(&cause(1)), cause(1));
    assert!(controls[0].failed().is_none() && controls[1].failed().is_none());
    controls[1].leave();
    assert!(!controls[1].board().left.load(Ordering::SeqCst));
}

/// All ranks but one meet, each on a thread; what each was told.
fn meet(controls: Vec<Control>, limit: Duration, value: impl Fn(usize) -> &'static str) -> Vec<Option<Cause>> {
    let meet = |control: Control| {
        let lines = lines(value(control.rank()));
        std::thread::spawn(move || control.meet(lines, limit).err())
    };
    let threads: Vec<_> = controls.into_iter().map(meet).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn ranks_that_agree_start_and_ranks_that_differ_all_hear_the_first_difference() {
    let (_seats, controls) = controls(3);
    assert_eq!(meet(controls, LONG, |_| "x"), [None, None, None]);
    let (_seats, controls) = self::controls(3);
    let told = meet(controls, LONG, |rank| if rank == 1 { "y" } else { "x" });
    assert!(told.iter().all(|cause| cause.is_some() && *cause == told[0]), "{told:?}");
    let message = &told[0].as_ref().unwrap().message;
    assert!(message.contains("rank 0 has rule = x, rank 1 has rule = y"), "{message}");
}

#[test]
fn some_ranks_may_have_to_agree_on_what_others_have_otherwise() {
    let (_seats, controls) = controls(4);
    let told = |values: [&'static str; 4]| {
        let compare = |control: Control| {
            let rank = control.rank();
            let among = Members::of([rank % 2, rank % 2 + 2], 4);
            let line = Line { among, ..Line::new("hash", values[rank]) };
            std::thread::spawn(move || control.compare(vec![line], LONG, &|_| unreachable!()).unwrap())
        };
        let threads: Vec<_> = controls.iter().cloned().map(compare).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(told(["a", "b", "a", "b"]), [None, None, None, None]);
    let difference = Some("rank 1 has hash = b, rank 3 has hash = c".to_string());
    assert!(told(["a", "b", "a", "c"]).iter().all(|told| *told == difference));
}

#[test]
fn ranks_meet_as_often_as_they_like_and_all_hear_of_a_difference() {
    let (_seats, controls) = controls(3);
    let rounds = |control: Control| {
        let compare = move |round: usize| {
            let value = if round == 2 && control.rank() == 1 { "other".into() } else { round.to_string() };
            control.compare(vec![Line::new("round", value)], LONG, &|_| unreachable!()).unwrap()
        };
        std::thread::spawn(move || (0..5).map(compare).collect::<Vec<_>>())
    };
    let hub = controls[0].hub.clone();
    let threads: Vec<_> = controls.into_iter().map(rounds).collect();
    for thread in threads {
        let told = thread.join().unwrap();
        assert_eq!(told[2].as_deref(), Some("rank 0 has round = 2, rank 1 has round = other"));
        assert_eq!(told.iter().flatten().count(), 1);
    }
    assert!(hub.meeting.lock().rounds[..3].iter().all(Vec::is_empty), "rounds that are over are forgotten");
}

#[test]
fn a_busy_rank_may_come_later_than_the_limit() {
    let (_seats, controls) = controls(2);
    let limit = Duration::from_millis(100);
    let compare = move |control: &Control| control.compare(Vec::new(), limit, &|rank| format!("{rank} is late"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let busy = controls[1].busy("saves", LONG);
            std::thread::sleep(4 * limit);
            drop(busy);
            compare(&controls[1]).unwrap();
        });
        std::thread::sleep(limit / 2);
        assert_eq!(compare(&controls[0]), Ok(None));
    });
    let late = compare(&controls[0]).unwrap_err();
    assert_eq!((late.kind, late.rank, late.message.as_str()), (FailureKind::Deadline, 1, "1 is late"));
}

#[test]
fn a_rank_that_does_not_come_leaves_or_fails_ends_the_meeting_for_all() {
    let (mut seats, mut controls) = controls(3);
    controls.pop();
    let told = meet(controls, Duration::from_millis(50), |_| "x");
    assert_eq!(told[0], told[1]);
    let late = told[0].as_ref().unwrap();
    assert_eq!((late.kind, late.rank), (FailureKind::Deadline, 2), "{late}");
    seats.clear();

    let (mut seats, mut controls) = self::controls(3);
    controls.pop();
    drop(seats.pop());
    let told = meet(controls, LONG, |_| "x");
    assert_eq!(told[0], told[1]);
    let left = told[0].as_ref().unwrap();
    assert_eq!((left.kind, left.rank), (FailureKind::RankLost, 2), "{left}");

    let (_seats, mut controls) = self::controls(3);
    let failing = controls.pop().unwrap();
    let fails = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        failing.first_cause(&cause(2))
    });
    assert_eq!(meet(controls, LONG, |_| "x"), [Some(cause(2)), Some(cause(2))]);
    fails.join().unwrap();
}
