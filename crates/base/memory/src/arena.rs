//! A donor's RAM: a memfd, mapped, committed as written.
//!
//! Pages of an arena are written and sent by many threads at once, and two borrowers' threads may
//! meet at the same page. So no `&[u8]` of it ever exists. There are two ways to the bytes:
//! - [`Arena::write_page`] and [`Arena::read_page`] copy word by word with relaxed atomics. On
//!   x86-64 and AArch64 these are plain moves, a tenth of a microsecond for a page; what they buy
//!   over `memcpy` is that a race is no undefined behaviour.
//! - [`Arena::page_address`] and [`Arena::commit_pages`] are for the kernel, which copies whatever
//!   it finds.
//!
//! A copy that races with a write may be a mixture of two states of the page. The page's checksum,
//! which travels with it to the borrower, decides whether it is one of them.

use crate::host::memfd::{Backing, MemoryError, SharedMemory};
use crate::{PAGE_SIZE, pages_to_bytes};
use rustix::io::Errno;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The memory that a donor lends, as pages `0..pages()`.
///
/// A page that was never written reads as zeros, but reading it commits it: the kernel has no
/// shared page of zeros for shared mappings. A server of pages must therefore track which pages
/// were written.
#[derive(Debug)]
pub struct Arena {
    memory: SharedMemory,
    is_locked: AtomicBool,
}

const PAGE_WORDS: usize = PAGE_SIZE / size_of::<u64>();

impl Arena {
    /// New memory, none of it committed. The name is what `/proc/PID/maps` shows.
    pub fn create(name: &str, pages: u64, backing: Backing) -> Result<Arena, MemoryError> {
        let memory = SharedMemory::create(name, pages_to_bytes(pages), backing)?;
        Ok(Arena { memory, is_locked: AtomicBool::new(false) })
    }

    /// The arena of a predecessor, with all it held.
    pub fn from_fd(fd: OwnedFd) -> Result<Arena, MemoryError> {
        Ok(Arena { memory: SharedMemory::from_fd(fd)?, is_locked: AtomicBool::new(false) })
    }

    /// Keeps the pages from being swapped out, those that are stored later, too. See
    /// [`SharedMemory::lock`].
    pub fn lock(&self) -> io::Result<()> {
        self.is_locked.store(true, Ordering::SeqCst);
        self.memory.lock()
    }

    /// Pages in the arena.
    pub fn pages(&self) -> u64 {
        (self.memory.bytes() / PAGE_SIZE) as u64
    }

    /// Kind of pages that back the memory.
    pub fn backing(&self) -> Backing {
        self.memory.backing()
    }

    /// Stores a page.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn write_page(&self, page: u64, data: &[u8; PAGE_SIZE]) {
        let (words, _) = data.as_chunks::<{ size_of::<u64>() }>();
        for (stored, word) in self.words(page).iter().zip(words) {
            stored.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Stores pages that follow one another and have no memory yet, in a third less time than
    /// [`Arena::write_page`] takes for them: written through the file, a page is not cleared first,
    /// and there is no fault. It is right for pages of any kind.
    ///
    /// # Panics
    /// If a page is beyond the arena's end.
    pub fn commit_pages(&self, first: u64, data: &[[u8; PAGE_SIZE]]) {
        let end = first + data.len() as u64;
        assert!(end <= self.pages(), "page {end} is beyond the arena's {}", self.pages());
        let mut stored = 0;
        // `pwrite` fails on a file of huge pages, and prepared huge pages have memory already. The
        // kernel locks a page written through the file only when the mapping touches the page.
        let is_by_file =
            self.backing() == Backing::BasePages && !self.is_locked.load(Ordering::SeqCst);
        while is_by_file && stored < data.len() {
            let at = pages_to_bytes(first + stored as u64);
            match rustix::io::pwrite(&self.memory, data[stored..].as_flattened(), at) {
                Ok(written) if written >= PAGE_SIZE => stored += written / PAGE_SIZE,
                Err(Errno::INTR) => {}
                // The host is out of memory: as when a page is written in the ordinary way.
                Ok(_) | Err(_) => break,
            }
        }
        if stored > 0 && self.is_locked.load(Ordering::SeqCst) {
            // A concurrent `lock` may have scanned for pages before these existed: touch them.
            for page in first..first + stored as u64 {
                black_box(self.words(page)[0].load(Ordering::Relaxed));
            }
        }
        for (page, data) in (first..).zip(data).skip(stored) {
            self.write_page(page, data);
        }
    }

    /// Copies a page out.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn read_page(&self, page: u64, data: &mut [u8; PAGE_SIZE]) {
        let (words, _) = data.as_chunks_mut::<{ size_of::<u64>() }>();
        for (word, stored) in words.iter_mut().zip(self.words(page)) {
            *word = stored.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Where a page is, for an `iovec`. The address is good as long as the arena lives. Only the
    /// kernel may read through it, since others may write the page at the same time.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn page_address(&self, page: u64) -> *const u8 {
        self.words(page).as_ptr().cast()
    }

    /// Gives the memory of some pages back to the host. With huge pages, only that of the huge
    /// pages that lie wholly within the range; what the others hold is then undefined.
    ///
    /// # Panics
    /// If the range is not within the arena.
    pub fn discard(&self, pages: Range<u64>) -> io::Result<()> {
        self.memory.discard(pages_to_bytes(pages.start)..pages_to_bytes(pages.end))
    }

    /// Makes sure that the pages can be written. Says `StorageFull` or the like if the host has no
    /// more huge pages; base pages are committed as they are written, and need nothing.
    pub fn prepare(&self, pages: Range<u64>) -> io::Result<()> {
        match self.backing() {
            Backing::BasePages => Ok(()),
            Backing::HugePages => {
                self.memory.commit(pages_to_bytes(pages.start)..pages_to_bytes(pages.end))
            }
        }
    }

    /// Has the memory of some pages come from one NUMA node.
    pub fn bind(&self, pages: Range<u64>, node: u32) -> io::Result<()> {
        self.memory.bind(pages_to_bytes(pages.start)..pages_to_bytes(pages.end), node)
    }

    /// Bytes that the host has really given.
    pub fn committed_bytes(&self) -> io::Result<u64> {
        self.memory.committed_bytes()
    }

    fn words(&self, page: u64) -> &[AtomicU64; PAGE_WORDS] {
        assert!(page < self.pages(), "page {page} is beyond the arena's {}", self.pages());
        // SAFETY: the page is within the mapping, which is aligned to pages and lives as long as
        // `self`. All accesses from this program go through these atomics or the kernel.
        unsafe { &*self.memory.base().as_ptr().add(page as usize * PAGE_SIZE).cast() }
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 256;

    #[test]
    fn is_committed_as_written_and_given_back() {
        let arena = Arena::create("arena", 64 * MIB, Backing::BasePages).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), 0);
        for page in 0..MIB {
            arena.write_page(page, &[page as u8; PAGE_SIZE]);
        }
        assert_eq!(arena.committed_bytes().unwrap(), 1 << 20);
        arena.discard(10..20).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), (1 << 20) - 10 * PAGE_SIZE as u64);
        let mut page = [1; PAGE_SIZE];
        arena.read_page(9, &mut page);
        assert_eq!(page, [9; PAGE_SIZE]);
        arena.read_page(10, &mut page);
        assert_eq!(page, [0; PAGE_SIZE]);
        arena.discard(0..arena.pages()).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), 0);
    }

    #[test]
    fn pages_are_committed_in_runs() {
        let arena = Arena::create("arena", MIB, Backing::BasePages).unwrap();
        // One of them has its memory already.
        arena.write_page(101, &[0xff; PAGE_SIZE]);
        let pages: Vec<_> = (0..100u8).map(|byte| [byte; PAGE_SIZE]).collect();
        arena.commit_pages(100, &pages);
        assert_eq!(arena.committed_bytes().unwrap(), 100 * PAGE_SIZE as u64);
        let mut page = [0; PAGE_SIZE];
        for (at, stored) in (100..).zip(&pages) {
            arena.read_page(at, &mut page);
            assert_eq!(page, *stored);
        }
        arena.commit_pages(MIB, &[]);
    }

    #[test]
    fn pages_of_a_locked_one_are_locked_as_they_are_stored() {
        let arena = Arena::create("locked-arena", MIB, Backing::BasePages).unwrap();
        arena.lock().unwrap();
        arena.commit_pages(100, &[[3; PAGE_SIZE]; 20]);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, of_arena) = smaps.split_once("locked-arena").unwrap();
        let locked = of_arena.lines().find_map(|line| line.strip_prefix("Locked:")).unwrap();
        assert_eq!(locked.trim(), "80 kB");
    }

    #[test]
    fn a_successor_finds_the_pages() {
        let arena = Arena::create("arena", MIB, Backing::BasePages).unwrap();
        arena.write_page(MIB - 1, &[0xa5; PAGE_SIZE]);
        let kept = arena.as_fd().try_clone_to_owned().unwrap();
        drop(arena);
        let arena = Arena::from_fd(kept).unwrap();
        assert_eq!((arena.pages(), arena.backing()), (MIB, Backing::BasePages));
        let mut page = [0; PAGE_SIZE];
        arena.read_page(MIB - 1, &mut page);
        assert_eq!(page, [0xa5; PAGE_SIZE]);
    }

    #[test]
    fn racing_copies_see_only_words_that_were_written() {
        let arena = Arena::create("arena", 1, Backing::BasePages).unwrap();
        std::thread::scope(|scope| {
            let writers = [0x11u8, 0x22].map(|byte| {
                let arena = &arena;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        arena.write_page(0, &[byte; PAGE_SIZE]);
                    }
                })
            });
            let mut page = [0; PAGE_SIZE];
            while !writers.iter().all(|writer| writer.is_finished()) {
                arena.read_page(0, &mut page);
                for word in page.as_chunks::<8>().0 {
                    assert!([[0; 8], [0x11; 8], [0x22; 8]].contains(word));
                }
            }
        });
    }

    #[test]
    #[should_panic(expected = "beyond the arena")]
    fn has_no_page_beyond_its_end() {
        let arena = Arena::create("arena", 1, Backing::BasePages).unwrap();
        arena.write_page(1, &[0; PAGE_SIZE]);
    }

    #[test]
    #[should_panic(expected = "beyond the arena")]
    fn has_no_run_beyond_its_end() {
        let arena = Arena::create("arena", 2, Backing::BasePages).unwrap();
        arena.commit_pages(1, &[[0; PAGE_SIZE]; 2]);
    }

    /// Skipped where the host has no huge pages set aside, which is the rule.
    #[test]
    fn huge_pages_are_prepared_and_given_back() {
        let arena = match Arena::create("arena", 4 * MIB, Backing::HugePages) {
            Err(MemoryError::NoHugePages { .. }) => {
                println!(
                    "skipped: huge_pages_are_prepared_and_given_back: none are set aside here"
                );
                return;
            }
            arena => arena.unwrap(),
        };
        arena.prepare(0..2 * MIB).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), 2 << 20);
        arena.write_page(1, &[1; PAGE_SIZE]);
        arena.commit_pages(2, &[[2; PAGE_SIZE]]);
        let mut page = [0; PAGE_SIZE];
        arena.read_page(2, &mut page);
        assert_eq!(page, [2; PAGE_SIZE]);
        arena.discard(0..MIB).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), 2 << 20, "half a huge page stays");
        arena.discard(0..2 * MIB).unwrap();
        assert_eq!(arena.committed_bytes().unwrap(), 0);
    }
}
