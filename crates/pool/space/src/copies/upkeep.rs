//! What is to be done for groups that have too few copies, or copies in the wrong place.
//!
//! Decisions only. There is one procedure for all of it: a rebuild after a loss, a move to donors
//! that were named, a donor that drains, or that recalls some. A new member joins the group and gets all writes from then on;
//! it is filled from a whole member, donor to donor; then it is whole, and a member too many leaves,
//! after the copies were compared: what is right in that one alone would go with it.
//! At no moment are there fewer whole members than before, unless a donor wants one back for which
//! nobody has room.
//!
//! [`Space::tend`](crate::Space::tend) does what is decided here, one step after the other.

use crate::map::Map;
use crate::map::group::{DonorIndex, Group, MAX_MEMBERS, Place};
use std::time::Duration;

/// Segments of which is remembered that they were compared: more than are tended at a time.
const COMPARED: usize = 16;

/// What a group needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the donor for an extent to be filled; tell [`Map::join`] or [`Map::no_join`].
    Join(DonorIndex),
    /// Fill the one from the other, confirm it, and tell [`Map::filled`].
    Fill {
        /// The member that is not whole.
        to: Place,
        /// One that is.
        from: Place,
    },
    /// One is to go: compare all pages of those whose donors can be asked, as a scrub does
    /// ([`Run::before_leaving`](crate::scrub::Run::before_leaving)), and tell [`Map::compared`] or
    /// [`Map::put_off`].
    Compare {
        /// The group as it is.
        group: Group,
        /// Who is to go.
        leaving: Place,
    },
    /// Nobody has room for a copy that is wanted back: ask whether another one is there, and tell
    /// [`Map::desert`], or [`Map::gone`] of that one.
    Leave {
        /// The copy to do without.
        from: Place,
        /// One that stays.
        kept: Place,
    },
    /// Work out what [`Map::rebuild`] says of this stripe, confirm it, and tell [`Map::filled`].
    Rebuild(u64),
    /// Confirm what [`Map::ready_to_commit`] names of this stripe; then [`Map::commit`], record it, and
    /// tell [`Map::recorded`].
    Commit(u64),
    /// Ask whether what [`Map::ready_to_thaw`] names of this stripe is there; then record that it is not coded
    /// any more, and tell [`Map::thaw`].
    Thaw(u64),
    /// Nothing can be done at present.
    Wait,
    /// Nothing: the group is as it should be, or there is none.
    Nothing,
}

impl Map {
    /// Segments whose groups need something, at most so many: those that have been at risk for
    /// longest first, then those that only are in the wrong place. Those for which nothing could be
    /// done come after all others, or they might keep them from their turn for ever.
    pub fn segments_to_tend(&mut self, most: usize) -> Vec<u64> {
        self.turn += 1;
        self.follow_recalls();
        let risk = |segment: &u64| self.holding(*segment).and_then(|held| held.degraded_since);
        let mut segments: Vec<u64> = self.unsettled.iter().copied().collect();
        segments.sort_by_key(|segment| {
            let waited = self.waited.get(segment).copied();
            (waited, risk(segment).unwrap_or(Duration::MAX), *segment)
        });
        segments.truncate(most);
        segments
    }

    /// What a segment's group needs next. `tried` are the donors that have declined.
    pub fn next_step(&mut self, segment: u64, tried: &[DonorIndex]) -> Step {
        let step = self.decide(segment, tried);
        match step {
            Step::Wait => _ = self.waited.insert(segment, self.turn),
            _ => _ = self.waited.remove(&segment),
        }
        step
    }

    fn decide(&mut self, segment: u64, tried: &[DonorIndex]) -> Step {
        loop {
            let Some(held) = self.holding(segment) else {
                self.unsettled.remove(&segment);
                return Step::Nothing;
            };
            let group = held.group;
            let copies = self.wanted_members(segment);
            let misplaced = group.whole().find(|place| !self.may_hold(segment, place.donor));
            let well_placed = group.whole().filter(|place| self.may_hold(segment, place.donor));
            let well_placed = well_placed.count();
            let filling = group.members().iter().find(|member| !member.is_whole);
            if let Some(to) = filling.map(|member| member.place) {
                if !self.may_hold(segment, to.donor) || !self.donor(to.donor).reachable {
                    // It is being drained itself, or has gone before it was of any use.
                    let _ = self.desert(segment, to);
                    continue;
                }
                let readable = group.whole().filter(|place| self.donor(place.donor).reachable);
                let from = readable.min_by_key(|place| self.donor(place.donor).load.in_service);
                return match from {
                    Some(from) => Step::Fill { to, from },
                    None => self.rebuild_step(segment),
                };
            }
            if group.whole().count() > copies {
                let last = group.whole().last();
                if let Some(leaving) = misplaced.or(last) {
                    if self.is_to_be_compared(segment, &group, leaving) {
                        return Step::Compare { group, leaving };
                    }
                    if self.desert(segment, leaving) {
                        continue;
                    }
                }
            }
            if well_placed >= copies {
                return match self.next_of_stripe(segment) {
                    // If it cannot be done now, because somebody is away, it is tried again.
                    Some(step) => step,
                    None if self.is_warming(segment) => Step::Wait,
                    None => {
                        self.unsettled.remove(&segment);
                        Step::Nothing
                    }
                };
            }
            if group.members().len() >= MAX_MEMBERS {
                return Step::Wait;
            }
            if self.is_out_of_reach(segment, &held) {
                // Its donor may still tell of it.
                return Step::Wait;
            }
            for is_pressed in [false, true] {
                let members = self.apart_from(segment, &group, is_pressed);
                if let Some(donor) = self.choose(segment, tried, &members) {
                    return Step::Join(donor);
                }
            }
            if self.yields(segment, misplaced.is_some()) {
                continue;
            }
            match self.dispensable(segment, &group) {
                Some((from, _)) if self.is_to_be_compared(segment, &group, from) => {
                    return Step::Compare { group, leaving: from };
                }
                Some((from, kept)) => return Step::Leave { from, kept },
                None => {}
            }
            // A stripe that warms is plain when its segments have as many copies as there is room for.
            self.waited.insert(segment, self.turn);
            return self.next_of_stripe(segment).unwrap_or(Step::Wait);
        }
    }

    /// For a member that no other can be copied to.
    fn rebuild_step(&self, segment: u64) -> Step {
        let Some(code) = self.code() else { return Step::Wait };
        let stripe = code.shard_of(segment).0;
        // All parities are made in one go.
        let is_time = self.has_places_for_parities(segment);
        match self.rebuild(stripe).filter(|_| is_time) {
            Some(_) => Step::Rebuild(stripe),
            None => Step::Wait,
        }
    }

    /// Whether a page may be right in the copy that is to go, and gone bad in those that stay. A copy
    /// is as good as the one that it was made from, and no better.
    fn is_to_be_compared(&self, segment: u64, group: &Group, leaving: Place) -> bool {
        let can_be_asked = |place: &Place| self.donor(place.donor).reachable;
        let mut others = group.whole().filter(|place| *place != leaving);
        let is_compared = self.compared.contains(&(segment, *group));
        can_be_asked(&leaving) && others.any(|place| can_be_asked(&place)) && !is_compared
    }

    /// The copies of the segment were compared, and mended where another had a page right, while its
    /// group was this.
    pub fn compared(&mut self, segment: u64, group: Group) {
        self.compared.retain(|(other, _)| *other != segment);
        self.compared.push_back((segment, group));
        if self.compared.len() > COMPARED {
            self.compared.pop_front();
        }
    }

    /// What the segment needs cannot be done now: others have their turn first.
    pub fn put_off(&mut self, segment: u64) {
        self.waited.insert(segment, self.turn);
    }

    /// The donor has given an extent to be filled. False if there is no use for it any more.
    pub fn join(&mut self, segment: u64, place: Place) -> bool {
        if self.strays_of(place.donor).contains(&segment) {
            return false;
        }
        self.joined(segment, place)
    }

    /// The donor has given no extent to be filled.
    pub fn no_join(&mut self, segment: u64, donor: DonorIndex, why: crate::map::Declined) {
        self.note_declined(segment, donor, why);
    }

    /// How many segments wait for something.
    pub fn untended(&self) -> u64 {
        self.unsettled.len() as u64
    }
}

#[cfg(test)]
impl Map {
    /// What a segment's group needs once its copies are compared, which it must need first.
    pub(crate) fn step_after_comparing(&mut self, segment: u64, tried: &[DonorIndex]) -> Step {
        match self.next_step(segment, tried) {
            Step::Compare { group, .. } => self.compared(segment, group),
            other => panic!("it is not compared before a copy goes, but {other:?}"),
        }
        self.next_step(segment, tried)
    }
}
