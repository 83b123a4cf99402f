//! Tests that zero pages are not transferred, and that clean pages are not sent again.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, succeed},
    process::missing,
};
use anyhow::ensure;
use serde_json::Value;

/// Pages that each program writes: 64 MiB.
const PAGES: u64 = 16 << 10;

/// Other memory of the interpreter, which is paged too.
const SLACK: u64 = 4 << 10;

/// Two sweeps over twice as much memory as is local: each writes zeros to all pages and reads them.
const ZEROS: &str = "
size = 64 << 20
memory = bytearray(size)
for sweep in range(2):
    for at in range(0, size, 4096):
        memory[at] = 0
    assert not any(memory[at] for at in range(0, size, 4096))
";

/// The same memory, written once and read four times.
const CLEAN: &str = "
size = 64 << 20
memory = bytearray(size)
for at in range(0, size, 4096):
    memory[at] = 1 + at % 251
for sweep in range(4):
    assert all(memory[at] == 1 + at % 251 for at in range(0, size, 4096))
";

pub(crate) fn zero_pages_and_clean_pages_are_not_sent(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let pager = |program: &str| -> anyhow::Result<Value> {
        let path = cluster.file("traffic.json");
        let mut command = cluster.command("run");
        command.args(["--local", "32M", "--stats"]).arg(&path);
        succeed(command.args(["--", "python3", "-c", program]))?;
        let stats: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        Ok(stats["pager"].clone())
    };
    let zeros = pager(ZEROS)?;
    let count = |stats: &Value, name: &str| stats[name].as_u64().unwrap_or_default();
    ensure!(count(&zeros, "pages_dropped_zero") > PAGES, "{zeros}");
    for counter in ["pages_out", "pages_in"] {
        ensure!(count(&zeros, counter) < SLACK, "{counter}: {zeros}");
    }
    let clean = pager(CLEAN)?;
    // At least half of the pages are fetched in each of the four sweeps, and evicted clean.
    ensure!(count(&clean, "pages_in") > PAGES, "{clean}");
    ensure!(count(&clean, "pages_dropped_clean") > PAGES / 2, "{clean}");
    ensure!(count(&clean, "pages_out") < PAGES + SLACK, "{clean}");
    Ok(Outcome::Passed)
}
