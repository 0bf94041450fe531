//! docs/PROMISES.md has a row for every rule, behaviour, case and fault, and every test that it names exists and runs.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

fn promises() -> String {
    std::fs::read_to_string(root().join("docs/PROMISES.md")).unwrap()
}

/// What a row of a table is about, and the tests that it names.
struct Row<'a> {
    about: &'a str,
    tests: &'a str,
}

impl<'a> Row<'a> {
    /// The rows of the table under a heading.
    fn under(promises: &'a str, heading: &str) -> Vec<Self> {
        let (_, section) = promises.split_once(&format!("\n## {heading}\n")).expect(heading);
        let section = section.split("\n## ").next().unwrap();
        let cells = |line: &'a str| line.strip_prefix("| ")?.strip_suffix(" |");
        // Behind the head of the table and the line under it.
        let rows = section.lines().filter_map(cells).skip(2).map(|cells| {
            let (about, tests) = (cells.split(" | ").next().unwrap(), cells.rsplit(" | ").next().unwrap());
            Self { about, tests }
        });
        rows.collect()
    }

    /// Of `L1, L6` and `E1 to E6`: each of them. Of `4 used on some ranks only`: the number.
    fn ids(&self) -> Vec<String> {
        if self.about.starts_with(|c: char| c.is_ascii_digit()) {
            return self.about.split(' ').take(1).map(String::from).collect();
        }
        let ids = self.about.split(", ").flat_map(|part| match part.split_once(" to ") {
            Some((first, last)) => numbered(&first[..1], first[1..].parse().unwrap()..=last[1..].parse().unwrap()),
            None => vec![part.to_string()],
        });
        ids.collect()
    }

    /// In backticks and of several words.
    fn names(&self) -> impl Iterator<Item = &'a str> {
        let quoted = self.tests.split('`').skip(1).step_by(2);
        quoted.filter(|name| name.matches('_').count() >= 2 && !name.contains(['/', ' ', '=', '.']))
    }

    /// Files all of whose tests are meant.
    fn files(&self) -> impl Iterator<Item = &'a str> {
        let told = self.tests.split("every test of `").skip(1);
        told.map(|rest| rest.split('`').next().unwrap())
    }
}

fn numbered(letter: &str, numbers: impl Iterator<Item = u32>) -> Vec<String> {
    numbers.map(|n| format!("{letter}{n}")).collect()
}

/// The headings of the tables, and what each must have.
fn required() -> [(&'static str, Vec<String>); 4] {
    let rules = [("V", 1, 3), ("O", 1, 4), ("C", 1, 1), ("S", 1, 1), ("F", 1, 1), ("K", 1, 1), ("E", 1, 8)];
    let behaviours = [("L", 1, 11), ("G", 1, 5), ("T", 0, 9), ("P", 1, 9), ("D", 1, 2)];
    let of = |ids: &[(&str, u32, u32)]| ids.iter().flat_map(|(c, from, to)| numbered(c, *from..=*to)).collect();
    let behaviours: Vec<String> = of(&behaviours);
    [
        ("Rules", of(&rules)),
        ("Behaviours", [behaviours, vec!["T2a".into()]].concat()),
        ("Reported faults of systems that do this job", numbered("", 1..=25)),
        ("Faults of the starting point", numbered("", 1..=13)),
    ]
}

/// The attributes and comments above each function of this name.
fn above(code: &str, name: &str) -> Vec<String> {
    let function = format!("fn {name}(");
    let lines = |at: usize| code[..at].rsplit('\n').skip(1);
    let head =
        |at| lines(at).take_while(|line| line.trim_start().starts_with(['#', '/'])).collect::<Vec<_>>().join("\n");
    code.match_indices(&function).map(|(at, _)| head(at)).collect()
}

fn has(code: &str, attribute: &str) -> bool {
    code.lines().any(|line| line.trim_start().starts_with(attribute))
}

#[test]
fn every_test_named_in_the_promises_exists_and_runs() {
    let mut code = String::new();
    for folder in ["runtime", "actors/src", "actors/tests", "kernels/src", "kernels/tests", "tests"] {
        sources(&root().join(folder), &mut code);
    }
    let promises = promises();
    let (mut names, mut wrong) = (0, Vec::new());
    for row in required().iter().flat_map(|(heading, _)| Row::under(&promises, heading)) {
        for name in row.names() {
            names += 1;
            let tests: Vec<_> = above(&code, name).into_iter().filter(|above| has(above, "#[test]")).collect();
            let ignored =
                !tests.is_empty() && tests.iter().all(|above| has(above, "#[ignore") || has(above, "#[cfg_attr"));
            if tests.is_empty() || ignored && !row.tests.contains("ignored") {
                wrong.push(format!("{}: `{name}` is {}", row.about, if ignored { "ignored" } else { "no test" }));
            }
        }
        for file in row.files() {
            let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
            if !has(&text, "#[test]") || has(&text, "#[ignore") {
                wrong.push(format!("{}: `{file}` has no tests, or ignored ones", row.about));
            }
        }
    }
    assert!(names > 200, "{names} names");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_rule_behaviour_case_and_fault_has_a_row_with_tests() {
    let promises = promises();
    for (heading, required) in required() {
        let rows = Row::under(&promises, heading);
        let there: BTreeSet<String> = rows.iter().flat_map(Row::ids).collect();
        let missing: Vec<_> = required.iter().filter(|id| !there.contains(*id)).collect();
        assert!(missing.is_empty(), "{heading}: no rows for {missing:?}");
        for row in rows {
            let tested = row.names().next().is_some() || row.files().next().is_some();
            assert!(tested, "{heading}: {} has no test", row.about);
        }
    }
}
