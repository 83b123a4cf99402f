//! Runs programs that use what the kernel offers for memory, or reaches memory by.

use super::super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster, process::missing_any};
use anyhow::ensure;

/// The kernel reads the list of a thread's robust mutexes when the thread ends, and waits for no
/// page.
pub(crate) fn robust_mutexes(cluster: &Cluster) -> TestResult {
    same_as_native(cluster, "16M", &[env!("CARGO_BIN_EXE_robust-mutexes")])?;
    Ok(Outcome::Passed)
}

/// The kernel waits for no page of a process's memory that is used as a file.
pub(crate) fn self_memory(cluster: &Cluster) -> TestResult {
    same_as_native(cluster, "16M", &[env!("CARGO_BIN_EXE_self-memory")])?;
    Ok(Outcome::Passed)
}

/// A page that the program may not touch is no reason to keep it, nor those beside it.
pub(crate) fn guarded_pages(cluster: &Cluster) -> TestResult {
    let stats = same_as_native(cluster, "16M", &[env!("CARGO_BIN_EXE_guarded-memory")])?;
    let out = stats["pager"]["pages_out"].as_u64();
    ensure!(out > Some(30_000), "only {out:?} pages left: {stats}");
    Ok(Outcome::Passed)
}

/// A parent that reads its child right after `fork` finds its own data there.
pub(crate) fn children_read_from_outside(cluster: &Cluster) -> TestResult {
    same_as_native(cluster, "16M", &[env!("CARGO_BIN_EXE_read-children")])?;
    Ok(Outcome::Passed)
}

/// Memory that a program registers with its own userfaultfd is its own from then on.
pub(crate) fn own_userfaultfd(cluster: &Cluster) -> TestResult {
    same_as_native(cluster, "16M", &[env!("CARGO_BIN_EXE_own-userfaultfd")])?;
    Ok(Outcome::Passed)
}

pub(crate) fn stress_ng_userfaultfd(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["stress-ng"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let command =
        "stress-ng --userfaultfd 1 --userfaultfd-bytes 16M --userfaultfd-ops 20000 --quiet";
    same_as_native(cluster, "64M", &command.split(' ').collect::<Vec<_>>())?;
    Ok(Outcome::Passed)
}
