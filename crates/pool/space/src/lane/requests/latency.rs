//! How long a lane's donors take to answer: whom to read from, and when to ask another one as well.
//!
//! Decisions only. For each donor it keeps a running mean and a running estimate of the 95th
//! percentile. The estimate goes up by 19 parts after a slower answer, and down by one after any
//! other. So it rests where one answer in twenty is slower (stochastic approximation, Robbins and
//! Monro 1951).

use crate::map::group::DonorIndex;
use std::time::Duration;

/// Before anything was measured.
const FIRST_GUESS_US: f64 = 2_000.0;

/// A second request costs a round trip's work at both ends: not before this, however fast the donor
/// usually is.
const SOONEST: Duration = Duration::from_micros(300);

/// However slow the donor usually is.
const LATEST: Duration = Duration::from_millis(50);

/// One read in so many goes to the second best, so that a donor that was slow once gets its chance.
const EXPLORE: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Times {
    mean_us: f64,
    p95_us: f64,
    answers: u64,
}

/// Response times of one lane's donors.
#[derive(Debug, Default)]
pub(crate) struct Latencies {
    donors: Vec<Times>,
    reads: u32,
}

impl Latencies {
    /// The donor has answered a read that was asked for so long ago.
    pub(crate) fn answered(&mut self, donor: DonorIndex, took: Duration) {
        let index = donor.0 as usize;
        if self.donors.len() <= index {
            let unknown = Times { mean_us: 0.0, p95_us: FIRST_GUESS_US, answers: 0 };
            self.donors.resize(index + 1, unknown);
        }
        let times = &mut self.donors[index];
        let us = took.as_secs_f64() * 1e6;
        times.answers += 1;
        times.mean_us += (us - times.mean_us) / times.answers.min(32) as f64;
        let step = times.p95_us * 0.02;
        times.p95_us += if us > times.p95_us { step * 0.95 } else { -step * 0.05 };
    }

    /// When to ask another donor as well for what this one has been asked.
    pub(crate) fn hedge_after(&self, donor: DonorIndex) -> Duration {
        let p95_us = self.donors.get(donor.0 as usize).map_or(FIRST_GUESS_US, |t| t.p95_us);
        Duration::from_secs_f64(p95_us / 1e6).clamp(SOONEST, LATEST)
    }

    /// The best of some donors, each with how many requests it has to answer already. `None` if
    /// there is none.
    pub(crate) fn best(&mut self, donors: &[(DonorIndex, usize)]) -> Option<usize> {
        if donors.len() < 2 {
            return (!donors.is_empty()).then_some(0);
        }
        self.reads = self.reads.wrapping_add(1);
        let cost = |&(donor, waiting): &(DonorIndex, usize)| {
            let mean_us = self.donors.get(donor.0 as usize).map_or(0.0, |t| t.mean_us);
            mean_us * (1 + waiting) as f64
        };
        let best = (0..donors.len()).min_by(|&a, &b| cost(&donors[a]).total_cmp(&cost(&donors[b])));
        if !self.reads.is_multiple_of(EXPLORE) {
            return best;
        }
        let others = (0..donors.len()).filter(|at| Some(*at) != best);
        others.min_by(|&a, &b| cost(&donors[a]).total_cmp(&cost(&donors[b])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DonorIndex = DonorIndex(0);
    const B: DonorIndex = DonorIndex(3);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn the_hedge_comes_after_most_answers_and_not_much_later() {
        let mut latencies = Latencies::default();
        for round in 0..5000u64 {
            // 400 to 1400 µs, evenly.
            latencies.answered(A, us(400 + round * 7919 % 1000));
        }
        let after = latencies.hedge_after(A);
        assert!((us(1250)..us(1450)).contains(&after), "{after:?}");
        assert_eq!(latencies.hedge_after(B), us(2000), "nothing is known of it");
        (0..5000).for_each(|_| latencies.answered(A, us(20)));
        assert_eq!(latencies.hedge_after(A), SOONEST);
        (0..5000).for_each(|_| latencies.answered(A, Duration::from_secs(1)));
        assert_eq!(latencies.hedge_after(A), LATEST);
    }

    #[test]
    fn reads_go_to_the_faster_donor_unless_it_has_more_to_do() {
        let mut latencies = Latencies::default();
        (0..10).for_each(|_| {
            latencies.answered(A, us(100));
            latencies.answered(B, us(300));
        });
        let mut chosen = [0; 2];
        for _ in 0..640 {
            chosen[latencies.best(&[(A, 0), (B, 0)]).unwrap()] += 1;
        }
        assert_eq!(chosen, [630, 10]);
        assert_eq!(latencies.best(&[(A, 5), (B, 0)]), Some(1));
        assert_eq!(latencies.best(&[]), None);
    }
}
