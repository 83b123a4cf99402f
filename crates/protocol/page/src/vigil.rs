//! Staying awake for a moment after there was something to do.
//!
//! Page faults come in trains: the next one follows the answer to the last within microseconds.
//! Waking a thread that sleeps on an idle processor takes longer than a donor needs to answer; in a
//! virtual machine, where an idle processor must be entered again by the hypervisor, several times
//! longer. So whoever has just served a request looks for the next one for a while before it
//! sleeps. Between two looks it offers the processor to others, so that only idle time is spent.
//!
//! Where other threads want the processor, an offer is taken, and the vigil comes back late: after
//! a time slice of the others, which is milliseconds. A sleeper that is woken would have been
//! preferred to them. A vigil that notices this therefore ends, and there is none for a multiple of
//! the time that it was away.

use std::time::{Duration, Instant};

/// How long a vigil is kept after the last thing that was done.
const LENGTH: Duration = Duration::from_micros(200);

/// An offer of the processor that takes longer was taken by somebody with much work to do: threads
/// on vigil that share a processor take a few microseconds for a round, and a busy one takes its
/// time slice, milliseconds.
const TAKEN: Duration = Duration::from_micros(500);

/// Rests are so many times as long as the offer that was taken: at most a ninth of the time
/// is lost to others in this way.
const REST: u32 = 8;

/// One thread's vigils.
#[derive(Debug)]
pub struct Vigil {
    until: Instant,
    resting_until: Instant,
}

impl Default for Vigil {
    fn default() -> Vigil {
        let now = Instant::now();
        Vigil { until: now, resting_until: now }
    }
}

impl Vigil {
    /// There was something to do. A vigil begins, or goes on.
    pub fn keep(&mut self) {
        self.until = Instant::now() + LENGTH;
    }

    /// There was nothing to do: whether to look again at once, after others had the processor,
    /// instead of sleeping.
    pub fn looks_again(&mut self) -> bool {
        let now = Instant::now();
        if now >= self.until || now < self.resting_until {
            return false;
        }
        rustix::thread::sched_yield();
        self.returned(now, Instant::now());
        true
    }

    /// An offer was made at one time and came back at the other.
    fn returned(&mut self, offered: Instant, back: Instant) {
        if back.duration_since(offered) > TAKEN {
            self.resting_until = back + back.duration_since(offered) * REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vigil_ends_by_itself() {
        let mut vigil = Vigil::default();
        assert!(!vigil.looks_again(), "there was nothing yet to keep vigil after");
        vigil.keep();
        while vigil.looks_again() {}
        assert!(!vigil.looks_again());
    }

    #[test]
    fn an_offer_that_was_taken_is_followed_by_a_rest() {
        let mut vigil = Vigil::default();
        vigil.keep();
        let now = Instant::now();
        vigil.returned(now - TAKEN * 2, now);
        assert_eq!(vigil.resting_until, now + TAKEN * 2 * REST);
        assert!(!vigil.looks_again());
    }
}
