//! Plans repairs of groups with missing or misplaced copies.
//!
//! Decisions only: [`Space::tend`](crate::Space::tend) executes them, one step after the other. One
//! procedure serves a rebuild after a loss, a move to named donors, a drain and a recall:
//!
//! 1. A new member joins the group and gets all writes from then on.
//! 2. A whole member fills it, donor to donor. Then it is whole too.
//! 3. The copies are compared: a page that is right only in a surplus member would go with it.
//! 4. The surplus member leaves. The number of whole members never falls, unless a donor recalls a
//!    copy for which no donor has room.

use crate::map::Map;
use crate::map::group::{DonorIndex, Group, MAX_MEMBERS, Place};
use std::time::Duration;

/// Compared segments to remember: more than are repaired concurrently.
const COMPARED: usize = 16;

/// The next step that a group needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the donor for an extent to fill; then call [`Map::join`] or [`Map::no_join`].
    Join(DonorIndex),
    /// Fill `to` from `from`, confirm `to`, and call [`Map::filled`].
    Fill {
        /// The member that is not whole.
        to: Place,
        /// A whole member.
        from: Place,
    },
    /// A member must leave. Compare all pages of the members with reachable donors, as a scrub does
    /// ([`Run::before_leaving`](crate::scrub::Run::before_leaving)). Then call [`Map::compared`] or
    /// [`Map::put_off`].
    Compare {
        /// The current group.
        group: Group,
        /// The member that leaves.
        leaving: Place,
    },
    /// No donor has room for a recalled copy. Ask whether `kept` exists: if so, call
    /// [`Map::desert`] for `from`, else [`Map::gone`] for `kept`.
    Leave {
        /// The recalled copy.
        from: Place,
        /// A copy that stays.
        kept: Place,
    },
    /// Compute the shards that [`Map::rebuild`] names, confirm them, and call [`Map::filled`].
    Rebuild(u64),
    /// Confirm the copies that [`Map::ready_to_commit`] names for this stripe. Then call
    /// [`Map::commit`], record the stripe, and call [`Map::recorded`].
    Commit(u64),
    /// Ask whether the copies that [`Map::ready_to_thaw`] names for this stripe exist. Then record
    /// that the stripe is not coded any more, and call [`Map::thaw`].
    Thaw(u64),
    /// No step is possible at present.
    Wait,
    /// No step is needed: the group is as it should be, or no group exists.
    Nothing,
}

impl Map {
    /// Returns at most `most` segments whose groups need a step: longest degraded first, then those
    /// only misplaced. Segments for which no step was possible come last; otherwise they could
    /// starve the others.
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

    /// Returns the next step of a segment's group. `tried` are the donors that have declined.
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
                    // The donor may not hold it any more, or became unreachable during the fill.
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
                    // A step that an unreachable donor prevents now is retried later.
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
                // The donor of a missing copy may still report it.
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
            // A warming stripe can thaw once its segments have all copies that there is room for.
            self.waited.insert(segment, self.turn);
            return self.next_of_stripe(segment).unwrap_or(Step::Wait);
        }
    }

    /// Step for a member that no reachable whole member can fill.
    fn rebuild_step(&self, segment: u64) -> Step {
        let Some(code) = self.code() else { return Step::Wait };
        let stripe = code.shard_of(segment).0;
        // All parities are computed together.
        let is_time = self.has_places_for_parities(segment);
        match self.rebuild(stripe).filter(|_| is_time) {
            Some(_) => Step::Rebuild(stripe),
            None => Step::Wait,
        }
    }

    /// Whether a page may be right in the copy that leaves and damaged in the copies that stay. A
    /// copy is as good as its source, and no better.
    fn is_to_be_compared(&self, segment: u64, group: &Group, leaving: Place) -> bool {
        let can_be_asked = |place: &Place| self.donor(place.donor).reachable;
        let mut others = group.whole().filter(|place| *place != leaving);
        let is_compared = self.compared.contains(&(segment, *group));
        can_be_asked(&leaving) && others.any(|place| can_be_asked(&place)) && !is_compared
    }

    /// Records that the segment's copies were compared while it had this group, and that damaged
    /// pages were repaired from copies that had them right.
    pub fn compared(&mut self, segment: u64, group: Group) {
        self.compared.retain(|(other, _)| *other != segment);
        self.compared.push_back((segment, group));
        if self.compared.len() > COMPARED {
            self.compared.pop_front();
        }
    }

    /// Puts the segment after all others, because its step is not possible now.
    pub fn put_off(&mut self, segment: u64) {
        self.waited.insert(segment, self.turn);
    }

    /// Adds the extent that the donor gave to be filled. False if it is of no use any more.
    pub fn join(&mut self, segment: u64, place: Place) -> bool {
        if self.strays_of(place.donor).contains(&segment) {
            return false;
        }
        self.joined(segment, place)
    }

    /// Records that the donor gave no extent to fill.
    pub fn no_join(&mut self, segment: u64, donor: DonorIndex, why: crate::map::Declined) {
        self.note_declined(segment, donor, why);
    }

    /// Number of segments that need a step.
    pub fn untended(&self) -> u64 {
        self.unsettled.len() as u64
    }
}

#[cfg(test)]
impl Map {
    /// Returns the step after the comparison; panics if the next step is no comparison.
    pub(crate) fn step_after_comparing(&mut self, segment: u64, tried: &[DonorIndex]) -> Step {
        match self.next_step(segment, tried) {
            Step::Compare { group, .. } => self.compared(segment, group),
            other => panic!("it is not compared before a copy goes, but {other:?}"),
        }
        self.next_step(segment, tried)
    }
}
