//! What a simulated donor stores, in memory and in the file that it parks in. Both really hold the
//! values, so that a page which is read from the wrong one of them shows.

use crate::network::Stored;
use hecaton_donor::extents::table::LentExtent;
use hecaton_memory::ExtentId;
use std::collections::BTreeMap;
use std::ops::Range;

/// How long it takes to bring an extent to the disk, or back.
const MOVE_MS: u64 = 50;

#[derive(Default)]
pub(crate) struct Memory {
    /// By page of the donor's memory. What is in neither is zero.
    memory: BTreeMap<u64, Stored>,
    file: BTreeMap<u64, Stored>,
    moving: Option<Moving>,
}

/// An extent on its way, with the pages that were read of it and that nobody has changed since.
struct Moving {
    lent: LentExtent,
    to_file: bool,
    noted: BTreeMap<u64, Stored>,
    done_ms: u64,
}

/// What a move has come to.
pub(crate) struct Moved {
    pub(crate) lent: LentExtent,
    pub(crate) to_file: bool,
}

impl Memory {
    pub(crate) fn get(&self, page: u64) -> Option<&Stored> {
        self.file.get(&page).or_else(|| self.memory.get(&page))
    }

    /// For what goes bad where it is.
    pub(crate) fn get_mut(&mut self, page: u64) -> Option<&mut Stored> {
        self.file.get_mut(&page).or_else(|| self.memory.get_mut(&page))
    }

    /// A page is written, and so is in memory.
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

    /// Begins to bring an extent to the file, or to memory.
    pub(crate) fn begin(&mut self, lent: LentExtent, to_file: bool, now_ms: u64) {
        let from = if to_file { &self.memory } else { &self.file };
        let noted = from.range(lent.pages()).map(|(page, stored)| (*page, *stored)).collect();
        self.moving = Some(Moving { lent, to_file, noted, done_ms: now_ms + MOVE_MS });
    }

    /// Ends what was begun, if it is time and the extent still is there. Nothing has moved if the disk
    /// has failed meanwhile, or is full.
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
            // As it was read, and so that what was changed since would show.
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
