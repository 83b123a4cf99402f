//! Checks that pinned pages stay local: the kernel reads and writes them past the page table.

use super::super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster};
use anyhow::{Context as _, ensure};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pinned-buffers");

pub(crate) fn registered_buffers(cluster: &Cluster) -> TestResult {
    let stats = compare(cluster, "64M", "registered", OTHERS)?;
    ensure!(stats["pager"]["pages_out"].as_u64() > Some(10_000), "too few pages left: {stats}");
    let refused = stats["pager"]["evictions_refused"].as_u64();
    // Fewer than the buffer has: its pages were not pushed out, and the test shows nothing.
    ensure!(refused > Some(4096), "only {refused:?} evictions were refused");
    Ok(Outcome::Passed)
}

pub(crate) fn direct_reads_in_flight(cluster: &Cluster) -> TestResult {
    compare(cluster, "64M", "direct", OTHERS)?;
    Ok(Outcome::Passed)
}

pub(crate) fn pages_given_to_a_pipe(cluster: &Cluster) -> TestResult {
    compare(cluster, "64M", "spliced", OTHERS)?;
    Ok(Outcome::Passed)
}

/// As much is pinned as may be local: the limit cannot be kept, and nothing waits for ever.
pub(crate) fn all_that_may_be_local(cluster: &Cluster) -> TestResult {
    let stats = compare(cluster, "16M", "registered", "1000")?;
    let (peak, limit) = (&stats["pager"]["local_peak_bytes"], &stats["pager"]["local_limit_bytes"]);
    ensure!(peak.as_u64() > limit.as_u64(), "{peak} bytes were local at most, of {limit}");
    Ok(Outcome::Passed)
}

/// Pages of other memory: far more than is local.
const OTHERS: &str = "40000";

fn compare(
    cluster: &Cluster,
    local: &str,
    how: &str,
    others: &str,
) -> anyhow::Result<serde_json::Value> {
    let file = cluster.file("data");
    let file = file.to_str().context("a path of letters")?;
    same_as_native(cluster, local, &[PROGRAM, how, file, others])
}
