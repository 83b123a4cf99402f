//! Records each guest page's owner at one moment, and sums free memory in whole pieces.

use crate::bench::program::pages::{Owner, Stretch};
use serde::Serialize;

const PAGE_BYTES: u64 = 4096;
/// Pages of a huge page (2 MiB).
const HUGE: usize = 512;
/// Pages of a kernel memory block (128 MiB), the largest unit given back here; 1 GiB in the paper.
const BLOCK: usize = 64 * HUGE;

/// Owners of all pages, without the gaps between stretches.
pub(super) struct Snapshot {
    /// First page number and owners of each stretch, padded to whole huge pages.
    stretches: Vec<(u64, Vec<Owner>)>,
}

/// Bytes by owner, and free bytes in whole pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(super) struct Sums {
    pub(super) application_bytes: u64,
    pub(super) other_bytes: u64,
    pub(super) free_bytes: u64,
    /// The part of `free_bytes` in whole, aligned 2 MiB.
    pub(super) free_in_huge_bytes: u64,
    /// The part of `free_bytes` in whole, aligned 128 MiB.
    pub(super) free_in_blocks_bytes: u64,
}

impl Snapshot {
    pub(super) fn of(stretches: &[Stretch]) -> anyhow::Result<Self> {
        let stretch = |stretch: &Stretch| {
            let mut pages = stretch.pages()?;
            let before = (stretch.first % HUGE as u64) as usize;
            pages.splice(0..0, std::iter::repeat_n(Owner::Gone, before));
            pages.resize(pages.len().next_multiple_of(HUGE), Owner::Gone);
            Ok((stretch.first - before as u64, pages))
        };
        let stretches = stretches.iter().map(stretch).collect::<anyhow::Result<_>>()?;
        Ok(Self { stretches })
    }

    /// This snapshot in the layout of `before`; pages that no longer exist are [`Owner::Gone`].
    pub(super) fn within(self, before: &Self) -> Self {
        let of = |number: u64| {
            let mut found = self.stretches.iter().filter_map(|(first, pages)| {
                pages.get(usize::try_from(number.checked_sub(*first)?).ok()?).copied()
            });
            found.find(|owner| *owner != Owner::Gone).unwrap_or(Owner::Gone)
        };
        let stretch = |(first, pages): &(u64, Vec<Owner>)| {
            (*first, (*first..first + pages.len() as u64).map(of).collect())
        };
        Self { stretches: before.stretches.iter().map(stretch).collect() }
    }

    pub(super) fn sums(&self) -> Sums {
        let count = |wanted: Owner| {
            let pages = self.stretches.iter().flat_map(|(_, pages)| pages);
            pages.filter(|owner| **owner == wanted).count() as u64 * PAGE_BYTES
        };
        Sums {
            application_bytes: count(Owner::Process),
            other_bytes: count(Owner::Other),
            free_bytes: count(Owner::Free),
            free_in_huge_bytes: self.free_in_pieces(HUGE),
            free_in_blocks_bytes: self.free_in_pieces(BLOCK),
        }
    }

    /// Free bytes in whole, aligned pieces of `size` pages.
    fn free_in_pieces(&self, size: usize) -> u64 {
        let of = |(first, pages): &(u64, Vec<Owner>)| {
            let before = (*first as usize).next_multiple_of(size) - *first as usize;
            let pieces = pages.get(before..).unwrap_or_default().chunks_exact(size);
            pieces.filter(|piece| piece.iter().all(|owner| *owner == Owner::Free)).count()
        };
        let pieces: usize = self.stretches.iter().map(of).sum();
        pieces as u64 * size as u64 * PAGE_BYTES
    }

    /// Owners of all pages, one after the other.
    pub(super) fn pages(&self) -> Vec<Owner> {
        self.stretches.iter().flat_map(|(_, pages)| pages).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(stretches: &[(u64, Vec<Owner>)]) -> Snapshot {
        Snapshot { stretches: stretches.to_vec() }
    }

    #[test]
    fn pieces_are_whole_and_aligned() {
        let mut pages = vec![Owner::Free; 4 * HUGE];
        pages[HUGE + 7] = Owner::Process;
        pages[2 * HUGE] = Owner::Other;
        let sums = snapshot(&[(0, pages)]).sums();
        assert_eq!(sums.free_bytes, (4 * HUGE as u64 - 2) * PAGE_BYTES);
        assert_eq!((sums.application_bytes, sums.other_bytes), (PAGE_BYTES, PAGE_BYTES));
        assert_eq!(sums.free_in_huge_bytes, 2 * (2 << 20));
        assert_eq!(sums.free_in_blocks_bytes, 0);
        // A block's worth of free pages that is not aligned is no whole block.
        let free = |first: usize, count| snapshot(&[(first as u64, vec![Owner::Free; count])]);
        assert_eq!(free(HUGE, BLOCK).sums().free_in_blocks_bytes, 0);
        assert_eq!(free(BLOCK, BLOCK).sums().free_in_blocks_bytes, 128 << 20);
        assert_eq!(free(HUGE, 2 * BLOCK).sums().free_in_blocks_bytes, 128 << 20);
    }

    #[test]
    fn what_has_no_whole_huge_page_at_its_ends_is_filled_up_with_nothing() {
        let stretch = Stretch { first: HUGE as u64 + 2, owners: "55".into() };
        let snapshot = Snapshot::of(&[stretch]).unwrap();
        let (first, pages) = &snapshot.stretches[0];
        assert_eq!((*first, pages.len()), (HUGE as u64, HUGE));
        assert_eq!(
            (pages[1], pages[2], pages[5], pages[6]),
            (Owner::Gone, Owner::Free, Owner::Free, Owner::Gone)
        );
        assert_eq!(snapshot.sums().free_bytes, 4 * PAGE_BYTES);
    }

    #[test]
    fn what_was_given_back_leaves_its_place() {
        let before = snapshot(&[(0, vec![Owner::Process; HUGE]), (5120, vec![Owner::Other; HUGE])]);
        let after = snapshot(&[(5120, vec![Owner::Free; HUGE])]).within(&before);
        let mut expected = vec![Owner::Gone; HUGE];
        expected.extend(vec![Owner::Free; HUGE]);
        assert_eq!(after.pages(), expected);
    }
}
