//! A file gives back every bit of a state, of a part or a whole; and one that is not as it was written is refused by name, with
//! what to do about it, on whichever rank reads it.
#![allow(clippy::unwrap_used)]

mod small;

use std::path::{Path, PathBuf};

use gatherflow::{Config, Engine, ErrorKind, ScalerKind, State, StateFileError};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use small::{Small, config, microbatch, on_ranks, solo};

/// A folder of the test's own.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn train(engine: &mut Engine, small: &Small, steps: usize) {
    for _ in 0..steps {
        microbatch(engine, small, true, 0.5);
        engine.step().unwrap().outcome().unwrap();
    }
}

fn parts(ranks: usize, steps: usize, config: &Config) -> Vec<State> {
    on_ranks(ranks, |rank| {
        let (mut engine, small) = small::engine(rank, config.clone()).unwrap();
        train(&mut engine, &small, steps);
        let state = engine.state().unwrap();
        engine.close().unwrap();
        state
    })
}

fn whole() -> State {
    State::merge(parts(2, 2, &config().scaler(ScalerKind::Dynamic))).unwrap()
}

/// All of a state, floats as bits.
fn bits(state: &State) -> String {
    let of = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let pieces = |t: &gatherflow::TensorState| {
        t.pieces.iter().map(|p| (p.start, of(&p.master), of(&p.exp_avg), of(&p.exp_avg_sq))).collect::<Vec<_>>()
    };
    let group = |g: &gatherflow::GroupState| {
        let numbers = [g.lr, g.lr_multiplier, g.betas.0, g.betas.1, g.eps, g.weight_decay];
        (g.t, numbers.map(f64::to_bits), g.adam_w)
    };
    let groups: Vec<_> = state.groups.iter().map(group).collect();
    let scaler = state.scaler.map(|s| (s.scale.to_bits(), s.growth_counter, s.hysteresis));
    let tensors: Vec<_> = state.tensors.iter().map(|t| (&t.name, &t.shape, t.group, t.part, pieces(t))).collect();
    format!("{} {groups:?} {scaler:?} {tensors:?}", state.steps)
}

#[test]
fn parts_and_wholes_come_back_from_files_bit_by_bit() {
    const ODD: [u32; 8] =
        [0x7fc0_1234, 0x7f80_0001, 0xffff_ffff, 0x8000_0000, 1, 0x807f_ffff, 0x7f80_0000, 0x7f7f_ffff];
    let folder = folder("bit_by_bit");
    let mut states = parts(3, 2, &config());
    states.extend([whole(), State::default()]);
    for (number, mut state) in states.into_iter().enumerate() {
        for piece in state.tensors.iter_mut().flat_map(|tensor| &mut tensor.pieces) {
            for (field, values) in
                [&mut piece.master, &mut piece.exp_avg, &mut piece.exp_avg_sq].into_iter().enumerate()
            {
                values.iter_mut().skip(field).zip(ODD).for_each(|(value, odd)| *value = f32::from_bits(odd));
            }
        }
        for group in &mut state.groups {
            (group.t, group.lr, group.lr_multiplier) = (u64::MAX - 1, 0.1 + 0.2, -0.0);
            (group.betas, group.eps) = ((0.9 - 0.2, 1.0 - f64::EPSILON / 2.0), f64::MIN_POSITIVE / 3.0);
            group.weight_decay = 1.797_693_134_862_315_7e308;
        }
        if let Some(scaler) = &mut state.scaler {
            (scaler.scale, scaler.growth_counter, scaler.hysteresis) = (0.1, u32::MAX, -3);
        }
        state.steps = u64::MAX;
        if let Some(tensor) = state.tensors.first_mut() {
            tensor.name = "a name/with \"quotes\", a slash @5 and \u{1f41f}".into();
            tensor.part.experts = Some(usize::MAX);
        }
        let path = folder.join(format!("{number}.safetensors"));
        state.save(&path).unwrap();
        assert!(bits(&State::open(&path).unwrap()) == bits(&state), "{number}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 5, "nothing but the files");
}

/// Of every rank before its first step, the one that owns only padding too.
#[test]
fn fault_8_saved_before_the_first_step_files_hold_every_element_once_and_no_padding() {
    let folder = folder("before_the_first_step");
    let parts = parts(5, 0, &config());
    let mut elements = 0;
    let opened = parts.iter().enumerate().map(|(rank, part)| {
        let path = folder.join(format!("rank{rank}.safetensors"));
        part.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        elements += file.iter().map(|(_, tensor)| tensor.data().len() / 4).sum::<usize>();
        State::open(&path).unwrap()
    });
    let opened = State::merge(opened).unwrap();
    assert!(bits(&opened) == bits(&State::merge(parts).unwrap()));
    assert_eq!(elements, 3 * (3 * 50 + 70 + 9), "masters and both moments of what is trained");
    assert!(opened.groups.iter().all(|group| group.t == 0));
    let (mut engine, small) = solo(config());
    engine.load_state(&opened).unwrap();
    train(&mut engine, &small, 1);
}

#[test]
fn a_whole_is_a_safetensors_file_with_parameters_by_name_and_in_their_shapes() {
    let path = folder("readable").join("whole.safetensors");
    whole().save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    let expected =
        ["exp_avg", "exp_avg_sq", "master"].map(|f| ["other.weight", "own", "tied"].map(|n| format!("{f}/{n}")));
    assert_eq!(names, expected.concat());
    assert_eq!(file.tensor("master/tied").unwrap().shape(), [3, 50]);
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let state: Value = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["gatherflow.state"]).unwrap();
    assert_eq!((state["steps"].as_u64(), state["groups"][0]["t"].as_u64()), (Some(2), Some(2)));
    assert_eq!(state["tensors"][0]["pieces"], json!([[0, 150]]));
    assert_eq!(state["scaler"]["scale"].as_f64(), Some(2_f64.powi(32)), "whatever float type the reader has");
}

/// Takes a file apart and puts it together again with something changed.
struct Parts {
    header: Value,
    state: Value,
    data: Vec<u8>,
}

impl Parts {
    fn of(bytes: &[u8]) -> Self {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let state = serde_json::from_str(header["__metadata__"]["gatherflow.state"].as_str().unwrap()).unwrap();
        Self { header, state, data: bytes[8 + length..].to_vec() }
    }

    fn bytes(mut self) -> Vec<u8> {
        if let Some(state) = self.header.pointer_mut("/__metadata__/gatherflow.state") {
            *state = self.state.to_string().into();
        }
        raw(&self.header.to_string(), &self.data)
    }
}

fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn a_file_that_is_not_as_it_was_written_is_refused_by_name_with_what_to_do() {
    let folder = folder("damaged");
    let path = folder.join("good.safetensors");
    whole().save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let with = |change: &dyn Fn(&mut Parts)| {
        let mut parts = Parts::of(&good);
        change(&mut parts);
        parts.bytes()
    };
    let shared = |change: &dyn Fn(&mut Value)| with(&|p| change(&mut p.header["__metadata__"]));
    let state = |change: &dyn Fn(&mut Value)| with(&|p| change(&mut p.state));
    let tensor = |change: &dyn Fn(&mut Value)| with(&|p| change(&mut p.header["master/tied"]));
    let without = |value: &mut Value, key: &str| drop(value.as_object_mut().unwrap().remove(key));
    let end = good.len() as u64;
    let damaged: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "is no safetensors file: it has 0 bytes"),
        ("text", b"steps = 2, and more of it".to_vec(), "its header would have 2323048662972068979 bytes"),
        (
            "huge_header",
            [&u64::MAX.to_le_bytes()[..], &good[8..]].concat(),
            "its header would have 18446744073709551615 bytes",
        ),
        ("cut_in_the_header", good[..length / 2].to_vec(), "the rest was lost when it was copied; copy it again"),
        ("cut_in_the_data", good[..good.len() - 1].to_vec(), "the rest was lost when it was copied; copy it again"),
        ("longer", [&good[..], &[0]].concat(), "its tensors end at"),
        ("no_json", raw("{\"master", &[]), "is no safetensors file: EOF"),
        ("huge_shape", tensor(&|t| t["shape"] = json!([u64::MAX, 2])), "is no safetensors file"),
        ("huge_offsets", tensor(&|t| t["data_offsets"] = json!([0, u64::MAX])), "is no safetensors file"),
        (
            "huge_tensor",
            raw(
                "{\"a\":{\"dtype\":\"F32\",\"shape\":[72057594037927936],\"data_offsets\":[0,288230376151711744]}}",
                &[],
            ),
            "bytes of 2882303761517118",
        ),
        ("of_something_else", with(&|p| without(&mut p.header, "__metadata__")), "not of optimizer state: give a file"),
        ("version", shared(&|m| m["gatherflow.version"] = "2".into()), "has format version 2, this program reads 1"),
        ("no_state", shared(&|m| without(m, "gatherflow.state")), "`gatherflow.state` is missing"),
        ("nonsense", state(&|s| *s = json!([3])), "does not say what it holds"),
        ("no_groups", state(&|s| without(s, "groups")), "missing field `groups`"),
        ("negative", state(&|s| s["steps"] = json!(-1)), "invalid value: integer `-1`"),
        ("no_number", state(&|s| s["groups"][0]["lr"] = Value::Null), "invalid type: null, expected f64"),
        ("more", state(&|s| s["more"] = json!(1)), "unknown field `more`"),
        ("listed_twice", state(&|s| s["tensors"][1] = s["tensors"][0].clone()), "it lists tensor `master/tied` twice"),
        ("unlisted", state(&|s| s["tensors"] = json!([s["tensors"][1].clone()])), "which it does not list"),
        ("missing", state(&|s| s["tensors"][0]["name"] = "tide".into()), "lacks tensor `master/tide`"),
        ("other_piece", state(&|s| s["tensors"][0]["pieces"][0][0] = 5.into()), "lacks tensor `master @5/tied`"),
        (
            "other_length",
            state(&|s| s["tensors"][0]["pieces"][0][1] = 151.into()),
            "`master/tied` has 150 elements and is listed with 151",
        ),
        (
            "huge_length",
            state(&|s| s["tensors"][0]["pieces"][0][1] = u64::MAX.into()),
            "is listed with 18446744073709551615",
        ),
        ("backwards", state(&|s| s["tensors"][0]["pieces"][0] = json!([0, -1])), "does not say what it holds"),
        (
            "shape",
            state(&|s| s["tensors"][0]["shape"] = json!([3, 49])),
            "a piece of `tied` from element 0 does not fit",
        ),
        ("dtype", tensor(&|t| t["dtype"] = "I32".into()), "tensor `master/tied` is I32: masters and moments are F32"),
        ("bf16", tensor(&|t| (t["dtype"], t["shape"]) = ("BF16".into(), json!([3, 100]))), "is BF16"),
    ];
    for (name, bytes, message) in damaged {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        refused(&path, message);
    }
    refused(&folder.join("nowhere"), "cannot be read: No such file");
    refused(&folder, "cannot be read: Is a directory");
    // Cut anywhere, it is refused: nothing is taken from what is left.
    for bytes in (0..end).step_by(97) {
        let path = folder.join("cut");
        std::fs::write(&path, &good[..bytes as usize]).unwrap();
        assert!(State::open(&path).is_err(), "{bytes} of {end} bytes");
    }
}

fn refused(path: &Path, message: &str) {
    let error: StateFileError = State::open(path).unwrap_err();
    assert_eq!(error.path, path);
    let text = error.to_string();
    assert!(text.starts_with(path.to_str().unwrap()) && text.contains(message), "should say {message:?}: {text}");
    assert_eq!(gatherflow::Error::from(error).kind(), ErrorKind::State);
}

#[test]
fn a_file_without_scaler_state_loads() {
    let path = folder("no_scaler").join("whole.safetensors");
    let mut state = whole();
    state.save(&path).unwrap();
    let mut parts = Parts::of(&std::fs::read(&path).unwrap());
    parts.state.as_object_mut().unwrap().remove("scaler");
    std::fs::write(&path, parts.bytes()).unwrap();
    assert!(state.scaler.take().is_some());
    assert!(bits(&State::open(&path).unwrap()) == bits(&state));
}

type Change = fn(&mut State);

/// What cannot be written is refused, and what was there before is still there, with nothing beside it.
#[test]
fn after_a_save_that_failed_the_old_file_is_whole() {
    let folder = folder("failed");
    let path = folder.join("state.safetensors");
    let good = whole();
    good.save(&path).unwrap();
    let refused = |state: &State, path: &Path, message: &str| {
        let error = state.save(path).unwrap_err().to_string();
        assert!(error.contains(message), "should say {message:?}: {error}");
    };
    let changes: [(Change, &str); 5] = [
        (|s| s.groups[0].lr = f64::NAN, "cannot hold GroupState"),
        (|s| s.scaler.as_mut().unwrap().scale = f32::INFINITY, "cannot hold ScalerState"),
        (|s| s.tensors[0].pieces[0].exp_avg.truncate(5), "a piece of `tied` from element 0 does not fit"),
        (|s| s.tensors.extend_from_within(..1), "`tied` is listed twice"),
        (|s| s.tensors[0].pieces.extend_from_within(..1), "elements 0..150 of `tied` are there twice"),
    ];
    for (change, message) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        refused(&bad, &path, message);
    }
    refused(&good, &folder.join("nowhere/state.safetensors"), "cannot be written: No such file");
    let in_the_way = folder.join("a_folder");
    std::fs::create_dir(&in_the_way).unwrap();
    refused(&good, &in_the_way, "cannot be written");
    assert!(bits(&State::open(&path).unwrap()) == bits(&good));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2, "no file that is half written stays");
}

/// Nobody waits for a rank that gave up: it is named to the others, who are told of it while they load.
#[test]
fn fault_7_a_file_that_one_rank_cannot_read_is_an_error_on_all_ranks() {
    let path = folder("fault_7").join("whole.safetensors");
    whole().save(&path).unwrap();
    let errors = on_ranks(3, |rank| {
        let number = rank.rank();
        let (mut engine, _) = small::engine(rank, config()).unwrap();
        let opened = if number == 1 { State::open(path.with_extension("lost")) } else { State::open(&path) };
        opened.map_err(gatherflow::Error::from).and_then(|state| engine.load_state(&state)).unwrap_err()
    });
    assert!(errors[1].message().contains("whole.lost: cannot be read"), "{}", errors[1]);
    for error in [&errors[0], &errors[2]] {
        assert_eq!((error.kind(), error.rank()), (ErrorKind::RankLost, Some(1)), "{error}");
    }
}
