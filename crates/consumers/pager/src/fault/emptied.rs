//! Remembers where the kernel may drop a page that the table has as resident.
//!
//! `madvise` reports that it will empty a range, and empties it once the report is read. A page
//! that a second thread brings in between is lost, which the program has asked for. A page that is
//! missing elsewhere is lost by a fault of the pager's bookkeeping.
//!
//! Pure: chunks of address space are noted when a report is read, and are never forgotten, because
//! nothing reports that the range is empty.

use crate::state::CHUNK_PAGES;
use crate::state::tables::Key;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Bounds memory to some 40 MiB. Beyond it, every chunk counts as noted.
const MAX_CHUNKS: u64 = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct Emptied {
    /// Numbers of chunks, by space: processes come and go more often than pages are missing.
    chunks: HashMap<usize, HashSet<u64>>,
    is_anywhere: bool,
}

impl Emptied {
    /// For a successor: its predecessor's reports are not known.
    pub(crate) fn anywhere(&mut self) {
        self.is_anywhere = true;
        self.chunks = HashMap::new();
    }

    /// A page of these may be dropped.
    pub(crate) fn note(&mut self, space: usize, pages: Range<u64>) {
        if self.is_anywhere || pages.is_empty() {
            return;
        }
        let chunks = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
        if self.count() + (chunks.end - chunks.start) > MAX_CHUNKS {
            return self.anywhere();
        }
        self.chunks.entry(space).or_default().extend(chunks);
    }

    /// Pages move within a space.
    pub(crate) fn moved(&mut self, space: usize, from: u64, to: u64, pages: u64) {
        let Some(noted) = self.chunks.get(&space).filter(|_| pages > 0) else { return };
        let mut chunks = from / CHUNK_PAGES..(from + pages).div_ceil(CHUNK_PAGES);
        if chunks.any(|chunk| noted.contains(&chunk)) {
            self.note(space, to..to + pages);
        }
    }

    /// A child has its parent's pages.
    pub(crate) fn inherit(&mut self, parent: usize, child: usize) {
        let Some(noted) = self.chunks.get(&parent) else { return };
        if self.count() + noted.len() as u64 > MAX_CHUNKS {
            return self.anywhere();
        }
        let noted = noted.clone();
        self.chunks.insert(child, noted);
    }

    pub(crate) fn forget(&mut self, space: usize) {
        self.chunks.remove(&space);
    }

    /// Whether the kernel may have dropped the page at the program's wish.
    pub(crate) fn may_lack(&self, key: Key) -> bool {
        let noted = self.chunks.get(&key.space());
        self.is_anywhere || noted.is_some_and(|noted| noted.contains(&(key.vpn() / CHUNK_PAGES)))
    }

    fn count(&self) -> u64 {
        self.chunks.values().map(|noted| noted.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_noted_moved_inherited_and_forgotten() {
        let mut emptied = Emptied::default();
        let at = |space, chunk: u64| Key::new(space, chunk * CHUNK_PAGES + 7);
        emptied.note(1, CHUNK_PAGES * 3 + 500..CHUNK_PAGES * 4 + 2);
        let noted = |emptied: &Emptied, space| -> Vec<u64> {
            (0..20).filter(|&chunk| emptied.may_lack(at(space, chunk))).collect()
        };
        assert_eq!(noted(&emptied, 1), [3, 4]);
        emptied.moved(1, CHUNK_PAGES * 4 + 511, CHUNK_PAGES * 10, 2);
        assert_eq!(noted(&emptied, 1), [3, 4, 10]);
        emptied.moved(1, CHUNK_PAGES * 6, CHUNK_PAGES * 12, 512);
        assert_eq!(noted(&emptied, 1), [3, 4, 10], "nothing is noted there");
        emptied.inherit(1, 2);
        emptied.forget(1);
        assert_eq!((noted(&emptied, 1), noted(&emptied, 2)), (vec![], vec![3, 4, 10]));
        emptied.note(2, 0..u64::MAX >> 30);
        assert_eq!(noted(&emptied, 1).len(), 20, "too many to be told apart");
    }
}
