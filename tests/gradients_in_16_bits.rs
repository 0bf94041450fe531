//! Gradients in bf16 and f16, in memory and on the wire, are summed in f32: the bits are those of a serial optimizer that rounds
//! each write and nothing else.
#![allow(clippy::unwrap_used)]

mod reference;
mod synthetic;

use gatherflow::{Config, DType, ErrorKind, Model, ParamOptions, Storage};
use reference::Scaler;
use synthetic::{Job, Net, Setting, serial};

/// Several microbatches, so that gradients are accumulated.
fn program(step: u64, rank: usize) -> Vec<Vec<usize>> {
    (0..=(step as usize + rank) % 3).map(|_| (0..6).collect()).collect()
}

fn every_mode_gives_the_bits_of_the_reference(job: &Job<'_>, storage: Storage) {
    let expected = serial(job);
    let plan = job.net.model.plan(job.ranks, &job.config(&Setting::of(gatherflow::Overlap::None))).unwrap();
    for param in plan.params().iter().filter(|p| p.trainable) {
        let named = job.net.params()[param.id.index()].options.grad_dtype;
        assert_eq!(param.grad_dtype, named.unwrap_or(job.grad_dtype), "{}", param.name);
    }
    for mode in Setting::modes() {
        job.train(&expected, &Setting { storage, ..mode });
    }
}

/// Parameters that follow the key and ones that have f32 gradients of their own. With storage shared f32 parameters have no place
/// in the memory of 16-bit gradients, so these do not follow the key there.
fn net(half: DType, storage: Storage) -> Net {
    let mut net = Net::empty();
    net.chunk();
    let own = ParamOptions { grad_dtype: Some(DType::F32), ..ParamOptions::default() };
    let full = if storage == Storage::Shared { own.clone() } else { ParamOptions::default() };
    for index in 0..6 {
        net.unit(&format!("layer {index}"));
        net.param(&format!("layer {index}.weight"), 100 + index, half, ParamOptions::default());
        net.param(&format!("layer {index}.sparse"), 30, DType::F32, full.clone());
        net.param(&format!("layer {index}.exact"), 9, half, own.clone());
    }
    net
}

#[test]
fn one_key_makes_all_gradients_bf16() {
    for storage in [Storage::Views, Storage::Shared] {
        let net = net(DType::Bf16, storage);
        let job = Job { grad_dtype: DType::Bf16, ..Job::new(&net, 3, 4, &program) };
        every_mode_gives_the_bits_of_the_reference(&job, storage);
    }
    let net = Net::mixed(false);
    let bf16 = Job { grad_dtype: DType::Bf16, ..Job::new(&net, 3, 4, &program) };
    every_mode_gives_the_bits_of_the_reference(&bf16, Storage::Views);
    let f32 = serial(&Job { grad_dtype: DType::F32, ..Job::new(&net, 3, 4, &program) });
    assert_ne!(serial(&bf16).weights[4], f32.weights[4], "it does make a difference");
}

#[test]
fn f16_gradients_of_f16_and_f32_parameters_come_with_a_loss_scale() {
    for storage in [Storage::Views, Storage::Shared] {
        let net = net(DType::F16, storage);
        let job = Job {
            scaler: Some(Scaler::new(256.0, 2, 1)),
            grad_dtype: DType::F16,
            overflow: |step, rank| step == 1 && rank == 1,
            ..Job::new(&net, 2, 4, &program)
        };
        every_mode_gives_the_bits_of_the_reference(&job, storage);
    }
}

fn model(dtype: DType, grad_dtype: Option<DType>) -> Model {
    let mut model = Model::new();
    let chunk = model.chunk();
    let unit = model.unit(chunk, "unit").unwrap();
    let options = ParamOptions { grad_dtype, ..ParamOptions::default() };
    model.param_with(unit, "half", &[4], dtype, options).unwrap();
    model
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let refusal = |model: Model, text: &str| model.plan(2, &Config::from_toml(text).unwrap()).unwrap_err();
    let error = refusal(model(DType::F32, None), "grad_dtype = \"f16\"");
    assert!(error.to_string().contains("`half` has f16 gradients") && error.kind() == ErrorKind::Config, "{error}");
    let error = refusal(model(DType::Bf16, None), "grad_dtype = \"f16\"\nscaler = \"dynamic\"");
    assert!(error.to_string().contains("`half` is bf16 with f16 gradients"), "{error}");
    let error = refusal(model(DType::F32, Some(DType::Bf16)), "grad_dtype = \"f32\"");
    assert!(error.to_string().contains("`grad_dtype` is set but never read"), "{error}");
    assert!(
        Config::from_toml("grad_dtype = \"f64\"").unwrap_err().to_string().contains("\"f32\", \"bf16\" or \"f16\"")
    );
    model(DType::F32, None).plan(2, &Config::from_toml("grad_dtype = \"bf16\"").unwrap()).unwrap();
}
