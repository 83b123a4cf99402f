//! A set of small numbers whose lowest member is found at once.
//!
//! Above the bits stand summaries: a bit of a level tells whether the word below it has any bit
//! set. Finding the first member reads one word of each level, which is four words for 16 million
//! members. Summaries instead of free lists, because a list threaded through the members would
//! write to lent memory, and a heap or tree would allocate on the way.

const WORD_BITS: usize = u64::BITS as usize;

/// A set of numbers below a bound fixed at its creation.
///
/// The words are zero when the set is created and are asked for as zeros, so that the kernel
/// commits only those that are ever written.
#[derive(Debug)]
pub(crate) struct Bitmap {
    /// The members, then summaries, up to a level of one word.
    levels: Vec<Vec<u64>>,
    len: u64,
}

impl Bitmap {
    pub(crate) fn new(len: u64) -> Bitmap {
        let mut words = usize::try_from(len).expect("a bitmap fits in memory").div_ceil(WORD_BITS);
        let mut levels = vec![vec![0; words]];
        while words > 1 {
            words = words.div_ceil(WORD_BITS);
            levels.push(vec![0; words]);
        }
        Bitmap { levels, len }
    }

    /// Whether the number is a member; `false` at and beyond the bound.
    pub(crate) fn contains(&self, number: u64) -> bool {
        number < self.len && self.levels[0][number as usize / WORD_BITS] & bit(number as usize) != 0
    }

    pub(crate) fn insert(&mut self, number: u64) {
        assert!(number < self.len, "{number} is beyond the bitmap's {}", self.len);
        let mut at = number as usize;
        for level in &mut self.levels {
            let word = &mut level[at / WORD_BITS];
            let was_empty = *word == 0;
            *word |= bit(at);
            if !was_empty {
                break;
            }
            at /= WORD_BITS;
        }
    }

    /// Whether the number was a member.
    pub(crate) fn remove(&mut self, number: u64) -> bool {
        if !self.contains(number) {
            return false;
        }
        let mut at = number as usize;
        for level in &mut self.levels {
            let word = &mut level[at / WORD_BITS];
            *word &= !bit(at);
            if *word != 0 {
                break;
            }
            at /= WORD_BITS;
        }
        true
    }

    /// The lowest member.
    pub(crate) fn first(&self) -> Option<u64> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = *level.get(at)?;
            if word == 0 {
                return None;
            }
            at = at * WORD_BITS + word.trailing_zeros() as usize;
        }
        Some(at as u64)
    }
}

fn bit(at: usize) -> u64 {
    1 << (at % WORD_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn an_empty_range_has_no_members() {
        let mut bitmap = Bitmap::new(0);
        assert_eq!(bitmap.first(), None);
        assert!(!bitmap.contains(0));
        assert!(!bitmap.remove(0));
    }

    proptest! {
        #[test]
        fn behaves_as_a_set(
            len in 1u64..20_000,
            steps in prop::collection::vec((any::<bool>(), any::<u64>()), 0..300),
        ) {
            let mut bitmap = Bitmap::new(len);
            let mut model = BTreeSet::new();
            for (insert, number) in steps {
                let number = number % len;
                if insert {
                    bitmap.insert(number);
                    model.insert(number);
                } else {
                    prop_assert_eq!(bitmap.remove(number), model.remove(&number));
                }
                prop_assert_eq!(bitmap.first(), model.first().copied());
                prop_assert_eq!(bitmap.contains(number), insert);
            }
        }
    }
}
