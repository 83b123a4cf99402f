//! Says how many pages may become resident, and whether others must be evicted for them.
//!
//! The limit is kept as long as anything can be evicted. Pages that are pinned or locked cannot,
//! and a fault that waits for one of them to go may wait for ever. So faults get memory above the
//! limit once every resident page was tried, and lose it as soon as pages can be taken again.

use crate::core::Core;

impl Core {
    /// Pages that may still become resident.
    pub(crate) fn room(&self) -> u64 {
        (self.limit + self.excess).saturating_sub(self.resident + self.fetching)
    }

    /// The same, within the limit.
    pub(super) fn room_within_limit(&self) -> u64 {
        self.limit.saturating_sub(self.resident + self.fetching)
    }

    /// Whether the evictor has something to do.
    pub(crate) fn wants_eviction(&self) -> bool {
        self.room_within_limit() < self.reserve() && self.resident > 0
            || !self.starved.is_empty()
            || self.evict_to.is_some_and(|pages| self.resident > pages)
    }

    /// Lets faults that wait have memory above the limit.
    pub(super) fn grow_excess(&mut self) {
        if self.excess == 0 {
            let (resident, limit) = (self.resident, self.limit);
            tracing::warn!(
                resident,
                limit,
                "exceeding --local: all pages are pinned, locked, or kept for a fork"
            );
        }
        let wanted = self.resident + self.fetching + self.reserve();
        self.excess = wanted.saturating_sub(self.limit);
        self.wake_waiting();
    }

    /// Takes back what is above the limit and not used.
    pub(super) fn shrink_excess(&mut self) {
        let used = (self.resident + self.fetching).saturating_sub(self.limit);
        self.excess = self.excess.min(used);
    }
}

#[cfg(test)]
mod tests {
    use crate::programs::inherit::tests::pager;

    #[test]
    fn pages_above_the_limit_are_taken_back_as_others_go() {
        let mut core = pager();
        let limit = core.limit;
        core.resident = limit;
        assert_eq!(core.room(), 0);
        assert!(core.wants_eviction());
        core.grow_excess();
        assert_eq!(core.room(), core.reserve());
        core.resident += 10;
        core.shrink_excess();
        assert_eq!((core.excess, core.room()), (10, 0));
        core.resident = limit - 5;
        core.shrink_excess();
        assert_eq!((core.excess, core.room(), core.room_within_limit()), (0, 5, 5));
    }
}
