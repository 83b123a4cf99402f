//! Handles hypervisors that free or unmap parts of guest RAM.
//!
//! They free memory by balloon, free page reporting, or unplug by virtio-mem. To free shared
//! memory, they punch the pages out of the file, then drop their mapping (`MADV_DONTNEED`): so do
//! QEMU's `ram_block_discard_range` and Cloud Hypervisor's balloon. The kernel reports only the
//! second step, and a bare `MADV_DONTNEED`, which keeps a shared file's contents, looks the same.
//! So the file decides: a page that is still in it was not freed. An evicted page is in no file and
//! counts as freed; a hypervisor that dropped its mapping without freeing would find it zero.

use super::Ram;
use super::memory_file::MemoryFile;
use crate::core::{Core, close};
use crate::process::guard::ram_label;
use crate::programs::address_space::AddressSpace;
use crate::state::CHUNK_PAGES;
use crate::state::entry::Place;
use crate::state::tables::Key;
use std::ops::Range;

impl Core {
    /// Discards pages of guest RAM that were freed: those that are no longer in their file.
    pub(crate) fn guest_removed(&mut self, space: usize, pages: Range<u64>) {
        // Private memory is reported before it is emptied, and no file shows whether it was.
        let in_files = |space: &AddressSpace| space.guest.as_ref().is_some_and(Ram::has_files);
        let in_files = self.spaces[space].as_ref().is_some_and(in_files);
        self.give_up_pages(space, pages, in_files);
    }

    /// Regions, or parts of them, are not mapped any more.
    pub(crate) fn guest_unmapped(&mut self, space: usize, pages: Range<u64>) {
        let addresses = pages.start << 12..pages.end << 12;
        self.give_up_pages(space, pages, false);
        let Some(space_of) = self.spaces[space].as_mut() else { return };
        let Some(ram) = space_of.guest.as_mut() else { return };
        let (parts, files) = ram.remove(&self.state, space, &addresses);
        for (file, range) in parts {
            // The hypervisor may hold the file without mapping it, but the pager owns its contents,
            // and they are gone. After an error, the memory only stays until the file is closed.
            let _ = file.punch(range);
        }
        self.guard.release_labels(files.iter().map(|held| ram_label(held.serial)).collect());
        self.unmapped_files.extend(files.into_iter().map(|held| held.file));
        self.close_files();
    }

    /// Closes files that no region names, unless the evictor may be about to use one: it would
    /// punch another file under the same number.
    pub(crate) fn close_files(&mut self) {
        if self.batch.is_empty() {
            self.unmapped_files.drain(..).for_each(|MemoryFile(fd)| close(fd));
        }
    }

    /// Discards pages that were punched out without an event.
    ///
    /// A hypervisor that only punches is not seen at once: its memory files then hold less than the
    /// tables say. While no batch is in flight, all resident pages are in the files.
    pub(crate) fn notice_holes(&mut self, space: usize) {
        if !self.batch.is_empty() {
            return;
        }
        let Some(space_of) = self.space(space) else { return };
        let Some(ram) = &space_of.guest else { return };
        let held = ram.allocated_bytes() >> 12;
        if ram.has_files() && held < space_of.resident {
            for span in ram.spans() {
                let pages = span.start >> 12..(span.start + span.len) >> 12;
                self.give_up_resident_holes(space, pages);
            }
        }
    }

    fn give_up_resident_holes(&mut self, space: usize, pages: Range<u64>) {
        self.each_page(space, pages, |core, key, there| {
            if core.get(key).place() == Place::Resident && !there {
                core.stats.pages_discarded += 1;
                core.discard(key);
            }
        });
    }

    fn give_up_pages(&mut self, space: usize, pages: Range<u64>, unless_there: bool) {
        self.each_page(space, pages, |core, key, there| {
            let entry = core.get(key);
            // A busy page counts as freed: a free during its eviction is right, whatever the file
            // holds at this moment.
            let kept =
                unless_there && there && entry.place() == Place::Resident && !entry.is_busy();
            if entry.place() != Place::Zero && !kept {
                core.stats.pages_discarded += 1;
                core.discard(key);
            }
        });
    }

    /// Calls `each` for every page that has an entry, with whether it is in its file.
    fn each_page(
        &mut self,
        space: usize,
        pages: Range<u64>,
        mut each: impl FnMut(&mut Core, Key, bool),
    ) {
        for first in self.tables.chunks_in(space, pages.clone()) {
            let known = self.spaces[space].as_mut().map(|space_of| {
                space_of.mapped(first.vpn(), CHUNK_PAGES as usize).unwrap_or_default()
            });
            let known = known.unwrap_or_default();
            let mut used = false;
            for i in 0..CHUNK_PAGES {
                let key = first.plus(i);
                if pages.contains(&key.vpn()) {
                    each(self, key, known.get(i as usize).is_some_and(|page| page.present));
                }
                used |= self.get(key) != crate::state::entry::Entry::ZERO;
            }
            if !used {
                self.tables.free_chunk(&self.state, first);
            }
        }
    }
}
