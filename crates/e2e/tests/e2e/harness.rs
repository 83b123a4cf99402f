//! A small test runner: like libtest's, but a test can find out while it runs that this machine
//! lacks something, and be counted as skipped with its reason.
//!
//! Tests run one after the other: they look at what the whole cluster holds.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

/// What a test that did not fail has come to.
pub(crate) enum Outcome {
    Passed,
    Skipped(String),
}

pub(crate) type TestResult = anyhow::Result<Outcome>;

/// A named test of a context that all of them share.
pub(crate) struct Test<C> {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&C) -> TestResult,
}

/// Runs the tests whose name contains one of the arguments, all of them without an argument.
pub(crate) fn run<C>(
    tests: &[Test<C>],
    context: Result<&C, &str>,
    after_each: impl Fn(&str, &C) -> anyhow::Result<()>,
) -> ExitCode {
    let filters: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let chosen: Vec<_> = tests
        .iter()
        .filter(|test| filters.is_empty() || filters.iter().any(|word| test.name.contains(word)))
        .collect();
    println!("\nrunning {} tests", chosen.len());
    let (mut passed, mut failed, mut ignored) = (0, Vec::new(), 0);
    let start = Instant::now();
    for test in &chosen {
        let begun = Instant::now();
        let result = match context {
            Ok(context) => catch_unwind(AssertUnwindSafe(|| {
                let outcome = (test.run)(context)?;
                after_each(test.name, context)?;
                Ok(outcome)
            }))
            // The panic's message has been printed where it happened.
            .unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked"))),
            Err(reason) => Ok(Outcome::Skipped(reason.to_owned())),
        };
        match result {
            Ok(Outcome::Passed) => {
                passed += 1;
                println!("test {} ... ok ({:.1} s)", test.name, begun.elapsed().as_secs_f64());
            }
            Ok(Outcome::Skipped(reason)) => {
                ignored += 1;
                println!("test {} ... ignored, {reason}", test.name);
            }
            Err(error) => {
                println!("test {} ... FAILED", test.name);
                println!("    {error:#}");
                failed.push(test.name);
            }
        }
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; {ignored} ignored; 0 measured; \
         {} filtered out; finished in {:.2}s\n",
        failed.len(),
        tests.len() - chosen.len(),
        start.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
