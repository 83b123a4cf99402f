//! Holds the requests of one thread.
//!
//! All of it is in memory before the first request comes. The kernel gives a request to a thread
//! before it copies the request's bytes. Where that copy meets a page that is not there, and the
//! process is killed just then, the copy fails, and so does the request: the kernel ends it with
//! EIO, and no successor is asked for it.

use rustix::mm::{MapFlags, ProtFlags, mlock, mmap_anonymous, munmap};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

/// Bytes of zeros at first, in memory of their own.
pub(super) struct Buffer {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: nobody else has a pointer to the mapping.
unsafe impl Send for Buffer {}

impl Buffer {
    pub(super) fn new(bytes: usize) -> io::Result<Buffer> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping, wherever the kernel likes.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags) }?;
        // So that it stays. Who may not lock so much risks an EIO when the process is killed while
        // this host swaps.
        // SAFETY: the mapping above, in which locking changes nothing.
        if let Err(error) = unsafe { mlock(at, bytes) } {
            tracing::debug!(%error, "a buffer for requests of a file may be swapped");
        }
        let at = NonNull::new(at.cast()).expect("no mapping is at 0");
        Ok(Buffer { at, bytes })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping, which is borrowed with the buffer, and whose bytes all have values.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is the only one.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: of the whole mapping, of which there are no references.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether each page of memory is there, as the kernel sees it.
    fn present(memory: &[u8]) -> Vec<bool> {
        let pages = std::fs::File::open("/proc/self/pagemap").expect("the kernel tells");
        let mut entries = vec![0; memory.len().div_ceil(4096) * 8];
        let first = memory.as_ptr().addr() as u64 / 4096;
        std::os::unix::fs::FileExt::read_exact_at(&pages, &mut entries, first * 8).expect("told");
        let is_there = |entry: &[u8]| entry[7] & 0x80 != 0;
        entries.chunks_exact(8).map(is_there).collect()
    }

    #[test]
    fn all_of_it_is_there_before_it_is_touched() {
        let buffer = Buffer::new((256 << 10) + 80).expect("memory");
        assert_eq!(present(&buffer), vec![true; 65]);
        // What the heap gives is not.
        assert!(present(&vec![0; 64 << 20]).contains(&false));
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
}
