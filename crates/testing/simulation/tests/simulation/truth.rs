//! Inspects what donors really hold of a space, which only a simulation can see. Finds losses that
//! are no bug, damaged pages and their intact copies, and shards of a stripe that do not fit.

use crate::borrower::{self, Borrower, SEGMENT_PAGES, SEGMENTS};
use crate::network::{DECAYED, Value};
use crate::pool::Pool;
use crate::tenant::{Pending, Tenant};
use hecaton_space::group::{Group, Place};
use hecaton_space::lookup::Whereabouts;
use std::collections::BTreeMap;

impl Tenant {
    /// Damages a page in one copy, or in all of them.
    pub(crate) fn decay(&mut self, pool: &mut Pool) {
        let (segment, page) = (pool.dice.below(SEGMENTS), pool.dice.below(SEGMENT_PAGES) as u32);
        let (wholly, everywhere) = (pool.dice.below(4) == 0, pool.dice.below(8) == 0);
        // An owner knows the page's checksum, but the owner of a coded space ignores it here.
        let wholly = wholly && self.code.is_none();
        let Whereabouts::Held(group) = self.owner().map.whereabouts(segment) else { return };
        let places: Vec<Place> = group.whole().collect();
        if pool.conditions.is_calm && !self.has_other_copies(pool, segment, page, &places) {
            return;
        }
        let (wholly, everywhere) =
            (wholly && !pool.conditions.is_calm, everywhere && !pool.conditions.is_calm);
        let one = pool.dice.below(places.len().max(1) as u64) as usize;
        for (at, place) in places.into_iter().enumerate() {
            let is_there = pool.is_there(self.last(), place);
            let donor = pool.at_mut(self.last(), place);
            let is_chosen = everywhere || at == one;
            if is_chosen && is_there && donor.decay(place.extent, page, wholly) {
                pool.tally.decayed += 1;
                if wholly {
                    self.wholly_decayed.insert(segment);
                }
            }
        }
    }

    /// Whether a page damaged in one copy stays right in another copy that is not about to leave.
    fn has_other_copies(&self, pool: &Pool, segment: u64, page: u32, places: &[Place]) -> bool {
        let is_sound = |place: &Place| {
            pool.at(self.last(), *place).stored(place.extent, page).value & DECAYED == 0
        };
        places.len() > 1 && places.iter().all(is_sound) && !self.last().is_tending(segment)
    }

    /// Whether a copy has the stored value of a page. `None` if that is not certain, or zero.
    pub(crate) fn is_right(
        &self,
        pool: &Pool,
        segment: u64,
        page: u32,
        place: Place,
    ) -> Option<bool> {
        let value = self.oracle.certain(segment * SEGMENT_PAGES + u64::from(page))?;
        let donor = pool.at(self.last(), place);
        (value != 0).then(|| donor.stored(place.extent, page).value == value)
    }

    pub(crate) fn groups(&self) -> BTreeMap<u64, Group> {
        let map = &self.last().map;
        let held = (0..SEGMENTS).filter_map(|segment| match map.whereabouts(segment) {
            Whereabouts::Held(group) => Some((segment, group)),
            _ => None,
        });
        held.collect()
    }

    /// Asserts that the existing shards of each coded stripe fit together.
    pub(crate) fn check_codes(&self, pool: &Pool) {
        let Some(code) = self.code.filter(|_| self.settled && !self.decays) else { return };
        for &stripe in self.recorded.keys() {
            let owner = self.last();
            let Some(shards) = owner.map.shards(code.segments_of(stripe).start) else { continue };
            let mut there: Vec<Option<Vec<Value>>> = Vec::new();
            for (_, at) in &shards.all {
                let place = match at {
                    Whereabouts::Nowhere => {
                        there.push(Some(vec![0; SEGMENT_PAGES as usize]));
                        continue;
                    }
                    Whereabouts::Held(group) => group.whole().next(),
                    Whereabouts::Lost(_) => None,
                };
                let place = place.filter(|place| pool.is_there(owner, *place));
                there.push(place.map(|place| {
                    let donor = pool.at(owner, place);
                    (0..SEGMENT_PAGES as u32).map(|p| donor.stored(place.extent, p).value).collect()
                }));
            }
            let mut shards: Vec<Option<Vec<u8>>> =
                there.iter().map(|values| values.as_deref().map(borrower::bytes_of)).collect();
            for spare in 0..shards.len() {
                if shards.iter().flatten().count() <= code.data() {
                    break;
                }
                let Some(before) = shards[spare].take() else { continue };
                let mut others = shards.clone();
                assert!(code.coder().complete(&mut others, &[spare]), "there are enough");
                assert_eq!(others[spare].as_ref(), Some(&before), "shard {spare} of {stripe}");
            }
        }
    }

    /// Whether a page has gone bad in every copy, and in too many shards of its stripe.
    pub(crate) fn is_page_right_nowhere(
        &self,
        pool: &Pool,
        segment: u64,
        page: u32,
        group: Group,
    ) -> bool {
        let is_decayed = |place: Place| {
            let donor = pool.at(self.last(), place);
            donor.stored(place.extent, page).value & DECAYED != 0
        };
        let is_right_nowhere = group.whole().all(is_decayed);
        let shards = self.last().map.shards(segment);
        let is_out_of_reach = shards.is_none_or(|shards| {
            let is_known = |(_, at): &&(u64, Whereabouts)| match at {
                Whereabouts::Nowhere => true,
                Whereabouts::Held(group) => !group.whole().all(is_decayed),
                Whereabouts::Lost(_) => false,
            };
            shards.all.iter().filter(is_known).count() < shards.needed
        });
        is_right_nowhere && is_out_of_reach
    }

    /// Whether a failed read was for one page that is right nowhere. It must then be written.
    pub(crate) fn is_right_nowhere(
        &mut self,
        pool: &Pool,
        segment: u64,
        pending: &Pending,
    ) -> bool {
        let Pending::Read { pages, .. } = pending else { return false };
        let Whereabouts::Held(group) = self.owner().map.whereabouts(segment) else { return false };
        let is_so = pages.len() == 1 && self.is_page_right_nowhere(pool, segment, pages[0], group);
        if is_so {
            self.oracle.decayed(segment * SEGMENT_PAGES + u64::from(pages[0]));
        }
        is_so
    }

    /// Records that an extent of the segment is gone. The segment may be lost if its owner could
    /// count on no other extent.
    pub(crate) fn note_loss(&mut self, pool: &Pool, segment: u64) {
        let Some(code) = self.code else { return self.note_loss_of(pool, segment) };
        // The other segments of its stripe may depend on it.
        let stripe = code.shard_of(segment).0;
        for other in code.segments_of(stripe).filter(|other| *other < SEGMENTS) {
            if other == segment || self.is_held(other) {
                self.note_loss_of(pool, other);
            }
        }
    }

    fn is_held(&self, segment: u64) -> bool {
        let owners = self.borrowers.iter().rev().take(2);
        owners.into_iter().any(|b| matches!(b.map.whereabouts(segment), Whereabouts::Held(_)))
    }

    /// Whether donors hold enough shards of a segment's stripe, as a borrower knows it.
    fn is_decodable(&self, pool: &Pool, borrower: &Borrower, segment: u64) -> bool {
        borrower.map.shards(segment).is_some_and(|shards| {
            let is_there = |(_, at): &&(u64, Whereabouts)| match at {
                Whereabouts::Nowhere => true,
                Whereabouts::Held(group) => pool.is_any_there(borrower, *group),
                Whereabouts::Lost(_) => false,
            };
            shards.all.iter().filter(is_there).count() >= shards.needed
        })
    }

    fn note_loss_of(&mut self, pool: &Pool, segment: u64) {
        let since = self.oracle.generation_of(segment);
        let mut borrowers = self.borrowers.iter().rev();
        let owner = borrowers.next().expect("there is always an owner");
        let is_left = match owner.map.whereabouts(segment) {
            _ if self.is_decodable(pool, owner, segment) => true,
            Whereabouts::Held(group) => pool.is_any_there(owner, group),
            // The lost extent is one of its first ones, perhaps the only one that it gets.
            Whereabouts::Nowhere => !owner.map.is_taking(segment),
            // Not found yet. Extents that its predecessor gave up may go at any moment.
            Whereabouts::Lost(_) => match borrowers.next() {
                Some(before) if self.is_decodable(pool, before, segment) => true,
                Some(before) if let Whereabouts::Held(group) = before.map.whereabouts(segment) => {
                    pool.is_any_there(before, group)
                }
                _ => pool.donors.iter().any(|donor| donor.has((self.space, segment), since)),
            },
        };
        if !is_left {
            self.oracle.losable(segment);
        }
    }
}
