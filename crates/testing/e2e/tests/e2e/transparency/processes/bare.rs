//! Programs without glibc's shared library: statically linked, or linked with musl.
//!
//! `src/bare/memory.c` is built in each way that this machine has a compiler for. It checks its
//! memory itself, and says the same in each run.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, all},
        process::{Running, anonymous_bytes, family, kill_dead, missing, name_of, run},
        wait::{until, until_every},
    },
    transparency::native::same_as_native,
};
use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    io::{BufRead as _, BufReader, Read as _},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bare/memory.c");

/// The names of the programs, and what builds each.
const WAYS: [(&str, &[&str]); 4] = [
    ("static-glibc", &["cc", "-static"]),
    ("static-pie", &["cc", "-static-pie"]),
    ("static-musl", &["musl-gcc", "-static"]),
    ("dynamic-musl", &["musl-gcc"]),
];

const LOCAL: u64 = 24 << 20;

/// Builds the program in each way that there is; the others are named.
fn build(cluster: &Cluster) -> anyhow::Result<Vec<PathBuf>> {
    let mut built = Vec::new();
    for (name, compiler) in WAYS {
        let program = cluster.file(name);
        let mut compile = Command::new(compiler[0]);
        compile.args(&compiler[1..]).args(["-O1", "-pthread", "-o"]).arg(&program).arg(SOURCE);
        let why = match missing(compiler[0]) {
            None => run(&mut compile, PATIENCE)?.expect_success(name).err(),
            Some(reason) => Some(anyhow::Error::msg(reason)),
        };
        match why {
            None => built.push(program),
            Some(error) => println!("    skipped: {name}: {error:#}"),
        }
    }
    Ok(built)
}

const NO_COMPILER: &str = "nothing here builds a program without glibc's shared library";

/// Each kind of program does `what` on a fraction of its memory as it does natively.
fn each_like_native(cluster: &Cluster, what: &str) -> TestResult {
    let programs = build(cluster)?;
    for program in &programs {
        let name = program.to_str().context("a name")?;
        let context = || format!("{what}, {name}");
        let stats = same_as_native(cluster, "24M", &[name, what]).with_context(context)?;
        // A run that never went to the pool would have shown nothing.
        let out = stats["pager"]["pages_out"].as_u64();
        ensure!(out > Some(1000), "{name} {what}: {out:?} pages were written out");
    }
    match programs.is_empty() {
        true => Ok(Outcome::Skipped(NO_COMPILER.to_owned())),
        false => Ok(Outcome::Passed),
    }
}

/// One thread unmaps memory, and another maps some in its place by a system call that nobody sees,
/// while both are evicted.
pub(crate) fn threads_share_holes(cluster: &Cluster) -> TestResult {
    each_like_native(cluster, "threads")
}

pub(crate) fn children_are_followed(cluster: &Cluster) -> TestResult {
    each_like_native(cluster, "forks")
}

/// They may end where they touch what is in the pool, and must never see anything else there.
pub(crate) fn unseen_children_see_no_zeros(cluster: &Cluster) -> TestResult {
    each_like_native(cluster, "unseen")
}

pub(crate) fn they_start_programs(cluster: &Cluster) -> TestResult {
    each_like_native(cluster, "children")
}

/// Memory that is not paged (stacks, written-to data, the library), and one batch in flight.
const NOT_PAGED: u64 = 5 << 20;

/// Memory that such a program has mapped is local until it is found; from then on it is within the
/// limit. The pager is killed meanwhile, and nobody traces the program.
pub(crate) fn resident_memory_is_bounded(cluster: &Cluster) -> TestResult {
    let programs = build(cluster)?;
    for program in &programs {
        bounded(cluster, program).with_context(|| program.display().to_string())?;
        cluster.wait_until_idle(PATIENCE)?;
    }
    match programs.is_empty() {
        true => Ok(Outcome::Skipped(NO_COMPILER.to_owned())),
        false => Ok(Outcome::Passed),
    }
}

/// Times that the program goes through its memory while it is looked at.
const PASSES: usize = 4;

fn bounded(cluster: &Cluster, program: &Path) -> anyhow::Result<()> {
    let name = program.file_name().and_then(|name| name.to_str()).context("a name")?;
    let mut command = cluster.on_pool(&LOCAL.to_string(), program);
    let mut running =
        Running::spawn(command.arg("steady").stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let (said, hears) = mpsc::channel();
    let output = running.output()?;
    thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).all(|line| said.send(line).is_ok())
    });
    let process = until("the program runs", PATIENCE, || {
        let members = family(running.id());
        let found = members.into_iter().find(|&id| name_of(id).as_deref() == Some(name));
        Ok(found.ok_or("it does not"))
    })?;
    // It has filled its memory when it has gone through it once.
    let first = hears.recv_timeout(LONG)?;
    ensure!(first == "pass", "it said {first:?}");
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    ensure!(status.contains("TracerPid:\t0\n"), "somebody traces it");
    let resident = || anonymous_bytes(process).context("the program has ended");
    until("its memory is within the limit", PATIENCE, || {
        let bytes = resident()?;
        Ok(if bytes <= LOCAL + NOT_PAGED { Ok(()) } else { Err(format!("{} KiB", bytes >> 10)) })
    })?;
    kill_dead(cluster.pager_of_only_consumer()?);
    let (mut most, mut passes) = (0, 0);
    until_every(Duration::from_millis(5), "the program goes through its memory", LONG, || {
        most = most.max(resident()?);
        passes += hears.try_iter().count();
        Ok(if passes >= PASSES { Ok(()) } else { Err(format!("{passes} times")) })
    })?;
    ensure!(
        (LOCAL / 2..=LOCAL + NOT_PAGED).contains(&most),
        "{} KiB were resident with --local {} KiB",
        most >> 10,
        LOCAL >> 10
    );
    drop(running.child_mut().stdin.take());
    let status = running.wait(LONG, || Ok(()))?;
    let last = hears.iter().last();
    ensure!(status.success() && last.as_deref() == Some("verified"), "{status}: {last:?}");
    Ok(())
}

/// As of any program: how it ends is passed on, and signals reach it.
pub(crate) fn they_end_as_without(cluster: &Cluster) -> TestResult {
    let programs = build(cluster)?;
    for program in &programs {
        let ended = run(cluster.on_pool("24M", program).arg("nothing"), PATIENCE)?;
        ensure!(ended.status.code() == Some(77), "{}: {}", program.display(), ended.status);
        ensure!(ended.stderr == "what?\n", "it said {:?}", ended.stderr);
        let mut command = cluster.on_pool("24M", program);
        command.arg("steady").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        // Read from until it has ended: it says more.
        let mut output = BufReader::new(running.output()?);
        output.read_line(&mut String::new())?;
        running.signal(Signal::TERM);
        let status = running.wait(LONG, || Ok(()))?;
        // As a shell tells of it.
        let told = status.code() == Some(128 + libc::SIGTERM);
        ensure!(told || status.signal() == Some(libc::SIGTERM), "it ended with {status}");
    }
    match programs.is_empty() {
        true => Ok(Outcome::Skipped(NO_COMPILER.to_owned())),
        false => Ok(Outcome::Passed),
    }
}

/// A program that one on the pool starts is not followed. It is counted, with its name and memory:
/// in `status` while it runs, and at the end.
pub(crate) fn one_that_another_starts_is_counted(cluster: &Cluster) -> TestResult {
    let Some(program) = build(cluster)?.into_iter().find(|path| path.ends_with("static-glibc"))
    else {
        return Ok(Outcome::Skipped(NO_COMPILER.to_owned()));
    };
    let stats = cluster.file("outside.json");
    let mut command = cluster.command("run");
    command.args(["--local", "24M", "--stats"]).arg(&stats).args(["--", "sh", "-c"]);
    command.arg(format!("{} steady; true", program.display()));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = Running::spawn(&mut command)?;
    let mut stderr = running.child_mut().stderr.take().context("no output")?;
    let is_it = |outside: &Value| {
        let bytes = outside["peak_bytes"].as_u64();
        outside["processes"] == 1 && outside["names"][0] == "static-glibc" && bytes > Some(LOCAL)
    };
    cluster.until_status("the process is counted", PATIENCE, |status| {
        let outside = all(status, "consumers").map(|one| &one["stats"]["outside"]).next();
        match outside {
            Some(outside) if is_it(outside) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })?;
    drop(running.child_mut().stdin.take());
    let status = running.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    stderr.read_to_string(&mut said)?;
    ensure!(status.success(), "{status}: {said}");
    let line = "hecaton: 1 process was not on the pool, with ";
    ensure!(said.contains(line) && said.contains(": static-glibc\n"), "it said {said:?}");
    let stats: Value = serde_json::from_slice(&std::fs::read(&stats)?)?;
    ensure!(is_it(&stats["pager"]["outside"]), "{stats}");
    Ok(Outcome::Passed)
}
