//! Tracks where each page of a shared-memory file is.
//!
//! Each page has an entry, as pages of programs do. The entry is resident while the pager takes the
//! page to be in the kernel's page cache. It names a space page if contents other than zeros were
//! written. Until the kernel has written a dirty page back, only the kernel has its contents.

use crate::core::Core;
use crate::fault::Content;
use crate::state::entry::{Entry, Place};
use crate::state::record::Record;
use crate::state::tables::Key;
use crate::state::{CHUNK_PAGES, FILE_SPACES};
use hecaton_memory::PAGE_SIZE;
use hecaton_policy::evict::Installed;
use std::ops::Range;

/// Longest file, in pages of 4 KiB: 2 PiB.
pub(crate) const MAX_PAGES: u64 = 1 << 39;

/// Files begin at the second chunk: the tables take chunk 0 of a space for one that was never used
/// (see [`crate::state::tables`]).
const FIRST_PAGE: u64 = CHUNK_PAGES;

pub(crate) fn key_of(file: usize, page: u64) -> Key {
    Key::new(FILE_SPACES + file, FIRST_PAGE + page)
}

/// The file, and the page in it. `None` if the key belongs to no file.
pub(crate) fn page_of(key: Key) -> Option<(usize, u64)> {
    Some((key.space().checked_sub(FILE_SPACES)?, key.vpn() - FIRST_PAGE))
}

/// Where the pager has the contents of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    Zeros,
    /// In this staging slot.
    Staged(u32),
    /// Only at donors, with the record of the space page.
    Away {
        page: u64,
        record: Record,
    },
}

impl Core {
    pub(crate) fn find_of_file(&mut self, key: Key) -> Found {
        let Some(page) = self.get(key).space_page() else { return Found::Zeros };
        let record = self.pages.record(&self.state, page);
        record.slot().map_or(Found::Away { page, record }, Found::Staged)
    }

    /// Counts the page as resident: the kernel has it in its page cache from now on.
    pub(crate) fn cached(&mut self, key: Key) {
        let entry = self.get(key);
        let how = match entry.place() {
            Place::Resident if entry.is_busy() => {
                // Kept, or read or written before the keeper reported its eviction.
                self.files.leaving -= 1;
                self.set(key, entry.with_busy(false));
                Installed::Rescued
            }
            Place::Resident => return,
            Place::Zero => self.count_cached(key, entry, Installed::ZeroFill),
            Place::Out | Place::Fetching => {
                let distance = self.clock.distance(entry.tag());
                self.count_cached(key, entry, Installed::Refault { distance })
            }
        };
        self.order.installed(self.tables.place_of(&self.state, key), how);
    }

    fn count_cached(&mut self, key: Key, entry: Entry, how: Installed) -> Installed {
        self.set(key, entry.with_place(Place::Resident));
        self.resident += 1;
        how
    }

    /// Counts a page as evicted, unless it was read or written since the order.
    pub(super) fn dropped(&mut self, key: Key) {
        let entry = self.get(key);
        if entry.place() != Place::Resident || !entry.is_busy() {
            return;
        }
        self.files.leaving -= 1;
        self.resident -= 1;
        self.stats.pages_evicted += 1;
        let place = if entry.space_page().is_some() { Place::Out } else { Place::Zero };
        let stamp = self.clock.stamp();
        self.set(key, entry.with_busy(false).with_place(place).with_tag(stamp));
    }

    /// The keeper reports that the page is in the page cache. If it counts as evicted, an earlier
    /// report was of before it came back. If it is zero, it was cut meanwhile.
    pub(super) fn kept(&mut self, key: Key) {
        if self.get(key).place() != Place::Zero {
            self.cached(key);
        }
    }

    /// Stages new contents of a page. Returns false, and changes nothing, if no slot is free.
    /// `is_whole`: if the pager is killed now, the resent request writes the whole page again.
    /// Otherwise the old contents must stay until the new ones are staged.
    pub(crate) fn write_file(
        &mut self,
        key: Key,
        bytes: &[u8],
        content: &Content,
        is_whole: bool,
    ) -> bool {
        let entry = self.get(key);
        let old = entry.space_page();
        let Content::Sum(sum) = *content else {
            self.set(key, entry.with_space_page(None));
            old.into_iter().for_each(|page| self.release_page(page));
            return true;
        };
        let Some(slot) = self.take_slot() else { return false };
        // SAFETY: the slot was taken, so nothing else uses its 4096 bytes; as many are given.
        unsafe { self.state.slot(slot).copy_from(bytes[..PAGE_SIZE].as_ptr(), PAGE_SIZE) };
        let in_place = old.filter(|_| is_whole);
        let page = in_place.unwrap_or_else(|| self.put(|core| core.new_page(key)));
        let record = self.pages.record(&self.state, page);
        let older = record.slot();
        // In this order: a successor must not take a slot for free that a record names.
        self.staging.publish(&self.state, slot, page, false);
        let record = record.with_slot(Some(slot)).with_sum(sum).with_stored(false);
        self.pages.set_record(&self.state, page, record);
        older.into_iter().for_each(|older| self.staging.forget(&self.state, older));
        self.set(key, entry.with_space_page(Some(page)));
        if in_place.is_none() {
            old.into_iter().for_each(|page| self.release_page(page));
        }
        self.files.to_write.push((page, sum, slot));
        true
    }

    /// Makes pages of the file zero. The kernel drops them from its page cache without an order.
    pub(crate) fn cut_file(&mut self, file: usize, pages: Range<u64>) {
        let keys = key_of(file, pages.start)..key_of(file, pages.end);
        for first in self.tables.chunks_in(keys.start.space(), keys.start.vpn()..keys.end.vpn()) {
            let chunk = first..first.plus(CHUNK_PAGES);
            let part = chunk.start.max(keys.start)..chunk.end.min(keys.end);
            for key in (part.start.0..part.end.0).map(Key) {
                self.forget_page_of_file(key);
            }
            if part == chunk {
                self.tables.free_chunk(&self.state, first);
            }
        }
    }

    fn forget_page_of_file(&mut self, key: Key) {
        let entry = self.get(key);
        if entry.place() == Place::Resident {
            self.resident -= 1;
            if entry.is_busy() {
                self.files.leaving -= 1;
            } else {
                self.order.removed(self.tables.place_of(&self.state, key));
            }
        }
        self.set(key, Entry::ZERO);
        if let Some(page) = entry.space_page() {
            self.release_page(page);
        }
    }

    /// Removes a file that has neither a name nor a handle.
    pub(crate) fn remove_file(&mut self, file: usize) {
        self.cut_file(file, 0..MAX_PAGES);
        self.files.table.remove(&self.state, file);
    }

    /// For a successor: removes unreachable files, and counts resident pages of the others.
    pub(crate) fn recount_files(&mut self) {
        for file in self.files.table.unreachable() {
            self.remove_file(file);
        }
        let files: Vec<usize> = self.files.table.used().collect();
        for file in files {
            for first in self.tables.chunks_in(FILE_SPACES + file, crate::state::tables::ALL_PAGES)
            {
                for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                    let entry = self.get(key);
                    if entry.place() == Place::Resident {
                        self.set(key, entry.with_busy(false));
                        self.resident += 1;
                        let place = self.tables.place_of(&self.state, key);
                        self.order.installed(place, Installed::Demand);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::examine;
    use crate::files::table::Owner;
    use crate::programs::inherit::tests::pager;

    const OWNER: Owner = Owner { mode: 0o100_600, user: 0, group: 0 };

    fn write(core: &mut Core, key: Key, byte: u8) -> bool {
        let bytes = [byte; PAGE_SIZE];
        core.write_file(key, &bytes, &examine(&bytes), true)
    }

    #[test]
    fn write_file_keeps_contents_until_the_file_is_cut() {
        let mut core = pager();
        let (file, handle) = core.files.table.create(&core.state, None, OWNER, 2).unwrap();
        let keys = [0, 1, 700].map(|page| key_of(file, page));
        assert_eq!(page_of(keys[2]), Some((file, 700)));
        for key in keys {
            core.cached(key);
            assert!(write(&mut core, key, 7));
        }
        assert_eq!((core.resident, core.pages.in_use()), (3, 3));
        assert!(write(&mut core, keys[0], 8), "in place");
        assert!(write(&mut core, keys[1], 0), "zeros free the space page");
        assert_eq!((core.pages.in_use(), core.files.to_write.len()), (2, 4));
        let Found::Staged(slot) = core.find_of_file(keys[0]) else { panic!("it is staged") };
        // SAFETY: a slot of this test's state.
        assert_eq!(unsafe { *core.state.slot(slot) }, 8);
        core.cut_file(file, 0..512);
        assert_eq!((core.find_of_file(keys[0]), core.resident), (Found::Zeros, 1));
        assert_eq!(core.files.table.close(&core.state, handle), Some(file));
        core.remove_file(file);
        assert_eq!((core.pages.in_use(), core.resident), (0, 0));
    }

    #[test]
    fn page_stays_resident_if_read_while_it_is_evicted() {
        let mut core = pager();
        let (file, _) = core.files.table.create(&core.state, None, OWNER, 2).unwrap();
        let (one, other) = (key_of(file, 0), key_of(file, 1));
        for key in [one, other] {
            core.cached(key);
            write(&mut core, key, 7);
            let entry = core.get(key);
            core.set(key, entry.with_busy(true));
            core.files.leaving += 1;
        }
        core.cached(one);
        core.dropped(one);
        core.dropped(other);
        assert_eq!((core.resident, core.files.leaving), (1, 0));
        assert_eq!([one, other].map(|key| core.get(key).place()), [Place::Resident, Place::Out]);
    }

    #[test]
    fn recount_files_counts_cached_pages_as_resident() {
        let mut core = pager();
        let (file, _) = core.files.table.create(&core.state, None, OWNER, 2).unwrap();
        let key = key_of(file, 5);
        core.cached(key);
        let entry = core.get(key);
        core.set(key, entry.with_busy(true));
        core.files.leaving = 1;
        core.resident = 0;
        core.files = crate::files::held::Files::load(&core.state);
        core.recount_files();
        assert_eq!((core.resident, core.files.leaving, core.get(key).is_busy()), (1, 0, false));
    }
}
