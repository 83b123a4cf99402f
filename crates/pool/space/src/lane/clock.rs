//! A lane's clock, which leaves out the time in which the lane could not look.
//!
//! Decisions only. While a lane waits for donors it sets a time at which it looks for what is late.
//! If it looks much later than that, its process stood still: it was stopped, its control group was
//! frozen, its virtual machine was paused, or other programs had the processors. The answers may
//! have come meanwhile, or the donors may have stood still on the same host. So the lane does not
//! count that time as the donors' silence, and gives up no copy because of it.

use std::time::Duration;

/// How far a lane's time is behind that of its space.
#[derive(Debug, Default)]
pub(super) struct Clock {
    left_out: Duration,
}

impl Clock {
    /// The lane's time, when that of the space is `elapsed`.
    pub(super) fn now(&self, elapsed: Duration) -> Duration {
        elapsed.saturating_sub(self.left_out)
    }

    /// The lane looks, and was to look at `due`. If it is late by more than `slack`, its time goes on
    /// from `due`.
    pub(super) fn look(&mut self, elapsed: Duration, due: Duration, slack: Duration) {
        let late = self.now(elapsed).saturating_sub(due);
        if late > slack {
            self.left_out += late;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_pause_is_left_out() {
        let mut clock = Clock::default();
        assert_eq!(clock.now(ms(500)), ms(500));
        clock.look(ms(2_600), ms(550), ms(40));
        assert_eq!(clock.now(ms(2_600)), ms(550));
        assert_eq!(clock.now(ms(2_640)), ms(590), "and goes on");
        clock.look(ms(9_990), ms(600), ms(40));
        assert_eq!(clock.now(ms(10_000)), ms(610), "one more");
    }

    #[test]
    fn a_small_delay_counts() {
        let mut clock = Clock::default();
        for round in 1..100 {
            clock.look(ms(round * 80), ms(round * 80 - 40), ms(40));
        }
        assert_eq!(clock.now(ms(8_000)), ms(8_000));
    }
}
