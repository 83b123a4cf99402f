//! Belady's optimum: the yardstick that knows the future.
//!
//! Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
//! Journal 5(2), 1966: evict the page whose next use is furthest away.

use std::collections::BTreeSet;

/// Misses on pages that had been resident before, with room for `capacity` pages. `references` are
/// indices below `pages`.
pub(super) fn refetches(references: &[u32], pages: usize, capacity: usize) -> u64 {
    let mut next_use = vec![usize::MAX; references.len()];
    let mut last_seen = vec![usize::MAX; pages];
    for (at, &page) in references.iter().enumerate().rev() {
        next_use[at] = std::mem::replace(&mut last_seen[page as usize], at);
    }
    let mut seen = vec![false; pages];
    // The use at which each resident page is expected, `None` if not resident.
    let mut expected: Vec<Option<usize>> = vec![None; pages];
    let mut by_next_use = BTreeSet::new();
    let mut refetches = 0;
    for (at, &page) in references.iter().enumerate() {
        let slot = page as usize;
        match expected[slot].take() {
            Some(known) => {
                by_next_use.remove(&(known, page));
            }
            None => {
                refetches += u64::from(std::mem::replace(&mut seen[slot], true));
                if by_next_use.len() == capacity
                    && let Some((_, victim)) = by_next_use.pop_last()
                {
                    expected[victim as usize] = None;
                }
            }
        }
        expected[slot] = Some(next_use[at]);
        by_next_use.insert((next_use[at], page));
    }
    refetches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cyclic_sweep_over_twice_the_memory_misses_on_half() {
        let references: Vec<u32> = (0..100).cycle().take(1000).collect();
        // After the first pass, 900 references; each pass hits 49 or 50 pages.
        let missed = refetches(&references, 100, 50);
        assert!((450..=470).contains(&missed), "{missed}");
    }

    #[test]
    fn everything_fits_or_nothing_does() {
        assert_eq!(refetches(&[0, 1, 2, 0, 1, 2], 3, 3), 0);
        assert_eq!(refetches(&[0, 1, 0, 1, 0], 2, 1), 3);
    }
}
