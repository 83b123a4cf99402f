//! The socket calls of both sides: gathered sends and receives that may or may not wait, and the
//! options that notice a dead peer.
//!
//! The gathered send takes raw `iovec`s and not slices, because a donor sends from memory that
//! other threads may write at the same time: a `&[u8]` of it must not exist. The kernel copies
//! whatever it finds, and the page's checksum tells whether that was one state of the page.

use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

/// Whether a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// As long as the socket's timeout lets it.
    Yes,
    /// Not at all: `WouldBlock` instead.
    No,
}

impl Wait {
    fn flags(self) -> i32 {
        match self {
            Wait::Yes => 0,
            Wait::No => libc::MSG_DONTWAIT,
        }
    }
}

/// Whether more is to be sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum More {
    /// Yes: the kernel may keep what does not fill a packet until then.
    Follows,
    /// No, or nobody knows.
    Unknown,
}

impl More {
    fn flags(self) -> i32 {
        match self {
            More::Follows => libc::MSG_MORE,
            More::Unknown => 0,
        }
    }
}

/// Sets what both sides need: no Nagle delay, and an error instead of silence when the peer's host
/// is gone (`dead_after` without an acknowledgement).
pub(crate) fn prepare(socket: BorrowedFd<'_>, dead_after: Duration) -> io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    let dead_after_ms = u32::try_from(dead_after.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, dead_after_ms)?;
    // The user timeout covers data under way. These probes cover the connection that is idle.
    sockopt::set_socket_keepalive(socket, true)?;
    let interval = (dead_after / 4).max(Duration::from_secs(1));
    sockopt::set_tcp_keepidle(socket, interval)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    Ok(())
}

/// One receive into `buffer`, tried again when a signal came in between.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8], wait: Wait) -> io::Result<usize> {
    loop {
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: the buffer is ours to write, for its whole length.
        let got = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), wait.flags()) };
        match got {
            0.. => return Ok(got as usize),
            _ => retry_if_interrupted()?,
        }
    }
}

/// An `iovec` over a slice.
pub(crate) fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// One gathered send; says how many bytes the kernel took. A single part goes without the message
/// header, which the kernel would copy and check: page reads are mostly that.
///
/// # Safety
/// Every `iovec` must point to memory that stays mapped during the call. It may change meanwhile.
pub(crate) unsafe fn send(
    socket: BorrowedFd<'_>,
    parts: &[libc::iovec],
    wait: Wait,
    more: More,
) -> io::Result<usize> {
    // SAFETY: a msghdr of zeros is a valid one: no address, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len() as _;
    loop {
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_NOSIGNAL | wait.flags() | more.flags());
        // SAFETY: the message names `parts`, which the kernel only reads, and the caller vouches
        // for the memory behind them.
        let sent = unsafe {
            match parts {
                [part] => libc::send(fd, part.iov_base, part.iov_len, flags),
                _ => libc::sendmsg(fd, &message, flags),
            }
        };
        match sent {
            0.. => return Ok(sent as usize),
            _ => retry_if_interrupted()?,
        }
    }
}

/// Drops the first `bytes` from a list of parts: what a short send has already taken. Says from
/// which part to go on; the parts before it are done.
pub(crate) fn advance(parts: &mut [libc::iovec], mut bytes: usize) -> usize {
    for (index, part) in parts.iter_mut().enumerate() {
        if bytes < part.iov_len {
            part.iov_base = part.iov_base.wrapping_byte_add(bytes);
            part.iov_len -= bytes;
            return index;
        }
        bytes -= part.iov_len;
    }
    parts.len()
}

fn retry_if_interrupted() -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advancing_skips_whole_parts_and_cuts_the_next() {
        let bytes = [1u8, 2, 3, 4, 5, 6];
        let mut parts = [iovec(&bytes[..2]), iovec(&[]), iovec(&bytes[2..5]), iovec(&bytes[5..])];
        assert_eq!(advance(&mut parts, 0), 0);
        assert_eq!(advance(&mut parts, 3), 2);
        assert_eq!(
            (parts[2].iov_base as usize, parts[2].iov_len),
            (&raw const bytes[3] as usize, 2)
        );
        assert_eq!(advance(&mut parts[2..], 3), 2);
    }
}
