//! The manager's API under requests that a fuzzer makes from its OpenAPI description: it answers
//! each as described, and goes on.

use crate::harness::{
    Outcome, TestResult,
    cluster::{PATIENCE, hecaton, log_in, ready_line, scratch},
    process::{Running, run},
};
use anyhow::{Context as _, ensure};
use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

/// How long the fuzzer may take to try all.
const LONG: Duration = Duration::from_secs(600);

/// The fuzzer where `make setup` puts it, from PyPI; or the reason to skip.
fn fuzzer() -> anyhow::Result<Result<PathBuf, String>> {
    let test = env::current_exe()?;
    let target = test.ancestors().nth(3).context("the test is in no target directory")?;
    let fuzzer = target.join("tools/schemathesis/bin/schemathesis");
    let reason = || format!("{} is not installed; run: make setup", fuzzer.display());
    Ok(if fuzzer.is_file() { Ok(fuzzer) } else { Err(reason()) })
}

/// Each operation with what fits its description and with what does not. Server-sent events do not
/// end, and are left out.
pub(crate) fn is_as_described() -> TestResult {
    let scratch = scratch()?;
    let fuzzer = match fuzzer()? {
        Ok(fuzzer) => fuzzer,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut manager = Running::spawn(
        Command::new(hecaton()?)
            .args(["manager", "--json", "--listen", "127.0.0.1:0", "--state"])
            .arg(scratch.path().join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_in(&scratch)?),
    )?;
    let ready = ready_line(&mut manager)?;
    let url = ready["manager"].as_str().unwrap_or_default().to_owned();
    let mut command = Command::new(fuzzer);
    command.args(["run", &format!("{url}/api/openapi.json"), "--no-color"]);
    // The description leaves out statistics of a node's donors and consumers. The manager
    // therefore rejects some reports that fit the description.
    command.args(["--checks", "all", "--exclude-checks", "positive_data_acceptance"]);
    command.args(["--phases", "examples,coverage,fuzzing"]);
    command.args(["--max-examples", "60", "--seed", "1", "--warnings", "off"]);
    command.args(["--exclude-path", "/v1/events", "--request-timeout", "60"]);
    command.current_dir(scratch.path()).stdin(Stdio::null());
    let ended = run(&mut command, LONG)?;
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    ensure!(ended.status.success(), "the API is not as described:\n{said}");
    // None of that was too much for it.
    let status =
        run(Command::new(hecaton()?).args(["status", "--json", "--manager", &url]), PATIENCE)?;
    status.expect_success("hecaton status")?;
    ensure!(manager.child_mut().try_wait()?.is_none(), "the manager has ended");
    Ok(Outcome::Passed)
}
