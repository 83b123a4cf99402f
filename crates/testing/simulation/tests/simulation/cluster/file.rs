//! The registry's file, as redb is to a manager that is alone: what was committed, all of a change
//! or nothing.

use hecaton_manager::records::lasting::{Changes, Lasting};
use std::time::Duration;

#[derive(Default)]
pub(super) struct File {
    /// State that outlives the manager.
    pub(super) lasting: Lasting,
    /// Its disk has no room until then.
    pub(super) full_until: Duration,
    /// A commit before that time ends at that time.
    pub(super) slow_until: Duration,
    /// How often a manager has opened it, and how often it took nothing.
    pub(super) opened: u64,
    pub(super) refused: u64,
}

impl File {
    /// Takes all changes, if there is room. Whether it did.
    pub(super) fn commit(&mut self, changes: &Changes, now: Duration) -> bool {
        if now < self.full_until {
            self.refused += 1;
            return false;
        }
        self.lasting.apply(changes);
        true
    }
}
