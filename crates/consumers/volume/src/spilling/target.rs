//! The volume's target: how many pages of the pool it may hold, as the cluster's policy has it.
//!
//! Only a volume with a spill file has a target: it alone has another place for a page. At its
//! target no further segment goes to the pool, as at its own limit. Segments in the pool stay
//! there, and are written to. So the volume exceeds its target by one segment at most, apart from
//! segments that were partly filled before the target was set. [`crate::spilling::departures`]
//! brings to the file what the policy takes back beyond that.
//!
//! A page that is written, or read from the file, is a *put*: it should be in the pool. Puts that
//! fail, because of the target or for lack of room, tell the policy what the volume lacks. Puts
//! that the volume's own limit keeps out are not counted: no target could help them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// No target.
const NONE: u64 = u64::MAX;

/// The policy's last target, and the counts that the policy reads.
#[derive(Debug)]
pub(crate) struct Target {
    pages: AtomicU64,
    /// Pages that are to leave the pool, of those that are beyond the target.
    take_back: AtomicU64,
    pub(crate) puts_total: AtomicU64,
    pub(crate) puts_succeeded: AtomicU64,
    /// Pages read from the pool.
    pub(crate) gets: AtomicU64,
}

impl Default for Target {
    fn default() -> Target {
        Target {
            pages: AtomicU64::new(NONE),
            take_back: AtomicU64::default(),
            puts_total: AtomicU64::default(),
            puts_succeeded: AtomicU64::default(),
            gets: AtomicU64::default(),
        }
    }
}

impl Target {
    pub(crate) fn set(&self, pages: Option<u64>, take_back: u64) {
        self.pages.store(pages.unwrap_or(NONE), Relaxed);
        self.take_back.store(take_back, Relaxed);
    }

    /// Pages that the volume may hold.
    pub(crate) fn pages(&self) -> Option<u64> {
        Some(self.pages.load(Relaxed)).filter(|pages| *pages != NONE)
    }

    /// Whether one that holds `used` pages may hold `more`.
    pub(crate) fn allows(&self, used: u64, more: u64) -> bool {
        used.saturating_add(more) <= self.pages.load(Relaxed)
    }

    /// Pages that one which holds `used` is to bring to the file. Said once.
    pub(crate) fn to_give(&self, used: u64) -> u64 {
        let beyond = used.saturating_sub(self.pages.load(Relaxed));
        self.take_back.swap(0, Relaxed).min(beyond)
    }

    /// Counts pages that were to be in the pool.
    pub(crate) fn put(&self, pages: u64, succeeded: bool) {
        self.puts_total.fetch_add(pages, Relaxed);
        self.puts_succeeded.fetch_add(if succeeded { pages } else { 0 }, Relaxed);
    }

    /// Counts pages that were read from the pool.
    pub(crate) fn got(&self, pages: u64) {
        self.gets.fetch_add(pages, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_given_than_is_wanted_nor_than_is_beyond_the_target() {
        let target = Target::default();
        assert!(target.pages().is_none() && target.allows(u64::MAX, 1));
        assert_eq!(target.to_give(100), 0);
        target.set(Some(60), 30);
        assert!(target.allows(59, 1) && !target.allows(60, 1));
        assert_eq!(target.to_give(100), 30);
        assert_eq!(target.to_give(100), 0, "it was said once");
        target.set(Some(60), 50);
        assert_eq!(target.to_give(100), 40);
        target.set(None, 0);
        assert_eq!((target.pages(), target.to_give(100)), (None, 0));
    }
}
