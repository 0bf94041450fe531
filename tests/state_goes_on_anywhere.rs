//! The optimizer's state is taken from an engine and put into another one, with any number of ranks, and training goes on from
//! it bit for bit (SPEC D1). Trained parameters of the second engine start from other values, so nothing but the state can
//! bring them there.
#![allow(clippy::unwrap_used)]

mod reference;
mod small;
mod synthetic;

use gatherflow::{Internals, Layout, Ranks, Skip, State};
use reference::{Scaler, rounded};
use synthetic::{Expected, Job, Net, Setting, Trainer, serial, serial_from};

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

/// Case 13 with a dynamic scaler in mid-course: its counters go on, a good step before the growth and a bad one before the
/// back-off.
#[test]
fn the_loss_scaler_goes_on_where_it_was() {
    let net = Net::mixed(true);
    let job = Job {
        scaler: Some(Scaler::new(512.0, 3, 2)),
        overflow: |step, rank| [2, 3, 9].contains(&step) && rank == 0,
        ..Job::new(&net, 2, 12, &all)
    };
    let expected = serial(&job);
    for (index, setting) in settings().enumerate() {
        let state = state_after(&job, &expected, &setting, [3, 5, 10][index % 3]);
        let scaler = state.scaler.unwrap();
        let stands = (scaler.scale.to_bits(), scaler.growth_counter, scaler.hysteresis);
        assert_eq!(
            stands,
            [(512_f32, 0, 1), (256., 1, 0), (512., 0, 1)].map(|(s, g, h)| (s.to_bits(), g, h))[index % 3]
        );
        resume(&job, &expected, &setting, &state);
    }
}

#[test]
fn experts_model_parallel_ranks_and_copies_of_a_weight_go_on_too() {
    for (net, ranks, model_parallel) in [
        (Net::with_copies(), 3, 1),
        (Net::with_experts(2), 4, 1),
        (Net::parallel(2), 4, 2),
        (Net::parallel(2), 8, 2),
        (Net::parallel(1), 3, 3),
    ] {
        let program = |_: u64, _: usize| vec![(0..net.units.len()).collect()];
        let job = Job { model_parallel, ..Job::new(&net, ranks, 4, &program) };
        let expected = serial(&job);
        for setting in Setting::modes_and_storages().step_by(3) {
            let state = state_after(&job, &expected, &setting, 2);
            resume(&job, &expected, &setting, &state);
        }
    }
}

/// In the middle of a run an engine goes back to an earlier state, and does the steps since then again.
#[test]
fn an_engine_goes_back_to_a_state_with_gathers_pending_and_outcomes_unknown() {
    let net = Net::mixed(false);
    let job = Job { overflow: |step, rank| step == 3 && rank == 1, ..Job::new(&net, 2, 7, &all) };
    let expected = serial(&job);
    for setting in settings() {
        let setting = Setting { steps_in_flight: 3, verdict_delay: std::time::Duration::from_micros(300), ..setting };
        let state = state_after(&job, &expected, &setting, 2);
        job.on_ranks(&expected, &setting, |mut trainer| {
            trainer.train(5);
            trainer.load(&state);
            trainer.train(1);
            assert_eq!(trainer.engine.state().unwrap().steps, 3);
            trainer.train_to_the_end()
        });
    }
}

/// Case 15. Buckets, layout, mode and storage change with the number of ranks. What was loaded is what was saved, bit for bit, on
/// every rank; and from there each number of ranks trains as the serial reference with as many does.
#[test]
fn saved_with_any_number_of_ranks_and_loaded_with_any_other_state_is_bit_equal() {
    const RANKS: [usize; 8] = [1, 2, 3, 5, 7, 8, 12, 24];
    let net = Net::mixed(false);
    let settings: Vec<_> = settings().collect();
    let job = |index: usize| Job {
        bucket_size: [128, 1, 1 << 20][index % 3],
        layout: [Layout::Standard, Layout::Reference][index % 2],
        ..Job::new(&net, RANKS[index], 3, &all)
    };
    for from in 0..RANKS.len() {
        let saving = job(from);
        let state = state_after(&saving, &serial(&saving), &settings[from], 2);
        for to in 0..RANKS.len() {
            let loading = job(to);
            let expected = serial_from(&loading, &state);
            let setting = &settings[(from * 3 + to * 5) % settings.len()];
            let parts = on_ranks(&loading, setting, |rank| {
                let trainer = Trainer::resume(rank, &loading, setting, &expected, &state);
                let part = trainer.engine.state().unwrap();
                net.params().iter().for_each(|p| drop(trainer.outside(p.id)));
                trainer.train_to_the_end();
                part
            });
            let again = State::merge(parts).unwrap();
            assert!(bits(&again) == bits(&state), "{} ranks to {}", saving.ranks, loading.ranks);
        }
    }
}
