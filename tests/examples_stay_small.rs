//! Embedding takes few lines: an executor of its own under 150, a candle program that is there already at most ten changed ones.
//! What changed is counted against the plain program in `tests/plain`, which runs.
#![allow(clippy::unwrap_used)]

#[path = "plain/candle_vars.rs"]
mod plain;

use std::collections::BTreeSet;

use candle_core::{Result, Tensor, Var};

const README: &str = include_str!("../README.md");
const CHANGED: &str = include_str!("../examples/candle_vars.rs");
const PLAIN: &str = include_str!("plain/candle_vars.rs");

/// What candle-nn has under this name, as far as the plain program needs it.
struct AdamW {
    /// With both moments.
    vars: Vec<(Var, Var, Var)>,
    lr: f64,
    t: i32,
}

impl AdamW {
    fn new_lr(vars: Vec<Var>, lr: f64) -> Result<Self> {
        let with_moments = |var: Var| {
            let zeros = var.zeros_like()?;
            Ok((var, Var::from_tensor(&zeros)?, Var::from_tensor(&zeros)?))
        };
        Ok(Self { vars: vars.into_iter().map(with_moments).collect::<Result<_>>()?, lr, t: 0 })
    }

    fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        let gradients = loss.backward()?;
        self.t += 1;
        for (var, m, v) in &self.vars {
            let Some(g) = gradients.get(var) else { continue };
            m.set(&((m.as_tensor() * 0.9)? + (g * 0.1)?)?)?;
            v.set(&((v.as_tensor() * 0.999)? + (g.sqr()? * 0.001)?)?)?;
            let root = ((v.as_tensor() / (1.0 - 0.999_f64.powi(self.t)))?.sqrt()? + 1e-8)?;
            let update = ((m.as_tensor() / (1.0 - 0.9_f64.powi(self.t)))? / root)?;
            var.set(&((var.as_tensor() * (1.0 - 0.01 * self.lr))? - (update * self.lr)?)?)?;
        }
        Ok(())
    }
}

/// A line of code, without its comment and what is around it; nothing, if it is nothing else.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line).trim()
}

/// Lines of code.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(code).filter(|line| !line.is_empty()).collect()
}

/// The lines that only the first text has and those that only the second one has, by the longest common subsequence.
fn difference<'a>(one: &[&'a str], other: &[&'a str]) -> (Vec<&'a str>, Vec<&'a str>) {
    let mut common = vec![vec![0; other.len() + 1]; one.len() + 1];
    for i in (0..one.len()).rev() {
        for j in (0..other.len()).rev() {
            let either = common[i + 1][j].max(common[i][j + 1]);
            common[i][j] = if one[i] == other[j] { common[i + 1][j + 1] + 1 } else { either };
        }
    }
    let (mut i, mut j, mut removed, mut added) = (0, 0, Vec::new(), Vec::new());
    while i < one.len() || j < other.len() {
        if i < one.len() && j < other.len() && one[i] == other[j] {
            (i, j) = (i + 1, j + 1);
        } else if j == other.len() || i < one.len() && common[i + 1][j] >= common[i][j + 1] {
            removed.push(one[i]);
            i += 1;
        } else {
            added.push(other[j]);
            j += 1;
        }
    }
    (removed, added)
}

/// What differs between the plain program and the example. That a test's module must show its `main` is none of it.
fn changes() -> (Vec<&'static str>, Vec<&'static str>) {
    let plain: Vec<_> = lines(PLAIN).into_iter().map(|line| line.trim_start_matches("pub(crate) ")).collect();
    difference(&plain, &lines(CHANGED))
}

#[test]
fn an_executor_without_a_framework_takes_less_than_150_lines() {
    let lines = include_str!("../examples/custom_executor.rs").lines().count();
    assert!(lines < 150, "{lines} lines");
}

#[test]
fn a_plain_candle_program_changes_at_most_ten_lines_and_the_readme_says_how_many() {
    let (removed, added) = changes();
    assert!(removed.len() <= added.len() && added.len() <= 10, "{removed:#?} became {added:#?}");
    let marked = CHANGED.lines().filter(|line| line.contains("// changed")).count();
    assert_eq!(added.len(), marked, "{added:#?}");
    assert!(README.contains(&format!("{marked} changed lines")), "{marked} lines");
}

/// But for where candle-nn keeps its `Var`s.
#[test]
fn the_difference_in_the_readme_is_that_of_the_example() {
    let (removed, added) = changes();
    let shown = README.split("```diff").nth(1).unwrap().split("```").next().unwrap();
    let with = |sign: char| shown.lines().filter_map(|line| line.strip_prefix(sign)).map(code).collect::<BTreeSet<_>>();
    let (minus, plus, vars) =
        (with('-'), with('+'), "let vars = varmap.data().lock().expect(\"not poisoned\").clone();");
    assert!(plus.contains(vars));
    let plus: BTreeSet<_> = plus.into_iter().filter(|line| *line != vars).collect();
    // Those of `train`, which is what the README shows.
    let other = ["use ", "let ranks: ", "ranks.into_iter()", "train()"];
    let of_train = |lines: Vec<&'static str>| -> BTreeSet<String> {
        let lines = lines.into_iter().filter(|line| !other.iter().any(|start| line.starts_with(start)));
        lines.map(|line| line.replace("vars.into_values().collect()", "varmap.all_vars()")).collect()
    };
    let owned = |lines: BTreeSet<&str>| lines.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(of_train(added), owned(plus));
    assert_eq!(of_train(removed), owned(minus));
}

#[test]
fn the_plain_program_runs() {
    plain::main().unwrap();
}
