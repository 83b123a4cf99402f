//! Runs programs whose children have given up what leads to the pager, or may not reach it.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::Cluster,
    process::{missing_any, readable_by_all},
};
use anyhow::{Context as _, ensure};

pub(crate) fn their_forks(cluster: &Cluster) -> TestResult {
    for kind in ["seccomp", "killed", "user", "chroot", "files"] {
        let command = [env!("CARGO_BIN_EXE_sandboxed-forks"), kind];
        let stats = same_as_native(cluster, "16M", &command).context(kind)?;
        let out = stats["pager"]["pages_out"].as_u64();
        ensure!(out > Some(5_000), "only {out:?} pages left: {stats}");
    }
    Ok(Outcome::Passed)
}

/// Fills 48 MiB, forks, and looks at all of it in both processes.
const FILLS: &str = "
import os
pages = 48 << 8
memory = bytearray(pages << 12)
for page in range(pages):
    memory[page << 12:(page << 12) + 8] = page.to_bytes(8, 'little')
def right():
    at = lambda page: int.from_bytes(memory[page << 12:(page << 12) + 8], 'little')
    return sum(at(page) == page for page in range(pages))
child = os.fork()
if child == 0:
    os._exit(right() != pages)
print(os.getuid(), right(), os.waitpid(child, 0)[1])
";

/// A program on the pool becomes another user, and runs a program that forks: both are on the pool.
/// So they are if they cannot see the pager's socket.
pub(crate) fn another_user(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["setpriv", "su", "python3", "unshare"]) {
        return Ok(Outcome::Skipped(reason));
    }
    if !rustix::process::geteuid().is_root() {
        return Ok(Outcome::Skipped("only root becomes another user".to_owned()));
    }
    if let Some(reason) = readable_by_all(&cluster.hecaton.with_file_name("libhecaton.so")) {
        return Ok(Outcome::Skipped(reason));
    }
    let shell = format!("python3 -c \"{FILLS}\"");
    let hidden = format!("mount -t tmpfs none {} && {shell}", cluster.file("node").display());
    for kind in [
        &["setpriv", "--reuid", "65534", "--clear-groups", "python3", "-c", FILLS][..],
        &["su", "nobody", "-s", "/bin/sh", "-c", &shell],
        &["unshare", "--mount", "sh", "-c", &hidden],
    ] {
        let stats = same_as_native(cluster, "16M", kind).with_context(|| kind.join(" "))?;
        let out = stats["pager"]["pages_out"].as_u64();
        ensure!(out > Some(7_000), "only {out:?} pages left: {stats}");
    }
    Ok(Outcome::Passed)
}
