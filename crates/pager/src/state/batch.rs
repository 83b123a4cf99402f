//! The eviction batch under way, written down so that a successor can finish or undo it.

use super::STAGING_SLOTS;
use hecaton_uffd::handover::MAX_RUNS;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

/// Most pages in a batch: as many as the area in the program holds.
pub(crate) const MAX_BATCH: usize = MAX_RUNS;

/// Word 0: items. Then two words an item: the page's key; and its staging slot plus one once the slot
/// holds the page's contents, with [`DROPPING`] once the helper was told to drop it. The items are
/// sorted by key, and the *i*th of an address space is moved to page *i* of its area.
pub(crate) struct BatchRecord(&'static [AtomicU64]);

const DROPPING: u64 = 1 << 32;

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
        self.0[2 + 2 * item].store(u64::from(slot) + 1, Release);
    }

    /// The helper is about to be told to drop item `item`.
    pub(crate) fn dropping(&self, item: usize) {
        self.0[2 + 2 * item].fetch_or(DROPPING, Release);
    }

    /// Whether the helper may have dropped the item.
    pub(crate) fn is_dropping(&self, item: usize) -> bool {
        self.0[2 + 2 * item].load(Relaxed) & DROPPING != 0
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
