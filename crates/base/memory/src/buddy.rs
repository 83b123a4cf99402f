//! The buddy allocator that carves an arena into extents.
//!
//! Knowlton's binary buddies (CACM 1965): a block of order *k* is 2^*k* pages at a multiple of
//! 2^*k*; a free one that is larger than wanted is halved, and two free halves of one block become
//! that block again. The state is two bits for each block of each order, "free" and "lent", and so
//! at most four bits for each page; memory for them is committed only where extents of that order
//! are. The second bit is what makes a wrong free an error instead of an overlap.
//!
//! The lowest block that fits is taken, which keeps the upper end of the arena whole for large
//! extents.

use crate::bitmap::Bitmap;

/// Hands out power-of-two runs of the pages `0..pages`. One for each NUMA node's part of an arena.
///
/// Invariant: every page belongs to exactly one block that is free or lent, and no two free blocks
/// are halves of the same block.
#[derive(Debug)]
pub struct Buddy {
    pages: u64,
    free_pages: u64,
    /// By order.
    free: Vec<Bitmap>,
    lent: Vec<Bitmap>,
}

/// The freed block is not a lent block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no lent block of order {order} at page {first}")]
pub struct NotLent {
    /// The first page that was named.
    pub first: u64,
    /// The order that was named.
    pub order: u8,
}

/// The block that was asked for is not wholly free, or is not a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block of order {order} at page {first} is not free")]
pub struct NotFree {
    /// The first page that was named.
    pub first: u64,
    /// The order that was named.
    pub order: u8,
}

impl Buddy {
    /// An allocator of `pages` pages, all free. Any number will do; one that is no power of two
    /// begins as several blocks.
    pub fn new(pages: u64) -> Buddy {
        let orders = pages.checked_ilog2().map_or(0, |highest| highest + 1);
        let blocks = || (0..orders).map(|order| Bitmap::new(pages >> order)).collect();
        let mut buddy = Buddy { pages, free_pages: pages, free: blocks(), lent: blocks() };
        let mut first = 0;
        while first < pages {
            let fits = (pages - first).ilog2();
            let order = if first == 0 { fits } else { fits.min(first.trailing_zeros()) };
            buddy.free[order as usize].insert(first >> order);
            first += 1 << order;
        }
        buddy
    }

    /// The first page of a block of that order, or none if there is no room for one.
    pub fn allocate(&mut self, order: u8) -> Option<u64> {
        let wanted = usize::from(order);
        let (from, index) = (wanted..self.free.len())
            .find_map(|order| self.free[order].first().map(|index| (order, index)))?;
        let first = index << from;
        self.carve(from, first, order);
        Some(first)
    }

    /// Takes the very block that begins at `first`. This is how lent blocks are entered again after
    /// a restart.
    pub fn reserve(&mut self, first: u64, order: u8) -> Result<(), NotFree> {
        let wanted = usize::from(order);
        let within = (wanted..self.free.len())
            .find(|&order| self.free[order].contains(first >> order))
            .filter(|_| first.trailing_zeros() >= u32::from(order))
            .ok_or(NotFree { first, order })?;
        self.carve(within, first, order);
        Ok(())
    }

    /// Takes a block back.
    pub fn free(&mut self, first: u64, order: u8) -> Result<(), NotLent> {
        let not_lent = NotLent { first, order };
        let mut at = usize::from(order);
        let lent = self.lent.get_mut(at).ok_or(not_lent)?;
        if first.trailing_zeros() < u32::from(order) || !lent.remove(first >> order) {
            return Err(not_lent);
        }
        self.free_pages += 1 << order;
        let mut index = first >> order;
        // The block of the highest order has no other half within the arena.
        while self.free[at].remove(index ^ 1) {
            index >>= 1;
            at += 1;
        }
        self.free[at].insert(index);
        Ok(())
    }

    /// Pages in all.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that are not lent.
    pub fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// The order of the largest extent that could be lent now.
    pub fn largest_free_order(&self) -> Option<u8> {
        (0..self.free.len()).rfind(|&order| self.free[order].first().is_some()).map(|o| o as u8)
    }

    /// Lends the block of `order` that begins at `first` out of the free block of order `from`
    /// around it; the rest of that one stays free.
    fn carve(&mut self, from: usize, first: u64, order: u8) {
        let wanted = usize::from(order);
        let was_free = self.free[from].remove(first >> from);
        debug_assert!(was_free, "carving from a block that is not free");
        for half in (wanted..from).rev() {
            self.free[half].insert((first >> half) ^ 1);
        }
        self.lent[wanted].insert(first >> order);
        self.free_pages -= 1 << order;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(u8),
        Reserve(u64, u8),
        Free(prop::sample::Index),
        FreeWrongly(u64, u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u8..8).prop_map(Step::Allocate),
            1 => (0u64..600, 0u8..8).prop_map(|(first, order)| Step::Reserve(first, order)),
            3 => any::<prop::sample::Index>().prop_map(Step::Free),
            1 => (0u64..600, 0u8..12).prop_map(|(first, order)| Step::FreeWrongly(first, order)),
        ]
    }

    fn overlaps(lent: &BTreeMap<u64, u8>, first: u64, order: u8) -> bool {
        lent.iter().any(|(&other, &other_order)| {
            first < other + (1 << other_order) && other < first + (1 << order)
        })
    }

    /// The blocks of a fresh allocator: what must be there again when everything is given back.
    fn free_blocks(buddy: &Buddy) -> Vec<(usize, u64)> {
        let blocks = |order: usize| (0..buddy.pages >> order).map(move |index| (order, index));
        (0..buddy.free.len())
            .flat_map(blocks)
            .filter(|&(order, index)| buddy.free[order].contains(index))
            .collect()
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(
            pages in 0u64..600,
            steps in prop::collection::vec(step(), 0..200),
        ) {
            let mut buddy = Buddy::new(pages);
            let whole = free_blocks(&buddy);
            let mut lent = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Allocate(order) => match buddy.allocate(order) {
                        Some(first) => {
                            prop_assert_eq!(first % (1 << order), 0);
                            prop_assert!(first + (1 << order) <= pages);
                            prop_assert!(!overlaps(&lent, first, order));
                            lent.insert(first, order);
                        }
                        None => {
                            // Refused only if no aligned run of that size is wholly free.
                            let run_is_free =
                                |index: u64| !overlaps(&lent, index << order, order);
                            prop_assert!(!(0..pages >> order).any(run_is_free));
                        }
                    },
                    Step::Reserve(first, order) => {
                        let possible = first % (1 << order) == 0
                            && first + (1 << order) <= pages
                            && !overlaps(&lent, first, order);
                        prop_assert_eq!(buddy.reserve(first, order).is_ok(), possible);
                        if possible {
                            lent.insert(first, order);
                        }
                    }
                    Step::Free(index) if !lent.is_empty() => {
                        let (&first, &order) = lent.iter().nth(index.index(lent.len())).unwrap();
                        lent.remove(&first);
                        prop_assert_eq!(buddy.free(first, order), Ok(()));
                        let again = Err(NotLent { first, order });
                        prop_assert_eq!(buddy.free(first, order), again, "freed twice");
                    }
                    Step::Free(_) => {}
                    Step::FreeWrongly(first, order) => {
                        if lent.get(&first) != Some(&order) {
                            prop_assert_eq!(buddy.free(first, order), Err(NotLent { first, order }));
                        }
                    }
                }
                let lent_pages: u64 = lent.values().map(|order| 1u64 << order).sum();
                prop_assert_eq!(buddy.free_pages(), pages - lent_pages);
                let largest = (0..10u8).rfind(|&order| {
                    (0..pages >> order).any(|index| !overlaps(&lent, index << order, order))
                });
                prop_assert_eq!(buddy.largest_free_order(), largest);
            }
            for (first, order) in lent {
                prop_assert_eq!(buddy.free(first, order), Ok(()));
            }
            prop_assert_eq!(free_blocks(&buddy), whole, "not all halves were joined again");
        }
    }

    #[test]
    fn a_power_of_two_comes_back_as_one_block() {
        let mut buddy = Buddy::new(1 << 14);
        let blocks: Vec<u64> = std::iter::from_fn(|| buddy.allocate(0)).collect();
        assert_eq!(blocks.len(), 1 << 14);
        assert_eq!((buddy.free_pages(), buddy.largest_free_order()), (0, None));
        blocks.into_iter().rev().for_each(|first| buddy.free(first, 0).unwrap());
        assert_eq!(buddy.largest_free_order(), Some(14));
    }

    #[test]
    fn an_odd_size_is_lent_to_its_last_page() {
        let mut buddy = Buddy::new(7);
        assert_eq!(buddy.allocate(3), None);
        assert_eq!(buddy.allocate(2), Some(0));
        assert_eq!(buddy.allocate(1), Some(4));
        assert_eq!(buddy.allocate(0), Some(6));
        assert_eq!(buddy.free_pages(), 0);
    }
}
