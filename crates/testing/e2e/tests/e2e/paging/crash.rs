//! Kills each process that a running program depends on, at random moments.
//! The signal is SIGKILL. No byte of the program's result may change.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{AFTER_LEASE, Cluster, LONG, PATIENCE, all},
        process::{Running, anonymous_bytes, family, kill_dead, name_of, run_watched},
        wait::until,
    },
    life::program_of,
    programs::{end_verified, expect_verified},
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{
    fs,
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// How often something is killed under one program.
const KILLS: usize = 8;

pub(crate) fn of_the_pager(cluster: &Cluster) -> TestResult {
    survives(cluster, verifier(cluster))
}

/// Nothing that it had sealed and not sent, or sent and not heard of, is lost or taken for altered.
pub(crate) fn of_a_pager_that_encrypts(cluster: &Cluster) -> TestResult {
    let mut command = cluster.command("run");
    command.args(["--local", "24M", "--encrypt", "--mirror", "2", "--"]);
    command.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["3", "6000"]);
    survives(cluster, command)
}

pub(crate) fn of_a_pager_during_forks(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_fork-without-exec"));
    command.args(["12000", "6"]);
    survives_while_it_works(cluster, command)
}

/// Programs that come while there is no pager, or are about to be welcomed, are not turned away.
pub(crate) fn of_a_pager_while_programs_start(cluster: &Cluster) -> TestResult {
    // Until a file is there.
    let script = "while now=$(date +%s) || exit 3; [ ! -e \"$0\" ]; do /bin/true || exit 4; done; \
                  echo verified";
    let is_over = cluster.file("is-over");
    let mut command = cluster.on_pool("24M", "sh");
    command.args(["-c", script]).arg(&is_over);
    let mut running = Running::spawn(command.stdout(Stdio::piped()))?;
    let mut output = running.output()?;
    kill_each_pager(cluster, &mut running)?;
    fs::write(&is_over, "")?;
    expect_verified(cluster, &mut running, &mut output)?;
    Ok(Outcome::Passed)
}

/// A pager that dies again and again is not started for ever, and the program is told to end.
pub(crate) fn of_a_pager_without_end(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_verify-threads"));
    // For so long that it is not over first.
    command.args(["3", "6000", &LONG.as_millis().to_string()]);
    // The node gives up only a pager that dies more than 20 times within 10 s. The status would
    // name the next one too late, so the test looks for it among the node's processes.
    let mut is_filled = false;
    let ended = run_watched(&mut command, LONG, |launcher| {
        // Without its first pager the program would not start.
        is_filled = is_filled || has_filled_memory(launcher);
        if is_filled {
            pagers(cluster).into_iter().for_each(kill_dead);
        }
        Ok(())
    })?;
    ensure!(ended.status.code() == Some(137), "it ended with {}", ended.status);
    ensure!(ended.stdout.is_empty(), "it said {:?}", ended.text());
    ensure!(ended.stderr.contains("20 times"), "the reason is not told: {:?}", ended.stderr);
    Ok(Outcome::Passed)
}

/// Whether a program that `hecaton run` has started uses memory of its own.
fn has_filled_memory(launcher: u32) -> bool {
    family(launcher).into_iter().skip(1).any(|id| {
        let is_program = name_of(id).is_some_and(|name| !name.starts_with("hecaton"));
        is_program && anonymous_bytes(id) >= Some(FILLED_BYTES)
    })
}

/// The pagers that the cluster's node runs, also one that it has just started. One that has died
/// has no command line any more.
fn pagers(cluster: &Cluster) -> Vec<u32> {
    let is_pager = |id: &u32| {
        let words = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        words.ends_with(b"\0pager\0")
    };
    family(cluster.node()).into_iter().skip(1).filter(is_pager).collect()
}

/// So many forks that a kill is likely to meet one at each of its steps.
pub(crate) fn of_a_pager_in_a_storm(cluster: &Cluster) -> TestResult {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_fork-storm"));
    command.args(["2", "1500", "600"]);
    survives_while_it_works(cluster, command)
}

/// Verifies its memory until its input ends.
fn verifier(cluster: &Cluster) -> Command {
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_verify-threads"));
    command.args(["3", "6000"]);
    command
}

/// Runs a program that verifies its memory until its input ends, and kills its pager again and
/// again.
fn survives(cluster: &Cluster, mut command: Command) -> TestResult {
    let mut running = Running::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    kill_each_pager(cluster, &mut running)?;
    end_verified(cluster, &mut running)?;
    Ok(Outcome::Passed)
}

/// The same for a program that ends when it has done its work: not all of the kills may meet it.
fn survives_while_it_works(cluster: &Cluster, mut command: Command) -> TestResult {
    let mut running = Running::spawn(command.stdout(Stdio::piped()))?;
    let mut output = running.output()?;
    let killed = kill_pagers(cluster, &mut running)?;
    expect_verified(cluster, &mut running, &mut output)?;
    ensure!(killed >= KILLS / 2, "only {killed} pagers were found to kill");
    Ok(Outcome::Passed)
}

/// Kills as many pagers as [`KILLS`] says, one after the other, under a program that goes on.
fn kill_each_pager(cluster: &Cluster, running: &mut Running) -> anyhow::Result<()> {
    let killed = kill_pagers(cluster, running)?;
    ensure!(killed == KILLS, "the program ended after {killed} kills: {}", cluster.log_tail());
    Ok(())
}

/// Kills one pager after the other until the program has ended, [`KILLS`] at most. Says how many.
fn kill_pagers(cluster: &Cluster, running: &mut Running) -> anyhow::Result<usize> {
    // A pager that dies before the node holds anything of the program is not started again.
    until("the program is on the pool", PATIENCE, || {
        ensure!(running.child_mut().try_wait()?.is_none(), "the program has ended");
        if has_filled_memory(running.id()) {
            return Ok(Ok(()));
        }
        let status = cluster.status()?;
        let is_held = all(&status, "consumers").any(|one| one["held_fds"].as_u64() > Some(0));
        Ok(if is_held { Ok(()) } else { Err("the node holds nothing of it") })
    })?;
    let mut random = Random(KILLS as u64);
    for killed in 0..KILLS {
        thread::sleep(Duration::from_millis(300 + random.below(500) as u64));
        let pager = until("there is a pager to kill", PATIENCE, || {
            let has_ended = running.child_mut().try_wait()?.is_some();
            let pager = pagers(cluster).first().copied();
            Ok(if has_ended { Ok(None) } else { pager.map(Some).ok_or("there is none") })
        })?;
        let Some(pager) = pager else { return Ok(killed) };
        kill_dead(pager);
        // The next one that is found is another one.
        until("the pager has ended", PATIENCE, || {
            let is_there = pagers(cluster).contains(&pager);
            Ok(if is_there { Err(format!("process {pager} is there")) } else { Ok(()) })
        })?;
    }
    Ok(KILLS)
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
    let mut command = verifier(cluster);
    let mut running = Running::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    program_of(&running)?;
    let mut random = Random(11);
    for _ in 0..4 {
        thread::sleep(Duration::from_millis(400 + random.below(600) as u64));
        let status = cluster.status()?;
        let donors: Vec<_> = all(&status, "donors").filter_map(|one| one["pid"].as_u64()).collect();
        ensure!(!donors.is_empty(), "there is no donor: {status}");
        kill_dead(u32::try_from(donors[random.below(donors.len())])?);
    }
    end_verified(cluster, &mut running)?;
    Ok(Outcome::Passed)
}

/// Without a node nobody can start a pager again, but the one that is there goes on; so does what
/// it keeps on this host. (Its donors end with the node: see docs/failures.md.)
pub(crate) fn of_the_node() -> TestResult {
    let (cluster, mut running) = with_its_own_node()?;
    let program = program_of(&running)?;
    cluster.kill_node();
    let before = ticks_of(program)?;
    until("the program has run on for two seconds of a processor", PATIENCE, || {
        let ran = ticks_of(program)?.saturating_sub(before);
        Ok(if ran >= 200 { Ok(()) } else { Err(format!("it ran for {ran} ticks of 10 ms")) })
    })?;
    end_verified(&cluster, &mut running)?;
    Ok(Outcome::Passed)
}

/// Time that a process has run, in ticks of 10 ms.
fn ticks_of(id: u32) -> anyhow::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("a process has a name")?;
    // Its own time, and the kernel's for it.
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>);
    Ok(ticks.sum::<Result<u64, _>>()?)
}

/// With nobody left that holds its memory, a program must not go on, on zeros.
pub(crate) fn of_the_node_and_then_of_the_pager() -> TestResult {
    let (cluster, mut running) = with_its_own_node()?;
    let (pager, program) = (cluster.pager_of_only_consumer()?, program_of(&running)?);
    cluster.kill_node();
    kill_dead(pager);
    let status = running.wait(PATIENCE, || Ok(()))?;
    let mut said = String::new();
    running.output()?.read_to_string(&mut said)?;
    ensure!(status.code() == Some(137), "the program ended with {status}");
    ensure!(said.is_empty(), "the program said {said:?}");
    ensure!(name_of(program).is_none(), "the program is still there");
    Ok(Outcome::Passed)
}

/// The same for what a program has forked: nobody waits for it, and nothing of it may stay.
pub(crate) fn of_all_who_serve_a_family() -> TestResult {
    let cluster = Cluster::start(1, "64M")?;
    // Three of the four processes say that they run on the pool, and the fourth has forked one of
    // them. The kills wait for that: a program that starts later stays on local memory, and lives.
    let script = "exec 3<&0; (sh -c '(echo ready; read line <&3); :' & \
                  echo ready; read line <&3; :) & echo ready; wait";
    let said = cluster.file("said");
    let mut command = cluster.on_pool("16M", "bash");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(fs::File::create(&said)?);
    let mut running = Running::spawn(&mut command)?;
    until("the program has forked all of its family", PATIENCE, || {
        let said = fs::read_to_string(&said)?;
        Ok(if said == "ready\n".repeat(3) { Ok(()) } else { Err(format!("they said {said:?}")) })
    })?;
    let members: Vec<u32> = family(running.id()).into_iter().skip(1).collect();
    ensure!(members.len() >= 4, "the family is {members:?}");
    let pager = cluster.pager_of_only_consumer()?;
    cluster.kill_node();
    kill_dead(pager);
    running.wait(PATIENCE, || Ok(()))?;
    until("all of its family has ended", PATIENCE, || {
        let left = members.iter().find(|&&member| is_running(member));
        Ok(left.map_or(Ok(()), |left| Err(format!("process {left} of {members:?} stays"))))
    })?;
    Ok(Outcome::Passed)
}

/// Neither gone nor a zombie.
pub(crate) fn is_running(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// More memory than a program has that has not begun to fill any. `with_its_own_node` has 24 MiB.
const FILLED_BYTES: u64 = 4 << 20;

/// A cluster, and a program on it whose pages all fit in local memory. It verifies them until its
/// input ends.
fn with_its_own_node() -> anyhow::Result<(Cluster, Running)> {
    let cluster = Cluster::start(1, "64M")?;
    let mut command = cluster.on_pool("256M", env!("CARGO_BIN_EXE_verify-threads"));
    command.args(["2", "3000"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let running = Running::spawn(&mut command)?;
    let program = program_of(&running)?;
    until("the node knows the pager, and the program has memory", PATIENCE, || {
        let bytes = anonymous_bytes(program);
        let pager = cluster.known_pager()?;
        let has_both = pager.is_some() && bytes >= Some(FILLED_BYTES);
        Ok(if has_both { Ok(()) } else { Err(format!("pager {pager:?}, {bytes:?} bytes")) })
    })?;
    Ok((cluster, running))
}
