//! Has the node start a pager of shared memory when a program first asks for some.

use crate::core::close;
use crate::files::mount::Mount;
use crate::programs::attach::accept;
use crate::serve::Server;
use crate::serve::source::Source;
use crate::shared::Shared;
use hecaton_uffd::files::Answer;
use rustix::event::epoll::EventFlags;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

impl Server {
    /// Watches the socket where programs ask.
    pub(crate) fn expect_wish_for_files(&self, listener: RawFd) -> io::Result<()> {
        self.watch(listener, Source::Files(listener), EventFlags::IN)
    }

    /// A program asks: the pager of shared memory answers it, or nothing can.
    pub(crate) fn hear_wish_for_files(&self, listener: RawFd) {
        match ask_for_pager(&self.shared) {
            Ok(()) => self.unwatch(listener),
            Err(error) => refuse(listener, &error),
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

/// Accepts one program, and answers that shared memory is not served (ENOSYS).
fn refuse(listener: RawFd, error: &io::Error) {
    tracing::warn!(%error, "cannot serve shared memory; programs keep it in local memory");
    if let Some(program) = accept(listener) {
        // SAFETY: just accepted.
        let socket = unsafe { BorrowedFd::borrow_raw(program) };
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        let _ = rustix::net::send(socket, Answer::of(libc::ENOSYS).as_bytes(), flags);
        close(program);
    }
}
