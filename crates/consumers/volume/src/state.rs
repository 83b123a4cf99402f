//! Keeps the tables of a volume, in memory that outlives its process.
//!
//! | part | for each | words of | holds |
//! |---|---|---|---|
//! | head | volume | 8 bytes | magic, pages, epoch, hand-overs, edition, leased |
//! | generations | segment | 8 | generation of the last acknowledged write or discard |
//! | places | segment | 8 | 1: it is in the spill file; 0: in the pool, or nowhere |
//! | slots | slot | 8 | page + 1 of a write in flight; 0: free |
//! | contents | slot | 8 | the page as the write stores it |
//! | keys | volume, if encrypted | 8 | the key, and the last version that sealed anything |
//! | seals | page, if encrypted | 24 | version and tag of its data ([`crate::pool::sealing`]) |
//! | words | page | 4 | 0: a hole; [`LOST`]; otherwise [`word_of`] the sum of the stored page |
//!
//! The supervisor keeps the memory as well. In the head, *epoch* is that of the last process, and
//! *hand-overs* counts how often the tables were given to another node. *Leased* says whether other
//! nodes may have leases to read ([`crate::readers`]). The tables have room for the largest volume:
//! nothing moves when a volume grows, and the memory is sparse. Even a read of a word takes memory,
//! so words of a segment with neither generation nor place are not read. A kill leaves each word
//! either old or new. Invariants between words:
//!
//! 1. A slot gets its contents, then its page, before anything is sent. It is freed only after the
//!    page's seal and word and the segment's generation are those of the write. So a successor that
//!    repeats all named slots leaves no page whose copies differ, or whose seal does not open it.
//! 2. A segment is in the spill file from before the first write there until donors have all of it,
//!    and its generation is that of the last such write. Donors' older data of it belong to no one.
//! 3. A hole is never asked for. So a page's word is 0 before donors are told to discard it.

use crate::VolumeError;
use crate::spilling::spill::Spill;
use crate::volume::MAX_VOLUME_BYTES;
use hecaton_memory::words::SharedWords;
use hecaton_memory::{Epoch, Generation, PAGE_SIZE, PageNo, PageSum, pages_to_bytes};
use hecaton_space::seal::table::{KEYS_WORDS, SEAL_WORDS, SealTable};
use hecaton_space::{Expected, SpaceConfig};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Most pages of a volume.
pub(crate) const MAX_PAGES: u64 = MAX_VOLUME_BYTES / PAGE_SIZE as u64;

/// Pages in a segment of a volume.
pub(crate) const SEGMENT_PAGES: u64 = 1 << SpaceConfig::SEGMENT_ORDER;

/// Most pages whose writes may be in flight at a time: 16 MiB.
pub(crate) const SLOTS: u32 = 4096;

/// Word of a page whose last write could not be kept: reads fail until it is written anew.
const LOST: u32 = u32::MAX;

/// CRC32C of a page of zeros.
const ZERO_SUM: PageSum = 0x98f9_4189;

const MAGIC: u64 = u64::from_le_bytes(*b"HECAVOL4");
const PAGE_WORDS: usize = PAGE_SIZE / 8;
const HEAD_WORDS: usize = PAGE_WORDS;
/// Most segments of a volume.
pub(crate) const MAX_SEGMENTS: u64 = MAX_PAGES.div_ceil(SEGMENT_PAGES);
const PLACES_AT: usize = HEAD_WORDS + MAX_SEGMENTS as usize;
const SLOTS_AT: usize = PLACES_AT + MAX_SEGMENTS as usize;
const KEYS_AT: usize = SLOTS_AT + SLOTS as usize * (1 + PAGE_WORDS);
const WIDE_WORDS: usize = KEYS_AT + KEYS_WORDS + MAX_PAGES as usize * SEAL_WORDS;

/// State of a page of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    /// Zeros; the pool need not store them.
    Hole,
    /// Data, with the word of their sum.
    Data(u32),
    /// Contents unknown: the last write could not be kept.
    Lost,
}

/// Word of a page with this sum: neither a hole's word nor a lost page's.
pub(crate) fn word_of(sum: PageSum) -> u32 {
    match sum ^ ZERO_SUM {
        0 => 1,
        LOST => LOST - 1,
        word => word,
    }
}

/// The only sum that gives this word, if there is only one.
pub(crate) fn sum_of(word: u32) -> Option<PageSum> {
    (![0, 1, LOST - 1, LOST].contains(&word)).then_some(word ^ ZERO_SUM)
}

/// The tables of one volume, and its spill file if it has one.
#[derive(Debug)]
pub struct State {
    words: SharedWords,
    pub(crate) spill: Option<Spill>,
}

impl State {
    /// Creates the tables of a new volume.
    pub fn create(pages: u64) -> Result<State, VolumeError> {
        check(pages)?;
        let words = SharedWords::create("hecaton-volume", WIDE_WORDS, MAX_PAGES as usize)?;
        let state = State { words, spill: None };
        state.set_pages(pages);
        state.words.wide()[0].store(MAGIC, Release);
        Ok(state)
    }

    /// Maps the tables that a predecessor has left.
    pub fn from_fd(fd: OwnedFd) -> Result<State, VolumeError> {
        let state = State { words: SharedWords::from_fd(fd, WIDE_WORDS)?, spill: None };
        let magic = state.words.wide()[0].load(Acquire);
        if magic != MAGIC
            || check(state.pages()).is_err()
            || state.words.narrow().len() < MAX_PAGES as usize
        {
            return Err(VolumeError::Broken);
        }
        Ok(state)
    }

    /// Adds a file for pages that the pool has no room for.
    #[must_use]
    pub fn with_spill(self, spill: Option<Spill>) -> State {
        State { spill, ..self }
    }

    /// The spill file's descriptor.
    pub fn spill_fd(&self) -> Option<BorrowedFd<'_>> {
        self.spill.as_ref().map(Spill::as_fd)
    }

    /// Allocates all memory that the tables may need, unchanged; with seals, if encrypted.
    pub(crate) fn touch(&self, is_encrypted: bool) {
        // `black_box` keeps the compiler from removing writes that change nothing.
        let wide = |word: &AtomicU64| {
            black_box(word.fetch_or(0, Relaxed));
        };
        let narrow = |word: &AtomicU32| {
            black_box(word.fetch_or(0, Relaxed));
        };
        (0..self.pages().div_ceil(SEGMENT_PAGES)).for_each(|at| wide(self.generation(at)));
        for slot in 0..SLOTS {
            wide(self.slot(slot));
            // Contents may begin in the middle of a page.
            let contents = self.contents(slot);
            wide(&contents[0]);
            wide(&contents[PAGE_WORDS - 1]);
        }
        for page in (0..self.pages()).step_by(PAGE_SIZE / size_of::<u32>()) {
            narrow(self.word(page));
        }
        narrow(self.word(self.pages() - 1));
        if is_encrypted {
            let words = KEYS_WORDS + self.pages() as usize * SEAL_WORDS;
            let of_seals = &self.words.wide()[KEYS_AT..KEYS_AT + words];
            of_seals.iter().step_by(PAGE_WORDS).for_each(wide);
            wide(&of_seals[words - 1]);
        }
    }

    /// Pages of the volume.
    pub fn pages(&self) -> u64 {
        self.words.wide()[1].load(Acquire)
    }

    /// Sets the volume's number of pages. Pages beyond it are holes.
    pub(crate) fn set_pages(&self, pages: u64) {
        self.words.wide()[1].store(pages, Release);
    }

    /// Draws the epoch of a new process: it is higher than that of any before.
    pub(crate) fn next_epoch(&self) -> Epoch {
        Epoch(self.words.wide()[2].fetch_add(1, AcqRel) + 1)
    }

    /// Marks the tables as given to another node. Returns the epoch that the node inherits, if one
    /// is left. It is higher than all epochs of this node and of earlier receivers.
    pub(crate) fn give(&self) -> Option<Epoch> {
        let given = self.words.wide()[3].load(Acquire) + 1;
        let epoch = heirs_epoch(self.epoch(), given)?;
        self.words.wide()[3].store(given, Release);
        Some(epoch)
    }

    /// Whether another node may have the tables.
    pub(crate) fn is_given(&self) -> bool {
        self.words.wide()[3].load(Acquire) > 0
    }

    /// Number by which reading nodes know the contents; 0 before any node did.
    pub(crate) fn edition(&self) -> u64 {
        self.words.wide()[4].load(Acquire)
    }

    /// See [`State::edition`].
    pub(crate) fn set_edition(&self, edition: u64) {
        self.words.wide()[4].store(edition, Release);
    }

    /// Empties all segments, before tables are received anew.
    pub(crate) fn forget_all(&self) {
        (0..MAX_SEGMENTS)
            .filter(|segment| self.is_begun(*segment))
            .for_each(|segment| self.freed(segment));
    }

    /// Whether a node may have a lease to read.
    pub(crate) fn is_leased(&self) -> bool {
        self.words.wide()[5].load(Acquire) != 0
    }

    /// See [`State::is_leased`].
    pub(crate) fn set_leased(&self, is_leased: bool) {
        self.words.wide()[5].store(is_leased.into(), Release);
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.words.wide()[2].load(Acquire))
    }

    /// Sets the epoch that came with tables from another node.
    pub(crate) fn inherit(&self, epoch: Epoch) {
        self.words.wide()[2].store(epoch.0, Release);
    }

    pub(crate) fn page(&self, page: PageNo) -> Page {
        if !self.is_begun(page / SEGMENT_PAGES) {
            return Page::Hole;
        }
        match self.word(page).load(Acquire) {
            0 => Page::Hole,
            LOST => Page::Lost,
            word => Page::Data(word),
        }
    }

    /// Sets what a page holds, and returns what it held. Unless it becomes a hole, its segment's
    /// generation or place must be set before.
    pub(crate) fn set_page(&self, page: PageNo, holds: Page) -> Page {
        debug_assert!(holds == Page::Hole || self.is_begun(page / SEGMENT_PAGES));
        let word = match holds {
            Page::Hole if !self.is_begun(page / SEGMENT_PAGES) => return Page::Hole,
            Page::Hole => 0,
            Page::Data(word) => word,
            Page::Lost => LOST,
        };
        match self.word(page).swap(word, AcqRel) {
            0 => Page::Hole,
            LOST => Page::Lost,
            word => Page::Data(word),
        }
    }

    /// Whether a page of the segment may hold anything.
    pub(crate) fn is_begun(&self, segment: u64) -> bool {
        self.generation(segment).load(Acquire) != 0 || self.is_spilled(segment)
    }

    /// Marks that a page of the segment holds something, though no write was acknowledged.
    pub(crate) fn begun(&self, segment: u64) {
        self.generation(segment).fetch_max(1, AcqRel);
    }

    /// Notes the generation of an acknowledged write or discard.
    pub(crate) fn acknowledged(&self, segment: u64, generation: Generation) {
        self.generation(segment).fetch_max(generation.0, AcqRel);
    }

    /// Notes that the segment has no extents any more.
    pub(crate) fn freed(&self, segment: u64) {
        self.generation(segment).store(0, Release);
    }

    /// Pages and generation that donors must hold of each segment with stored pages. Stored zeros
    /// do not count: a rebuilt copy has none.
    pub(crate) fn expected(&self) -> BTreeMap<u64, Expected> {
        let segments = 0..self.pages().div_ceil(SEGMENT_PAGES);
        let in_pool = segments.filter(|segment| !self.is_spilled(*segment));
        let expected = in_pool.filter_map(|segment| {
            let data = |page| match self.page(page) {
                Page::Data(word) => Some(word),
                Page::Hole | Page::Lost => None,
            };
            let words: Vec<u32> = pages_of_segment(segment).filter_map(data).collect();
            let zeros = word_of(ZERO_SUM);
            let pages = words.iter().filter(|word| **word != zeros).count() as u32;
            let generation = Generation(self.generation(segment).load(Acquire));
            (!words.is_empty()).then_some((segment, Expected { pages, generation }))
        });
        expected.collect()
    }

    /// Whether a segment is in the spill file.
    pub(crate) fn is_spilled(&self, segment: u64) -> bool {
        self.place(segment).load(Acquire) != 0
    }

    /// Notes whether the segment is in the spill file.
    pub(crate) fn set_spilled(&self, segment: u64, spilled: bool) {
        self.place(segment).store(spilled.into(), Release);
    }

    /// Stores a page's contents in a slot, and then names the page there.
    pub(crate) fn fill(&self, slot: u32, page: PageNo, contents: &[u8]) {
        let (words, _) = contents.as_chunks::<{ size_of::<u64>() }>();
        for (stored, word) in self.contents(slot).iter().zip(words) {
            stored.store(u64::from_ne_bytes(*word), Relaxed);
        }
        self.slot(slot).store(page + 1, Release);
    }

    /// Frees a slot, whose write has ended.
    pub(crate) fn empty(&self, slot: u32) {
        self.slot(slot).store(0, Release);
    }

    /// The page that a slot names.
    pub(crate) fn named(&self, slot: u32) -> Option<PageNo> {
        self.slot(slot).load(Acquire).checked_sub(1)
    }

    /// The contents of a slot.
    pub(crate) fn copy_of(&self, slot: u32) -> Vec<u8> {
        let mut contents = vec![0; PAGE_SIZE];
        let (words, _) = contents.as_chunks_mut::<{ size_of::<u64>() }>();
        for (word, stored) in words.iter_mut().zip(self.contents(slot)) {
            *word = stored.load(Relaxed).to_ne_bytes();
        }
        contents
    }

    /// Key and pages' seals of an encrypted volume.
    pub(crate) fn seals(&self) -> SealTable<'_> {
        let (keys, seals) = self.words.wide()[KEYS_AT..].split_at(KEYS_WORDS);
        SealTable::at(keys, seals)
    }

    pub(crate) fn generation(&self, segment: u64) -> &AtomicU64 {
        &self.words.wide()[HEAD_WORDS + segment as usize]
    }

    /// Words of the key and of the last version.
    pub(crate) fn key_words(&self) -> &[AtomicU64] {
        &self.words.wide()[KEYS_AT..KEYS_AT + KEYS_WORDS]
    }

    /// Words of a segment's seals.
    pub(crate) fn seal_words(&self, segment: u64) -> &[AtomicU64] {
        let words = SEGMENT_PAGES as usize * SEAL_WORDS;
        &self.words.wide()[KEYS_AT + KEYS_WORDS + segment as usize * words..][..words]
    }

    fn place(&self, segment: u64) -> &AtomicU64 {
        &self.words.wide()[PLACES_AT + segment as usize]
    }

    fn slot(&self, slot: u32) -> &AtomicU64 {
        &self.words.wide()[SLOTS_AT + slot as usize]
    }

    fn contents(&self, slot: u32) -> &[AtomicU64] {
        let at = SLOTS_AT + SLOTS as usize + slot as usize * PAGE_WORDS;
        &self.words.wide()[at..at + PAGE_WORDS]
    }

    pub(crate) fn word(&self, page: PageNo) -> &AtomicU32 {
        &self.words.narrow()[page as usize]
    }
}

impl AsFd for State {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.words.as_fd()
    }
}

/// A node may have 2^16 processes of a volume; beyond, the next node's epochs are not higher.
const LIVES_BITS: u32 = 16;

/// Epoch that the `given`-th receiver of tables of this epoch inherits. It must fit into half of a
/// generation.
fn heirs_epoch(epoch: Epoch, given: u64) -> Option<Epoch> {
    let moves = (epoch.0 >> LIVES_BITS).checked_add(given)?;
    (moves < 1 << LIVES_BITS).then_some(Epoch(moves << LIVES_BITS))
}

/// The pages of a segment; the last one may reach beyond the volume's end.
pub(crate) fn pages_of_segment(segment: u64) -> Range<PageNo> {
    let first = segment * SEGMENT_PAGES;
    first..first + SEGMENT_PAGES
}

/// Whether a volume may have so many pages.
pub(crate) fn check(pages: u64) -> Result<(), VolumeError> {
    match pages {
        1..=MAX_PAGES => Ok(()),
        _ => Err(VolumeError::Size(pages_to_bytes(pages))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_memory::page_sum;
    use hecaton_space::seal::Seal;

    #[test]
    fn the_sum_of_zeros_is_as_it_is_noted() {
        assert_eq!(page_sum(&[0; PAGE_SIZE]), ZERO_SUM);
    }

    #[test]
    fn no_sum_has_the_word_of_a_hole_or_of_a_lost_page() {
        for sum in [ZERO_SUM, !ZERO_SUM, 0, 1, u32::MAX] {
            assert!(![0, LOST].contains(&word_of(sum)), "{sum:x}");
        }
    }

    #[test]
    fn a_successor_finds_everything() {
        let pages = 2 * SEGMENT_PAGES + 5;
        let state = State::create(pages).unwrap();
        assert_eq!(state.next_epoch(), Epoch(1));
        state.acknowledged(2, Generation(9));
        assert_eq!(state.set_page(pages - 1, Page::Data(7)), Page::Hole);
        state.begun(0);
        state.set_page(0, Page::Lost);
        state.set_spilled(1, true);
        state.set_page(SEGMENT_PAGES, Page::Data(8));
        state.acknowledged(2, Generation(8));
        let contents: Vec<u8> = (0..PAGE_SIZE).map(|at| at as u8).collect();
        state.fill(SLOTS - 1, 3, &contents);
        let seal = Seal { version: state.seals().draw_version(), tag: [9; 16] };
        state.seals().set(MAX_PAGES - 1, &seal);
        let fd = state.as_fd().try_clone_to_owned().unwrap();
        drop(state);

        let state = State::from_fd(fd).unwrap();
        assert_eq!((state.pages(), state.next_epoch()), (pages, Epoch(2)));
        assert_eq!(state.page(pages - 1), Page::Data(7));
        assert_eq!((state.page(0), state.page(1)), (Page::Lost, Page::Hole));
        assert!(state.is_spilled(1) && !state.is_spilled(2));
        let expected = Expected { pages: 1, generation: Generation(9) };
        assert_eq!(state.expected(), BTreeMap::from([(2, expected)]));
        assert_eq!(state.named(SLOTS - 1), Some(3));
        assert_eq!(state.copy_of(SLOTS - 1), contents);
        assert_eq!(state.seals().get(MAX_PAGES - 1), seal);
        assert!(state.seals().draw_version() > seal.version);
        state.empty(SLOTS - 1);
        assert_eq!(state.named(SLOTS - 1), None);
    }

    #[test]
    fn what_was_never_written_takes_no_memory() {
        let state = State::create(MAX_PAGES).unwrap();
        state.acknowledged(7, Generation(1));
        for page in (0..MAX_PAGES).step_by(1000) {
            assert_eq!(state.page(page), Page::Hole);
            assert_eq!(state.set_page(page, Page::Hole), Page::Hole);
        }
        assert!(state.expected().is_empty());
        let file = std::fs::File::from(state.as_fd().try_clone_to_owned().unwrap());
        let taken = file.metadata().map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512);
        // Generations, places and the words of one segment.
        assert!(taken.unwrap() < 4 << 20);
    }

    #[test]
    fn what_are_no_tables_is_refused() {
        let state = State::create(100).unwrap();
        let fd = || state.as_fd().try_clone_to_owned().unwrap();
        assert!(State::from_fd(fd()).is_ok());
        state.set_pages(0);
        assert!(matches!(State::from_fd(fd()), Err(VolumeError::Broken)));
        let other = SharedWords::create("other", 512, 0).unwrap();
        assert!(State::from_fd(other.as_fd().try_clone_to_owned().unwrap()).is_err());
        assert!(matches!(State::create(0), Err(VolumeError::Size(0))));
        assert!(matches!(State::create(MAX_PAGES + 1), Err(VolumeError::Size(_))));
    }

    proptest::proptest! {
        #[test]
        fn epochs_of_heirs_are_later_and_of_different_heirs_differ(
            epoch in 0u64..1 << 32, lives in 1u64..1 << 16, given in 1u64..100, other in 1u64..100,
        ) {
            let heir = heirs_epoch(Epoch(epoch), given);
            proptest::prop_assert_eq!(heir.is_none(), (epoch >> 16) + given >= 1 << 16);
            let Some(heir) = heir else { return Ok(()) };
            proptest::prop_assert!(heir.0 > epoch && heir.0 + lives < 1 << 32);
            if let Some(other) = heirs_epoch(Epoch(epoch), other).filter(|other| *other != heir) {
                proptest::prop_assert!(heir.0.abs_diff(other.0) > lives, "their processes' do not meet");
            }
        }
    }
}
