//! What each page may be read as, and which losses are nobody's mistake.
//!
//! A page may hold the value that was acknowledged last, or that of a write whose end is not known.
//! Once such a write cannot land any more, the page is one of its possible values for good: the
//! first read shows which, and every later one must show the same.

use crate::borrower::SEGMENT_PAGES;
use crate::network::Value;
use hecaton_memory::Generation;
use hecaton_space::map;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
struct Page {
    possible: Vec<Value>,
    /// Counts the writes that began.
    version: u64,
    /// A write is under way, or its end is not known and it may still land.
    open: bool,
    /// Its write failed, and is to be done again.
    dirty: bool,
    /// That write may still land, so that nobody is to ask the pool for the page.
    unsettled: bool,
    /// Dirty and unsettled, before the write that is open.
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

/// What a read that is under way may show.
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
    /// Segments of which the last extent was lost with its donor.
    losable: BTreeSet<u64>,
    /// Of each segment, that of the last write or discard that was acknowledged.
    generations: BTreeMap<u64, Generation>,
    /// Whether segments have several copies, if only while they move, which may differ in what was not
    /// acknowledged.
    has_copies: bool,
    values: Value,
    reads_begun: u64,
    pub(crate) reads_checked: u64,
}

impl Oracle {
    /// The values of no two spaces are the same: of this one they begin after that.
    pub(crate) fn new(values: Value) -> Oracle {
        Oracle { values, ..Oracle::default() }
    }

    /// Segments have several copies, if only while they move.
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

    /// The page has gone bad wherever it is stored: it is to be written before it is read.
    pub(crate) fn decayed(&mut self, number: u64) {
        let page = self.pages.entry(number).or_default();
        page.version += 1;
        page.dirty = true;
        page.unsettled = true;
    }

    pub(crate) fn dirty_pages(&self) -> Vec<u64> {
        self.pages.iter().filter(|(_, page)| page.dirty).map(|(number, _)| *number).collect()
    }

    /// What a successor is told of each segment with pages that are certainly not zero.
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

    /// A write or discard was acknowledged, in that generation.
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

    /// The write was acknowledged.
    pub(crate) fn write_stored(&mut self, number: u64, value: Value) {
        let page = self.pages.entry(number).or_default();
        page.possible = vec![value];
        page.open = false;
    }

    /// The write was not even begun.
    pub(crate) fn write_refused(&mut self, number: u64, value: Value) {
        let page = self.pages.entry(number).or_default();
        page.possible.retain(|possible| *possible != value);
        (page.dirty, page.unsettled) = page.before;
        page.open = false;
        page.version += 1;
    }

    /// The write failed. `settled` says that it cannot land any more: with one copy the first read
    /// shows what has become of it, with several the page is to be written before it is read.
    pub(crate) fn write_failed(&mut self, number: u64, settled: bool) {
        let has_copies = self.has_copies;
        let page = self.pages.entry(number).or_default();
        page.open = false;
        page.dirty = true;
        page.unsettled = !settled || has_copies;
        if page.unsettled {
            // Keeps the reads that are under way from deciding what the page is.
            page.version += 1;
        }
    }

    /// Writes of an earlier borrower cannot land any more. Those that nobody heard the end of may be
    /// in some copies.
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

    /// A read begins; returns its key.
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

    /// The read shows a value for the page at this place of its list. What an earlier owner reads
    /// decides nothing: its successor may have begun with other copies.
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

    /// The segment was freed, or its loss accepted: whatever is stored next is in another group.
    pub(crate) fn freed(&mut self, segment: u64) {
        self.losable.remove(&segment);
        self.generations.remove(&segment);
    }
}
