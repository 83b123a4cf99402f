//! Numbers that look random and are the same for the same seed: for choices, faults and contents
//! that are to be repeated. Everybody can foretell them; [`random_u64`](crate::random_u64) is for
//! what nobody should.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug, Default)]
pub struct SplitMix(u64);

impl SplitMix {
    /// The sequence of a seed.
    pub const fn new(seed: u64) -> SplitMix {
        SplitMix(seed)
    }

    /// The next number.
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As published with the reference implementation, for the seed 1234567.
    #[test]
    fn the_sequence_is_the_published_one() {
        let mut numbers = SplitMix::new(1_234_567);
        let drawn = [numbers.draw(), numbers.draw(), numbers.draw()];
        assert_eq!(
            drawn,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
