//! One bit for each page, in words that many threads read and change at once.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of pages, in somebody's words: page 0 is the lowest bit of the first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bits<'a>(pub(crate) &'a [AtomicU64]);

/// Words for the bits of so many pages, all clear.
pub(crate) fn words_for(pages: u64) -> Box<[AtomicU64]> {
    (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

impl<'a> Bits<'a> {
    pub(crate) fn get(self, page: u64) -> bool {
        let (word, bit) = self.word_of(page);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// A thread that sees the bit also sees all stores before this call.
    pub(crate) fn set(self, page: u64) {
        let (word, bit) = self.word_of(page);
        // Mostly it is set already, and 64 pages share the word.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Release);
        }
    }

    /// Whether any of the bits was set.
    pub(crate) fn clear(self, pages: Range<u64>) -> bool {
        let mut any = false;
        for (word, bits) in self.words_of(pages) {
            if word.load(Ordering::Relaxed) & bits != 0 {
                any |= word.fetch_and(!bits, Ordering::AcqRel) & bits != 0;
            }
        }
        any
    }

    /// How many are set.
    pub(crate) fn count(self, pages: Range<u64>) -> u64 {
        let set = |(word, bits): (&AtomicU64, u64)| word.load(Ordering::Relaxed) & bits;
        self.words_of(pages).map(|word| u64::from(set(word).count_ones())).sum()
    }

    /// The words that hold the bits of the pages, each with those bits set.
    fn words_of(self, pages: Range<u64>) -> impl Iterator<Item = (&'a AtomicU64, u64)> {
        let mut page = pages.start;
        std::iter::from_fn(move || {
            if page >= pages.end {
                return None;
            }
            let (word, lowest) = self.word_of(page);
            let end = pages.end.min((page / 64 + 1) * 64);
            // A whole word would shift by its width.
            let bits = u64::MAX >> (64 - (end - page)) << lowest.trailing_zeros();
            page = end;
            Some((word, bits))
        })
    }

    fn word_of(self, page: u64) -> (&'a AtomicU64, u64) {
        (&self.0[page as usize / 64], 1 << (page % 64))
    }
}

/// Runs of pages that follow one another and of which `is_in` is true.
pub(crate) fn runs(
    pages: Range<u64>,
    is_in: impl Fn(u64) -> bool,
) -> impl Iterator<Item = Range<u64>> {
    let mut from = pages.start;
    std::iter::from_fn(move || {
        let start = (from..pages.end).find(|&page| is_in(page))?;
        let end = (start..pages.end).find(|&page| !is_in(page)).unwrap_or(pages.end);
        from = end;
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn are_a_set_of_pages(
            set in prop::collection::btree_set(0u64..1000, 0..100),
            first in 0u64..1000,
            count in 0u64..1000,
        ) {
            let words = words_for(1000);
            let bits = Bits(&words);
            set.iter().for_each(|&page| bits.set(page));
            let run = first..(first + count).min(1000);
            let within = set.iter().filter(|page| run.contains(page)).count();
            prop_assert_eq!(bits.count(run.clone()) as usize, within);
            let in_runs: BTreeSet<u64> = runs(0..1000, |page| bits.get(page)).flatten().collect();
            prop_assert_eq!(&in_runs, &set);
            prop_assert_eq!(bits.clear(run.clone()), within > 0);
            let left: BTreeSet<u64> = (0..1000).filter(|&page| bits.get(page)).collect();
            let mut expected = set;
            expected.retain(|page| !run.contains(page));
            prop_assert_eq!(left, expected);
        }
    }

    #[test]
    fn a_run_ends_where_another_begins() {
        let found: Vec<_> = runs(2..20, |page| page % 5 != 0).collect();
        assert_eq!(found, [2..5, 6..10, 11..15, 16..20]);
    }
}
