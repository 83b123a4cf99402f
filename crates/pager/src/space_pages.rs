//! Which pages of the space are in use, by how many entries, and where the next one goes.
//!
//! Space pages are given out in slots of 2 MiB, one to each chunk of an address space, and a page
//! takes the place in the slot that it has in its chunk: neighbours in the program are neighbours
//! at the donor, and one request fetches them. After a fork a page may be taken already by the
//! other process's copy; the chunk then gets a further slot.

use crate::state::record::{MAX_REFS, Record};
use crate::state::{CHUNK_PAGES, SPACE_PAGES, State};
use crate::tables::Key;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// The allocator of space pages.
pub(crate) struct SpacePages {
    /// Pages in use of each slot ever given out.
    live: Vec<u16>,
    /// Slots below `live.len()` with nothing in them; the lowest is taken first, so that segments
    /// fill up.
    free: BTreeSet<u32>,
    /// Emptied slots, whose contents the donors are still to discard.
    emptied: Vec<u32>,
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

    /// A page for the contents of `key`, with one reference.
    ///
    /// # Panics
    /// When all 4 TiB of the space are in use.
    pub(crate) fn allocate(&mut self, state: &State, key: Key) -> u64 {
        let (chunk, offset) = (key.0 / CHUNK_PAGES, key.0 % CHUNK_PAGES);
        let usable = self.slot_of_chunk.get(&chunk).copied().filter(|&slot| {
            let page = u64::from(slot) * CHUNK_PAGES + offset;
            self.record(state, page).refs() == 0
        });
        let slot = usable.unwrap_or_else(|| {
            let slot = self.free.pop_first().unwrap_or_else(|| {
                self.live.push(0);
                self.chunk_of_slot.push(0);
                self.live.len() as u32 - 1
            });
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

    /// One entry less names the page; returns its record when it was the last, for its staging slot.
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

    /// Slots that became empty since last asked: their pages may be discarded. They are given out
    /// again after [`SpacePages::discarded`], so that no discard meets new contents.
    pub(crate) fn take_emptied(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.emptied)
    }

    /// The donors hold nothing of the slot any more.
    pub(crate) fn discarded(&mut self, slot: u32) {
        self.free.insert(slot);
    }

    /// Whether every slot in the range is free: their segment can go back to its donor.
    pub(crate) fn are_free(&self, mut slots: std::ops::Range<u32>) -> bool {
        slots.all(|slot| slot as usize >= self.live.len() || self.free.contains(&slot))
    }

    /// For a successor: counts a page that an entry names, and remembers its slot for the chunk.
    pub(crate) fn recount(&mut self, state: &State, page: u64, key: Key) {
        let slot = (page / CHUNK_PAGES) as usize;
        while self.live.len() <= slot {
            self.free.insert(self.live.len() as u32);
            self.live.push(0);
            self.chunk_of_slot.push(0);
        }
        let record = self.record(state, page);
        if record.refs() == 0 {
            self.free.remove(&(slot as u32));
            self.live[slot] += 1;
            self.in_use += 1;
            if page % CHUNK_PAGES == key.0 % CHUNK_PAGES {
                self.slot_of_chunk.insert(key.0 / CHUNK_PAGES, slot as u32);
                self.chunk_of_slot[slot] = key.0 / CHUNK_PAGES;
            }
        }
        self.set_record(state, page, record.with_refs(record.refs() + 1));
    }
}
