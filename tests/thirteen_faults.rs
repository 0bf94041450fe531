//! Thirteen faults of the optimizer that this one takes as its starting point, one test each that they are not here, in every
//! overlap mode. Most links are slow, so that reads do come before their gathers. Where a fault is about saved files, its test is
//! about the state that such a file is made of.
#![allow(clippy::unwrap_used)]
#![allow(clippy::redundant_closure_for_method_calls)] // the method is of one lifetime, the closure of any

mod reference;
mod small;
mod synthetic;

use std::sync::Mutex;

use gatherflow::{
    DType, Element, ErrorKind, FirstGather, GroupId, Internals, Link, Mode, Overlap, ParamId, ParamOptions, Ranks,
    State, bf16,
};
use gatherflow_actors::plan;
use gatherflow_kernels::{AccessMode, BufRange};
use reference::Scaler;
use synthetic::{Job, Net, Setting, Trainer, bits, serial, serial_from, shuffled};

/// Every overlap mode in both storages over a link that takes its time.
fn slow_modes() -> impl Iterator<Item = Setting> {
    let link = Some(Link::parse("1gbit,300us").unwrap());
    Setting::modes_and_storages().map(move |mode| Setting { link, ..mode })
}

/// Trains a job in every mode, compared with the reference; `after` runs on each rank after each step.
fn in_every_mode(job: &Job<'_>, after: impl Fn(&Trainer<'_>) + Sync) {
    let expected = serial(job);
    for setting in slow_modes() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            for _ in 0..job.steps {
                trainer.train_one();
                after(&trainer);
            }
            trainer.finish()
        });
    }
}

fn elements<T: Element>(trainer: &Trainer<'_>, range: BufRange) -> Vec<f32> {
    let lease = trainer.engine.session().device().lease(range, AccessMode::Read).unwrap();
    lease.as_slice::<T>().unwrap().iter().map(|x| x.to_f32()).collect()
}

fn elements_of(trainer: &Trainer<'_>, range: BufRange, dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => elements::<bf16>(trainer, range),
        DType::F16 => elements::<gatherflow::f16>(trainer, range),
        _ => elements::<f32>(trainer, range),
    }
}

/// The infinite gradient of a skipped step is in the memory of units that the next step never visits.
#[test]
fn fault_1_a_skipped_step_leaves_no_gradient_behind_and_f16_training_recovers() {
    let mut net = Net::empty();
    net.chunk();
    for index in 0..4 {
        net.unit(&format!("layer {index}"));
        net.param(&format!("layer {index}.weight"), 100, DType::F16, ParamOptions::default());
        net.param(&format!("layer {index}.bias"), 30, DType::F32, ParamOptions::default());
    }
    let program = |step: u64, _: usize| match step % 3 {
        0 => vec![vec![0, 1, 2, 3]; 2],
        1 => vec![vec![1, 2]],
        _ => vec![vec![3, 0]],
    };
    let job = Job {
        scaler: Some(Scaler::new(4_294_967_296.0, 100, 1)),
        overflow: |step, rank| step % 6 == 0 && step < 20 && rank == 1,
        may_stand_still: true,
        ..Job::new(&net, 2, 30, &program)
    };
    let expected = serial(&job);
    let skipped = expected.verdicts.iter().filter(|v| !v.updated).count();
    assert!(!expected.verdicts[0].updated && (4..=15).contains(&skipped), "{skipped} steps are skipped");
    in_every_mode(&job, |_| ());
}

#[test]
fn fault_2_forward_in_another_order_than_buckets_never_uses_last_steps_weights() {
    let net = Net::mixed(false);
    in_every_mode(&Job::new(&net, 2, 6, &|step, rank| vec![shuffled(6, &[9, step, rank as u64])]), |_| ());
    in_every_mode(&Job::new(&net, 2, 4, &|_, _| vec![(0..6).rev().collect()]), |_| ());
}

/// What a checkpoint right after a step would hold: 16-bit parameters are the masters, rounded, and both are new.
#[test]
fn fault_3_right_after_a_step_evaluation_and_parameters_agree_with_the_masters() {
    let net = Net::mixed(false);
    in_every_mode(&Job::new(&net, 2, 4, &|_, _| vec![(0..6).collect()]), |trainer| {
        if trainer.engine.steps() % 2 == 0 {
            trainer.evaluate();
        }
        // The state that is taken here has the same masters as the memory of buckets.
        for tensor in &trainer.engine.state().unwrap().tensors {
            let param = net.params().iter().find(|p| p.name == tensor.name).unwrap();
            for piece in &tensor.pieces {
                let values = trainer.outside(param.id)[piece.start..piece.start + piece.master.len()].to_vec();
                let rounded: Vec<f32> = piece.master.iter().map(|m| reference::rounded(param.dtype, *m)).collect();
                assert_eq!(values, rounded, "{tensor:?}");
            }
        }
        for bucket in trainer.engine.plan().buckets() {
            for piece in trainer.engine.plan().owned(plan::Rank(trainer.rank()), bucket.id) {
                let param = &trainer.outside(piece.param)[piece.in_param.start..piece.in_param.end];
                let memory = trainer.engine.session().bucket_memory(bucket.id);
                let master = &elements::<f32>(trainer, memory.master)[piece.in_shard.start..piece.in_shard.end];
                let rounded: Vec<f32> = master.iter().map(|m| reference::rounded(memory.dtype, *m)).collect();
                assert_eq!(param, rounded, "{bucket:?}");
            }
        }
    });
}

#[test]
fn fault_4_f32_parameters_beside_bf16_ones_keep_their_full_precision() {
    let mut net = Net::empty();
    net.chunk();
    net.unit("unit");
    net.param("half", 150, DType::Bf16, ParamOptions::default());
    let full = net.param("full", 150, DType::F32, ParamOptions::default());
    in_every_mode(&Job::new(&net, 2, 3, &|_, _| vec![vec![0]]), |trainer| {
        let exact = |x: &f32| bf16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        let values = trainer.outside(full);
        let narrow = values.iter().filter(|x| exact(x)).count();
        assert!(narrow < 10, "{narrow} of 150 values would fit into bf16");
    });
}

/// State is found by parameter, not by its place in a list: masters and moments of each are the reference's.
#[test]
fn fault_5_f32_and_16_bit_parameters_of_one_group_keep_their_own_state() {
    let net = alternating();
    for bucket_size in [1, 128, 1 << 20] {
        in_every_mode(&Job { bucket_size, ..Job::new(&net, 3, 3, &|_, _| vec![vec![0]]) }, |_| ());
    }
}

/// All parameters are as long as each other, so nothing but their names tells them apart.
#[test]
fn fault_5_saved_and_loaded_in_other_buckets_every_parameter_finds_its_own_state() {
    let net = alternating();
    let job = |bucket_size| Job { bucket_size, ..Job::new(&net, 3, 3, &|_, _| vec![vec![0]]) };
    for (index, setting) in slow_modes().enumerate() {
        let sizes = [1, 128, 1 << 20];
        let (saving, loading) = (job(sizes[index % 3]), job(sizes[(index + 1) % 3]));
        let state = saving.state_after(&serial(&saving), &setting, 2);
        assert!(bits(&loading.resume(&serial_from(&loading, &state), &setting, &state)) == bits(&state));
    }
}

/// f32 and bf16 parameters in turn, of one group.
fn alternating() -> Net {
    let mut net = Net::empty();
    net.chunk();
    net.unit("unit");
    for index in 0..8 {
        let dtype = if index % 2 == 0 { DType::F32 } else { DType::Bf16 };
        net.param(&format!("{index}"), 70, dtype, ParamOptions { group: GroupId(1), ..ParamOptions::default() });
    }
    net
}

#[test]
fn fault_6_zero_grad_twice_is_as_good_as_never() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 4, &|_, _| vec![(0..6).collect(); 2]);
    let expected = serial(&job);
    for setting in slow_modes() {
        for first_gather in [FirstGather::Step, FirstGather::ZeroGrad, FirstGather::Forward] {
            job.on_ranks(&expected, &Setting { first_gather, ..setting }, |mut trainer| {
                for step in 0..job.steps {
                    for _ in 0..step {
                        trainer.engine.zero_grad().unwrap();
                    }
                    trainer.train_one();
                    trainer.engine.zero_grad().unwrap();
                }
                trainer.finish()
            });
        }
    }
}

#[test]
fn fault_7_buckets_of_another_size_on_one_rank_are_an_error_on_all_ranks() {
    for config in small::in_modes_and_storages(&small::config()) {
        let errors = small::on_ranks(3, |rank| {
            let bucket_size = if rank.rank() == 1 { 128 } else { 64 };
            small::engine(rank, config.clone().bucket_size(bucket_size)).map(drop).unwrap_err()
        });
        for error in &errors {
            assert_eq!(error.kind(), ErrorKind::StartUp, "{error}");
            assert!(error.to_string().contains("bucket size"), "{error}");
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
}

/// The bucket size may differ from the one that the state was saved with; what one rank alone has wrong is told on all.
#[test]
fn fault_7_a_state_that_one_rank_has_wrong_is_an_error_on_all_ranks_and_other_buckets_are_none() {
    for config in small::in_modes_and_storages(&small::config()) {
        let parts = small::on_ranks(3, |rank| small::engine(rank, config.clone()).unwrap().0.state().unwrap());
        let state = State::merge(parts).unwrap();
        let errors = small::on_ranks(2, |rank| {
            let mut engine = small::engine(rank, config.clone().bucket_size(1 << 20)).unwrap().0;
            let mut own = state.clone();
            if engine.rank() == 1 {
                own.tensors[0].pieces[0].exp_avg.pop();
            }
            let error = engine.load_state(&own).unwrap_err();
            engine.load_state(&state).unwrap();
            engine.close().unwrap();
            error
        });
        for error in &errors {
            assert_eq!(error.kind(), ErrorKind::State, "{error}");
            assert!(error.to_string().contains("rank 1 has the state to load = refused: a piece of `tied`"), "{error}");
            assert_eq!(error.message(), errors[0].message());
        }
    }
}

/// All that a file could be made of, before the first step and after each: padding is zero, moments start at zero.
#[test]
fn fault_8_padding_is_zero_at_all_times_and_all_state_is_there_before_the_first_step() {
    let check = |trainer: &Trainer<'_>| {
        trainer.engine.ensure_params_ready().unwrap();
        let session = trainer.engine.session();
        for bucket in trainer.engine.plan().buckets() {
            let (memory, start) = (session.bucket_memory(bucket.id), bucket.range.start);
            trainer.engine.session().gradient_free(bucket.params[0]).unwrap();
            let mut padding = vec![true; bucket.range.len()];
            for param in &bucket.params {
                let home = trainer.engine.plan().param(*param).home.range();
                padding[home.start - start..home.end - start].fill(false);
            }
            let shard = trainer.engine.plan().shard(plan::Rank(trainer.rank()), bucket.id).len();
            let own = &padding[trainer.rank() * shard..(trainer.rank() + 1) * shard];
            let zero = |what: &str, values: Vec<f32>, padding: &[bool]| {
                assert_eq!(values.len(), padding.len());
                let unclean = values.iter().zip(padding).position(|(x, padding)| *padding && x.to_bits() != 0);
                assert_eq!(unclean, None, "{what} of {bucket:?}");
            };
            zero("parameters", elements_of(trainer, memory.params, memory.dtype), &padding);
            zero("gradients", elements_of(trainer, memory.grads, memory.grad_dtype), &padding);
            let state = [memory.reduced, memory.master, memory.exp_avg, memory.exp_avg_sq];
            for range in state {
                zero("state", elements::<f32>(trainer, range), own);
            }
            if trainer.engine.steps() == 0 {
                for range in [memory.exp_avg, memory.exp_avg_sq] {
                    zero("moments", elements::<f32>(trainer, range), &vec![true; shard]);
                }
                let (master, param) = (memory.master, elements_of(trainer, memory.param_shard, memory.dtype));
                assert_eq!(elements::<f32>(trainer, master), param, "masters of {bucket:?}");
            }
        }
    };
    for (ranks, bucket_size) in [(1, 1), (2, 128), (3, 1), (8, 1 << 20)] {
        let net = Net::mixed(false);
        let job = Job { bucket_size, ..Job::new(&net, ranks, 2, &|_, _| vec![(0..6).collect()]) };
        let expected = serial(&job);
        for setting in Setting::modes_and_storages() {
            job.on_ranks(&expected, &setting, |mut trainer| {
                check(&trainer);
                for _ in 0..job.steps {
                    trainer.train_one();
                    check(&trainer);
                }
                trainer.finish()
            });
        }
    }
}

/// Nothing but the owned elements is in it, and they are the initial parameters.
#[test]
fn fault_8_state_can_be_taken_before_the_first_step_holds_no_padding_and_goes_on() {
    for (ranks, bucket_size) in [(1, 1), (2, 128), (3, 1), (8, 1 << 20)] {
        let net = Net::mixed(false);
        let job = Job { bucket_size, ..Job::new(&net, ranks, 2, &|_, _| vec![(0..6).collect()]) };
        let expected = serial(&job);
        for setting in Setting::modes_and_storages() {
            let state = job.state_after(&expected, &setting, 0);
            for tensor in &state.tensors {
                let param = net.params().iter().find(|p| p.name == tensor.name).unwrap();
                let [piece] = &tensor.pieces[..] else { panic!("{tensor:?}") };
                assert_eq!(piece.master, expected.weights[0][param.id.index()]);
                let zeros = vec![0; param.numel];
                for moments in [&piece.exp_avg, &piece.exp_avg_sq] {
                    assert_eq!(moments.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), zeros);
                }
            }
            assert_eq!((state.steps, state.groups.iter().map(|group| group.t).sum::<u64>()), (0, 0));
            job.resume(&expected, &setting, &state);
        }
    }
}

/// Two models in one process, on the same threads, in turn; and every trainable parameter is in a bucket, or there is no plan.
#[test]
fn fault_9_a_second_model_in_the_process_trains_beside_the_first_and_no_parameter_is_dropped() {
    let (one, other) = (Net::mixed(false), Net::mixed(true));
    let first = Job::new(&one, 2, 4, &|_, _| vec![(0..6).collect()]);
    let scaler = Some(Scaler::new(64.0, 100, 1));
    let second = Job { scaler, ..Job::new(&other, 2, 4, &|_, _| vec![(0..6).rev().collect(); 2]) };
    let (expected_of_first, expected_of_second) = (serial(&first), serial(&second));
    let others: Vec<_> = Setting::modes_and_storages().collect();
    for (setting, other_setting) in slow_modes().zip(others.into_iter().rev()) {
        let ranks = Ranks::with_config(2, &second.config(&other_setting)).unwrap();
        let ranks = Mutex::new(ranks.into_iter().map(Some).collect::<Vec<_>>());
        first.on_ranks(&expected_of_first, &setting, |mut a| {
            let rank = ranks.lock().unwrap()[a.rank()].take().unwrap();
            let mut b = Trainer::start(rank, &second, &other_setting, Internals::default(), &expected_of_second);
            for _ in 0..first.steps {
                a.microbatches_with(|_| ());
                b.train_one();
                a.step();
            }
            b.finish();
            a.finish()
        });
    }
    for net in [&one, &other] {
        let job = if std::ptr::eq(net, &raw const one) { &first } else { &second };
        let plan = net.model.plan(2, &job.config(&Setting::of(Overlap::None))).unwrap();
        for param in net.params().iter().filter(|p| p.options.trainable) {
            let times = plan.buckets().iter().filter(|bucket| bucket.params.contains(&param.id)).count();
            assert_eq!(times, 1, "`{}` is in {times} buckets", param.name);
        }
    }
}

/// Steps that follow one another without a forward in between: every gather of the one before is pending.
#[test]
fn fault_10_gathers_in_flight_when_the_next_step_ends_are_not_forgotten() {
    let net = Net::mixed(false);
    let job = Job::new(&net, 2, 9, &|step, _| if step % 4 == 0 { vec![(0..6).collect()] } else { vec![] });
    let expected = serial(&job);
    for setting in slow_modes() {
        for steps_in_flight in [1, 3] {
            let buckets = job.on_ranks(&expected, &Setting { steps_in_flight, ..setting }, |trainer| {
                let buckets = trainer.engine.plan().buckets().len() as u64;
                assert_eq!(trainer.train_to_the_end().counters.gathers, buckets * 9, "one gather per bucket and step");
                buckets
            });
            assert!(buckets[0] > 5);
        }
    }
}

/// The rates of a group follow its t, and so do its bias corrections. Group 1 lives on one rank of four, group 2 on none.
#[test]
fn fault_11_a_group_that_is_empty_on_some_ranks_keeps_its_t_on_all() {
    let (net, one) = lonely_group();
    let job = Job {
        overflow: |step, rank| step == 2 && rank == 3,
        bucket_size: 1,
        ..Job::new(&net, 4, 6, &|_, _| vec![vec![0]])
    };
    let rates = |step: usize| serial(&job).verdicts[step].learning_rates[1].to_bits();
    assert!(rates(0) > rates(1) && rates(2) == rates(3) && rates(3) > rates(4), "a skipped step does not count");
    in_every_mode(&job, |trainer| {
        let plan = trainer.engine.plan();
        let bucket = plan.bucket_of(one).unwrap();
        let owners = (0..4).filter(|rank| !plan.owned(plan::Rank(*rank), bucket).is_empty());
        assert_eq!(owners.collect::<Vec<_>>(), [0]);
        assert_eq!(trainer.outcome(trainer.engine.steps() - 1).learning_rates.len(), 3);
    });
}

/// Ranks of which most have nothing of two groups save and load their t, and bias corrections and rates go on from it.
#[test]
fn fault_11_saved_by_ranks_that_have_nothing_of_it_a_group_keeps_its_t_on_any_number_of_ranks() {
    let (net, _) = lonely_group();
    let job = |ranks| Job {
        overflow: |step, rank| step == 2 && rank == 0,
        bucket_size: 1,
        ..Job::new(&net, ranks, 6, &|_, _| vec![vec![0]])
    };
    let saving = job(4);
    let expected = serial(&saving);
    for setting in slow_modes() {
        let parts = saving.parts_after(&expected, &setting, 4);
        let t = |state: &State| state.groups.iter().map(|group| group.t).collect::<Vec<_>>();
        let with_a_piece = parts.iter().filter(|(state, _)| !state.tensors[1].pieces.is_empty()).count();
        assert!(with_a_piece == 1 && parts.iter().all(|(state, _)| t(state) == [3, 3, 3]));
        let state = State::merge(parts.into_iter().map(|(state, _)| state)).unwrap();
        saving.resume(&expected, &setting, &state);
        for ranks in [1, 3] {
            let loading = job(ranks);
            loading.resume(&serial_from(&loading, &state), &setting, &state);
        }
    }
}

/// Group 1 has one element, group 2 none.
fn lonely_group() -> (Net, ParamId) {
    let mut net = Net::empty();
    net.chunk();
    net.unit("unit");
    net.param("everywhere", 600, DType::Bf16, ParamOptions::default());
    let one = net.param("one element", 1, DType::F32, ParamOptions { group: GroupId(1), ..ParamOptions::default() });
    (net, one)
}

/// The output head is read in the first unit's forward and outside all units, and nobody enters its own unit before.
#[test]
fn fault_12_a_weight_used_without_entering_its_unit_is_waited_for() {
    let net = Net::mixed(false);
    let tail = &net.units[Net::TAIL];
    let job = Job::new(&net, 2, 5, &|_, _| vec![(0..6).collect()]);
    let expected = serial(&job);
    for setting in slow_modes() {
        job.on_ranks(&expected, &setting, |mut trainer| {
            for step in 0..job.steps {
                let wanted = &expected.weights[step as usize];
                if step % 2 == 0 {
                    let pass = trainer.engine.pass(net.chunks[0], 0, false, Mode::Eval).unwrap();
                    let _first = pass.enter(net.units[Net::EMBED].id).unwrap();
                    let head = pass.read::<f32>(tail.params[0]).unwrap();
                    assert_eq!(*head, wanted[tail.params[0].index()]);
                } else {
                    tail.params.iter().rev().for_each(|param| drop(trainer.outside(*param)));
                }
                trainer.train_one();
            }
            trainer.finish()
        });
    }
}

#[test]
fn fault_13_a_bucket_that_is_never_entered_stops_no_chain_and_leaks_no_gradient() {
    let mut net = Net::empty();
    net.chunk();
    for index in 0..5 {
        net.unit(&format!("layer {index}"));
        net.param(&format!("layer {index}.weight"), 150, DType::Bf16, ParamOptions::default());
    }
    // The first step gives every bucket a gradient; then the first, the middle or the last is left out for some steps.
    let program = |step: u64, _: usize| {
        let left_out = [None, Some(2), Some(2), None, Some(0), Some(0), Some(4), Some(4), None][step as usize];
        vec![(0..5).filter(|unit| Some(*unit) != left_out).collect()]
    };
    let job = Job::new(&net, 2, 9, &program);
    let expected = serial(&job);
    for setting in slow_modes() {
        for finished in job.train(&expected, &setting) {
            assert_eq!((finished.counters.gathers, finished.counters.reduces), (5 * 9, 5 * 9), "{setting:?}");
        }
    }
    in_every_mode(&job, |_| ());
}
