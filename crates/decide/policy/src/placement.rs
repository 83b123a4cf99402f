//! Which donor gets the next extent of a space.
//!
//! Four wishes, in this order. *Apart*: copies of a segment in different racks, or at least on
//! different hosts, or one failure takes them all. *Nearness*: the nearest level of the tree of
//! locations (host, chassis, rack…) on which a donor has room. *Room*: among the equally near,
//! those with nearly as much as the best of them, since who has most is the least likely to want
//! some back soon. *Spread*: among these, the one that holds the fewest extents of this space,
//! which is round robin for a space that grows, and lets a sweep over it draw on every donor's
//! bandwidth.
//!
//! A level counts as full when its donors have less than an eighth of what the donor with most free
//! memory has. Near donors that are filled to the last page must move extents away once their hosts
//! want some back (decision 6 of the design). That costs more than the difference in latency.
//!
//! vMCA (III-A) has a zone of pages for each home at the borrower, each with a buddy allocator, in
//! a tree of locations. It takes from the nearest zone that has some. Its zones hold pages that
//! were granted before they were needed. Here donors are asked when an extent is needed: unused
//! memory stays with its donor, which has the only allocator of it. The nearest donor follows from
//! the names of the places alone. The power-of-two-choices alternative was rejected: the borrower
//! knows all its donors anyway, and a deterministic choice can be replayed.

use crate::site::Apart;

/// State of a donor when an extent is placed.
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

/// A donor with less than this share (in eighths) of the best donor's free memory is left alone
/// while there are others, be they further away.
const NEARLY_FULL_EIGHTHS: u64 = 1;

/// A donor whose free memory is at least this share (in eighths) of the best of the equally near
/// counts as having as much room.
const NEAR_EQUAL_EIGHTHS: u64 = 6;

/// The index in `candidates` of the donor to ask for an extent of `need_pages`, or `None` when
/// nobody has the room. The same input gives the same answer.
pub fn choose(candidates: &[Candidate], need_pages: u64) -> Option<usize> {
    let has_room = |c: &&Candidate| c.in_service && c.free_pages >= need_pages;
    let apart = candidates.iter().filter(has_room).map(|c| c.apart).max()?;
    let fits = |c: &&Candidate| has_room(c) && c.apart == apart;
    let enough = share_of_most(NEARLY_FULL_EIGHTHS, candidates.iter().filter(fits))?;
    let has_left = |c: &&Candidate| fits(c) && c.free_pages >= enough;
    let distance = candidates.iter().filter(has_left).map(|c| c.distance).min()?;
    let is_near = |c: &&Candidate| has_left(c) && c.distance == distance;
    let enough = share_of_most(NEAR_EQUAL_EIGHTHS, candidates.iter().filter(is_near))?;
    candidates
        .iter()
        .enumerate()
        .filter(|(_, c)| is_near(c) && c.free_pages >= enough)
        .min_by_key(|(index, c)| (c.extents_held_by_this_space, u64::MAX - c.free_pages, *index))
        .map(|(index, _)| index)
}

/// So many eighths of what the donor with most free memory has.
fn share_of_most<'a>(eighths: u64, donors: impl Iterator<Item = &'a Candidate>) -> Option<u64> {
    // Divided before it is multiplied: a donor's word is not trusted to stay clear of overflow.
    donors.map(|c| c.free_pages).max().map(|most| most / 8 * eighths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::Site;
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
    fn nearness_beats_room_and_room_beats_spread() {
        let near = Candidate { distance: 0, extents_held_by_this_space: 7, ..donor(1000) };
        assert_eq!(choose(&[donor(4000), near], 10), Some(1));
        let nearly_full = Candidate { distance: 0, ..donor(400) };
        assert_eq!(choose(&[nearly_full, donor(4000)], 10), Some(1));
        let larger = Candidate { extents_held_by_this_space: 7, ..donor(4000) };
        assert_eq!(choose(&[donor(1000), larger], 10), Some(1));
    }

    /// Donors stand in racks, chassis and hosts. Each level is used up before the next one, but for
    /// the eighth that is left to its hosts. The donors of one level fill up side by side.
    #[test]
    fn the_nearest_level_with_room_comes_first_over_three_levels() {
        let at = |host: &str, location: &str| Site {
            host: host.to_owned(),
            location: Some(location.to_owned()),
        };
        let here = at("here", "rack1/chassis1");
        // In an order that says nothing of where they stand.
        let places = [
            ("far", "rack2/chassis1"),
            ("in the rack", "rack1/chassis2"),
            ("here", "rack1/chassis1"),
            ("in the chassis", "rack1/chassis1"),
            ("in the rack, too", "rack1/chassis3"),
        ];
        let mut donors = places.map(|(host, location)| Candidate {
            distance: here.distance(&at(host, location)),
            ..donor(64)
        });
        let mut taken = Vec::new();
        while let Some(chosen) = choose(&donors, 1) {
            donors[chosen].free_pages -= 1;
            donors[chosen].extents_held_by_this_space += 1;
            taken.push(places[chosen].0);
        }
        assert_eq!(taken.len(), 5 * 64, "all of it can be had");
        let levels = [
            (57, &["here"][..]),
            (57, &["in the chassis"]),
            (2 * 57, &["in the rack", "in the rack, too"]),
            (1, &["far"]),
        ];
        let mut rest = taken.as_slice();
        for (extents, names) in levels {
            let (level, further) = rest.split_at(extents);
            assert!(level.iter().all(|name| names.contains(name)), "{names:?}: {level:?}");
            let of = |name: &str| level.iter().filter(|one| **one == name).count();
            assert!(names.iter().all(|name| of(name) == extents / names.len()), "{level:?}");
            rest = further;
        }
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
                    let alike = || candidates.iter().filter(|c| fits(c) && c.apart == apart);
                    let enough = alike().map(|c| c.free_pages).max().unwrap() / 8;
                    prop_assert!(candidates[at].free_pages >= enough);
                    let distance = candidates[at].distance;
                    let mut nearer = alike().filter(|c| c.distance < distance);
                    prop_assert!(!nearer.any(|c| c.free_pages >= enough));
                }
                None => prop_assert!(!candidates.iter().any(fits)),
            }
        }
    }
}
