//! The kernel reads and writes pinned memory past the page table: it stays where it is.

use super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster};
use anyhow::{Context as _, ensure};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pinned-buffers");

pub(crate) fn registered_buffers(cluster: &Cluster) -> TestResult {
    let stats = compare(cluster, "registered")?;
    let refused = stats["pager"]["evictions_refused"].as_u64();
    // Fewer than the buffer has: its pages were not pushed out, and the test shows nothing.
    ensure!(refused > Some(4096), "only {refused:?} evictions were refused");
    Ok(Outcome::Passed)
}

pub(crate) fn direct_reads_in_flight(cluster: &Cluster) -> TestResult {
    compare(cluster, "direct")?;
    Ok(Outcome::Passed)
}

pub(crate) fn pages_given_to_a_pipe(cluster: &Cluster) -> TestResult {
    compare(cluster, "spliced")?;
    Ok(Outcome::Passed)
}

fn compare(cluster: &Cluster, how: &str) -> anyhow::Result<serde_json::Value> {
    let file = cluster.file("data");
    let file = file.to_str().context("a path of letters")?;
    let stats = same_as_native(cluster, "64M", &[PROGRAM, how, file])?;
    let out = stats["pager"]["pages_out"].as_u64();
    ensure!(out > Some(10_000), "only {out:?} pages left: {stats}");
    Ok(stats)
}
