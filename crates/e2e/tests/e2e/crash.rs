//! SIGKILL, at random moments, for everything that a running program depends on. What the program
//! computes must not change by a byte.

use crate::{
    cluster::{AFTER_LEASE, Cluster, LONG, PATIENCE, all},
    harness::{Outcome, TestResult},
    life::program_of,
    process::{Running, family, kill_dead, run_watched},
};
use anyhow::{Context as _, bail, ensure};
use hecaton_e2e::Random;
use std::{
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How often something is killed under one program.
const KILLS: usize = 8;

pub(crate) fn of_the_pager(cluster: &Cluster) -> TestResult {
    survives(cluster, verifier(cluster), |pager| family(pager).into_iter().skip(1).collect())
}

pub(crate) fn of_the_keeper(cluster: &Cluster) -> TestResult {
    survives(cluster, verifier(cluster), |pager| vec![pager])
}

/// The two stand in for each other; with both gone at once nobody can answer the program's faults.
/// It may be ended then, with a word on why, but what it puts out is right or nothing.
pub(crate) fn of_pager_and_keeper_at_once(cluster: &Cluster) -> TestResult {
    let mut random = Random(7);
    let start = Instant::now();
    let at = Duration::from_millis(500 + random.below(2500) as u64);
    let mut killed = false;
    let ended = run_watched(&mut verifier(cluster), LONG, |_| {
        if !killed && start.elapsed() > at {
            family(cluster.pager_of_only_consumer()?).into_iter().for_each(kill_dead);
            killed = true;
        }
        Ok(())
    })?;
    match ended.status.code() {
        Some(0) => ensure!(ended.text().starts_with("verified"), "{:?}", ended.text()),
        Some(137) => ensure!(
            ended.stdout.is_empty() && ended.stderr.contains("pager"),
            "it was ended, but said {:?} and {:?}",
            ended.text(),
            ended.stderr
        ),
        _ => bail!("the program ended with {}: {}", ended.status, ended.stderr),
    }
    cluster.wait_until_idle(AFTER_LEASE)?;
    Ok(Outcome::Passed)
}

pub(crate) fn of_a_pager_during_forks(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_fork-without-exec"));
    command.args(["12000", "6"]);
    survives(cluster, command, |pager| family(pager).into_iter().skip(1).collect())
}

fn verifier(cluster: &Cluster) -> Command {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_verify-threads"));
    command.args(["3", "6000", "9000"]);
    command
}

/// Runs a program that verifies its memory, and kills what `victims` chooses of its pager's
/// processes again and again.
fn survives(
    cluster: &Cluster,
    mut command: Command,
    victims: impl Fn(u32) -> Vec<u32>,
) -> TestResult {
    let mut running = Running::spawn(command.stdout(Stdio::piped()))?;
    let mut output = running.child_mut().stdout.take().context("no output")?;
    program_of(&running)?;
    let mut random = Random(KILLS as u64);
    let mut killed = 0;
    for _ in 0..KILLS {
        thread::sleep(Duration::from_millis(300 + random.below(500) as u64));
        // Between a death and the next report the node may know of no pager, and when the program
        // is done there is none.
        let Ok(pager) = cluster.pager_of_only_consumer() else { continue };
        for victim in victims(pager) {
            kill_dead(victim);
            killed += 1;
        }
    }
    let status = running.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(status.success(), "the program ended with {status}\n    {}", cluster.log_tail());
    ensure!(said.starts_with("verified"), "the program said {said:?}");
    ensure!(killed >= KILLS / 2, "only {killed} processes were found to kill");
    Ok(Outcome::Passed)
}

/// Without its launcher the program goes on or ends, but what it borrowed comes back.
pub(crate) fn of_the_launcher(cluster: &Cluster) -> TestResult {
    let mut random = Random(5);
    for _ in 0..4 {
        let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_verify-threads"));
        command.args(["2", "5000", "1500"]).stdout(Stdio::null());
        let mut running = Running::spawn(&mut command)?;
        program_of(&running)?;
        thread::sleep(Duration::from_millis(random.below(1000) as u64));
        kill_dead(running.id());
        running.wait(PATIENCE, || Ok(()))?;
        cluster.wait_until_idle(AFTER_LEASE)?;
    }
    Ok(Outcome::Passed)
}

/// A donor's memory outlives the process that serves it.
pub(crate) fn of_a_donor(cluster: &Cluster) -> TestResult {
    let mut running = Running::spawn(verifier(cluster).stdout(Stdio::piped()))?;
    let mut output = running.child_mut().stdout.take().context("no output")?;
    program_of(&running)?;
    let mut random = Random(11);
    for _ in 0..4 {
        thread::sleep(Duration::from_millis(400 + random.below(600) as u64));
        let status = cluster.status()?;
        let donors: Vec<_> = all(&status, "donors").filter_map(|one| one["pid"].as_u64()).collect();
        ensure!(!donors.is_empty(), "there is no donor: {status}");
        kill_dead(u32::try_from(donors[random.below(donors.len())])?);
    }
    let status = running.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(status.success(), "the program ended with {status}\n    {}", cluster.log_tail());
    ensure!(said.starts_with("verified"), "the program said {said:?}");
    Ok(Outcome::Passed)
}
