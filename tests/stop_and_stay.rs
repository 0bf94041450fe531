//! A wish to stop reaches every rank in the same step, whoever has it; a rank that says that it is busy is waited for, with
//! warnings, up to its limit (rule F1).
#![allow(clippy::unwrap_used)]

mod small;

use std::io::Write;
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use gatherflow::{Engine, Error, ErrorKind, Internals, Mode, Rank, StopFlag};
use small::{Small, config, microbatch, on_ranks};

#[test]
fn a_flag_that_anybody_sets_at_any_time_stops_all_ranks_in_the_same_step() {
    fn may_go_anywhere<T: Send + Sync + Clone + 'static>(_: &T) {}
    for who in 0..3 {
        let flags: Mutex<Vec<StopFlag>> = Mutex::default();
        let stopped = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The handler of a signal that comes while all ranks train.
                let flag = loop {
                    let found = flags.lock().unwrap().first().cloned();
                    match found {
                        Some(flag) => break flag,
                        None => std::thread::yield_now(),
                    }
                };
                std::thread::sleep(Duration::from_millis(3));
                flag.request();
            });
            on_ranks(3, |rank| {
                let (mut engine, small) = small::engine(rank, config()).unwrap();
                may_go_anywhere(&engine.stop_flag());
                if engine.rank() == who {
                    flags.lock().unwrap().push(engine.stop_flag());
                }
                for step in 0.. {
                    microbatch(&engine, &small, true, 1.0);
                    if engine.step().unwrap().outcome().unwrap().stop {
                        assert!(!engine.stop_flag().is_requested(), "the step has taken the wish along");
                        engine.close().unwrap();
                        return step;
                    }
                }
                unreachable!()
            })
        });
        assert!(stopped.iter().all(|step| *step == stopped[0]), "{stopped:?}");
    }
}

/// All warnings of this process.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn warnings_of(reason: &str) -> Vec<String> {
    let text = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| line.contains(reason) && line.contains("WARN")).map(ToOwned::to_owned).collect()
}

const DEADLINE: Duration = Duration::from_millis(200);
const SILENCE: Duration = Duration::from_millis(400);

fn impatient(rank: Rank) -> (Engine, Small) {
    static LOGGING: Once = Once::new();
    LOGGING.call_once(|| {
        tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::WARN).with_writer(|| Log).init();
    });
    let (model, small) = small::model();
    let config = config().collective_deadline(DEADLINE).silence_deadline(SILENCE);
    let internals = Internals { busy_warning: Duration::from_millis(150), ..Internals::default() };
    let engine = Engine::with_internals(rank, model, config, internals, |_, out| out.fill_with(|_| 0.5)).unwrap();
    (engine, small)
}

/// Rank 1 is busy for so long before its first step; what rank 0 gets from waiting for it.
fn wait_for_a_busy_rank(
    reason: &str,
    limit: Duration,
    busy_for: Duration,
    wait: impl Fn(&mut Engine, &Small) -> Result<(), Error> + Sync,
) -> (Result<(), Error>, Duration) {
    let mut results = on_ranks(2, |rank| {
        let (mut engine, small) = impatient(rank);
        if engine.rank() == 1 {
            let busy = engine.busy(reason, limit);
            std::thread::sleep(busy_for);
            drop(busy);
        }
        let start = Instant::now();
        if let Err(error) = forward_and_backward(&engine, &small) {
            return (Err(error), start.elapsed());
        }
        let result = wait(&mut engine, &small);
        let waited = start.elapsed();
        (result.and_then(|()| engine.close()), waited)
    });
    let (other, _) = results.pop().unwrap();
    let (result, waited) = results.pop().unwrap();
    assert_eq!(other.is_ok(), result.is_ok(), "{other:?}, {result:?}");
    (result, waited)
}

fn forward_and_backward(engine: &Engine, small: &Small) -> Result<(), Error> {
    if let Some(cause) = engine.session().failed() {
        let error = engine.pass(small.chunk, 0, true, Mode::Train).unwrap_err();
        assert_eq!(error.message(), cause.message);
        return Err(error);
    }
    microbatch(engine, small, true, 1.0);
    Ok(())
}

#[test]
fn a_busy_rank_is_waited_for_and_warned_of_beyond_every_deadline_of_a_collective() {
    let busy_for = Duration::from_millis(4500);
    assert!(busy_for > 4 * SILENCE + Duration::from_secs(2), "beyond every backstop that goes by the deadlines");
    let outcome = |engine: &mut Engine, _: &Small| engine.step()?.outcome().map(|outcome| assert!(outcome.updated));
    let forward = |engine: &mut Engine, small: &Small| {
        let handle = engine.step()?;
        engine.pass(small.chunk, 0, false, Mode::Eval)?.enter(small.first)?;
        handle.outcome().map(drop)
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (result, waited) = wait_for_a_busy_rank("evaluates", 4 * busy_for, busy_for, outcome);
            result.unwrap();
            assert!(waited > busy_for / 2, "{waited:?}");
        });
        scope.spawn(move || wait_for_a_busy_rank("saves a checkpoint", 4 * busy_for, busy_for, forward).0.unwrap());
    });
    for reason in ["evaluates", "saves a checkpoint"] {
        let warnings = warnings_of(reason);
        assert!((3..=30).contains(&warnings.len()), "one every 150 ms of 4.5 s: {warnings:#?}");
        let named = |line: &String| ["rank=0", "step=0", "bucket=", "busy=1"].iter().all(|field| line.contains(field));
        assert!(warnings.iter().all(named), "{warnings:#?}");
    }
}

#[test]
fn a_rank_that_is_busy_beyond_its_limit_fails_those_who_wait_for_it() {
    let (limit, busy_for) = (Duration::from_millis(600), Duration::from_millis(2500));
    let outcome = |engine: &mut Engine, _: &Small| engine.step()?.outcome().map(drop);
    let (result, waited) = wait_for_a_busy_rank("sleeps", limit, busy_for, outcome);
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
    assert!(error.message().contains("rank 1 is busy (sleeps) beyond its limit of 0.6 s"), "{error}");
    assert!(limit / 2 < waited && waited < busy_for, "{waited:?}");
}
