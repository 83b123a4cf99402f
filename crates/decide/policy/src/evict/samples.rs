//! Estimates from a sample how much keeping evicted pages would have been worth.

use std::collections::{HashMap, VecDeque};

/// Evicted pages that are followed at a time. The sampling rate lets them last for about a horizon.
pub(super) const SAMPLES: usize = 1024;

/// Bytes per sample: its entry in the queue, and its slot in the map with one slot of slack.
pub(super) const BYTES_PER_SAMPLE: usize = 16 + 2 * 9;

/// One outcome moves the average by a thirty-second.
const WEIGHT_SHIFT: u32 = 5;

/// The worth of a page that came back at once.
const FULL_WORTH: i64 = 1 << 16;

/// Averages that differ by less than one part in this many count as equal.
const NOISE_SHARE: i64 = 8;

/// Where a page was evicted from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Passing,
    Member,
}

/// The worth of an evicted page is the benefit that keeping it would have had. It is full if the
/// page came back at once, and 0 beyond the horizon, which is half a memory-full of evictions. A
/// page that takes longer costs too much room for the one miss that it would save.
pub(super) struct Samples {
    /// In order of eviction: page, number of the eviction.
    waiting: VecDeque<(u32, u64)>,
    origin: HashMap<u32, Origin>,
    evictions: u64,
    passing_worth: i64,
    member_worth: i64,
}

fn horizon(resident: usize) -> u64 {
    (resident as u64 / 2).max(1)
}

fn worth(distance: u64, resident: usize) -> i64 {
    let horizon = horizon(resident);
    let left = horizon - distance.min(horizon);
    // Below 2^32, the pages of any memory, times 2^17: no overflow.
    (left as i64).saturating_mul(FULL_WORTH) / horizon as i64
}

impl Samples {
    /// Starts without outcomes. Members have full worth until outcomes show otherwise.
    pub(super) fn new() -> Self {
        Self {
            waiting: VecDeque::with_capacity(SAMPLES),
            origin: HashMap::with_capacity(SAMPLES),
            evictions: 0,
            passing_worth: 0,
            member_worth: FULL_WORTH,
        }
    }

    /// Records that `page` was evicted. True if an earlier sampled page turned out not to return.
    pub(super) fn evicted(&mut self, page: u32, origin: Origin, resident: usize) -> bool {
        self.evictions += 1;
        let horizon = horizon(resident);
        let mut outcome = false;
        while let Some(&(page, at)) = self.waiting.front() {
            if self.evictions - at <= horizon && self.waiting.len() < SAMPLES {
                break;
            }
            self.waiting.pop_front();
            if let Some(origin) = self.origin.remove(&page) {
                self.record(origin, 0);
                outcome = true;
            }
        }
        // Members are rarely evicted, so each is sampled; passing pages fill the rest.
        let every = (horizon * 2 / SAMPLES as u64).max(1);
        if (origin == Origin::Member || self.evictions.is_multiple_of(every))
            && self.origin.insert(page, origin).is_none()
        {
            self.waiting.push_back((page, self.evictions));
        }
        outcome
    }

    /// Records that `page` came back. True if the page was followed.
    pub(super) fn returned(&mut self, page: u32, distance: u64, resident: usize) -> bool {
        let Some(origin) = self.origin.remove(&page) else { return false };
        self.record(origin, worth(distance, resident));
        true
    }

    fn record(&mut self, origin: Origin, worth: i64) {
        let average = match origin {
            Origin::Passing => &mut self.passing_worth,
            Origin::Member => &mut self.member_worth,
        };
        *average += (worth - *average) >> WEIGHT_SHIFT;
    }

    /// Whether evicted passing pages are worth clearly more than evicted members.
    pub(super) fn passing_is_better(&self) -> bool {
        self.gain() > self.passing_worth / NOISE_SHARE
    }

    /// Whether a page that came back after `distance` is worth clearly more than a member.
    pub(super) fn is_better_than_members(&self, distance: u64, resident: usize) -> bool {
        let worth = worth(distance, resident);
        worth - worth / NOISE_SHARE > self.member_worth
    }

    /// How much better passing pages are than members, in parts of `full`; 0 if not clearly.
    pub(super) fn gain_in(&self, full: u32) -> u32 {
        if !self.passing_is_better() {
            return 0;
        }
        (self.gain() * i64::from(full) / self.passing_worth) as u32
    }

    fn gain(&self) -> i64 {
        self.passing_worth - self.member_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESIDENT: usize = 2000;

    fn evict_and_return(samples: &mut Samples, origin: Origin, distance: Option<u64>) {
        for page in 0..4000 {
            samples.evicted(page, origin, RESIDENT);
            if let Some(distance) = distance {
                samples.returned(page, distance, RESIDENT);
            }
        }
    }

    #[test]
    fn members_that_do_not_come_back_are_worth_less_than_passing_pages_that_do() {
        let mut samples = Samples::new();
        assert!(!samples.passing_is_better());
        evict_and_return(&mut samples, Origin::Member, None);
        evict_and_return(&mut samples, Origin::Passing, Some(300));
        assert!(samples.passing_is_better());
        assert!(samples.gain_in(256) > 200);
        assert!(samples.is_better_than_members(300, RESIDENT));
    }

    #[test]
    fn equals_are_not_better() {
        let mut samples = Samples::new();
        evict_and_return(&mut samples, Origin::Member, Some(300));
        evict_and_return(&mut samples, Origin::Passing, Some(290));
        assert!(!samples.passing_is_better());
        assert_eq!(samples.gain_in(256), 0);
        assert!(!samples.is_better_than_members(300, RESIDENT));
        assert!(samples.is_better_than_members(0, RESIDENT));
        assert!(!samples.is_better_than_members(u64::MAX, RESIDENT));
    }

    #[test]
    fn only_so_many_are_followed() {
        let mut samples = Samples::new();
        for page in 0..100_000 {
            samples.evicted(page, Origin::Member, 50_000);
        }
        assert!(samples.waiting.len() <= SAMPLES && samples.origin.len() <= SAMPLES);
    }
}
