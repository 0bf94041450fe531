//! Every test that docs/PROMISES.md names exists.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

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

#[test]
fn every_test_named_in_the_promises_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    for folder in ["runtime", "actors/src", "actors/tests", "kernels/src", "kernels/tests", "tests"] {
        sources(&root.join(folder), &mut code);
    }
    let promises = std::fs::read_to_string(root.join("docs/PROMISES.md")).unwrap();
    let names = promises.split('`').skip(1).step_by(2).filter(|name| name.matches('_').count() >= 2);
    let names: Vec<&str> = names.filter(|name| !name.contains(['/', ' ', '=', '.'])).collect();
    assert!(names.len() > 80, "{} names", names.len());
    let missing: Vec<_> = names.into_iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
}
