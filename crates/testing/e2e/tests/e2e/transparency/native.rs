//! Runs a program natively and on the pool, and compares.

use crate::harness::{
    cluster::{Cluster, LONG},
    process::run,
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::process::Command;

/// Runs `command` as it is, and with `--local LOCAL` on the pool; both must end with the same
/// status and the same output. Returns the statistics of the second.
pub(super) fn same_as_native(
    cluster: &Cluster,
    local: &str,
    command: &[&str],
) -> anyhow::Result<Value> {
    let (program, arguments) = command.split_first().context("a program")?;
    let native = run(Command::new(program).args(arguments), LONG)?;
    let stats = cluster.file("stats.json");
    let mut pooled = cluster.command("run");
    pooled.args(["--local", local, "--stats"]).arg(&stats).arg("--").args(command);
    let pooled = run(&mut pooled, LONG)?;
    ensure!(
        (native.status, &native.stdout) == (pooled.status, &pooled.stdout),
        "natively: {}, {:?} {:?}\n    on the pool: {}, {:?} {:?}",
        native.status,
        native.text(),
        native.stderr,
        pooled.status,
        pooled.text(),
        pooled.stderr
    );
    Ok(serde_json::from_slice(&std::fs::read(&stats)?)?)
}
