//! The optimizer's state is taken from an engine and put into another one, with any number of ranks, and training goes on from
//! it bit for bit (SPEC D1). The second engine starts from the initial values again, so nothing but the state can bring it on.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use std::time::Duration;

use gatherflow::{ErrorKind, Internals, Layout, Skip, State};
use reference::{Scaler, rounded};
use synthetic::{Job, Net, Setting, Trainer, bits, serial, serial_from};

/// Every mode and storage, skips decided by either.
fn settings() -> impl Iterator<Item = Setting> {
    let skips = |setting| [Skip::Host, Skip::Device].map(|skip| Setting { skip, ..setting });
    Setting::modes_and_storages().flat_map(skips)
}

fn all(_: u64, _: usize) -> Vec<Vec<usize>> {
    vec![(0..6).collect()]
}

/// Case 13. The state is taken with gathers pending and before any forward, and goes on in another mode and storage, with a step
/// that is skipped.
#[test]
fn saved_right_after_a_step_masters_are_the_parameters_on_all_ranks_and_the_resumed_run_is_bit_exact() {
    let net = Net::mixed(false);
    let job = Job { overflow: |step, rank| step == 3 && rank == 1, ..Job::new(&net, 3, 6, &all) };
    let expected = serial(&job);
    let others: Vec<_> = settings().collect();
    for (setting, other) in settings().zip(others.into_iter().rev()) {
        let (parts, params): (Vec<_>, Vec<_>) = job.parts_after(&expected, &setting, 3).into_iter().unzip();
        let whole = State::merge(parts).unwrap();
        assert_eq!(whole.groups.iter().map(|group| group.t).collect::<Vec<_>>(), [3, 3, 3]);
        assert_eq!(whole.tensors.len(), net.params().iter().filter(|p| p.options.trainable).count());
        for tensor in &whole.tensors {
            let info = net.params().iter().find(|p| p.name == tensor.name).unwrap();
            let masters: Vec<f32> = tensor.pieces[0].master.iter().map(|m| rounded(info.dtype, *m)).collect();
            for on_rank in &params {
                assert_eq!(on_rank[info.id.index()], masters, "`{}`", info.name);
            }
        }
        let again = job.resume(&expected, &other, &whole);
        assert!(bits(&again) == bits(&whole), "{setting:?} to {other:?}");
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
        let state = saving.state_after(&serial(&saving), &settings[from], 2);
        for to in 0..RANKS.len() {
            let (loading, setting) = (job(to), &settings[(from * 3 + to * 5) % settings.len()]);
            let again = loading.resume(&serial_from(&loading, &state), setting, &state);
            assert!(bits(&again) == bits(&state), "{} ranks to {}", saving.ranks, loading.ranks);
        }
    }
}

/// The dynamic scaler in mid-course: one good step before growth, and one bad one before back-off.
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
        let (steps, scale, growth_counter, hysteresis) =
            [(3, 512.0_f32, 0, 1), (5, 256.0, 1, 0), (10, 512.0, 0, 1)][index % 3];
        let state = job.state_after(&expected, &setting, steps);
        let scaler = state.scaler.unwrap();
        assert_eq!(scaler.scale.to_bits(), scale.to_bits());
        assert_eq!((scaler.growth_counter, scaler.hysteresis), (growth_counter, hysteresis));
        job.resume(&expected, &setting, &state);
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
            let state = job.state_after(&expected, &setting, 2);
            assert!(bits(&job.resume(&expected, &setting, &state)) == bits(&state));
        }
    }
}

/// As many groups of experts and model-parallel ranks as before, each with another number of ranks: every rank finds its own.
/// With other numbers of them nobody could say what is whose.
#[test]
fn experts_and_model_parallel_parts_go_to_as_many_others_and_are_refused_by_name_otherwise() {
    let parallel = [1, 2, 3].map(Net::parallel);
    let units = parallel[0].units.len();
    let program = move |_: u64, _: usize| vec![(0..units).collect()];
    let job =
        |of: usize, ranks, model_parallel| Job { model_parallel, ..Job::new(&parallel[of - 1], ranks, 3, &program) };
    let setting = Setting::modes()[3];
    // Two groups of experts on two ranks each, two model-parallel ranks.
    let saved = job(2, 8, 2);
    let state = saved.state_after(&serial(&saved), &setting, 2);
    for (of, ranks) in [(1, 4), (3, 12)] {
        let job = job(of, ranks, 2);
        let loaded = job.on_seats(&setting, |rank| {
            let expected = serial(&job);
            let mut trainer = Trainer::start(rank, &job, &setting, Internals::default(), &expected);
            trainer.engine.load_state(&state).unwrap();
            let part = trainer.engine.state().unwrap();
            trainer.engine.close().unwrap();
            part
        });
        assert!(bits(&State::merge(loaded).unwrap()) == bits(&state), "experts on {of} of {ranks} ranks");
    }
    for (of, ranks, model_parallel, words) in [
        (2, 4, 2, ["`expert.weight` comes in parts (experts 0; experts 1)", "in others (one) here"]),
        (2, 12, 2, ["`expert.weight` comes in parts (experts 0; experts 1)", "(experts 0; experts 1; experts 2) here"]),
        (2, 4, 1, ["`column.weight` comes in parts (model-parallel rank 0; model-parallel rank 1)", "in others (one)"]),
    ] {
        let job = job(of, ranks, model_parallel);
        let expected = serial(&job);
        job.on_ranks(&expected, &setting, |mut trainer| {
            let error = trainer.engine.load_state(&state).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::State);
            assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
        });
    }
}

/// In the middle of a run an engine goes back to an earlier state and does the steps since then again.
#[test]
fn an_engine_goes_back_to_a_state_with_gathers_pending_and_outcomes_unknown() {
    let net = Net::mixed(true);
    let job = Job {
        scaler: Some(Scaler::new(512.0, 2, 1)),
        overflow: |step, rank| step == 3 && rank == 1,
        ..Job::new(&net, 2, 7, &all)
    };
    let expected = serial(&job);
    for setting in settings() {
        let setting = Setting { steps_in_flight: 3, verdict_delay: Duration::from_micros(300), ..setting };
        let state = job.state_after(&expected, &setting, 2);
        job.on_ranks(&expected, &setting, |mut trainer| {
            trainer.train(5);
            trainer.load(&state);
            trainer.train(1);
            assert_eq!(trainer.engine.state().unwrap().steps, 3);
            trainer.train_to_the_end()
        });
    }
}

/// Two ranks save a file each; three open both, with other buckets and in the other storage, and train as the serial reference
/// with three does; two go on as if they had never stopped.
#[test]
fn parts_of_two_ranks_in_files_go_on_with_three_in_other_buckets_and_storage() {
    let net = Net::mixed(true);
    let scaler = Some(Scaler::new(512.0, 3, 2));
    let saving = Job { scaler, overflow: |step, rank| step == 2 && rank == 0, ..Job::new(&net, 2, 5, &all) };
    let expected = serial(&saving);
    for (number, (setting, other)) in
        Setting::modes_and_storages().zip(Setting::modes_and_storages().skip(1)).enumerate()
    {
        let path = |rank: usize| format!("{}/{number}-of-rank-{rank}.safetensors", env!("CARGO_TARGET_TMPDIR"));
        let parts = saving.parts_after(&expected, &setting, 3).into_iter().enumerate();
        let parts: Vec<State> = parts.map(|(rank, (part, _))| part.save(path(rank)).map(|()| part).unwrap()).collect();
        let whole = State::merge([1, 0].map(|rank| State::open(path(rank)).unwrap())).unwrap();
        assert!(bits(&whole) == bits(&State::merge(parts).unwrap()));
        let loading = Job { ranks: 3, bucket_size: 1, ..saving };
        for (job, expected) in [(&loading, &serial_from(&loading, &whole)), (&saving, &expected)] {
            assert!(bits(&job.resume(expected, &other, &whole)) == bits(&whole), "{setting:?} to {other:?}");
        }
    }
}
