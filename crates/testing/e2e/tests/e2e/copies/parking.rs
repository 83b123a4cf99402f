//! Donors that are to give memory back which nobody can take, and park it on their disk: programs
//! go on with the right bytes, the hosts really have the memory, and a disk that is full loses
//! nothing.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, all, hecaton, log_in, ready_line, scratch},
    process::{Ended, Running, kill_dead, missing, run},
    verifier::Verifier,
};
use anyhow::{Context as _, ensure};
use rustix::mount::{MountFlags, mount};
use serde_json::Value;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Command, Stdio},
};

/// For each line it is sent, verifies all of its memory and writes all of it anew.
const PROGRAM: &str = "
import sys
size = 64 << 20
memory = bytearray(size)
pages = range(0, size, 4096)
def value(at, turn):
    return (at * 2654435761 + turn).to_bytes(8, 'little')
for at in pages:
    memory[at:at + 8] = value(at, 1)
print('filled', flush=True)
for turn, line in enumerate(sys.stdin, 1):
    for at in pages:
        if memory[at:at + 8] != value(at, turn):
            print('wrong', at, turn, flush=True)
            sys.exit(3)
        memory[at:at + 8] = value(at, turn + 1)
    print('checked', flush=True)
";

/// The program, by a `hecaton run` that may have arguments. All of its memory has a place in the
/// pool.
fn start(cluster: &Cluster, mut command: Command) -> anyhow::Result<Verifier> {
    command.args(["--local", "16M", "--", "python3", "-c", PROGRAM]);
    let mut program = Verifier::start(&mut command).with_context(|| cluster.log_tail())?;
    verify(&mut program, cluster)?;
    Ok(program)
}

fn verify(program: &mut Verifier, cluster: &Cluster) -> anyhow::Result<()> {
    program.check().with_context(|| cluster.log_tail())
}

fn end(program: Verifier, cluster: &Cluster) -> TestResult {
    program.finish(LONG)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

fn stats<'a>(status: &'a Value, donor: &str) -> &'a Value {
    let found = all(status, "donors").find(|known| known["name"] == donor);
    found.map_or(&Value::Null, |donor| &donor["stats"])
}

/// A directory in memory, which ends with the world of the test: donors that park in it wait for no
/// disk.
fn in_memory() -> anyhow::Result<tempfile::TempDir> {
    let dir = scratch()?;
    mount("none", dir.path(), "tmpfs", MountFlags::empty(), None).context("a tmpfs")?;
    Ok(dir)
}

/// Has a donor lend no more than so many bytes, and waits as these options say.
fn recall(cluster: &Cluster, donor: &str, to: u64, options: &[&str]) -> anyhow::Result<Ended> {
    let mut recall = cluster.command("node");
    recall.args(["recall", donor, "--json", "--to", &to.to_string()]).args(options);
    run(&mut recall, LONG)
}

fn cancel(cluster: &Cluster, donor: &str) -> anyhow::Result<()> {
    let ended = run(cluster.command("node").args(["recall", donor, "--cancel"]), PATIENCE)?;
    ended.expect_success("hecaton node recall --cancel")
}

/// Two donors, with one copy of each page between them, are both to have all of it back. One of
/// them is killed meanwhile.
pub(crate) fn what_nobody_can_take_is_served_from_the_disk() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let parked = in_memory()?;
    let cluster = Cluster::start_with(Vec::new(), 2, "400M", &park_in(parked.path()))?;
    let mut program = start(&cluster, cluster.command("run"))?;
    cluster.eventually("both donors say what they have lent", PATIENCE, |status| {
        let lent = |donor| stats(status, donor)["lent_pages"].as_u64() > Some(0);
        Ok(lent("donor-1") && lent("donor-2"))
    })?;
    // Nobody is to have room for what the other one wants back.
    let lent = stats(&cluster.status()?, "donor-2")["lent_pages"].as_u64().context("no report")?;
    recall(&cluster, "donor-2", lent * 4096, &[])?.expect_success("hecaton node recall")?;
    for donor in ["donor-1", "donor-2"] {
        let ended = recall(&cluster, donor, 0, &[])?;
        ended.expect_success("hecaton node recall")?;
        let outcome: Value = serde_json::from_slice(&ended.stdout)?;
        let is_parked = outcome["parked_bytes"].as_u64() > Some(0);
        ensure!(outcome["left_bytes"] == 0 && is_parked, "{outcome}");
    }
    let is_parked = |status: &Value| {
        let is_parked = |donor| {
            let stats = stats(status, donor);
            let parked = stats["park"]["parked_pages"].as_u64();
            let all_lent = parked == stats["lent_pages"].as_u64() && parked > Some(0);
            all_lent && stats["committed_bytes"] == 0
        };
        Ok(is_parked("donor-1") && is_parked("donor-2"))
    };
    cluster.eventually("the hosts have their memory back", PATIENCE, is_parked)?;
    verify(&mut program, &cluster)?;
    cluster.eventually("what was written is parked again", PATIENCE, is_parked)?;
    let shown = run(&mut cluster.command("status"), PATIENCE)?.text();
    ensure!(shown.contains("M is parked"), "{shown}");

    program.begin_check()?;
    let status = cluster.status()?;
    let donor = all(&status, "donors").find(|donor| donor["name"] == "donor-1");
    let pid = donor.and_then(|donor| donor["pid"].as_u64()).context("no process")?;
    kill_dead(u32::try_from(pid)?);
    program.end_check().with_context(|| cluster.log_tail())?;
    cluster.eventually("the next process parks again", PATIENCE, is_parked)?;

    for donor in ["donor-1", "donor-2"] {
        cancel(&cluster, donor)?;
    }
    // While the second donor still wants its memory back, the first has room for some or all of it.
    cluster.eventually("all is in memory again", PATIENCE, |status| {
        let is_back = |donor| {
            let stats = stats(status, donor);
            let is_empty = stats["park"]["file_bytes"] == 0 && stats["park"]["parked_pages"] == 0;
            let has = |what: &str| stats[what].as_u64() > Some(0);
            is_empty && has("committed_bytes") == has("lent_pages")
        };
        Ok(is_back("donor-1") && is_back("donor-2"))
    })?;
    verify(&mut program, &cluster)?;
    end(program, &cluster)
}

/// Has the daemon that follows a small file system of its own, which goes with it.
const ON_A_SMALL_DISK: &str = "mount -t tmpfs -o size=20M none \"$0\" && exec \"$@\"";

/// The disk takes one extent, and a part of the next.
pub(crate) fn a_full_disk_takes_nothing_away() -> TestResult {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("mounting a small file system takes root".to_owned()));
    }
    if let Some(reason) = ["python3", "unshare", "mount", "bash"].into_iter().find_map(missing) {
        return Ok(Outcome::Skipped(reason));
    }
    let parked = scratch()?;
    let prefix = ["unshare", "--mount", "bash", "-c", ON_A_SMALL_DISK].map(Into::into);
    let prefix = prefix.into_iter().chain([parked.path().into()]).collect();
    let cluster = Cluster::start_with(prefix, 1, "400M", &park_in(parked.path()))?;
    let mut program = start(&cluster, cluster.command("run"))?;
    // The donor is told, and nobody waits for what it does then.
    let at_once = ["--deadline", "0"];
    recall(&cluster, "donor-1", 0, &at_once)?;
    cluster.eventually("the disk takes no more", PATIENCE, |status| {
        let park = &stats(status, "donor-1")["park"];
        Ok(park["parked_pages"] == 4096 && !park["trouble"].is_null())
    })?;
    let ended = recall(&cluster, "donor-1", 0, &at_once)?;
    let outcome: Value = serde_json::from_slice(&ended.stdout)?;
    ensure!(!ended.status.success(), "all of it found room: {outcome}");
    ensure!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    ensure!(outcome["left_bytes"].as_u64() > Some(0), "{outcome}");
    ensure!(outcome["parked_bytes"] == 16 << 20, "{outcome}");
    let shown = run(&mut cluster.command("status"), PATIENCE)?.text();
    ensure!(shown.contains("16M is parked, no more can be: No space left"), "{shown}");
    for _ in 0..2 {
        verify(&mut program, &cluster)?;
    }
    cancel(&cluster, "donor-1")?;
    cluster.eventually("all is in memory again", PATIENCE, |status| {
        let park = &stats(status, "donor-1")["park"];
        Ok(park["file_bytes"] == 0 && park["parked_pages"] == 0 && park["trouble"].is_null())
    })?;
    verify(&mut program, &cluster)?;
    end(program, &cluster)
}

/// Has a node see the memory of its host as a file says.
const ON_A_HOST_AS_SAID: &str = "mount --bind \"$0\" /proc/meminfo && exec \"$@\"";

/// `--keep-free`, for a host that is short of memory because a file says so: to make one short, a
/// good part of this machine's would have to be taken from whoever else uses it.
pub(crate) fn a_host_that_is_short_of_memory_has_it_back() -> TestResult {
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("mounting over /proc/meminfo takes root".to_owned()));
    }
    if let Some(reason) = ["python3", "unshare", "mount", "bash"].into_iter().find_map(missing) {
        return Ok(Outcome::Skipped(reason));
    }
    let (scratch, parked) = (scratch()?, in_memory()?);
    let (dir, meminfo) = (scratch.path().join("node"), scratch.path().join("meminfo"));
    let host_has = |megabytes: u64| {
        let really = fs::read_to_string("/proc/meminfo")?;
        let total = really.lines().next().context("/proc/meminfo is empty")?;
        // In place, as it is mounted, and in one piece.
        let said = format!("{total}\nMemAvailable: {:>12} kB\n", megabytes << 10);
        let file = File::options().write(true).create(true).truncate(false).open(&meminfo)?;
        anyhow::Ok(file.write_all_at(said.as_bytes(), 0)?)
    };
    host_has(2048)?;
    let mut manager = Command::new(hecaton()?);
    manager.args(["manager", "--json", "--listen", "127.0.0.1:0"]).stdin(Stdio::null());
    let mut manager = Running::spawn(manager.stdout(Stdio::piped()).stderr(log_in(&scratch)?))?;
    let ready = ready_line(&mut manager)?;
    let url = ready["manager"].as_str().context("no manager")?.to_owned();
    let mut node = Command::new("unshare");
    node.args(["--mount", "bash", "-c", ON_A_HOST_AS_SAID]).arg(&meminfo).arg(hecaton()?);
    node.args(["node", "--name", "n", "--lend", "400M", "--keep-free", "512M", "--manager", &url]);
    node.args(park_in(parked.path())).arg("--dir").arg(&dir);
    node.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_in(&scratch)?);
    let node = Running::spawn(&mut node)?;
    let cluster = Cluster::of(url, Vec::new(), node, scratch)?;
    cluster.wait_for_donors(1)?;
    let mut command = cluster.command("run");
    command.arg("--dir").arg(&dir);
    let mut program = start(&cluster, command)?;

    host_has(256)?;
    cluster.eventually("the host has its memory back", PATIENCE, |status| {
        let stats = stats(status, "n");
        let is_parked = stats["park"]["parked_pages"] == stats["lent_pages"];
        let is_used = stats["lent_pages"].as_u64() > Some(0);
        Ok(is_used && is_parked && stats["committed_bytes"] == 0 && stats["host_limit_bytes"] == 0)
    })?;
    verify(&mut program, &cluster)?;
    end(program, &cluster)
}

fn park_in(dir: &Path) -> [String; 2] {
    ["--park".to_owned(), dir.display().to_string()]
}
