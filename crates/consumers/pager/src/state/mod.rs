//! The pager's tables, in memory that outlives it.
//!
//! One memfd, held by the node too, mapped by the pager and by its successor. Every table is a
//! slice of atomics: a table is read and written with plain safe code, and a kill between two
//! stores leaves each word either old or new. The order of the stores, and repairs by `recover`,
//! keep the invariants between words.
//!
//! | table | of | bytes |
//! |---|---|---|
//! | [`entry`] | each page of each address space that was ever touched | 8 |
//! | [`record`] | each page of the space that is in use | 8 |
//! | seals ([`hecaton_space::seal::table`]) | each page written out of an encrypted space | 24 |
//! | staging | pages on their way out or lately gone | 4096 |
//! | generations | a segment of the space | 8 |
//! | codes | a stripe of segments that are coded, because they have gone cold | 16 |
//! | chunk heads | 2 MiB of an address space | 16 |
//! | address spaces, regions of guest RAM, journal, batch | fixed | |
//!
//! The file is sparse: only what is used takes memory.

pub(crate) mod batch;
pub(crate) mod entry;
pub(crate) mod journal;
pub(crate) mod record;
pub(crate) mod sealing;
pub(crate) mod space_pages;
pub(crate) mod tables;

use crate::guest::span::MAX_REGIONS;
use batch::BatchRecord;
use hecaton_memory::{Generation, PAGE_SIZE};
use hecaton_space::seal::table::{KEYS_WORDS, SEAL_WORDS, SealTable};
use journal::Journal;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{self, AcqRel, Relaxed},
};

/// Address spaces that one pager serves at a time.
pub(crate) const MAX_SPACES: usize = 1024;
/// Where the entries of an image are that no process has yet; no address space is ever there.
pub(crate) const IMAGE_SPACE: usize = MAX_SPACES;
/// Words that describe an address space.
pub(crate) const SPACE_WORDS: usize = 16;
/// Pages in a chunk, the unit in which address space and space pages are given out: 2 MiB.
pub(crate) const CHUNK_PAGES: u64 = 512;
/// Words that describe a region of guest RAM.
pub(crate) const REGION_WORDS: usize = 8;
/// Chunks that all address spaces together may have: 2 TiB.
pub(crate) const MAX_CHUNKS: usize = 1 << 20;
/// Pages of a pager's space: 4 TiB.
pub(crate) const SPACE_PAGES: u64 = 1 << 30;
/// Pages of a segment of the space: 16 MiB.
pub(crate) const SEGMENT_PAGES: u64 = 1 << SEGMENT_ORDER;
pub(crate) const SEGMENT_ORDER: u8 = 12;
const _: () = assert!(SEGMENT_PAGES.is_multiple_of(CHUNK_PAGES));
const _: () = assert!(SPACE_PAGES.is_multiple_of(SEGMENT_PAGES));
/// Pages of staging memory: 8 MiB.
pub(crate) const STAGING_SLOTS: usize = 2048;

const HEADER_WORDS: usize = 16;

/// Words of the header; those from 3 on are [`Flag`]s.
const IN_USE: usize = 0;
const RESTARTS: usize = 1;
const SERIALS: usize = 2;

/// The first word of a file that a pager has used: the layout and its version.
const MAGIC: u64 = 0x4845_4341_0000_0004;

/// A property of the whole consumer; the number is the flag's word in the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flag {
    /// A machine is being detached.
    Detaching = 3,
    /// All of the image is in the pool.
    ImageLoaded = 4,
    /// The image's pages are a machine's.
    ImageGiven = 5,
}

/// The mapped tables.
pub(crate) struct State {
    /// [`SPACE_WORDS`] of each address space.
    pub(crate) spaces: &'static [AtomicU64],
    /// [`REGION_WORDS`] of each region of guest RAM.
    pub(crate) regions: &'static [AtomicU64],
    /// Two words of each chunk: its address space plus one (0: free), and its number there.
    pub(crate) chunk_heads: &'static [AtomicU64],
    /// [`CHUNK_PAGES`] entries of each chunk.
    pub(crate) entries: &'static [AtomicU64],
    /// One record of each page of the space.
    pub(crate) records: &'static [AtomicU64],
    /// One generation of each segment of the space: that of its last acknowledged write or discard.
    /// An extent with an older generation has missed one.
    pub(crate) generations: &'static [AtomicU64],
    /// Two words of each stripe of the space that is coded: with which generation (0: it is not),
    /// and which of its segments are part of it.
    pub(crate) codes: &'static [AtomicU64],
    /// The key of an encrypted space, and its pages' seals. Those are written by the thread that
    /// writes pages out, and read of pages that it does not write: see [`crate::state::sealing`].
    pub(crate) seals: SealTable<'static>,
    /// One word of each staging slot: the space page that it holds plus one; 0 when free.
    pub(crate) slot_pages: &'static [AtomicU64],
    /// Messages read from the kernel and not yet acted upon.
    pub(crate) journal: Journal,
    /// The eviction batch under way.
    pub(crate) batch: BatchRecord,
    header: &'static [AtomicU64],
    staging: *mut u8,
}

// SAFETY: the tables are atomics; `staging` is a pointer to memory that is mapped for the life of
// the process, and who uses a slot is decided under the pager's lock.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

/// Hands out consecutive, page-aligned parts of the mapping.
struct Layout {
    base: *mut u8,
    used: usize,
}

impl Layout {
    fn bytes(&mut self, len: usize) -> *mut u8 {
        let at = self.used;
        self.used += len.next_multiple_of(PAGE_SIZE);
        // A dry run has no base; its pointers are never used.
        self.base.wrapping_add(at)
    }

    fn words(&mut self, count: usize) -> &'static [AtomicU64] {
        let at = self.bytes(count * 8);
        if self.base.is_null() {
            return &[];
        }
        // SAFETY: part of a mapping that is never unmapped, aligned to a page, and zero is a valid
        // value; all access, by this process and its predecessor, is atomic.
        unsafe { std::slice::from_raw_parts(at.cast(), count) }
    }

    fn state(mut self) -> (State, usize) {
        let state = State {
            header: self.words(HEADER_WORDS),
            journal: Journal::at(self.bytes(Journal::BYTES)),
            batch: BatchRecord::at(self.words(BatchRecord::WORDS)),
            spaces: self.words(MAX_SPACES * SPACE_WORDS),
            regions: self.words(MAX_REGIONS * REGION_WORDS),
            chunk_heads: self.words(MAX_CHUNKS * 2),
            generations: self.words((SPACE_PAGES / SEGMENT_PAGES) as usize),
            codes: self.words((SPACE_PAGES / SEGMENT_PAGES) as usize),
            slot_pages: self.words(STAGING_SLOTS),
            staging: self.bytes(STAGING_SLOTS * PAGE_SIZE),
            entries: self.words(MAX_CHUNKS * CHUNK_PAGES as usize),
            records: self.words(SPACE_PAGES as usize),
            seals: SealTable::at(
                self.words(KEYS_WORDS),
                self.words(SPACE_PAGES as usize * SEAL_WORDS),
            ),
        };
        (state, self.used)
    }
}

impl State {
    /// A new state file; returned as a descriptor that nobody closes.
    pub(crate) fn create() -> std::io::Result<RawFd> {
        let (_, len) = Layout { base: std::ptr::null_mut(), used: 0 }.state();
        let fd = memfd_create("hecaton-pager", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, len as u64)?;
        Ok(fd.into_raw_fd())
    }

    /// Maps a state file. True beside it when a predecessor has used it.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> std::io::Result<(State, bool)> {
        let (_, len) = Layout { base: std::ptr::null_mut(), used: 0 }.state();
        let size = rustix::fs::fstat(fd)?.st_size as usize;
        if size != len {
            return Err(std::io::Error::other(format!(
                "the state file has {size} bytes instead of {len}: descriptor {} is another \
                 version's",
                fd.as_raw_fd()
            )));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice; it is never unmapped.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, fd, 0)? };
        let (state, _) = Layout { base: base.cast(), used: 0 }.state();
        let used = state.header[IN_USE].swap(MAGIC, AcqRel) == MAGIC;
        Ok((state, used))
    }

    /// A write to a segment, or a discard from it, was acknowledged.
    pub(crate) fn acknowledged(&self, segment: u64, generation: Generation) {
        self.generations[segment as usize].fetch_max(generation.0, Ordering::AcqRel);
    }

    /// The segment's extents were given back: whatever it is given next is another group's.
    pub(crate) fn segment_freed(&self, segment: u64) {
        self.generations[segment as usize].store(0, Ordering::Release);
    }

    /// The generation of what was last acknowledged of a segment.
    pub(crate) fn generation(&self, segment: u64) -> Generation {
        Generation(self.generations[segment as usize].load(Ordering::Acquire))
    }

    /// Counts a takeover; returns how many there were.
    pub(crate) fn count_restart(&self) -> u64 {
        self.header[RESTARTS].fetch_add(1, Relaxed) + 1
    }

    /// A number that no address space of this consumer has had.
    pub(crate) fn next_serial(&self) -> u64 {
        self.header[SERIALS].fetch_add(1, Relaxed) + 1
    }

    /// Whether `flag` is set: by this pager, or by one before it.
    pub(crate) fn is(&self, flag: Flag) -> bool {
        self.header[flag as usize].load(Relaxed) != 0
    }

    /// Sets or clears `flag`.
    pub(crate) fn note(&self, flag: Flag, on: bool) {
        self.header[flag as usize].store(on.into(), Relaxed);
    }

    /// The 4096 bytes of a staging slot.
    pub(crate) fn slot(&self, slot: u32) -> *mut u8 {
        assert!((slot as usize) < STAGING_SLOTS);
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.staging.add(slot as usize * PAGE_SIZE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_sees_what_was_written() {
        let fd = State::create().unwrap();
        // SAFETY: just created, closed nowhere.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let (first, used) = State::open(fd).unwrap();
        assert!(!used);
        first.entries[MAX_CHUNKS * CHUNK_PAGES as usize - 1].store(7, Relaxed);
        first.records[SPACE_PAGES as usize - 1].store(8, Relaxed);
        let (second, used) = State::open(fd).unwrap();
        assert!(used);
        assert_eq!(second.entries[MAX_CHUNKS * CHUNK_PAGES as usize - 1].load(Relaxed), 7);
        assert_eq!(second.records[SPACE_PAGES as usize - 1].load(Relaxed), 8);
        assert_eq!(second.entries[0].load(Relaxed), 0);
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let fd = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        let error = State::open(std::os::fd::AsFd::as_fd(&fd)).err().unwrap();
        assert!(error.to_string().contains("another version"), "{error}");
    }
}
