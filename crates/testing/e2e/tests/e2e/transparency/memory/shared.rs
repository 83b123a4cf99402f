//! Checks that memory that processes share is paged: the same contents for all of them, within the
//! local memory, whatever is killed.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, succeed},
    process::{family, kill_dead, run, run_watched},
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{fs, process::Command};

const PROGRAM: &str = env!("CARGO_BIN_EXE_shared-memory");

/// Why there is none; none if there is.
fn reason_without() -> Option<String> {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 9) {
        return Some(format!("shared memory is paged from Linux 6.9 on; this is {release}"));
    }
    match fs::File::open("/dev/fuse") {
        Err(error) => Some(format!("/dev/fuse cannot be opened: {error}")),
        Ok(_) if !rustix::process::geteuid().is_root() => Some("it takes root".to_owned()),
        Ok(_) => None,
    }
}

/// Most of the memory has left, and no more was local than may be.
fn was_paged(stats: &Value) -> anyhow::Result<()> {
    let pager = &stats["pager"];
    let [peak, limit, out] =
        ["local_peak_bytes", "local_limit_bytes", "pages_out"].map(|name| pager[name].as_u64());
    ensure!(out > Some(10_000), "only {out:?} pages left: {stats}");
    let beyond = limit.context("a limit")? / 8;
    ensure!(peak.context("a peak")? <= limit.context("a limit")? + beyond, "{stats}");
    Ok(())
}

pub(crate) fn by_processes(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    for kind in ["anonymous", "memory-file", "named"] {
        let stats = same_as_native(cluster, "24M", &[PROGRAM, kind]).context(kind)?;
        was_paged(&stats).context(kind)?;
    }
    Ok(Outcome::Passed)
}

/// Half a gibibyte, as the `multiprocessing` library shares it.
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

/// Of what the kernel says of a process's mappings: resident bytes of files of the pager.
fn shared_bytes(id: u32) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{id}/smaps")).ok()?;
    let mut is_ours = false;
    let mut bytes = 0;
    for line in maps.lines() {
        match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
            ["Rss:", kilobytes, "kB"] if is_ours => bytes += kilobytes.parse::<u64>().ok()? << 10,
            [_, permissions, _, _, _, name, ..] if permissions.ends_with('s') => {
                is_ours = name.contains(":psm_");
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
        // Both processes may have the same pages mapped.
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

/// The pager and the keeper, while the program writes and reads all the time.
pub(crate) fn outlives_what_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    let native = run(Command::new(PROGRAM).arg("memory-file"), LONG)?;
    let (mut pagers, mut keepers, mut looks) = (0, 0, 0);
    let ended = run_watched(cluster.on_pool("24M", PROGRAM).arg("memory-file"), LONG, |_| {
        looks += 1;
        if looks % 40 != 0 {
            return Ok(());
        }
        let Some(pager) = cluster.known_pager()? else { return Ok(()) };
        if looks % 80 == 0 {
            if let Some(keeper) = keeper() {
                kill_dead(keeper);
                keepers += 1;
            }
        } else if pagers < 8 {
            kill_dead(pager);
            pagers += 1;
        }
        Ok(())
    })?;
    ensure!(ended.text() == native.text(), "{}: {}", ended.text(), ended.stderr);
    ensure!(pagers > 2 && keepers > 2, "only {pagers} pagers and {keepers} keepers were killed");
    Ok(Outcome::Passed)
}

/// The keeper of the only consumer that has one. A test sees its own processes only.
fn keeper() -> Option<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_keeper = |id: &u32| {
        let line = fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.contains("file-keeper")
    };
    ids.into_iter().find(is_keeper)
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

/// The Z garbage collector has the heap in a memory file, which it maps at several addresses.
pub(crate) fn java_has_its_heap_there(cluster: &Cluster) -> TestResult {
    if let Some(reason) = reason_without() {
        return Ok(Outcome::Skipped(reason));
    }
    let has_z = |status: std::process::Output| status.status.success();
    if !Command::new("java").args(["-XX:+UseZGC", "-version"]).output().is_ok_and(has_z) {
        return Ok(Outcome::Skipped("there is no Java with a Z garbage collector".to_owned()));
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
    was_paged(&serde_json::from_slice(&fs::read(&stats)?)?)?;
    Ok(Outcome::Passed)
}
