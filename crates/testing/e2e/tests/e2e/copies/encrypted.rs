//! `--encrypt`: what donors have of a program's memory or of a volume, and what becomes of it when
//! they change it.
//!
//! The tests look into the donors' memory from outside, as whoever owns a donor's host can.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, PATIENT_WITH_DONORS, all},
        process::{kill_dead, missing, missing_any, run},
        verifier::Verifier,
        wait::until,
    },
    volume::Disk,
};
use anyhow::{Context as _, ensure};
use rustix::fs::{SeekFrom, seek};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt as _,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

const PAGE: usize = 4096;

/// In each page of the program's memory.
const MARK: &[u8] = b"hecaton: nobody but me may read this";

/// Fills so many MiB with marked pages, says so, and then checks them from end to end for each line
/// of its input, and changes every third page.
const PROGRAM: &str = "
import sys
size = int(sys.argv[1]) << 20
mark = b'hecaton: nobody but me may read this'
memory = bytearray(size)
pages = range(0, size, 4096)
def expected(at, turn):
    return (at * 2654435761 + turn + 1).to_bytes(8, 'little') + mark
turns = [0] * len(pages)
for at in pages:
    memory[at:at + 44] = expected(at, 0)
print('filled', flush=True)
for line in sys.stdin:
    for number, at in enumerate(pages):
        if memory[at:at + 44] != expected(at, turns[number]):
            print('wrong', at, flush=True)
            sys.exit(3)
        if number % 3 == 0:
            turns[number] += 1
            memory[at:at + 44] = expected(at, turns[number])
    print('checked', flush=True)
";

/// Pages that a program of 64 MiB with 16 MiB local has at the donors at least: some are staged.
const PAGES_AWAY: u64 = (64 - 16 - 8) * 256;

/// The program, on a cluster.
fn start(cluster: &Cluster, options: &[&str]) -> anyhow::Result<Verifier> {
    let mut command = cluster.command("run");
    command.args(["--local", "16M"]).args(options).arg("--");
    start_in(&mut command, "64")
}

/// The program, as the last of what a command is told.
pub(crate) fn start_in(command: &mut Command, mib: &str) -> anyhow::Result<Verifier> {
    Verifier::start(command.args(["python3", "-c", PROGRAM, mib]).stderr(Stdio::null()))
}

/// The file of the memory that a donor lends.
fn arena(donor: &Value) -> anyhow::Result<File> {
    let pid = donor["pid"].as_u64().context("the donor has no process")?;
    let name = donor["name"].as_str().context("the donor has no name")?;
    let wanted = format!("/memfd:hecaton-{name} (deleted)");
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|link| link.as_os_str() == wanted.as_str()) {
            return Ok(OpenOptions::new().read(true).write(true).open(path)?);
        }
    }
    anyhow::bail!("{name} has no memory")
}

/// Looks at each page that has anything in it; returns how many there are.
fn each_page(
    arena: &File,
    mut look: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let mut page = [0; PAGE];
    let (mut count, mut at) = (0, 0);
    // Where there is nothing, neither file nor read takes memory; the error is that of the end.
    while let Ok(data) = seek(arena, SeekFrom::Data(at)) {
        let hole = seek(arena, SeekFrom::Hole(data))?;
        for start in (data..hole).step_by(PAGE) {
            arena.read_exact_at(&mut page, start)?;
            if page.iter().any(|&byte| byte != 0) {
                count += 1;
                look(start, &page)?;
            }
        }
        at = hole;
    }
    Ok(count)
}

/// Pages that the donors have, and those of them that show the mark.
pub(crate) fn marked(cluster: &Cluster) -> anyhow::Result<(u64, u64)> {
    let (mut pages, mut marked) = (0, 0);
    for donor in all(&cluster.status()?, "donors") {
        pages += each_page(&arena(donor)?, |_, page| {
            marked += u64::from(page.windows(MARK.len()).any(|window| window == MARK));
            Ok(())
        })?;
    }
    Ok((pages, marked))
}

/// The memory of the donors shows a program's pages. With `--encrypt` it shows none, even if the
/// program's pager is killed meanwhile.
pub(crate) fn donors_can_read_nothing() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(2, "200M")?;
    let mut plain = start(&cluster, &[])?;
    let (_, shown) = marked(&cluster)?;
    ensure!(
        shown >= PAGES_AWAY,
        "the donors show {shown} pages of a program that does not encrypt"
    );
    plain.check()?;
    plain.finish(PATIENCE)?;
    cluster.wait_until_idle(PATIENCE)?;

    let mut encrypted = start(&cluster, &["--encrypt"])?;
    for kill in [false, true, true] {
        encrypted.begin_check()?;
        if kill {
            // In the middle of reading and writing.
            thread::sleep(Duration::from_millis(100));
            kill_dead(cluster.pager_of_only_consumer()?);
        }
        encrypted.end_check()?;
        let (pages, shown) = marked(&cluster)?;
        ensure!(pages >= PAGES_AWAY, "only {pages} pages are at the donors");
        ensure!(shown == 0, "the donors show {shown} pages of {pages}");
    }
    cluster.eventually("the statistics tell all that", PATIENCE, |status| {
        let stats = &all(status, "consumers").next().context("no consumer")?["stats"];
        ensure!(stats["checksum_errors"].as_u64().unwrap_or_default() == 0, "{stats}");
        Ok(stats["encrypted"] == true && stats["restarts"].as_u64() > Some(0))
    })?;
    encrypted.finish(PATIENCE)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Changes one byte of each page that the donor has.
pub(crate) fn alter(donor: &Value) -> anyhow::Result<u64> {
    let arena = arena(donor)?;
    each_page(&arena, |start, page| {
        let at = (start / 7 % PAGE as u64) as usize;
        arena.write_all_at(&[page[at] ^ 0x10], start + at as u64)?;
        Ok(())
    })
}

/// If one donor alters a page, the pager fetches the page from another donor and makes its copies
/// anew. If no donor has the page unaltered, the pager ends the program and reports the reason.
pub(crate) fn donors_can_change_nothing() -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "200M")?;
    let [failover, after_ms] = PATIENT_WITH_DONORS;
    let mut mirrored = start(&cluster, &["--encrypt", "--mirror", "3", failover, after_ms])?;
    cluster.pager_of_only_consumer()?;
    cluster.until_whole()?;
    let altered = alter(all(&cluster.status()?, "donors").next().context("no donor")?)?;
    ensure!(altered >= PAGES_AWAY, "only {altered} pages were there to be altered");
    mirrored.check()?;
    let found = |status: &Value| {
        let stats = all(status, "consumers").next().map(|one| one["stats"].clone());
        stats.and_then(|stats| stats["checksum_errors"].as_u64()).unwrap_or_default()
    };
    // Which donor is read is the lane's affair, and statistics are a second old.
    until("something altered is found", LONG, || {
        if found(&cluster.status()?) > 0 {
            return Ok(Ok(()));
        }
        mirrored.check()?;
        Ok(Err("no checksum is wrong"))
    })?;
    mirrored.check()?;
    mirrored.finish(PATIENCE)?;
    cluster.wait_until_idle(PATIENCE)?;

    let path = cluster.file("altered.json");
    let options = ["--encrypt", "--stats", path.to_str().context("an odd directory")?];
    let mut alone = start(&cluster, &options)?;
    for donor in all(&cluster.status()?, "donors") {
        alter(donor)?;
    }
    alone.begin_check()?;
    let said = alone.says()?;
    ensure!(said.is_none(), "the program says {said:?}");
    let status = alone.wait(PATIENCE)?;
    ensure!(status.code() == Some(137), "the program ended with {status}");
    let stats: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let error = stats["pager"]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("not what was written, twice"), "it was ended for {stats}");
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// The memory of the donors shows a volume's data. With `--encrypt` it shows none. The data survive
/// a kill of the volume's process. A read of data that a donor altered fails if no other copy
/// exists.
pub(crate) fn donors_can_neither_read_nor_change_a_volume() -> TestResult {
    if let Some(reason) = missing_any(&["nbdcopy", "qemu-io"]) {
        return Ok(Outcome::Skipped(reason));
    }
    const PAGES: u64 = 8 << 8;
    let cluster = Cluster::start(2, "200M")?;
    let (original, copy) = (cluster.file("original"), cluster.file("copy"));
    let mut bytes = vec![0; PAGES as usize * PAGE];
    for (number, page) in (1..=PAGES).zip(bytes.chunks_exact_mut(PAGE)) {
        page[..8].copy_from_slice(&number.to_le_bytes());
        page[8..][..MARK.len()].copy_from_slice(MARK);
    }
    fs::write(&original, &bytes)?;
    let copied = |from: &OsStr, to: &OsStr| {
        run(Command::new("nbdcopy").args([from, to]), LONG)?.expect_success("nbdcopy")
    };
    for options in [&["--mirror", "2"][..], &["--mirror", "2", "--encrypt"], &["--encrypt"]] {
        let (is_mirrored, is_encrypted) =
            (options.contains(&"--mirror"), options.contains(&"--encrypt"));
        let disk = Disk::create(&cluster, "disk", "8M", options)?;
        ensure!(disk.status()?["encrypted"] == is_encrypted, "{}", disk.status()?);
        let uri = disk.uri();
        copied(original.as_os_str(), uri.as_ref())?;
        disk.kill()?;
        copied(uri.as_ref(), copy.as_os_str())?;
        ensure!(fs::read(&copy)? == bytes, "{options:?}: another image");
        cluster.until_whole()?;
        let (pages, shown) = marked(&cluster)?;
        let held = if is_mirrored { 2 * PAGES } else { PAGES };
        ensure!(pages == held, "{options:?}: {pages} pages are at the donors, not {held}");
        let expected = if is_encrypted { 0 } else { held };
        ensure!(shown == expected, "{options:?}: the donors show {shown} pages of {pages}");
        if is_encrypted {
            are_changed(&cluster, &disk, is_mirrored)?;
            if is_mirrored {
                copied(uri.as_ref(), copy.as_os_str())?;
                ensure!(fs::read(&copy)? == bytes, "{options:?}: another image");
            }
        }
        disk.delete()?;
        cluster.eventually("the donors have their memory back", PATIENCE, |_| {
            Ok(marked(&cluster)?.0 == 0)
        })?;
    }
    Ok(Outcome::Passed)
}

/// One donor changes all that it has. Where there is no other copy, reading it is an error.
fn are_changed(cluster: &Cluster, disk: &Disk<'_>, is_mirrored: bool) -> anyhow::Result<()> {
    let mut altered = 0;
    for donor in all(&cluster.status()?, "donors") {
        if altered == 0 {
            altered = alter(donor)?;
        }
    }
    ensure!(altered > 0, "no donor has anything");
    let mut io = Command::new("qemu-io");
    let ended = run(io.args(["-f", "raw", "-c", "read 0 8M"]).arg(disk.uri()), PATIENCE)?;
    let said = ended.text() + &ended.stderr;
    let is_refused = said.contains("Input/output error");
    ensure!(is_refused != is_mirrored, "mirrored: {is_mirrored}, and it said {said:?}");
    Ok(())
}
