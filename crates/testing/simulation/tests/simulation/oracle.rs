//! Knows which values each page may be read as, and which losses are no bug.
//!
//! A page may hold the value that was acknowledged last, or that of a write with unknown outcome.
//! Once such a write cannot land any more, the page keeps one of its possible values for good. The
//! first read shows which value, and every later read must show the same value.

use crate::borrower::SEGMENT_PAGES;
use crate::network::Value;
use hecaton_memory::Generation;
use hecaton_space::map;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
struct Page {
    possible: Vec<Value>,
    /// Counts the writes that began, and other changes.
    version: u64,
    /// A write is in flight, or its outcome is unknown and it may still land.
    open: bool,
    /// The last write failed, and must be repeated.
    dirty: bool,
    /// That write may still land: the page must not be read from the pool.
    unsettled: bool,
    /// `dirty` and `unsettled` as they were before the open write.
    before: (bool, bool),
}

impl Default for Page {
    fn default() -> Page {
        Page {
            possible: vec![0],
            version: 0,
            open: false,
            dirty: false,
            unsettled: false,
            before: (false, false),
        }
    }
}

/// Values that an in-flight read may show for one page.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) page: u64,
    possible: Vec<Value>,
    /// The page's version when the read began, if no write was open then.
    quiet_since: Option<u64>,
}

#[derive(Default)]
pub(crate) struct Oracle {
    pages: BTreeMap<u64, Page>,
    reads: BTreeMap<u64, Vec<Expected>>,
    /// Segments whose last extent was lost with its donor.
    losable: BTreeSet<u64>,
    /// Generation of the last acknowledged write or discard of each segment.
    generations: BTreeMap<u64, Generation>,
    /// Whether segments have several copies, if only while they move. The copies may differ in
    /// unacknowledged writes.
    has_copies: bool,
    values: Value,
    reads_begun: u64,
    pub(crate) reads_checked: u64,
}

impl Oracle {
    /// An oracle for one space. No two spaces have a value in common: its own begin after `values`.
    pub(crate) fn new(values: Value) -> Oracle {
        Oracle { values, ..Oracle::default() }
    }

    /// Records that segments have several copies, if only while they move.
    pub(crate) fn expect_copies(&mut self) {
        self.has_copies = true;
    }

    /// A value that no page ever had.
    pub(crate) fn fresh_value(&mut self) -> Value {
        self.values += 1;
        self.values
    }

    pub(crate) fn may_write(&self, page: u64) -> bool {
        self.pages.get(&page).is_none_or(|page| !page.open)
    }

    pub(crate) fn may_read(&self, page: u64) -> bool {
        self.pages.get(&page).is_none_or(|page| !page.unsettled)
    }

    /// The value that is stored for a page, if that is certain.
    pub(crate) fn certain(&self, number: u64) -> Option<Value> {
        let page = self.pages.get(&number)?;
        let is_certain = !page.open && !page.dirty && !page.unsettled;
        match page.possible[..] {
            [value] if is_certain => Some(value),
            _ => None,
        }
    }

    /// Records that a page is damaged wherever it is stored: it must be written before it is read.
    pub(crate) fn decayed(&mut self, number: u64) {
        let page = self.pages.entry(number).or_default();
        page.version += 1;
        page.dirty = true;
        page.unsettled = true;
    }

    pub(crate) fn dirty_pages(&self) -> Vec<u64> {
        self.pages.iter().filter(|(_, page)| page.dirty).map(|(number, _)| *number).collect()
    }

    /// Tells a successor about each segment with pages that are certainly not zero.
    pub(crate) fn expected(&self) -> BTreeMap<u64, map::Expected> {
        let mut expected = BTreeMap::new();
        for (number, _) in self.pages.iter().filter(|(_, page)| !page.possible.contains(&0)) {
            let segment = number / SEGMENT_PAGES;
            let generation = self.generation_of(segment);
            let known = expected.entry(segment).or_insert(map::Expected { pages: 0, generation });
            known.pages += 1;
        }
        expected
    }

    pub(crate) fn generation_of(&self, segment: u64) -> Generation {
        self.generations.get(&segment).copied().unwrap_or_default()
    }

    /// Records that a write or discard was acknowledged, in this generation.
    pub(crate) fn acknowledged(&mut self, segment: u64, generation: Generation) {
        let known = self.generations.entry(segment).or_default();
        *known = (*known).max(generation);
    }

    pub(crate) fn write_begins(&mut self, number: u64, value: Value) {
        let page = self.pages.entry(number).or_default();
        page.possible.push(value);
        page.version += 1;
        page.open = true;
        page.before = (page.dirty, page.unsettled);
        page.dirty = false;
        page.unsettled = false;
        for expected in self.reads.values_mut().flatten().filter(|e| e.page == number) {
            expected.possible.push(value);
        }
    }

    /// Records that the write was acknowledged.
    pub(crate) fn write_stored(&mut self, number: u64, value: Value) {
        let page = self.pages.entry(number).or_default();
        page.possible = vec![value];
        page.open = false;
    }

    /// Records that the write did not begin.
    pub(crate) fn write_refused(&mut self, number: u64, value: Value) {
        let page = self.pages.entry(number).or_default();
        page.possible.retain(|possible| *possible != value);
        (page.dirty, page.unsettled) = page.before;
        page.open = false;
        page.version += 1;
    }

    /// Records that the write failed. `settled`: it cannot land any more. Then the first read shows
    /// the outcome if one copy exists; with several, the page must be written before it is read.
    pub(crate) fn write_failed(&mut self, number: u64, settled: bool) {
        let has_copies = self.has_copies;
        let page = self.pages.entry(number).or_default();
        page.open = false;
        page.dirty = true;
        page.unsettled = !settled || has_copies;
        if page.unsettled {
            // Keeps in-flight reads from deciding the value of the page.
            page.version += 1;
        }
    }

    /// Records that writes of an earlier borrower cannot land any more. Writes with unknown outcome
    /// may be in some copies.
    pub(crate) fn taken_over(&mut self) {
        for page in self.pages.values_mut() {
            let is_uncertain = page.possible.len() > 1 && self.has_copies;
            page.dirty = is_uncertain;
            page.unsettled = is_uncertain;
            page.open = false;
        }
    }

    pub(crate) fn zeroed(&mut self, number: u64) {
        let page = self.pages.entry(number).or_default();
        assert!(!page.open, "page {number} was zeroed under a write");
        page.possible = vec![0];
        page.version += 1;
        page.dirty = false;
        page.unsettled = false;
    }

    pub(crate) fn maybe_zeroed(&mut self, number: u64) {
        let has_copies = self.has_copies;
        let page = self.pages.entry(number).or_default();
        page.possible.push(0);
        page.version += 1;
        page.dirty |= has_copies;
        page.unsettled |= has_copies;
    }

    /// Begins a read. Returns its key.
    pub(crate) fn read_begins(&mut self, pages: &[u64]) -> u64 {
        self.reads_begun += 1;
        let expected = pages.iter().map(|number| {
            let page = self.pages.get(number).cloned().unwrap_or_default();
            Expected {
                page: *number,
                possible: page.possible,
                quiet_since: (!page.open && !page.unsettled).then_some(page.version),
            }
        });
        self.reads.insert(self.reads_begun, expected.collect());
        self.reads_begun
    }

    /// Checks the value that a read shows for its page at index `at`. A read of an earlier owner
    /// decides nothing: the successor may have begun with other copies.
    pub(crate) fn read_shows(&mut self, read: u64, at: usize, value: Value, decides: bool) {
        let expected = &self.reads[&read][at];
        assert!(
            expected.possible.contains(&value),
            "page {} reads as {value}, and may only be one of {:?}",
            expected.page,
            expected.possible,
        );
        self.reads_checked += 1;
        let page = self.pages.entry(expected.page).or_default();
        if decides && expected.quiet_since == Some(page.version) && !page.open {
            page.possible = vec![value];
        }
    }

    pub(crate) fn read_ends(&mut self, read: u64) {
        self.reads.remove(&read);
    }

    pub(crate) fn losable(&mut self, segment: u64) {
        self.losable.insert(segment);
    }

    pub(crate) fn assert_losable(&self, segment: u64) {
        assert!(self.losable.contains(&segment), "segment {segment} is lost without a reason");
    }

    /// Records that the segment was freed, or its loss accepted: later writes go to another group.
    pub(crate) fn freed(&mut self, segment: u64) {
        self.losable.remove(&segment);
        self.generations.remove(&segment);
    }
}
