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
    /// The lane's time at its last look. Times that it noted then must not lie ahead of its clock.
    seen: Duration,
}

impl Clock {
    /// The lane's time, when that of the space is `elapsed`.
    pub(super) fn now(&self, elapsed: Duration) -> Duration {
        elapsed.saturating_sub(self.left_out)
    }

    /// The lane looks, and was to look at `due`, if at any time. If it is late by more than
    /// `slack`, its time goes on from there, or from what it saw last. Returns its time, which
    /// never goes back.
    pub(super) fn look(
        &mut self,
        elapsed: Duration,
        due: Option<Duration>,
        slack: Duration,
    ) -> Duration {
        if let Some(due) = due.filter(|due| self.now(elapsed).saturating_sub(*due) > slack) {
            self.left_out += self.now(elapsed).saturating_sub(due.max(self.seen));
        }
        self.seen = self.now(elapsed);
        self.seen
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
        assert_eq!(clock.look(ms(500), None, ms(40)), ms(500));
        assert_eq!(clock.look(ms(2_600), Some(ms(550)), ms(40)), ms(550));
        assert_eq!(clock.now(ms(2_640)), ms(590), "and goes on");
        assert_eq!(clock.look(ms(9_990), Some(ms(600)), ms(40)), ms(600), "one more");
        assert_eq!(clock.now(ms(10_000)), ms(610));
    }

    #[test]
    fn a_small_delay_counts() {
        let mut clock = Clock::default();
        for round in 1..100 {
            let (elapsed, due) = (ms(round * 80), ms(round * 80 - 40));
            assert_eq!(clock.look(elapsed, Some(due), ms(40)), elapsed);
        }
    }

    #[test]
    fn time_never_goes_back() {
        let mut clock = Clock::default();
        // It looked a little late, and then not for long, before anything else was due.
        assert_eq!(clock.look(ms(130), Some(ms(100)), ms(40)), ms(130));
        assert_eq!(clock.look(ms(3_000), Some(ms(100)), ms(40)), ms(130));
        assert_eq!(clock.look(ms(3_001), Some(ms(100)), ms(40)), ms(131));
    }
}
