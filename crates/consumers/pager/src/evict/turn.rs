//! Decides whether forks or evictions are next. Pure: no I/O and no clock.
//!
//! No page may leave a parent before its child has it, and no batch may name a program that forks.
//! A storm of forks must not keep the evictor from making room, and an evictor that cannot go on
//! must not keep programs from forking. So forks wait, and go on, by turns; each turn is longer
//! than the last one until the evictor finds no fork under way.

use std::time::{Duration, Instant};

/// The first time that forks wait for.
const FIRST: Duration = Duration::from_millis(50);

/// The longest time that forks wait for.
const LONGEST: Duration = Duration::from_secs(1);

/// How long faults wait for room that only programs in a fork could give.
const PATIENCE: Duration = Duration::from_secs(1);

/// The turns of forks and of the evictor.
#[derive(Debug, Default)]
pub(crate) struct Turn(Option<Blocked>);

#[derive(Clone, Copy, Debug)]
struct Blocked {
    /// Since when forks have kept the evictor from its work.
    since: Instant,
    /// Since when forks wait, or have waited; for how long they do; and how long they go on then.
    held_at: Instant,
    hold: Duration,
}

impl Turn {
    /// Records that the evictor has found forks under way.
    pub(crate) fn is_blocked(&mut self, now: Instant) {
        let new = Blocked { since: now, held_at: now, hold: FIRST };
        let blocked = self.0.get_or_insert(new);
        if now.saturating_duration_since(blocked.held_at) >= 2 * blocked.hold {
            blocked.held_at = now;
            blocked.hold = LONGEST.min(2 * blocked.hold);
        }
    }

    /// Records that the evictor has had its turn, or does not need one.
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// Whether forks wait until those under way are done.
    pub(crate) fn holds_forks(&self, now: Instant) -> bool {
        let held = |b: &Blocked| now.saturating_duration_since(b.held_at) < b.hold;
        self.0.as_ref().is_some_and(held)
    }

    /// Whether the evictor has waited long enough to take pages of programs that do not fork, which
    /// may be those that it would keep.
    pub(super) fn goes_round_forks(&self, now: Instant) -> bool {
        self.has_lasted(FIRST, now)
    }

    /// Whether faults have waited too long for the forks under way. A fork may wait for a program
    /// that waits for room.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.has_lasted(PATIENCE, now)
    }

    fn has_lasted(&self, time: Duration, now: Instant) -> bool {
        self.0.as_ref().is_some_and(|b| now.saturating_duration_since(b.since) >= time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn forks_and_evictions_take_turns_that_grow() {
        let begun = Instant::now();
        let mut turn = Turn::default();
        assert!(!turn.holds_forks(begun));
        // The evictor looks every millisecond, and forks never cease.
        let mut held = Vec::new();
        for ms in 0..10_000 {
            turn.is_blocked(begun + MS(ms));
            held.push(turn.holds_forks(begun + MS(ms)));
        }
        let turns: Vec<usize> = held.chunk_by(|a, b| a == b).map(<[bool]>::len).collect();
        assert_eq!(turns[..8], [50, 50, 100, 100, 200, 200, 400, 400]);
        assert!(turns[12..].iter().all(|&ms| ms <= 1000));
        turn.end();
        assert!(!turn.holds_forks(begun + MS(10_000)));
        turn.is_blocked(begun + MS(20_000));
        assert!(turn.holds_forks(begun + MS(20_049)), "it begins anew");
        assert!(!turn.holds_forks(begun + MS(20_050)));
    }

    #[test]
    fn it_goes_round_forks_that_last_and_gives_more_room_at_last() {
        let begun = Instant::now();
        let mut turn = Turn::default();
        assert!(!turn.goes_round_forks(begun + MS(5000)), "nothing is in its way");
        let mut at = |ms| {
            turn.is_blocked(begun + MS(ms));
            (turn.goes_round_forks(begun + MS(ms)), turn.is_overdue(begun + MS(ms)))
        };
        assert_eq!([at(0), at(49)], [(false, false); 2]);
        assert_eq!([at(50), at(999)], [(true, false); 2]);
        assert_eq!(at(1000), (true, true));
    }
}
