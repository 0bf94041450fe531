//! Log lines have targets under `gatherflow::` and name rank, step and bucket where these are known.
#![allow(clippy::unwrap_used)]

mod small;

use std::io::Write;
use std::sync::{Mutex, Once};

use gatherflow::{DType, Engine, Internals, Mode, Model, Rank};
use gatherflow_kernels::cpu::{BeforeWork, Inject};
use gatherflow_kernels::{CollectiveKind, Work};
use small::{config, microbatch, on_ranks};

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

/// Lines are kept for the whole process, from all threads: devices and actors log on their own.
fn logging() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::TRACE).with_writer(|| Log).init();
    });
}

/// The lines that contain all of these words.
fn lines(words: &[&str]) -> Vec<String> {
    let text = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(ToOwned::to_owned).collect()
}

fn engine(rank: Rank, internals: Internals) -> (Engine, small::Small) {
    let (model, small) = small::model();
    let engine = Engine::with_internals(rank, model, config(), internals, |_, out| out.fill_with(|_| 0.5)).unwrap();
    (engine, small)
}

#[test]
fn a_collective_that_fails_is_logged_with_its_rank_step_and_bucket() {
    logging();
    on_ranks(2, |rank| {
        let mut internals = Internals::default();
        if rank.rank() == 1 {
            internals.open.before_work = Some(BeforeWork::new(|work| match work {
                Work::Collective(collective) if collective.key.kind == CollectiveKind::Reduce => {
                    Inject::Fail("drill of a reduce".into())
                }
                _ => Inject::Nothing,
            }));
        }
        let (mut engine, small) = engine(rank, internals);
        microbatch(&engine, &small, true, 1.0);
        engine.step().and_then(|step| step.outcome()).unwrap_err();
    });
    let failed = "drill of a reduce";
    for target in ["gatherflow::cpu", "gatherflow::supervisor"] {
        for rank in ["rank=0", "rank=1"] {
            let lines = lines(&[&format!(" {target}: "), failed, rank]);
            let named = |line: &String| line.contains("step=0") && line.contains("bucket=");
            assert!(!lines.is_empty() && lines.iter().all(named), "{target}, {rank}: {lines:#?}");
        }
    }
    let elsewhere = |line: &&String| !line.contains(" gatherflow::");
    assert_eq!(lines(&[failed]).iter().find(elsewhere), None);
}

#[test]
fn what_cannot_overlap_is_said_once_at_the_start_by_rank_0() {
    logging();
    on_ranks(2, |rank| {
        let mut model = Model::new();
        let chunk = model.chunk();
        let unit = model.unit(chunk, "only").unwrap();
        model.param(unit, "only.weight", &[64], DType::F32).unwrap();
        Engine::new(rank, model, config(), |_, out| out.fill_with(|_| 0.5)).unwrap();
    });
    let told = lines(&["one bucket: its gather has no other unit to hide under"]);
    assert!(
        matches!(&told[..], [line] if line.contains("INFO gatherflow::engine: ") && line.contains("rank=0")),
        "{told:#?}"
    );
}

#[test]
fn an_abandoned_gradient_is_logged_with_its_rank_step_and_bucket() {
    logging();
    let (engine, small) = engine(gatherflow::Ranks::local(1).unwrap().remove(0), Internals::default());
    let pass = engine.pass(small.chunk, 0, true, Mode::Train).unwrap();
    pass.enter(small.first).unwrap();
    drop(pass.backward(small.first).unwrap().grad::<f32>(small.tied).unwrap());
    let bucket = format!("bucket={}", small::bucket_of(&engine, Some("tied")).unwrap());
    let lines = lines(&["WARN gatherflow::gradients: ", "abandoned", "rank=0", "step=0", "param=tied", &bucket]);
    assert_eq!(lines.len(), 1);
}
