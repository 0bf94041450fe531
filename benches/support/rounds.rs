//! Rounds of all cases of a bench, interleaved, so that a slow minute of the machine is in all of them; then a table.

/// Measured values of one case, one per round.
pub(crate) struct Case {
    name: String,
    target: Option<f64>,
    values: Vec<f64>,
}

/// Collects values round by round and prints medians, lowest and highest.
#[derive(Default)]
pub(crate) struct Rounds {
    cases: Vec<Case>,
}

impl Rounds {
    /// Adds a value to a case; cases are listed in the order in which they first came.
    pub(crate) fn put(&mut self, name: impl Into<String>, target: Option<f64>, value: f64) {
        let name = name.into();
        match self.cases.iter_mut().find(|case| case.name == name) {
            Some(case) => case.values.push(value),
            None => self.cases.push(Case { name, target, values: vec![value] }),
        }
    }

    /// Prints the table; `unit` heads the value columns.
    pub(crate) fn print(mut self, title: &str, unit: &str) {
        println!("\n{title}");
        println!("{:<44} {:>10} {:>10} {:>10} {:>10}  {unit}", "", "median", "lowest", "highest", "target");
        for Case { name, target, values } in &mut self.cases {
            values.sort_by(f64::total_cmp);
            let (median, low, high) = (values[values.len() / 2], values[0], values[values.len() - 1]);
            let target = target.map_or(String::new(), |target| format!("{target:.2}"));
            println!("{name:<44} {median:>10.3} {low:>10.3} {high:>10.3} {target:>10}");
        }
    }
}

/// A number from the environment.
pub(crate) fn setting(name: &str, default: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")),
        Err(_) => default,
    }
}
