//! Maps memory for requests.
//!
//! Where a successor is to answer what a killed process leaves, all of it is there before the
//! first request comes. The kernel gives a request to a thread before it copies its bytes. Where
//! that copy meets a page that is not there, and the process is killed just then, the copy fails,
//! and so does the request: the kernel ends it with EIO, and no successor is asked for it.

use rustix::mm::{MapFlags, ProtFlags, mlock, mmap_anonymous, munmap};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

/// Bytes of zeros at first, in pages of their own.
pub struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: nobody else has a pointer to the mapping.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Memory that is there when it is used.
    pub fn new(bytes: usize) -> io::Result<Mapping> {
        Mapping::with(bytes, MapFlags::PRIVATE)
    }

    /// Memory that is there from the start, and stays.
    pub fn resident(bytes: usize) -> io::Result<Mapping> {
        let mapping = Mapping::with(bytes, MapFlags::PRIVATE | MapFlags::POPULATE)?;
        // Without the lock, a kill while this host swaps may fail a request with EIO.
        // SAFETY: the mapping above, in which locking changes nothing.
        if let Err(error) = unsafe { mlock(mapping.start().cast(), bytes) } {
            tracing::debug!(%error, "memory for requests of a file may be swapped");
        }
        Ok(mapping)
    }

    fn with(bytes: usize, flags: MapFlags) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, wherever the kernel likes.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags) }?;
        let at = NonNull::new(at.cast()).expect("no mapping is at 0");
        Ok(Mapping { at, bytes })
    }

    /// Where it begins.
    pub const fn start(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping, which is borrowed with this, and whose bytes all have values.
        unsafe { slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is the only one.
        unsafe { slice::from_raw_parts_mut(self.start(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: of the whole mapping, of which there are no references.
        let _ = unsafe { munmap(self.start().cast(), self.bytes) };
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
    fn what_is_resident_is_there_before_it_is_touched() {
        let resident = Mapping::resident((256 << 10) + 80).expect("memory");
        assert_eq!(present(&resident), vec![true; 65]);
        let other = Mapping::new(4 << 20).expect("memory");
        assert_eq!(present(&other), vec![false; 1024]);
        assert!(resident.iter().chain(other.iter()).all(|byte| *byte == 0));
    }
}
