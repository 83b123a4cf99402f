//! Handles events of programs that free or move memory.
//!
//! The kernel keeps the program's thread waiting until the event is read, and refuses to map pages
//! (EAGAIN) until then. Each handler may run twice on the same event (see `journal`).

use crate::core::Core;
use crate::state::CHUNK_PAGES;
use crate::state::entry::{Entry, Place};
use crate::state::tables::Key;
use hecaton_policy::evict::Installed;
use std::ops::Range;

impl Core {
    /// `madvise` has emptied (or is about to empty) a range: its pages are zero from now on.
    pub(crate) fn removed(&mut self, space: usize, start: u64, end: u64) {
        let pages = start >> 12..end >> 12;
        match self.is_guest(space) {
            true => self.guest_removed(space, pages),
            false => {
                self.emptied.note(space, pages.clone());
                self.discard_range(space, pages, true);
            }
        }
    }

    /// A range is not mapped any more.
    pub(crate) fn unmapped(&mut self, space: usize, start: u64, end: u64) {
        if self.is_guest(space) {
            return self.guest_unmapped(space, start >> 12..end >> 12);
        }
        if let Some(space) = self.space(space) {
            space.forget_mappings();
            space.forget_registered(start, end);
        }
        self.discard_range(space, start >> 12..end >> 12, false);
    }

    fn discard_range(&mut self, space: usize, pages: Range<u64>, perhaps_own: bool) {
        for first in self.tables.chunks_in(space, pages.clone()) {
            let chunk = first.vpn()..first.vpn() + CHUNK_PAGES;
            let mut used = false;
            for vpn in chunk.clone() {
                let key = Key::new(space, vpn);
                let reports = self.own_drop.get_mut(&key).filter(|_| perhaps_own);
                match reports {
                    _ if !pages.contains(&vpn) => {}
                    Some(reports) => *reports += 1,
                    None => self.discard(key),
                }
                used |= self.get(key) != Entry::ZERO;
            }
            if !used {
                self.tables.free_chunk(&self.state, first);
            }
        }
    }

    /// `mremap` has moved `len` bytes.
    pub(crate) fn remapped(&mut self, space: usize, from: u64, to: u64, len: u64) {
        if let Some(space) = self.space(space) {
            space.forget_mappings();
            space.forget_registered(from, from + len);
            // The kernel keeps the moved range registered.
            space.remember_registered(hecaton_uffd::handover::Range { start: to, len });
        }
        self.move_entries(space, from, to, len);
    }

    /// Moves all that is known of one range to another.
    pub(crate) fn move_entries(&mut self, space: usize, from: u64, to: u64, len: u64) {
        let (from, to, count) = (from >> 12, to >> 12, len >> 12);
        self.emptied.moved(space, from, to, count);
        for first in self.tables.chunks_in(space, from..from + count) {
            for vpn in first.vpn().max(from)..(first.vpn() + CHUNK_PAGES).min(from + count) {
                self.move_entry(Key::new(space, vpn), Key::new(space, vpn - from + to));
            }
        }
    }

    fn move_entry(&mut self, old: Key, new: Key) {
        let mut entry = self.get(old);
        if entry.place() == Place::Zero {
            return self.own_reads.moved(old, new);
        }
        if entry.place() == Place::Fetching {
            // The page that arrives is dropped. A fault at the new address fetches it again.
            self.end_fetch(old);
            entry = entry.with_place(Place::Out).with_awaited(false).with_dirty(false);
        }
        if entry.is_busy() {
            for item in self.batch.iter_mut().filter(|item| item.now_at == old) {
                item.now_at = new;
            }
        } else if entry.place() == Place::Resident {
            let charged = self.spaces[old.space()].as_ref().is_some_and(|space| space.charged);
            if charged {
                self.order.removed(self.tables.place_of(&self.state, old));
                self.order.installed(self.tables.place_of(&self.state, new), Installed::Rescued);
            }
        }
        // Set the new entry first: a kill in between leaves the page in both places, and recovery
        // finds that the old address holds nothing.
        self.set(new, entry);
        if entry.is_busy() {
            self.state.batch.moved(old.0, new.0);
        }
        // The address that the batch has for the page stays busy until the batch is settled. Until
        // then, no mapping that the program makes there is touched.
        let stays_busy = entry.is_busy() && self.batch.iter().any(|item| item.key == old);
        self.set(old, Entry::ZERO.with_busy(stays_busy));
    }
}
