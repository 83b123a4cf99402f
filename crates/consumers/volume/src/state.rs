//! What must outlive the process that serves a volume: memory that its supervisor keeps as well.
//!
//! | part | for each | words of | holds |
//! |---|---|---|---|
//! | head | volume | 8 bytes | magic, pages, epoch of the last process, how often the tables were given to another node, edition, whether other nodes may have leases to read ([`crate::readers`]) |
//! | generations | segment | 8 | generation of the last acknowledged write or discard |
//! | places | segment | 8 | 1: it is in the spill file; 0: in the pool, or nowhere |
//! | slots | slot | 8 | page + 1 of a write under way; 0: free |
//! | contents | slot | 8 | the page as it is to be written |
//! | keys | volume, if it is encrypted | 8 | the key, and the last version that anything was sealed with |
//! | seals | page, if it is encrypted | 24 | version and tag of what is stored ([`crate::pool::sealing`]) |
//! | words | page | 4 | 0: a hole; [`LOST`]; otherwise what [`word_of`] makes of the sum of what is stored |
//!
//! There is room for the largest volume, so that nothing has to move when one grows; the memory is
//! sparse. A look at a word takes memory for it, too: those of a segment that has neither a generation
//! nor a place are not looked at. After a kill each word is either old or new; what must hold between them:
//!
//! - A slot's contents are there before its page is named, and it is named before anything is sent. It
//!   is free again only after the page's seal, its word and its segment's generation are those of the
//!   write. So a successor that writes all named slots again leaves no page of which two copies differ,
//!   and none that its seal does not open.
//! - A segment is in the spill file from before anything is written there until all of it is with
//!   donors, and its generation is that of the last such write. What donors hold of it before that is
//!   nobody's.
//! - A hole is never asked for. So a page's word is 0 before donors are told to discard it.

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

/// Pages whose writes may be under way at a time: 16 MiB.
pub(crate) const SLOTS: u32 = 4096;

/// The word of a page whose contents were to be written and could not be kept: reading it is an error
/// until it is written anew.
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

/// What a page of a volume holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    /// Zeros; the pool need not have it.
    Hole,
    /// Data, with the word that its sum gives.
    Data(u32),
    /// Nobody knows.
    Lost,
}

/// What is noted of a page with this sum: neither a hole's word nor a lost page's.
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
    /// Those of a new volume.
    pub fn create(pages: u64) -> Result<State, VolumeError> {
        check(pages)?;
        let words = SharedWords::create("hecaton-volume", WIDE_WORDS, MAX_PAGES as usize)?;
        let state = State { words, spill: None };
        state.set_pages(pages);
        state.words.wide()[0].store(MAGIC, Release);
        Ok(state)
    }

    /// Those that a predecessor has left.
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

    /// With a file for what the pool has no room for.
    #[must_use]
    pub fn with_spill(self, spill: Option<Spill>) -> State {
        State { spill, ..self }
    }

    /// The spill file's descriptor.
    pub fn spill_fd(&self) -> Option<BorrowedFd<'_>> {
        self.spill.as_ref().map(Spill::as_fd)
    }

    /// Has the kernel give all memory that the tables may need as they are; of a volume that is encrypted,
    /// for its seals as well.
    pub(crate) fn touch(&self, is_encrypted: bool) {
        // Looked at, so that the compiler does not leave out what changes nothing.
        let wide = |word: &AtomicU64| {
            black_box(word.fetch_or(0, Relaxed));
        };
        let narrow = |word: &AtomicU32| {
            black_box(word.fetch_or(0, Relaxed));
        };
        (0..self.pages().div_ceil(SEGMENT_PAGES)).for_each(|at| wide(self.generation(at)));
        for slot in 0..SLOTS {
            wide(self.slot(slot));
            // They may begin in the middle of a page.
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

    /// It has so many pages from now on. Those that it has not are holes.
    pub(crate) fn set_pages(&self, pages: u64) {
        self.words.wide()[1].store(pages, Release);
    }

    /// Begins the life of another process: its epoch is higher than that of any before.
    pub(crate) fn next_epoch(&self) -> Epoch {
        Epoch(self.words.wide()[2].fetch_add(1, AcqRel) + 1)
    }

    /// The tables are about to be given to another node: the epoch from which its processes are to go on, higher than
    /// all of this node's, and than of whom they were given to before. None if there is none.
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

    /// What nodes that read the volume know its contents by; 0 before any did.
    pub(crate) fn edition(&self) -> u64 {
        self.words.wide()[4].load(Acquire)
    }

    /// See [`State::edition`].
    pub(crate) fn set_edition(&self, edition: u64) {
        self.words.wide()[4].store(edition, Release);
    }

    /// No segment holds anything: of tables that are to be received anew.
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

    /// Of tables that another node has given: its epoch.
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

    /// Notes what a page holds from now on, and returns what it held. Anything but a hole only after the
    /// segment's generation or place.
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

    /// Some page of the segment holds something, though no write was acknowledged.
    pub(crate) fn begun(&self, segment: u64) {
        self.generation(segment).fetch_max(1, AcqRel);
    }

    /// A write or discard of this generation was acknowledged.
    pub(crate) fn acknowledged(&self, segment: u64, generation: Generation) {
        self.generation(segment).fetch_max(generation.0, AcqRel);
    }

    /// The segment has no extents any more.
    pub(crate) fn freed(&self, segment: u64) {
        self.generation(segment).store(0, Release);
    }

    /// What donors must hold of each segment, where they hold any of it. Zeros that are kept are not
    /// counted: a copy that was made anew has none.
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

    /// The segment is in the spill file from now on, or is not.
    pub(crate) fn set_spilled(&self, segment: u64, spilled: bool) {
        self.place(segment).store(spilled.into(), Release);
    }

    /// Names a page in a slot, with its contents.
    pub(crate) fn fill(&self, slot: u32, page: PageNo, contents: &[u8]) {
        let (words, _) = contents.as_chunks::<{ size_of::<u64>() }>();
        for (stored, word) in self.contents(slot).iter().zip(words) {
            stored.store(u64::from_ne_bytes(*word), Relaxed);
        }
        self.slot(slot).store(page + 1, Release);
    }

    /// The slot's write is over.
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

    /// The key, and the pages' seals, of a volume that is encrypted.
    pub(crate) fn seals(&self) -> SealTable<'_> {
        let (keys, seals) = self.words.wide()[KEYS_AT..].split_at(KEYS_WORDS);
        SealTable::at(keys, seals)
    }

    pub(crate) fn generation(&self, segment: u64) -> &AtomicU64 {
        &self.words.wide()[HEAD_WORDS + segment as usize]
    }

    /// The words of the key, and those of a segment's seals.
    pub(crate) fn key_words(&self) -> &[AtomicU64] {
        &self.words.wide()[KEYS_AT..KEYS_AT + KEYS_WORDS]
    }

    /// See [`State::key_words`].
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

/// How many processes of one node a volume may have, for the epochs of those of the next one to be higher: 16 bits.
const LIVES_BITS: u32 = 16;

/// The epoch from which the processes of a node go on that is the `given`-th to be given tables of this epoch. It must
/// fit into half of a generation.
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
