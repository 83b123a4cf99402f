//! Estimates the memory that the host counts as the VM's and its kernel does not. Pure.
//!
//! The host counts all memory of the VM; `MemTotal` lacks what the kernel needs at boot. The host
//! tells a size that it read some time ago. While the VM grows or shrinks, the difference to the
//! present `MemTotal` is off by what has come or gone since, and applications would be told to give
//! back too much or too little. So the difference of a VM at rest is remembered.

use std::time::Duration;

/// How long `MemTotal` is the same in a VM at rest. The host tells sizes that it has read up to 3 s
/// ago, and this manager counts blocks for up to 2 s that are going.
const AT_REST: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Default)]
pub(super) struct Uncounted {
    /// As of a VM at rest, if its size was told then.
    bytes: Option<u64>,
    total_bytes: u64,
    /// Since when `MemTotal` has been that.
    since: Duration,
    /// `MemTotal` of the VM at its last rest, and the time at which that rest ended.
    rested: Option<(u64, Duration)>,
}

impl Uncounted {
    /// Records the present `MemTotal`.
    pub(super) fn look(&mut self, total_bytes: u64, now: Duration) {
        if total_bytes == self.total_bytes {
            return;
        }
        if self.total_bytes > 0 && self.is_at_rest(now) {
            self.rested = Some((self.total_bytes, now));
        }
        (self.total_bytes, self.since) = (total_bytes, now);
    }

    /// The bytes that the kernel does not count, after the host has said that the VM has
    /// `size_bytes`.
    pub(super) fn learn(&mut self, size_bytes: u64, now: Duration) -> u64 {
        let seen = size_bytes.checked_sub(self.total_bytes);
        if self.is_at_rest(now) && seen.is_some() {
            self.bytes = seen;
        }
        let seen = seen.unwrap_or(0);
        self.bytes.unwrap_or_else(|| match self.rested {
            // It has just begun to shrink, and the host may not have seen that.
            Some((before, ended)) if self.total_bytes < before && now < ended + AT_REST => {
                size_bytes.checked_sub(before).unwrap_or(seen)
            }
            _ => seen,
        })
    }

    fn is_at_rest(&self, now: Duration) -> bool {
        now.saturating_sub(self.since) >= AT_REST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[test]
    fn what_a_machine_in_motion_lacks_is_known_from_one_at_rest() {
        let mut uncounted = Uncounted::default();
        uncounted.look(90, S(10));
        assert_eq!(uncounted.learn(101, S(10)), 11, "nothing better is known");
        uncounted.look(90, S(14));
        assert_eq!(uncounted.learn(100, S(15)), 10);
        uncounted.look(70, S(16));
        assert_eq!(uncounted.learn(100, S(17)), 10, "it shrinks");
        uncounted.look(95, S(20));
        assert_eq!(uncounted.learn(80, S(21)), 10, "it grows");
        uncounted.look(95, S(25));
        assert_eq!(uncounted.learn(90, S(25)), 10, "that cannot be");
        assert_eq!(uncounted.learn(106, S(25)), 11, "it is at rest again");
    }

    #[test]
    fn a_machine_that_has_just_begun_to_shrink_is_as_large_as_it_was() {
        let mut uncounted = Uncounted::default();
        uncounted.look(90, S(10));
        uncounted.look(60, S(20));
        assert_eq!(uncounted.learn(100, S(21)), 10);
        assert_eq!(uncounted.learn(80, S(21)), 20, "the host has seen that it shrinks");
        uncounted.look(50, S(24));
        assert_eq!(uncounted.learn(60, S(25)), 10, "the host has seen it since");
        uncounted.look(200, S(30));
        uncounted.look(190, S(31));
        assert_eq!(uncounted.learn(200, S(31)), 10, "it has grown");
    }
}
