//! Checks that a child finds `MADV_WIPEONFORK` memory empty wherever its parent's pages are.

use super::super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster};
use anyhow::{Context as _, ensure};

pub(crate) fn on_fork(cluster: &Cluster) -> TestResult {
    for how in ["libc", "syscall"] {
        let command = [env!("CARGO_BIN_EXE_wiped-memory"), how];
        let stats = same_as_native(cluster, "16M", &command).context(how)?;
        let out = stats["pager"]["pages_out"].as_u64();
        ensure!(out > Some(10_000), "only {out:?} pages left: {stats}");
    }
    Ok(Outcome::Passed)
}
