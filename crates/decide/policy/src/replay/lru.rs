//! Least recently used, and the clock that stands in for it: yardsticks that see every reference.
//!
//! No pager can have them, since a hit makes no fault. Their gain over the possible orders is the
//! worth of reference bits.

use std::collections::{BTreeSet, VecDeque};

/// Misses of LRU on pages that had been resident before, with room for `capacity` pages.
/// `references` are indices below `pages`.
pub(super) fn lru_refetches(references: &[u32], pages: usize, capacity: usize) -> u64 {
    // The time of the last use, for those that were ever used.
    let mut last_use: Vec<Option<usize>> = vec![None; pages];
    let mut resident = BTreeSet::new();
    let mut refetches = 0;
    for (at, &page) in references.iter().enumerate() {
        let before = last_use[page as usize].replace(at);
        let hit = before.is_some_and(|before| resident.remove(&(before, page)));
        if !hit {
            refetches += u64::from(before.is_some());
            if resident.len() == capacity {
                resident.pop_first();
            }
        }
        resident.insert((at, page));
    }
    refetches
}

/// Misses of the clock with one reference bit (Corbató, "A paging experiment with the Multics
/// system", 1968), counted as by [`lru_refetches`].
pub(super) fn clock_refetches(references: &[u32], pages: usize, capacity: usize) -> u64 {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        Unseen,
        Away,
        Resident { used: bool },
    }
    let mut states = vec![State::Unseen; pages];
    let mut ring: VecDeque<u32> = VecDeque::with_capacity(capacity);
    let mut refetches = 0;
    for &page in references {
        let state = states[page as usize];
        if let State::Resident { .. } = state {
            states[page as usize] = State::Resident { used: true };
            continue;
        }
        refetches += u64::from(state == State::Away);
        while ring.len() >= capacity
            && let Some(hand) = ring.pop_front()
        {
            if states[hand as usize] == (State::Resident { used: true }) {
                states[hand as usize] = State::Resident { used: false };
                ring.push_back(hand);
            } else {
                states[hand as usize] = State::Away;
            }
        }
        states[page as usize] = State::Resident { used: false };
        ring.push_back(page);
    }
    refetches
}

#[cfg(test)]
mod tests {
    use super::*;

    type Refetches = fn(&[u32], usize, usize) -> u64;

    const YARDSTICKS: [Refetches; 2] = [lru_refetches, clock_refetches];

    #[test]
    fn a_loop_that_does_not_fit_misses_always_and_one_that_fits_never() {
        let references: Vec<u32> = (0..100).cycle().take(1000).collect();
        for refetches in YARDSTICKS {
            assert_eq!(refetches(&references, 100, 99), 900);
            assert_eq!(refetches(&references, 100, 100), 0);
        }
    }

    #[test]
    fn a_page_in_constant_use_stays() {
        // Page 0 between any two of a scan.
        let references: Vec<u32> = (1..500).flat_map(|page| [0, page]).collect();
        for refetches in YARDSTICKS {
            assert_eq!(refetches(&references, 500, 3), 0);
        }
    }
}
