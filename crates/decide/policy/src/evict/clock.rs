//! When a page was evicted, in few enough bits to be kept for every page of a space.

/// Bits in a stamp.
pub const STAMP_BITS: u32 = 20;

/// Ticks that one memory-full of evictions takes, about: the resolution of a refault distance.
const TICKS_PER_CAPACITY: u64 = 1024;

/// Counts evictions, and tells how many lie between a stamp and now.
///
/// A tick is a power of two of evictions, about a thousandth of the local memory. Stamps wrap
/// after 2^20 ticks, a thousand memory-fulls; a page that was away for longer seems to have been
/// away for less, which costs one wrong placement.
#[derive(Clone, Debug)]
pub struct EvictionClock {
    evictions: u64,
    tick_shift: u32,
}

impl EvictionClock {
    /// A clock at zero, for a local memory of `capacity_pages`.
    pub fn new(capacity_pages: usize) -> Self {
        let tick = (capacity_pages as u64 / TICKS_PER_CAPACITY).max(1);
        Self { evictions: 0, tick_shift: tick.ilog2() }
    }

    /// Counts `pages` more evictions.
    pub fn advance(&mut self, pages: u64) {
        self.evictions += pages;
    }

    /// All evictions so far.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// The stamp for a page that is evicted now: below 2^[`STAMP_BITS`].
    pub fn stamp(&self) -> u32 {
        ((self.evictions >> self.tick_shift) & ((1 << STAMP_BITS) - 1)) as u32
    }

    /// Evictions since `stamp` was taken, rounded to ticks.
    pub fn distance(&self, stamp: u32) -> u64 {
        let ticks = self.stamp().wrapping_sub(stamp) & ((1 << STAMP_BITS) - 1);
        u64::from(ticks) << self.tick_shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_right_to_a_tick_across_the_wrap() {
        let mut clock = EvictionClock::new(8192);
        clock.advance((1 << STAMP_BITS) * 8 - 100);
        for away in [0, 1, 50, 1000, 100_000] {
            let stamp = clock.stamp();
            assert!(stamp < 1 << STAMP_BITS);
            clock.advance(away);
            assert!(clock.distance(stamp).abs_diff(away) <= 8, "{away}");
        }
    }
}
