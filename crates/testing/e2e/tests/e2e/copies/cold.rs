//! Memory that has gone cold and is kept in an erasure code: a program reads what it has written
//! though as many donors are away as there are parities, and its pager dies.

use crate::{
    encrypted::alter,
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, PATIENT_WITH_DONORS, all},
        guest::{Guests, Machine, Spec},
        process::{kill_dead, missing, signal},
        verifier::Verifier,
    },
    integrity::PROGRAM,
    mirror::pool_of_only_consumer,
};
use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use serde_json::Value;

/// [`PROGRAM`], with a code for what has gone cold, of which there is some, and three copies of
/// what has not: both bear the loss of two donors.
fn start(cluster: &Cluster, options: &[&str]) -> anyhow::Result<Verifier> {
    let mut command = cluster.command("run");
    command.args(["--local", "16M", "--mirror", "3", "--ec", "4+2", "--cold-after", "1"]);
    command.args(PATIENT_WITH_DONORS).args(options).args(["--", "python3", "-c", PROGRAM]);
    let verifier = Verifier::start(&mut command)?;
    until_coded(cluster)?;
    Ok(verifier)
}

fn until_coded(cluster: &Cluster) -> anyhow::Result<()> {
    cluster.until_status("cold memory is coded", LONG, |status| {
        let pool = pool_of_only_consumer(status);
        let is_coded =
            pool["coded_bytes"].as_u64() > Some(0) && pool["saved_bytes"].as_u64() > Some(0);
        if is_coded { Ok(()) } else { Err(pool.to_string()) }
    })?;
    // Pages that are not coded yet must have all copies.
    cluster.until_whole()
}

fn donors(cluster: &Cluster) -> anyhow::Result<Vec<u32>> {
    let status = cluster.status()?;
    let donors = all(&status, "donors").filter_map(|donor| donor["pid"].as_u64());
    Ok(donors.map(u32::try_from).collect::<Result<_, _>>()?)
}

/// Does something while these donors say nothing.
fn without<R>(donors: &[u32], work: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
    donors.iter().for_each(|donor| signal(*donor, Signal::STOP));
    let done = work();
    donors.iter().for_each(|donor| signal(*donor, Signal::CONT));
    done
}

/// Two donors of six say nothing, and the pager is killed; what is coded is read all the same, and
/// is less than copies would be.
pub(crate) fn two_donors_of_six_are_away() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(6, "200M")?;
    let mut program = start(&cluster, &[])?;
    let donors = donors(&cluster)?;
    without(&donors[..2], || {
        program.check()?;
        kill_dead(cluster.pager_of_only_consumer()?);
        program.check()
    })?;
    program.check()?;
    program.finish(LONG)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Codes encrypted memory. Two donors are unreachable for a while, then two are killed, then one
/// alters all its pages. The scrub uses the other donors to repair pages that the program does not
/// read. Afterwards two donors may be unreachable again.
pub(crate) fn what_is_encrypted_is_coded_and_mended() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(6, "200M")?;
    let mut program = start(&cluster, &["--encrypt", "--scrub", "512M"])?;
    let pids = donors(&cluster)?;
    // As much may be away as the code bears, no more: what a donor missed is made good before the
    // next one fails.
    without(&pids[..2], || program.check())?;
    cluster.until_whole()?;
    pids[2..4].iter().for_each(|donor| kill_dead(*donor));
    program.check()?;
    cluster.eventually("all donors are back", PATIENCE, |_| Ok(donors(&cluster)?.len() == 6))?;
    cluster.until_whole()?;
    until_coded(&cluster)?;

    let status = cluster.status()?;
    let fifth = all(&status, "donors").nth(4).context("there are too few donors")?;
    let altered = alter(fifth)?;
    ensure!(altered > 0, "the donor has no page");
    let scrub = |status: &Value, name: &str| {
        pool_of_only_consumer(status)["scrub"][name].as_u64().unwrap_or_default()
    };
    cluster
        .eventually("pages are mended", LONG, |status| Ok(scrub(status, "repaired_pages") > 0))?;
    // A round may have passed a page before the donor altered it. The next round repairs that
    // page.
    let rounds = scrub(&cluster.status()?, "rounds");
    cluster.eventually("everything was looked at", LONG, |status| {
        Ok(scrub(status, "rounds") >= rounds + 2)
    })?;
    let status = cluster.status()?;
    let pool = pool_of_only_consumer(&status);
    ensure!(scrub(&status, "lost_pages") == 0, "{pool}");
    cluster.until_whole()?;
    without(&donors(&cluster)?[..2], || program.check())?;
    program.check()?;
    program.finish(LONG)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A machine compares what it has in memory while two donors of six say nothing.
pub(crate) fn two_donors_are_away_from_a_machine(guests: &Guests) -> TestResult {
    let cluster = Cluster::start(6, "300M")?;
    // The port is open before anything is written to it.
    let script = "exec </dev/ttyS0
        dd if=/dev/urandom of=/tmp/file bs=1M count=160 2>/dev/null
        sums() { sha256sum /tmp/file | cut -c 1-64; }
        wanted=$(sums); echo filled
        while read -r word && [ \"$word\" = compare ]; do
            [ \"$(sums)\" = \"$wanted\" ] && echo equal || echo different
        done";
    let options = &["--mirror", "3", "--ec", "4+2", "--cold-after", "2"];
    let spec = Spec { script, options, ..Spec::default() };
    let mut machine = Machine::start(&cluster, guests, &spec)?;
    machine.wait_for("filled")?;
    until_coded(&cluster)?;
    without(&donors(&cluster)?[..2], || {
        machine.say("compare")?;
        machine.wait_for("equal")
    })?;
    machine.say("compare")?;
    machine.wait_for("equal")?;
    machine.say("end")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}
