//! Runs programs whose children cannot reach the pager: such a child stays local, and is right.

use super::super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster, process::missing_any};
use anyhow::{Context as _, ensure};

pub(crate) fn their_forks(cluster: &Cluster) -> TestResult {
    for kind in ["seccomp", "killed", "user", "files"] {
        let command = [env!("CARGO_BIN_EXE_sandboxed-forks"), kind];
        let stats = same_as_native(cluster, "16M", &command).context(kind)?;
        let out = stats["pager"]["pages_out"].as_u64();
        ensure!(out > Some(5_000), "only {out:?} pages left: {stats}");
    }
    Ok(Outcome::Passed)
}

/// A program that another user starts from one on the pool runs.
pub(crate) fn another_user(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["setpriv", "su"]) {
        return Ok(Outcome::Skipped(reason));
    }
    for kind in [
        &["setpriv", "--reuid", "65534", "--clear-groups", "id", "-u"][..],
        &["su", "nobody", "-s", "/bin/sh", "-c", "id -u; id -u"],
    ] {
        same_as_native(cluster, "64M", kind)?;
    }
    Ok(Outcome::Passed)
}
