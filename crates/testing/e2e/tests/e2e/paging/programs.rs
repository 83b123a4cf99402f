//! Programs that check themselves, or are compared with themselves without Hecaton.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, succeed},
    process::{Running, missing, run},
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{
    fs::File,
    io::{BufWriter, Read as _, Write as _},
    path::Path,
    process::{ChildStdout, Command},
};

pub(crate) fn threads_verify(cluster: &Cluster) -> TestResult {
    let stats = cluster.file("stats.json");
    let mut command = cluster.command("run");
    command.args(["--local", "48M", "--stats"]).arg(&stats).arg("--");
    command.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["4", "12000", "8000"]);
    let ended = succeed(&mut command)?;
    ensure!(ended.text().starts_with("verified"), "it said {:?}", ended.text());
    // 190 MB on 48 MiB: a run that never went to the pool would have shown nothing.
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(&stats)?)?;
    for counter in ["pages_in", "pages_out"] {
        let count = stats["pager"][counter].as_u64();
        ensure!(count > Some(10_000), "{counter} is {count:?}: {stats}");
    }
    Ok(Outcome::Passed)
}

pub(crate) fn memory_that_moves(cluster: &Cluster) -> TestResult {
    let program = env!("CARGO_BIN_EXE_moving-memory");
    let ended = succeed(cluster.on_pool("16M", program).arg("12000"))?;
    ensure!(ended.text().starts_with("verified"), "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}

/// Pages come to addresses that an eviction under way has for others.
pub(crate) fn memory_that_trades_places(cluster: &Cluster) -> TestResult {
    let program = env!("CARGO_BIN_EXE_trading-places");
    // Pages that a fork shares are taken in another way than those that nothing shares.
    for how in ["alone", "shared"] {
        let ended = succeed(cluster.on_pool("16M", program).args(["8000", how])).context(how)?;
        ensure!(ended.text().starts_with("verified"), "it said {:?}", ended.text());
    }
    Ok(Outcome::Passed)
}

pub(crate) fn sort_like_without(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("sort") {
        return Ok(Outcome::Skipped(reason));
    }
    let input = cluster.file("lines");
    write_lines(&input, 500_000)?;
    let (plain, pooled) = (cluster.file("plain"), cluster.file("pooled"));
    let sort = |mut command: Command, output: &Path| {
        command.env("LC_ALL", "C").args(["-S", "1G", "--parallel=2", "-o"]).arg(output).arg(&input);
        succeed(&mut command)
    };
    sort(Command::new("sort"), &plain)?;
    sort(cluster.on_pool("16M", "sort"), &pooled)?;
    let compared = run(Command::new("cmp").args([&plain, &pooled]), LONG)?;
    ensure!(compared.status.success(), "the outputs differ: {}", compared.text());
    Ok(Outcome::Passed)
}

pub(crate) fn write_lines(path: &Path, lines: usize) -> anyhow::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut random = Random(lines as u64);
    for _ in 0..lines {
        writeln!(file, "{:016x}{:016x} {}", random.next(), random.next(), random.below(1 << 40))?;
    }
    Ok(file.flush()?)
}

pub(crate) fn a_shell_pipeline(cluster: &Cluster) -> TestResult {
    let script = "seq 1 1500000 | awk '{ print ($1 * 7919) % 1500007, $1 }' \
                  | sort -n -S 512M | awk '{ s = (s * 31 + $2) % 1000000007 } END { print s }'";
    let plain = succeed(Command::new("sh").args(["-c", script]))?;
    let pooled = succeed(cluster.on_pool("32M", "sh").args(["-c", script]))?;
    ensure!(
        plain.text() == pooled.text() && !plain.stdout.is_empty(),
        "{:?} instead of {:?}",
        pooled.text(),
        plain.text()
    );
    Ok(Outcome::Passed)
}

pub(crate) fn stress_ng_verifies(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("stress-ng") {
        return Ok(Outcome::Skipped(reason));
    }
    // Methods with different orders of access: scans both ways, strides, random places, whole-page
    // moves. Each verifies what it reads.
    for method in ["flip", "galpat-1", "inc-nybble", "rand-set", "swap", "walk-0a", "zero-one"] {
        let mut command = cluster.on_pool("64M", "stress-ng");
        command
            .args(["--vm", "2", "--vm-bytes", "160M", "--vm-method", method, "--verify"])
            .args(["--vm-ops", "40", "--timeout", "4s", "--metrics-brief"]);
        let ended = run(&mut command, LONG)?;
        let said = format!("{}{}", ended.text(), ended.stderr);
        ensure!(ended.status.success(), "--vm-method {method}: {}: {said}", ended.status);
        ensure!(!said.contains("fail"), "--vm-method {method}: {said}");
    }
    Ok(Outcome::Passed)
}

/// Waits for a program that verifies its memory, and says so at its end.
pub(crate) fn expect_verified(
    cluster: &Cluster,
    running: &mut Running,
    output: &mut ChildStdout,
) -> anyhow::Result<()> {
    let status = running.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(status.success(), "the program ended with {status}\n    {}", cluster.log_tail());
    ensure!(said.starts_with("verified"), "the program said {said:?}");
    Ok(())
}

/// Ends the input of a program that is still running and verifies its memory until then.
pub(crate) fn end_verified(cluster: &Cluster, running: &mut Running) -> anyhow::Result<()> {
    let ended = running.child_mut().try_wait()?;
    ensure!(ended.is_none(), "the program ended with {ended:?}\n    {}", cluster.log_tail());
    drop(running.child_mut().stdin.take());
    let mut output = running.output()?;
    expect_verified(cluster, running, &mut output)
}
