//! Which extents hold which segment, and whom to ask for the next one.
//!
//! Decisions only: events and times come in as arguments, steps go out as values. The caller
//! serialises access, asks the donors, and tells the answers.
//!
//! A segment is nowhere until its first page is written. Then [`Map::begin`] names a donor to ask.
//! [`Map::allocated`] or [`Map::declined`] tells the outcome, and names the next donor, until the
//! group has all its members or no donor is left. A member leaves the group when its donor is in
//! another life or no longer holds the extent, or after a missed write ([`Map::desert`]). A segment
//! is lost when its last whole member is gone. It stays lost until it is freed: taking another
//! extent silently would turn lost pages into zeros.
//!
//! [`upkeep`](crate::upkeep) restores missing members, and moves misplaced ones.

pub mod group;
pub(crate) mod heritage;
pub mod lookup;
pub(crate) mod reading;

use crate::coded::code::{self, Code};
use crate::coded::stripe::Stripe;
use crate::map::group::{DonorIndex, Group, MAX_MEMBERS, Place};
use crate::map::lookup::Whereabouts;
use hecaton_memory::{Epoch, Generation};
use hecaton_policy::placement::{self, Candidate};
use hecaton_policy::site::{Apart, Site};
use hecaton_transport::protocol::{HeldExtent, Load};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Next step for a segment that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Nothing: it is there.
    Held(Group),
    /// Ask this donor for an extent of the group that is to be, and tell [`Map::allocated`] or
    /// [`Map::declined`].
    Ask(DonorIndex, Generation),
    /// Wait: another thread is asking.
    Wait,
    /// Give up: it is lost, with this donor.
    Lost(DonorIndex),
    /// Give up: no donor has room.
    NoRoom,
    /// Try again later: it is part of a stripe that is coded, and is being made copies of again.
    Coded,
}

/// Why a donor did not give an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declined {
    /// It has no room.
    Full,
    /// It did not answer. It may have set the extent aside all the same.
    Silent,
    /// It has not answered in the time that there was. It may do so yet.
    Late,
    /// It was not asked, because others have waited too long for its answers already.
    Busy,
}

/// Knowledge of a successor about a segment in which its predecessor had stored pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// How many pages an extent must have at least. Pages of zeros do not count: they may have been
    /// stored, and are not in a copy that was filled.
    pub pages: u32,
    /// That of the last write, or discard, that was acknowledged. An extent with an older one has
    /// missed something.
    pub generation: Generation,
}

/// A segment that is not nowhere.
#[derive(Clone, Debug)]
pub(crate) enum Segment {
    /// Its first extents are being asked for.
    Taking(Taking),
    /// It has a group.
    Held(Holding),
    /// Its last whole member was with this donor.
    Lost(DonorIndex),
    /// A predecessor's, and no donor has told of it yet.
    Missing(Expected),
}

/// The asking for a segment's first extents.
#[derive(Clone, Debug)]
pub(crate) struct Taking {
    generation: Generation,
    tried: Vec<DonorIndex>,
    given: Vec<Place>,
}

/// A segment that is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holding {
    pub(crate) group: Group,
    /// Since when it has fewer copies than it is to have.
    pub(crate) degraded_since: Option<Duration>,
    /// Pages that a further copy of a found group must have. An extent that was only set aside has
    /// the group's generation, too.
    pub(crate) pages: u32,
    /// Least generation of a further copy of a found group, where stripes are coded. One copy of
    /// each segment gets it before it is recorded, so whole copies may have several generations.
    pub(crate) since: Generation,
}

/// State of a donor, as last heard.
#[derive(Clone, Debug)]
pub struct Donor {
    /// Its name.
    pub name: String,
    /// Where it is. Copies are kept apart where that is possible.
    pub site: Site,
    /// Which life of it was heard last.
    pub boot: Option<u64>,
    /// Its room and its load, as it said last.
    pub load: Load,
    /// When that was.
    pub heard_at: Duration,
    /// Whether it answered when it was last asked.
    pub reachable: bool,
    /// It is waited for now, for longer than usual. Its extents are as good as before, but it is
    /// asked for no further ones until it is heard.
    pub is_overdue: bool,
    /// Extents of this space that it holds.
    pub extents: u64,
    listed: Option<u64>,
}

/// How a space's segments are to be held.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Segments in the space.
    pub segments: u64,
    /// Pages in a segment.
    pub segment_pages: u64,
    /// Copies of each.
    pub copies: u8,
    /// The borrower's epoch.
    pub epoch: Epoch,
    /// How those are kept that have gone cold.
    pub code: Option<Code>,
}

/// The map of one space.
pub struct Map {
    pub(crate) shape: Shape,
    /// Where the borrower is.
    site: Site,
    /// Only those that are not nowhere: a space may be far larger than what is ever written in it.
    pub(crate) segments: BTreeMap<u64, Segment>,
    /// Those that are not plain.
    pub(crate) stripes: BTreeMap<u64, Stripe>,
    donors: Vec<Donor>,
    by_name: BTreeMap<String, DonorIndex>,
    /// Donors whose extents are not known yet, though they may hold some of a predecessor's.
    pub(crate) unlisted: BTreeSet<DonorIndex>,
    /// Donors that may hold an extent for a segment that is not in its group. It was set aside
    /// while they could not be heard, or missed a write. A donor that is asked again for a segment
    /// gives the same extent, with old contents. So it is not asked before the stray is freed.
    pub(crate) strays: BTreeSet<(DonorIndex, u64)>,
    /// Which donors the segments of each zone may be with, by name; an empty list: all.
    zones: Vec<Vec<String>>,
    /// The zones of segments that are in another than the first.
    zone_of: BTreeMap<u64, u16>,
    /// Segments that may have too few members, or some in the wrong place.
    pub(crate) unsettled: BTreeSet<u64>,
    /// Those of them for which nothing could be done, and in which turn of the upkeep that was.
    pub(crate) waited: BTreeMap<u64, u64>,
    /// Segments whose copies were compared last, a few, and their groups at that time.
    pub(crate) compared: VecDeque<(u64, Group)>,
    pub(crate) turn: u64,
    /// Segments that leave a donor which wants some of its extents back.
    pub(crate) leaving: BTreeSet<(DonorIndex, u64)>,
    /// The generation given last. No two groups have the same, not even groups that follow each
    /// other in one segment: a stray of the earlier one is older.
    generation: Generation,
    /// The latest time of which the map was told.
    pub(crate) now: Duration,
    pub(crate) changed: Vec<u64>,
}

impl Map {
    /// The map of a space without extents.
    pub fn new(shape: Shape) -> Map {
        Map {
            shape,
            site: Site::default(),
            segments: BTreeMap::new(),
            stripes: BTreeMap::new(),
            donors: Vec::new(),
            by_name: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            strays: BTreeSet::new(),
            zones: Vec::new(),
            zone_of: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            waited: BTreeMap::new(),
            compared: VecDeque::new(),
            turn: 0,
            leaving: BTreeSet::new(),
            generation: Generation::first(shape.epoch),
            now: Duration::ZERO,
            changed: Vec::new(),
        }
    }

    /// The map of a space that another borrower has left, with what that one had stored. The donors
    /// tell where it is: until then, those segments count as lost.
    pub fn adopting(shape: Shape, expected: &BTreeMap<u64, Expected>) -> Map {
        let mut map = Map::new(shape);
        for (&segment, &expected) in expected {
            map.set(segment, Some(Segment::Missing(expected)));
        }
        map
    }

    /// The same map, of a borrower that is there.
    #[must_use]
    pub fn at(self, site: Site) -> Map {
        Map { site, ..self }
    }

    /// The donor of that name, entered if it is new. `unlisted` says of a new one that it may hold
    /// extents of the space, which [`Map::listed`] will tell.
    pub fn donor_named(&mut self, name: &str, site: &Site, unlisted: bool) -> DonorIndex {
        if let Some(index) = self.by_name.get(name) {
            self.donors[index.0 as usize].site = site.clone();
            return *index;
        }
        let index = DonorIndex(self.donors.len() as u32);
        self.donors.push(Donor {
            name: name.to_owned(),
            site: site.clone(),
            boot: None,
            load: Load::default(),
            heard_at: Duration::ZERO,
            reachable: false,
            is_overdue: false,
            extents: 0,
            listed: None,
        });
        self.by_name.insert(name.to_owned(), index);
        if unlisted {
            self.unlisted.insert(index);
        }
        index
    }

    /// State of a donor, as last heard.
    pub fn donor(&self, donor: DonorIndex) -> &Donor {
        &self.donors[donor.0 as usize]
    }

    /// All donors, in the order of their index.
    pub fn donors(&self) -> &[Donor] {
        &self.donors
    }

    /// Copies that each segment is to have.
    pub fn copies(&self) -> u8 {
        self.shape.copies
    }

    /// Pages in a segment.
    pub(crate) fn segment_pages(&self) -> u64 {
        self.shape.segment_pages
    }

    /// Sets which donors may hold the segments of each zone, by name; an empty list: all. Segments
    /// that are elsewhere move.
    pub fn set_zones(&mut self, zones: Vec<Vec<String>>) {
        self.zones = zones;
        self.look_at_all();
    }

    /// Puts a segment into a zone; all are in the first one before.
    pub fn assign(&mut self, segment: u64, zone: u16) {
        let before = match zone {
            0 => self.zone_of.remove(&segment),
            zone => self.zone_of.insert(segment, zone),
        };
        if before.unwrap_or(0) != zone && self.segments.contains_key(&segment) {
            self.unsettled.insert(segment);
        }
    }

    /// Which donors hold how many segments of a zone.
    pub fn donors_of_zone(&self, zone: u16) -> BTreeMap<DonorIndex, u64> {
        let mut donors = BTreeMap::new();
        for (segment, held) in self.holdings() {
            if self.zone_of.get(&segment).copied().unwrap_or(0) == zone {
                for member in held.group.members() {
                    *donors.entry(member.place.donor).or_default() += 1;
                }
            }
        }
        donors
    }

    /// Whether a donor may hold a segment: the segment's zone allows it, and the donor does not
    /// want its memory back.
    pub(crate) fn may_hold(&self, segment: u64, donor: DonorIndex) -> bool {
        let zone = self.zone_of.get(&segment).copied().unwrap_or(0);
        let known = self.donor(donor);
        let allowed = self.zones.get(usize::from(zone));
        !known.load.draining
            && !self.leaving.contains(&(donor, segment))
            && allowed.is_none_or(|names| names.is_empty() || names.contains(&known.name))
    }

    /// A donor was heard, on a connection that was begun at that time. If it is in another life
    /// than before, what it held is lost.
    ///
    /// False when this is news from an earlier life, or may be: boots cannot be compared, and what
    /// was under way for long may be overtaken by another connection. Only a connection that was
    /// begun after the donor was last heard proves another life to be a later one. The caller gives
    /// the connection up; the next one will be proof.
    #[must_use]
    pub fn heard(
        &mut self,
        donor: DonorIndex,
        boot: u64,
        load: Load,
        begun: Duration,
        now: Duration,
    ) -> bool {
        let known = &mut self.donors[donor.0 as usize];
        if known.boot.is_some_and(|before| before != boot) && begun < known.heard_at {
            return false;
        }
        self.now = self.now.max(now);
        known.reachable = true;
        known.is_overdue = false;
        let began_to_drain = load.draining && !known.load.draining;
        known.load = load;
        known.heard_at = now;
        let before = known.boot.replace(boot);
        if began_to_drain {
            self.look_at_all();
        }
        if before.is_none_or(|before| before == boot) {
            return true;
        }
        self.strays.retain(|(other, _)| *other != donor);
        let members = self.segments.iter().filter_map(|(segment, state)| match state {
            Segment::Held(held) => Some((*segment, held.group.at(donor)?.place)),
            _ => None,
        });
        let gone: Vec<_> = members.filter(|(_, place)| place.boot != boot).collect();
        for (segment, place) in gone {
            self.gone(segment, place);
        }
        true
    }

    /// A donor did not answer. It is not asked for extents until it is heard again.
    pub fn silent(&mut self, donor: DonorIndex) {
        self.donors[donor.0 as usize].reachable = false;
    }

    /// The donor is waited for, for longer than usual.
    pub fn overdue(&mut self, donor: DonorIndex) {
        self.donors[donor.0 as usize].is_overdue = true;
    }

    /// Whether the donor has listed its extents in this life. It need not do so again: all later
    /// extents are the map's own doing, strays included.
    pub fn is_listed(&self, donor: DonorIndex, boot: u64) -> bool {
        self.donors[donor.0 as usize].listed == Some(boot)
    }

    /// Takes a donor's list of all its extents for the space, to rebuild a lost map. Skips lines
    /// that do not fit the space. An extent of an expected segment is a member of its group if it
    /// has not missed anything. All other extents are strays.
    ///
    /// This holds for the first list of a donor. In a later life it has no extent that the map
    /// knows. It may have some that an earlier borrower took before that life was fenced. These are
    /// strays: their contents must not be seen.
    pub fn listed(&mut self, donor: DonorIndex, boot: u64, lines: &[HeldExtent]) {
        let is_first = self.donors[donor.0 as usize].listed.replace(boot).is_none();
        for line in lines {
            let order_fits = 1u64.checked_shl(line.order.into()) == Some(self.shape.segment_pages);
            let is_known = line.segment < self.shape.segments || self.is_parity(line.segment);
            if line.member != 0 || !is_known || !order_fits {
                continue;
            }
            let place = Place { donor, boot, extent: line.extent };
            match self.segments.get(&line.segment) {
                Some(Segment::Held(held)) if held.group.contains(place) => continue,
                Some(Segment::Taking(taking)) if taking.given.contains(&place) => continue,
                _ => {}
            }
            match self.found(place, line).filter(|_| is_first) {
                Some(held) => self.set(line.segment, Some(Segment::Held(held))),
                None => {
                    self.strays.insert((donor, line.segment));
                }
            }
        }
        self.unlisted.remove(&donor);
        // Those that are still missing are so because of another donor, or for good.
        let missing = self.segments.iter().filter(|(_, s)| matches!(s, Segment::Missing(_)));
        self.changed.extend(missing.map(|(segment, _)| *segment));
        self.review_all();
    }

    /// The new state of a segment, if the extent that a donor lists for it is a good one.
    fn found(&self, place: Place, line: &HeldExtent) -> Option<Holding> {
        let is_whole = line.generation != Generation::FILLING;
        match self.segments.get(&line.segment)? {
            Segment::Missing(expected) => {
                let is_good = is_whole
                    && line.generation >= expected.generation
                    && line.written >= expected.pages;
                let mut group = Group::new(line.generation);
                group.add(place, true);
                let degraded_since = (self.shape.copies > 1).then_some(self.now);
                let Expected { pages, generation: since } = *expected;
                is_good.then_some(Holding { group, degraded_since, pages, since })
            }
            Segment::Held(held) => {
                let generation = held.group.generation;
                let has_all = match (self.coded_with(line.segment), self.shape.code) {
                    // Nothing was written since, by whomever.
                    (Some(coded), _) => is_whole && line.generation >= coded,
                    (None, Some(_)) => {
                        let is_as_found = self.is_as_found(held.group);
                        is_as_found && is_whole && line.generation >= held.since
                    }
                    (None, None) => self.is_as_found(held.group) && line.generation == generation,
                };
                let is_as_good = has_all
                    && line.written >= held.pages
                    && held.group.at(place.donor).is_none()
                    && held.group.members().len() < MAX_MEMBERS;
                let mut held = *held;
                is_as_good.then(|| {
                    held.group.add(place, true);
                    held.group.generation = generation.max(line.generation);
                    if !self.is_at_risk(line.segment, &held.group) {
                        held.degraded_since = None;
                    }
                    held
                })
            }
            Segment::Lost(_) | Segment::Taking(_) => None,
        }
    }

    /// A donor whose extents are not known yet, if there is one.
    pub fn unlisted(&self) -> Option<DonorIndex> {
        self.unlisted.first().copied()
    }

    /// Whether there are segments that a predecessor had, and that no donor has told of yet.
    pub fn is_missing_any(&self) -> bool {
        self.segments.iter().any(|(segment, state)| match state {
            Segment::Missing(_) => true,
            Segment::Held(held) => self.is_out_of_reach(*segment, held),
            Segment::Taking(_) | Segment::Lost(_) => false,
        })
    }

    /// Where a segment is.
    pub fn whereabouts(&self, segment: u64) -> Whereabouts {
        match self.segments.get(&segment) {
            Some(Segment::Held(held)) if self.is_out_of_reach(segment, held) => {
                Whereabouts::Lost(self.unlisted().unwrap_or(DonorIndex::UNKNOWN))
            }
            Some(Segment::Held(held)) => Whereabouts::Held(held.group),
            Some(Segment::Lost(donor)) => Whereabouts::Lost(*donor),
            Some(Segment::Missing(_)) => {
                Whereabouts::Lost(self.unlisted().unwrap_or(DonorIndex::UNKNOWN))
            }
            Some(Segment::Taking(_)) | None => Whereabouts::Nowhere,
        }
    }

    /// Begins to take extents for a segment that is to be written; see [`Map::touch`] for one that
    /// has them.
    pub fn begin(&mut self, segment: u64) -> Take {
        if !self.allow_write(segment) {
            return if self.is_short_of_room(segment) { Take::NoRoom } else { Take::Coded };
        }
        match self.whereabouts(segment) {
            Whereabouts::Held(group) => Take::Held(self.touch(segment).unwrap_or(group)),
            Whereabouts::Lost(donor) => Take::Lost(donor),
            Whereabouts::Nowhere if self.is_taking(segment) => Take::Wait,
            Whereabouts::Nowhere => {
                let generation = self.fresh_generation();
                self.ask_next(segment, Taking { generation, tried: Vec::new(), given: Vec::new() })
            }
        }
    }

    pub(crate) fn fresh_generation(&mut self) -> Generation {
        self.generation = self.generation.next();
        self.generation
    }

    /// The group of a segment that is going to be written or discarded from, if it has one. From
    /// here on no predecessor can have given its generation: extents that donors list later are
    /// older.
    pub fn touch(&mut self, segment: u64) -> Option<Group> {
        let mut held = self.holding(segment)?;
        if self.is_as_found(held.group) {
            held.group.generation = self.fresh_generation();
            self.set(segment, Some(Segment::Held(held)));
        }
        Some(held.group)
    }

    /// Whether a group is still as a successor has found it. Then an extent listed later is another
    /// copy, if it is as good.
    pub fn is_as_found(&self, group: Group) -> bool {
        group.generation < Generation::first(self.shape.epoch)
    }

    /// Whether a segment is between [`Map::begin`] and the end of its taking.
    pub fn is_taking(&self, segment: u64) -> bool {
        matches!(self.segments.get(&segment), Some(Segment::Taking(_)))
    }

    /// The donor has given an extent for the segment. [`Map::heard`] was told of its life before.
    /// Returns the next step: nothing, or to ask another donor. It asks another one for a further
    /// copy, or because the extent is a stray listed since.
    pub fn allocated(&mut self, segment: u64, place: Place) -> Take {
        if self.strays.contains(&(place.donor, segment)) {
            return self.declined(segment, place.donor, Declined::Full);
        }
        match self.segments.get(&segment) {
            Some(Segment::Taking(taking)) => {
                let mut taking = taking.clone();
                taking.tried.push(place.donor);
                taking.given.push(place);
                self.ask_next(segment, taking)
            }
            _ => self.begin(segment),
        }
    }

    /// The donor has not given an extent for the segment. Says what to do next.
    pub fn declined(&mut self, segment: u64, donor: DonorIndex, why: Declined) -> Take {
        self.note_declined(segment, donor, why);
        match self.segments.get(&segment) {
            Some(Segment::Taking(taking)) => {
                let mut taking = taking.clone();
                taking.tried.push(donor);
                self.ask_next(segment, taking)
            }
            _ => self.begin(segment),
        }
    }

    pub(crate) fn note_declined(&mut self, segment: u64, donor: DonorIndex, why: Declined) {
        match why {
            // It said itself how much it has left, which may be a lot in smaller pieces.
            Declined::Full => {}
            Declined::Busy => self.overdue(donor),
            Declined::Late => {
                self.overdue(donor);
                self.strays.insert((donor, segment));
            }
            Declined::Silent => {
                self.silent(donor);
                self.strays.insert((donor, segment));
            }
        }
    }

    /// Gives up taking extents for a segment.
    pub fn abandon(&mut self, segment: u64) {
        if let Some(Segment::Taking(Taking { given, .. })) = self.segments.get(&segment) {
            self.strays.extend(given.iter().map(|place| (place.donor, segment)));
            self.set(segment, None);
        }
    }

    fn ask_next(&mut self, segment: u64, mut taking: Taking) -> Take {
        // A donor that gave one and has lost it since, in another life, has given nothing.
        taking.given.retain(|place| self.donor(place.donor).boot == Some(place.boot));
        let Taking { generation, tried, given } = &taking;
        let members: Vec<DonorIndex> = given.iter().map(|place| place.donor).collect();
        let is_degraded = given.len() < usize::from(self.shape.copies);
        let next = is_degraded.then(|| self.choose(segment, tried, &members)).flatten();
        match next {
            Some(donor) => {
                let take = Take::Ask(donor, *generation);
                self.set(segment, Some(Segment::Taking(taking)));
                take
            }
            None if given.is_empty() => {
                self.set(segment, None);
                Take::NoRoom
            }
            None => {
                let mut group = Group::new(*generation);
                given.iter().for_each(|&place| group.add(place, true));
                let degraded_since = is_degraded.then_some(self.now);
                let held = Holding { group, degraded_since, pages: 0, since: *generation };
                self.set(segment, Some(Segment::Held(held)));
                Take::Held(group)
            }
        }
    }

    /// The donor to ask for an extent of a segment that has members at some donors already.
    pub(crate) fn choose(
        &self,
        segment: u64,
        tried: &[DonorIndex],
        members: &[DonorIndex],
    ) -> Option<DonorIndex> {
        let candidates: Vec<Candidate> = (0..self.donors.len() as u32)
            .map(DonorIndex)
            .map(|index| {
                let donor = self.donor(index);
                Candidate {
                    free_pages: donor.load.free_pages,
                    in_service: donor.reachable
                        && !donor.is_overdue
                        && !tried.contains(&index)
                        && !members.contains(&index)
                        && !self.strays.contains(&(index, segment))
                        && self.may_hold(segment, index),
                    extents_held_by_this_space: donor.extents,
                    distance: self.site.distance(&donor.site),
                    apart: members
                        .iter()
                        .map(|&other| donor.site.apart(&self.donor(other).site))
                        .min()
                        .unwrap_or(Apart::Racks),
                }
            })
            .collect();
        let chosen = placement::choose(&candidates, self.shape.segment_pages)?;
        Some(DonorIndex(chosen as u32))
    }

    /// The donor says that it does not hold the extent, or it is heard to be in another life. Any
    /// news of other members in the meantime stands.
    pub fn gone(&mut self, segment: u64, place: Place) {
        let Some(held) = self.holding(segment).filter(|held| held.group.contains(place)) else {
            return;
        };
        let mut group = held.group;
        group.remove(place);
        let becomes = match group.whole().next() {
            Some(_) => self.holding_without(segment, held, group),
            None if !self.is_lost_without_members(segment) => {
                self.holding_without(segment, held, group)
            }
            None => {
                let rest = group.members().iter().map(|member| (member.place.donor, segment));
                self.strays.extend(rest);
                Segment::Lost(place.donor)
            }
        };
        self.set(segment, Some(becomes));
        self.review(segment, place.donor);
    }

    /// Removes a member that has missed something, or must go. It is not read any more, and is
    /// freed when its donor is heard. False if it is not a member, or the only whole one.
    #[must_use]
    pub fn desert(&mut self, segment: u64, place: Place) -> bool {
        let Some(held) = self.holding(segment).filter(|held| held.group.contains(place)) else {
            return false;
        };
        let mut group = held.group;
        let was_whole = group.whole().any(|whole| whole == place);
        group.remove(place);
        if was_whole && group.whole().next().is_none() {
            return false;
        }
        self.strays.insert((place.donor, segment));
        let becomes = self.holding_without(segment, held, group);
        self.set(segment, Some(becomes));
        self.review(segment, place.donor);
        true
    }

    fn holding_without(&mut self, segment: u64, held: Holding, mut group: Group) -> Segment {
        group.generation = self.fresh_generation();
        let since = held.degraded_since.unwrap_or(self.now);
        let degraded_since = self.is_at_risk(segment, &group).then_some(since);
        let since = group.generation;
        Segment::Held(Holding { group, degraded_since, pages: 0, since })
    }

    /// A new member has joined the group of a segment, to be filled. False if there is no group for
    /// it any more, or no room: the extent is a stray then.
    pub(crate) fn joined(&mut self, segment: u64, place: Place) -> bool {
        let mut held = match self.segments.get(&segment) {
            Some(Segment::Held(held)) => *held,
            // Freed meanwhile, and taken again by the same donor's same extent.
            Some(Segment::Taking(taking)) if taking.given.contains(&place) => return false,
            _ => {
                self.strays.insert((place.donor, segment));
                return false;
            }
        };
        if held.group.at(place.donor).is_some() {
            return false;
        }
        if held.group.members().len() == MAX_MEMBERS {
            self.strays.insert((place.donor, segment));
            return false;
        }
        held.group.add(place, false);
        // Extents that an unlisted donor lists later lack the writes to this member.
        if self.is_as_found(held.group) {
            held.group.generation = self.fresh_generation();
        }
        self.set(segment, Some(Segment::Held(held)));
        true
    }

    /// A member was filled, and has been confirmed at that generation. False if the group has got
    /// another one since: it is to be confirmed once more.
    pub fn filled(&mut self, segment: u64, place: Place, generation: Generation) -> bool {
        let Some(mut held) = self.holding(segment).filter(|held| held.group.contains(place)) else {
            return true;
        };
        if held.group.generation != generation {
            return false;
        }
        held.group.complete(place);
        if !self.is_at_risk(segment, &held.group) {
            held.degraded_since = None;
        }
        self.set(segment, Some(Segment::Held(held)));
        true
    }

    pub(crate) fn holding(&self, segment: u64) -> Option<Holding> {
        match self.segments.get(&segment) {
            Some(Segment::Held(held)) => Some(*held),
            _ => None,
        }
    }

    pub(crate) fn holdings(&self) -> impl Iterator<Item = (u64, &Holding)> {
        self.holdings_from(0)
    }

    /// The segments from that one on that are there.
    pub(crate) fn holdings_from(&self, first: u64) -> impl Iterator<Item = (u64, &Holding)> {
        self.segments.range(first..).filter_map(|(segment, state)| match state {
            Segment::Held(held) => Some((*segment, held)),
            _ => None,
        })
    }

    /// Every group is to be looked at by the upkeep.
    fn look_at_all(&mut self) {
        self.unsettled = self.holdings().map(|(segment, _)| segment).collect();
    }

    /// The segment is nowhere again: these extents were given back, or its loss accepted. A member
    /// that has joined meanwhile is a stray.
    pub fn freed(&mut self, segment: u64, given_back: &Group) {
        if self.is_taking(segment) {
            return;
        }
        let members = self.holding(segment).map(|held| held.group);
        let members = members.iter().flat_map(|group| group.members());
        let left = members.filter(|member| !given_back.contains(member.place));
        let left: Vec<_> = left.map(|member| (member.place.donor, segment)).collect();
        self.strays.extend(left);
        self.set(segment, None);
    }

    /// Everything was given back.
    pub fn freed_all(&mut self) {
        for segment in self.segments.keys().copied().collect::<Vec<_>>() {
            if !self.is_taking(segment) {
                self.set(segment, None);
            }
        }
        self.strays.clear();
        self.unlisted.clear();
        self.stripes.clear();
    }

    /// Segments for which a donor may hold an extent unknown to the map. The caller asks for it
    /// once more, frees it, and calls [`Map::stray_freed`].
    pub fn strays_of(&self, donor: DonorIndex) -> Vec<u64> {
        let of_donor = self.strays.range((donor, 0)..=(donor, u64::MAX));
        of_donor.map(|(_, segment)| *segment).collect()
    }

    /// The donor may hold an extent that was to be freed, and was not.
    pub fn stray(&mut self, donor: DonorIndex, segment: u64) {
        self.strays.insert((donor, segment));
    }

    /// A stray extent was given back.
    pub fn stray_freed(&mut self, donor: DonorIndex, segment: u64) {
        self.strays.remove(&(donor, segment));
        // Its donor may be asked for the segment again.
        if self.holding(segment).is_some_and(|held| held.degraded_since.is_some()) {
            self.unsettled.insert(segment);
        }
    }

    /// Segments whose whereabouts may have changed since this was asked last.
    pub fn take_changed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.changed)
    }

    /// How many segments are held, have fewer copies than they are to have, and are lost.
    pub fn counts(&self) -> SegmentCounts {
        let is_lost =
            |segment: &&Segment| matches!(segment, Segment::Lost(_) | Segment::Missing(_));
        SegmentCounts {
            held: self.segments_held(),
            degraded: self.holdings().filter(|(_, held)| held.degraded_since.is_some()).count()
                as u64,
            lost: self.segments.values().filter(is_lost).count() as u64,
        }
    }

    /// How many segments are there. Parities are none.
    fn segments_held(&self) -> u64 {
        self.holdings().take_while(|(segment, _)| !code::is_parity(*segment)).count() as u64
    }

    pub(crate) fn set(&mut self, segment: u64, mut to: Option<Segment>) {
        if let Some(Segment::Held(held)) = &mut to {
            held.group.form = self.form_of(segment);
            for member in held.group.members() {
                self.donors[member.place.donor.0 as usize].extents += 1;
            }
            if held.degraded_since.is_some() || held.group.members().iter().any(|m| !m.is_whole) {
                self.unsettled.insert(segment);
            }
        }
        let before = match to {
            Some(to) => self.segments.insert(segment, to),
            None => self.segments.remove(&segment),
        };
        if let Some(Segment::Held(held)) = before {
            for member in held.group.members() {
                self.donors[member.place.donor.0 as usize].extents -= 1;
            }
        }
        self.changed.push(segment);
    }
}

/// How a space's segments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentCounts {
    /// There, with all copies or some.
    pub held: u64,
    /// Held segments with fewer copies than they are to have.
    pub degraded: u64,
    /// Lost, or not found yet.
    pub lost: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::upkeep::Step;
    use hecaton_memory::ExtentId;

    const SEGMENT_PAGES: u64 = 16;
    const EPOCH: Epoch = Epoch(3);

    fn shape(copies: u8) -> Shape {
        Shape { segments: 8, segment_pages: SEGMENT_PAGES, copies, epoch: EPOCH, code: None }
    }

    fn map_with(copies: u8, free_pages: &[u64]) -> Map {
        let mut map = Map::new(shape(copies));
        for (number, free_pages) in free_pages.iter().enumerate() {
            let donor = map.donor_named(
                &format!("d{number}"),
                &Site::unplaced(&format!("h{number}")),
                false,
            );
            assert!(hear(&mut map, donor, 100 + number as u64, *free_pages));
        }
        map
    }

    fn load(free_pages: u64) -> Load {
        Load { free_pages, ..Load::default() }
    }

    /// Heard over a connection that was begun just before.
    fn hear(map: &mut Map, donor: DonorIndex, boot: u64, free_pages: u64) -> bool {
        let now = map.donor(donor).heard_at + Duration::from_millis(1);
        map.heard(donor, boot, load(free_pages), now, now)
    }

    fn place(donor: u32, extent: u64) -> Place {
        Place { donor: DonorIndex(donor), boot: 100 + u64::from(donor), extent: ExtentId(extent) }
    }

    fn line(extent: u64, segment: u64) -> HeldExtent {
        let generation = Generation(1 << 32 | 1);
        HeldExtent {
            extent: ExtentId(extent),
            segment,
            member: 0,
            order: 4,
            written: 1,
            generation,
        }
    }

    const SOME: Expected = Expected { pages: 1, generation: Generation(1 << 32 | 1) };

    fn adopting(copies: u8, segments: &[u64], donors: &[&str]) -> (Map, Vec<DonorIndex>) {
        let expected = segments.iter().map(|segment| (*segment, SOME)).collect();
        let mut map = Map::adopting(shape(copies), &expected);
        let donors =
            donors.iter().map(|name| map.donor_named(name, &Site::unplaced(name), true)).collect();
        (map, donors)
    }

    /// Takes all extents of a segment; those of the group.
    fn take(map: &mut Map, segment: u64, extent: u64) -> Vec<Place> {
        let mut next = map.begin(segment);
        loop {
            next = match next {
                Take::Ask(donor, _) => map.allocated(segment, place(donor.0, extent)),
                Take::Held(group) => return group.whole().collect(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn asked(take: Take) -> Option<DonorIndex> {
        match take {
            Take::Ask(donor, _) => Some(donor),
            _ => None,
        }
    }

    fn group_of(map: &Map, segment: u64) -> Group {
        map.holding(segment).expect("it is held").group
    }

    fn whole(map: &Map, segment: u64) -> Vec<Place> {
        match map.whereabouts(segment) {
            Whereabouts::Held(group) => group.whole().collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn the_first_write_takes_an_extent_and_the_next_finds_it() {
        let mut map = map_with(1, &[64]);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(asked(map.begin(3)), Some(DonorIndex(0)));
        assert_eq!(map.begin(3), Take::Wait);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        let _ = map.allocated(3, place(0, 1));
        assert!(matches!(map.begin(3), Take::Held(_)));
        assert_eq!(whole(&map, 3), [place(0, 1)]);
        assert_eq!(map.donor(DonorIndex(0)).extents, 1);
        map.freed(3, &group_of(&map, 3));
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(map.donor(DonorIndex(0)).extents, 0);
        assert_eq!(map.counts(), SegmentCounts { held: 0, degraded: 0, lost: 0 });
    }

    #[test]
    fn extents_spread_over_donors_with_equal_room() {
        let mut map = map_with(1, &[640, 640, 640]);
        let donors: BTreeSet<_> = (0..6).map(|n| take(&mut map, n, n + 1)[0].donor).collect();
        assert_eq!(donors.len(), 3);
        assert!(map.donors().iter().all(|donor| donor.extents == 2));
    }

    #[test]
    fn copies_are_at_different_donors_and_on_different_hosts() {
        let mut map = Map::new(shape(2));
        for (name, host, free) in [("a1", "a", 999), ("a2", "a", 999), ("b1", "b", 640)] {
            let donor = map.donor_named(name, &Site::unplaced(host), false);
            assert!(hear(&mut map, donor, 100 + u64::from(donor.0), free));
        }
        for segment in 0..4 {
            let hosts: BTreeSet<_> = take(&mut map, segment, segment + 1)
                .iter()
                .map(|place| map.donor(place.donor).site.host.clone())
                .collect();
            assert_eq!(hosts.len(), 2);
        }
        // With only one host left, two donors are better than one.
        map.silent(DonorIndex(2));
        assert_eq!(take(&mut map, 5, 9).len(), 2);
        assert_eq!(map.counts().degraded, 0);
    }

    #[test]
    fn near_donors_come_first_and_copies_go_to_other_racks() {
        let at = |host: &str, location: &str| Site {
            host: host.to_owned(),
            location: Some(location.to_owned()),
        };
        let mut map = Map::new(shape(2)).at(at("here", "r1/c1"));
        let donors = [("far", "r2/c1"), ("near", "r1/c1"), ("mid", "r1/c2")];
        for (name, location) in donors {
            let donor = map.donor_named(name, &at(name, location), false);
            assert!(hear(&mut map, donor, 100 + u64::from(donor.0), 640));
        }
        for segment in 0..4 {
            let places = take(&mut map, segment, segment + 1);
            let names: Vec<_> = places.iter().map(|p| map.donor(p.donor).name.as_str()).collect();
            assert_eq!(names, ["near", "far"]);
        }
    }

    #[test]
    fn with_too_few_donors_there_are_fewer_copies_until_there_are_more() {
        let mut map = map_with(2, &[64]);
        assert_eq!(take(&mut map, 0, 1), [place(0, 1)]);
        assert_eq!(map.counts(), SegmentCounts { held: 1, degraded: 1, lost: 0 });
        assert_eq!(map.next_step(0, &[]), Step::Wait);
        let late = map.donor_named("late", &Site::unplaced("h9"), false);
        assert!(hear(&mut map, late, 101, 64));
        assert_eq!(map.segments_to_tend(9), [0]);
        assert_eq!(map.next_step(0, &[]), Step::Join(late));
        assert!(map.join(0, place(1, 5)));
        assert_eq!(whole(&map, 0), [place(0, 1)], "not to be read before it is filled");
        let Whereabouts::Held(group) = map.whereabouts(0) else { panic!() };
        assert!(group.contains(place(1, 5)), "but to be written");
        let step = map.next_step(0, &[]);
        assert_eq!(step, Step::Fill { to: place(1, 5), from: place(0, 1) });
        assert!(!map.filled(0, place(1, 5), Generation(1)), "another generation");
        assert!(map.filled(0, place(1, 5), group.generation));
        assert_eq!(whole(&map, 0).len(), 2);
        assert_eq!(map.next_step(0, &[]), Step::Nothing);
        assert_eq!((map.counts().degraded, map.untended()), (0, 0));
    }

    #[test]
    fn a_draining_donor_is_left_without_ever_fewer_copies() {
        let mut map = map_with(1, &[640, 64]);
        let from = take(&mut map, 0, 1)[0];
        assert_eq!(from.donor, DonorIndex(0));
        let now = Duration::from_secs(1);
        let draining = Load { draining: true, ..Load::default() };
        assert!(map.heard(DonorIndex(0), 100, draining, now, now));
        assert_eq!(map.next_step(0, &[]), Step::Join(DonorIndex(1)));
        assert!(map.join(0, place(1, 7)));
        assert_eq!(map.next_step(0, &[]), Step::Fill { to: place(1, 7), from });
        let Whereabouts::Held(group) = map.whereabouts(0) else { panic!() };
        assert!(map.filled(0, place(1, 7), group.generation));
        assert_eq!(map.step_after_comparing(0, &[]), Step::Nothing);
        assert_eq!(whole(&map, 0), [place(1, 7)]);
        let Whereabouts::Held(after) = map.whereabouts(0) else { panic!() };
        assert!(after.generation > group.generation, "the one that left is out of date");
        assert_eq!(map.strays_of(DonorIndex(0)), [0]);
    }

    #[test]
    fn a_copy_goes_only_after_those_that_stay_were_compared_with_it() {
        let mut map = map_with(1, &[640, 64, 64]);
        take(&mut map, 0, 1);
        let draining = Load { draining: true, ..Load::default() };
        let now = Duration::from_secs(1);
        assert!(map.heard(DonorIndex(0), 100, draining, now, now));
        assert!(map.join(0, place(1, 7)));
        let Whereabouts::Held(group) = map.whereabouts(0) else { panic!() };
        assert!(map.filled(0, place(1, 7), group.generation));
        let step = map.next_step(0, &[]);
        let Step::Compare { group: compared, leaving } = step else { panic!() };
        assert_eq!(leaving, place(0, 1));
        assert_eq!(map.next_step(0, &[]), step, "until that is done");
        map.put_off(0);
        assert_eq!(whole(&map, 0).len(), 2);
        // The compared group has changed by now.
        assert!(map.join(0, place(2, 8)));
        map.compared(0, compared);
        assert!(map.filled(0, place(2, 8), compared.generation));
        let step = map.next_step(0, &[]);
        let Step::Compare { group: again, .. } = step else { panic!() };
        map.compared(1, again);
        assert_eq!(map.next_step(0, &[]), step, "that was another segment");
        // The one that leaves cannot be asked any more: what it had right is gone anyhow.
        map.silent(DonorIndex(0));
        map.next_step(0, &[]);
        assert!(!whole(&map, 0).contains(&place(0, 1)));
    }

    #[test]
    fn segments_move_to_the_donors_of_their_zone() {
        let mut map = map_with(1, &[64, 640, 64]);
        map.set_zones(vec![vec!["d0".into()], vec!["d2".into(), "d1".into()]]);
        assert_eq!(take(&mut map, 0, 1)[0].donor, DonorIndex(0));
        map.assign(1, 1);
        assert_eq!(take(&mut map, 1, 2)[0].donor, DonorIndex(1));
        map.set_zones(vec![vec!["d0".into()], vec!["d2".into()]]);
        assert_eq!(map.next_step(0, &[]), Step::Nothing);
        assert_eq!(map.next_step(1, &[]), Step::Join(DonorIndex(2)));
        assert_eq!(map.donors_of_zone(1), BTreeMap::from([(DonorIndex(1), 1)]));
        // Nobody in the zone has room: it stays where it is.
        assert_eq!(map.next_step(1, &[DonorIndex(2)]), Step::Wait);
        assert_eq!(whole(&map, 1), [place(1, 2)]);
    }

    #[test]
    fn who_declines_is_not_asked_twice_and_in_the_end_there_is_no_room() {
        let mut map = map_with(1, &[64, 64, 8]);
        let Take::Ask(first, _) = map.begin(0) else { panic!() };
        let Take::Ask(second, _) = map.declined(0, first, Declined::Full) else { panic!() };
        assert_ne!(first, second);
        // The third has less room than a segment needs.
        assert_eq!(map.declined(0, second, Declined::Full), Take::NoRoom);
        // The next attempt begins anew.
        assert!(matches!(map.begin(0), Take::Ask(..)));
        map.abandon(0);
        assert!(matches!(map.begin(0), Take::Ask(..)));
    }

    #[test]
    fn a_silent_donor_is_left_out_until_it_is_heard() {
        let mut map = map_with(1, &[64, 64]);
        let Take::Ask(silent, _) = map.begin(0) else { panic!() };
        let Take::Ask(other, _) = map.declined(0, silent, Declined::Silent) else { panic!() };
        let _ = map.allocated(0, place(other.0, 5));
        for segment in 1..4 {
            assert_eq!(take(&mut map, segment, 10 + segment)[0].donor, other);
        }
        assert!(hear(&mut map, silent, 100 + u64::from(silent.0), 64));
        assert_eq!(take(&mut map, 4, 20)[0].donor, silent);
    }

    #[test]
    fn a_donor_with_a_stray_is_not_asked_for_its_segment_before_that_is_freed() {
        let mut map = map_with(1, &[64]);
        let Take::Ask(donor, _) = map.begin(0) else { panic!() };
        assert_eq!(map.declined(0, donor, Declined::Silent), Take::NoRoom);
        assert!(hear(&mut map, donor, 100, 64));
        assert_eq!(map.strays_of(donor), [0]);
        assert_eq!(map.begin(0), Take::NoRoom);
        assert_eq!(asked(map.begin(1)), Some(donor), "other segments are");
        map.stray_freed(donor, 0);
        assert_eq!(asked(map.begin(0)), Some(donor));
        // Its next life holds no strays.
        map.declined(0, donor, Declined::Silent);
        assert!(hear(&mut map, donor, 101, 64));
        assert!(map.strays_of(donor).is_empty());
    }

    #[test]
    fn another_life_of_a_donor_loses_what_it_held_and_nothing_else() {
        let mut map = map_with(1, &[640, 640]);
        let places: Vec<_> = (0..4).map(|n| take(&mut map, n, n + 1)[0]).collect();
        assert!(hear(&mut map, DonorIndex(0), 999, 640));
        for (segment, place) in places.iter().enumerate() {
            match place.donor {
                DonorIndex(0) => {
                    assert_eq!(map.whereabouts(segment as u64), Whereabouts::Lost(DonorIndex(0)))
                }
                _ => assert_eq!(whole(&map, segment as u64), [*place]),
            }
        }
        let lost = places.iter().position(|place| place.donor == DonorIndex(0)).unwrap() as u64;
        assert_eq!(map.begin(lost), Take::Lost(DonorIndex(0)), "lost pages would become zeros");
        map.freed(lost, &Group::new(Generation(1)));
        assert!(matches!(map.begin(lost), Take::Ask(..)));
    }

    #[test]
    fn of_two_copies_one_may_go_and_its_place_is_taken_by_another() {
        let mut map = map_with(2, &[640, 640, 64]);
        let copies = take(&mut map, 0, 1);
        let Whereabouts::Held(before) = map.whereabouts(0) else { panic!() };
        assert!(hear(&mut map, copies[0].donor, 999, 640));
        let Whereabouts::Held(after) = map.whereabouts(0) else { panic!() };
        assert_eq!(whole(&map, 0), [copies[1]]);
        assert!(after.generation > before.generation);
        assert_eq!(map.counts().degraded, 1);
        // The last one may not be left, however late it is.
        assert!(!map.desert(0, copies[1]));
        assert!(matches!(map.next_step(0, &[]), Step::Join(_)));
        map.gone(0, copies[1]);
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(copies[1].donor));
    }

    #[test]
    fn a_member_that_was_being_filled_saves_nothing() {
        let mut map = map_with(2, &[64]);
        let only = take(&mut map, 0, 1)[0];
        let late = map.donor_named("late", &Site::unplaced("h9"), false);
        assert!(hear(&mut map, late, 101, 64));
        assert!(map.join(0, place(1, 5)));
        map.gone(0, only);
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(only.donor));
        assert_eq!(map.strays_of(late), [0]);
    }

    #[test]
    fn a_member_that_joins_while_its_segment_is_freed_is_freed_later() {
        let mut map = map_with(1, &[640, 64]);
        take(&mut map, 0, 1);
        let before = group_of(&map, 0);
        assert!(map.join(0, place(1, 5)));
        map.freed(0, &before);
        assert_eq!(map.strays_of(DonorIndex(1)), [0]);
        assert!(map.strays_of(DonorIndex(0)).is_empty());
    }

    #[test]
    fn a_donor_that_is_asked_for_one_segment_twice_keeps_it() {
        let mut map = map_with(2, &[64, 64]);
        let copies = take(&mut map, 0, 1);
        assert!(!map.join(0, copies[0]));
        assert!(map.strays_of(copies[0].donor).is_empty(), "it is in use");
    }

    #[test]
    fn late_news_of_an_earlier_life_lose_nothing() {
        let mut map = map_with(1, &[64]);
        let donor = DonorIndex(0);
        let at = Duration::from_secs;
        assert!(map.heard(donor, 200, load(64), at(10), at(11)));
        assert_eq!(asked(map.begin(0)), Some(donor));
        let place = Place { donor, boot: 200, extent: ExtentId(1) };
        let _ = map.allocated(0, place);
        // Welcomed by the earlier life, but told only now.
        assert!(!map.heard(donor, 100, Load::default(), at(9), at(12)));
        assert_eq!(whole(&map, 0), [place]);
        assert!(map.heard(donor, 300, Load::default(), at(13), at(14)));
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(donor));
    }

    #[test]
    fn what_is_gone_is_lost_only_if_it_is_still_where_it_was() {
        let mut map = map_with(1, &[64]);
        let old = take(&mut map, 0, 1)[0];
        map.freed(0, &group_of(&map, 0));
        let new = take(&mut map, 0, 2)[0];
        map.gone(0, old);
        assert_eq!(whole(&map, 0), [new]);
        map.gone(0, new);
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(new.donor));
    }

    #[test]
    fn a_successor_has_what_it_expects_when_it_is_told_of_it_and_the_rest_are_strays() {
        let (mut map, donors) = adopting(1, &[2, 3], &["a", "b"]);
        let [a, b] = donors[..] else { panic!() };
        assert_eq!(map.begin(2), Take::Lost(a), "it may be with either");
        assert!(hear(&mut map, a, 100, 640));
        let odd = HeldExtent { order: 5, ..line(9, 3) };
        map.listed(a, 100, &[line(7, 2), line(8, 99), odd, line(6, 5)]);
        assert_eq!(whole(&map, 2), [place(0, 7)]);
        assert_eq!(map.strays_of(a), [5]);
        assert_eq!(map.begin(3), Take::Lost(b));
        assert_eq!(asked(map.begin(4)), Some(a), "nothing was there");
        assert!(hear(&mut map, b, 101, 640));
        map.listed(b, 101, &[]);
        assert_eq!(map.begin(3), Take::Lost(DonorIndex::UNKNOWN), "it is nowhere");
        assert_eq!(map.counts().lost, 1);
    }

    #[test]
    fn an_extent_that_missed_something_is_a_stray() {
        let expected = Expected { pages: 3, generation: Generation(1 << 32 | 4) };
        let old = HeldExtent { generation: Generation(1 << 32 | 3), written: 9, ..line(7, 2) };
        let short = HeldExtent { generation: expected.generation, written: 2, ..line(7, 2) };
        let filling = HeldExtent { generation: Generation::FILLING, written: 9, ..line(7, 2) };
        for bad in [old, short, filling] {
            let mut map = Map::adopting(shape(2), &BTreeMap::from([(2, expected)]));
            let [a, b] = ["a", "b"].map(|name| map.donor_named(name, &Site::unplaced(name), true));
            map.listed(a, 100, &[bad]);
            assert_eq!(map.whereabouts(2), Whereabouts::Lost(b), "{bad:?}");
            assert_eq!(map.strays_of(a), [2]);
            let good = HeldExtent { written: 3, generation: expected.generation, ..line(1, 2) };
            map.listed(b, 101, &[good]);
            assert_eq!(whole(&map, 2), [place(1, 1)]);
        }
    }

    #[test]
    fn copies_that_are_as_good_come_together_until_the_first_write() {
        let (mut map, donors) = adopting(3, &[2, 3], &["a", "b", "c"]);
        map.listed(donors[0], 100, &[line(7, 2), line(8, 3)]);
        map.listed(donors[1], 101, &[line(4, 2), HeldExtent { written: 0, ..line(3, 3) }]);
        assert_eq!(whole(&map, 2), [place(0, 7), place(1, 4)]);
        assert_eq!(map.strays_of(donors[1]), [3], "set aside, and never written to");
        let Take::Held(group) = map.begin(2) else { panic!() };
        assert!(group.generation > Generation::first(EPOCH), "what comes later is older");
        let newer = HeldExtent { generation: Generation(1 << 32 | 9), ..line(6, 3) };
        map.listed(donors[2], 102, &[line(5, 2), newer]);
        assert_eq!(whole(&map, 2).len(), 2);
        assert_eq!(whole(&map, 3), [place(0, 8)], "of another generation than the first");
        assert_eq!(map.strays_of(donors[2]), [2, 3]);
    }

    #[test]
    fn what_a_later_life_of_a_donor_lists_is_an_earlier_borrowers() {
        let (mut map, donors) = adopting(1, &[2, 3], &["a", "b"]);
        let a = donors[0];
        assert!(!map.is_listed(a, 100));
        map.listed(a, 100, &[line(1, 2)]);
        assert!(map.is_listed(a, 100) && !map.is_listed(a, 200));
        assert!(hear(&mut map, a, 200, 640));
        map.listed(a, 200, &[line(1, 3)]);
        assert!(matches!(map.whereabouts(3), Whereabouts::Lost(_)), "its contents are not ours");
        assert_eq!(map.strays_of(a), [3]);
        // Likewise for one being asked for: an earlier borrower was faster, and has written.
        assert_eq!(asked(map.begin(6)), Some(a));
        assert!(hear(&mut map, a, 250, 640));
        map.listed(a, 250, &[line(9, 6)]);
        let taken = Place { donor: a, boot: 250, extent: ExtentId(9) };
        assert_eq!(map.allocated(6, taken), Take::NoRoom);
        assert_eq!(map.strays_of(a), [6]);
        // The same for one that was asked for before the list came.
        assert_eq!(asked(map.begin(4)), Some(a));
        assert!(hear(&mut map, a, 300, 640));
        map.listed(a, 300, &[line(1, 5)]);
        assert_eq!(map.strays_of(a), [5]);
        let stray = Place { donor: a, boot: 300, extent: ExtentId(1) };
        assert_eq!(map.begin(5), Take::NoRoom);
        assert_eq!(map.allocated(5, stray), Take::NoRoom);
    }

    #[test]
    fn changes_are_told_once() {
        let mut map = map_with(1, &[64]);
        take(&mut map, 5, 1);
        assert!(map.take_changed().contains(&5));
        assert!(map.take_changed().is_empty());
        map.freed_all();
        assert_eq!(map.take_changed(), [5]);
    }
}
