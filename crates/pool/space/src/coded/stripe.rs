//! Stripes: segments that have gone cold, kept in one extent each, with parities for all of them.
//!
//! Decisions only. A stripe is *plain* as long as this module knows nothing of it: its segments are
//! held in copies. It becomes
//!
//! - *coding* when all its segments have been left alone for long ([`Map::freeze`]). Its parities
//!   are entered as groups without members. [`upkeep`](crate::upkeep) finds donors for them, and
//!   has them made from one copy of each segment, the *keepers*, which are at different donors. A
//!   write makes the stripe plain again at once ([`Map::allow_write`]).
//! - *coded* when all parities are whole and the keepers know the parities' generation
//!   ([`Map::commit`]). Then the owner of the space records that the stripe is coded, with that
//!   generation. Only after that the other copies are freed ([`Map::recorded`]). No write reaches a
//!   coded stripe. A shard without members is decoded from the others.
//! - *warming* when it is to be written, or is read a lot. Its segments get copies again, made from
//!   the keepers. Then the owner records that the stripe is not coded, and it is plain
//!   ([`Map::thaw`]).
//!
//! So the record tells a successor which form is complete. Without it, parities are strays, and
//! every copy counts that has what was acknowledged. With it, only extents of its generation count:
//! keepers, parities, and shards made from them.

use crate::coded::code::{self, Code};
use crate::map::group::{DonorIndex, Form, Group, Place};
use crate::map::lookup::Whereabouts;
use crate::map::{Holding, Map, Segment};
use hecaton_memory::Generation;
use hecaton_policy::cold;
use std::collections::{BTreeMap, BTreeSet};

/// A stripe that is not plain.
#[derive(Clone, Debug)]
pub(crate) struct Stripe {
    pub(crate) state: State,
    /// Generation of the parities and, while the stripe is coded, of the segments' members.
    pub(crate) generation: Generation,
    /// While it is coding: the copy of each segment that parities are made from.
    keepers: Vec<(u64, Place)>,
    /// Copies that were let go, and are to be freed when it is recorded that the stripe is coded.
    held_back: Vec<(DonorIndex, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Coding,
    Coded,
    Warming,
}

/// Record of a coded stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Extents of an earlier generation are not part of the stripe.
    pub generation: Generation,
    /// One bit per segment, the first one lowest: set unless the segment is zeros.
    pub held: u8,
}

/// The shards of a coded stripe, as a reader sees them.
#[derive(Clone, Debug)]
pub struct Shards {
    /// Which of them was asked about.
    pub wanted: usize,
    /// How many of the others are needed for it.
    pub needed: usize,
    /// Their segments, and where those are. One that is nowhere is zeros.
    pub all: Vec<(u64, Whereabouts)>,
}

/// Shards that are to be worked out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuild {
    /// The stripe.
    pub stripe: u64,
    /// Whether parities are made, which only the keepers' pages are good for.
    pub is_coding: bool,
    /// Shards to fill: index in the stripe, segment number, place.
    pub targets: Vec<(usize, u64, Place)>,
    /// Shards to read, likewise; at least as many as the stripe has segments. Zeros have no place.
    pub sources: Vec<(usize, u64, Option<Place>)>,
}

/// How much of a space is coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodedCounts {
    /// Stripes that are coded, those that are warming among them.
    pub stripes: u64,
    /// Segments in them that have pages.
    pub segments: u64,
    /// Extents that these would have in copies, less those that they have, with the parities.
    pub extents_saved: u64,
}

impl Map {
    /// The map of a space that another borrower has left with these stripes coded.
    #[must_use]
    pub fn with_coded(mut self, coded: &BTreeMap<u64, Coded>) -> Map {
        let Some(code) = self.code() else { return self };
        for (&stripe, &Coded { generation, held }) in coded {
            let (keepers, held_back) = (Vec::new(), Vec::new());
            self.stripes
                .insert(stripe, Stripe { state: State::Coded, generation, keepers, held_back });
            for (shard, segment) in code.shards_of(stripe).enumerate() {
                let pages = match self.segments.get(&segment) {
                    Some(Segment::Missing(expected)) => expected.pages,
                    // A segment without stored pages may be part of the code, too.
                    _ if code::is_parity(segment) || held & 1 << shard != 0 => 0,
                    _ => continue,
                };
                let group = Group::new(generation);
                let degraded_since = Some(self.now);
                let held = Holding { group, degraded_since, pages, since: generation };
                self.set(segment, Some(Segment::Held(held)));
            }
        }
        self
    }

    pub(crate) fn code(&self) -> Option<Code> {
        self.shape.code
    }

    fn stripe_of(&self, segment: u64) -> Option<(u64, &Stripe)> {
        let (stripe, _) = self.code()?.shard_of(segment);
        Some((stripe, self.stripes.get(&stripe)?))
    }

    fn state_of(&self, segment: u64) -> Option<State> {
        self.stripe_of(segment).map(|(_, stripe)| stripe.state)
    }

    pub(crate) fn form_of(&self, segment: u64) -> Form {
        match self.state_of(segment) {
            None => Form::Copies,
            Some(State::Coding) => Form::Coding,
            Some(State::Coded | State::Warming) => Form::Coded,
        }
    }

    /// The generation of the stripe that a segment is part of, if that is coded.
    pub(crate) fn coded_with(&self, segment: u64) -> Option<Generation> {
        let (_, known) = self.stripe_of(segment)?;
        (known.state != State::Coding).then_some(known.generation)
    }

    /// Whether a line of a donor's list may be a parity of this space.
    pub(crate) fn is_parity(&self, segment: u64) -> bool {
        let Some(code) = self.code().filter(|_| code::is_parity(segment)) else { return false };
        code.shard_of(segment).0 < code.stripes(self.shape.segments)
    }

    /// How many whole members the segment's group is to have.
    pub(crate) fn wanted_members(&self, segment: u64) -> usize {
        match self.state_of(segment) {
            Some(State::Coded) => 1,
            Some(State::Coding | State::Warming) if code::is_parity(segment) => 1,
            _ => self.shape.copies.into(),
        }
    }

    /// Whether a group that has no whole member left is lost, and not to be worked out anew.
    pub(crate) fn is_lost_without_members(&self, segment: u64) -> bool {
        match self.state_of(segment) {
            None => true,
            Some(State::Coding) => !code::is_parity(segment),
            Some(State::Coded | State::Warming) => false,
        }
    }

    /// Whether the group has too few whole members. A parity that is being made for the first time
    /// puts nothing at risk.
    pub(crate) fn is_at_risk(&self, segment: u64, group: &Group) -> bool {
        let is_new = code::is_parity(segment) && self.state_of(segment) == Some(State::Coding);
        // A coded segment that gets its copies back lacks nothing as long as it has one.
        let needed = match self.form_of(segment) {
            Form::Coded => 1,
            Form::Copies | Form::Coding => self.wanted_members(segment),
        };
        !is_new && group.whole().count() < needed
    }

    /// The donors that a further member of the group must avoid: no two shards of a stripe are at
    /// one donor. Copies of a warming stripe need not avoid other segments' copies. With
    /// `is_pressed`, a decoded segment of that stripe need not either, so that it may get copies.
    pub(crate) fn apart_from(
        &self,
        segment: u64,
        group: &Group,
        is_pressed: bool,
    ) -> Vec<DonorIndex> {
        let own = group.members().iter().map(|member| member.place.donor);
        let mut donors: BTreeSet<DonorIndex> = own.collect();
        if let (Some(code), Some((stripe, known))) = (self.code(), self.stripe_of(segment)) {
            let is_copy = group.whole().next().is_some();
            match known.state {
                State::Warming if is_copy || is_pressed => {}
                State::Coding if !code::is_parity(segment) => {}
                State::Coding => {
                    donors.extend(known.keepers.iter().map(|(_, place)| place.donor));
                    donors.extend(
                        code.parities_of(stripe).flat_map(|parity| self.donors_with(parity)),
                    );
                }
                State::Coded | State::Warming => {
                    donors.extend(code.shards_of(stripe).flat_map(|shard| self.donors_with(shard)));
                }
            }
        }
        donors.into_iter().collect()
    }

    fn donors_with(&self, segment: u64) -> Vec<DonorIndex> {
        let held = self.holding(segment);
        held.iter().flat_map(|held| held.group.members()).map(|member| member.place.donor).collect()
    }

    /// Stripes that could be coded, and of which the caller says that each segment is cold.
    pub fn stripes_to_code(&self, is_cold: &dyn Fn(u64) -> bool) -> Vec<u64> {
        let Some(code) = self.code() else { return Vec::new() };
        let mut stripes: Vec<u64> = Vec::new();
        let last = code::FIRST_PARITY - 1;
        for (segment, _) in self.segments.range(..=last) {
            let stripe = code.shard_of(*segment).0;
            if stripes.last() != Some(&stripe) {
                stripes.push(stripe);
            }
        }
        stripes.retain(|stripe| {
            code.segments_of(*stripe).all(is_cold) && self.keepers_of(*stripe).is_some()
        });
        stripes
    }

    /// The copies to make parities from, at different donors. None unless each segment has all its
    /// copies or none, coding saves room, and donors exist for the parities.
    fn keepers_of(&self, stripe: u64) -> Option<Vec<(u64, Place)>> {
        let code = self.code()?;
        if self.stripes.contains_key(&stripe) || !self.unlisted.is_empty() {
            return None;
        }
        let mut copies: Vec<(u64, Vec<Place>)> = Vec::new();
        for segment in code.segments_of(stripe) {
            let held = match self.segments.get(&segment) {
                None => continue,
                Some(Segment::Held(held)) => held,
                Some(Segment::Taking(_) | Segment::Lost(_) | Segment::Missing(_)) => return None,
            };
            let group = &held.group;
            let is_settled = !self.unsettled.contains(&segment)
                && held.degraded_since.is_none()
                && group.members().iter().all(|member| member.is_whole);
            if !is_settled {
                return None;
            }
            let reachable = group.whole().filter(|place| self.donor(place.donor).reachable);
            copies.push((segment, reachable.collect()));
        }
        let (held, parity) = (copies.len() as u64, code.parity() as u64);
        if cold::extents_saved(held, self.shape.copies.into(), parity) == 0 {
            return None;
        }
        let keepers = at_different_donors(&copies)?;
        let mut taken: Vec<DonorIndex> = keepers.iter().map(|(_, place)| place.donor).collect();
        for number in code.parities_of(stripe) {
            taken.push(self.choose(number, &[], &taken)?);
        }
        Some(keepers)
    }

    /// Begins to make the parities of a stripe. False if it cannot be coded. [`Map::allow_write`]
    /// sees every later write; the caller must check for writes already in flight.
    pub fn freeze(&mut self, stripe: u64) -> bool {
        let Some(keepers) = self.keepers_of(stripe) else { return false };
        let generation = self.fresh_generation();
        let held_back = Vec::new();
        self.stripes
            .insert(stripe, Stripe { state: State::Coding, generation, keepers, held_back });
        self.look_at(stripe);
        let Some(code) = self.code() else { return false };
        for parity in code.parities_of(stripe) {
            let group = Group::new(generation);
            let held = Holding { group, degraded_since: None, pages: 0, since: generation };
            self.set(parity, Some(Segment::Held(held)));
            self.unsettled.insert(parity);
        }
        true
    }

    /// Announces a write, discard or free of a segment. False if the segment's stripe must become
    /// plain first, which this call starts.
    pub fn allow_write(&mut self, segment: u64) -> bool {
        let Some((stripe, known)) = self.stripe_of(segment) else { return true };
        match known.state {
            State::Coding => {
                self.thaw(stripe);
                true
            }
            State::Coded | State::Warming => {
                self.warm(stripe);
                false
            }
        }
    }

    /// Cancels the coding of a stripe, because it is being written, or has gone bad.
    pub fn give_up_coding(&mut self, stripe: u64) {
        if self.stripes.get(&stripe).is_some_and(|known| known.state == State::Coding) {
            self.thaw(stripe);
        }
    }

    /// Whether a stripe can be made plain only when a donor gets room for a segment of it that is
    /// gone.
    pub(crate) fn is_short_of_room(&self, segment: u64) -> bool {
        let (Some(code), Some((stripe, _))) = (self.code(), self.stripe_of(segment)) else {
            return false;
        };
        code.segments_of(stripe).any(|segment| {
            let is_gone = |held: Holding| held.group.members().is_empty();
            self.holding(segment).is_some_and(is_gone) && self.waited.contains_key(&segment)
        })
    }

    /// The segments of a coded stripe are to be held in copies again.
    pub fn warm(&mut self, stripe: u64) {
        if let Some(known) = self.stripes.get_mut(&stripe)
            && known.state == State::Coded
        {
            known.state = State::Warming;
            self.look_at(stripe);
        }
    }

    /// Enters a stripe's groups anew, after its state has changed, and has the upkeep look at them.
    fn look_at(&mut self, stripe: u64) {
        let Some(code) = self.code() else { return };
        for segment in code.shards_of(stripe) {
            if let Some(held) = self.holding(segment) {
                self.set(segment, Some(Segment::Held(held)));
                self.unsettled.insert(segment);
                self.waited.remove(&segment);
            }
        }
    }

    /// The stripe's generation and keepers, once every parity is made. The caller tells the keepers
    /// that generation before [`Map::commit`].
    pub fn ready_to_commit(&self, stripe: u64) -> Option<(Generation, Vec<(u64, Place)>)> {
        let known = self.stripes.get(&stripe).filter(|known| known.state == State::Coding)?;
        let is_whole =
            |parity| self.holding(parity).is_some_and(|held| held.group.whole().next().is_some());
        let is_ready = self.code()?.parities_of(stripe).all(is_whole);
        is_ready.then(|| (known.generation, known.keepers.clone()))
    }

    /// Makes the stripe coded, if it is still ready with the generation of
    /// [`Map::ready_to_commit`]. The caller records it, and calls [`Map::recorded`].
    #[must_use]
    pub fn commit(&mut self, stripe: u64, generation: Generation) -> Option<Coded> {
        let code = self.code()?;
        let (_, keepers) =
            self.ready_to_commit(stripe).filter(|(ready, _)| *ready == generation)?;
        let mut held_back = Vec::new();
        let mut coded = Coded { generation, held: 0 };
        for &(segment, keeper) in &keepers {
            let Some(held) = self.holding(segment) else { continue };
            coded.held |= 1 << code.shard_of(segment).1;
            let mut group = Group::new(generation);
            group.add(keeper, true);
            let others = held.group.members().iter().filter(|member| member.place != keeper);
            held_back.extend(others.map(|member| (member.place.donor, segment)));
            let held = Holding { group, degraded_since: None, ..held };
            self.set(segment, Some(Segment::Held(held)));
        }
        let keepers = Vec::new();
        self.stripes.insert(stripe, Stripe { state: State::Coded, generation, keepers, held_back });
        self.look_at(stripe);
        Some(coded)
    }

    /// It is recorded that the stripe is coded: the copies that are not needed any more may go.
    pub fn recorded(&mut self, stripe: u64) {
        if let Some(known) = self.stripes.get_mut(&stripe) {
            self.strays.extend(std::mem::take(&mut known.held_back));
        }
    }

    /// Whether the segment's stripe is to be made plain.
    pub(crate) fn is_warming(&self, segment: u64) -> bool {
        self.state_of(segment) == Some(State::Warming)
    }

    /// The reachable copies of a warming stripe, once each segment has all copies that donors have
    /// room for. No write waits for copies at unreachable donors: each segment has another one. The
    /// caller asks each donor whether its copy exists: if a donor died unnoticed, its copy can be
    /// decoded as long as parities exist. Then the caller records that the stripe is not coded, and
    /// calls [`Map::thaw`].
    pub fn ready_to_thaw(&self, stripe: u64) -> Option<Vec<(u64, Place)>> {
        let is_warming = self.stripes.get(&stripe).is_some_and(|s| s.state == State::Warming);
        let code = self.code().filter(|_| is_warming)?;
        let is_ready = code.segments_of(stripe).all(|segment| match self.segments.get(&segment) {
            Some(Segment::Held(held)) => {
                let group = &held.group;
                let is_filling = group.members().iter().any(|member| !member.is_whole);
                let is_there = group.whole().any(|place| self.donor(place.donor).reachable);
                let is_all = group.whole().count() >= usize::from(self.shape.copies);
                is_there && !is_filling && (is_all || self.waited.contains_key(&segment))
            }
            Some(Segment::Missing(_) | Segment::Taking(_)) => false,
            Some(Segment::Lost(_)) | None => true,
        });
        let copies = || {
            let held =
                code.segments_of(stripe).filter_map(|at| Some((at, self.holding(at)?.group)));
            held.flat_map(|(at, group)| {
                let reachable = group.whole().filter(|place| self.donor(place.donor).reachable);
                reachable.map(|place| (at, place)).collect::<Vec<_>>()
            })
        };
        is_ready.then(|| copies().collect())
    }

    /// The stripe is plain again: its parities are strays, and its segments may be written.
    pub fn thaw(&mut self, stripe: u64) {
        let (Some(code), Some(known)) = (self.code(), self.stripes.remove(&stripe)) else { return };
        self.strays.extend(known.held_back);
        for parity in code.parities_of(stripe) {
            self.strays.extend(self.donors_with(parity).into_iter().map(|donor| (donor, parity)));
            self.set(parity, None);
            self.unsettled.remove(&parity);
            self.waited.remove(&parity);
        }
        for segment in code.segments_of(stripe) {
            let Some(mut held) = self.holding(segment) else { continue };
            // Later writes need a newer generation than the code.
            held.group.generation = self.fresh_generation();
            let is_degraded = held.group.whole().count() < usize::from(self.shape.copies);
            held.degraded_since = is_degraded.then_some(held.degraded_since.unwrap_or(self.now));
            self.set(segment, Some(Segment::Held(held)));
            self.unsettled.insert(segment);
        }
    }

    /// Reviews a stripe after a member of a group has left. If too many shards are lost, segments
    /// without a whole member are lost, and the rest gets copies again. Coding ends if a keeper is
    /// gone.
    pub(crate) fn review(&mut self, segment: u64, lost_with: DonorIndex) {
        let (Some(code), Some((stripe, known))) = (self.code(), self.stripe_of(segment)) else {
            return;
        };
        if known.state == State::Coding {
            let is_there = |(segment, keeper): &(u64, Place)| {
                self.holding(*segment).is_some_and(|held| held.group.contains(*keeper))
            };
            if !known.keepers.iter().all(is_there) {
                self.thaw(stripe);
            }
            return;
        }
        // Whether a shard without members can be decoded depends on the others.
        self.changed.extend(code.shards_of(stripe).filter(|s| self.segments.contains_key(s)));
        if self.known_shards(stripe) >= code.data() || !self.unlisted.is_empty() {
            return;
        }
        for segment in code.shards_of(stripe) {
            let Some(held) = self.holding(segment) else { continue };
            if held.group.whole().next().is_none() {
                self.strays.extend(self.donors_with(segment).into_iter().map(|at| (at, segment)));
                let lost = (!code::is_parity(segment)).then_some(Segment::Lost(lost_with));
                self.set(segment, lost);
                self.unsettled.remove(&segment);
            }
        }
        self.warm(stripe);
    }

    /// After a list of a donor has come, or a donor is known to be gone: see [`Map::review`].
    pub(crate) fn review_all(&mut self) {
        let Some(code) = self.code() else { return };
        for stripe in self.stripes.keys().copied().collect::<Vec<_>>() {
            self.review(code.segments_of(stripe).start, DonorIndex::UNKNOWN);
        }
    }

    /// How many shards of a stripe are whole, those among them that are zeros.
    fn known_shards(&self, stripe: u64) -> usize {
        let Some(code) = self.code() else { return 0 };
        let is_known = |segment: &u64| match self.segments.get(segment) {
            None => !code::is_parity(*segment),
            Some(Segment::Held(held)) => held.group.whole().next().is_some(),
            Some(Segment::Taking(_) | Segment::Lost(_) | Segment::Missing(_)) => false,
        };
        code.shards_of(stripe).filter(is_known).count()
    }

    /// Whether a group without a whole member cannot be worked out from what is known by now.
    pub(crate) fn is_out_of_reach(&self, segment: u64, held: &Holding) -> bool {
        let (Some(code), Some((stripe, _))) = (self.code(), self.stripe_of(segment)) else {
            return false;
        };
        held.group.whole().next().is_none() && self.known_shards(stripe) < code.data()
    }

    /// The shards of a stripe that is coded, for one of them whose donor does not give it.
    pub fn shards(&self, segment: u64) -> Option<Shards> {
        let code = self.code()?;
        let (stripe, wanted) = code.shard_of(segment);
        let all = code.shards_of(stripe).map(|shard| match self.whereabouts(shard) {
            // A segment without extents is zeros; a parity is gone.
            Whereabouts::Nowhere if code::is_parity(shard) => {
                (shard, Whereabouts::Lost(DonorIndex::UNKNOWN))
            }
            at => (shard, at),
        });
        let is_coded = self.form_of(segment) == Form::Coded;
        is_coded.then(|| Shards { wanted, needed: code.data(), all: all.collect() })
    }

    /// The shards of a stripe to make, and their sources. None if no shard needs filling, or if the
    /// sources do not suffice.
    pub fn rebuild(&self, stripe: u64) -> Option<Rebuild> {
        let (code, known) = (self.code()?, self.stripes.get(&stripe)?);
        let is_coding = known.state == State::Coding;
        let (mut targets, mut sources) = (Vec::new(), Vec::new());
        for (shard, segment) in code.shards_of(stripe).enumerate() {
            let held = match self.segments.get(&segment) {
                Some(Segment::Held(held)) => held,
                None if !code::is_parity(segment) => {
                    sources.push((shard, segment, None));
                    continue;
                }
                _ => continue,
            };
            let mut readable = held.group.whole().filter(|p| self.donor(p.donor).reachable);
            let keeper = known.keepers.iter().find(|(other, _)| *other == segment);
            let source = match keeper {
                Some((_, keeper)) => Some(*keeper),
                None => readable.next(),
            };
            let filling = held.group.members().iter().find(|member| !member.is_whole);
            match (source, filling) {
                (Some(place), _) => sources.push((shard, segment, Some(place))),
                (None, Some(to)) => targets.push((shard, segment, to.place)),
                _ => {}
            }
        }
        let is_possible = sources.len() >= code.data() && !targets.is_empty();
        is_possible.then_some(Rebuild { stripe, is_coding, targets, sources })
    }

    /// Whether all parities of a stripe that is coding have a place to be made at.
    pub(crate) fn has_places_for_parities(&self, segment: u64) -> bool {
        let (Some(code), Some((stripe, known))) = (self.code(), self.stripe_of(segment)) else {
            return false;
        };
        known.state != State::Coding
            || code.parities_of(stripe).all(|parity| !self.donors_with(parity).is_empty())
    }

    /// Returns to copies if a parity or a misplaced shard finds no donor apart from other shards.
    /// Copies have more choice. True if that changes anything.
    pub(crate) fn yields(&mut self, segment: u64, is_misplaced: bool) -> bool {
        let Some((stripe, known)) = self.stripe_of(segment) else { return false };
        match known.state {
            State::Coding if code::is_parity(segment) => self.thaw(stripe),
            State::Coded if is_misplaced => self.warm(stripe),
            State::Coding | State::Coded | State::Warming => return false,
        }
        true
    }

    /// The next step of the stripe of a group that needs nothing itself: to become coded, or plain.
    pub(crate) fn next_of_stripe(&self, segment: u64) -> Option<crate::copies::upkeep::Step> {
        let (stripe, _) = self.stripe_of(segment)?;
        if self.ready_to_commit(stripe).is_some() {
            return Some(crate::copies::upkeep::Step::Commit(stripe));
        }
        self.ready_to_thaw(stripe).map(|_| crate::copies::upkeep::Step::Thaw(stripe))
    }

    /// The stripes that are coded and not warming.
    pub fn coded(&self) -> impl Iterator<Item = u64> {
        let coded = self.stripes.iter().filter(|(_, known)| known.state == State::Coded);
        coded.map(|(stripe, _)| *stripe)
    }

    /// How much is coded, and what that saves.
    pub fn coded_counts(&self) -> CodedCounts {
        let mut counts = CodedCounts::default();
        let Some(code) = self.code() else { return counts };
        for (&stripe, _) in self.stripes.iter().filter(|(_, s)| s.state != State::Coding) {
            let held = |segment: &u64| self.segments.contains_key(segment);
            let segments = code.segments_of(stripe).filter(held).count() as u64;
            let extents: usize =
                code.shards_of(stripe).map(|shard| self.donors_with(shard).len()).sum();
            let in_copies = segments * u64::from(self.shape.copies);
            counts.stripes += 1;
            counts.segments += segments;
            counts.extents_saved += in_copies.saturating_sub(extents as u64);
        }
        counts
    }
}

/// One place of each segment, no two at one donor, if such a choice exists: an augmenting path for
/// each segment in turn (Kuhn, 1955).
fn at_different_donors(copies: &[(u64, Vec<Place>)]) -> Option<Vec<(u64, Place)>> {
    fn find(
        at: usize,
        copies: &[(u64, Vec<Place>)],
        taken: &mut BTreeMap<DonorIndex, (usize, Place)>,
        seen: &mut BTreeSet<DonorIndex>,
    ) -> bool {
        for place in &copies[at].1 {
            if !seen.insert(place.donor) {
                continue;
            }
            let other = taken.get(&place.donor).map(|(other, _)| *other);
            if other.is_none_or(|other| find(other, copies, taken, seen)) {
                taken.insert(place.donor, (at, *place));
                return true;
            }
        }
        false
    }
    let mut taken = BTreeMap::new();
    for at in 0..copies.len() {
        if !find(at, copies, &mut taken, &mut BTreeSet::new()) {
            return None;
        }
    }
    let mut chosen: Vec<(u64, Place)> =
        taken.into_values().map(|(at, place)| (copies[at].0, place)).collect();
    chosen.sort_by_key(|(segment, _)| *segment);
    Some(chosen)
}
