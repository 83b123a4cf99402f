//! A successor takes over: what the tables say, and what is true.
//!
//! The state file says where each page was when the predecessor died, give or take the one step it
//! was in. The kernel knows which pages are in memory, and the two together tell the rest:
//!
//! | entry | in memory | then |
//! |---|---|---|
//! | resident | yes | resident; clean only if still write-protected |
//! | resident, in the batch | no, but in the area or copied to staging | out, staged |
//! | resident | no | freed by the program: zero |
//! | out, fetching | yes | it arrived and was mapped: resident, dirty |
//! | out, fetching | no | out |
//! | zero | yes | zero: housekeeping will find it; in guest RAM: resident, dirty |
//!
//! "In memory" is for a program what its page table says, for guest RAM what its file says.

use crate::core::Core;
use crate::fault::{Content, examine};
use crate::guest::Ram;
use crate::programs::address_space::{AddressSpace, Mapped};
use crate::programs::remote;
use crate::programs::stage::Stage;
use crate::state::entry::{Entry, Place};
use crate::state::tables::{ALL_PAGES, Key};
use crate::state::{CHUNK_PAGES, IMAGE_SPACE, MAX_SPACES, SEGMENT_PAGES, STAGING_SLOTS};
use hecaton_memory::{PAGE_SIZE, PageSum};
use hecaton_policy::evict::Installed;
use hecaton_space::Expected;
use hecaton_uffd::handover::Range;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering::Relaxed;

/// Staged pages that no donor has acknowledged: space page, sum, slot.
pub(crate) type Unwritten = Vec<(u64, PageSum, u32)>;

/// Reads the kernel's view of the pages of a chunk.
type Look<'a> = dyn FnMut(&mut AddressSpace, Key) -> std::io::Result<Vec<Mapped>> + 'a;

impl Core {
    /// Address spaces of the predecessor, so that what it read from them can be acted upon.
    pub(crate) fn load_spaces(&mut self) {
        self.spaces = (0..MAX_SPACES).map(|i| AddressSpace::load(&self.state, i)).collect();
        while self.spaces.last().is_some_and(Option::is_none) {
            self.spaces.pop();
        }
        Ram::erase_orphans(&self.state, |index| {
            self.spaces.get(index).is_some_and(Option::is_some)
        });
        self.emptied.anywhere();
        // Counts are needed by the first event already.
        self.recount();
        self.count_as_noted();
        self.adopt_staging();
        self.restore_own_drop();
    }

    /// Which entries name which page is counted anew: a kill may have come between an entry and its
    /// page's count.
    fn recount(&mut self) {
        let named = self.all_named_pages();
        // A page that is staged may have been given out to an entry that does not name it yet.
        let staged =
            self.state.slot_pages.iter().filter_map(|page| page.load(Relaxed).checked_sub(1));
        for page in named.iter().map(|&(_, page)| page).chain(staged) {
            let record = self.pages.record(&self.state, page);
            // Nor is what a record says of a slot true until the slot says the same: it is free,
            // and others' next.
            let holds =
                |slot: &u32| self.state.slot_pages[*slot as usize].load(Relaxed) == page + 1;
            let record = record.with_slot(record.slot().filter(holds));
            self.pages.set_record(&self.state, page, record.with_refs(0));
        }
        for (key, page) in named {
            self.pages.recount(&self.state, page, key);
        }
    }

    /// Counts pages in memory and pages being fetched, as the tables say.
    fn count_as_noted(&mut self) {
        for space in 0..self.spaces.len() {
            for first in self.tables.chunks_in(space, ALL_PAGES) {
                for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                    match self.get(key).place() {
                        Place::Resident => self.count_in(key, Installed::Demand),
                        Place::Fetching => self.fetching += 1,
                        Place::Zero | Place::Out => {}
                    }
                }
            }
        }
    }

    /// Nothing is in memory or on its way, until it is found to be.
    fn forget_counts(&mut self) {
        self.spaces.iter_mut().flatten().for_each(|space| space.resident = 0);
        (self.resident, self.fetching) = (0, 0);
        self.order = hecaton_policy::evict::default();
    }

    fn all_named_pages(&mut self) -> Vec<(Key, u64)> {
        let mut named = Vec::new();
        for space in (0..self.spaces.len()).chain([IMAGE_SPACE]) {
            for first in self.tables.chunks_in(space, ALL_PAGES) {
                for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                    named.extend(self.get(key).space_page().map(|page| (key, page)));
                }
            }
        }
        named
    }

    /// Pages and generation that donors must hold of each segment with stored pages.
    pub(crate) fn stored_segments(&mut self) -> BTreeMap<u64, Expected> {
        let named = self.all_named_pages();
        let is_stored = |page: &u64| self.pages.record(&self.state, *page).is_stored();
        // After a fork several entries name one page.
        let stored: BTreeSet<u64> = named.iter().map(|(_, page)| *page).filter(is_stored).collect();
        let mut expected = BTreeMap::new();
        for segment in stored.iter().map(|page| page / SEGMENT_PAGES) {
            let generation = self.state.generation(segment);
            let known = expected.entry(segment).or_insert(Expected { pages: 0, generation });
            known.pages += 1;
        }
        expected
    }

    fn adopt_staging(&mut self) {
        let batch: Vec<(Key, u32)> =
            self.state.batch.items().filter_map(|(_, key, slot)| Some((Key(key), slot?))).collect();
        for (key, slot) in batch {
            // Not settled: whatever is said of the slot elsewhere, it is this page's.
            let entry = self.get(key);
            if entry.is_busy() && entry.place() == Place::Resident && self.staging.reserve(slot) {
                self.unsettled.insert(key, slot);
            }
        }
        for slot in 0..STAGING_SLOTS as u32 {
            let holds = &self.state.slot_pages[slot as usize];
            let Some(page) = holds.load(Relaxed).checked_sub(1) else { continue };
            let record = self.pages.record(&self.state, page);
            let names_it = record.refs() > 0 && record.slot() == Some(slot);
            if names_it && self.staging.is_free(slot) {
                self.staging.adopt(slot, record.is_stored());
                continue;
            }
            holds.store(0, Relaxed);
            if names_it {
                let unstaged = record.with_slot(None).with_stored(false);
                self.pages.set_record(&self.state, page, unstaged);
            }
        }
    }

    /// Restores the drops that the helper was told of, and that the kernel may still report.
    fn restore_own_drop(&mut self) {
        let batch = &self.state.batch;
        let dropping = batch.items().filter(|&(item, ..)| batch.is_dropping(item));
        self.own_drop = dropping.map(|(_, key, _)| (Key(key), 0)).collect();
    }

    fn finish_own_drop(&mut self) {
        let reported = std::mem::take(&mut self.own_drop);
        for (key, _) in reported.into_iter().filter(|&(_, reports)| reports > 1) {
            self.discard(key);
        }
    }

    /// Brings tables and truth together. After the journal, and after every helper has done what it
    /// was told; before anything else is served.
    pub(crate) fn reconcile(&mut self) -> Unwritten {
        self.reconcile_with(&mut |space, first| space.mapped(first.vpn(), CHUNK_PAGES as usize))
    }

    /// The same, by what `look` sees of a chunk in memory.
    fn reconcile_with(&mut self, look: &mut Look<'_>) -> Unwritten {
        self.finish_own_drop();
        self.give_image();
        let mut contents = self.batch_contents();
        self.forget_counts();
        for index in 0..self.spaces.len() {
            let Some(space) = self.spaces[index].as_mut() else { continue };
            // A program that was being made ready has had no answer, and asks again.
            space.gone |= space.stage == Stage::Preparing;
            self.reconcile_space(index, look, &mut contents);
        }
        self.state.batch.end();
        for slot in contents.into_values() {
            self.staging.forget(&self.state, slot);
        }
        self.tear_down_gone();
        self.unwritten()
    }

    /// Pages of the unfinished batch that are not in the program any more, by slot.
    fn batch_contents(&mut self) -> HashMap<Key, u32> {
        let mut contents = std::mem::take(&mut self.unsettled);
        let items: Vec<Key> = self.state.batch.items().map(|(_, key, _)| Key(key)).collect();
        let mut place = 0;
        for (i, &key) in items.iter().enumerate() {
            if i > 0 && items[i - 1].space() != key.space() {
                place = 0;
            }
            if self.state.batch.is_left_out(i) {
                continue;
            }
            place += 1;
            let entry = self.get(key);
            let unsettled = entry.is_busy() && entry.place() == Place::Resident;
            if unsettled
                && !contents.contains_key(&key)
                && let Some(slot) = self.copy_from_area(key, place - 1)
            {
                contents.insert(key, slot);
            }
        }
        contents
    }

    /// The page was moved to the area but not copied.
    fn copy_from_area(&mut self, key: Key, place: usize) -> Option<u32> {
        let helper = self.helper(key.space()).filter(|helper| helper.area != 0)?;
        let space = self.space(key.space())?;
        let vpn = (helper.area >> 12) + place as u64;
        let pid = space.pid?;
        // A missing page of the area would make the read wait for ever.
        if !space.mapped(vpn, 1).ok()?[0].present {
            return None;
        }
        let slot = self.take_slot()?;
        let to = libc::iovec { iov_base: self.state.slot(slot).cast(), iov_len: PAGE_SIZE };
        let from = libc::iovec { iov_base: (vpn << 12) as *mut _, iov_len: PAGE_SIZE };
        // SAFETY: the slot was taken.
        let read = unsafe { remote::read(pid, &[to], &[from]) };
        read.then_some(slot)
    }

    fn reconcile_space(
        &mut self,
        index: usize,
        look: &mut Look<'_>,
        contents: &mut HashMap<Key, u32>,
    ) {
        for first in self.tables.chunks_in(index, ALL_PAGES) {
            let space = self.spaces[index].as_mut().expect("checked by the caller");
            // A child that has not attached is compared with its memory when it attaches. An ended
            // address space is counted by its entries, and given up as a whole.
            let is_child = matches!(space.stage, Stage::Forking { .. });
            let known = if space.gone || is_child {
                Vec::new()
            } else {
                look(space, first).unwrap_or_default()
            };
            space.gone |= known.is_empty() && !is_child;
            for i in 0..CHUNK_PAGES {
                let key = first.plus(i);
                let mapped = known.get(i as usize).copied();
                self.reconcile_page(key, mapped, contents);
            }
        }
        let space = self.spaces[index].as_ref().expect("checked by the caller");
        let uffd = space.uffd;
        for span in space.guest.as_ref().map(Ram::spans).unwrap_or_default() {
            // Pages that were filled and not noted, in chunks that have no entry yet.
            if self.discover_pages(index, Range { start: span.start, len: span.len }).is_err() {
                self.fail("guest RAM cannot be looked at".into());
            }
        }
        // Threads that waited for the predecessor fault again.
        let _ = uffd.wake(LOWEST, HIGHEST - LOWEST);
    }

    fn reconcile_page(
        &mut self,
        key: Key,
        mapped: Option<Mapped>,
        contents: &mut HashMap<Key, u32>,
    ) {
        let entry = self.get(key);
        let clear = entry.with_busy(false).with_awaited(false);
        let present = mapped.map_or(entry.place() == Place::Resident, |mapped| mapped.present);
        let protected = mapped.map_or(Some(true), |mapped| mapped.protected);
        if present {
            if entry.place() == Place::Zero {
                // Filled and not noted, or not ours (a stack, the helper's memory): housekeeping
                // lists what is registered and finds the former.
                return self.set(key, clear);
            }
            // Where the kernel does not tell, an entry is dirty before its page's protection is
            // lifted; and a page that is protected and dirty costs its next writer one fault.
            let dirty =
                entry.place() != Place::Resident || entry.is_dirty() || protected == Some(false);
            if dirty
                && protected == Some(true)
                && let Some(uffd) = self.uffd(key.space())
            {
                let _ = uffd.unprotect(key.address(), PAGE_SIZE as u64);
            }
            self.set(key, clear.with_place(Place::Resident).with_dirty(dirty));
            return self.count_in(key, Installed::Demand);
        }
        match (entry.place(), contents.remove(&key)) {
            (Place::Resident, Some(slot)) => self.stage_recovered(key, clear, slot),
            (Place::Resident, None) if entry.is_busy() && entry.is_clean_resident() => {
                self.set(key, clear.with_place(Place::Out));
            }
            (Place::Resident, None) => {
                self.set(key, Entry::ZERO);
                if let Some(page) = entry.space_page() {
                    self.release_page(page);
                }
            }
            (Place::Fetching, _) => {
                self.set(key, clear.with_place(Place::Out).with_dirty(false));
            }
            (Place::Zero | Place::Out, _) => self.set(key, clear),
        }
    }

    fn stage_recovered(&mut self, key: Key, entry: Entry, slot: u32) {
        // SAFETY: the slot was taken for this page.
        let bytes = unsafe { std::slice::from_raw_parts(self.state.slot(slot), PAGE_SIZE) };
        if let Some(old) = entry.space_page() {
            self.release_page(old);
        }
        let Content::Sum(sum) = examine(bytes) else {
            self.staging.forget(&self.state, slot);
            return self.set(key, Entry::ZERO);
        };
        self.stage_out(key, entry.with_tag(self.clock.stamp()), slot, sum);
    }

    fn unwritten(&self) -> Unwritten {
        let holds = |slot: usize| self.state.slot_pages[slot].load(Relaxed).checked_sub(1);
        (0..STAGING_SLOTS)
            .filter_map(|slot| Some((slot as u32, holds(slot)?)))
            .map(|(slot, page)| (slot, page, self.pages.record(&self.state, page)))
            .filter(|(.., record)| !record.is_stored())
            .map(|(slot, page, record)| (page, record.sum(), slot))
            .collect()
    }
}

/// Where a program's memory can be.
const LOWEST: u64 = 64 << 10;
#[cfg(target_arch = "x86_64")]
const HIGHEST: u64 = (1 << 47) - PAGE_SIZE as u64;
#[cfg(not(target_arch = "x86_64"))]
const HIGHEST: u64 = 1 << 48;

#[cfg(test)]
mod tests;
