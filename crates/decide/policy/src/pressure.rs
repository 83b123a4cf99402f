//! How much a donor may lend while its host is to keep some memory available for itself.
//!
//! Lent memory is taken from the host only as it is written, and the host's own programs come and
//! go. So the limit follows what the host has left. It falls at once by as much as is missing, and
//! rises again only after there has been more than enough for a while. Between the two marks it
//! stays where it is. Else extents that are recalled and lent again a moment later would be copied
//! twice for nothing.

use std::time::Duration;

/// How long there must have been more than enough before more is lent again.
pub const CALM: Duration = Duration::from_secs(30);

/// Between what is kept and what counts as more than enough: this share of the former, and no less
/// than the second number of bytes, which a few extents have.
const MARGIN_SHARE: u64 = 4;
const LEAST_MARGIN_BYTES: u64 = 64 << 20;

/// Steps in which the limit rises: this share of all that the donor has.
const STEP_SHARE: u64 = 64;

/// State of a donor and its host at one moment, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Memory that programs of the host could still have without swapping.
    pub available_bytes: u64,
    /// Lent memory, and returned memory that is not the host's again yet.
    pub in_use_bytes: u64,
}

/// The limit of one donor, which changes with what is seen of its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pressure {
    all_bytes: u64,
    keep_free_bytes: u64,
    /// None before anything was seen.
    limit_bytes: Option<u64>,
    calm_since: Option<Duration>,
}

impl Pressure {
    /// For a donor that has so many bytes, on a host that is to have so many available.
    pub fn new(all_bytes: u64, keep_free_bytes: u64) -> Pressure {
        Pressure { all_bytes, keep_free_bytes, limit_bytes: None, calm_since: None }
    }

    /// The most that the donor is to lend, now that this is seen.
    pub fn limit(&mut self, seen: Seen, now: Duration) -> u64 {
        let Seen { available_bytes, in_use_bytes } = seen;
        let margin = (self.keep_free_bytes / MARGIN_SHARE).max(LEAST_MARGIN_BYTES);
        let enough = self.keep_free_bytes.saturating_add(margin);
        let is_calm = available_bytes >= enough;
        // A donor that begins, or a successor of one, lends what it has on a host with enough.
        let at_first = if is_calm { self.all_bytes } else { in_use_bytes.min(self.all_bytes) };
        let before = self.limit_bytes.unwrap_or(at_first);
        self.calm_since = is_calm.then(|| self.calm_since.unwrap_or(now));
        let missing = self.keep_free_bytes.saturating_sub(available_bytes);
        let limit = if missing > 0 {
            // The missing bytes fall together with those in use. So this limit stays where it is
            // while borrowers take their extents away.
            before.min(in_use_bytes.saturating_sub(missing))
        } else if self.calm_since.is_some_and(|since| now.saturating_sub(since) >= CALM) {
            let room = in_use_bytes.saturating_add(available_bytes - enough).min(self.all_bytes);
            let is_worth_it = room == self.all_bytes
                || room >= before.saturating_add(self.all_bytes / STEP_SHARE);
            if is_worth_it { before.max(room) } else { before }
        } else {
            before
        };
        self.limit_bytes = Some(limit);
        limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: u64 = 1 << 30;

    fn seen(available: u64, in_use: u64) -> Seen {
        Seen { available_bytes: available, in_use_bytes: in_use }
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_host_with_enough_lends_everything() {
        let mut pressure = Pressure::new(32 * G, 4 * G);
        assert_eq!(pressure.limit(seen(40 * G, 0), s(0)), 32 * G);
        // Less than enough is no reason to want something back, nor to lend less.
        assert_eq!(pressure.limit(seen(4 * G, 20 * G), s(1)), 32 * G);
    }

    #[test]
    fn what_is_missing_is_wanted_back_once() {
        let mut pressure = Pressure::new(32 * G, 4 * G);
        pressure.limit(seen(40 * G, 0), s(0));
        assert_eq!(pressure.limit(seen(3 * G, 20 * G), s(1)), 19 * G);
        // Half of it is back, then all of it.
        assert_eq!(pressure.limit(seen(3 * G + G / 2, 19 * G + G / 2), s(2)), 19 * G);
        assert_eq!(pressure.limit(seen(4 * G, 19 * G), s(3)), 19 * G);
        // An extent brings less than its size when not all of it was written.
        assert_eq!(pressure.limit(seen(3 * G + G / 2, 19 * G), s(4)), 18 * G + G / 2);
        assert_eq!(pressure.limit(seen(0, G), s(5)), 0, "and never less than nothing");
    }

    #[test]
    fn more_is_lent_only_after_a_while_of_more_than_enough() {
        let mut pressure = Pressure::new(32 * G, 4 * G);
        pressure.limit(seen(40 * G, 0), s(0));
        assert_eq!(pressure.limit(seen(2 * G, 20 * G), s(1)), 18 * G);
        assert_eq!(pressure.limit(seen(4 * G + G / 2, 18 * G), s(100)), 18 * G, "just enough");
        assert_eq!(pressure.limit(seen(9 * G, 18 * G), s(101)), 18 * G);
        assert_eq!(pressure.limit(seen(4 * G, 18 * G), s(102)), 18 * G, "not for long");
        assert_eq!(pressure.limit(seen(9 * G, 18 * G), s(103)), 18 * G);
        assert_eq!(pressure.limit(seen(9 * G, 18 * G), s(132)), 18 * G);
        assert_eq!(pressure.limit(seen(9 * G, 18 * G), s(133)), 22 * G);
        assert_eq!(pressure.limit(seen(40 * G, 18 * G), s(134)), 32 * G);
    }

    #[test]
    fn a_donor_that_begins_on_a_host_with_too_little_lends_nothing_more() {
        let mut pressure = Pressure::new(32 * G, 4 * G);
        assert_eq!(pressure.limit(seen(4 * G + 1, 0), s(0)), 0);
        let mut successor = Pressure::new(32 * G, 4 * G);
        assert_eq!(successor.limit(seen(4 * G + 1, 7 * G), s(0)), 7 * G);
    }

    proptest! {
        /// On any host: missing memory puts the limit at least as much below the memory in use.
        /// Without it the limit does not fall. The limit rises only after [`CALM`] without it.
        #[test]
        fn the_limit_follows_the_host(
            steps in prop::collection::vec((0u64..8, 0u64..40, 0u64..20), 1..100),
        ) {
            let mut pressure = Pressure::new(32 * G, 4 * G);
            let (mut now, mut before, mut missing_at) = (s(0), None, None);
            for (passed, available, in_use) in steps {
                now += s(passed);
                let seen = seen(available * G / 4, in_use * G);
                let limit = pressure.limit(seen, now);
                prop_assert!(limit <= 32 * G);
                let missing = (4 * G).saturating_sub(seen.available_bytes);
                if missing > 0 {
                    missing_at = Some(now);
                    prop_assert!(limit <= seen.in_use_bytes.saturating_sub(missing));
                } else if let Some(before) = before {
                    prop_assert!(limit >= before);
                }
                if missing_at.is_some_and(|at| now < at + CALM) {
                    prop_assert!(before.is_none_or(|before| limit <= before));
                }
                before = Some(limit);
            }
        }
    }
}
