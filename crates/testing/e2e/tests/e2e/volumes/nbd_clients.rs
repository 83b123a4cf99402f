//! A volume in libnbd's shell, call by call, and as a file of its user-space file system.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE},
        process::{Running, missing_any, run},
        wait::until,
    },
    volume::Disk,
};
use anyhow::ensure;
use hecaton_e2e::Random;
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Many requests under way, each with a pattern of its own; what blocks are; what is beyond the
/// end; a connection that is negotiated step by step.
const SHELL: &str = r#"
import errno
h.set_opt_mode(True)
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(URI)
assert h.get_structured_replies_negotiated() and h.get_tls_negotiated() == False
names = []
h.opt_list(lambda name, what: names.append(name))
assert names == ['disk'], names
h.set_export_name('disk')
h.opt_go()
size = h.get_size()
assert size == 16 << 20 and h.can_multi_conn() and h.can_fua() and h.can_zero() and not h.is_read_only()

K = 1 << 10
parts = [(at * 130 * K + 7 * at, 100 * K + 13 * at) for at in range(64)]
ends = []
done = lambda at: lambda error: ends.append((at, int(error.value))) or 1
for at, (offset, length) in enumerate(parts):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([at + 1]) * length), offset, done(at))
while len(ends) < len(parts):
    h.poll(-1)
assert sorted(ends) == [(at, 0) for at in range(64)], ends
h.flush()
for at, (offset, length) in enumerate(parts):
    assert h.pread(length, offset) == bytearray([at + 1]) * length, at

h.trim(4 << 20, 4 << 20)
h.zero(64 * K, 12 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(4 << 20, 4 << 20) == bytearray(4 << 20)
holes = []
def extents(context, offset, entries, error):
    for length, flags in zip(entries[0::2], entries[1::2]):
        holes.append((offset, length, flags))
        offset += length
h.block_status(4 << 20, 4 << 20, extents)
assert holes[0] == (4 << 20, 4 << 20, nbd.STATE_HOLE | nbd.STATE_ZERO), holes

h.set_strict_mode(0)
for what, wrong in [('a write', lambda: h.pwrite(b'x' * 512, size - 511)), ('a read', lambda: h.pread(512, size - 511))]:
    try:
        wrong()
        raise SystemExit(what + ' beyond the end is done')
    except nbd.Error as error:
        assert error.errnum in (errno.EINVAL, errno.ENOSPC), error
h.shutdown()
print('all is as it should be')
"#;

pub(crate) fn a_shell_and_a_file_system_of_others(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["nbdsh", "nbdfuse", "fusermount3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "16M", &[])?;
    let script = format!("URI = '{}'\n{SHELL}", disk.uri());
    // The distribution's module is for its own Python, which need not be the first one.
    let path = "/usr/bin:/bin:/usr/local/bin";
    let ended = run(Command::new("nbdsh").args(["-c", &script]).env("PATH", path), LONG)?;
    ended.expect_success("nbdsh")?;
    ensure!(ended.text().contains("all is as it should be"), "{}", ended.text());

    let file = Mounted::at(cluster.file("mounted"), &disk.uri())?;
    let mut random = Random(11);
    let bytes: Vec<u8> = (0..1 << 19).flat_map(|_| random.next().to_le_bytes()).collect();
    let opened = fs::OpenOptions::new().read(true).write(true).open(file.path())?;
    ensure!(opened.metadata()?.len() == 16 << 20, "the file has another size than the volume");
    opened.write_all_at(&bytes, 1_000_003)?;
    opened.sync_all()?;
    drop(opened);
    file.unmount()?;
    // Another client finds it.
    let file = Mounted::at(cluster.file("mounted"), &disk.uri())?;
    let mut read = vec![0; bytes.len()];
    fs::File::open(file.path())?.read_exact_at(&mut read, 1_000_003)?;
    ensure!(read == bytes, "another client reads something else");
    file.unmount()?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0, "{stats}");
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A mount of nbdfuse. It is unmounted when it is dropped.
struct Mounted {
    dir: PathBuf,
    process: Option<Running>,
}

impl Mounted {
    fn at(dir: PathBuf, uri: &str) -> anyhow::Result<Mounted> {
        fs::create_dir_all(&dir)?;
        let mut command = Command::new("nbdfuse");
        let process = Running::spawn(command.arg(&dir).arg(uri).stdin(Stdio::null()))?;
        let mounted = Mounted { dir, process: Some(process) };
        until("nbdfuse has mounted it", PATIENCE, || {
            let path = mounted.path();
            Ok(if path.exists() { Ok(()) } else { Err(format!("no {}", path.display())) })
        })?;
        Ok(mounted)
    }

    fn path(&self) -> PathBuf {
        self.dir.join("nbd")
    }

    fn unmount(mut self) -> anyhow::Result<()> {
        unmount(&self.dir)?;
        let mut process = self.process.take().expect("until it is unmounted");
        let ended = process.wait(PATIENCE, || Ok(()))?;
        ensure!(ended.success(), "nbdfuse ended with {ended}");
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.process.is_some() {
            // It says so itself if it cannot.
            let _ = unmount(&self.dir);
        }
    }
}

fn unmount(dir: &Path) -> anyhow::Result<()> {
    run(Command::new("fusermount3").arg("-u").arg(dir), PATIENCE)?.expect_success("fusermount3")
}
