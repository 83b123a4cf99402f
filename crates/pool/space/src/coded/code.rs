//! The erasure code of cold memory: which segments stand together, and the arithmetic.
//!
//! A *stripe* is some consecutive segments and their *parities* of the same size. Parities are held
//! like further segments, under numbers that no page has. Any `data` of these *shards* give all the
//! others (Reed and Solomon, 1960, over GF(2^8)). The code goes by rows: page *r* of each parity
//! follows from the pages *r* of the segments. So one page is decoded from as many others as a
//! stripe has segments. The segments themselves stay unchanged: a read goes to one donor, as
//! without the code.
//!
//! The rejected alternative cuts each segment into shards. It codes 16 MiB at a time instead of
//! several such segments together. But it has to move all data to code it, and members of a group
//! have several sizes.

use crate::SpaceError;
use reed_solomon_erasure::galois_8::ReedSolomon;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The number of the first parity. Spaces have fewer segments.
pub const FIRST_PARITY: u64 = 1 << 56;

/// Most segments of a stripe.
pub const MAX_DATA: u8 = 8;

/// Most parities of a stripe.
pub const MAX_PARITY: u8 = 4;

/// How segments that have gone cold are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Code {
    data: u8,
    parity: u8,
}

impl Code {
    /// So many segments with so many parities: of all these extents, any `parity` may be lost.
    pub fn new(data: u8, parity: u8) -> Result<Code, SpaceError> {
        if !(2..=MAX_DATA).contains(&data) || !(1..=MAX_PARITY).contains(&parity) {
            let asked = format!("{data}+{parity}");
            return Err(SpaceError::Code { asked });
        }
        Ok(Code { data, parity })
    }

    /// Segments of a stripe.
    pub fn data(self) -> usize {
        self.data.into()
    }

    /// Parities of a stripe.
    pub fn parity(self) -> usize {
        self.parity.into()
    }

    /// Segments and parities of a stripe.
    pub fn shards(self) -> usize {
        self.data() + self.parity()
    }

    /// The stripe that a segment or parity is of, and which of its shards it is: parities come
    /// last.
    pub fn shard_of(self, segment: u64) -> (u64, usize) {
        match segment.checked_sub(FIRST_PARITY) {
            None => (segment / self.data() as u64, (segment % self.data() as u64) as usize),
            Some(parity) => {
                let (stripe, at) = (parity / self.parity() as u64, parity % self.parity() as u64);
                (stripe, self.data() + at as usize)
            }
        }
    }

    /// The numbers of a stripe's segments. The last stripe of a space may reach beyond its end.
    pub fn segments_of(self, stripe: u64) -> Range<u64> {
        stripe * self.data() as u64..(stripe + 1) * self.data() as u64
    }

    /// The numbers of a stripe's parities.
    pub fn parities_of(self, stripe: u64) -> Range<u64> {
        let first = FIRST_PARITY + stripe * self.parity() as u64;
        first..first + self.parity() as u64
    }

    /// The numbers of all shards of a stripe, in order.
    pub fn shards_of(self, stripe: u64) -> impl Iterator<Item = u64> {
        self.segments_of(stripe).chain(self.parities_of(stripe))
    }

    /// Stripes of a space of so many segments.
    pub fn stripes(self, segments: u64) -> u64 {
        segments.div_ceil(self.data() as u64)
    }

    /// The arithmetic of this code.
    pub fn coder(self) -> Coder {
        let code = ReedSolomon::new(self.data(), self.parity());
        Coder { code: code.expect("the numbers were checked") }
    }
}

/// Whether a number is a parity's, and no segment's of a space.
pub fn is_parity(segment: u64) -> bool {
    segment >= FIRST_PARITY
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for Code {
    type Err = SpaceError;

    fn from_str(text: &str) -> Result<Code, SpaceError> {
        let numbers = text.split_once('+').and_then(|(data, parity)| {
            Some((data.trim().parse().ok()?, parity.trim().parse().ok()?))
        });
        let (data, parity) = numbers.ok_or_else(|| SpaceError::Code { asked: text.to_owned() })?;
        Code::new(data, parity)
    }
}

impl From<Code> for String {
    fn from(code: Code) -> String {
        code.to_string()
    }
}

impl TryFrom<String> for Code {
    type Error = SpaceError;

    fn try_from(text: String) -> Result<Code, SpaceError> {
        text.parse()
    }
}

/// Works out shards from others.
#[derive(Debug)]
pub struct Coder {
    code: ReedSolomon,
}

impl Coder {
    /// Works out those of a stripe's shards that are `wanted` from those that are there, which must
    /// be as many as the stripe has segments, and of equal length. Shards that are neither wanted
    /// nor there are left out. False if there are too few.
    pub fn complete(&self, shards: &mut [Option<Vec<u8>>], wanted: &[usize]) -> bool {
        let data = self.code.data_shard_count();
        let is_wanted_parity = wanted.iter().any(|shard| *shard >= data);
        let worked_out = match is_wanted_parity {
            false => self.code.reconstruct_data(shards),
            true => self.code.reconstruct(shards),
        };
        worked_out.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_asked_for_is_read_and_written_the_same_way() {
        let code: Code = "4+2".parse().unwrap();
        assert_eq!((code.data(), code.parity(), code.shards()), (4, 2, 6));
        assert_eq!(code.to_string(), "4+2");
        let json = serde_json::to_string(&code).unwrap();
        assert_eq!((json.as_str(), serde_json::from_str(&json).unwrap()), ("\"4+2\"", code));
        for bad in ["", "4", "4+", "+2", "1+2", "9+2", "4+0", "4+5", "4-2", "-4+2", "4+2+1"] {
            let error = bad.parse::<Code>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")) || error.contains(bad), "{error}");
            assert!(error.contains("4+2"), "the way out: {error}");
        }
    }

    #[test]
    fn each_segment_and_parity_is_one_shard_of_one_stripe() {
        for (data, parity) in [(2, 1), (4, 2), (8, 4), (3, 2)] {
            let code = Code::new(data, parity).unwrap();
            for stripe in 0..20 {
                for (at, segment) in code.shards_of(stripe).enumerate() {
                    assert_eq!(code.shard_of(segment), (stripe, at));
                    assert_eq!(is_parity(segment), at >= usize::from(data));
                }
            }
        }
        assert_eq!(Code::new(4, 2).unwrap().stripes(9), 3);
    }

    fn filled(seed: u64, shard: usize) -> Vec<u8> {
        let mut mix = hecaton_memory::SplitMix::new(seed ^ shard as u64);
        (0..512).flat_map(|_| mix.draw().to_le_bytes()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whichever shards are lost, up to as many as there are parities, are what they were; one
        /// more, and nothing is made up.
        #[test]
        fn as_many_shards_as_there_are_parities_may_be_lost(
            data in 2u8..=MAX_DATA,
            parity in 1u8..=MAX_PARITY,
            seed: u64,
        ) {
            let code = Code::new(data, parity).unwrap();
            let coder = code.coder();
            let mut shards: Vec<Option<Vec<u8>>> =
                (0..code.shards()).map(|at| (at < code.data()).then(|| filled(seed, at))).collect();
            let parities: Vec<usize> = (code.data()..code.shards()).collect();
            prop_assert!(coder.complete(&mut shards, &parities));
            let whole = shards.clone();
            let mut order: Vec<usize> = (0..code.shards()).collect();
            let mut mix = hecaton_memory::SplitMix::new(seed);
            order.sort_by_key(|_| mix.draw());
            for lost in 1..=code.parity() + 1 {
                let mut shards = whole.clone();
                order[..lost].iter().for_each(|at| shards[*at] = None);
                let is_enough = coder.complete(&mut shards, &order[..lost]);
                prop_assert_eq!(is_enough, lost <= code.parity());
                if is_enough {
                    prop_assert_eq!(&shards, &whole);
                }
            }
        }

        /// A segment that was never written is zeros in the code, and need not be asked for.
        #[test]
        fn holes_are_zeros(seed: u64, hole in 0usize..4) {
            let code = Code::new(4, 2).unwrap();
            let coder = code.coder();
            let mut shards: Vec<Option<Vec<u8>>> =
                (0..6).map(|at| (at < 4).then(|| filled(seed, at))).collect();
            shards[hole] = Some(vec![0; 4096]);
            prop_assert!(coder.complete(&mut shards, &[4, 5]));
            let whole = shards.clone();
            let lost = (hole + 1) % 4;
            shards[lost] = None;
            shards[4] = None;
            prop_assert!(coder.complete(&mut shards, &[lost]));
            prop_assert_eq!(&shards[lost], &whole[lost]);
        }
    }
}
