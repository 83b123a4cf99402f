//! Which donor gets the next extent of a space.
//!
//! Four wishes, in this order. *Apart*: copies of a segment in different racks, or at least on
//! different hosts, or one failure takes them all. *Room*: the donor with the most free memory is the least likely to
//! want it back soon, so only donors with nearly as much as the best are looked at. *Nearness*:
//! among those, the nearest. *Spread*: among the equally near, the one that holds the fewest
//! extents of this space, which is round robin for a space that grows, and lets a sweep over it
//! draw on every donor's bandwidth.
//!
//! Room comes before nearness because a near donor that fills up first has to move extents away
//! again (decision 6 of the design), which costs more than the difference in latency. The
//! power-of-two-choices alternative was rejected: the borrower knows all its donors anyway, and a
//! deterministic choice can be replayed.

use crate::site::Apart;

/// What is known of a donor when an extent is to be placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Pages that the donor said are free in its last answer.
    pub free_pages: u64,
    /// False for a donor that is unreachable or draining, or that already holds another member of
    /// the same group.
    pub in_service: bool,
    /// Extents of this space that the donor already holds.
    pub extents_held_by_this_space: u64,
    /// How far it is, 0 for the borrower's own host.
    pub distance: u32,
    /// How far it is from the closest of the group's other members, as to failures.
    pub apart: Apart,
}

/// A donor whose free memory is at least this share (in eighths) of the best donor's counts as
/// having as much room.
const NEAR_EQUAL_EIGHTHS: u64 = 6;

/// The index in `candidates` of the donor to ask for an extent of `need_pages`, or `None` when
/// nobody has the room. The same input gives the same answer.
pub fn choose(candidates: &[Candidate], need_pages: u64) -> Option<usize> {
    let has_room = |c: &Candidate| c.in_service && c.free_pages >= need_pages;
    let apart = candidates.iter().filter(|c| has_room(c)).map(|c| c.apart).max()?;
    let fits = |c: &Candidate| has_room(c) && c.apart == apart;
    let most_free = candidates.iter().filter(|c| fits(c)).map(|c| c.free_pages).max()?;
    // Divided before it is multiplied: a donor's word is not trusted to stay clear of overflow.
    let enough = most_free / 8 * NEAR_EQUAL_EIGHTHS;
    candidates
        .iter()
        .enumerate()
        .filter(|(_, c)| fits(c) && c.free_pages >= enough)
        .min_by_key(|(index, c)| {
            (c.distance, c.extents_held_by_this_space, u64::MAX - c.free_pages, *index)
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn donor(free_pages: u64) -> Candidate {
        Candidate {
            free_pages,
            in_service: true,
            extents_held_by_this_space: 0,
            distance: 1,
            apart: Apart::Racks,
        }
    }

    #[test]
    fn nobody_with_room_is_nobody() {
        assert_eq!(choose(&[], 1), None);
        assert_eq!(choose(&[donor(9), donor(3)], 10), None);
        assert_eq!(choose(&[Candidate { in_service: false, ..donor(99) }], 10), None);
    }

    #[test]
    fn copies_are_kept_apart_where_that_is_possible() {
        let on_the_host = Candidate { apart: Apart::Not, distance: 0, ..donor(9000) };
        let in_the_rack = Candidate { apart: Apart::Hosts, distance: 0, ..donor(800) };
        assert_eq!(choose(&[on_the_host, in_the_rack, donor(20)], 10), Some(2));
        assert_eq!(choose(&[on_the_host, in_the_rack, donor(5)], 10), Some(1));
        assert_eq!(choose(&[on_the_host, donor(5)], 10), Some(0), "better than no copy at all");
    }

    #[test]
    fn room_beats_nearness_and_nearness_beats_spread() {
        let near = Candidate { distance: 0, ..donor(1000) };
        assert_eq!(choose(&[near, donor(4000)], 10), Some(1));
        let near = Candidate { distance: 0, extents_held_by_this_space: 7, ..donor(3900) };
        assert_eq!(choose(&[donor(4000), near], 10), Some(1));
    }

    #[test]
    fn a_growing_space_is_spread_evenly_over_equal_donors() {
        let mut donors = [donor(1 << 20); 3];
        for _ in 0..12 {
            let at = choose(&donors, 16384).unwrap();
            donors[at].extents_held_by_this_space += 1;
            donors[at].free_pages -= 16384;
        }
        assert_eq!(donors.map(|d| d.extents_held_by_this_space), [4, 4, 4]);
    }

    #[test]
    fn unequal_donors_end_up_with_equal_room() {
        let mut donors = [donor(4 << 20), donor(1 << 20)];
        while let Some(at) = choose(&donors, 16384) {
            donors[at].extents_held_by_this_space += 1;
            donors[at].free_pages -= 16384;
            if donors[0].free_pages >= 2 << 20 {
                assert_eq!(at, 0);
            }
        }
        assert!(donors.iter().all(|d| d.free_pages < 16384));
    }

    prop_compose! {
        fn any_candidate()(
            free_pages in prop_oneof![0u64..1000, Just(u64::MAX)],
            in_service in any::<bool>(),
            extents_held_by_this_space in 0u64..5,
            distance in 0u32..3,
            apart in prop::sample::select(&[Apart::Not, Apart::Hosts, Apart::Racks][..]),
        ) -> Candidate {
            Candidate { free_pages, in_service, extents_held_by_this_space, distance, apart }
        }
    }

    proptest! {
        #[test]
        fn the_choice_fits_and_is_found_whenever_one_exists(
            candidates in prop::collection::vec(any_candidate(), 0..12),
            need in 0u64..1000,
        ) {
            let fits = |c: &Candidate| c.in_service && c.free_pages >= need;
            match choose(&candidates, need) {
                Some(at) => {
                    prop_assert!(fits(&candidates[at]));
                    let apart = candidates[at].apart;
                    prop_assert!(!candidates.iter().any(|c| fits(c) && c.apart > apart));
                    let alike = candidates.iter().filter(|c| fits(c) && c.apart == apart);
                    let most = alike.map(|c| c.free_pages).max();
                    prop_assert!(candidates[at].free_pages >= most.unwrap() / 2);
                }
                None => prop_assert!(!candidates.iter().any(fits)),
            }
        }
    }
}
