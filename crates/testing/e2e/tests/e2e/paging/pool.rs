//! A pool that cannot hold what a program needs: the program is ended, with the reason. It never
//! waits for ever and is never given wrong data.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, all},
    process::{Ended, run_watched, signal},
};
use anyhow::ensure;
use rustix::process::Signal;
use std::{
    process::Command,
    time::{Duration, Instant},
};

pub(crate) fn a_full_one_ends_the_program() -> TestResult {
    let cluster = Cluster::start(1, "64M")?;
    let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_verify-threads"));
    // 160 MB, of which 80 have a place.
    command.args(["2", "20000", "120000"]);
    let ended = run_watched(&mut command, LONG, |_| Ok(()))?;
    was_ended_because(&ended, &["the pool is full"])
}

pub(crate) fn a_donor_gone_for_good_ends_the_program() -> TestResult {
    let cluster = Cluster::start(1, "500M")?;
    let mut command = cluster.command("run");
    command.args(["--local", "16M", "--donor-patience", "4", "--"]);
    command.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["2", "6000", "120000"]);
    let ended = with_donor_stopped_once_used(&cluster, &mut command)?;
    was_ended_because(&ended, &["segment ", " of space ", "donor donor-1 has not answered for"])
}

/// Stops the donor's process for good when it has lent something.
fn with_donor_stopped_once_used(cluster: &Cluster, command: &mut Command) -> anyhow::Result<Ended> {
    let mut looked = Instant::now();
    let mut stopped = false;
    run_watched(command, LONG, |_| {
        if stopped || looked.elapsed() < Duration::from_millis(200) {
            return Ok(());
        }
        looked = Instant::now();
        let status = cluster.status()?;
        for donor in all(&status, "donors") {
            let lent = donor["stats"]["lent_pages"].as_u64() > Some(0);
            if let (true, Some(pid)) = (lent, donor["pid"].as_u64()) {
                signal(u32::try_from(pid)?, Signal::STOP);
                stopped = true;
            }
        }
        Ok(())
    })
}

fn was_ended_because(ended: &Ended, words: &[&str]) -> TestResult {
    ensure!(ended.status.code() == Some(137), "it ended with {}: {}", ended.status, ended.stderr);
    ensure!(ended.stdout.is_empty(), "it said {:?}", ended.text());
    for word in words {
        ensure!(ended.stderr.contains(word), "no {word:?} in {:?}", ended.stderr);
    }
    Ok(Outcome::Passed)
}
