//! Locks memory on the pool: within the local memory as natively, and not beyond it.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, succeed},
};
use anyhow::ensure;

const PROGRAM: &str = env!("CARGO_BIN_EXE_locked-memory");

pub(crate) fn within_local_memory(cluster: &Cluster) -> TestResult {
    same_as_native(cluster, "64M", &[PROGRAM, "20"])?;
    Ok(Outcome::Passed)
}

/// Three quarters of the local memory are the limit.
pub(crate) fn more_than_local_memory(cluster: &Cluster) -> TestResult {
    let ended = succeed(cluster.on_pool("64M", PROGRAM).arg("100"))?;
    let no_memory = "Cannot allocate memory (os error 12)";
    let expected = format!(
        "mlock: {no_memory}\n\
         once more: {no_memory}\n\
         munlock: done\n\
         mlock2: {no_memory}\n\
         munlock: done\n\
         mlockall, present: {no_memory}\n\
         mlockall, to come: done\n\
         to come: 1024 of 1024 pages\n\
         to come, large: Resource temporarily unavailable (os error 11)\n\
         munlockall: done\n\
         mlockall, all as it is touched: {no_memory}\n\
         as it is touched: 0 of 1024 pages\n\
         munlockall: done\n\
         nothing: Invalid argument (os error 22)\n\
         brought in: 1024 pages\n\
         verified\n"
    );
    ensure!(ended.text() == expected, "it said {}", ended.text());
    Ok(Outcome::Passed)
}
