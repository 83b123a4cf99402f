//! Shared memory as words that are read and written one at a time.
//!
//! For tables that another process takes over after this one was killed at any instruction. Every
//! access is atomic, so that the compiler neither splits nor merges nor reorders the stores across
//! a release; and a store that has been executed is in the memory, whatever becomes of the process.

use crate::host::memfd::{Backing, MemoryError, SharedMemory};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A memfd of 64-bit words, then 32-bit words. The two parts never overlap: the same memory must
/// not be reached by atomics of two sizes.
#[derive(Debug)]
pub struct SharedWords {
    memory: SharedMemory,
    /// How many 64-bit words; whole pages of them.
    wide: usize,
}

impl SharedWords {
    /// New words of zero. The first part is rounded up to whole pages, the second one too.
    pub fn create(name: &str, wide: usize, narrow: usize) -> Result<SharedWords, MemoryError> {
        let wide_bytes = (wide as u64 * 8).next_multiple_of(crate::PAGE_SIZE as u64);
        let narrow_bytes = (narrow as u64 * 4).next_multiple_of(crate::PAGE_SIZE as u64);
        let memory = SharedMemory::create(name, wide_bytes + narrow_bytes, Backing::BasePages)?;
        Ok(SharedWords { memory, wide: wide_bytes as usize / 8 })
    }

    /// The words of a predecessor, of which the first `wide` are 64 bits.
    pub fn from_fd(fd: OwnedFd, wide: usize) -> Result<SharedWords, MemoryError> {
        let memory = SharedMemory::from_fd(fd)?;
        let wide_bytes = (wide as u64 * 8).next_multiple_of(crate::PAGE_SIZE as u64);
        if wide_bytes > memory.bytes() as u64 {
            return Err(MemoryError::Size(memory.bytes() as u64));
        }
        Ok(SharedWords { memory, wide: wide_bytes as usize / 8 })
    }

    /// Keeps the words from being swapped out, see [`SharedMemory::lock`].
    pub fn lock(&self) -> io::Result<()> {
        self.memory.lock()
    }

    /// The 64-bit words.
    pub fn wide(&self) -> &[AtomicU64] {
        // SAFETY: the mapping begins at a page, holds these words and lives as long as `self`.
        // Whatever bits it holds are a number, and everyone's access to this part is atomic.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr().cast(), self.wide) }
    }

    /// The 32-bit words.
    pub fn narrow(&self) -> &[AtomicU32] {
        let bytes = self.memory.bytes() - self.wide * 8;
        // SAFETY: as for `wide`; this part begins where that one ends.
        unsafe {
            let start = self.memory.base().as_ptr().add(self.wide * 8);
            std::slice::from_raw_parts(start.cast(), bytes / 4)
        }
    }

    /// Gives back the memory of whole pages within a run of 32-bit words, which become zero. The
    /// words at the ends may keep their values.
    pub fn discard_narrow(&self, range: Range<u64>) -> io::Result<()> {
        let start = self.wide as u64 * 8;
        self.memory.discard(start + range.start * 4..start + range.end * 4)
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn a_successor_finds_every_word() {
        let words = SharedWords::create("words", 513, 2000).unwrap();
        assert_eq!(words.wide().len(), 1024);
        assert!(words.narrow().len() >= 2000);
        words.wide()[512].store(u64::MAX, Relaxed);
        words.narrow()[0].store(7, Relaxed);
        words.narrow()[1999].store(8, Relaxed);
        let kept = words.as_fd().try_clone_to_owned().unwrap();
        drop(words);
        let words = SharedWords::from_fd(kept, 513).unwrap();
        assert_eq!(words.wide()[512].load(Relaxed), u64::MAX);
        assert_eq!(words.narrow()[0].load(Relaxed), 7);
        words.discard_narrow(1000..2000).unwrap();
        assert_eq!(words.narrow()[0].load(Relaxed), 7);
        assert_eq!(words.narrow()[1024].load(Relaxed), 0);
    }

    #[test]
    fn a_file_too_short_for_its_words_is_refused() {
        let words = SharedWords::create("words", 512, 0).unwrap();
        let fd = words.as_fd().try_clone_to_owned().unwrap();
        assert!(matches!(SharedWords::from_fd(fd, 513), Err(MemoryError::Size(4096))));
    }
}
