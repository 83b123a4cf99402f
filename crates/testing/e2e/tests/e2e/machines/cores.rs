//! A node's agent divides the cores of this host among machines: in its ledger, and by cgroups of
//! the real kernel.
//!
//! No guest is needed: what a machine was promised counts from its admission, and its process is in
//! its group from then on.

use crate::{
    agent::{Host, sleeping_qemu},
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE},
        process::{Running, family, missing_any, run},
        wait,
    },
};
use anyhow::{Context as _, ensure};
use rustix::process::{Signal, getuid};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

/// Two of this host's cores are the agent's to give; a warned machine has a moment.
const TWO_CORES: [&str; 4] = ["--manage-cores", "2", "--eviction-warning", "3"];

/// The same, and a warned machine has longer than any test.
const PATIENT: [&str; 4] = ["--manage-cores", "2", "--eviction-warning", "400"];

/// A reason to skip: two cores, or their division by the kernel, cannot be had here.
fn lacking() -> anyhow::Result<Option<String>> {
    if !getuid().is_root() {
        return Ok(Some("cgroups take root".to_owned()));
    }
    let processors = sched_getaffinity(None)?.count();
    Ok((processors < 2).then(|| format!("two cores are needed, and this host has {processors}")))
}

/// A machine of 64 MiB, which is this program.
fn machine(
    host: &Host<'_>,
    name: &str,
    arguments: &[&str],
    qemu: &Path,
) -> anyhow::Result<Running> {
    let mut command = host.create(&[&["--name", name], arguments].concat());
    Running::spawn(command.arg(qemu).stdout(Stdio::null()).stderr(Stdio::null()))
}

fn regular(host: &Host<'_>, name: &str, cores: &str, qemu: &Path) -> anyhow::Result<Running> {
    machine(host, name, &["--regular", "--memory", "64M", "--cores", cores], qemu)
}

fn harvest(host: &Host<'_>, name: &str, cores: &str, qemu: &Path) -> anyhow::Result<Running> {
    let sizes = ["--harvest", "--min", "64M", "--max", "64M", "--min-cores", cores];
    machine(host, name, &sizes, qemu)
}

/// Waits until these are there, and those wait, in whatever order, each for cores. There are never
/// more cores than there are.
fn until(host: &Host<'_>, what: &str, there: &[&str], waiting: &[&str]) -> anyhow::Result<()> {
    host.eventually(what, PATIENCE, |status| {
        let cores = &status["cores"];
        let number = |class: &str| cores[class].as_u64().context("a class is missing");
        let mut sum = 0;
        for class in ["unmanaged", "regular", "minimum", "reserved", "unallocated"] {
            sum += number(class)?;
        }
        ensure!(sum == number("host")? && number("overdrawn")? == 0, "{cores}");
        let one = |one: &Value| one["name"].as_str().unwrap_or_default().to_owned();
        let names = |list: &str| status[list].as_array().into_iter().flatten().map(one);
        let waits = |one: &Value| one["waits"]["waits"] == "for-cores";
        let mut newcomers: Vec<String> = names("waiting").collect();
        newcomers.sort();
        Ok(names("machines").eq(there.iter().copied())
            && newcomers == waiting
            && status["waiting"].as_array().into_iter().flatten().all(waits))
    })
}

/// The cgroup of the agent's machines; the reason to skip if the kernel does not let one make it.
/// One of them has cores.
fn group(host: &Host<'_>) -> anyhow::Result<Result<PathBuf, String>> {
    let status = host.status()?;
    let mut machines = status["machines"].as_array().into_iter().flatten();
    let failure = machines.find_map(|machine| machine["cores_failure"].as_str());
    if let Some(failure) = failure {
        return Ok(Err(failure.to_owned()));
    }
    let group = status["cores"]["group"].as_str().context("there is no group")?;
    Ok(Ok(PathBuf::from(group)))
}

/// Whether a machine's process, and no other, is in its group, and that has the weight of this many
/// cores.
fn is_in_its_group(host: &Host<'_>, group: &Path, name: &str, cores: u64) -> anyhow::Result<()> {
    let (file, usual) = match group.join("cpu.shares").exists() {
        true => ("cpu.shares", 1024),
        false => ("cpu.weight", 100),
    };
    let group = group.join(format!("vm-{name}"));
    let read = |file: &str| {
        let path = group.join(file);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let pid = host.machine_pid(name)?;
    let (weight, procs) = (read(file)?, read("cgroup.procs")?);
    ensure!(weight == format!("{}\n", usual * cores), "{name} of {cores} cores has {weight}");
    ensure!(procs == format!("{pid}\n"), "{name} is {pid}, and its group has {procs:?}");
    Ok(())
}

/// A group that a failed test leaves behind, once its machines and its agent have ended.
#[derive(Default)]
struct Leftover(Option<PathBuf>);

impl Drop for Leftover {
    fn drop(&mut self) {
        let Some(group) = &self.0 else { return };
        for entry in fs::read_dir(group).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(entry.path());
        }
        let _ = fs::remove_dir(group);
    }
}

/// Waits until the agent has removed its group, as it does when the last machine with cores has
/// ended.
fn until_gone(group: &Path) -> anyhow::Result<()> {
    wait::until("the agent has removed its cgroup", PATIENCE, || {
        Ok(if group.exists() { Err(format!("{} is left", group.display())) } else { Ok(()) })
    })
}

/// A machine has a cgroup with the weight of its cores; one that needs the cores of a harvest VM's
/// minimum evicts it, though there is memory; one that nobody is evicted for waits until somebody
/// leaves. The agent is killed in between.
pub(crate) fn they_are_divided_and_the_agent_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking()? {
        return Ok(Outcome::Skipped(reason));
    }
    let qemu = sleeping_qemu(cluster)?;
    let mut leftover = Leftover::default();
    let mut host = Host::start_with(cluster, &PATIENT)?;
    let mut first = harvest(&host, "first", "1", &qemu)?;
    let second = regular(&host, "second", "1", &qemu)?;
    let apart = machine(&host, "apart", &["--regular", "--memory", "64M"], &qemu)?;
    until(&host, "both cores are given", &["apart", "first", "second"], &[])?;
    let group = match group(&host)? {
        Ok(group) => group,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    leftover.0 = Some(group.clone());
    is_in_its_group(&host, &group, "first", 1)?;
    is_in_its_group(&host, &group, "second", 1)?;
    ensure!(!group.join("vm-apart").exists(), "one without cores takes part");
    what_cannot_be_is_refused(&host, &qemu)?;

    // Nobody is evicted for a harvest VM.
    let third = harvest(&host, "third", "1", &qemu)?;
    until(&host, "it waits for a core", &["apart", "first", "second"], &["third"])?;
    // Somebody is, for a regular one, and warned anew by the next agent.
    let fourth = regular(&host, "fourth", "1", &qemu)?;
    until(&host, "another waits too", &["apart", "first", "second"], &["fourth", "third"])?;
    host.kill_node()?;
    host.start_node()?;
    is_in_its_group(&host, &group, "first", 1)?;
    until(&host, "so they do with it", &["apart", "first", "second"], &["fourth", "third"])?;
    host.eventually("it is warned anew", PATIENCE, |status| Ok(status["counters"]["warned"] == 1))?;
    host.kill_node()?;
    host.start_node_with(&TWO_CORES)?;
    until(&host, "one has gone for a core", &["apart", "fourth", "second"], &["third"])?;
    ensure!(!first.wait(PATIENCE, || Ok(()))?.success(), "it ended by itself");
    is_in_its_group(&host, &group, "fourth", 1)?;
    ensure!(!group.join("vm-first").exists(), "its group is left");

    host.kill_node()?;
    drop(second);
    host.start_node()?;
    until(&host, "one has left, and another has come", &["apart", "fourth", "third"], &[])?;
    is_in_its_group(&host, &group, "fourth", 1)?;
    is_in_its_group(&host, &group, "third", 1)?;
    ensure!(!group.join("vm-second").exists(), "its group is left");
    drop((third, fourth));
    until(&host, "all with cores have left", &["apart"], &[])?;
    until_gone(&group)?;
    drop(apart);
    Ok(Outcome::Passed)
}

fn what_cannot_be_is_refused(host: &Host<'_>, qemu: &Path) -> anyhow::Result<()> {
    let regular = ["--regular", "--memory", "64M"];
    let harvest = ["--harvest", "--min", "64M", "--max", "64M"];
    for (kind, cores, words) in [
        (&regular[..], ["--cores", "0"], "--cores 0: a machine has 1 at least; leave it out"),
        (&harvest, ["--min-cores", "0"], "--min-cores 0: a machine has 1 at least"),
        (&regular, ["--min-cores", "2"], "--min-cores 2 is for harvest VMs; give --cores 2"),
        (&harvest, ["--cores", "2"], "give --min-cores 2"),
        (&regular, ["--cores", "3"], "it asks for 3 cores, and the host has 2 cores"),
        (&harvest, ["--min-cores", "3"], "it asks for 3 cores, and the host has 2 cores"),
        (
            &regular,
            ["--cores", "2"],
            "it asks for 2 cores, and the host's regular VMs leave 1 core",
        ),
    ] {
        let ended = run(host.create(&[kind, &cores].concat()).arg(qemu), PATIENCE)?;
        ensure!(!ended.status.success(), "{cores:?} is taken");
        ensure!(ended.stderr.contains(words), "{cores:?}: {}", ended.stderr);
    }
    Ok(())
}

/// The time that this processor's programs have used, in the kernel's ticks. A program that has
/// ended meanwhile is left out.
fn used_ticks(machine: u32) -> anyhow::Result<u64> {
    let mut sum = 0;
    for id in family(machine) {
        let Ok(stat) = fs::read_to_string(format!("/proc/{id}/stat")) else { continue };
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        for field in &fields[11..13] {
            sum += field.parse::<u64>()?;
        }
    }
    Ok(sum)
}

/// A machine that keeps one processor busy with so many programs, which end with it.
fn busy_qemu(cluster: &Cluster, programs: usize) -> anyhow::Result<PathBuf> {
    let allowed = sched_getaffinity(None)?;
    let processor = (0..CpuSet::MAX_CPU).find(|at| allowed.is_set(*at)).context("no processor")?;
    let fake = cluster.file(&format!("busy-qemu-{programs}"));
    let script = format!(
        "#!/bin/sh\ntaskset -cp {processor} $$ >/dev/null || exit 1\nfor program in $(seq {programs}); do\n\
         (while kill -0 $$ 2>/dev/null; do :; done) &\ndone\nexec sleep 600\n"
    );
    fs::write(&fake, script)?;
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755))?;
    Ok(fake)
}

/// On a processor that two machines of one core each want, each has as much of its time, whatever
/// they run: not four times as much for one that runs four times as many programs. Counted is what
/// the kernel gave, and not how long that took.
pub(crate) fn busy_machines_share_by_weight(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking()?.or_else(|| missing_any(&["taskset", "seq"])) {
        return Ok(Outcome::Skipped(reason));
    }
    const SOME_TICKS: u64 = 100;
    const FEW_TICKS: u64 = 3;
    let mut leftover = Leftover::default();
    let host = Host::start_with(cluster, &TWO_CORES)?;
    let one = regular(&host, "one", "1", &busy_qemu(cluster, 1)?)?;
    let four = harvest(&host, "four", "1", &busy_qemu(cluster, 4)?)?;
    until(&host, "both are there", &["four", "one"], &[])?;
    let group = match group(&host)? {
        Ok(group) => group,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    leftover.0 = Some(group.clone());
    // The kernel's count of one is read before and after that of four: if it has gone on meanwhile,
    // as this test stood still, the two counts are not of one moment.
    let used = || {
        let begin = used_ticks(one.id())?;
        let used = (begin, used_ticks(four.id())?);
        let passed = used_ticks(one.id())?.abs_diff(begin);
        anyhow::Ok((passed <= FEW_TICKS).then_some(used))
    };
    let wait_until = |what: &str, holds: &dyn Fn((u64, u64)) -> bool| {
        wait::until_every(Duration::from_millis(20), what, PATIENCE * 2, || {
            let used = used()?;
            Ok(used.filter(|used| holds(*used)).ok_or_else(|| format!("{used:?} ticks are used")))
        })
    };
    let before = wait_until("both are busy", &|(one, four)| one > 5 && four > 5)?;
    let after = wait_until("one has had some time", &|(one, _)| one > before.0 + SOME_TICKS)?;
    let (one_had, four_had) = (after.0 - before.0, after.1 - before.1);
    println!("    of one processor, one program had {one_had} ticks, and four had {four_had}");
    ensure!(
        four_had < 2 * one_had && one_had < 2 * four_had,
        "the weights are the same, and one had {one_had} ticks, four had {four_had}"
    );
    drop((one, four));
    until_gone(&group)?;
    Ok(Outcome::Passed)
}

/// Where no cgroup can be made, cores are divided by admission alone, and it is said.
pub(crate) fn without_a_controller_they_count_all_the_same(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking()?.or_else(|| missing_any(&["unshare"])) {
        return Ok(Outcome::Skipped(reason));
    }
    let hidden = "mount -t tmpfs none /sys/fs/cgroup && exec \"$0\" \"$@\"";
    let before = ["unshare", "--mount", "sh", "-c", hidden].map(Into::into).to_vec();
    let host = Host::start_by(cluster, &TWO_CORES, before)?;
    let qemu = sleeping_qemu(cluster)?;
    let first = harvest(&host, "first", "2", &qemu)?;
    until(&host, "a harvest VM has both cores", &["first"], &[])?;
    let status = host.status()?;
    let failure = status["machines"][0]["cores_failure"].as_str().unwrap_or_default();
    ensure!(failure == "there is no cpu controller under /sys/fs/cgroup", "{status}");
    let mut shown = cluster.command("host");
    let shown = run(shown.args(["status", "--dir"]).arg(cluster.file("agent-node")), PATIENCE)?;
    let words = "nothing enforces the cores of first: there is no cpu controller";
    ensure!(shown.text().contains(words), "{}", shown.text());
    let second = regular(&host, "second", "1", &qemu)?;
    until(&host, "a regular one has evicted it", &["second"], &[])?;
    first.signal(Signal::TERM);
    drop((first, second));
    Ok(Outcome::Passed)
}
