//! Which pages of the space are in use, by how many entries, and where the next one goes.
//!
//! Space pages are given out in slots of 2 MiB, one to each chunk of an address space. A page has
//! the same place in its slot as in its chunk. So neighbours in the program are neighbours at the
//! donor, and one request fetches them. After a fork the other process's copy may have taken a page
//! already; the chunk then gets a further slot. A machine's RAM has its slots in its own order (see
//! [`crate::pool::placement`]), which a chunk's owner asks for.

use crate::state::record::{MAX_REFS, Record};
use crate::state::tables::Key;
use crate::state::{CHUNK_PAGES, SEGMENT_PAGES, SPACE_PAGES, State};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Slots of a segment.
const SLOTS_IN_SEGMENT: u32 = (SEGMENT_PAGES / CHUNK_PAGES) as u32;

/// Slots that no entry names any more: one, or all of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GiveBack {
    slots: Range<u32>,
}

impl GiveBack {
    pub(crate) fn pages(&self) -> Range<u64> {
        u64::from(self.slots.start) * CHUNK_PAGES..u64::from(self.slots.end) * CHUNK_PAGES
    }

    pub(crate) fn segment(&self) -> u64 {
        u64::from(self.slots.start / SLOTS_IN_SEGMENT)
    }

    pub(crate) fn is_whole_segment(&self) -> bool {
        self.slots.len() == SLOTS_IN_SEGMENT as usize
    }
}

/// The allocator of space pages.
pub(crate) struct SpacePages {
    /// Pages in use of each slot ever given out.
    live: Vec<u16>,
    /// Slots below `live.len()` with nothing in them; the lowest is taken first, so that segments
    /// fill up.
    free: BTreeSet<u32>,
    /// Emptied slots, as long as writes to them may be under way.
    emptied: Vec<u32>,
    /// Emptied slots whose contents the donors can be told to discard.
    leaving: BTreeSet<u32>,
    /// Emptied slots that a donor could not be told of; tried again now and then.
    kept_back: BTreeSet<u32>,
    /// The slot in which a chunk's next page goes, and the other way round for each slot.
    slot_of_chunk: HashMap<u64, u32>,
    chunk_of_slot: Vec<u64>,
    /// Pages in use.
    in_use: u64,
}

impl SpacePages {
    pub(crate) fn new() -> SpacePages {
        SpacePages {
            live: Vec::new(),
            free: BTreeSet::new(),
            emptied: Vec::new(),
            leaving: BTreeSet::new(),
            kept_back: BTreeSet::new(),
            slot_of_chunk: HashMap::new(),
            chunk_of_slot: Vec::new(),
            in_use: 0,
        }
    }

    pub(crate) fn record(&self, state: &State, page: u64) -> Record {
        Record(state.records[page as usize].load(Relaxed))
    }

    pub(crate) fn set_record(&self, state: &State, page: u64, record: Record) {
        state.records[page as usize].store(record.0, Release);
    }

    /// Pages of the space that are in use.
    pub(crate) fn in_use(&self) -> u64 {
        self.in_use
    }

    /// A page for the contents of `key`, with one reference: in the slot `wanted`, if that is free.
    ///
    /// # Panics
    /// When all 4 TiB of the space are in use. If a slot was taken for empty and is not: a
    /// successor counts anew.
    pub(crate) fn allocate(&mut self, state: &State, key: Key, wanted: Option<u32>) -> u64 {
        let (chunk, offset) = (key.0 / CHUNK_PAGES, key.0 % CHUNK_PAGES);
        let usable = self.slot_of_chunk.get(&chunk).copied().filter(|&slot| {
            let page = u64::from(slot) * CHUNK_PAGES + offset;
            self.record(state, page).refs() == 0
        });
        let slot = usable.unwrap_or_else(|| {
            let slot = match wanted {
                Some(slot) if self.open(slot) => slot,
                // Not where others' have their places.
                Some(_) => self.another_slot(),
                None => self.free.pop_first().unwrap_or_else(|| self.another_slot()),
            };
            // Else two chunks would have one page, and each find what the other wrote.
            assert_eq!(self.live[slot as usize], 0, "slot {slot} is given out twice");
            self.slot_of_chunk.insert(chunk, slot);
            self.chunk_of_slot[slot as usize] = chunk;
            slot
        });
        let page = u64::from(slot) * CHUNK_PAGES + offset;
        assert!(page < SPACE_PAGES, "the space is full");
        self.live[slot as usize] += 1;
        self.in_use += 1;
        self.set_record(state, page, Record::FREE.with_refs(1));
        page
    }

    /// Takes a slot into use, if it is empty and no discard of it is in flight. A discard that has
    /// not begun is dropped: donors' contents of the slot are not read before it is written.
    fn open(&mut self, slot: u32) -> bool {
        if u64::from(slot) >= SPACE_PAGES / CHUNK_PAGES {
            return false;
        }
        self.know(slot as usize);
        let sets = [&mut self.free, &mut self.leaving, &mut self.kept_back];
        sets.into_iter().any(|set| set.remove(&slot))
    }

    fn another_slot(&mut self) -> u32 {
        let slot = self.live.len();
        self.know(slot);
        self.free.remove(&(slot as u32));
        slot as u32
    }

    /// Enters all slots up to this one.
    fn know(&mut self, slot: usize) {
        while self.live.len() <= slot {
            self.free.insert(self.live.len() as u32);
            self.live.push(0);
            self.chunk_of_slot.push(0);
        }
    }

    /// One more entry names the page. False when it cannot have more.
    #[must_use]
    pub(crate) fn share(&mut self, state: &State, page: u64) -> bool {
        let record = self.record(state, page);
        let shared = record.refs() < MAX_REFS;
        if shared {
            self.set_record(state, page, record.with_refs(record.refs() + 1));
        }
        shared
    }

    /// One entry less names the page; returns its record when it was the last, for its staging
    /// slot.
    pub(crate) fn release(&mut self, state: &State, page: u64) -> Option<Record> {
        let record = self.record(state, page);
        let refs = record.refs().checked_sub(1).expect("a page that nothing names was released");
        if refs > 0 {
            self.set_record(state, page, record.with_refs(refs));
            return None;
        }
        self.set_record(state, page, Record::FREE);
        self.forget(page);
        Some(record)
    }

    /// `named` are all pages that entries name: they are counted, and no slot of one is free,
    /// leaves or is two chunks'.
    #[cfg(test)]
    pub(crate) fn assert_sound(&self, named: impl Iterator<Item = u64>) {
        let mut live = vec![0; self.live.len()];
        named.for_each(|page| live[(page / CHUNK_PAGES) as usize] += 1);
        assert_eq!(live, self.live, "pages in use, by slot");
        assert_eq!(live.iter().map(|&pages| u64::from(pages)).sum::<u64>(), self.in_use);
        let empty = [&self.free, &self.leaving, &self.kept_back].into_iter().flatten();
        for &slot in empty.chain(&self.emptied) {
            assert_eq!(
                live[slot as usize], 0,
                "slot {slot} is in use, and is to be another chunk's"
            );
        }
        for (chunk, &slot) in &self.slot_of_chunk {
            assert_eq!(self.chunk_of_slot[slot as usize], *chunk, "slot {slot} is two chunks'");
            assert_ne!(live[slot as usize], 0, "slot {slot} is empty, and a chunk's");
        }
    }

    fn forget(&mut self, page: u64) {
        let slot = (page / CHUNK_PAGES) as usize;
        self.live[slot] -= 1;
        self.in_use -= 1;
        if self.live[slot] == 0 {
            // From here on no chunk finds the slot, so nothing is written to it before the discard.
            let chunk = self.chunk_of_slot[slot];
            if self.slot_of_chunk.get(&chunk) == Some(&(slot as u32)) {
                self.slot_of_chunk.remove(&chunk);
            }
            self.emptied.push(slot as u32);
        }
    }

    /// Slots that became empty since last asked.
    pub(crate) fn take_emptied(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.emptied)
    }

    /// No write to the emptied slot is under way any more.
    ///
    /// # Panics
    /// If something is in it, which the donors are not to discard.
    pub(crate) fn may_leave(&mut self, slot: u32) {
        assert_eq!(self.live[slot as usize], 0, "slot {slot} leaves with pages in it");
        self.leaving.insert(slot);
    }

    /// Slots that the donors must be told of next. They are not given out before
    /// [`SpacePages::gave_back`], so that no discard meets new contents.
    pub(crate) fn next_to_give_back(&mut self) -> Option<GiveBack> {
        let slot = self.leaving.pop_first()?;
        let segment = slot / SLOTS_IN_SEGMENT;
        let all = segment * SLOTS_IN_SEGMENT..(segment + 1) * SLOTS_IN_SEGMENT;
        let is_empty = |other: u32| {
            let sets = [&self.free, &self.leaving, &self.kept_back];
            other == slot
                || other as usize >= self.live.len()
                || sets.iter().any(|set| set.contains(&other))
        };
        if !all.clone().all(is_empty) {
            return Some(GiveBack { slots: slot..slot + 1 });
        }
        while self.live.len() < all.end as usize {
            self.live.push(0);
            self.chunk_of_slot.push(0);
        }
        for set in [&mut self.free, &mut self.leaving, &mut self.kept_back] {
            set.retain(|other| !all.contains(other));
        }
        Some(GiveBack { slots: all })
    }

    /// The donor holds nothing of it any more; or, if it is not `done`, could not be told so.
    pub(crate) fn gave_back(&mut self, what: &GiveBack, done: bool) {
        let set = if done { &mut self.free } else { &mut self.kept_back };
        set.extend(what.slots.clone());
    }

    /// Retries the slots that a donor could not be told of.
    pub(crate) fn try_again(&mut self) {
        self.leaving.append(&mut self.kept_back);
    }

    /// For a successor: counts a page that an entry names, and remembers its slot for the chunk,
    /// unless it is another chunk's: of one that two processes share, each may be the only one that
    /// names some pages. The slot would stay the first one's when it has been emptied and given to
    /// others.
    pub(crate) fn recount(&mut self, state: &State, page: u64, key: Key) {
        let slot = (page / CHUNK_PAGES) as usize;
        self.know(slot);
        let record = self.record(state, page);
        if record.refs() == 0 {
            self.free.remove(&(slot as u32));
            self.live[slot] += 1;
            self.in_use += 1;
            let chunk = key.0 / CHUNK_PAGES;
            let is_taken =
                self.slot_of_chunk.get(&self.chunk_of_slot[slot]) == Some(&(slot as u32));
            if page % CHUNK_PAGES == key.0 % CHUNK_PAGES && !is_taken {
                self.slot_of_chunk.insert(chunk, slot as u32);
                self.chunk_of_slot[slot] = chunk;
            }
        }
        self.set_record(state, page, record.with_refs(record.refs() + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;

    fn state() -> State {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap().0
    }

    fn page_of_chunk(chunk: u64) -> Key {
        Key::new(0, chunk * CHUNK_PAGES)
    }

    /// Gives pages out to that many chunks, one each.
    fn fill(pages: &mut SpacePages, state: &State, chunks: Range<u64>) -> Vec<u64> {
        chunks.map(|chunk| pages.allocate(state, page_of_chunk(chunk), None)).collect()
    }

    fn empty(pages: &mut SpacePages, state: &State, freed: &[u64]) {
        for &page in freed {
            pages.release(state, page).unwrap();
        }
        pages.take_emptied().into_iter().for_each(|slot| pages.may_leave(slot));
    }

    #[test]
    fn a_slot_is_given_out_again_when_its_donor_has_been_told_and_not_before() {
        let state = state();
        let mut pages = SpacePages::new();
        let used = fill(&mut pages, &state, 0..3);
        pages.release(&state, used[1]).unwrap();
        assert_eq!(pages.next_to_give_back(), None, "writes may be under way");
        pages.take_emptied().into_iter().for_each(|slot| pages.may_leave(slot));

        let what = pages.next_to_give_back().unwrap();
        assert_eq!((what.pages(), what.is_whole_segment()), (512..1024, false));
        assert_eq!(pages.next_to_give_back(), None);
        assert_eq!(fill(&mut pages, &state, 7..8), [3 * CHUNK_PAGES], "it is being given back");
        pages.gave_back(&what, false);
        assert_eq!(fill(&mut pages, &state, 8..9), [4 * CHUNK_PAGES], "its donor is away");
        assert_eq!(pages.next_to_give_back(), None, "now and then is enough");
        pages.try_again();
        assert_eq!(pages.next_to_give_back().as_ref(), Some(&what));
        pages.gave_back(&what, true);
        assert_eq!(fill(&mut pages, &state, 9..10), [CHUNK_PAGES]);
    }

    #[test]
    fn a_slot_that_is_asked_for_is_given_if_it_is_free() {
        let state = state();
        let mut pages = SpacePages::new();
        let asked = |pages: &mut SpacePages, chunk: u64, slot: u32| {
            pages.allocate(&state, page_of_chunk(chunk), Some(slot)) / CHUNK_PAGES
        };
        assert_eq!(asked(&mut pages, 1, 40), 40);
        assert_eq!(asked(&mut pages, 2, 3), 3);
        assert_eq!(asked(&mut pages, 3, 3), 41, "that one is another's");
        pages.release(&state, 3 * CHUNK_PAGES).unwrap();
        assert_eq!(asked(&mut pages, 4, 3), 42, "it may still be written to");
        pages.take_emptied().into_iter().for_each(|slot| pages.may_leave(slot));
        assert_eq!(asked(&mut pages, 5, 3), 3);
        assert_eq!(pages.next_to_give_back(), None, "it is in use again");
        assert_eq!(asked(&mut pages, 6, u32::MAX), 43, "beyond the end");
    }

    #[test]
    fn a_successor_finds_one_chunk_for_each_slot() {
        let state = state();
        let mut pages = SpacePages::new();
        // Two processes that share a slot; each has one page of it for itself.
        let (parent, child) = (Key::new(0, 7 * CHUNK_PAGES), Key::new(1, 7 * CHUNK_PAGES));
        pages.recount(&state, 0, parent);
        pages.recount(&state, 1, child.plus(1));
        empty(&mut pages, &state, &[0, 1]);
        let what = pages.next_to_give_back().unwrap();
        for key in [parent, child] {
            let page = pages.allocate(&state, key, None);
            assert!(!what.pages().contains(&page), "{page} is being given back");
        }
        pages.gave_back(&what, true);
    }

    #[test]
    fn a_segment_goes_when_nothing_of_it_is_in_use() {
        let state = state();
        let mut pages = SpacePages::new();
        let used = fill(&mut pages, &state, 0..8);
        empty(&mut pages, &state, &used[..7]);
        let first = pages.next_to_give_back().unwrap();
        assert!(!first.is_whole_segment());
        pages.gave_back(&first, false);
        let second = pages.next_to_give_back().unwrap();
        pages.gave_back(&second, true);
        empty(&mut pages, &state, &used[7..]);
        let whole = pages.next_to_give_back().unwrap();
        assert_eq!((whole.segment(), whole.pages()), (0, 0..SEGMENT_PAGES));
        assert!(whole.is_whole_segment());
        assert_eq!(pages.next_to_give_back(), None);
        // Nothing may be put there meanwhile.
        assert_eq!(fill(&mut pages, &state, 20..21), [SEGMENT_PAGES]);
        pages.gave_back(&whole, true);
        assert_eq!(fill(&mut pages, &state, 21..22), [0]);
    }

    #[test]
    fn a_segment_that_was_never_full_goes_as_a_whole_too() {
        let state = state();
        let mut pages = SpacePages::new();
        let used = fill(&mut pages, &state, 0..2);
        empty(&mut pages, &state, &used);
        let whole = pages.next_to_give_back().unwrap();
        assert_eq!(whole.pages(), 0..SEGMENT_PAGES);
        assert_eq!(fill(&mut pages, &state, 5..6), [SEGMENT_PAGES], "the rest of it is spoken for");
    }
}
