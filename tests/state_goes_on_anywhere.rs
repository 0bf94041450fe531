//! The optimizer's state is taken from an engine and put into another one, with any number of ranks, and training goes on from
//! it bit for bit (SPEC D1). Trained parameters of the second engine start from other values, so nothing but the state can
//! bring them there.
#![allow(clippy::unwrap_used)]

mod reference;
mod small;
mod synthetic;

use gatherflow::{Internals, Ranks, Skip, State, Storage};
use reference::{Scaler, rounded};
use synthetic::{Expected, Job, Net, Setting, Trainer, serial};

/// Every mode and storage, skips decided by either.
fn settings() -> impl Iterator<Item = Setting> {
    let skips = |setting| [Skip::Host, Skip::Device].map(|skip| Setting { skip, ..setting });
    Setting::modes_and_storages().flat_map(skips)
}

fn on_ranks<T: Send>(job: &Job<'_>, setting: &Setting, run: impl Fn(gatherflow::Rank) -> T + Sync) -> Vec<T> {
    let run = &run;
    let ranks = Ranks::with_config(job.ranks, &job.config(setting)).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The first steps of a job, and its state right after the last of them, before anything waits for it.
fn state_after(job: &Job<'_>, expected: &Expected, setting: &Setting, steps: u64) -> State {
    let parts = on_ranks(job, setting, |rank| {
        let mut trainer = Trainer::start(rank, job, setting, Internals::default(), expected);
        trainer.train(steps);
        let state = trainer.engine.state().unwrap();
        trainer.finish();
        state
    });
    State::merge(parts).unwrap()
}

/// What is left of a job after a state, compared with the reference that was never interrupted.
fn resume(job: &Job<'_>, expected: &Expected, setting: &Setting, state: &State) {
    on_ranks(job, setting, |rank| {
        let number = rank.rank();
        let trainer = Trainer::resume(rank, job, setting, expected, state);
        assert_eq!(trainer.engine.state().unwrap().steps, state.steps, "rank {number}");
        trainer.train_to_the_end();
    });
}

/// All bits of a whole state.
fn bits(state: &State) -> Vec<(String, Vec<u32>)> {
    let tensor = |t: &gatherflow::TensorState| {
        let fields = t.pieces.iter().flat_map(|p| [&p.master, &p.exp_avg, &p.exp_avg_sq]).flatten();
        (format!("{} {} {:?} {}", t.name, t.part, t.shape, t.group), fields.map(|x| x.to_bits()).collect())
    };
    let shared = format!("{} {:?} {:?}", state.steps, state.groups, state.scaler);
    std::iter::once((shared, vec![])).chain(state.tensors.iter().map(tensor)).collect()
}

fn all(_: u64, _: usize) -> Vec<Vec<usize>> {
    vec![(0..6).collect()]
}

/// Case 13. The state is taken right after a step, with gathers pending and before any forward.
#[test]
fn saved_right_after_a_step_masters_are_the_parameters_on_all_ranks_and_the_resumed_run_is_bit_exact() {
    let net = Net::mixed(false);
    let job = Job { overflow: |step, rank| step == 4 && rank == 1, ..Job::new(&net, 3, 7, &all) };
    let expected = serial(&job);
    let others: Vec<_> = settings().collect();
    for (setting, other) in settings().zip(others.into_iter().rev()) {
        let parts = on_ranks(&job, &setting, |rank| {
            let mut trainer = Trainer::start(rank, &job, &setting, Internals::default(), &expected);
            trainer.train(3);
            let state = trainer.engine.state().unwrap();
            let params: Vec<_> = net.params().iter().map(|p| trainer.outside(p.id)).collect();
            trainer.finish();
            (state, params)
        });
        let (parts, params): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let whole = State::merge(parts).unwrap();
        assert_eq!(whole.groups.iter().map(|group| group.t).collect::<Vec<_>>(), [3, 3, 3]);
        for tensor in &whole.tensors {
            let info = net.params().iter().find(|p| p.name == tensor.name).unwrap();
            let masters: Vec<f32> = tensor.pieces[0].master.iter().map(|m| rounded(info.dtype, *m)).collect();
            for on_rank in &params {
                assert_eq!(on_rank[info.id.index()], masters, "`{}`", info.name);
            }
        }
        resume(&job, &expected, &other, &whole);
    }
}
