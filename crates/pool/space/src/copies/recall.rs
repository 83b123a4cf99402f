//! Which segments leave a donor that wants some of its extents back.
//!
//! Decisions only. A donor says with its answers how many of the space's extents it wants back, and
//! the borrower chooses which. Their segments are in the wrong place from then on, and
//! [`upkeep`](crate::upkeep) moves them to other donors. When nobody has room, a segment that has
//! another copy does without the one that is wanted back.

use crate::map::group::{DonorIndex, Group, Place};
use crate::map::{Holding, Map};
use std::cmp::Reverse;

impl Map {
    /// Chooses as many segments of each donor as it wants back by now. Each call chooses anew.
    /// First come segments that are on their way, then those never or least recently found unable
    /// to leave. Copies that are not filled yet come before others. Segments with most copies come
    /// before others: they are the safest.
    pub(crate) fn follow_recalls(&mut self) {
        let wants_some = |donor: &crate::map::Donor| donor.load.recalled > 0;
        let before = std::mem::take(&mut self.leaving);
        if !self.donors().iter().any(wants_some) {
            return;
        }
        for donor in (0..self.donors().len() as u32).map(DonorIndex) {
            // An extent of the donor in no group is on its way back already.
            let recalled = self.donor(donor).load.recalled as usize;
            let wanted = recalled.saturating_sub(self.strays_of(donor).len());
            if wanted == 0 {
                continue;
            }
            let rank = |(segment, held): (u64, &Holding)| {
                let member = held.group.at(donor)?;
                let is_filling = held.group.members().iter().any(|member| !member.is_whole);
                let waited = self.waited.get(&segment).copied();
                let is_under_way =
                    is_filling && waited.is_none() && before.contains(&(donor, segment));
                let copies = Reverse(held.group.whole().count());
                Some((!is_under_way, waited, member.is_whole, copies, segment))
            };
            let mut ranked: Vec<_> = self.holdings().filter_map(rank).collect();
            ranked.sort_unstable();
            for (.., segment) in ranked.into_iter().take(wanted) {
                self.leaving.insert((donor, segment));
                self.unsettled.insert(segment);
            }
        }
    }

    /// A copy that its donor wants back, though nobody has room for it, and another copy of the
    /// same segment that stays.
    pub(crate) fn dispensable(&self, segment: u64, group: &Group) -> Option<(Place, Place)> {
        let mut leaving = group.whole().filter(|p| self.leaving.contains(&(p.donor, segment)));
        leaving.find_map(|from| {
            let mut others = group.whole().filter(|place| *place != from);
            let kept = others.find(|place| self.donor(place.donor).reachable)?;
            Some((from, kept))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::upkeep::Step;
    use crate::map::lookup::Whereabouts;
    use crate::map::{Declined, Shape, Take};
    use hecaton_memory::{Epoch, ExtentId};
    use hecaton_policy::site::Site;
    use hecaton_transport::protocol::Load;
    use std::time::Duration;

    const SEGMENT_PAGES: u64 = 16;

    /// Donors with so much room, on different hosts.
    fn map_with(copies: u8, free_pages: &[u64]) -> Map {
        let shape = Shape {
            segments: 8,
            segment_pages: SEGMENT_PAGES,
            copies,
            epoch: Epoch(1),
            code: None,
        };
        let mut map = Map::new(shape);
        for (number, &free_pages) in free_pages.iter().enumerate() {
            let donor = map.donor_named(
                &format!("d{number}"),
                &Site::unplaced(&format!("h{number}")),
                false,
            );
            hear(&mut map, donor, Load { free_pages, ..Load::default() });
        }
        map
    }

    fn hear(map: &mut Map, donor: DonorIndex, load: Load) {
        let now = map.donor(donor).heard_at + Duration::from_millis(1);
        assert!(map.heard(donor, 100 + u64::from(donor.0), load, now, now));
    }

    fn recall(map: &mut Map, donor: u32, recalled: u32) {
        hear(map, DonorIndex(donor), Load { recalled, ..Load::default() });
    }

    fn place(donor: u32, extent: u64) -> Place {
        Place { donor: DonorIndex(donor), boot: 100 + u64::from(donor), extent: ExtentId(extent) }
    }

    fn take(map: &mut Map, segment: u64) -> Vec<Place> {
        let mut next = map.begin(segment);
        loop {
            next = match next {
                Take::Ask(donor, _) => map.allocated(segment, place(donor.0, 100 + segment)),
                Take::Held(group) => return group.whole().collect(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn whole(map: &Map, segment: u64) -> Vec<Place> {
        match map.whereabouts(segment) {
            Whereabouts::Held(group) => group.whole().collect(),
            _ => Vec::new(),
        }
    }

    /// Moves a segment from its donor to that one.
    fn move_to(map: &mut Map, segment: u64, to: Place) {
        assert_eq!(map.next_step(segment, &[]), Step::Join(to.donor));
        assert!(map.join(segment, to));
        assert!(matches!(map.next_step(segment, &[]), Step::Fill { .. }));
        let Whereabouts::Held(group) = map.whereabouts(segment) else { panic!() };
        assert!(map.filled(segment, to, group.generation));
        assert_eq!(map.step_after_comparing(segment, &[]), Step::Nothing);
    }

    #[test]
    fn as_many_segments_move_as_are_wanted_back() {
        let mut map = map_with(1, &[640, 0]);
        (0..4).for_each(|segment| _ = take(&mut map, segment));
        assert!(map.segments_to_tend(9).is_empty());
        recall(&mut map, 0, 2);
        hear(&mut map, DonorIndex(1), Load { free_pages: 640, ..Load::default() });
        let leaving = map.segments_to_tend(9);
        assert_eq!(leaving, [0, 1]);
        move_to(&mut map, 0, place(1, 7));
        assert_eq!(whole(&map, 0), [place(1, 7)]);
        // The donor does not know yet, but it is not asked to give more on that account.
        assert_eq!(map.strays_of(DonorIndex(0)), [0]);
        assert_eq!(map.segments_to_tend(9), [1]);
        map.stray_freed(DonorIndex(0), 0);
        recall(&mut map, 0, 1);
        assert_eq!(map.segments_to_tend(9), [1]);
    }

    #[test]
    fn what_is_wanted_back_no_longer_stays() {
        let mut map = map_with(1, &[640, 0]);
        (0..4).for_each(|segment| _ = take(&mut map, segment));
        recall(&mut map, 0, 3);
        hear(&mut map, DonorIndex(1), Load { free_pages: 640, ..Load::default() });
        assert_eq!(map.segments_to_tend(9), [0, 1, 2]);
        assert!(map.join(1, place(1, 7)));
        recall(&mut map, 0, 1);
        map.segments_to_tend(9);
        for segment in [0, 2] {
            assert_eq!(map.next_step(segment, &[]), Step::Nothing, "it was not begun");
        }
        assert_eq!(map.segments_to_tend(9), [1]);
        recall(&mut map, 0, 0);
        map.segments_to_tend(9);
        let Whereabouts::Held(group) = map.whereabouts(1) else { panic!() };
        assert!(map.filled(1, place(1, 7), group.generation));
        assert_eq!(map.step_after_comparing(1, &[]), Step::Nothing);
        assert_eq!(whole(&map, 1).len(), 1);
    }

    #[test]
    fn what_cannot_leave_is_passed_over_for_what_can() {
        let mut map = map_with(1, &[640, 0]);
        map.set_zones(vec![vec![], vec!["d0".into()]]);
        (0..3).for_each(|segment| _ = take(&mut map, segment));
        map.assign(0, 1);
        map.assign(1, 1);
        recall(&mut map, 0, 1);
        hear(&mut map, DonorIndex(1), Load { free_pages: 640, ..Load::default() });
        for stuck in [0, 1] {
            map.segments_to_tend(9);
            assert_eq!(map.next_step(stuck, &[]), Step::Wait);
        }
        assert!(map.segments_to_tend(9).contains(&2));
        move_to(&mut map, 2, place(1, 7));
    }

    #[test]
    fn the_last_copy_waits_for_room() {
        let mut map = map_with(1, &[640, 0]);
        let copy = take(&mut map, 0);
        recall(&mut map, 0, 1);
        assert_eq!(map.segments_to_tend(9), [0]);
        assert_eq!(map.next_step(0, &[]), Step::Wait);
        assert_eq!(whole(&map, 0), copy);
    }

    #[test]
    fn a_copy_that_nobody_has_room_for_is_done_without_while_there_is_another() {
        let mut map = map_with(2, &[640, 640, 640]);
        let copies = take(&mut map, 0);
        let (first, second) = (copies[0].donor, copies[1].donor);
        let third = DonorIndex(3 - first.0 - second.0);
        recall(&mut map, first.0, 1);
        recall(&mut map, second.0, 1);
        assert_eq!(map.segments_to_tend(9), [0]);
        assert_eq!(map.next_step(0, &[]), Step::Join(third), "there is room");
        // The third has less than it says.
        map.no_join(0, third, Declined::Full);
        let Step::Leave { from, kept } = map.step_after_comparing(0, &[third]) else { panic!() };
        assert!(copies.contains(&from) && copies.contains(&kept) && from != kept);
        assert!(map.desert(0, from));
        assert_eq!(map.next_step(0, &[third]), Step::Wait, "this one stays");
        assert_eq!(map.counts().degraded, 1);
    }

    #[test]
    fn no_copy_is_given_up_for_one_that_does_not_answer() {
        let mut map = map_with(2, &[640, 640]);
        let copies = take(&mut map, 0);
        recall(&mut map, copies[0].donor.0, 1);
        map.silent(copies[1].donor);
        assert_eq!(map.segments_to_tend(9), [0]);
        assert_eq!(map.next_step(0, &[]), Step::Wait);
        recall(&mut map, copies[1].donor.0, 0);
        let [from, kept] = copies[..] else { panic!() };
        assert_eq!(map.step_after_comparing(0, &[]), Step::Leave { from, kept });
    }

    #[test]
    fn segments_at_risk_that_wait_for_room_do_not_hold_up_those_that_leave() {
        let mut map = map_with(2, &[640, 640]);
        take(&mut map, 7);
        map.silent(DonorIndex(1));
        (0..6).for_each(|segment| _ = take(&mut map, segment));
        hear(&mut map, DonorIndex(1), Load::default());
        assert_eq!(map.counts().degraded, 6);
        recall(&mut map, 0, 1);
        let mut turns = Vec::new();
        for _ in 0..4 {
            let turn = map.segments_to_tend(3);
            turn.iter().for_each(|segment| _ = map.next_step(*segment, &[]));
            turns.push(turn);
        }
        assert_eq!(turns, [vec![0, 1, 2], vec![3, 4, 5], vec![7, 0, 1], vec![7, 2, 3]]);
    }
}
