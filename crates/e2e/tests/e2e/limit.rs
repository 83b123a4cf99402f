//! Local memory stays below `--local` at all times, seen from outside.

use crate::{
    cluster::{Cluster, LONG},
    harness::{Outcome, TestResult},
    process::{anonymous_bytes, family, name_of, run_watched},
};
use anyhow::ensure;

const LOCAL: u64 = 64 << 20;

/// Pages on their way out, in the program: one batch.
const IN_FLIGHT: u64 = 1 << 20;

/// Anonymous memory that is not paged: stacks, written-to program data, the preloaded library's.
const NOT_PAGED: u64 = 4 << 20;

pub(crate) fn resident_memory_stays_below(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("64M", env!("CARGO_BIN_EXE_verify-threads"));
    command.args(["3", "16000", "6000"]);
    let (mut most, mut looks) = (0, 0);
    let ended = run_watched(&mut command, LONG, |launcher| {
        let programs = family(launcher)
            .into_iter()
            .filter(|id| name_of(*id).is_some_and(|name| name.starts_with("verify-threads")));
        let resident: u64 = programs.filter_map(anonymous_bytes).sum();
        looks += u64::from(resident > 0);
        most = most.max(resident);
        Ok(())
    })?;
    ended.expect_success("verify-threads")?;
    ensure!(looks > 50, "the program was seen only {looks} times");
    // A program that never came near its limit would prove nothing.
    ensure!(most > LOCAL / 2, "at most {} MiB were resident of {}", most >> 20, LOCAL >> 20);
    ensure!(
        most <= LOCAL + IN_FLIGHT + NOT_PAGED,
        "{} KiB were resident with --local {} KiB",
        most >> 10,
        LOCAL >> 10
    );
    Ok(Outcome::Passed)
}
