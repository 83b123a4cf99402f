//! How programs start and end is not changed by `hecaton run`.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE, succeed},
    process::{Running, family, kill_dead, name_of, run},
    wait::until,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use rustix::process::Signal;
use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::Stdio,
    thread,
    time::Duration,
};

pub(crate) fn exit_statuses_are_passed_on(cluster: &Cluster) -> TestResult {
    for (script, code) in [("true", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -9 $$", 137)]
    {
        let ended = run(cluster.on_pool("64M", "sh").args(["-c", script]), PATIENCE)?;
        ensure!(
            ended.status.code() == Some(code),
            "`{script}` gave {} instead of {code}: {}",
            ended.status,
            ended.stderr
        );
    }
    Ok(Outcome::Passed)
}

/// As of `env` and `timeout`.
pub(crate) fn exit_status_tells_a_missing_program_from_one_that_cannot_run(
    cluster: &Cluster,
) -> TestResult {
    let dir = cluster.dir("programs")?;
    let file = |name: &str, text: &str, mode| -> anyhow::Result<PathBuf> {
        let path = dir.join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        Ok(path)
    };
    let cases = [
        (dir.join("missing"), 127),
        (file("lacks-its-interpreter", "#!/missing/interpreter\n", 0o755)?, 127),
        (dir.clone(), 126),
        (file("not-executable", "#!/bin/sh\n", 0o644)?, 126),
        (file("of-no-format", "\u{1}\u{2}\u{3}", 0o755)?, 126),
    ];
    for (program, code) in cases {
        let ended = run(&mut cluster.on_pool("64M", &program), PATIENCE)?;
        let what = format!("{}: {}", program.display(), ended.stderr);
        ensure!(ended.status.code() == Some(code), "{what} and {}", ended.status);
        ensure!(ended.stderr.lines().count() == 1, "{what} is not one line");
    }
    for (name, code) in [("missing", 127), ("not-executable", 126)] {
        let mut command = cluster.on_pool("64M", name);
        let ended = run(command.env("PATH", &dir), PATIENCE)?;
        ensure!(ended.status.code() == Some(code), "{name}: {} {}", ended.status, ended.stderr);
    }
    Ok(Outcome::Passed)
}

pub(crate) fn stats_are_whole_or_absent(cluster: &Cluster) -> TestResult {
    let stats = cluster.dir("stats")?.join("stats.json");
    fs::write(&stats, "of another run")?;
    let mut command = cluster.command("run");
    command.args(["--local", "64M", "--stats"]).arg(&stats);
    command.args(["--", "sh", "-c", "read x; exit 3"]).stdin(Stdio::piped());
    let mut running = Running::spawn(&mut command)?;
    program_of(&running)?;
    ensure!(!stats.exists(), "the file is there before the program has ended");
    drop(running.child_mut().stdin.take());
    let status = running.wait(PATIENCE, || {
        if let Ok(text) = fs::read(&stats) {
            serde_json::from_slice::<serde_json::Value>(&text)?;
        }
        Ok(())
    })?;
    ensure!(status.code() == Some(3), "it ended with {status}");
    let written: serde_json::Value = serde_json::from_slice(&fs::read(&stats)?)?;
    ensure!(written["exit_status"] == 3, "{written}");
    let left = fs::read_dir(stats.parent().context("a directory")?)?.count();
    ensure!(left == 1, "{left} files are left");
    Ok(Outcome::Passed)
}

pub(crate) fn signals_are_passed_on(cluster: &Cluster) -> TestResult {
    let script = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut command = cluster.on_pool("64M", "sh");
    command.args(["-c", script]).stdout(Stdio::piped());
    let mut running = Running::spawn(&mut command)?;
    let output = running.output()?;
    let mut lines = BufReader::new(output).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("ready"), "it does not get ready");
    running.signal(Signal::TERM);
    ensure!(lines.next().transpose()?.as_deref() == Some("caught"), "it was not told");
    let status = running.wait(PATIENCE, || Ok(()))?;
    ensure!(status.code() == Some(9), "it ended with {status}");
    Ok(Outcome::Passed)
}

/// `hecaton run` names the processes that it waits for, and ends without them on SIGTERM.
pub(crate) fn processes_left_behind_are_named(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("64M", "sh");
    // Until then the process has another name: it begins as the shell, and becomes `setsid`.
    let script = "setsid sleep 1000 </dev/null >/dev/null 2>&1 & \
                  until read -r name </proc/$!/comm && [ \"$name\" = sleep ]; do :; done; exit 3";
    command.args(["-c", script]);
    let mut running = Running::spawn(command.stderr(Stdio::piped()))?;
    let errors = running.child_mut().stderr.take().context("its errors are piped")?;
    // Read from until it has ended: it may say more.
    let mut errors = BufReader::new(errors).lines();
    let line = errors.next().context("it says nothing")??;
    let named = line.split_once(": sleep (").and_then(|(_, rest)| rest.split_once(')'));
    let left: u32 = named.with_context(|| format!("it said {line}"))?.0.parse()?;
    let way_out = format!("`kill {}`", running.id());
    ensure!(line.contains("1 process ") && line.contains(&way_out), "it said {line}");
    running.signal(Signal::TERM);
    let status = running.wait(PATIENCE, || Ok(()))?;
    ensure!(status.code() == Some(3), "it ended with {status}");
    ensure!(name_of(left).as_deref() == Some("sleep"), "it did not let the process run");
    kill_dead(left);
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

pub(crate) fn exec_starts_anew(cluster: &Cluster) -> TestResult {
    // The shell has memory of its own when it becomes another program, in the same process.
    let program = env!("CARGO_BIN_EXE_verify-threads");
    let script = format!("x=$(head -c 30000000 /dev/zero | tr '\\0' x); exec {program} 2 6000 500");
    let ended = succeed(cluster.on_pool("32M", "sh").args(["-c", &script]))?;
    ensure!(ended.text().starts_with("verified"), "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}

pub(crate) fn a_program_may_end_at_any_point(cluster: &Cluster) -> TestResult {
    let mut random = Random(20);
    for round in 0..12 {
        let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_verify-threads"));
        command.args(["2", "5000", "60000"]).stdout(Stdio::null());
        let mut running = Running::spawn(&mut command)?;
        let program = program_of(&running)?;
        thread::sleep(Duration::from_millis(random.below(400) as u64));
        kill_dead(program);
        let status = running.wait(PATIENCE, || Ok(()))?;
        ensure!(status.code() == Some(137), "round {round}: `hecaton run` ended with {status}");
        cluster.wait_until_idle(PATIENCE)?;
    }
    Ok(Outcome::Passed)
}

/// The process of the program that `hecaton run` has started.
pub(crate) fn program_of(launcher: &Running) -> anyhow::Result<u32> {
    until("`hecaton run` has started its program", PATIENCE, || {
        let family = family(launcher.id());
        let is_program = |id: &&u32| name_of(**id).is_some_and(|name| !name.starts_with("hecaton"));
        let program = family.iter().skip(1).find(is_program).copied();
        Ok(program.ok_or_else(|| format!("its processes are {family:?}")))
    })
}

/// The pages of a process that is stopped make room for the others of its family.
pub(crate) fn a_stopped_process_stops_nobody_else(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_stopped-child"));
    let ended = succeed(command.arg("12000"))?;
    let said = ended.text();
    let left = said.strip_prefix("verified, ").and_then(|rest| rest.split(' ').next());
    let left: u32 = left.with_context(|| format!("it said {said:?}"))?.parse()?;
    ensure!(left >= 50, "{left} % of what the stopped process had in memory has left");
    Ok(Outcome::Passed)
}

/// One more than a pager serves is no failure of the program's, and passes.
pub(crate) fn a_process_too_many_cannot_be_forked(cluster: &Cluster) -> TestResult {
    let ended = succeed(&mut cluster.on_pool("64M", env!("CARGO_BIN_EXE_fork-without-end")))?;
    let said = ended.text();
    ensure!(said == "EAGAIN after 1023\nand then again\n", "it said {said:?}: {}", ended.stderr);
    Ok(Outcome::Passed)
}
