//! Embeds gatherflow without any framework: a two-layer network in plain loops, two ranks as threads of this process.
//!
//! `cargo run --release --example custom_executor [none|chain|window] [steps] [megabytes of parameters]`
//!
//! A unit is what the executor enters at once. Guards give the parameter's own memory to read and the gradient's own
//! memory to write; leaving a unit in backward lets its gradients go while the rest of backward still runs.

use std::process::ExitCode;

use gatherflow::{
    ChunkId, Config, DType, Engine, Error, Lr, Mode, Model, ParamId, Pass, Rank, Ranks, UnitId, WriteMode, bf16,
};

pub(crate) type Size = [usize; 3]; // inputs, hidden units, and rows of a microbatch
pub(crate) struct Net {
    size: Size,
    chunk: ChunkId,
    hidden: (UnitId, ParamId, ParamId),
    output: (UnitId, ParamId, ParamId),
}

impl Net {
    /// Registration is in forward order: units, and in each its parameters.
    pub(crate) fn register(model: &mut Model, size: Size) -> Result<Self, Error> {
        let chunk = model.chunk();
        let hidden = model.unit(chunk, "hidden")?;
        let w1 = model.param(hidden, "hidden.weight", &[size[1], size[0]], DType::Bf16)?;
        let b1 = model.param(hidden, "hidden.bias", &[size[1]], DType::F32)?;
        let output = model.unit(chunk, "output")?;
        let w2 = model.param(output, "output.weight", &[size[1]], DType::Bf16)?;
        let b2 = model.param(output, "output.bias", &[1], DType::F32)?;
        Ok(Self { size, chunk, hidden: (hidden, w1, b1), output: (output, w2, b2) })
    }

    /// Forward and backward of one microbatch; returns the mean squared error.
    fn train(&self, pass: &Pass<'_>, data: &[(Vec<f32>, f32)]) -> Result<f32, Error> {
        let [inputs, width, rows] = self.size;
        let (unit, w1, b1) = self.hidden;
        let entered = pass.enter(unit)?;
        let (w, b) = (entered.read::<bf16>(w1)?, entered.read::<f32>(b1)?);
        let activate = |x: &[f32], j: usize| {
            let row = &w[j * inputs..(j + 1) * inputs];
            (row.iter().zip(x).map(|(w, x)| w.to_f32() * x).sum::<f32>() + b[j]).tanh()
        };
        let hidden: Vec<Vec<f32>> = data.iter().map(|(x, _)| (0..width).map(|j| activate(x, j)).collect()).collect();

        let (unit, w2, b2) = self.output;
        let entered = pass.enter(unit)?;
        let (w, b) = (entered.read::<bf16>(w2)?, entered.read::<f32>(b2)?);
        let predict = |h: &[f32]| h.iter().zip(&*w).map(|(h, w)| h * w.to_f32()).sum::<f32>() + b[0];
        let errors: Vec<f32> = hidden.iter().zip(data).map(|(h, (_, y))| predict(h) - y).collect();
        let loss = errors.iter().map(|e| e * e).sum::<f32>() / rows as f32;
        let d_out: Vec<f32> = errors.iter().map(|e| 2.0 * e / rows as f32).collect();

        let back = pass.backward(unit)?;
        write(back.grad(w2)?, |j| d_out.iter().zip(&hidden).map(|(d, h)| d * h[j]).sum());
        write(back.grad(b2)?, |_| d_out.iter().sum());
        let w = back.read::<bf16>(w2)?;
        let d_hidden = |i: usize, j: usize| d_out[i] * w[j].to_f32() * (1.0 - hidden[i][j] * hidden[i][j]);
        let d_hidden: Vec<Vec<f32>> = (0..rows).map(|i| (0..width).map(|j| d_hidden(i, j)).collect()).collect();
        drop(w);
        back.leave()?; // the output unit's gradients are complete: their reduction starts here

        let back = pass.backward(self.hidden.0)?;
        write(back.grad(w1)?, |n| d_hidden.iter().zip(data).map(|(d, (x, _))| d[n / inputs] * x[n % inputs]).sum());
        write(back.grad(b1)?, |j| d_hidden.iter().map(|d| d[j]).sum());
        back.leave()?;
        Ok(loss)
    }
}

/// The first write of a step overwrites, later ones (more microbatches, tied weights) accumulate.
fn write(mut guard: gatherflow::Grad<'_, f32>, gradient: impl Fn(usize) -> f32) {
    match guard.mode() {
        WriteMode::Overwrite => guard.iter_mut().enumerate().for_each(|(i, g)| *g = gradient(i)),
        WriteMode::Accumulate => guard.iter_mut().enumerate().for_each(|(i, g)| *g += gradient(i)),
    }
    guard.complete();
}

/// Numbers in [-1, 1): a splitmix64 of the seed.
fn random(seed: u64) -> f32 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

pub(crate) fn run(rank: Rank, config: &Config, steps: u64, size: Size) -> Result<(f32, u64), Error> {
    let number = rank.rank() as u64;
    let mut model = Model::new();
    let net = Net::register(&mut model, size)?;
    let mut engine = Engine::new(rank, model, config.clone(), |param, out| {
        let scale = if param.shape.len() > 1 { 0.5 } else { 0.1 };
        out.fill_with(|i| scale * random(u64::from(param.id.0) << 32 | i as u64));
    })?;
    engine.set_lr(gatherflow::GroupId::DEFAULT, Lr::schedule(|t| 0.01 / (1.0 + t as f64 / 100.0)))?;
    let mut loss = 0.0;
    for step in 0..steps {
        let input = |i: u64, k: u64| random((((step * 2 + number) << 16) + i) * 16 + k + 1);
        let row = |i: u64| (0..size[0] as u64).map(|k| input(i, k)).collect::<Vec<f32>>();
        let data: Vec<_> = (0..size[2] as u64).map(|i| (row(i), row(i).iter().sum::<f32>().sin())).collect();
        loss = net.train(&engine.pass(net.chunk, 0, true, Mode::Train)?, &data)?;
        let outcome = engine.step()?.outcome()?;
        if number == 0 && step % 50 == 0 {
            println!("step {step:4}  loss {loss:.4}  grad norm {:.4}", outcome.grad_norm.unwrap_or(f64::NAN));
        }
    }
    let hash = engine.params_hash()?;
    engine.close()?;
    if number == 0 {
        println!("{}", engine.report());
    }
    Ok((loss, hash))
}

fn arguments() -> Result<(Config, u64, Size), String> {
    let mut arguments = std::env::args().skip(1);
    let mut config = Config::new().num_buckets(4);
    config.set("overlap", &arguments.next().unwrap_or("window".into())).map_err(|e| e.to_string())?;
    let mut number = |what, default| match arguments.next() {
        Some(n) => n.parse::<u32>().map_err(|_| format!("{what} = `{n}`: expected a whole number")),
        None => Ok(default),
    };
    let (steps, megabytes) = (u64::from(number("steps", 200)?), number("megabytes", 0)?);
    if let Some(more) = arguments.next() {
        return Err(format!("`{more}`: expected overlap, steps and megabytes, and nothing more"));
    }
    let width = (f64::from(megabytes) * 1e6 / 2.0).sqrt() as usize; // of a square weight in bf16
    Ok((config, steps, if megabytes > 0 { [width, width, 1] } else { [8, 64, 64] }))
}

fn main() -> ExitCode {
    let done = arguments().map_err(|e| (e, 2)).and_then(|(c, n, s)| train(&c, n, s).map_err(|e| (e.to_string(), 1)));
    let Err((message, code)) = done else { return ExitCode::SUCCESS };
    eprintln!("error: {message}");
    ExitCode::from(code)
}

fn train(config: &Config, steps: u64, size: Size) -> Result<(), Box<dyn std::error::Error>> {
    let ranks = Ranks::local(2)?;
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = ranks.into_iter().map(|r| scope.spawn(move || run(r, config, steps, size))).collect();
        handles.into_iter().map(|h| h.join().expect("a rank panicked")).collect::<Result<_, _>>()
    })?;
    assert!(results.iter().all(|r| r.1 == results[0].1), "ranks must hold the same parameters");
    println!("final loss {:.4}, all ranks hold the parameters {:016x}", results[0].0, results[0].1);
    Ok(())
}
