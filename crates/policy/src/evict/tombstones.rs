//! Lazy removal from the rings: a removed page's entry stays until it is met.
//!
//! The count of a page's dead entries makes this exact without an index from page to ring slot:
//! however often a page is unmapped and installed anew, it has exactly one entry more than
//! tombstones while it is resident. Which of several equal entries survives does not matter.

use std::collections::HashMap;

/// Below this many, dead entries are not worth a compaction.
const MIN_TO_COMPACT: usize = 256;

/// Dead entries that are still in a ring, by page.
#[derive(Default)]
pub(super) struct Tombstones {
    dead: HashMap<u64, u32>,
    total: usize,
}

impl Tombstones {
    /// One entry of `page` has died. `live` is the number of live entries in the rings; true
    /// means that the dead have become too many, and the owner must compact.
    #[must_use]
    pub(super) fn bury(&mut self, page: u64, live: usize) -> bool {
        *self.dead.entry(page).or_default() += 1;
        self.total += 1;
        self.total > MIN_TO_COMPACT && self.total > live / 4
    }

    /// A slot of the map is a key, a count, padding and a control byte.
    pub(super) fn memory_bytes(&self) -> usize {
        self.dead.capacity() * 17
    }

    /// Whether the entry of `page` just met is a dead one; if so it must be dropped.
    pub(super) fn collect(&mut self, page: u64) -> bool {
        if self.total == 0 {
            return false;
        }
        let Some(count) = self.dead.get_mut(&page) else { return false };
        *count -= 1;
        if *count == 0 {
            self.dead.remove(&page);
        }
        self.total -= 1;
        true
    }

    /// After a compaction of all rings nothing dead is left; a rest would be tombstones of pages
    /// that were in no ring.
    pub(super) fn clear(&mut self) {
        self.dead.clear();
        self.total = 0;
    }
}
