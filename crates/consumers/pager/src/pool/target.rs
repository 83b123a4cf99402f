//! The consumer's target: how many pages of the pool it may hold, as the cluster's policy has it.
//!
//! The local limit always holds, and no page is lost, so a target is soft: what must leave local
//! memory and has no place in the pool yet gets one beyond the target, too. It counts as a put that
//! did not succeed, by which the policy learns of the want. (The paper's put fails there, and the
//! guest swaps to its disk; a program here has no other place for a page.) At its target a pager
//! takes no place without need:
//!
//! - *Less is kept free.* Pages leave only when there is a quarter of the usual reserve, so that
//!   those without a place stay local for as long as they can.
//! - *A page is in one place.* What comes home gives its place in the pool up, and so does what is
//!   written to. Else a page that was evicted once would keep its place for as long as the program
//!   has it, so that it could be evicted again without being written; below the target that is what
//!   a place is good for. Linux does the same with swapped pages when swap runs short.
//!
//! So a pager whose program has W pages in all, of which L may be local, comes to its target if
//! that is W - L or more, and otherwise as near as W - L. Evicting pages with a place first was
//! rejected: these are the ones that have just come back.

use crate::core::{Core, reserve};
use crate::state::entry::Place;
use crate::state::tables::Key;

/// At its target a pager keeps so many times less room free for faults and prefetching.
const RESERVE_DIVISOR: u64 = 4;

impl Core {
    /// Takes the node's word: pages that the consumer may hold, or that nothing limits it.
    pub(crate) fn set_target(&mut self, pages: Option<u64>) {
        self.target = pages;
    }

    /// Whether the consumer holds what it may, or more.
    pub(crate) fn is_at_target(&self) -> bool {
        self.target.is_some_and(|target| self.pages.in_use() >= target)
    }

    /// Pages kept free for faults and prefetching.
    pub(crate) fn reserve(&self) -> u64 {
        match self.is_at_target() {
            true => reserve(self.limit) / RESERVE_DIVISOR,
            false => reserve(self.limit),
        }
    }

    /// The page is in local memory, and is to be written out again before it leaves: its place in
    /// the pool is of no use till then.
    pub(crate) fn spare_place(&mut self, key: Key) {
        if !self.is_at_target() {
            return;
        }
        let entry = self.get(key);
        debug_assert!(entry.place() == Place::Resident && !entry.is_clean_resident());
        if let Some(page) = entry.space_page() {
            self.set(key, entry.with_space_page(None));
            self.release_page(page);
        }
    }

    /// A page is put into the pool: `takes_place` gives it one, and says which. Counts what is
    /// within the target.
    pub(crate) fn put(&mut self, takes_place: impl FnOnce(&mut Core) -> u64) -> u64 {
        let (was_at_target, before) = (self.is_at_target(), self.pages.in_use());
        let page = takes_place(self);
        let is_beyond = was_at_target && self.pages.in_use() > before;
        self.stats.puts_total += 1;
        self.stats.puts_succeeded += u64::from(!is_beyond);
        page
    }
}
