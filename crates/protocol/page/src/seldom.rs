//! Lines of the log that anybody on the network can cause: one a second at most, which says how
//! many there would have been.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// One kind of line, of the whole process.
pub(crate) struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    pub(crate) const fn new() -> Seldom {
        Seldom(Mutex::new((None, 0)))
    }

    /// Whether a line may be written now; then with how many were not since the last one.
    pub(crate) fn may_say(&self, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, unsaid) = &mut *lines;
        if last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            *unsaid += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_line_a_second() {
        let (seldom, begun) = (Seldom::new(), Instant::now());
        let said = [0, 1, 999, 1000, 1001, 5000]
            .map(|ms| seldom.may_say(begun + Duration::from_millis(ms)));
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
