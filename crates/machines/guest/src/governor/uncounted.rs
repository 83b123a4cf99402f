//! Estimates the memory that the host counts as the VM's and its kernel does not. Pure.
//!
//! The host counts all memory of the VM; `MemTotal` lacks what the kernel needs at boot. The host
//! tells a size that it read some time ago. While the VM grows or shrinks, the difference to the
//! present `MemTotal` is off by what has come or gone since, and applications would be told to give
//! back too much or too little. So the difference of a VM at rest is remembered.

use std::time::Duration;

/// How long `MemTotal` is the same in a VM at rest. The host reads sizes once a second.
const AT_REST: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, Default)]
pub(super) struct Uncounted {
    /// Of the VM at rest, if it has been.
    bytes: Option<u64>,
    total_bytes: u64,
    /// Since when `MemTotal` has been that.
    since: Duration,
}

impl Uncounted {
    /// Records the present `MemTotal`.
    pub(super) fn look(&mut self, total_bytes: u64, now: Duration) {
        if total_bytes != self.total_bytes {
            self.total_bytes = total_bytes;
            self.since = now;
        }
    }

    /// The bytes that the kernel does not count, after the host has said that the VM has
    /// `size_bytes`.
    pub(super) fn learn(&mut self, size_bytes: u64, now: Duration) -> u64 {
        let seen = size_bytes.saturating_sub(self.total_bytes);
        if now.saturating_sub(self.since) >= AT_REST {
            self.bytes = Some(seen);
        }
        self.bytes.unwrap_or(seen)
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
        uncounted.look(90, S(11));
        assert_eq!(uncounted.learn(100, S(12)), 10);
        uncounted.look(70, S(13));
        assert_eq!(uncounted.learn(100, S(14)), 10, "it shrinks");
        uncounted.look(95, S(20));
        assert_eq!(uncounted.learn(80, S(21)), 10, "it grows");
        uncounted.look(95, S(22));
        assert_eq!(uncounted.learn(106, S(22)), 11, "it is at rest again");
    }
}
