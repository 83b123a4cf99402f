//! The majority trend over recent deltas: Leap's detector.
//!
//! Al Maruf & Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020,
//! section 4.1 (`FindTrend`). A delta that makes up more than half of a window of the history is
//! the trend. The window starts small, so that a new trend is found fast. It doubles, so that an
//! old one is found through noise.

/// Deltas remembered for each stream.
const HISTORY: usize = 16;

/// The smallest window that is searched.
const SMALLEST: usize = 2;

/// A gap between faults of up to this many pages still counts as walking on (see
/// [`History::drift`]).
const DRIFT_GAP: u32 = 32;

/// Deltas that must agree in direction for a drift.
const DRIFT_RUN: usize = 6;

/// The last deltas of a stream, newest first to be searched.
#[derive(Clone, Copy, Default)]
pub(super) struct History {
    deltas: [i32; HISTORY],
    head: u8,
    len: u8,
}

impl History {
    pub(super) fn push(&mut self, delta: i32) {
        self.head = (self.head + 1) % HISTORY as u8;
        self.deltas[usize::from(self.head)] = delta;
        self.len = (self.len + 1).min(HISTORY as u8);
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.len)
    }

    fn newest_first(&self) -> impl Iterator<Item = i32> + Clone {
        let head = usize::from(self.head);
        (0..self.len()).map(move |back| self.deltas[(head + HISTORY - back) % HISTORY])
    }

    /// The newest delta.
    pub(super) fn newest(&self) -> Option<i32> {
        self.newest_first().next()
    }

    /// The delta that more than half of the newest 2, 4, 8 or 16 agree on.
    pub(super) fn majority(&self) -> Option<i32> {
        let mut window = SMALLEST;
        while window <= self.len() {
            let recent = self.newest_first().take(window);
            // Boyer & Moore's vote finds the only possible majority; the count confirms it.
            let (candidate, _) = recent.clone().fold((0, 0u32), |(candidate, votes), delta| {
                if votes == 0 {
                    (delta, 1)
                } else if delta == candidate {
                    (candidate, votes + 1)
                } else {
                    (candidate, votes - 1)
                }
            });
            if recent.filter(|&delta| delta == candidate).count() > window / 2 {
                return Some(candidate);
            }
            window *= 2;
        }
        None
    }

    /// 1 or -1 if the newest deltas all lead the same way by small gaps. That is a sweep over
    /// memory of which some pages are resident: the pages between the faults do not fault, so no
    /// delta has a majority, but the next missing pages lie straight ahead.
    pub(super) fn drift(&self) -> Option<i32> {
        if self.len() < DRIFT_RUN {
            return None;
        }
        let direction = self.newest()?.signum();
        self.newest_first()
            .take(DRIFT_RUN)
            .all(|delta| delta.signum() == direction && delta.unsigned_abs() <= DRIFT_GAP)
            .then_some(direction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(deltas: &[i32]) -> History {
        let mut history = History::default();
        deltas.iter().for_each(|&delta| history.push(delta));
        history
    }

    #[test]
    fn majority_is_found_early_and_through_noise() {
        assert_eq!(of(&[]).majority(), None);
        assert_eq!(of(&[3]).majority(), None);
        assert_eq!(of(&[3, 3]).majority(), Some(3));
        assert_eq!(of(&[5, 9]).majority(), None);
        assert_eq!(of(&[7, 7, 7, 99]).majority(), Some(7));
        assert_eq!(of(&[7, 7, 1, 7, 7, 7, 2, 99]).majority(), Some(7));
        // The newest trend wins over an older, longer one.
        assert_eq!(of(&[7, 7, 7, 7, 7, 7, -2, -2]).majority(), Some(-2));
        assert_eq!(of(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]).majority(), None);
    }

    #[test]
    fn drift_needs_one_direction_and_small_gaps() {
        assert_eq!(of(&[1, 3, 2, 9, 1, 4]).drift(), Some(1));
        assert_eq!(of(&[-1, -3, -2, -9, -1, -4]).drift(), Some(-1));
        assert_eq!(of(&[1, 3, -2, 9, 1, 4]).drift(), None);
        assert_eq!(of(&[1, 3, 2, 900, 1, 4]).drift(), None);
        assert_eq!(of(&[1, 3, 2]).drift(), None);
    }
}
