//! Which pages were written, and the sums that came with them.
//!
//! A page's sum is kept as the borrower gave it, so that a read returns the proof along with the
//! page: what went bad in between, in this memory or on a wire, shows at the borrower.
//!
//! Whether a page was written is a bit of its own and not "its sum is that of a page of zeros",
//! because one page in four billion has that sum by chance. Pages without the bit are never read
//! from the arena: that would commit them.
//!
//! No locks: a sum and its bit are words. The [`gate`](crate::pages::gate) settles which stores,
//! erasures and reads may happen at the same time.

use crate::extents::layout::Layout;
use crate::pages::bits::Bits;
use hecaton_memory::PageSum;
use hecaton_memory::words::SharedWords;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[derive(Debug)]
pub(crate) struct PageSums {
    words: Arc<SharedWords>,
    layout: Layout,
}

impl PageSums {
    pub(crate) fn new(words: Arc<SharedWords>, layout: Layout) -> PageSums {
        PageSums { words, layout }
    }

    /// The sum of a page, if it was written.
    pub(crate) fn get(&self, page: u64) -> Option<PageSum> {
        let is_written = self.bits().get(page);
        is_written.then(|| self.words.narrow()[page as usize].load(Ordering::Relaxed))
    }

    /// The page's contents are in the arena, and this is their sum.
    pub(crate) fn store(&self, page: u64, sum: PageSum) {
        self.words.narrow()[page as usize].store(sum, Ordering::Relaxed);
        self.bits().set(page);
    }

    /// The pages count as never written, and the memory of their sums goes back where it can.
    pub(crate) fn forget(&self, pages: Range<u64>) -> io::Result<()> {
        self.bits().clear(pages.clone());
        self.words.discard_narrow(pages)
    }

    /// How many of the pages were written. More than fit are told as the most that do.
    pub(crate) fn written(&self, pages: Range<u64>) -> u32 {
        u32::try_from(self.bits().count(pages)).unwrap_or(u32::MAX)
    }

    fn bits(&self) -> Bits<'_> {
        Bits(&self.words.wide()[self.layout.written()..self.layout.parked()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn sums(pages: u64) -> PageSums {
        let layout = Layout::new(pages, 0);
        let words = SharedWords::create("sums", layout.wide(), pages as usize).unwrap();
        PageSums::new(Arc::new(words), layout)
    }

    #[test]
    fn a_sum_of_zero_is_a_sum() {
        let sums = sums(100);
        assert_eq!(sums.get(99), None);
        sums.store(99, 0);
        assert_eq!(sums.get(99), Some(0));
    }

    proptest! {
        #[test]
        fn forgets_a_run_and_nothing_beside_it(
            stored in prop::collection::btree_map(0u64..5000, any::<u32>(), 0..100),
            first in 0u64..5000,
            count in 0u64..5000,
        ) {
            let sums = sums(5000);
            for (&page, &sum) in &stored {
                sums.store(page, sum);
            }
            let run = first..(first + count).min(5000);
            let within = stored.keys().filter(|page| run.contains(page)).count();
            prop_assert_eq!(sums.written(run.clone()) as usize, within);
            prop_assert_eq!(sums.written(0..5000) as usize, stored.len());
            sums.forget(run.clone()).unwrap();
            let left: BTreeMap<_, _> =
                (0..5000).filter_map(|page| Some((page, sums.get(page)?))).collect();
            let mut expected = stored;
            expected.retain(|page, _| !run.contains(page));
            prop_assert_eq!(left, expected);
        }
    }
}
