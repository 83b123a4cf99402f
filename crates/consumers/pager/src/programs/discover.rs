//! Pages that are in memory before the pager knows of them: they were written before their range
//! was registered, or filled by a pager that was killed before it had noted it.

use crate::core::Core;
use crate::programs::address_space::Mapped;
use crate::state::entry::{Entry, Place};
use crate::state::tables::Key;
use hecaton_policy::evict::Installed;
use hecaton_uffd::handover::Range;
use std::io;

impl Core {
    /// Takes note of what is in the range already. An error means that the process has ended.
    pub(crate) fn discover_pages(&mut self, index: usize, range: Range) -> io::Result<()> {
        let mapped = self.list_pages(index, range)?;
        self.note_pages(index, range, &mapped);
        Ok(())
    }

    /// The same of a program that runs. False if it is changing its mappings just now: pages that
    /// it has moved into the range may be known under the address that they come from, and the
    /// event that says so would be taken for another move.
    pub(crate) fn discover_pages_of_running(
        &mut self,
        index: usize,
        range: Range,
    ) -> io::Result<bool> {
        let mapped = self.list_pages(index, range)?;
        // A change that had begun before the pages were listed is still to be read of.
        let is_changing = self.uffd(index).is_some_and(|uffd| uffd.is_changing());
        if !is_changing {
            self.note_pages(index, range, &mapped);
        }
        Ok(!is_changing)
    }

    fn list_pages(&mut self, index: usize, range: Range) -> io::Result<Vec<Mapped>> {
        let space = self.spaces[index].as_mut().expect("named by the caller");
        space.mapped(range.start >> 12, (range.len >> 12) as usize)
    }

    fn note_pages(&mut self, index: usize, range: Range, mapped: &[Mapped]) {
        for (vpn, page) in (range.start >> 12..).zip(mapped) {
            let key = Key::new(index, vpn);
            if page.present && self.get(key) == Entry::ZERO {
                self.set(key, Entry::ZERO.with_place(Place::Resident).with_dirty(true));
                self.count_in(key, Installed::Demand);
            }
        }
    }
}
