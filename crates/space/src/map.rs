//! Which extent holds which segment, and whom to ask for the next one.
//!
//! Decisions only: what was heard, and when, comes in as arguments, what to do goes out as values. The
//! caller serialises access, asks the donors, and tells the answers.
//!
//! A segment's way: it is nowhere until its first page is written; [`Map::begin`] then names a donor
//! to ask, and [`Map::allocated`] or [`Map::declined`] tells the outcome, the latter naming the
//! next donor to ask, until one gives an extent or none is left. A segment is lost when its donor
//! is heard to be in another life, or to hold the extent no longer. It stays lost until it is freed:
//! taking another extent for it silently would turn lost pages into zeros.

use crate::lookup::Whereabouts;
use hecaton_memory::ExtentId;
use hecaton_policy::placement::{self, Candidate};
use hecaton_transport::protocol::{HeldExtent, Load};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A donor, by the order in which the space came to know it. Stays its for the space's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DonorIndex(pub u32);

impl DonorIndex {
    /// Stands for a donor of which only the loss is known.
    pub const UNKNOWN: DonorIndex = DonorIndex(u32::MAX);
}

/// Where a member of a segment's group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The donor.
    pub donor: DonorIndex,
    /// The life of the donor in which the extent was given.
    pub boot: u64,
    /// The extent.
    pub extent: ExtentId,
}

/// What to do for a segment that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Nothing: it is there.
    Held(Place),
    /// Ask this donor for an extent, and tell [`Map::allocated`] or [`Map::declined`].
    Ask(DonorIndex),
    /// Wait: another thread is asking.
    Wait,
    /// Give up: it is lost, with this donor.
    Lost(DonorIndex),
    /// Give up: no donor has room.
    NoRoom,
}

/// Why a donor did not give an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declined {
    /// It has no room.
    Full,
    /// It did not answer. It may have set the extent aside all the same.
    Silent,
}

/// A segment that is not nowhere.
#[derive(Clone, Debug)]
enum Segment {
    Taking { tried: Vec<DonorIndex> },
    Held(Place),
    Lost(DonorIndex),
}

/// What is known of a donor.
#[derive(Clone, Debug)]
pub struct Donor {
    /// Its name.
    pub name: String,
    /// Which life of it was heard last.
    pub boot: Option<u64>,
    /// What it said last of its room and its load.
    pub load: Load,
    /// When that was.
    pub heard_at: Duration,
    /// Whether it answered when it was last asked.
    pub reachable: bool,
    /// Extents of this space that it holds.
    pub extents: u64,
    listed: Option<u64>,
}

/// The map of one space.
pub struct Map {
    segment_pages: u64,
    segment_count: u64,
    /// Only those that are not nowhere: a space may be far larger than what is ever written in it.
    segments: BTreeMap<u64, Segment>,
    donors: Vec<Donor>,
    by_name: BTreeMap<String, DonorIndex>,
    /// Donors whose extents are not known yet, though they may hold some. As long as there are any,
    /// a segment that is nowhere may be with one of them, and must not be taken for zeros.
    unlisted: BTreeSet<DonorIndex>,
    /// Donors that may hold an extent for a segment that is not in the map: set aside while they
    /// could not be heard, or one of two that were claimed. A donor that is asked for a segment twice
    /// gives the same extent again, old contents included, so that it is not asked for such a segment
    /// before the stray is freed.
    strays: BTreeSet<(DonorIndex, u64)>,
    /// Of segments that stand as a donor's first list told: how many of their pages were written.
    listed_pages: BTreeMap<u64, u32>,
    /// Of segments that were expected and not found: how many of their pages must be written.
    missing_pages: BTreeMap<u64, u32>,
    changed: Vec<u64>,
}

impl Map {
    /// The map of a space without extents.
    pub fn new(segments: u64, segment_pages: u64) -> Map {
        Map {
            segment_pages,
            segment_count: segments,
            segments: BTreeMap::new(),
            donors: Vec::new(),
            by_name: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            strays: BTreeSet::new(),
            listed_pages: BTreeMap::new(),
            missing_pages: BTreeMap::new(),
            changed: Vec::new(),
        }
    }

    /// The donor of that name, entered if it is new. `unlisted` says of a new one that it may hold
    /// extents of the space, which [`Map::listed`] will tell.
    pub fn donor_named(&mut self, name: &str, unlisted: bool) -> DonorIndex {
        if let Some(index) = self.by_name.get(name) {
            return *index;
        }
        let index = DonorIndex(self.donors.len() as u32);
        self.donors.push(Donor {
            name: name.to_owned(),
            boot: None,
            load: Load::default(),
            heard_at: Duration::ZERO,
            reachable: false,
            extents: 0,
            listed: None,
        });
        self.by_name.insert(name.to_owned(), index);
        if unlisted {
            self.unlisted.insert(index);
        }
        index
    }

    /// What is known of a donor.
    pub fn donor(&self, donor: DonorIndex) -> &Donor {
        &self.donors[donor.0 as usize]
    }

    /// All donors, in the order of their index.
    pub fn donors(&self) -> &[Donor] {
        &self.donors
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
        known.reachable = true;
        known.load = load;
        known.heard_at = now;
        if known.boot.replace(boot).is_none_or(|before| before == boot) {
            return true;
        }
        self.strays.retain(|(other, _)| *other != donor);
        let lost = self.segments.iter().filter_map(|(segment, state)| match state {
            Segment::Held(place) if place.donor == donor && place.boot != boot => Some(*segment),
            _ => None,
        });
        for segment in lost.collect::<Vec<_>>() {
            self.set(segment, Some(Segment::Lost(donor)));
        }
        true
    }

    /// A donor did not answer. It is not asked for extents until it is heard again.
    pub fn silent(&mut self, donor: DonorIndex) {
        self.donors[donor.0 as usize].reachable = false;
    }

    /// Whether the donor has told in this life what it holds. It need not do so again: what it gives
    /// after that is the map's own doing, strays included.
    pub fn is_listed(&self, donor: DonorIndex, boot: u64) -> bool {
        self.donors[donor.0 as usize].listed == Some(boot)
    }

    /// What a donor holds for the space, all of it: how a lost map is rebuilt. Lines that do not fit
    /// the space are passed over. Of two donors that claim a segment, one that was never written to
    /// has the stray: it was asked and not heard, so that the segment went elsewhere. If both have
    /// pages the segment is lost, since which of the two is the right one cannot be told.
    ///
    /// That is for the first list of a donor. In a later life it holds nothing of what the map knows,
    /// but perhaps something that an earlier borrower took from it before its new life was fenced:
    /// strays, with contents that must not be seen.
    pub fn listed(&mut self, donor: DonorIndex, boot: u64, lines: &[HeldExtent]) {
        let is_first = self.donors[donor.0 as usize].listed.replace(boot).is_none();
        for line in lines {
            let order_fits = 1u64.checked_shl(line.order.into()) == Some(self.segment_pages);
            if line.member != 0 || line.segment >= self.segment_count || !order_fits {
                continue;
            }
            let place = Place { donor, boot, extent: line.extent };
            let becomes = match self.segments.get(&line.segment) {
                Some(Segment::Held(known)) if *known == place => continue,
                _ if !is_first => {
                    self.strays.insert((donor, line.segment));
                    continue;
                }
                None => Segment::Held(place),
                Some(Segment::Held(_)) if line.written == 0 => {
                    self.strays.insert((donor, line.segment));
                    continue;
                }
                Some(Segment::Held(known)) => {
                    self.strays.insert((known.donor, line.segment));
                    if self.listed_pages.get(&line.segment) == Some(&0) {
                        Segment::Held(place)
                    } else {
                        self.strays.insert((donor, line.segment));
                        Segment::Lost(donor)
                    }
                }
                // Expected, and found after all; or not, and this is a stray.
                Some(Segment::Lost(DonorIndex::UNKNOWN)) => {
                    let missing = self.missing_pages.get(&line.segment);
                    if missing.is_some_and(|&pages| line.written < pages) {
                        self.strays.insert((donor, line.segment));
                        continue;
                    }
                    Segment::Held(place)
                }
                // Lost for good, or being taken and told of by the answer to that.
                Some(Segment::Lost(_) | Segment::Taking { .. }) => continue,
            };
            let is_held = matches!(becomes, Segment::Held(_));
            self.set(line.segment, Some(becomes));
            if is_held {
                self.listed_pages.insert(line.segment, line.written);
            }
        }
        self.unlisted.remove(&donor);
    }

    /// The owner knows that it has so many pages in the segment; told before the segment is written
    /// again. If no donor has told of an extent with as many, it is lost: its donor is in another
    /// life, and does not know what it held in the one before. An extent with fewer is a stray.
    pub fn expect(&mut self, segment: u64, pages: u32) {
        match self.segments.get(&segment) {
            None => {}
            Some(Segment::Held(place)) => {
                let donor = place.donor;
                if self.listed_pages.get(&segment).is_none_or(|&written| written >= pages) {
                    return;
                }
                self.strays.insert((donor, segment));
            }
            Some(Segment::Lost(_) | Segment::Taking { .. }) => return,
        }
        self.set(segment, Some(Segment::Lost(DonorIndex::UNKNOWN)));
        self.missing_pages.insert(segment, pages);
    }

    /// A donor that may hold any of the segments that are nowhere, if there is one.
    pub fn unlisted(&self) -> Option<DonorIndex> {
        self.unlisted.first().copied()
    }

    /// Where a segment is.
    pub fn whereabouts(&self, segment: u64) -> Whereabouts {
        match (self.known(segment), self.unlisted()) {
            (Whereabouts::Nowhere, Some(donor)) => Whereabouts::Lost(donor),
            (known, _) => known,
        }
    }

    /// Where a segment is, as far as what unlisted donors hold does not matter.
    pub fn known(&self, segment: u64) -> Whereabouts {
        match self.segments.get(&segment) {
            Some(Segment::Held(place)) => Whereabouts::Held(*place),
            Some(Segment::Lost(donor)) => Whereabouts::Lost(*donor),
            Some(Segment::Taking { .. }) | None => Whereabouts::Nowhere,
        }
    }

    /// Begins to take an extent for a segment that is to be written.
    pub fn begin(&mut self, segment: u64) -> Take {
        match self.whereabouts(segment) {
            Whereabouts::Held(place) => Take::Held(place),
            Whereabouts::Lost(donor) => Take::Lost(donor),
            Whereabouts::Nowhere if self.is_taking(segment) => Take::Wait,
            Whereabouts::Nowhere => self.ask_next(segment, Vec::new()),
        }
    }

    /// Whether a segment is between [`Map::begin`] and the end of its taking.
    pub fn is_taking(&self, segment: u64) -> bool {
        matches!(self.segments.get(&segment), Some(Segment::Taking { .. }))
    }

    /// The donor has given an extent for the segment. [`Map::heard`] was told of its life before.
    /// Says what to do next: nothing, or ask another donor, because the extent is a stray that this
    /// one has told of since it was asked.
    pub fn allocated(&mut self, segment: u64, place: Place) -> Take {
        if self.strays.contains(&(place.donor, segment)) {
            return self.declined(segment, place.donor, Declined::Full);
        }
        if self.is_taking(segment) {
            self.set(segment, Some(Segment::Held(place)));
        }
        self.begin(segment)
    }

    /// The donor has not given an extent for the segment. Says what to do next.
    pub fn declined(&mut self, segment: u64, donor: DonorIndex, why: Declined) -> Take {
        match why {
            // It said itself how much it has left, which may be a lot in smaller pieces.
            Declined::Full => {}
            Declined::Silent => {
                self.silent(donor);
                self.strays.insert((donor, segment));
            }
        }
        match self.segments.get_mut(&segment) {
            Some(Segment::Taking { tried }) => {
                let mut tried = std::mem::take(tried);
                tried.push(donor);
                self.ask_next(segment, tried)
            }
            _ => self.begin(segment),
        }
    }

    /// Gives up taking an extent for a segment.
    pub fn abandon(&mut self, segment: u64) {
        if self.is_taking(segment) {
            self.set(segment, None);
        }
    }

    fn ask_next(&mut self, segment: u64, tried: Vec<DonorIndex>) -> Take {
        let candidates: Vec<Candidate> = self
            .donors
            .iter()
            .enumerate()
            .map(|(index, donor)| Candidate {
                free_pages: donor.load.free_pages,
                in_service: donor.reachable && {
                    let donor = DonorIndex(index as u32);
                    !tried.contains(&donor) && !self.strays.contains(&(donor, segment))
                },
                extents_held_by_this_space: donor.extents,
                nearness: 0,
            })
            .collect();
        match placement::choose(&candidates, self.segment_pages) {
            Some(index) => {
                self.set(segment, Some(Segment::Taking { tried }));
                Take::Ask(DonorIndex(index as u32))
            }
            None => {
                self.set(segment, None);
                Take::NoRoom
            }
        }
    }

    /// The donor says that it does not hold the extent. What was heard of another place of the
    /// segment in the meantime stands.
    pub fn gone(&mut self, segment: u64, place: Place) {
        if matches!(self.segments.get(&segment), Some(Segment::Held(held)) if *held == place) {
            self.set(segment, Some(Segment::Lost(place.donor)));
        }
    }

    /// The segment is nowhere again: its extent was given back, or its loss accepted.
    pub fn freed(&mut self, segment: u64) {
        if !self.is_taking(segment) {
            self.set(segment, None);
        }
    }

    /// Everything was given back.
    pub fn freed_all(&mut self) {
        for segment in self.segments.keys().copied().collect::<Vec<_>>() {
            self.freed(segment);
        }
        self.strays.clear();
        self.unlisted.clear();
    }

    /// Segments for which a donor may hold an extent that is none of the map's. To be asked for once
    /// more and freed, then told to [`Map::stray_freed`].
    pub fn strays_of(&self, donor: DonorIndex) -> Vec<u64> {
        let of_donor = self.strays.range((donor, 0)..=(donor, u64::MAX));
        of_donor.map(|(_, segment)| *segment).collect()
    }

    /// A stray extent was given back.
    pub fn stray_freed(&mut self, donor: DonorIndex, segment: u64) {
        self.strays.remove(&(donor, segment));
    }

    /// Segments whose whereabouts may have changed since this was asked last.
    pub fn take_changed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.changed)
    }

    /// Segments that are held, and that are lost.
    pub fn counts(&self) -> (u64, u64) {
        let count = |what: fn(&Segment) -> bool| {
            self.segments.values().filter(|segment| what(segment)).count() as u64
        };
        (
            count(|segment| matches!(segment, Segment::Held(_))),
            count(|segment| matches!(segment, Segment::Lost(_))),
        )
    }

    fn set(&mut self, segment: u64, to: Option<Segment>) {
        self.listed_pages.remove(&segment);
        self.missing_pages.remove(&segment);
        if let Some(Segment::Held(place)) = &to {
            self.donors[place.donor.0 as usize].extents += 1;
        }
        let before = match to {
            Some(to) => self.segments.insert(segment, to),
            None => self.segments.remove(&segment),
        };
        if let Some(Segment::Held(place)) = before {
            self.donors[place.donor.0 as usize].extents -= 1;
        }
        self.changed.push(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT_PAGES: u64 = 16;

    fn map_with(free_pages: &[u64]) -> Map {
        let mut map = Map::new(8, SEGMENT_PAGES);
        for (number, free_pages) in free_pages.iter().enumerate() {
            let donor = map.donor_named(&format!("d{number}"), false);
            assert!(hear(&mut map, donor, 100 + number as u64, *free_pages));
        }
        map
    }

    /// Heard over a connection that was begun just before.
    fn hear(map: &mut Map, donor: DonorIndex, boot: u64, free_pages: u64) -> bool {
        let now = map.donor(donor).heard_at + Duration::from_millis(1);
        map.heard(donor, boot, Load { free_pages, in_service: 0 }, now, now)
    }

    fn place(donor: u32, extent: u64) -> Place {
        Place { donor: DonorIndex(donor), boot: 100 + u64::from(donor), extent: ExtentId(extent) }
    }

    fn line(extent: u64, segment: u64) -> HeldExtent {
        HeldExtent { extent: ExtentId(extent), segment, member: 0, order: 4, written: 1 }
    }

    fn take(map: &mut Map, segment: u64, extent: u64) -> Place {
        let Take::Ask(donor) = map.begin(segment) else { panic!("nobody to ask") };
        let place = place(donor.0, extent);
        assert_eq!(map.allocated(segment, place), Take::Held(place));
        place
    }

    #[test]
    fn the_first_write_takes_an_extent_and_the_next_finds_it() {
        let mut map = map_with(&[64]);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(map.begin(3), Take::Ask(DonorIndex(0)));
        assert_eq!(map.begin(3), Take::Wait);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        let _ = map.allocated(3, place(0, 1));
        assert_eq!(map.begin(3), Take::Held(place(0, 1)));
        assert_eq!(map.whereabouts(3), Whereabouts::Held(place(0, 1)));
        assert_eq!(map.donor(DonorIndex(0)).extents, 1);
        map.freed(3);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(map.donor(DonorIndex(0)).extents, 0);
        assert_eq!(map.counts(), (0, 0));
    }

    #[test]
    fn extents_spread_over_donors_with_equal_room() {
        let mut map = map_with(&[640, 640, 640]);
        let donors: BTreeSet<_> = (0..6).map(|n| take(&mut map, n, n + 1).donor).collect();
        assert_eq!(donors.len(), 3);
        assert!(map.donors().iter().all(|donor| donor.extents == 2));
    }

    #[test]
    fn who_declines_is_not_asked_twice_and_in_the_end_there_is_no_room() {
        let mut map = map_with(&[64, 64, 8]);
        let Take::Ask(first) = map.begin(0) else { panic!() };
        let Take::Ask(second) = map.declined(0, first, Declined::Full) else { panic!() };
        assert_ne!(first, second);
        // The third has less room than a segment needs.
        assert_eq!(map.declined(0, second, Declined::Full), Take::NoRoom);
        // The next attempt begins anew.
        assert!(matches!(map.begin(0), Take::Ask(_)));
        map.abandon(0);
        assert!(matches!(map.begin(0), Take::Ask(_)));
    }

    #[test]
    fn a_silent_donor_is_left_out_until_it_is_heard() {
        let mut map = map_with(&[64, 64]);
        let Take::Ask(silent) = map.begin(0) else { panic!() };
        let Take::Ask(other) = map.declined(0, silent, Declined::Silent) else { panic!() };
        let _ = map.allocated(0, place(other.0, 5));
        for segment in 1..4 {
            assert_eq!(take(&mut map, segment, 10 + segment).donor, other);
        }
        hear(&mut map, silent, 100 + u64::from(silent.0), 64);
        assert_eq!(take(&mut map, 4, 20).donor, silent);
    }

    #[test]
    fn a_donor_with_a_stray_is_not_asked_for_its_segment_before_that_is_freed() {
        let mut map = map_with(&[64]);
        let Take::Ask(donor) = map.begin(0) else { panic!() };
        assert_eq!(map.declined(0, donor, Declined::Silent), Take::NoRoom);
        hear(&mut map, donor, 100, 64);
        assert_eq!(map.strays_of(donor), [0]);
        assert_eq!(map.begin(0), Take::NoRoom);
        assert_eq!(map.begin(1), Take::Ask(donor), "other segments are");
        map.stray_freed(donor, 0);
        assert_eq!(map.begin(0), Take::Ask(donor));
        // Its next life holds no strays.
        map.declined(0, donor, Declined::Silent);
        hear(&mut map, donor, 101, 64);
        assert!(map.strays_of(donor).is_empty());
    }

    #[test]
    fn another_life_of_a_donor_loses_what_it_held_and_nothing_else() {
        let mut map = map_with(&[640, 640]);
        let places: Vec<_> = (0..4).map(|n| take(&mut map, n, n + 1)).collect();
        hear(&mut map, DonorIndex(0), 999, 640);
        for (segment, place) in places.iter().enumerate() {
            let expected = match place.donor {
                DonorIndex(0) => Whereabouts::Lost(DonorIndex(0)),
                _ => Whereabouts::Held(*place),
            };
            assert_eq!(map.whereabouts(segment as u64), expected);
        }
        let lost = places.iter().position(|place| place.donor == DonorIndex(0)).unwrap() as u64;
        assert_eq!(map.begin(lost), Take::Lost(DonorIndex(0)), "lost pages would become zeros");
        map.freed(lost);
        assert!(matches!(map.begin(lost), Take::Ask(_)));
    }

    #[test]
    fn late_news_of_an_earlier_life_lose_nothing() {
        let mut map = map_with(&[64]);
        let donor = DonorIndex(0);
        let at = Duration::from_secs;
        assert!(map.heard(donor, 200, Load { free_pages: 64, in_service: 0 }, at(10), at(11)));
        assert_eq!(map.begin(0), Take::Ask(donor));
        let place = Place { donor, boot: 200, extent: ExtentId(1) };
        let _ = map.allocated(0, place);
        // Welcomed by the earlier life, but told only now.
        assert!(!map.heard(donor, 100, Load::default(), at(9), at(12)));
        assert_eq!(map.whereabouts(0), Whereabouts::Held(place));
        assert!(map.heard(donor, 300, Load::default(), at(13), at(14)));
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(donor));
    }

    #[test]
    fn what_is_gone_is_lost_only_if_it_is_still_where_it_was() {
        let mut map = map_with(&[64]);
        let old = take(&mut map, 0, 1);
        map.freed(0);
        let new = take(&mut map, 0, 2);
        map.gone(0, old);
        assert_eq!(map.whereabouts(0), Whereabouts::Held(new));
        map.gone(0, new);
        assert_eq!(map.whereabouts(0), Whereabouts::Lost(new.donor));
    }

    #[test]
    fn a_successor_knows_nothing_of_a_segment_until_all_donors_have_told() {
        let mut map = Map::new(8, SEGMENT_PAGES);
        let [a, b] = ["a", "b"].map(|name| map.donor_named(name, true));
        hear(&mut map, a, 100, 640);
        map.listed(a, 100, &[line(7, 2), line(8, 99), HeldExtent { order: 5, ..line(9, 3) }]);
        assert_eq!(map.whereabouts(2), Whereabouts::Held(place(0, 7)));
        assert_eq!(map.whereabouts(3), Whereabouts::Lost(b));
        assert_eq!(map.begin(3), Take::Lost(b));
        hear(&mut map, b, 101, 640);
        map.listed(b, 101, &[line(1, 4)]);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(map.whereabouts(4), Whereabouts::Held(place(1, 1)));
        // What should be there and is not is lost.
        map.expect(4, 1);
        map.expect(5, 1);
        assert_eq!(map.whereabouts(4), Whereabouts::Held(place(1, 1)));
        assert_eq!(map.begin(5), Take::Lost(DonorIndex::UNKNOWN));
    }

    #[test]
    fn a_segment_that_two_donors_claim_is_lost_and_both_extents_are_strays() {
        let mut map = Map::new(8, SEGMENT_PAGES);
        let [a, b] = ["a", "b"].map(|name| map.donor_named(name, true));
        map.listed(a, 100, &[line(7, 2)]);
        map.listed(b, 101, &[line(3, 2)]);
        assert_eq!(map.whereabouts(2), Whereabouts::Lost(b));
        assert_eq!((map.strays_of(a), map.strays_of(b)), (vec![2], vec![2]));
    }

    #[test]
    fn of_two_claims_the_one_that_was_never_written_to_is_a_stray() {
        let unwritten = |extent, segment| HeldExtent { written: 0, ..line(extent, segment) };
        for lists in [[line(7, 2), unwritten(3, 2)], [unwritten(7, 2), line(3, 2)]] {
            let mut map = Map::new(8, SEGMENT_PAGES);
            let donors = ["a", "b"].map(|name| map.donor_named(name, true));
            for ((donor, boot), line) in donors.into_iter().zip(100..).zip(lists) {
                map.listed(donor, boot, &[line]);
            }
            let (right, stray) = if lists[0].written > 0 { (0, 1) } else { (1, 0) };
            let extent = lists[right].extent.0;
            map.expect(2, 1);
            assert_eq!(map.whereabouts(2), Whereabouts::Held(place(right as u32, extent)));
            assert_eq!(map.strays_of(donors[stray]), [2]);
            assert!(map.strays_of(donors[right]).is_empty());
        }
    }

    #[test]
    fn an_extent_with_fewer_pages_than_there_must_be_is_a_stray_and_the_segment_lost() {
        let written = |extent, written| HeldExtent { written, ..line(extent, 2) };
        // Told before or after the donors' lists.
        for expected_first in [true, false] {
            let mut map = Map::new(8, SEGMENT_PAGES);
            let [a, b] = ["a", "b"].map(|name| map.donor_named(name, true));
            if expected_first {
                map.expect(2, 3);
            }
            map.listed(a, 100, &[written(7, 2)]);
            if !expected_first {
                map.expect(2, 3);
            }
            assert_eq!(map.whereabouts(2), Whereabouts::Lost(DonorIndex::UNKNOWN));
            assert_eq!(map.strays_of(a), [2]);
            // And found after all, with a donor that was late.
            map.listed(b, 101, &[written(1, 3)]);
            assert_eq!(map.whereabouts(2), Whereabouts::Held(place(1, 1)));
        }
    }

    #[test]
    fn what_a_later_life_of_a_donor_lists_is_an_earlier_borrowers() {
        let mut map = Map::new(8, SEGMENT_PAGES);
        let a = map.donor_named("a", true);
        assert!(!map.is_listed(a, 100));
        map.listed(a, 100, &[line(1, 2)]);
        assert!(map.is_listed(a, 100) && !map.is_listed(a, 200));
        assert!(hear(&mut map, a, 200, 640));
        map.listed(a, 200, &[line(1, 3)]);
        assert_eq!(map.whereabouts(3), Whereabouts::Nowhere);
        assert_eq!(map.begin(3), Take::NoRoom, "its contents are not this borrower's");
        // The same for one that was asked for before the list came.
        assert_eq!(map.begin(4), Take::Ask(a));
        assert!(hear(&mut map, a, 300, 640));
        map.listed(a, 300, &[line(1, 4)]);
        let stray = Place { donor: a, boot: 300, extent: ExtentId(1) };
        assert_eq!(map.allocated(4, stray), Take::NoRoom);
        assert!(map.strays_of(a).contains(&4));
        assert!(hear(&mut map, a, 400, 640));
        map.listed(a, 400, &[line(1, 3)]);
        map.stray_freed(a, 3);
        assert_eq!(map.begin(3), Take::Ask(a));
    }

    #[test]
    fn changes_are_told_once() {
        let mut map = map_with(&[64]);
        take(&mut map, 5, 1);
        assert!(map.take_changed().contains(&5));
        assert!(map.take_changed().is_empty());
        map.freed_all();
        assert_eq!(map.take_changed(), [5]);
    }
}
