//! Has the node start a pager of shared memory when a program first asks for some.

use crate::core::close;
use crate::files::mount::Mount;
use crate::programs::attach::accept;
use crate::serve::Server;
use crate::serve::source::Source;
use crate::shared::Shared;
use hecaton_uffd::files::Answer;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// Watches the socket where programs ask, unless it is watched.
pub(crate) fn expect(shared: &Shared, listener: RawFd) -> io::Result<()> {
    let Some(epoll) = shared.lock().epoll.0.clone() else { return Ok(()) };
    let data = EventData::new_u64(Source::Files(listener).encode());
    // SAFETY: it is never closed.
    let listener = unsafe { BorrowedFd::borrow_raw(listener) };
    match epoll::add(epoll, listener, data, EventFlags::IN) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

impl Server {
    /// A program asks: the pager of shared memory answers it, or nothing can.
    pub(crate) fn hear_wish_for_files(&self, listener: RawFd) {
        match ask_for_pager(&self.shared) {
            Ok(()) => self.unwatch(listener),
            Err(error) => refuse_all(listener, &error.to_string()),
        }
    }
}

/// Fails if this host cannot serve shared memory, or the node is gone.
fn ask_for_pager(shared: &Shared) -> io::Result<()> {
    // Only a check: the mount is dropped at once.
    Mount::new()?;
    let is_heard = shared.lock().guard.say_shared_memory_wanted();
    is_heard.then_some(()).ok_or_else(|| io::Error::other("the node is gone"))
}

/// Answers all programs that wait that shared memory is not served (ENOSYS).
pub(crate) fn refuse_all(listener: RawFd, reason: &str) {
    tracing::warn!(reason, "cannot serve shared memory; programs keep it in local memory");
    while let Some(program) = accept(listener) {
        // SAFETY: just accepted.
        let socket = unsafe { BorrowedFd::borrow_raw(program) };
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        let _ = rustix::net::send(socket, Answer::of(libc::ENOSYS).as_bytes(), flags);
        close(program);
    }
}
