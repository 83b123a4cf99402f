//! The eviction batch under way, written down so that a successor can finish or undo it.

use super::STAGING_SLOTS;
use hecaton_uffd::handover::MAX_RUNS;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

/// Most pages in a batch: as many as the area in the program holds.
pub(crate) const MAX_BATCH: usize = MAX_RUNS;

/// Word 0: items. Then two words an item: the page's key; and its staging slot plus one once the
/// slot holds the page's contents, with [`DROPPING`] once the helper was told to drop it, or
/// [`LEFT_OUT`]. The items of an address space stand together, and the *i*th of those that are not
/// left out is moved to page *i* of its area.
pub(crate) struct BatchRecord(&'static [AtomicU64]);

const DROPPING: u64 = 1 << 32;

/// The helper is not asked to move the item.
const LEFT_OUT: u64 = 1 << 33;

impl BatchRecord {
    pub(crate) const WORDS: usize = 1 + 2 * MAX_BATCH;

    pub(crate) fn at(words: &'static [AtomicU64]) -> BatchRecord {
        BatchRecord(words)
    }

    /// Before any page is touched.
    pub(crate) fn begin(&self, keys: impl ExactSizeIterator<Item = u64>) {
        let count = keys.len();
        assert!(count <= MAX_BATCH);
        for (i, key) in keys.enumerate() {
            self.0[1 + 2 * i].store(key, Relaxed);
            self.0[2 + 2 * i].store(0, Relaxed);
        }
        self.0[0].store(count as u64, Release);
    }

    /// The slot holds the contents of item `item`: the program's page may go.
    pub(crate) fn copied(&self, item: usize, slot: u32) {
        assert!((slot as usize) < STAGING_SLOTS);
        // Keeps the item's other bits: the places of other items in the area depend on them.
        self.0[2 + 2 * item].fetch_or(u64::from(slot) + 1, Release);
    }

    /// The helper is about to be told to drop item `item`.
    pub(crate) fn dropping(&self, item: usize) {
        self.0[2 + 2 * item].fetch_or(DROPPING, Release);
    }

    /// Whether the helper may have dropped the item.
    pub(crate) fn is_dropping(&self, item: usize) -> bool {
        self.0[2 + 2 * item].load(Relaxed) & DROPPING != 0
    }

    /// The helper is about to be asked for others, and not for item `item`.
    pub(crate) fn leave_out(&self, item: usize) {
        self.0[2 + 2 * item].fetch_or(LEFT_OUT, Release);
    }

    /// Whether the helper was not asked to move the item.
    pub(crate) fn is_left_out(&self, item: usize) -> bool {
        self.0[2 + 2 * item].load(Relaxed) & LEFT_OUT != 0
    }

    /// The program has moved a page of the batch, if it is one: its entry is at `new` already.
    pub(crate) fn moved(&self, old: u64, new: u64) {
        let items = self.items().filter(|&(_, key, _)| key == old);
        items.for_each(|(item, _, _)| self.0[1 + 2 * item].store(new, Release));
    }

    /// Every item is settled.
    pub(crate) fn end(&self) {
        self.0[0].store(0, Release);
    }

    /// The items of an unfinished batch: key, and slot if the contents were copied.
    pub(crate) fn items(&self) -> impl Iterator<Item = (usize, u64, Option<u32>)> {
        let count = (self.0[0].load(Relaxed) as usize).min(MAX_BATCH);
        (0..count).map(|i| {
            let slot = (self.0[2 + 2 * i].load(Relaxed) as u32).checked_sub(1);
            (i, self.0[1 + 2 * i].load(Relaxed), slot)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_that_was_left_out_stays_so_when_it_is_copied_and_dropped() {
        let words = Box::leak((0..BatchRecord::WORDS).map(|_| AtomicU64::new(0)).collect());
        let batch = BatchRecord::at(words);
        batch.begin([7, 8].into_iter());
        batch.leave_out(0);
        batch.copied(0, 5);
        batch.dropping(0);
        batch.copied(1, 6);
        assert_eq!(batch.items().collect::<Vec<_>>(), [(0, 7, Some(5)), (1, 8, Some(6))]);
        assert!(batch.is_left_out(0) && batch.is_dropping(0));
        assert!(!batch.is_left_out(1) && !batch.is_dropping(1));
    }
}
