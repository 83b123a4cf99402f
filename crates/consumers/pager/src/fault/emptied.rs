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
use std::collections::HashSet;
use std::ops::Range;

/// Bounds memory to some 40 MiB. Beyond it, every chunk counts as noted.
const MAX_CHUNKS: usize = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct Emptied {
    chunks: HashSet<Key>,
    is_anywhere: bool,
}

impl Emptied {
    /// For a successor: its predecessor's reports are not known.
    pub(crate) fn anywhere(&mut self) {
        self.is_anywhere = true;
        self.chunks = HashSet::new();
    }

    /// A page of these may be dropped.
    pub(crate) fn note(&mut self, space: usize, pages: Range<u64>) {
        if self.is_anywhere || pages.is_empty() {
            return;
        }
        let chunks = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
        if self.chunks.len() as u64 + (chunks.end - chunks.start) > MAX_CHUNKS as u64 {
            return self.anywhere();
        }
        self.chunks.extend(chunks.map(|chunk| Key::new(space, chunk * CHUNK_PAGES)));
    }

    /// Pages move within a space.
    pub(crate) fn moved(&mut self, space: usize, from: u64, to: u64, pages: u64) {
        let noted = |vpn: &u64| self.may_lack(Key::new(space, *vpn));
        let parts = (from..from + pages).step_by(CHUNK_PAGES as usize).chain([from + pages - 1]);
        if parts.into_iter().any(|vpn| noted(&vpn)) {
            self.note(space, to..to + pages);
        }
    }

    /// A child has its parent's pages.
    pub(crate) fn inherit(&mut self, parent: usize, child: usize) {
        let of_parent = self.chunks.iter().filter(|chunk| chunk.space() == parent);
        let of_child: Vec<u64> = of_parent.map(|chunk| chunk.vpn()).collect();
        of_child.into_iter().for_each(|vpn| self.note(child, vpn..vpn + 1));
    }

    pub(crate) fn forget(&mut self, space: usize) {
        self.chunks.retain(|chunk| chunk.space() != space);
    }

    /// Whether the kernel may have dropped the page at the program's wish.
    pub(crate) fn may_lack(&self, key: Key) -> bool {
        let first = key.vpn() / CHUNK_PAGES * CHUNK_PAGES;
        self.is_anywhere || self.chunks.contains(&Key::new(key.space(), first))
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
