//! Copies at several donors, donors that are drained or want some of their memory back, and donors
//! that are named: what programs and machines compute does not change by a byte, and nothing waits
//! for a donor that says nothing.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{AFTER_LEASE, Cluster, LONG, PATIENCE, PATIENT_WITH_DONORS, all},
        guest::{Guests, Machine, Spec, report},
        process::{Running, kill_dead, missing, run, signal},
        wait::until,
    },
    integrity::PROGRAM,
    life::program_of,
    programs::expect_verified,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::FileExt as _,
    process::{ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

/// How often a donor is stopped under one program.
const STOPS: usize = 4;

/// A program that verifies what it reads until its input ends, with arguments for the pool before
/// it.
fn verifier(cluster: &Cluster, arguments: &[&str]) -> Command {
    let mut command = cluster.command("run");
    command.args(["--local", "24M"]).args(arguments).arg("--");
    command.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["3", "6000"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn spawn(mut command: Command) -> anyhow::Result<(Running, ChildStdout)> {
    let mut running = Running::spawn(&mut command)?;
    let output = running.output()?;
    program_of(&running)?;
    Ok((running, output))
}

fn has_verified(cluster: &Cluster, mut running: Running, mut output: ChildStdout) -> TestResult {
    drop(running.child_mut().stdin.take());
    expect_verified(cluster, &mut running, &mut output)?;
    cluster.wait_until_idle(AFTER_LEASE)?;
    Ok(Outcome::Passed)
}

/// How the pool holds the memory of the only consumer; null while that is not known.
pub(crate) fn pool_of_only_consumer(status: &Value) -> Value {
    all(status, "consumers").next().map_or(Value::Null, |one| one["stats"]["pool"].clone())
}

/// The process of a donor that has lent something to the consumer, as soon as there is one.
fn until_one_is_in_use(cluster: &Cluster, random: &mut Random) -> anyhow::Result<u32> {
    let used = until("a donor is used", PATIENCE, || {
        let status = cluster.status()?;
        let is_used = |donor: &&Value| donor["stats"]["lent_pages"].as_u64() > Some(0);
        let used = all(&status, "donors").filter(is_used).filter_map(|donor| donor["pid"].as_u64());
        let used: Vec<u64> = used.collect();
        Ok(if used.is_empty() { Err("none has lent anything") } else { Ok(used) })
    })?;
    Ok(u32::try_from(used[random.below(used.len())])?)
}

/// Each donor in turn says nothing for as long as it takes to be given up, and comes back with
/// pages that are out of date.
pub(crate) fn silent_donors_are_done_without() -> TestResult {
    let cluster = Cluster::start(3, "400M")?;
    let (running, output) = spawn(verifier(&cluster, &["--mirror", "2"]))?;
    let mut random = Random(17);
    let mut copied = 0;
    for _ in 0..STOPS {
        let donor = until_one_is_in_use(&cluster, &mut random)?;
        signal(donor, Signal::STOP);
        thread::sleep(Duration::from_millis(1500));
        signal(donor, Signal::CONT);
        cluster.until_whole()?;
        let pool = pool_of_only_consumer(&cluster.status()?);
        copied = copied.max(pool["copied_bytes"].as_u64().unwrap_or_default());
    }
    ensure!(copied > 0, "no copy was made anew");
    has_verified(&cluster, running, output)
}

/// A donor is stopped for good, and the pager killed again and again: the next one finds the copies
/// that have missed nothing.
pub(crate) fn pagers_die_while_a_donor_is_silent() -> TestResult {
    let cluster = Cluster::start(3, "400M")?;
    let (running, output) = spawn(verifier(&cluster, &["--mirror", "2"]))?;
    let mut random = Random(23);
    let donor = until_one_is_in_use(&cluster, &mut random)?;
    signal(donor, Signal::STOP);
    let mut killed = 0;
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(700));
        if let Some(pager) = cluster.known_pager()? {
            kill_dead(pager);
            killed += 1;
        }
    }
    signal(donor, Signal::CONT);
    ensure!(killed > 0, "no pager was ever told of");
    has_verified(&cluster, running, output)
}

/// Drains a donor under a running program with one copy of each page, and with two: the donor must
/// be empty. Encrypted pages move as ciphertext, and the pager decrypts them after the move.
pub(crate) fn a_donor_is_emptied_under_a_program() -> TestResult {
    for options in [&["--mirror", "1", "--encrypt"][..], &["--mirror", "2"]] {
        let cluster = Cluster::start(3, "400M")?;
        let (running, output) = spawn(verifier(&cluster, options))?;
        cluster.eventually("the donor is used", PATIENCE, |status| {
            let mut donors = all(status, "donors").filter(|donor| donor["name"] == "donor-2");
            Ok(donors.any(|donor| donor["stats"]["lent_pages"].as_u64() > Some(0)))
        })?;
        let mut drain = cluster.command("node");
        let ended = run(drain.args(["drain", "donor-2", "--json", "--deadline", "60"]), LONG)?;
        ended.expect_success("hecaton node drain")?;
        let outcome: Value = serde_json::from_slice(&ended.stdout)?;
        ensure!(outcome["left_bytes"] == 0, "{outcome}");
        // It lends nothing more as long as it drains.
        thread::sleep(Duration::from_millis(500));
        let status = cluster.status()?;
        let donor = all(&status, "donors").find(|donor| donor["name"] == "donor-2");
        let lent = donor.and_then(|donor| donor["stats"]["lent_pages"].as_u64());
        ensure!(lent == Some(0), "it has lent {lent:?} pages");
        let ended = run(cluster.command("node").args(["drain", "donor-2", "--cancel"]), PATIENCE)?;
        ended.expect_success("hecaton node drain --cancel")?;
        has_verified(&cluster, running, output)?;
    }
    Ok(Outcome::Passed)
}

/// A donor's report in the cluster's status.
fn report_of<'a>(status: &'a Value, donor: &str) -> &'a Value {
    let found = all(status, "donors").find(|known| known["name"] == donor);
    found.unwrap_or(&Value::Null)
}

fn lent_bytes(status: &Value, donor: &str) -> Option<u64> {
    Some(report_of(status, donor)["stats"]["lent_pages"].as_u64()? * 4096)
}

/// Waits until a donor has lent something, and says how much.
fn until_it_lends(cluster: &Cluster, donor: &str) -> anyhow::Result<u64> {
    cluster.eventually("the donor is used", PATIENCE, |status| {
        Ok(lent_bytes(status, donor) > Some(0))
    })?;
    lent_bytes(&cluster.status()?, donor).context("the donor is gone")
}

/// Has a donor lend no more than so many bytes, and waits until it has the rest back.
fn recall(cluster: &Cluster, donor: &str, to: u64) -> anyhow::Result<()> {
    let mut recall = cluster.command("node");
    recall.args(["recall", donor, "--json", "--deadline", "60", "--to", &to.to_string()]);
    let ended = run(&mut recall, LONG)?;
    ended.expect_success("hecaton node recall")?;
    let outcome: Value = serde_json::from_slice(&ended.stdout)?;
    ensure!(outcome["left_bytes"] == 0, "{outcome}");
    let lent = lent_bytes(&cluster.status()?, donor);
    ensure!(lent <= Some(to), "it has lent {lent:?} bytes, and was to lend {to}");
    Ok(())
}

fn cancel_recall(cluster: &Cluster, donor: &str) -> anyhow::Result<()> {
    let ended = run(cluster.command("node").args(["recall", donor, "--cancel"]), PATIENCE)?;
    ended.expect_success("hecaton node recall --cancel")?;
    Ok(())
}

/// One donor after the other has half of what it has lent back while its borrower runs, and keeps
/// to the limit when its process is killed.
pub(crate) fn donors_have_memory_back_under_a_program() -> TestResult {
    let cluster = Cluster::start(3, "400M")?;
    let (running, output) = spawn(verifier(&cluster, &[]))?;
    for donor in ["donor-1", "donor-2"] {
        let to = until_it_lends(&cluster, donor)? / 2;
        recall(&cluster, donor, to)?;
        let status = cluster.status()?;
        let pid = report_of(&status, donor)["pid"].as_u64().context("no process")?;
        kill_dead(u32::try_from(pid)?);
        cluster.eventually("the next process has the limit", PATIENCE, |status| {
            let report = report_of(status, donor);
            let is_next = report["pid"].as_u64().is_some_and(|next| next != pid);
            Ok(is_next && report["stats"]["told_limit_bytes"] == to)
        })?;
        cancel_recall(&cluster, donor)?;
    }
    has_verified(&cluster, running, output)
}

/// With nobody else to take them, the donor's copies go, and are made anew when it lends again.
pub(crate) fn copies_make_room_for_a_donor_that_wants_memory_back() -> TestResult {
    let cluster = Cluster::start(2, "400M")?;
    let (running, output) = spawn(verifier(&cluster, &["--mirror", "2"]))?;
    for donor in ["donor-1", "donor-2"] {
        until_it_lends(&cluster, donor)?;
        recall(&cluster, donor, 0)?;
        cancel_recall(&cluster, donor)?;
        cluster.until_whole()?;
    }
    has_verified(&cluster, running, output)
}

pub(crate) fn a_program_uses_the_donors_that_are_named(cluster: &Cluster) -> TestResult {
    let (running, output) = spawn(verifier(cluster, &["--donors", "donor-2"]))?;
    cluster.eventually("the pool is used", PATIENCE, |status| {
        Ok(pool_of_only_consumer(status)["extents_bytes"].as_u64() > Some(0))
    })?;
    let pool = pool_of_only_consumer(&cluster.status()?);
    let donors: Vec<&str> = pool["donors"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|donor| donor["name"].as_str())
        .collect();
    ensure!(donors == ["donor-2"], "{pool}");
    has_verified(cluster, running, output)
}

/// Flips a bit in one of so many pages of a donor's memory that are not zero. Says in how many.
fn damage(donor: u32, one_of: usize) -> anyhow::Result<u64> {
    let fds = fs::read_dir(format!("/proc/{donor}/fd"))?.flatten();
    let is_memory = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| {
            let target = target.to_string_lossy();
            target.starts_with("/memfd:hecaton-donor-") && !target.contains("-ledger")
        })
    };
    let path = fds.map(|entry| entry.path()).find(is_memory).context("no memory")?;
    let memory = File::options().read(true).write(true).open(path)?;
    let mut found = vec![0; 1 << 20];
    let (mut seen, mut damaged) = (0, 0);
    for start in (0..memory.metadata()?.len()).step_by(found.len()) {
        let read = memory.read_at(&mut found, start)?;
        for (at, page) in (start..).step_by(4096).zip(found[..read].chunks(4096)) {
            if page.iter().any(|&byte| byte != 0) {
                seen += 1;
                if seen % one_of == 0 {
                    memory.write_all_at(&[page[2000] ^ 1], at + 2000)?;
                    damaged += 1;
                }
            }
        }
    }
    Ok(damaged)
}

/// Memory of a donor goes bad, and the program never notices: what nobody reads is mended from the
/// other copies, and what it reads before that comes from them.
pub(crate) fn pages_that_go_bad_in_a_donor_are_mended() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    for rate in ["512M", "off"] {
        let cluster = Cluster::start(3, "400M")?;
        let mut command = cluster.command("run");
        command
            .args(["--local", "16M", "--mirror", "2", "--scrub", rate])
            .args(PATIENT_WITH_DONORS);
        command.args(["--", "python3", "-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        let mut input = running.child_mut().stdin.take().context("no input")?;
        let output = running.output()?;
        let mut output = BufReader::new(output).lines();
        let filled = output.next().context("the program said nothing")??;
        ensure!(filled == "filled", "the program said {filled:?}");
        let scrub =
            |status: &Value, name: &str| pool_of_only_consumer(status)["scrub"][name].as_u64();
        let is_scrubbed = rate != "off";
        if is_scrubbed {
            cluster.eventually("all copies were compared", PATIENCE, |status| {
                Ok(scrub(status, "rounds") >= Some(1))
            })?;
        }
        // Donors tell once a second what they have lent.
        let donor = until_one_is_in_use(&cluster, &mut Random(5))?;
        // A copy that is made of a page which has gone bad has gone bad too.
        cluster.pager_of_only_consumer()?;
        cluster.until_whole()?;
        let damaged = damage(donor, 50)?;
        ensure!(damaged > 0, "the donor has no page");
        if is_scrubbed {
            cluster.eventually("all of them are mended", PATIENCE, |status| {
                Ok(scrub(status, "repaired_pages") == Some(damaged))
            })?;
        }
        writeln!(input)?;
        let checked = output.next().context("the program said nothing more")??;
        ensure!(checked == "checked", "the program said {checked:?}");
        cluster.eventually("those that were read are mended", PATIENCE, |status| {
            Ok(scrub(status, "repaired_pages") > Some(0))
        })?;
        let status = cluster.status()?;
        let left = ["lost_pages", "copies_given_up"].map(|name| scrub(&status, name));
        ensure!(left == [Some(0), Some(0)], "{}", pool_of_only_consumer(&status));
        let stats = all(&status, "consumers").next().context("no consumer")?["stats"].clone();
        let were_read = stats["checksum_errors"] != 0;
        ensure!(were_read != is_scrubbed, "with --scrub {rate}: {}", stats["checksum_errors"]);
        drop(input);
        let status = running.wait(LONG, || Ok(()))?;
        ensure!(status.success(), "the program ended with {status}");
        cluster.wait_until_idle(PATIENCE)?;
    }
    Ok(Outcome::Passed)
}

/// The RAM of a machine is with the donors that its ranges name, and moves when they are changed,
/// encrypted as it is.
pub(crate) fn ranges_of_a_machine_move(cluster: &Cluster, guests: &Guests) -> TestResult {
    // The guest works until it is told to stop. The port is open before anything is written to it.
    let script = "exec </dev/ttyS0
        stress-ng --vm 2 --vm-bytes 220M --verify --vm-method all -t 0 &
        read -r word; kill -INT $!; wait $!";
    let options = ["--encrypt", "--range", "0-256M=donor-1,256M-512M=donor-2"];
    let spec = Spec { script, options: &options, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    let held = |first: &str, second: &str| {
        let report = report(cluster, "guest")?;
        let ranges = &report["pager"]["stats"]["pool"]["ranges"];
        let is_only = |at: usize, name: &str| {
            let held = ranges[at]["held_by"].as_object();
            held.is_some_and(|held| held.len() == 1 && held.contains_key(name))
        };
        Ok::<bool, anyhow::Error>(is_only(0, first) && is_only(1, second))
    };
    cluster.eventually("the ranges are where they are to be", PATIENCE, |_| {
        held("donor-1", "donor-2")
    })?;
    let mut place = cluster.command("vm");
    place.args(["place", "guest", "--range", "0-256M=donor-3,256M-512M=donor-1"]);
    run(&mut place, PATIENCE)?.expect_success("hecaton vm place")?;
    cluster.eventually("the ranges have moved", PATIENCE, |_| held("donor-3", "donor-1"))?;
    let status = run(cluster.command("vm").args(["status", "guest"]), PATIENCE)?;
    ensure!(status.text().contains("RAM 0-256M: for donor-3; with donor-3"), "{}", status.text());
    machine.say("stop")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}
