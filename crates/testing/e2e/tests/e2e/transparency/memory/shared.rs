//! Checks that shared memory is paged, correct, and within its limit.
//!
//! One test kills the pager, its keeper and the volume's process meanwhile.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, succeed},
    process::{family, kill_dead, missing, run, run_watched},
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{fs, process::Command};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_shared-memory");

/// Why this host cannot page shared memory; `None` if it can.
pub(crate) fn reason_without() -> Option<String> {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 9) {
        return Some(format!("shared memory is paged from Linux 6.9 on; this is {release}"));
    }
    let needed = ["/dev/fuse", "/dev/loop-control"].map(fs::File::open);
    if let Some(error) = needed.into_iter().find_map(Result::err) {
        return Some(format!("FUSE or loop devices cannot be used: {error}"));
    }
    if !rustix::process::geteuid().is_root() {
        return Some("this test needs root".to_owned());
    }
    missing("mkfs.ext4")
}

/// Checks that 40 MB of shared pages went to donors, that both limits add up to at most `local`
/// bytes, and that local shared memory stayed within 9/8 of `local`.
fn was_paged(stats: &Value, local: u64) -> anyhow::Result<()> {
    let pager = &stats["pager"];
    let count = |name: &str| {
        pager["shared_memory"][name].as_u64().with_context(|| format!("no {name}: {stats}"))
    };
    let out = count("written_bytes")?;
    ensure!(out > 40_000_000, "only {out} bytes left: {stats}");
    let own = pager["local_limit_bytes"].as_u64().context("no limit")?;
    ensure!(own + count("limit_bytes")? <= local, "{stats}");
    ensure!(count("local_peak_bytes")? <= local + local / 8, "{stats}");
    Ok(())
}

pub(crate) fn by_processes(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    for kind in ["anonymous", "memory-file", "named"] {
        let stats = same_as_native(cluster, "24M", &[PROGRAM, kind]).context(kind)?;
        was_paged(&stats, 24 << 20).context(kind)?;
    }
    Ok(Outcome::Passed)
}

/// Shares 512 MiB through the `multiprocessing` library.
const PYTHON: &str = "
from multiprocessing import shared_memory, Process
SIZE = 512 << 20
def value(at): return (at * 2654435761 + 1).to_bytes(8, 'little')
def other(name):
    memory = shared_memory.SharedMemory(name)
    assert all(memory.buf[at:at + 8] == value(at) for at in range(0, SIZE, 4096))
    memory.buf[8:16] = b'anothers'
    memory.close()
memory = shared_memory.SharedMemory(create=True, size=SIZE)
for at in range(0, SIZE, 4096):
    memory.buf[at:at + 8] = value(at)
child = Process(target=other, args=(memory.name,))
child.start()
child.join()
print(child.exitcode, bytes(memory.buf[8:16]))
memory.close()
memory.unlink()
";

/// Resident bytes of a process's mappings of Python's shared memory (`/named/psm_...`).
fn shared_bytes(id: u32) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{id}/smaps")).ok()?;
    let mut is_ours = false;
    let mut bytes = 0;
    for line in maps.lines() {
        match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
            ["Rss:", kilobytes, "kB"] if is_ours => bytes += kilobytes.parse::<u64>().ok()? << 10,
            [_, permissions, _, _, _, name, ..] if permissions.ends_with('s') => {
                is_ours = name.contains("/psm_");
            }
            [first, ..] if !first.ends_with(':') => is_ours = false,
            _ => {}
        }
    }
    Some(bytes)
}

pub(crate) fn of_python_stays_below(cluster: &Cluster) -> TestResult {
    const LOCAL: u64 = 64 << 20;
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    let native = run(Command::new("python3").args(["-c", PYTHON]), LONG)?;
    let mut command = cluster.on_pool("64M", "python3");
    command.args(["-c", PYTHON]);
    let (mut most, mut looks) = (0, 0);
    let ended = run_watched(&mut command, LONG, |launcher| {
        // The maximum, not the sum: both processes map the same pages.
        let resident = family(launcher).into_iter().filter_map(shared_bytes).max().unwrap_or(0);
        looks += u64::from(resident > 0);
        most = most.max(resident);
        Ok(())
    })?;
    ensure!(
        ended.text() == native.text(),
        "{} and {}: {}",
        ended.text(),
        native.text(),
        ended.stderr
    );
    ensure!(looks > 50, "the memory was seen only {looks} times");
    ensure!(most > LOCAL / 4, "at most {} KiB were resident", most >> 10);
    ensure!(most <= LOCAL + LOCAL / 8, "{} KiB were resident", most >> 10);
    Ok(Outcome::Passed)
}

/// Kills the pager, the keeper and the process that serves the volume in turn, while the program
/// reads and writes.
pub(crate) fn outlives_what_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    let native = run(Command::new(PROGRAM).arg("memory-file"), LONG)?;
    let (mut killed, mut looks) = ([0; 3], 0);
    let ended = run_watched(cluster.on_pool("24M", PROGRAM).arg("memory-file"), LONG, |_| {
        looks += 1;
        if looks % 40 != 0 {
            return Ok(());
        }
        let which = looks / 40 % 3;
        let victim = match which {
            0 => cluster.known_pager()?,
            1 => process_of("shared-memory-keeper"),
            _ => process_of("volume-server"),
        };
        // The node does not restart a process that died more than 20 times within 10 s.
        if let Some(victim) = victim.filter(|_| killed[which] < 8) {
            kill_dead(victim);
            killed[which] += 1;
        }
        Ok(())
    })?;
    ensure!(ended.text() == native.text(), "{}: {}", ended.text(), ended.stderr);
    ensure!(killed.iter().all(|&times| times > 1), "only {killed:?} were killed");
    Ok(Outcome::Passed)
}

/// A process of the `hecaton` command with this role. /proc has the processes of this test only.
fn process_of(role: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find(|id| {
        let line = fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.split('\0').nth(1) == Some(role)
    })
}

const JAVA: &str = "
public class Heap {
    public static void main(String[] arguments) {
        long[][] all = new long[160][];
        long sum = 0;
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < all.length; i++) {
                all[i] = new long[1 << 17];
                for (int j = 0; j < all[i].length; j += 256) all[i][j] = i * 31L + j + round;
            }
            for (long[] one : all) for (int j = 0; j < one.length; j += 256) sum += one[j];
        }
        System.out.println(sum);
    }
}
";

/// The Z garbage collector keeps the heap in a memory file, which it maps at several addresses.
pub(crate) fn java_has_its_heap_there(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    let has_z = |status: std::process::Output| status.status.success();
    if !Command::new("java").args(["-XX:+UseZGC", "-version"]).output().is_ok_and(has_z) {
        return Ok(Outcome::Skipped("no Java with a Z garbage collector is installed".to_owned()));
    }
    let source = cluster.file("Heap.java");
    fs::write(&source, JAVA)?;
    let arguments = ["-XX:+UseZGC", "-Xmx512m"];
    let native = run(Command::new("java").args(arguments).arg(&source), LONG)?;
    let stats = cluster.file("java.json");
    let mut command = cluster.command("run");
    command.args(["--local", "160M", "--stats"]).arg(&stats).args(["--", "java"]);
    let ended = succeed(command.args(arguments).arg(&source))?;
    ensure!(ended.text() == native.text(), "{} and {}", ended.text(), native.text());
    was_paged(&serde_json::from_slice(&fs::read(&stats)?)?, 160 << 20)?;
    Ok(Outcome::Passed)
}
