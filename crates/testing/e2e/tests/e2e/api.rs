//! The manager's API under requests that a fuzzer makes from its OpenAPI description: it answers each as
//! described, and goes on.

use crate::{
    cluster::{Cluster, PATIENCE, hecaton, log_in, ready_line, scratch},
    harness::{Outcome, TestResult},
    process::{Running, missing, run},
};
use anyhow::ensure;
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Whose findings are known.
const FUZZER: &str = "schemathesis==4.32.5";

/// How long the fuzzer may take to be installed, and to try all.
const LONG: Duration = Duration::from_secs(600);

/// Installs the fuzzer in a directory of its own; or says why it cannot be had here.
fn fuzzer(scratch: &Path) -> anyhow::Result<Result<PathBuf, String>> {
    if let Some(reason) = missing("python3") {
        return Ok(Err(reason));
    }
    let home = scratch.join("fuzzer");
    let made = run(Command::new("python3").args(["-m", "venv"]).arg(&home), LONG)?;
    if !made.status.success() {
        return Ok(Err("python3 has no venv".to_owned()));
    }
    let mut install = Command::new(home.join("bin/pip"));
    let installed = run(install.args(["install", "--quiet", "--no-input", FUZZER]), LONG)?;
    if !installed.status.success() {
        let said = installed.stderr.trim().lines().last().unwrap_or_default().to_owned();
        return Ok(Err(format!("{FUZZER} cannot be installed from PyPI: {said}")));
    }
    Ok(Ok(home.join("bin/schemathesis")))
}

/// Each operation with what fits its description and with what does not. Server-sent events do not end, and
/// are left out.
pub(crate) fn is_as_described(_: &Cluster) -> TestResult {
    let scratch = scratch()?;
    let fuzzer = match fuzzer(scratch.path())? {
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
    // What the children of a node count is not described to the last figure: not all that fits the
    // description of a report is one.
    command.args(["--checks", "all", "--exclude-checks", "positive_data_acceptance"]);
    command.args(["--phases", "examples,coverage,fuzzing"]);
    command.args(["--max-examples", "60", "--seed", "1", "--warnings", "off"]);
    command.args(["--exclude-path", "/v1/events", "--request-timeout", "20"]);
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
