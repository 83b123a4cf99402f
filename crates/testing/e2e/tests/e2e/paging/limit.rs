//! Local memory stays below `--local` at all times, and the pager's own memory in bounds, seen from
//! outside.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE},
    process::{Running, anonymous_bytes, family, missing, name_of, run_watched},
};
use anyhow::{Context as _, ensure};
use std::{
    ffi::OsStr,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::Stdio,
};

const LOCAL: u64 = 64 << 20;

/// Pages on their way out, in the program: one batch.
const IN_FLIGHT: u64 = 1 << 20;

/// Anonymous memory that is not paged: stacks, written-to program data, the preloaded library's.
const NOT_PAGED: u64 = 4 << 20;

pub(crate) fn resident_memory_stays_below(cluster: &Cluster) -> TestResult {
    stays_below(cluster, env!("CARGO_BIN_EXE_verify-threads"), &["3", "16000", "6000"])
}

/// The kernel keeps memory that was freed by MADV_FREE for as long as it likes.
pub(crate) fn freed_memory_counts(cluster: &Cluster) -> TestResult {
    stays_below(cluster, env!("CARGO_BIN_EXE_freed-memory"), &["4"])
}

fn stays_below(cluster: &Cluster, program: &str, arguments: &[&str]) -> TestResult {
    let name = Path::new(program).file_name().and_then(OsStr::to_str).context("a name")?;
    let mut command = cluster.on_pool("64M", program);
    command.args(arguments);
    let (mut most, mut looks) = (0, 0);
    let ended = run_watched(&mut command, LONG, |launcher| {
        // The kernel cuts names.
        let is_program =
            |id: &u32| name_of(*id).is_some_and(|cut| name.starts_with(cut.trim_end()));
        let programs = family(launcher).into_iter().filter(is_program);
        let resident: u64 = programs.filter_map(anonymous_bytes).sum();
        looks += u64::from(resident > 0);
        most = most.max(resident);
        Ok(())
    })?;
    ended.expect_success(name)?;
    ensure!(looks > 50, "the program was seen only {looks} times");
    // A program that never came near its limit would prove nothing.
    ensure!(most > LOCAL / 2, "at most {} MiB were resident of {}", most >> 20, LOCAL >> 20);
    ensure!(
        most <= LOCAL + IN_FLIGHT + NOT_PAGED,
        "{} KiB were resident with --local {} KiB",
        most >> 10,
        LOCAL >> 10
    );
    Ok(Outcome::Passed)
}

/// Memory of the program whose pager is measured.
const LARGE: u64 = 1 << 30;

/// Bytes that the pager may take beside its tables.
const FIXED: u64 = 64 << 20;

/// Bytes that the tables may take for each page of the program, and how many more with `--encrypt`.
const BYTES_PER_PAGE: u64 = 16;
const SEAL_BYTES: u64 = 24;

/// Fills a gibibyte, each page another; reads all of it, so that there are clean pages too; waits.
const FILL: &str = "
import sys
size = 1 << 30
memory = bytearray(size)
for at in range(0, size, 4096):
    memory[at:at + 8] = (at * 2654435761 + 1).to_bytes(8, 'little')
assert all(memory[at:at + 8] == (at * 2654435761 + 1).to_bytes(8, 'little')
           for at in range(0, size, 4096))
print('filled', flush=True)
sys.stdin.read()
";

/// The pager's own memory, and the state file. Program text of the command is no more the pager's
/// than anybody's.
fn pager_bytes(pager: u32) -> anyhow::Result<u64> {
    let own = anonymous_bytes(pager).context("the pager is gone")?;
    let mut state = None;
    for fd in fs::read_dir(format!("/proc/{pager}/fd"))?.flatten() {
        let is_state = fs::read_link(fd.path())
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:hecaton-pager"));
        if is_state {
            use std::os::unix::fs::MetadataExt as _;
            // In units of 512 bytes, whatever the file system's block is.
            state = Some(fs::metadata(fd.path())?.blocks() * 512);
        }
    }
    Ok(own + state.context("the pager has no state file")?)
}

pub(crate) fn the_pager_stays_small(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let plain = BYTES_PER_PAGE;
    for (local, options, bytes_per_page) in
        [("64M", &[][..], plain), ("512M", &[], plain), ("64M", &["--encrypt"], plain + SEAL_BYTES)]
    {
        let mut command = cluster.command("run");
        command.args(["--local", local]).args(options).args(["--", "python3", "-c", FILL]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        let output = running.output()?;
        let line = BufReader::new(output).lines().next().transpose()?;
        ensure!(line.as_deref() == Some("filled"), "the program does not fill its memory");
        let taken = pager_bytes(cluster.pager_of_only_consumer()?)?;
        drop(running.child_mut().stdin.take());
        let status = running.wait(LONG, || Ok(()))?;
        ensure!(status.success(), "the program ended with {status}");
        let tables = LARGE / 4096 * bytes_per_page;
        let (taken_kib, tables_kib) = (taken >> 10, tables >> 10);
        println!(
            "    with --local {local} {options:?}: {taken_kib} KiB, of them {tables_kib} for tables"
        );
        ensure!(
            taken <= tables + FIXED,
            "with --local {local} {options:?} the pager takes {taken_kib} KiB, more than {tables_kib} + {}",
            FIXED >> 10
        );
        // Entries of all pages and records of those that left are the least that there must be:
        // otherwise the wrong thing was measured.
        ensure!(taken > LARGE / 4096 * (bytes_per_page - 8), "only {taken_kib} KiB were found");
        // The next one is to be the only one.
        cluster.wait_until_idle(PATIENCE)?;
    }
    Ok(Outcome::Passed)
}
