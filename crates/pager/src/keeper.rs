//! The process that stands behind the pager and keeps what it holds.
//!
//! The keeper starts the worker, which is the pager, with `clone(CLONE_FILES)`: both have one table
//! of descriptors. Whatever the worker opens or receives, the keeper holds from the same instant,
//! the userfaultfd of a child that has this moment been forked included, with no hand-over that
//! could be interrupted. If the worker dies the keeper starts another, which finds the descriptors
//! under the same numbers and the tables in the state file.
//!
//! The kernel hands out zeros when the last copy of a userfaultfd is closed, so the descriptors must
//! outlive any one process here. If the keeper dies, the worker has them still and goes on; only if
//! both are killed within one moment is the consumer lost.

use std::time::{Duration, Instant};

/// Workers that may die within [`WINDOW`] before the keeper gives up: one that dies at once each
/// time will not help its programs.
const MAX_DEATHS: usize = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// Runs `worker` in a process that shares this one's descriptors, again each time that it is killed,
/// until it returns. The calling process must have one thread.
///
/// # Errors
/// When no process can be made, or the workers die too fast.
pub(crate) fn keep(worker: impl Fn() -> i32) -> std::io::Result<i32> {
    // The worker ends the programs on SIGTERM, and then itself; the keeper follows it.
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let pid = clone_sharing_files()?;
        if pid == 0 {
            std::process::exit(worker());
        }
        let status = wait(pid)?;
        if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) != PANICKED {
            return Ok(libc::WEXITSTATUS(status));
        }
        deaths.retain(|death| death.elapsed() < WINDOW);
        deaths.push(Instant::now());
        tracing::warn!(worker = pid, deaths = deaths.len(), "the pager died; another takes over");
        if deaths.len() > MAX_DEATHS {
            return Err(std::io::Error::other(format!(
                "the pager died {MAX_DEATHS} times within {} seconds",
                WINDOW.as_secs()
            )));
        }
    }
}

/// The exit status of a Rust program whose main thread panicked.
pub(crate) const PANICKED: i32 = 101;

fn clone_sharing_files() -> std::io::Result<i32> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: like fork, but for the shared descriptor table; this process has one thread, so the
    // child finds no lock held by a thread that it does not have.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid < 0 { Err(std::io::Error::last_os_error()) } else { Ok(pid as i32) }
}

fn wait(pid: i32) -> std::io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child and writes its status.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            return Ok(status);
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
