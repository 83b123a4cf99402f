//! Finds the entry of a page, and the pages of an address space.
//!
//! An address space is covered by chunks of 2 MiB, made when their first page is touched. Which
//! chunk lies where is kept twice: in the state file for a successor, and in a hash map for speed.

use crate::state::entry::Entry;
use crate::state::{CHUNK_PAGES, MAX_CHUNKS, State};
use hecaton_policy::evict::PAGE_KEY_LIMIT;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// A page of one of the address spaces: the space's index and the virtual page number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Key(pub(crate) u64);

const SPACE_SHIFT: u32 = 40;

impl Key {
    pub(crate) fn new(space: usize, vpn: u64) -> Key {
        debug_assert!(vpn >> SPACE_SHIFT == 0);
        Key((space as u64) << SPACE_SHIFT | vpn)
    }

    pub(crate) fn space(self) -> usize {
        (self.0 >> SPACE_SHIFT) as usize
    }

    pub(crate) fn vpn(self) -> u64 {
        self.0 & ((1 << SPACE_SHIFT) - 1)
    }

    pub(crate) fn address(self) -> u64 {
        self.vpn() << 12
    }

    /// The page `pages` after this one.
    pub(crate) fn plus(self, pages: u64) -> Key {
        Key(self.0 + pages)
    }

    fn chunk(self) -> u64 {
        self.0 / CHUNK_PAGES
    }
}

/// The entries of all address spaces.
pub(crate) struct Tables {
    chunks: HashMap<u64, u32>,
    free: Vec<u32>,
    next: u32,
    /// The chunk last looked up: most look-ups are its neighbours.
    last: (u64, u32),
}

/// The eviction order takes a page's place for its key.
const _: () = assert!(MAX_CHUNKS as u64 * CHUNK_PAGES <= PAGE_KEY_LIMIT as u64);

const NO_CHUNK: (u64, u32) = (u64::MAX, 0);

impl Tables {
    /// Reads what a predecessor left; nothing in a new file.
    pub(crate) fn load(state: &State) -> Tables {
        let mut tables =
            Tables { chunks: HashMap::new(), free: Vec::new(), next: 0, last: NO_CHUNK };
        for index in 0..MAX_CHUNKS as u32 {
            let owner = state.chunk_heads[2 * index as usize].load(Relaxed);
            // Chunks are taken in order, so the first that was never used ends the search.
            let number = state.chunk_heads[2 * index as usize + 1].load(Relaxed);
            match owner {
                0 if number == 0 => break,
                0 => tables.free.push(index),
                _ => {
                    let key = Key::new(owner as usize - 1, number * CHUNK_PAGES);
                    tables.chunks.insert(key.chunk(), index);
                }
            }
            tables.next = index + 1;
        }
        tables
    }

    fn find(&mut self, key: Key) -> Option<usize> {
        let chunk = key.chunk();
        if self.last.0 != chunk {
            self.last = (chunk, *self.chunks.get(&chunk)?);
        }
        Some(self.last.1 as usize * CHUNK_PAGES as usize + (key.0 % CHUNK_PAGES) as usize)
    }

    /// The page's entry; zero for one never touched.
    pub(crate) fn get(&mut self, state: &State, key: Key) -> Entry {
        self.find(key).map_or(Entry::ZERO, |at| Entry(state.entries[at].load(Relaxed)))
    }

    /// Stores the page's entry, making its chunk if there is none.
    ///
    /// # Panics
    /// When the address spaces together use more than 2 TiB.
    pub(crate) fn set(&mut self, state: &State, key: Key, entry: Entry) {
        match self.find(key) {
            Some(at) => state.entries[at].store(entry.0, Release),
            None if entry == Entry::ZERO => {}
            None => {
                let at = self.make(state, key);
                state.entries[at].store(entry.0, Release);
            }
        }
    }

    /// Where the page's entry is, in the few bits that the eviction order has for a page. It stays
    /// there until the page's chunk is freed; the place is another page's then. Makes the chunk if
    /// there is none.
    ///
    /// # Panics
    /// When the address spaces together use more than 2 TiB.
    pub(crate) fn place_of(&mut self, state: &State, key: Key) -> u32 {
        self.find(key).unwrap_or_else(|| self.make(state, key)) as u32
    }

    /// The page whose entry is there; none if its chunk is free.
    pub(crate) fn key_at(&self, state: &State, place: u32) -> Option<Key> {
        let (index, offset) = (place as usize / CHUNK_PAGES as usize, place as u64 % CHUNK_PAGES);
        let owner = state.chunk_heads[2 * index].load(Relaxed);
        let number = state.chunk_heads[2 * index + 1].load(Relaxed);
        let space = (owner as usize).checked_sub(1)?;
        Some(Key::new(space, number * CHUNK_PAGES + offset))
    }

    /// Makes the page's chunk; returns where its entry is.
    fn make(&mut self, state: &State, key: Key) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        assert!((index as usize) < MAX_CHUNKS, "the programs use more than 2 TiB of addresses");
        let heads = &state.chunk_heads[2 * index as usize..][..2];
        // A chunk number of 0 with an owner of 0 means "never used", so the number is kept when a
        // chunk is freed; number 0 itself (addresses below 2 MiB) is never mapped anonymously.
        heads[1].store(key.vpn() / CHUNK_PAGES, Release);
        heads[0].store(key.space() as u64 + 1, Release);
        self.chunks.insert(key.chunk(), index);
        self.last = (key.chunk(), index);
        self.find(key).expect("the chunk was just made")
    }

    /// The first pages of the chunks of `space` that overlap `pages`, in no particular order.
    pub(crate) fn chunks_in(&self, space: usize, pages: Range<u64>) -> Vec<Key> {
        let (first, last) = (pages.start / CHUNK_PAGES, pages.end.div_ceil(CHUNK_PAGES));
        if last - first <= self.chunks.len() as u64 {
            let candidates = (first..last).map(|number| Key::new(space, number * CHUNK_PAGES));
            return candidates.filter(|key| self.chunks.contains_key(&key.chunk())).collect();
        }
        let keys = self.chunks.keys().map(|&chunk| Key(chunk * CHUNK_PAGES));
        keys.filter(|key| {
            let number = key.vpn() / CHUNK_PAGES;
            key.space() == space && (first..last).contains(&number)
        })
        .collect()
    }

    /// Forgets a chunk all of whose entries are zero.
    pub(crate) fn free_chunk(&mut self, state: &State, first: Key) {
        if let Some(index) = self.chunks.remove(&first.chunk()) {
            let at = index as usize * CHUNK_PAGES as usize;
            for entry in &state.entries[at..][..CHUNK_PAGES as usize] {
                entry.store(0, Relaxed);
            }
            state.chunk_heads[2 * index as usize].store(0, Release);
            self.free.push(index);
            self.last = NO_CHUNK;
        }
    }
}

/// The whole of an address space.
pub(crate) const ALL_PAGES: Range<u64> = 0..1 << SPACE_SHIFT;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::entry::Place;
    use std::os::fd::BorrowedFd;

    fn state() -> State {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap().0
    }

    #[test]
    fn entries_of_two_spaces_are_apart_and_survive() {
        let state = state();
        let mut tables = Tables::load(&state);
        let resident = Entry::ZERO.with_place(Place::Resident);
        let keys = [Key::new(0, 0x7_f000_0001), Key::new(3, 0x7_f000_0001), Key::new(0, 512)];
        for key in keys {
            assert_eq!(tables.get(&state, key).place(), Place::Zero);
            tables.set(&state, key, resident);
        }
        assert_eq!(tables.get(&state, keys[0].plus(1)).place(), Place::Zero);
        assert_eq!(tables.chunks_in(0, ALL_PAGES).len(), 2);
        assert_eq!(tables.chunks_in(0, 512..513), [Key::new(0, 512)]);

        for key in keys {
            let place = tables.place_of(&state, key);
            assert_eq!(tables.key_at(&state, place), Some(key));
        }

        let place = tables.place_of(&state, keys[2]);
        tables.free_chunk(&state, Key::new(0, 512));
        assert_eq!(tables.key_at(&state, place), None);
        let mut successor = Tables::load(&state);
        assert_eq!(successor.chunks.len(), 2);
        assert_eq!(successor.get(&state, keys[0]).place(), Place::Resident);
        assert_eq!(successor.get(&state, keys[2]).place(), Place::Zero);
        successor.set(&state, Key::new(5, 5120), resident);
        assert_eq!(successor.next, 3, "the freed chunk is used again");
    }
}
