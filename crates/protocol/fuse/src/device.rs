//! Reads requests from /dev/fuse, and answers them.

use crate::wire::{Reply, Request, answer_header};
use rustix::io::Errno;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The server's end of a mount.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
    /// Appears in log messages.
    name: String,
}

impl Device {
    /// `fd` is the mount's descriptor of /dev/fuse; log messages show `name`.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Device {
        Device { fd, name: name.into() }
    }

    /// Reads the next request to the start of `buffer`. Returns it and the length of its message,
    /// or None once the file system is unmounted.
    pub fn next(&self, buffer: &mut [u8]) -> Option<(Request, usize)> {
        loop {
            let read = match rustix::io::read(&self.fd, &mut *buffer) {
                Ok(read) => read,
                // Interrupted, or the request was taken back before it was read.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => continue,
                // Unmounted.
                Err(Errno::NODEV) => return None,
                Err(errno) => {
                    tracing::error!(name = self.name, %errno, "requests for a file cannot be read");
                    return None;
                }
            };
            if let Some(request) = Request::decode(&buffer[..read]) {
                return Some((request, read));
            }
        }
    }

    /// Answers the request with the number `unique`. The bytes of the reply are in `buffer`.
    pub fn answer(&self, unique: u64, reply: &Reply, buffer: &[u8]) {
        let (errno, bytes) = match *reply {
            Reply::Bytes(bytes) => (0, bytes),
            Reply::Error(errno) => (errno.raw_os_error(), 0),
            Reply::Nothing => return,
        };
        let header = answer_header(unique, errno, bytes);
        let parts = [IoSlice::new(&header), IoSlice::new(&buffer[..bytes])];
        match rustix::io::writev(self.fd.as_fd(), &parts) {
            // Nobody waits for it any more.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => {
                tracing::error!(name = self.name, %errno, "the kernel takes no answer");
            }
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
