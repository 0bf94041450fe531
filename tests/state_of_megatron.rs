//! The files that Megatron-LM's distributed optimizer saves become a whole state, element by element, or are refused by name.
//! `tests/golden/megatron/make.py` made them with torch; the packaged crate goes without.
#![allow(clippy::unwrap_used)]

mod small;

use std::path::PathBuf;

use gatherflow::{
    Config, DType, Engine, Error, ErrorKind, Group, GroupId, MegatronFile, Model, ParamOptions, ScalerState, State,
    bf16,
};
use small::on_ranks;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/megatron").join(name)
}

/// Name, shape, and the weight that it is a copy of.
type Param<'a> = (&'a str, &'a [usize], Option<&'a str>);

/// Chunks of units of one parameter each; `bf16` and f32 in turn, biases in a group of their own.
fn model(chunks: &[&[Param<'_>]]) -> Model {
    let mut model = Model::new();
    let biases = model.group(Group { weight_decay: Some(0.0), ..Group::default() }).unwrap();
    for params in chunks {
        let chunk = model.chunk();
        for (number, (name, shape, shared)) in params.iter().enumerate() {
            let unit = model.unit(chunk, format!("unit of {name}")).unwrap();
            let dtype = [DType::Bf16, DType::F32][number % 2];
            let group = if name.ends_with("bias") { biases } else { GroupId::DEFAULT };
            let trainable = !name.ends_with("frozen");
            let shared = shared.map(str::to_owned);
            let options = ParamOptions { group, trainable, shared, ..ParamOptions::default() };
            model.param_with(unit, *name, shape, dtype, options).unwrap();
        }
    }
    model
}

fn as_saved() -> Model {
    model(&[
        &[
            ("embed.table", &[7, 3], None),
            ("embed.frozen", &[5], None),
            ("first.weight", &[4, 5], None),
            ("first.bias", &[5], None),
        ],
        &[("second.weight", &[3, 3], None), ("head.bias", &[7], None)],
    ])
}

/// The values that `make.py` writes, of the parameter by number.
fn expected(param: usize, numel: usize) -> [Vec<f32>; 3] {
    let master: Vec<f32> = (0..numel).map(|i| 1000.0 * (param as f32 + 1.0) + i as f32 + 0.5).collect();
    let [exp_avg, exp_avg_sq] = [-1.0 / 8.0, 1.0 / 64.0].map(|factor| master.iter().map(|x| x * factor).collect());
    [master, exp_avg, exp_avg_sq]
}

fn fields(state: &State, name: &str) -> [Vec<f32>; 3] {
    let tensor = state.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    let [piece] = &tensor.pieces[..] else { panic!("`{name}` is one piece") };
    [&piece.master, &piece.exp_avg, &piece.exp_avg_sq].map(Clone::clone)
}

/// Files bucket by bucket, with the one bucket that later chunks have, whatever the bucket size; older ones with one tensor of everything; and tensors that are
/// views of a storage.
#[test]
fn parameters_are_cut_out_of_every_layout_that_megatron_saved() {
    for (name, ranks, bucket_size) in
        [("buckets.pt", 4, Some(7)), ("views.pt", 4, Some(7)), ("older_buckets.pt", 4, Some(7)), ("older.pt", 3, None)]
    {
        let file = MegatronFile::new(golden(name), ranks, 1000).scaler(ScalerState::new(512.0, 7, 1));
        let file = bucket_size.map_or(file.clone(), |numel| file.bucket_size(numel));
        let state = file.import(&as_saved(), &Config::new().lr(0.25)).unwrap();
        let params = ["embed.table", "first.weight", "first.bias", "second.weight", "head.bias"];
        assert_eq!(state.tensors.iter().map(|tensor| &*tensor.name).collect::<Vec<_>>(), params);
        for (number, (param, numel)) in params.into_iter().zip([21, 20, 5, 9, 7]).enumerate() {
            assert_eq!(fields(&state, param), expected(number, numel), "`{param}` of {name}");
        }
        assert_eq!(state.steps, 1000);
        let groups: Vec<_> = state.groups.iter().map(|group| (group.t, group.lr, group.weight_decay)).collect();
        assert_eq!(groups, [(1000, 0.25, 0.01), (1000, 0.25, 0.0)]);
        assert_eq!(state.scaler, Some(ScalerState::new(512.0, 7, 1)));
    }
}

/// A weight has a bucket of its own where it has copies; there it has not.
#[test]
fn copies_of_a_weight_are_taken_from_the_first_of_them() {
    let model = model(&[
        &[("a", &[21], None), ("b", &[11], None), ("tied", &[9], Some("tied")), ("c", &[5], None)],
        &[("copy", &[9], Some("tied")), ("d", &[7], None)],
    ]);
    let file = MegatronFile::new(golden("buckets.pt"), 4, 1).bucket_size(16);
    let state = file.import(&model, &Config::new()).unwrap();
    assert_eq!(state.tensors.iter().map(|tensor| &*tensor.name).collect::<Vec<_>>(), ["a", "b", "tied", "c", "d"]);
    assert_eq!(fields(&state, "tied"), expected(1, 20).map(|values| values[..9].to_vec()));
    assert_eq!(fields(&state, "d"), expected(4, 7));
}

fn info<'a>(engine: &'a Engine, name: &str) -> &'a gatherflow::ParamInfo {
    engine.params().iter().find(|info| info.name == name).unwrap()
}

fn rounded(engine: &Engine, name: &str, masters: Vec<f32>) -> Vec<f32> {
    match info(engine, name).dtype {
        DType::F32 => masters,
        _ => masters.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
    }
}

fn read(engine: &Engine, name: &str) -> Vec<f32> {
    let info = info(engine, name);
    match info.dtype {
        DType::F32 => engine.read::<f32>(info.id).unwrap().to_vec(),
        _ => engine.read::<bf16>(info.id).unwrap().iter().map(|x| x.to_f32()).collect(),
    }
}

/// f32 and 16-bit parameters of two groups.
#[test]
fn fault_5_an_import_trains_on_with_any_number_of_ranks_and_every_parameter_finds_its_own_state() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("imported.safetensors");
    let file = MegatronFile::new(golden("buckets.pt"), 4, 1000).bucket_size(16);
    file.import(&as_saved(), &Config::new()).unwrap().save(&path).unwrap();
    for ranks in [1, 3] {
        on_ranks(ranks, |rank| {
            let config = small::config().bucket_size(1);
            let mut engine = Engine::new(rank, as_saved(), config, |_, out| out.fill_with(|_| 0.0)).unwrap();
            engine.load_state(&State::open(&path).unwrap()).unwrap();
            let params = ["embed.table", "first.weight", "first.bias", "second.weight", "head.bias"];
            for (number, (param, numel)) in params.into_iter().zip([21, 20, 5, 9, 7]).enumerate() {
                let [masters, ..] = expected(number, numel);
                assert_eq!(read(&engine, param), rounded(&engine, param, masters), "`{param}`");
            }
            assert!(engine.step().unwrap().outcome().unwrap().updated);
            assert_eq!(engine.state().unwrap().groups.iter().map(|group| group.t).collect::<Vec<_>>(), [1001, 1001]);
            engine.close().unwrap();
        });
    }
}

fn refused(error: &Error, words: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::State, "{error}");
    for word in words {
        assert!(error.message().contains(word), "should say {word:?}: {error}");
    }
}

/// The reference finds it on rank 0 alone, in the middle of a scatter. Here nobody waits for anybody meanwhile.
#[test]
fn fault_7_other_ranks_buckets_or_parameters_are_refused_with_chunk_bucket_and_both_lengths() {
    let buckets = |ranks, bucket_size| MegatronFile::new(golden("buckets.pt"), ranks, 1).bucket_size(bucket_size);
    let import = |file: MegatronFile, model: &Model| file.import(model, &Config::new()).unwrap_err();
    let what_to_do = "give the number of data-parallel ranks and the bucket size with which it was saved";
    for (error, words) in [
        (
            import(buckets(3, 16), &as_saved()),
            ["chunk 0, bucket 0, `param` has 28 elements, and 27", "on 3 ranks with bucket size 16"],
        ),
        (
            import(buckets(4, 30), &as_saved()),
            ["chunk 0, `param` has 2 buckets, and 1", "on 4 ranks with bucket size 30"],
        ),
        (import(buckets(4, 1), &as_saved()), ["chunk 0, `param` has 2 buckets, and 3", "bucket size 1:"]),
        (import(MegatronFile::new(golden("buckets.pt"), 4, 1), &as_saved()), ["2 buckets, and 1", "with one bucket"]),
        (
            import(MegatronFile::new(golden("older.pt"), 4, 1), &as_saved()),
            ["chunk 1, `param` has 18 elements, and 16", "on 4 ranks with one bucket"],
        ),
        (
            import(buckets(4, 16), &model(&[&[("a", &[25], None), ("b", &[25], None)], &[("c", &[16], None)]])),
            ["chunk 0, bucket 1, `param` has 24 elements, and 28", "in the order of its modules' parameters()"],
        ),
    ] {
        refused(&error, &words);
        refused(&error, &[".pt: ", what_to_do]);
    }
    refused(
        &import(buckets(4, 16), &model(&[&[("a", &[21], None), ("b", &[25], None)]])),
        &["chunk 1, where the model trains nothing"],
    );
    let three = model(&[&[("a", &[21], None), ("b", &[25], None)], &[("c", &[16], None)], &[("d", &[1], None)]]);
    refused(&import(buckets(4, 16), &three), &["chunk 2, `param`: it is not there"]);
    let none = buckets(0, 16).import(&as_saved(), &Config::new()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Model, "{none}");
}

#[test]
fn what_is_no_optimizer_state_of_megatron_is_refused_by_name() {
    let model = model(&[&[("a", &[46], None)]]);
    let import = |path: PathBuf| MegatronFile::new(path, 1, 1).import(&model, &Config::new()).unwrap_err();
    for (name, words) in [
        ("half.pt", "chunk 0, bucket 0, `param`: its storage is torch.HalfStorage, not torch.FloatStorage"),
        ("square.pt", "chunk 0, bucket 0, `param`: it is not flat"),
        ("coalesced.pt", "its dict: it has `buckets_coalesced`"),
        ("two_types.pt", "chunk 0: it is no dict of one element type of gradients"),
        ("other_chunk.pt", "its dict: it has chunk 7, where the model trains nothing"),
        ("counter.pt", "has `collections.Counter` at byte 7 of its pickle"),
        ("protocol.pt", "has pickle protocol 4, not 2 at byte 0"),
        ("tensor.pt", "its pickle: it is no dict"),
        ("legacy.pt", "is no file of torch.save: "),
        ("nowhere.pt", "cannot be read: No such file"),
        ("make.py", "is no file of torch.save: "),
        ("", "is no file of torch.save: "),
    ] {
        let error = import(golden(name));
        refused(&error, &[words, golden(name).to_str().unwrap()]);
    }
}

/// Bytes all over a file are changed in turn, and the file is cut there: it is refused, or nothing of the state lies there.
#[test]
fn a_damaged_file_of_torch_is_refused_or_gives_the_same_state() {
    let good = std::fs::read(golden("buckets.pt")).unwrap();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("damaged.pt");
    let import = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        MegatronFile::new(&path, 4, 1).bucket_size(16).import(&as_saved(), &Config::new())
    };
    let all = |state: &State| state.tensors.iter().map(|tensor| fields(state, &tensor.name)).collect::<Vec<_>>();
    let expected = all(&import(&good).unwrap());
    let mut refused = 0;
    for at in (0..good.len()).step_by(5) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x41;
        match import(&bytes) {
            Ok(state) => assert!(all(&state) == expected, "byte {at}"),
            Err(_) => refused += 1,
        }
        assert!(import(&good[..at]).is_err(), "cut at {at}");
    }
    assert!(refused > good.len() / 15, "{refused} of {}", good.len());
}
