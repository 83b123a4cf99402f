//! Decides when memory is coded, and when it is kept in copies.
//!
//! Copies are fast to write and to lose one of. Coded memory takes less room, but every write to it
//! means making copies first. So memory is coded only after it was left alone for long. Coded
//! memory is kept in copies again only when it is written, or read for some time on end. One look
//! at cold memory changes nothing. Memory that has just become warm is coded only after it was left
//! alone for as long as before. That keeps memory from going to and fro.

use std::time::Duration;

/// Read requests in a window from which on coded memory counts as read: about what a program that
/// walks through a stripe of 64 MiB causes with prefetched windows.
pub const READS: u64 = 128;

/// Windows on end in which coded memory must be read to be kept in copies again.
const WINDOWS: u32 = 2;

/// Whether memory is to be coded that nobody has touched for `idle`.
pub fn is_cold(idle: Duration, cold_after: Duration) -> bool {
    idle >= cold_after
}

/// How many extents are saved when `held` segments that have `copies` each are kept in one, with
/// `parity` more for all of them. Holes cost nothing in copies, but are no help to the code either:
/// a stripe of few segments is not worth it.
pub fn extents_saved(held: u64, copies: u64, parity: u64) -> u64 {
    (held * copies).saturating_sub(held + parity)
}

/// How much one piece of coded memory is read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    began: Duration,
    reads_before: u64,
    windows: u32,
}

impl Reading {
    /// From now on. `reads` counts the read requests, from any beginning.
    pub fn new(reads: u64, now: Duration) -> Reading {
        Reading { began: now, reads_before: reads, windows: 0 }
    }

    /// Is told of the count now and then. True when the memory is to be kept in copies again. A
    /// window is a quarter of the time after which memory is cold.
    pub fn is_warm(&mut self, reads: u64, now: Duration, cold_after: Duration) -> bool {
        if now.saturating_sub(self.began) < cold_after / 4 {
            return false;
        }
        let is_read = reads.saturating_sub(self.reads_before) >= READS;
        let windows = if is_read { self.windows + 1 } else { 0 };
        *self = Reading { began: now, reads_before: reads, windows };
        windows >= WINDOWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COLD_AFTER: Duration = Duration::from_secs(40);

    #[test]
    fn what_is_not_worth_it_saves_nothing() {
        assert_eq!(extents_saved(4, 2, 2), 2);
        assert_eq!(extents_saved(3, 2, 2), 1);
        assert_eq!(extents_saved(2, 2, 2), 0);
        assert_eq!(extents_saved(4, 3, 2), 6);
        assert_eq!(extents_saved(1, 2, 4), 0);
    }

    #[test]
    fn one_walk_through_cold_memory_leaves_it_coded() {
        let mut reading = Reading::new(7, Duration::ZERO);
        let at = Duration::from_secs;
        assert!(!reading.is_warm(7 + READS * 100, at(10), COLD_AFTER));
        assert!(!reading.is_warm(7 + READS * 100, at(20), COLD_AFTER), "it has stopped");
        assert!(!reading.is_warm(7 + READS * 101, at(30), COLD_AFTER));
        assert!(!reading.is_warm(7 + READS * 102, at(35), COLD_AFTER), "in the same window");
        assert!(reading.is_warm(7 + READS * 103, at(40), COLD_AFTER));
    }

    proptest! {
        /// However often it is looked, fewer reads than [`READS`] in each window never make it
        /// warm, and memory that is read all the time is warm within three windows.
        #[test]
        fn only_steady_reading_makes_it_warm(
            steps in prop::collection::vec((1u64..5, 0u64..10), 1..300),
        ) {
            let (mut seldom, mut often) = (Reading::new(0, Duration::ZERO), Reading::new(0, Duration::ZERO));
            let (mut now, mut few, mut many) = (Duration::ZERO, 0, 0);
            let mut is_warm = false;
            for (seconds, reads) in steps {
                now += Duration::from_secs(seconds);
                // A window that is looked at late is at most 14 s.
                few += reads * seconds / 5;
                many += READS * seconds;
                prop_assert!(!seldom.is_warm(few, now, COLD_AFTER));
                is_warm |= often.is_warm(many, now, COLD_AFTER);
                prop_assert!(is_warm || now <= Duration::from_secs(30));
            }
        }
    }
}
