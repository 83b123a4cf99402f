//! Checks that a program may map as much as its host and the pool hold together, and no more.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, all, succeed},
    process::run,
};
use anyhow::{Context as _, ensure};
use std::fs;

const PROGRAM: &str = env!("CARGO_BIN_EXE_large-mapping");

pub(crate) fn of_more_than_the_host_has() -> TestResult {
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory")?;
    if mode.trim() != "0" {
        return Ok(Outcome::Skipped(format!("vm.overcommit_memory is {}, not 0", mode.trim())));
    }
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok());
        kilobytes.with_context(|| format!("no {name} in {meminfo}")).map(|kib: u64| kib << 10)
    };
    // The host's swap is another tests' affair, too: as it is now, and much more.
    let host = field("MemTotal:")? + field("SwapTotal:")?;
    let cluster = Cluster::start(2, "2G")?;
    cluster.eventually("both donors have told what they have", PATIENCE, |status| {
        let told = all(status, "donors").filter(|donor| !donor["stats"].is_null());
        Ok(told.count() == 2)
    })?;
    let (fits, exceeds) = ((host + (3 << 30)).to_string(), (host + (64 << 30)).to_string());
    let natively = run(std::process::Command::new(PROGRAM).args([&fits, "200"]), LONG)?;
    ensure!(
        natively.text() == "mmap: Cannot allocate memory (os error 12)\n",
        "{}",
        natively.text()
    );
    let large = succeed(cluster.on_pool("64M", PROGRAM).args([&fits, "200"]))?;
    ensure!(large.text() == "verified\n", "{}", large.text());
    let too_large = succeed(cluster.on_pool("64M", PROGRAM).args([&exceeds, "200"]))?;
    ensure!(too_large.text() == natively.text(), "{}", too_large.text());
    Ok(Outcome::Passed)
}
