//! What is to be done for groups that have too few copies, or copies in the wrong place.
//!
//! Decisions only. There is one procedure for all of it: a rebuild after a loss, a move to donors
//! that were named, a donor that drains, or that recalls some. A new member joins the group and gets all writes from then on;
//! it is filled from a whole member, donor to donor; then it is whole, and a member too many leaves.
//! At no moment are there fewer whole members than before, unless a donor wants one back for which
//! nobody has room.
//!
//! [`Space::tend`](crate::Space::tend) does what is decided here, one step after the other.

use crate::group::{DonorIndex, MAX_MEMBERS, Place};
use crate::map::Map;
use std::time::Duration;

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
    /// Nobody has room for a copy that is wanted back: ask whether another one is there, and tell
    /// [`Map::desert`], or [`Map::gone`] of that one.
    Leave {
        /// The copy to do without.
        from: Place,
        /// One that stays.
        kept: Place,
    },
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
            let copies = usize::from(self.copies());
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
                return from.map_or(Step::Wait, |from| Step::Fill { to, from });
            }
            if group.whole().count() > copies {
                let last = group.whole().last();
                if let Some(leaving) = misplaced.or(last)
                    && self.desert(segment, leaving)
                {
                    continue;
                }
            }
            if well_placed >= copies {
                self.unsettled.remove(&segment);
                return Step::Nothing;
            }
            if group.members().len() >= MAX_MEMBERS {
                return Step::Wait;
            }
            let members: Vec<DonorIndex> =
                group.members().iter().map(|member| member.place.donor).collect();
            return match self.choose(segment, tried, &members) {
                Some(donor) => Step::Join(donor),
                None => match self.dispensable(segment, &group) {
                    Some((from, kept)) => Step::Leave { from, kept },
                    None => Step::Wait,
                },
            };
        }
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
