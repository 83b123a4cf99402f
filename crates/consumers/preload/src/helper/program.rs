//! Tells the helper when its program has ended, or has left its memory by `exec`.
//!
//! The helper shares the program's memory, and thereby keeps it; so it must notice.
//!
//! - The program's pidfd becomes readable: the program has ended.
//! - The *lifeline*, a pipe that the program holds open until `exec`, has no writer any more: the
//!   program has called `exec`, or closed all descriptors. The helper asks the kernel whether the
//!   two still share memory.

use super::confine::share_memory;
use crate::sys;
use hecaton_uffd::Errno;
use hecaton_uffd::sys::syscall;
use std::os::fd::RawFd;

/// How often the kernel is asked once the lifeline says nothing any more.
const LOOK_AGAIN_MS: usize = 1000;

/// The program, as its helper sees it.
#[derive(Clone, Copy)]
pub(super) struct Program {
    /// Numbers in the helper's namespace.
    pub(super) helper_pid: i32,
    pub(super) pid: i32,
    pub(super) pidfd: RawFd,
    /// -1 once it has no writer.
    pub(super) lifeline: RawFd,
    /// `/proc/PID/stat`, or -1.
    pub(super) stat: RawFd,
}

impl Program {
    /// Waits until `socket` can be read, or has ended. False if the program has ended or left its
    /// memory.
    pub(super) fn wait_for(&mut self, socket: RawFd) -> bool {
        loop {
            if self.lifeline < 0 && self.has_left() {
                return false;
            }
            let patience = if self.lifeline < 0 { LOOK_AGAIN_MS } else { usize::MAX };
            let [readable, ended, cut] = poll([socket, self.pidfd, self.lifeline], patience);
            if ended {
                return false;
            }
            if cut {
                sys::close(std::mem::replace(&mut self.lifeline, -1));
                continue;
            }
            if readable {
                return true;
            }
        }
    }

    /// Ends the program, unless it has left the memory that it shared with the helper, and waits
    /// for its end: who lets go of the userfaultfd before would give it zeros.
    pub(super) fn end(&self) {
        let [ended, cut] = poll([self.pidfd, self.lifeline], 0);
        if ended || (self.lifeline < 0 || cut) && self.has_left() {
            return;
        }
        // SAFETY: numbers only.
        let _ = unsafe {
            let signal = libc::SIGKILL as usize;
            syscall(libc::SYS_pidfd_send_signal, [self.pidfd as usize, signal, 0, 0, 0, 0])
        };
        while poll([self.pidfd], usize::MAX) != [true] {}
    }

    fn has_left(&self) -> bool {
        match share_memory(self.helper_pid, self.pid) {
            Ok(true) | Err(Errno(libc::ENOSYS)) => false,
            // A first thread that has ended (`pthread_exit`) has no memory, though others go on.
            Ok(false) => !self.first_thread_has_ended(),
            // It has ended, or runs a program that may not be looked at.
            Err(_) => true,
        }
    }

    fn first_thread_has_ended(&self) -> bool {
        let mut bytes = [0u8; 256];
        let read = sys::read_at(self.stat, &mut bytes, 0);
        let line = &bytes[..read.unwrap_or(0)];
        // The name, in parentheses, may contain anything.
        let name_end = line.iter().rposition(|&byte| byte == b')');
        name_end.and_then(|at| line.get(at + 2)) == Some(&b'Z')
    }
}

/// Waits at most so many milliseconds (`usize::MAX`: without a limit) until one of the descriptors
/// can be read, or its other end is closed; those below 0 never are.
fn poll<const N: usize>(fds: [RawFd; N], at_most_ms: usize) -> [bool; N] {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let at = polled.as_mut_ptr() as usize;
    // SAFETY: the kernel writes to the N structures. An error leaves them as they are.
    let _ = unsafe { syscall(libc::SYS_poll, [at, N, at_most_ms, 0, 0, 0]) };
    polled.map(|polled| polled.revents != 0)
}
