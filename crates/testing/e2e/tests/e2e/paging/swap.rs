//! Programs that the kernel swaps to a volume, and what is killed under them.

use crate::{
    encrypted::{marked, start_in},
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, all},
        process::{Running, kill_dead, missing, name_of, run, signal},
        wait::until,
        world::leftovers::loop_devices_here,
    },
};
use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

const VERIFY: &str = env!("CARGO_BIN_EXE_verify-threads");

/// Two threads with 160 MiB each: ten times [`LOCAL`].
const MEMORY: [&str; 2] = ["2", "40960"];
const LOCAL: &str = "32M";

/// The same in MiB, and pages of it that are at the donors at least: some are buffered.
const ALL_OF_IT: &str = "320";
const PAGES_AWAY: u64 = (320 - 32 - 16) * 256;

/// Why the kernel cannot swap to a volume here.
fn lacking() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root swaps".to_owned());
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no FUSE, or no loop devices".to_owned());
    }
    let has_cgroup = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
        || fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")
            .is_ok_and(|controllers| controllers.contains("memory"));
    if !has_cgroup {
        return Some("there is no memory cgroup".to_owned());
    }
    ["losetup", "mkswap", "swapon"].into_iter().find_map(missing)
}

/// `hecaton run --via swap` with a name, ready for a program.
fn swapping(cluster: &Cluster, options: &[&str]) -> Command {
    let mut command = cluster.command("run");
    command.args(["--via", "swap", "--name", "swapping", "--local", LOCAL, "--swap", "400M"]);
    command.args(options).arg("--").stdin(Stdio::piped());
    command
}

/// Returns the bytes swapped to loop devices of this test's files. `/proc/swaps` lists the swap
/// devices of the whole machine.
fn swapped_bytes() -> anyhow::Result<u64> {
    let own = loop_devices_here()?;
    let swaps = fs::read_to_string("/proc/swaps")?;
    let used = swaps.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let device = Path::new(fields.next()?);
        let is_own = own.iter().any(|own| own == device);
        is_own.then(|| fields.nth(2)?.parse::<u64>().ok())?
    });
    Ok(used.sum::<u64>() << 10)
}

/// Waits until so much is swapped out.
fn wait_for_swap(running: &mut Running, bytes: u64) -> anyhow::Result<()> {
    until(&format!("{bytes} bytes are swapped"), LONG, || {
        let swapped = swapped_bytes()?;
        if swapped >= bytes {
            return Ok(Ok(()));
        }
        ensure!(matches!(running.child_mut().try_wait(), Ok(None)), "the command has ended");
        Ok(Err(format!("{swapped} bytes")))
    })
}

/// Where the group of [`swapping`] is, by the version of the kernel's interface.
const GROUPS: [&str; 2] =
    ["/sys/fs/cgroup/memory/hecaton-swapping", "/sys/fs/cgroup/hecaton-swapping"];

/// The processes in the group, if there is one.
fn members() -> anyhow::Result<Option<Vec<u32>>> {
    let Some(group) = GROUPS.iter().find(|group| Path::new(group).exists()) else {
        return Ok(None);
    };
    let members = fs::read_to_string(format!("{group}/cgroup.procs"))?;
    let parsed: Result<_, _> = members.lines().map(str::parse).collect();
    Ok(Some(parsed.with_context(|| format!("members {members:?}"))?))
}

/// Swap, loop device, group and volume have gone.
fn nothing_is_left(cluster: &Cluster) -> anyhow::Result<()> {
    // The kernel gives all of it back in pieces before it lets go.
    cluster.eventually("nothing of the swap is left", LONG, |_| {
        let volumes = cluster.command("volume").args(["list", "--json"]).output()?;
        Ok(loop_devices_here()?.is_empty()
            && GROUPS.iter().all(|group| !Path::new(group).exists())
            && serde_json::from_slice::<Value>(&volumes.stdout)? == Value::Array(Vec::new()))
    })
}

fn server(cluster: &Cluster) -> anyhow::Result<(u32, Value)> {
    let mut status = cluster.command("volume");
    let ended = run(status.args(["status", "swapping", "--json"]), PATIENCE)?;
    ended.expect_success("hecaton volume status")?;
    let status: Value = serde_json::from_slice(&ended.stdout)?;
    let pid = status["pid"].as_u64().with_context(|| format!("no process: {status}"))?;
    Ok((u32::try_from(pid)?, status))
}

/// The process that serves the swap, and a donor when there is another one in its place.
fn kill_both(cluster: &Cluster, killed: u32) -> anyhow::Result<()> {
    kill_dead(killed);
    until("another process serves the swap", PATIENCE, || {
        Ok(match server(cluster) {
            Ok((pid, status)) if pid == killed => Err(format!("the killed one: {status}")),
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{error:#}")),
        })
    })?;
    kill_dead(cluster.donor(0)?);
    Ok(())
}

/// Bytes of a memory file that are present in a process, if it has locked them.
fn locked_bytes(pid: u32, file: &str) -> anyhow::Result<u64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let name = format!("/memfd:{file} (deleted)");
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with(&name));
    let present = lines.find_map(|line| line.strip_prefix("Rss:"));
    let present = present.with_context(|| format!("process {pid} has no {file}"))?;
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).context("VmFlags")?;
    let is_locked = flags.split_whitespace().any(|flag| flag == "lo");
    Ok(if is_locked { present.trim().trim_end_matches(" kB").parse::<u64>()? << 10 } else { 0 })
}

/// The kernel cannot swap out the donors. Nor the volume's tables, which the node keeps locked.
fn nothing_of_it_is_swapped(cluster: &Cluster, server: u32) -> anyhow::Result<()> {
    let tables = "hecaton-volume";
    let (served, kept) = (locked_bytes(server, tables)?, locked_bytes(cluster.node(), tables)?);
    ensure!(kept > 0 && kept >= served, "{kept} bytes of {served} are locked in the node");
    let status = cluster.status()?;
    for donor in all(&status, "donors") {
        let pid = donor["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        let pid = pid.context("a donor's process")?;
        let arena = format!("hecaton-{}", donor["name"].as_str().context("a donor's name")?);
        let files = fs::read_dir(format!("/proc/{pid}/fd"))?.map(|file| Ok(file?.path()));
        let files: anyhow::Result<Vec<_>> = files.collect();
        let name = format!("/memfd:{arena} (deleted)");
        let is_it = |file: &PathBuf| fs::read_link(file).is_ok_and(|at| at == Path::new(&name));
        let file = files?.into_iter().find(is_it).context("the donor's arena")?;
        // A donor stores each page in locked memory. Both figures change while the test reads them.
        until("all that a donor has is locked", PATIENCE, || {
            let (locked, had) = (locked_bytes(pid, &arena)?, fs::metadata(&file)?.blocks() * 512);
            Ok(if locked == had { Ok(()) } else { Err(format!("{locked} of {had} bytes")) })
        })?;
    }
    Ok(())
}

/// All bytes are right, though the process that serves the swap and a donor are killed.
pub(crate) fn ten_times_the_limit() -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "700M")?;
    let mut command = swapping(&cluster, &["--mirror", "2"]);
    // It gives memory back and takes some at random, so it runs for as long as the test wants it
    // to: until its standard input ends.
    let mut running = Running::spawn(command.arg(VERIFY).args(MEMORY))?;
    let input = running.child_mut().stdin.take();
    wait_for_swap(&mut running, 200 << 20)?;
    let (pid, _) = server(&cluster)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap_or_default();
    let locked_kib: u64 = locked.split_whitespace().next().context("VmLck")?.parse()?;
    ensure!(locked_kib > 64 << 10, "the serving process has locked {locked}");
    nothing_of_it_is_swapped(&cluster, pid)?;
    kill_both(&cluster, pid)?;
    thread::sleep(Duration::from_secs(2));
    drop(input);
    let ended = running.wait(LONG, || Ok(()))?;
    ensure!(ended.success(), "the program ended with {ended}\n    {}", cluster.log_tail());
    nothing_is_left(&cluster)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// The donors' memory shows what the kernel has swapped out, but not with `--encrypt`. The program
/// has the right bytes in both cases, although the process that serves the swap and a donor are
/// killed.
pub(crate) fn donors_can_read_nothing() -> TestResult {
    if let Some(reason) = lacking().or_else(|| missing("python3")) {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(2, "700M")?;
    for options in [&[][..], &["--encrypt"]] {
        let is_encrypted = !options.is_empty();
        let mut program = start_in(&mut swapping(&cluster, options), ALL_OF_IT)?;
        let (pid, status) = server(&cluster)?;
        ensure!(status["encrypted"] == is_encrypted, "{status}");
        program.begin_check()?;
        kill_both(&cluster, pid)?;
        program.end_check()?;
        program.check()?;
        let (pages, shown) = marked(&cluster)?;
        ensure!(pages >= PAGES_AWAY, "{options:?}: only {pages} pages are at the donors");
        let is_right = if is_encrypted { shown == 0 } else { shown >= PAGES_AWAY };
        ensure!(is_right, "{options:?}: the donors show {shown} pages of {pages}");
        program.finish(LONG)?;
        nothing_is_left(&cluster)?;
        cluster.wait_until_idle(PATIENCE)?;
    }
    Ok(Outcome::Passed)
}

/// A program whose command is killed keeps its memory; when it ends, nothing stays.
pub(crate) fn its_command_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    let mut command = swapping(cluster, &[]);
    // It runs until its standard input ends, which is the test's.
    let mut running = Running::spawn(command.arg(VERIFY).args(MEMORY))?;
    let input = running.child_mut().stdin.take();
    wait_for_swap(&mut running, 100 << 20)?;
    let members = members()?.context("no group")?;
    ensure!(members.len() == 1, "members {members:?}");
    let program = members[0];
    kill_dead(running.id());
    ensure!(!running.wait(PATIENCE, || Ok(()))?.success(), "it was not killed");
    // It is to work on for a while.
    let swapped = swapped_bytes()?;
    thread::sleep(Duration::from_secs(1));
    ensure!(Path::new(&format!("/proc/{program}")).exists(), "the program died with its command");
    ensure!(swapped > 0 && swapped_bytes()? > 0, "the swap went from under it");
    drop(input);
    nothing_is_left(cluster)?;
    Ok(Outcome::Passed)
}

/// Statuses and signals are the program's; what cannot be is one clear line.
pub(crate) fn it_ends_as_its_program_does(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    let ended = run(swapping(cluster, &[]).args(["sh", "-c", "echo out; exit 7"]), PATIENCE)?;
    ensure!(ended.status.code() == Some(7) && ended.text() == "out\n", "{}", ended.stderr);
    nothing_is_left(cluster)?;
    let mut running = Running::spawn(swapping(cluster, &[]).args(["sleep", "100"]))?;
    until("the program runs in its group", PATIENCE, || {
        ensure!(matches!(running.child_mut().try_wait(), Ok(None)), "the command has ended");
        let members = members()?.unwrap_or_default();
        let names: Vec<_> = members.into_iter().filter_map(name_of).collect();
        Ok(if names == ["sleep"] { Ok(()) } else { Err(format!("{names:?} run there")) })
    })?;
    signal(running.id(), Signal::TERM);
    let ended = running.wait(PATIENCE, || Ok(()))?;
    ensure!(ended.code() == Some(143), "a signal ended it with {ended}");
    nothing_is_left(cluster)?;
    let cases: &[(&[&str], &str)] = &[
        (&["--stats", "/dev/null", "--", "true"], "--stats"),
        (&["--lease", "30", "--", "true"], "--lease"),
        (&["--mirror", "9", "--", "true"], "9 copies"),
        (&["--", "no-such-program"], "no-such-program"),
    ];
    for (arguments, said) in cases {
        let mut command = cluster.command("run");
        let ended =
            run(command.args(["--via", "swap", "--local", LOCAL]).args(*arguments), PATIENCE)?;
        let what = format!("{arguments:?} said {:?}", ended.stderr);
        ensure!(!ended.status.success() && ended.stderr.contains(said), "{what}");
        ensure!(ended.stderr.lines().count() == 1, "{what}: not one line");
    }
    nothing_is_left(cluster)?;
    Ok(Outcome::Passed)
}
