//! `fork` keeps its meaning: memory as of the fork, for both, whatever either writes.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, succeed},
    process::missing,
};
use anyhow::{Context as _, ensure};
use std::{fs, path::Path};

pub(crate) fn without_exec(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("32M", env!("CARGO_BIN_EXE_fork-without-exec"));
    let ended = succeed(command.args(["16000", "3"]))?;
    ensure!(ended.text() == "verified in 7 processes\n", "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}

/// Several threads fork at once, children too.
pub(crate) fn a_storm(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_fork-storm"));
    let ended = succeed(command.args(["3", "2000", "20"]))?;
    ensure!(ended.text() == "verified in 60 children\n", "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}

/// Children that are made past libc's `fork`: with what libc has for it they are like any other;
/// without, they end, but never read zeros in the place of what is in the pool.
pub(crate) fn past_libc(cluster: &Cluster) -> TestResult {
    for (how, says) in [
        ("syscall-fork", "verified\n"),
        ("syscall-clone", "verified\n"),
        ("clone", "verified\n"),
        ("clone3", "refused\n"),
        ("instruction", "verified\n"),
    ] {
        let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_bare-children"));
        let ended = succeed(command.args(["8000", how])).context(how)?;
        ensure!(ended.text() == says, "{how}: it said {:?}", ended.text());
    }
    Ok(Outcome::Passed)
}

const PYTHON: &str = r#"
import hashlib, multiprocessing, os, random

PAGE, PAGES = 4096, 16000
random.seed(1)
data = bytearray(random.randbytes(PAGE * PAGES))
before = hashlib.sha256(data).hexdigest()
plenty = [str(number) * 3 for number in range(200_000)]

def work(number):
    # The parent's memory as it was at the fork, then changes that nobody else may see.
    assert hashlib.sha256(data).hexdigest() == before, "the child sees other bytes"
    chance = random.Random(number)
    for _ in range(PAGES // 4):
        at = chance.randrange(PAGES) * PAGE
        data[at:at + 8] = number.to_bytes(8, "little")
    assert sum(map(len, plenty)) == expected
    return hashlib.sha256(data).hexdigest()

expected = sum(map(len, plenty))
context = multiprocessing.get_context("fork")
# A process for each task: what one has changed, the next must not see.
with context.Pool(3, maxtasksperchild=1) as pool:
    results = pool.map(work, range(6), chunksize=1)
assert len(results) == 6
assert hashlib.sha256(data).hexdigest() == before, "a child's write is seen by the parent"
assert [str(number) * 3 for number in range(200_000)] == plenty
print("verified")
"#;

pub(crate) fn python_multiprocessing(cluster: &Cluster) -> TestResult {
    // Not a wrapper script that some version manager has put into the path.
    let python = match Path::new("/usr/bin/python3").exists() {
        true => "/usr/bin/python3",
        false => "python3",
    };
    if python == "python3"
        && let Some(reason) = missing(python)
    {
        return Ok(Outcome::Skipped(reason));
    }
    let script = cluster.file("fork.py");
    fs::write(&script, PYTHON)?;
    let ended = succeed(cluster.on_pool("40M", python).arg(&script))?;
    ensure!(ended.text() == "verified\n", "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}
