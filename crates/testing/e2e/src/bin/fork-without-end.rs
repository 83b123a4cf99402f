//! Forks until that fails, says why and after how many, and forks again once those have ended.

use std::io::{Error, ErrorKind};
use std::thread;
use std::time::Duration;

/// More than any pager serves.
const TOO_MANY: usize = 1100;

fn main() {
    let mut children = Vec::new();
    let why = loop {
        match fork() {
            Ok(child) => children.push(child),
            Err(error) => break error,
        }
        assert!(children.len() < TOO_MANY, "nobody minds {TOO_MANY} processes");
    };
    let again = if why.kind() == ErrorKind::WouldBlock { "EAGAIN" } else { "something else" };
    println!("{again} after {}", children.len());
    children.into_iter().for_each(end);
    // The pager hears of their end a little later.
    let retry = (0..1000).find_map(|_| {
        thread::sleep(Duration::from_millis(10));
        fork().ok()
    });
    end(retry.expect("it passes"));
    println!("and then again");
}

/// A child that waits to be killed.
fn fork() -> std::io::Result<libc::pid_t> {
    // SAFETY: the process has one thread, and the child only waits.
    match unsafe { libc::fork() } {
        -1 => Err(Error::last_os_error()),
        0 => loop {
            // SAFETY: touches no memory.
            unsafe { libc::pause() };
        },
        child => Ok(child),
    }
}

fn end(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: a child of this process, not yet waited for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0);
    }
}
