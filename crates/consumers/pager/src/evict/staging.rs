//! Pages on their way out, and those lately gone.
//!
//! An evicted page is copied here, leaves the program, and is served from here until a donor has
//! acknowledged it. After that the copy stays until its slot is needed: a page that is wanted again
//! soon costs no round trip, and tells the eviction order that it was evicted too early. The one
//! page of each prefetched window that shows whether the program follows waits here too.

use crate::state::space_pages::SpacePages;
use crate::state::{STAGING_SLOTS, State};
use hecaton_memory::PageSum;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Release;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    Free,
    /// Given out, not yet published: filled by who took it.
    Taken,
    /// Holds what no donor has acknowledged yet.
    Unwritten,
    /// Holds what the donors hold too.
    Clean,
}

/// The staging slots.
pub(crate) struct Staging {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Clean slots, oldest first; validated when taken.
    clean: VecDeque<u32>,
    clean_count: usize,
}

impl Staging {
    pub(crate) fn new() -> Staging {
        Staging {
            slots: vec![Slot::Free; STAGING_SLOTS],
            free: (0..STAGING_SLOTS as u32).rev().collect(),
            clean: VecDeque::with_capacity(2 * STAGING_SLOTS),
            clean_count: 0,
        }
    }

    /// Slots that can be taken at this moment.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.clean_count
    }

    /// Slots whose contents no donor has acknowledged yet.
    pub(crate) fn unwritten(&self) -> usize {
        STAGING_SLOTS - self.free.len() - self.clean_count
    }

    /// A slot to fill; the page that it held last, if any, is only at its donor from now on.
    pub(crate) fn take(&mut self, state: &State, pages: &SpacePages) -> Option<u32> {
        let slot = self.free.pop().or_else(|| {
            while let Some(slot) = self.clean.pop_front() {
                if self.slots[slot as usize] == Slot::Clean {
                    self.clean_count -= 1;
                    let page = state.slot_pages[slot as usize]
                        .load(std::sync::atomic::Ordering::Relaxed)
                        - 1;
                    let record = pages.record(state, page);
                    debug_assert_eq!(record.slot(), Some(slot));
                    pages.set_record(state, page, record.with_slot(None));
                    state.slot_pages[slot as usize].store(0, Release);
                    return Some(slot);
                }
            }
            None
        })?;
        self.slots[slot as usize] = Slot::Taken;
        Some(slot)
    }

    /// The slot was filled with the contents of `page`. `stored`: the donors hold them already.
    /// The page's record must name the slot.
    pub(crate) fn publish(&mut self, state: &State, slot: u32, page: u64, stored: bool) {
        debug_assert_eq!(self.slots[slot as usize], Slot::Taken);
        state.slot_pages[slot as usize].store(page + 1, Release);
        self.slots[slot as usize] = Slot::Unwritten;
        if stored {
            self.clean(slot);
        }
    }

    fn clean(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::Clean;
        self.clean_count += 1;
        if self.clean.len() >= 2 * STAGING_SLOTS {
            let slots = &self.slots;
            self.clean.retain(|&slot| slots[slot as usize] == Slot::Clean);
        }
        self.clean.push_back(slot);
    }

    /// The donors have acknowledged what was in the slot, and `sum` is that of what they were sent.
    /// If the page has gone or has newer contents elsewhere, the slot is free.
    pub(crate) fn written(
        &mut self,
        state: &State,
        pages: &SpacePages,
        slot: u32,
        page: u64,
        sum: PageSum,
    ) {
        debug_assert_eq!(self.slots[slot as usize], Slot::Unwritten);
        let record = pages.record(state, page);
        if record.slot() == Some(slot) && record.refs() > 0 {
            // Both at once: whoever finds the page stored finds the sum of what is stored.
            pages.set_record(state, page, record.with_stored(true).with_sum(sum));
            self.clean(slot);
        } else {
            self.give_back(state, slot);
        }
    }

    /// Nobody needs what is in the slot. One that is still being written is freed when that ends.
    pub(crate) fn forget(&mut self, state: &State, slot: u32) {
        match self.slots[slot as usize] {
            Slot::Clean => {
                self.clean_count -= 1;
                self.give_back(state, slot);
            }
            Slot::Taken => self.give_back(state, slot),
            Slot::Unwritten | Slot::Free => {}
        }
    }

    fn give_back(&mut self, state: &State, slot: u32) {
        state.slot_pages[slot as usize].store(0, Release);
        self.slots[slot as usize] = Slot::Free;
        self.free.push(slot);
    }

    /// Whether nothing is in the slot.
    pub(crate) fn is_free(&self, slot: u32) -> bool {
        self.slots[slot as usize] == Slot::Free
    }

    /// For a successor: takes this very slot, if it is free.
    pub(crate) fn reserve(&mut self, slot: u32) -> bool {
        let free = self.is_free(slot);
        if free {
            self.free.retain(|&other| other != slot);
            self.slots[slot as usize] = Slot::Taken;
        }
        free
    }

    /// For a successor: the slot holds the contents of a page.
    pub(crate) fn adopt(&mut self, slot: u32, stored: bool) {
        self.free.retain(|&free| free != slot);
        self.slots[slot as usize] = Slot::Unwritten;
        if stored {
            self.clean(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::record::Record;
    use crate::state::tables::Key;
    use std::os::fd::BorrowedFd;

    /// Pages that leave sealed have another sum at the donors than in their slots.
    #[test]
    fn what_is_stored_has_the_sum_of_what_was_sent() {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        let state = State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap().0;
        let (mut pages, mut staging) = (SpacePages::new(), Staging::new());
        let page = pages.allocate(&state, Key::new(0, 5), None);
        let stage = |staging: &mut Staging, pages: &SpacePages, sum| {
            let slot = staging.take(&state, pages).unwrap();
            let record = Record::FREE.with_refs(1).with_slot(Some(slot)).with_sum(sum);
            pages.set_record(&state, page, record);
            staging.publish(&state, slot, page, false);
            slot
        };
        let slot = stage(&mut staging, &pages, 7);
        staging.written(&state, &pages, slot, page, 70);
        let record = pages.record(&state, page);
        assert_eq!((record.is_stored(), record.sum()), (true, 70));
        // An acknowledgement of earlier contents leaves the record of later contents alone.
        let earlier = stage(&mut staging, &pages, 8);
        let later = stage(&mut staging, &pages, 9);
        staging.written(&state, &pages, earlier, page, 80);
        let record = pages.record(&state, page);
        assert_eq!((record.is_stored(), record.slot(), record.sum()), (false, Some(later), 9));
    }
}
