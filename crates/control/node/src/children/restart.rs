//! When a child that ended is started again, and when not any more.
//!
//! Pure: the supervisor tells how long the child lived and is told how long to wait. A child that
//! ran for a while is started again at once, one that keeps dying waits twice as long each time.
//! There is no giving up: a donor's memory is held by the node, and as long as it is, somebody's
//! data wait for the donor to come back. A pager is started again at once, since a program waits
//! for it, and is given up when it keeps dying: see [`crate::pagers`].

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A child that lived this long has started well: its earlier deaths are forgotten.
pub const SETTLED_AFTER: Duration = Duration::from_secs(10);

/// The wait before the second start in a row.
pub const FIRST_DELAY: Duration = Duration::from_millis(100);

/// The longest wait.
pub const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Counts a child's deaths in a row.
#[derive(Clone, Debug, Default)]
pub struct Backoff {
    early_deaths: u32,
}

impl Backoff {
    /// How long to wait before the child is started again, given how long it lived.
    pub fn after_death(&mut self, lived: Duration) -> Duration {
        if lived >= SETTLED_AFTER {
            self.early_deaths = 0;
        }
        let delay = match self.early_deaths {
            0 => Duration::ZERO,
            deaths => FIRST_DELAY.saturating_mul(1 << (deaths - 1).min(16)).min(LONGEST_DELAY),
        };
        self.early_deaths = self.early_deaths.saturating_add(1);
        delay
    }
}

/// When to stop starting a pager that keeps dying: one that dies at once each time will not help
/// its programs.
#[derive(Debug, Default)]
pub struct CrashLimit {
    deaths: VecDeque<Instant>,
}

impl CrashLimit {
    /// Deaths within [`CrashLimit::WINDOW`] that are put up with.
    pub const DEATHS: usize = 20;
    /// See [`CrashLimit::DEATHS`].
    pub const WINDOW: Duration = Duration::from_secs(10);
    /// Why the consumer is ended then.
    pub const REASON: &str = "its pager died more than 20 times within 10 seconds";

    /// Counts a death; true if it is one too many.
    pub fn is_exceeded_by_death(&mut self, now: Instant) -> bool {
        self.deaths.retain(|&death| now.saturating_duration_since(death) < Self::WINDOW);
        self.deaths.push_back(now);
        self.deaths.len() > Self::DEATHS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_death_costs_no_wait() {
        assert_eq!(Backoff::default().after_death(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn deaths_in_a_row_wait_longer_and_longer() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..10).map(|_| backoff.after_death(Duration::ZERO)).collect();
        assert_eq!(delays[..4], [0, 100, 200, 400].map(Duration::from_millis));
        assert_eq!(delays[9], LONGEST_DELAY);
    }

    proptest! {
        #[test]
        fn waits_are_bounded_and_a_settled_child_starts_over(
            lives in prop::collection::vec(0u64..20_000, 1..100),
        ) {
            let mut backoff = Backoff::default();
            let mut previous = Duration::ZERO;
            for lived in lives.into_iter().map(Duration::from_millis) {
                let delay = backoff.after_death(lived);
                prop_assert!(delay <= LONGEST_DELAY);
                if lived >= SETTLED_AFTER {
                    prop_assert_eq!(delay, Duration::ZERO);
                } else {
                    prop_assert!(delay >= previous);
                }
                previous = delay;
            }
        }
    }

    #[test]
    fn deaths_are_put_up_with_one_by_one_and_not_in_a_row() {
        let start = Instant::now();
        let mut limit = CrashLimit::default();
        let apart = CrashLimit::WINDOW / CrashLimit::DEATHS as u32;
        for death in 0..100 {
            assert!(!limit.is_exceeded_by_death(start + apart * death));
        }
        let later = start + CrashLimit::WINDOW * 100;
        for _ in 0..CrashLimit::DEATHS {
            assert!(!limit.is_exceeded_by_death(later));
        }
        assert!(limit.is_exceeded_by_death(later));
    }

    #[test]
    fn the_reason_names_the_limit() {
        let numbers: Vec<_> =
            CrashLimit::REASON.split(' ').filter_map(|word| word.parse::<u64>().ok()).collect();
        assert_eq!(numbers, [CrashLimit::DEATHS as u64, CrashLimit::WINDOW.as_secs()]);
    }
}
