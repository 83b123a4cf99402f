//! Holds the repository to the recorded counts of `counts.toml`.

use hecaton_tidy::{Counts, Mode, Rule, Tree, check, compare};
use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The variable that allows an update of the counts.
const UPDATE: &str = "HECATON_TIDY_UPDATE";

#[test]
fn repository_exceeds_no_recorded_count() {
    let mode = mode();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("counts.toml");
    let tree = Tree::read(&root()).expect("the repository");
    let findings = check(&tree).expect("valid manifests");
    let (text, recorded) = match mode {
        // Reads nothing, so that a file with merge conflicts can be written anew.
        Mode::Accept => Default::default(),
        Mode::Check | Mode::Lower => {
            let text = fs::read_to_string(&file).expect("the recorded counts");
            let recorded = Counts::parse(&text).expect("valid counts");
            (text, recorded)
        }
    };

    let today = Counts::of(&findings);
    let updated = recorded.updated(&today, mode);
    if updated.render() != text && mode != Mode::Check {
        fs::write(&file, updated.render()).expect("write the counts");
    }
    let verdict = compare(&updated, &findings);
    // The harness hides the output of `println!` when a test passes.
    let _ = io::stderr().write_all(format!("{}{}", summary(&today), verdict.notes()).as_bytes());
    assert!(verdict.grown.is_empty(), "\n\n{}", verdict.failures());
}

fn mode() -> Mode {
    match env::var(UPDATE).as_deref() {
        Err(_) | Ok("") => Mode::Check,
        Ok("1") => Mode::Lower,
        Ok("accept") => Mode::Accept,
        Ok(other) => panic!("{UPDATE}={other} is unknown; set it to 1 or accept"),
    }
}

fn root() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3);
    crates.expect("crates/testing/tidy in a repository").to_owned()
}

fn summary(today: &Counts) -> String {
    let rules = Rule::ALL.map(|rule| {
        let (entries, sum) = today.totals(rule);
        format!("{} {entries} ({sum})", rule.name())
    });
    format!("\noffenders, and the sum of their counts: {}\n", rules.join(", "))
}
