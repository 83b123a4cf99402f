//! Simulates what a donor stores, in memory and in the file that it parks extents in.
//! Both hold real values, so that a page which is read from the wrong one shows.

use crate::network::Stored;
use hecaton_donor::extents::table::LentExtent;
use hecaton_memory::ExtentId;
use std::collections::BTreeMap;
use std::ops::Range;

/// Time to move an extent to the disk or back.
const MOVE_MS: u64 = 50;

#[derive(Default)]
pub(crate) struct Memory {
    /// Keyed by page of the donor's memory. A page in neither map is zero.
    memory: BTreeMap<u64, Stored>,
    file: BTreeMap<u64, Stored>,
    moving: Option<Moving>,
}

/// An extent on its way, with those of its pages that were not written or removed since.
struct Moving {
    lent: LentExtent,
    to_file: bool,
    noted: BTreeMap<u64, Stored>,
    done_ms: u64,
}

/// A finished move.
pub(crate) struct Moved {
    pub(crate) lent: LentExtent,
    pub(crate) to_file: bool,
}

impl Memory {
    pub(crate) fn get(&self, page: u64) -> Option<&Stored> {
        self.file.get(&page).or_else(|| self.memory.get(&page))
    }

    /// For pages that go bad in place.
    pub(crate) fn get_mut(&mut self, page: u64) -> Option<&mut Stored> {
        self.file.get_mut(&page).or_else(|| self.memory.get_mut(&page))
    }

    /// Stores a written page, which is then in memory.
    pub(crate) fn insert(&mut self, page: u64, stored: Stored) {
        self.remove(page);
        self.memory.insert(page, stored);
    }

    pub(crate) fn remove(&mut self, page: u64) {
        self.memory.remove(&page);
        self.file.remove(&page);
        if let Some(moving) = &mut self.moving {
            moving.noted.remove(&page);
        }
    }

    pub(crate) fn written(&self, pages: Range<u64>) -> u32 {
        self.in_memory(pages.clone()) as u32 + self.file.range(pages).count() as u32
    }

    pub(crate) fn in_memory(&self, pages: Range<u64>) -> u64 {
        self.memory.range(pages).count() as u64
    }

    pub(crate) fn file_pages(&self) -> u64 {
        self.file.len() as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.file.is_empty()
    }

    pub(crate) fn is_moving(&self) -> bool {
        self.moving.is_some()
    }

    /// Begins to move an extent to the file or to memory.
    pub(crate) fn begin(&mut self, lent: LentExtent, to_file: bool, now_ms: u64) {
        let from = if to_file { &self.memory } else { &self.file };
        let noted = from.range(lent.pages()).map(|(page, stored)| (*page, *stored)).collect();
        self.moving = Some(Moving { lent, to_file, noted, done_ms: now_ms + MOVE_MS });
    }

    /// Ends the move if it is due and the extent still exists. Nothing moves to the file
    /// if it has less room than the extent needs: the disk is full or has failed.
    pub(crate) fn end(
        &mut self,
        now_ms: u64,
        room: u64,
        is_there: impl Fn(ExtentId) -> bool,
    ) -> Option<Moved> {
        let Moving { lent, to_file, noted, .. } =
            self.moving.take_if(|moving| moving.done_ms <= now_ms)?;
        if !is_there(lent.extent) || to_file && noted.len() as u64 > room {
            return None;
        }
        for (page, read) in noted {
            // Stores the page as it was read, so that a change since then would show.
            let (from, to) = match to_file {
                true => (&mut self.memory, &mut self.file),
                false => (&mut self.file, &mut self.memory),
            };
            from.remove(&page);
            to.insert(page, read);
        }
        Some(Moved { lent, to_file })
    }
}
