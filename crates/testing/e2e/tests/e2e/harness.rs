//! A small test runner: like libtest's, but a test can find out while it runs that this machine
//! lacks something, and be counted as skipped with its reason.
//!
//! Tests run one after the other: they look at what the whole cluster holds. A test that fails may
//! leave something behind in what all of them share, so the next one gets that anew.

use anyhow::Context as _;
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

/// Runs the tests whose name contains one of the arguments, all of them without an argument. `start`
/// makes what they share, or says what this machine lacks for that; it is asked again after a test
/// that failed.
pub(crate) fn run<C>(
    tests: &[Test<C>],
    start: impl Fn() -> anyhow::Result<Result<C, String>>,
    after_each: impl Fn(&str, &C) -> anyhow::Result<()>,
) -> ExitCode {
    let filters: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let chosen: Vec<_> = tests
        .iter()
        .filter(|test| filters.is_empty() || filters.iter().any(|word| test.name.contains(word)))
        .collect();
    println!("\nrunning {} tests", chosen.len());
    let (mut passed, mut failed, mut ignored) = (0, Vec::new(), 0);
    let first = Instant::now();
    let mut shared = None;
    for test in &chosen {
        let begun = Instant::now();
        let attempt = || {
            let started = match &mut shared {
                Some(started) => started,
                none => none.insert(start().context("what the tests share does not start")?),
            };
            let context = match started {
                Ok(context) => context,
                Err(lacking) => return Ok(Outcome::Skipped(lacking.clone())),
            };
            let outcome = (test.run)(context)?;
            after_each(test.name, context)?;
            Ok(outcome)
        };
        let result = catch_unwind(AssertUnwindSafe(attempt))
            // The panic's message has been printed where it happened.
            .unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
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
                let error = format!("{error:#}");
                println!("test {} ... FAILED\n    {error}", test.name);
                failed.push((test.name, error));
                shared = None;
            }
        }
    }
    if !failed.is_empty() {
        // All that failed in one place, and in libtest's words, which are looked for.
        println!("\nfailures:\n");
    }
    for (name, error) in &failed {
        println!("---- {name} stdout ----\n{error}\n");
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; {ignored} ignored; 0 measured; \
         {} filtered out; finished in {:.2}s\n",
        failed.len(),
        tests.len() - chosen.len(),
        first.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
