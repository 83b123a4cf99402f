//! How many extents a donor wants back from each space when it has lent more than it is to lend.
//!
//! Each borrower gives according to what it has. It chooses which extents go: it alone knows which
//! have another copy, and which donors have room. A borrower that gives nothing may have good
//! reasons (one copy of everything, and no donor with room). So after a while the others are asked
//! for its part, and it is still asked for its own part.
//!
//! Where little is wanted of many, only some are asked at first. They may all be unable to give,
//! and so may those that are asked next: so each time twice as many are asked as have been in vain,
//! and of *n* holders the last one after log₃ *n* times. All at once were rejected: each would give
//! one extent, of which most would be copied for nothing, or have been the second copy.

use std::cmp::Reverse;

/// A space with extents at the donor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Extents that it has there.
    pub extents: u64,
    /// Pages in each of them.
    pub extent_pages: u64,
    /// It was asked for some a while ago, and has given none since.
    pub is_stuck: bool,
}

impl Holder {
    fn pages(&self) -> u64 {
        self.extents * self.extent_pages
    }
}

/// How many extents each holder is to give back, so that together they are at least `excess_pages`,
/// or everything. The same input gives the same answer.
pub fn shares(excess_pages: u64, holders: &[Holder]) -> Vec<u64> {
    let all = spread(excess_pages, holders, |_| true);
    if holders.iter().all(|holder| holder.is_stuck) {
        return all;
    }
    let mut of_others = spread(excess_pages, holders, |holder| !holder.is_stuck);
    ask_more(&mut of_others, holders);
    all.into_iter().zip(of_others).map(|(part, instead)| part.max(instead)).collect()
}

/// Has twice as many give something as were asked in vain, if there are so many: those first that
/// have most.
fn ask_more(shares: &mut [u64], holders: &[Holder]) {
    let in_vain = holders.iter().filter(|holder| holder.is_stuck && holder.extents > 0).count();
    let asked = shares.iter().filter(|&&share| share > 0).count();
    let is_unasked =
        |&at: &usize| shares[at] == 0 && !holders[at].is_stuck && holders[at].extents > 0;
    let mut unasked: Vec<usize> = (0..holders.len()).filter(is_unasked).collect();
    unasked.sort_by_key(|&at| (Reverse(holders[at].pages()), at));
    unasked.truncate((2 * in_vain).saturating_sub(asked));
    unasked.into_iter().for_each(|at| shares[at] = 1);
}

/// In proportion to what each has. For the rest that rounding leaves, the holders with the largest
/// remainders give one extent more each.
fn spread(excess_pages: u64, holders: &[Holder], takes_part: impl Fn(&Holder) -> bool) -> Vec<u64> {
    let pages = |holder: &Holder| if takes_part(holder) { holder.pages() } else { 0 };
    let total: u64 = holders.iter().map(pages).sum();
    let excess_pages = excess_pages.min(total);
    let part = |holder: &Holder| {
        (u128::from(excess_pages) * u128::from(pages(holder)) / u128::from(total.max(1))) as u64
    };
    let mut given: Vec<u64> =
        holders.iter().map(|holder| part(holder) / holder.extent_pages.max(1)).collect();
    let mut covered: u64 = given.iter().zip(holders).map(|(n, h)| n * h.extent_pages).sum();
    let mut by_rest: Vec<usize> = (0..holders.len())
        .filter(|&at| given[at] * holders[at].extent_pages < pages(&holders[at]))
        .collect();
    by_rest.sort_by_key(|&at| {
        (u64::MAX - (part(&holders[at]) - given[at] * holders[at].extent_pages), at)
    });
    for at in by_rest {
        if covered >= excess_pages {
            break;
        }
        given[at] += 1;
        covered += holders[at].extent_pages;
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn holder(extents: u64) -> Holder {
        Holder { extents, extent_pages: 4096, is_stuck: false }
    }

    #[test]
    fn each_gives_according_to_what_it_has() {
        let holders = [holder(30), holder(10), holder(0)];
        assert_eq!(shares(20 * 4096, &holders), [15, 5, 0]);
        assert_eq!(shares(0, &holders), [0, 0, 0]);
        assert_eq!(shares(1, &holders), [1, 0, 0], "no less than what is asked");
        assert_eq!(shares(u64::MAX, &holders), [30, 10, 0]);
        assert!(shares(7, &[]).is_empty());
    }

    #[test]
    fn many_that_have_little_are_not_all_asked_for_one_page() {
        assert_eq!(shares(1, &[holder(2); 50]).iter().sum::<u64>(), 1);
        assert_eq!(shares(3 * 4096, &[holder(2); 50]).iter().sum::<u64>(), 3);
    }

    #[test]
    fn others_give_what_one_cannot_and_it_is_still_asked() {
        let stuck = Holder { is_stuck: true, ..holder(10) };
        assert_eq!(shares(8 * 4096, &[stuck, holder(10)]), [4, 8]);
        assert_eq!(shares(8 * 4096, &[stuck, stuck]), [4, 4]);
        assert_eq!(shares(8 * 4096, &[stuck, holder(2)]), [7, 2]);
    }

    #[test]
    fn twice_as_many_are_asked_as_were_in_vain() {
        let stuck = Holder { is_stuck: true, ..holder(1) };
        let (little, more) = (holder(1), holder(3));
        assert_eq!(shares(4096, &[little, little, more, little]), [0, 0, 1, 0]);
        assert_eq!(shares(4096, &[stuck, little, more, little]), [0, 1, 1, 0]);
        assert_eq!(shares(4096, &[stuck, little, stuck, little]), [1, 1, 0, 1]);
        assert_eq!(shares(2 * 4096, &[stuck, little, more, more]), [0, 0, 1, 1], "they are two");
        let nothing = Holder { extents: 0, ..stuck };
        assert_eq!(shares(4096, &[nothing, little, little]), [0, 1, 0], "it was not asked");
    }

    fn any_holder() -> impl Strategy<Value = Holder> {
        (0u64..50, 0u32..6, any::<bool>()).prop_map(|(extents, order, is_stuck)| Holder {
            extents,
            extent_pages: 1 << order,
            is_stuck,
        })
    }

    proptest! {
        #[test]
        fn enough_is_asked_for_and_nothing_that_is_not_there(
            holders in prop::collection::vec(any_holder(), 0..12),
            excess in 0u64..4000,
        ) {
            let shares = shares(excess, &holders);
            let total: u64 = holders.iter().map(Holder::pages).sum();
            let asked: u64 = shares.iter().zip(&holders).map(|(n, h)| n * h.extent_pages).sum();
            prop_assert!(asked >= excess.min(total));
            for (share, holder) in shares.iter().zip(&holders) {
                prop_assert!(*share <= holder.extents);
            }
            if holders.iter().all(|holder| !holder.is_stuck) {
                let largest = holders.iter().map(|holder| holder.extent_pages).max().unwrap_or(0);
                prop_assert!(asked < excess.min(total) + largest.max(1), "more than is needed");
            }
        }

        #[test]
        fn nobody_is_asked_late(
            mut holders in prop::collection::vec(any_holder(), 1..200),
            excess in 1u64..100,
        ) {
            holders.iter_mut().for_each(|holder| holder.is_stuck = false);
            let able = |holder: &&Holder| holder.extents > 0;
            let count = holders.iter().filter(able).count();
            let mut most = 1;
            while holders.iter().filter(able).any(|holder| !holder.is_stuck) {
                let shares = shares(excess, &holders);
                for (share, holder) in shares.into_iter().zip(&mut holders) {
                    holder.is_stuck |= share > 0;
                }
                let asked = holders.iter().filter(|holder| holder.is_stuck).count();
                prop_assert!(asked >= most.min(count), "{} of {} are asked", asked, count);
                most *= 3;
            }
        }
    }
}
