//! State that is not whole, of another model, or not the same on every rank is refused by name on every rank; nothing has
//! changed then, and the engine stays usable.
#![allow(clippy::unwrap_used)]

mod small;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gatherflow::{
    Config, DType, Engine, Error, ErrorKind, Group, Mode, Model, ParamOptions, Piece, Rank, ScalerKind, State,
    StateError, bf16,
};
use small::{Small, bits, config, microbatch, on_ranks, solo};

fn train(engine: &mut Engine, small: &Small, steps: usize) {
    for _ in 0..steps {
        microbatch(engine, small, true, 0.5);
        engine.step().unwrap().outcome().unwrap();
    }
}

/// The state of each of some ranks after some steps.
fn parts(ranks: usize, steps: usize) -> Vec<State> {
    on_ranks(ranks, |rank| {
        let (mut engine, small) = small::engine(rank, config()).unwrap();
        train(&mut engine, &small, steps);
        let state = engine.state().unwrap();
        engine.close().unwrap();
        state
    })
}

fn whole(ranks: usize) -> State {
    State::merge(parts(ranks, 2)).unwrap()
}

fn changed(state: &State, change: impl FnOnce(&mut State)) -> State {
    let mut state = state.clone();
    change(&mut state);
    state
}

fn tensor<'a>(state: &'a mut State, name: &str) -> &'a mut gatherflow::TensorState {
    state.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

/// All of a state that is not the same in two engines by chance.
fn all_of(state: &State) -> String {
    let pieces = |t: &gatherflow::TensorState| {
        let of = |p: &gatherflow::Piece| format!("{} {:?} {:?} {:?}", p.start, p.master, p.exp_avg, p.exp_avg_sq);
        t.pieces.iter().map(of).collect::<Vec<_>>()
    };
    let tensors: Vec<_> = state.tensors.iter().map(|t| format!("{} {:?}", t.name, pieces(t))).collect();
    format!("{} {:?} {:?} {tensors:?}", state.steps, state.groups, state.scaler)
}

#[test]
fn what_parts_lack_or_have_twice_or_disagree_about_is_named() {
    let parts = parts(3, 2);
    assert_eq!(State::merge([]).unwrap_err(), StateError::NoParts);
    let merged = |parts: &mut dyn Iterator<Item = State>| all_of(&State::merge(parts).unwrap());
    assert_eq!(merged(&mut parts.clone().into_iter().rev()), merged(&mut parts.clone().into_iter()), "in any order");
    let mut owners = 0;
    for left_out in 0..3 {
        let others = parts.iter().enumerate().filter(|(rank, _)| *rank != left_out).map(|(_, part)| part.clone());
        let merged = State::merge(others);
        let first = parts[left_out].tensors.iter().find_map(|t| Some((format!("`{}`", t.name), t.pieces.first()?)));
        let Some((tensor, piece)) = first else {
            merged.unwrap();
            continue;
        };
        let (start, end) = (piece.start, piece.start + piece.master.len());
        assert_eq!(merged.unwrap_err(), StateError::Missing { tensor: tensor.clone(), start, end });
        let twice = parts.iter().chain([&parts[left_out]]).cloned();
        assert_eq!(State::merge(twice).unwrap_err(), StateError::Twice { tensor, start, end });
        owners += 1;
    }
    assert_eq!(owners, 2, "the last rank owns nothing and need not come");

    let wrong = |change: fn(&mut State)| {
        let other = changed(&parts[1], change);
        State::merge([parts[0].clone(), other, parts[2].clone()]).unwrap_err().to_string()
    };
    for (error, words) in [
        (wrong(|s| s.steps += 1), "the number of steps is 2 in the first and 3 in number 1"),
        (wrong(|s| s.groups[0].t = 9), "optimizer group 0 is GroupState { t: 2"),
        (wrong(|s| s.groups.clear()), "and nothing in number 1"),
        (wrong(|s| s.tensors.swap(0, 1)), "parameter number 0 is `tied` of shape [3, 50]"),
        (wrong(|s| s.tensors[2].shape = vec![3, 3]), "`other.weight` of shape [3, 3]"),
        (
            wrong(|s| drop(s.tensors.pop())),
            "parameter number 2 is `other.weight` of shape [9] in group 0 in the first and nothing",
        ),
        (wrong(|s| s.tensors[0].pieces[0].exp_avg.truncate(1)), "a piece of `tied` from element"),
        (wrong(|s| s.tensors[0].pieces[0].start = 149), "a piece of `tied` from element 149 does not fit"),
    ] {
        assert!(error.contains(words), "{error}");
    }
    let twice: Vec<_> = parts.iter().map(|p| changed(p, |s| s.tensors.push(s.tensors[1].clone()))).collect();
    assert_eq!(State::merge(twice).unwrap_err(), StateError::ListedTwice { tensor: "`own`".into() });
}

/// Refuses, and leaves the engine as it was.
fn refused(engine: &mut Engine, state: &State) -> String {
    let before = (bits(engine), all_of(&engine.state().unwrap()));
    let error = engine.load_state(state).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::State, "{error}");
    assert!(!error.is_fatal());
    assert_eq!((bits(engine), all_of(&engine.state().unwrap())), before, "{error}");
    error.message().to_owned()
}

#[test]
fn a_state_of_another_model_or_with_something_missing_is_refused_by_name() {
    let whole = whole(2);
    let (mut engine, small) = solo(config());
    train(&mut engine, &small, 1);
    let mut wrong = |change: fn(&mut State), words: &str| {
        let message = refused(&mut engine, &changed(&whole, change));
        assert!(message.contains(words), "{message}");
    };
    wrong(|s| tensor(s, "own").name = "owm".into(), "the model trains `own`, of which the state has nothing");
    wrong(
        |s| s.tensors.push(changed_name(&s.tensors[0], "frozen")),
        "the model trains no parameter `frozen`, but the state has one",
    );
    wrong(|s| tensor(s, "tied").shape = vec![50, 3], "`tied` has shape [50, 3] in the state and [3, 50] in the model");
    wrong(|s| tensor(s, "own").group = 1, "`own` is in optimizer group 1 in the state and 0 in the model");
    wrong(|s| s.groups.push(s.groups[0].clone()), "the state has 2 optimizer groups and the model 1");
    wrong(
        |s| tensor(s, "own").part.experts = Some(3),
        "`own` comes in parts (experts 3) in the state and in others (one) here",
    );
    wrong(|s| tensor(s, "own").pieces.clear(), "elements 0..70 of `own` are missing");
    wrong(
        |s| tensor(s, "own").pieces = s.tensors.clone().remove(0).pieces,
        "a piece of `own` from element 0 does not fit",
    );
    wrong(|s| s.tensors.push(s.tensors[0].clone()), "`tied` is listed twice");
    let part = &parts(2, 2)[0];
    assert!(refused(&mut engine, part).contains("are missing: merge the states of all ranks"));
    engine.load_state(&whole).unwrap();
    train(&mut engine, &small, 1);
    engine.close().unwrap();
}

fn changed_name(tensor: &gatherflow::TensorState, name: &str) -> gatherflow::TensorState {
    let mut other = tensor.clone();
    other.name = name.into();
    other
}

#[test]
fn a_loss_scale_that_cannot_be_is_refused() {
    let dynamic = || config().scaler(ScalerKind::Dynamic).scaler_initial(64.0);
    let (mut engine, _) = solo(dynamic());
    let saved = engine.state().unwrap();
    for scale in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        let state = changed(&saved, |s| s.scaler.as_mut().unwrap().scale = scale);
        assert!(refused(&mut engine, &state).contains(&format!("the loss scale is {scale}")));
    }
}

#[test]
fn counts_that_would_overflow_are_refused() {
    let (mut engine, _) = solo(config());
    let saved = engine.state().unwrap();
    let t = changed(&saved, |s| s.groups[0].t = u64::MAX);
    assert!(refused(&mut engine, &t).contains("t of optimizer group 0 is 18446744073709551615"));
    let steps = changed(&saved, |s| s.steps = u64::MAX);
    assert!(refused(&mut engine, &steps).contains("the number of steps is 18446744073709551615"));
}

#[test]
fn values_that_adam_never_leaves_are_refused_by_element() {
    let (mut engine, _) = solo(config());
    let saved = engine.state().unwrap();
    let with = |change: &dyn Fn(&mut Piece)| changed(&saved, |s| change(&mut tensor(s, "own").pieces[0]));
    for (state, words) in [
        (with(&|piece| piece.master[3] = f32::NAN), "the master of element 3 of `own` is NaN"),
        (with(&|piece| piece.exp_avg[69] = f32::NEG_INFINITY), "the first moment of element 69 of `own` is -inf"),
        (with(&|piece| piece.exp_avg_sq[0] = -1e-30), "the second moment of element 0 of `own`"),
    ] {
        let message = refused(&mut engine, &state);
        assert!(message.contains(words), "{message}");
    }
    let zeros = with(&|piece| piece.exp_avg_sq[0] = -0.0);
    engine.load_state(&zeros).unwrap();
}

/// One rank's state differs in one bit of one moment, or is of another model, or not whole.
#[test]
fn a_rank_that_loads_another_state_is_named_on_all_ranks_and_nothing_has_changed() {
    let right = whole(2);
    let bit = changed(&right, |s| {
        let x = &mut tensor(s, "own").pieces[0].exp_avg_sq[69];
        *x = f32::from_bits(x.to_bits() ^ 1);
    });
    let shape = changed(&right, |s| tensor(s, "own").shape = vec![7, 10]);
    let part = parts(2, 2).remove(0);
    for (wrong, words) in [
        (&bit, ["rank 0 has state of `own` = hash", "rank 1 has state of `own` = hash"]),
        (
            &shape,
            ["rank 0 has the state to load = of this model", "rank 1 has the state to load = refused: `own` has shape"],
        ),
        (&part, ["rank 0 has the state to load = of this model", "rank 1 has the state to load = refused: elements"]),
    ] {
        let errors = on_ranks(3, |rank| {
            let (mut engine, small) = small::engine(rank, config()).unwrap();
            train(&mut engine, &small, 1);
            let own = if engine.rank() == 1 { wrong } else { &right };
            let message = refused(&mut engine, own);
            engine.load_state(&right).unwrap();
            train(&mut engine, &small, 1);
            engine.close().unwrap();
            message
        });
        for message in &errors {
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
            assert_eq!(message, &errors[0]);
        }
    }
    let errors = on_ranks(2, |rank| refused(&mut small::engine(rank, config()).unwrap().0, &shape));
    assert!(errors.iter().all(|message| message.contains("`own` has shape [7, 10]")), "{errors:?}");
}

#[test]
fn a_rank_that_does_not_load_is_named_to_those_who_do() {
    let state = whole(1);
    let limit = Duration::from_millis(300);
    let errors = on_ranks(2, |rank| {
        let (mut engine, _) = small::engine(rank, config().collective_deadline(limit)).unwrap();
        if engine.rank() == 1 {
            while engine.session().failed().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        engine.load_state(&state).unwrap_err()
    });
    for error in errors {
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
        assert!(error.message().contains("did not load the state"), "{error}");
    }
    // One that reloads its masters instead has come to something else, and all say what.
    let errors: Vec<Error> = on_ranks(2, |rank| {
        let (mut engine, _) = small::engine(rank, config()).unwrap();
        if engine.rank() == 1 { engine.reload_masters() } else { engine.load_state(&state) }.unwrap_err()
    });
    for error in errors {
        let words = ["rank 0 has the state to load", "rank 1 has hash of the parameters"];
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }
}

#[test]
fn between_steps_only_and_not_beside_guards_or_swapped_parameters() {
    let state = whole(1);
    let (mut engine, small) = solo(config());
    let misuse = |error: Error, words: &str| {
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(words), "{error}");
    };
    train(&mut engine, &small, 1);
    let saved = all_of(&engine.state().unwrap());

    let owned = engine.owned_pass(small.chunk, 0, false, Mode::Eval).unwrap();
    let reading = owned.read::<f32>(small.tied).unwrap();
    assert_eq!(all_of(&engine.state().unwrap()), saved, "beside readers it can be taken");
    misuse(engine.load_state(&state).unwrap_err(), "`tied`: a guard of it is alive: drop it before load_state");
    drop(reading);

    let swapped = engine.swap_params(|_, out| out.fill_with(|_| 9.0)).unwrap();
    misuse(swapped.state().unwrap_err(), "other parameters are swapped in");
    std::mem::forget(swapped);
    misuse(engine.load_state(&state).unwrap_err(), "other parameters are swapped in");
    engine.restore_params().unwrap();

    microbatch(&engine, &small, false, 1.0);
    assert_eq!(all_of(&engine.state().unwrap()), saved, "in mid-accumulation it is that after the last step");
    misuse(engine.load_state(&state).unwrap_err(), "`tied`: its gradient of this step would be lost");
    engine.zero_grad().unwrap();
    engine.load_state(&state).unwrap();
    assert_eq!(all_of(&engine.state().unwrap()), all_of(&state));
    engine.close().unwrap();
    assert_eq!(engine.state().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(engine.load_state(&state).unwrap_err().kind(), ErrorKind::Closed);
}

/// What is written from outside is in the state as far as the optimizer goes on from it.
#[test]
fn frozen_parameters_and_16_bit_ones_written_without_a_reload_are_not_in_the_state() {
    let (mut engine, small) = solo(config());
    train(&mut engine, &small, 1);
    let before = all_of(&engine.state().unwrap());
    for param in [small.own, small.frozen] {
        engine.write_param(param, |out| out.fill_with(|_| 0.25)).unwrap();
    }
    let state = engine.state().unwrap();
    assert_eq!(all_of(&state), before);
    engine.load_state(&state).unwrap();
    let master = state.tensors.iter().find(|t| t.name == "own").unwrap().pieces[0].master[3];
    assert_eq!(engine.read::<bf16>(small.own).unwrap()[3], bf16::from_f32(master), "it is its master again");
    assert_eq!(*engine.read::<f32>(small.frozen).unwrap(), [0.25; 5], "that is left alone");

    engine.write_param(small.own, |out| out.fill_with(|_| 0.25)).unwrap();
    engine.write_param(small.tied, |out| out.fill_with(|_| 0.75)).unwrap();
    engine.reload_masters().unwrap();
    let mut state = engine.state().unwrap();
    assert_eq!(tensor(&mut state, "own").pieces[0].master, [0.25; 70]);
    assert_eq!(tensor(&mut state, "tied").pieces[0].master, [0.75; 150]);
}

/// A parameter of another type takes its masters, rounded to that.
#[test]
fn a_state_goes_into_parameters_of_another_type() {
    let engine = |dtype: DType| {
        let mut model = Model::new();
        let chunk = model.chunk();
        let unit = model.unit(chunk, "unit").unwrap();
        let id = model.param(unit, "w", &[70], dtype).unwrap();
        let init = |_: &gatherflow::ParamInfo, out: gatherflow::ParamMut<'_>| out.fill_with(|i| i as f32 / 71.0);
        (Engine::new(gatherflow::Ranks::local(1).unwrap().remove(0), model, config(), init).unwrap(), id)
    };
    let (full, _) = engine(DType::F32);
    let (mut half, id) = engine(DType::Bf16);
    let state = full.state().unwrap();
    half.load_state(&state).unwrap();
    assert_eq!(half.read::<bf16>(id).unwrap()[69], bf16::from_f32(69.0 / 71.0));
    assert_eq!(all_of(&half.state().unwrap()), all_of(&state), "masters keep what the parameter has no room for");
}

/// Log lines of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The warnings of loading a state from an engine of one configuration into one of another, and that one.
fn loaded(from: Config, group: &Group, into: Config) -> (String, Engine) {
    let engine = |rank: Rank, config: Config, group: &Group| {
        let mut model = Model::new();
        let group = model.group(group.clone()).unwrap();
        let chunk = model.chunk();
        let unit = model.unit(chunk, "unit").unwrap();
        model.param_with(unit, "w", &[7], DType::F32, ParamOptions { group, ..ParamOptions::default() }).unwrap();
        Engine::new(rank, model, config, |_, out| out.fill_with(|_| 0.5)).unwrap()
    };
    let rank = || gatherflow::Ranks::local(1).unwrap().remove(0);
    let state = engine(rank(), from, group).state().unwrap();
    let mut other = engine(rank(), into, &Group::default());
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || other.load_state(&state).unwrap());
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    (text, other)
}

#[test]
fn without_scaler_state_the_dynamic_scaler_starts_anew_and_says_so() {
    let dynamic = |initial| config().scaler(ScalerKind::Dynamic).scaler_initial(initial);
    let (log, engine) = loaded(config(), &Group::default(), dynamic(64.0));
    assert!(log.contains("WARN") && log.contains("the state has no loss scaler"), "{log}");
    assert_eq!(engine.loss_scale().unwrap().to_bits(), 64_f32.to_bits());
    let (log, engine) = loaded(dynamic(32.0), &Group::default(), dynamic(64.0));
    assert!(log.is_empty(), "{log}");
    assert_eq!(engine.loss_scale().unwrap().to_bits(), 32_f32.to_bits());
    let (log, engine) = loaded(dynamic(32.0), &Group::default(), config());
    assert!(log.contains("the state has a dynamic loss scaler"), "{log}");
    assert_eq!(engine.loss_scale().unwrap().to_bits(), 1_f32.to_bits());
}

#[test]
fn hyperparameters_that_differ_are_warned_of_and_stay_the_configurations() {
    let group = Group { weight_decay: Some(0.3), ..Group::default() };
    let (log, engine) = loaded(config(), &group, config());
    assert!(log.contains("WARN") && log.contains("group=1") && log.contains("weight_decay: 0.3"), "{log}");
    assert!(!log.contains("group=0"), "{log}");
    assert_eq!(engine.state().unwrap().groups[1].weight_decay.to_bits(), 0.01_f64.to_bits());
}
