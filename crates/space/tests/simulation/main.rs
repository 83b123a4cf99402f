//! A space and its donors on a simulated network and clock, from one seed, with everything going
//! wrong that may: messages lost, repeated, delayed; connections cut; donors that restart, hang, or
//! are full; pages that go bad in their memory; a borrower that dies and is replaced while its last
//! writes are still on the way.
//!
//! What is tested is the space's map and its lanes' flights, the connection's window, and the
//! donor's table, which are the crates' own; the simulation replaces sockets, memory and time.
//!
//! The promise: a read shows the value acknowledged last, or one of a write that was under way; or
//! it fails cleanly, as lost only when an extent was really lost. At the end everything is given
//! back.
//!
//! `HECATON_SEEDS=N` runs so many seeds, `HECATON_SEED=S` runs just one.

mod borrower;
mod dice;
mod donor;
mod network;
mod oracle;

use borrower::{Borrower, Job, SEGMENT_PAGES, SEGMENTS, Scrubbed, Told, Why};
use dice::Dice;
use donor::Donor;
use hecaton_memory::{Epoch, Generation};
use hecaton_space::group::{DonorIndex, Group, Place};
use hecaton_space::lookup::Whereabouts;
use hecaton_transport::protocol::{PageState, Refusal};
use network::{
    Answered, Asked, ConnId, DECAYED, Event, Faults, Network, ToBorrower, ToDonor, Value, sum_of,
};
use oracle::Oracle;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const LANES: usize = 3;
const TICK: Duration = Duration::from_millis(20);
const DEFAULT_SEEDS: u64 = 2000;

/// What the workload has under way.
#[derive(Clone, Debug)]
enum Pending {
    Read { key: u64, segment: u64, pages: Vec<u32>, avoid: Vec<DonorIndex> },
    Write { segment: u64, pages: Vec<u32>, values: Vec<Value> },
    Free { segment: u64 },
    Discard { segment: u64, first: u32, count: u32 },
    FreeAll,
}

impl Pending {
    fn segment(&self) -> Option<u64> {
        match self {
            Pending::Read { segment, .. }
            | Pending::Write { segment, .. }
            | Pending::Free { segment }
            | Pending::Discard { segment, .. } => Some(*segment),
            Pending::FreeAll => None,
        }
    }
}

/// What happened in a run, to see that the seeds reach everything.
#[derive(Debug, Default)]
struct Tally {
    reads: u64,
    interrupted: u64,
    unreachable: u64,
    lost: u64,
    no_room: u64,
    fenced: u64,
    takeovers: u64,
    restarts: u64,
    expired: u64,
    copies_made: u64,
    lost_with_copies: u64,
    drains: u64,
    recalls: u64,
    hosts_changed: u64,
    /// Recalls on a good network that brought everything back, or all that others had room for.
    given_back: u64,
    nobody_had_room: u64,
    copies_left: u64,
    decayed: u64,
    repaired: u64,
    given_up: u64,
    /// Found by a read, and by the scrub, to have gone bad in every copy.
    decayed_everywhere: u64,
    found_lost: u64,
}

struct World {
    dice: Dice,
    net: Network,
    donors: Vec<Donor>,
    /// The last one is the owner; those before it were replaced and do not all know it yet.
    borrowers: Vec<Borrower>,
    oracle: Oracle,
    pending: BTreeMap<u64, Pending>,
    next_token: u64,
    epoch: u64,
    boots: u64,
    copies: u8,
    /// Whether donors drain, or want some of their memory back, so that segments move.
    moves: bool,
    /// Whether pages go bad in donors' memory.
    decays: bool,
    /// Segments with pages that have gone bad with their sums.
    wholly_decayed: BTreeSet<u64>,
    /// Pages that came damaged, and are to be read again from others.
    to_read_again: Vec<(u64, u32, Vec<DonorIndex>)>,
    /// The owner was told everything and nobody else can write any more.
    settled: bool,
    tally: Tally,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let donor_count = 2 + dice.below(3) as usize;
        // Every third run on a good network, so that the faults of others are seen by themselves.
        let badness = dice.below(3);
        let mut rate = |most: u64| if badness == 0 { 0 } else { dice.below(most * badness) };
        let faults =
            Faults { dropped: rate(10), repeated: rate(10), cut: rate(15), slow: rate(40) };
        // Together a bit less or a lot more than the space needs.
        let copies = 1 + dice.below(3.min(donor_count as u64)) as u8;
        let need = SEGMENTS * SEGMENT_PAGES * u64::from(copies) / donor_count as u64;
        let pages = need.next_power_of_two() / 2 + dice.below(2 * need);
        let donors: Vec<_> = (0..donor_count).map(|n| Donor::new(pages, 1 + n as u64)).collect();
        let borrower = Borrower::new(Epoch(1), LANES, donor_count, copies, None, &mut dice);
        let moves = dice.below(2) == 0;
        let decays = copies > 1 && dice.below(2) == 0;
        let oracle = Oracle::new(copies > 1 || moves);
        World {
            net: Network::new(donor_count, faults),
            donors,
            borrowers: vec![borrower],
            oracle,
            copies,
            moves,
            decays,
            wholly_decayed: BTreeSet::new(),
            to_read_again: Vec::new(),
            pending: BTreeMap::new(),
            next_token: 0,
            epoch: 1,
            boots: 100,
            settled: true,
            tally: Tally::default(),
            dice,
        }
    }

    fn run(&mut self) {
        for step in 0..400 {
            self.advance(TICK);
            if !self.settled {
                if self.borrowers.last().is_some_and(Borrower::knows_all) {
                    self.settle();
                }
                continue;
            }
            for _ in 0..1 + self.dice.below(3) {
                self.work();
            }
            match self.dice.below(400) {
                0..2 => self.restart_a_donor(),
                2..4 => self.silence_a_donor(),
                4..5 => self.take_over(),
                5..7 if self.moves => self.drain_a_donor(),
                7..11 if self.moves => self.recall_at_a_donor(),
                11..15 if self.moves => self.change_a_host(),
                15..23 if self.decays => self.decay(),
                _ => {}
            }
            if self.copies > 1 {
                self.scrub();
            }
            if step % 4 == 0 {
                self.tend();
            }
            if step % 50 == 49 {
                self.renew();
            }
        }
        self.heal();
        if self.decays {
            self.compare_everything();
        }
        if self.moves {
            self.recall_for_good();
        }
        self.read_everything();
        self.tally.copies_made = self.borrowers.iter().map(|b| b.copies_made).sum();
        self.tally.copies_left = self.borrowers.iter().map(|b| b.copies_left).sum();
        self.release();
    }

    /// Lets time pass.
    fn advance(&mut self, time: Duration) {
        let until = self.net.now + time;
        while let Some(event) = self.net.next(until) {
            match event {
                Event::AtDonor(conn, message) => match message {
                    ToDonor::Request { id, asked: asked @ Asked::Fill { .. }, .. } => {
                        self.fill_begins(conn, id, &asked);
                    }
                    ToDonor::Request { id, asked: asked @ Asked::Repair { .. }, .. } => {
                        self.repair_begins(conn, id, &asked);
                    }
                    message => {
                        let donor = self.net.donor_of(conn);
                        self.donors[donor].receive(conn, message, &mut self.net, &mut self.dice);
                    }
                },
                Event::Filled { conn, id, extent, first, pages } => {
                    let donor = self.net.donor_of(conn);
                    let now_ms = self.net.now.as_millis() as u64;
                    let Some(epoch) = self.donors[donor].epoch_of(conn) else { continue };
                    let filled = self.donors[donor].fill(epoch, extent, first, &pages, now_ms);
                    self.answer_fill(conn, id, filled);
                }
                Event::Mended { conn, id, extent, pages } => {
                    let donor = self.net.donor_of(conn);
                    let now_ms = self.net.now.as_millis() as u64;
                    let Some(epoch) = self.donors[donor].epoch_of(conn) else { continue };
                    let mended = self.donors[donor].mend(epoch, extent, &pages, now_ms);
                    self.answer_fill(conn, id, mended);
                }
                Event::DonorSeesEnd(conn) => {
                    let donor = self.net.donor_of(conn);
                    self.donors[donor].ended(conn);
                }
                Event::AtBorrower(conn, message) => {
                    if let Some(borrower) = self.borrowers.iter_mut().find(|b| b.owns(conn)) {
                        borrower.receive(conn, message, &mut self.net, &mut self.dice);
                    }
                }
                Event::BorrowerSeesEnd(conn) => {
                    if let Some(borrower) = self.borrowers.iter_mut().find(|b| b.owns(conn)) {
                        borrower.ended(conn, &mut self.net, &mut self.dice);
                    }
                }
            }
            self.hear();
        }
        self.net.now = until;
        for borrower in &mut self.borrowers {
            borrower.tick(&mut self.net, &mut self.dice);
        }
        let mut expired = Vec::new();
        for donor in &mut self.donors {
            donor.reclaim();
            for segment in donor.expire(until.as_millis() as u64) {
                expired.push(segment);
            }
        }
        self.tally.expired += expired.len() as u64;
        expired.into_iter().for_each(|segment| self.note_loss(segment));
        self.hear();
        for (segment, page, avoid) in std::mem::take(&mut self.to_read_again) {
            if self.oracle.may_read(segment * SEGMENT_PAGES + u64::from(page)) {
                self.read_pages(segment, vec![page], avoid);
            }
        }
    }

    /// A donor reads from another one, unless that cannot be reached.
    fn fill_begins(&mut self, conn: ConnId, id: u64, asked: &Asked) {
        let &Asked::Fill { extent, first, count, from: (source, boot, other) } = asked else {
            return;
        };
        let donor = self.net.donor_of(conn);
        let Some(epoch) = self.donors[donor].epoch_of(conn) else { return };
        let now_ms = self.net.now.as_millis() as u64;
        let pages = match self.net.silent_until[source] > self.net.now {
            true => Err(Refusal::NoSource),
            false => {
                let pages = first..first + count;
                self.donors[source].pages_for(epoch, boot, other, pages, now_ms)
            }
        };
        match pages {
            Ok(pages) => {
                // Much may happen between the reading and the storing.
                let at = self.net.now + Duration::from_micros(self.dice.below(60_000));
                self.net.schedule(at, Event::Filled { conn, id, extent, first, pages });
            }
            Err(refusal) => self.answer_fill(conn, id, Err(refusal)),
        }
    }

    /// A donor looks for damaged pages, and reads them from another one.
    fn repair_begins(&mut self, conn: ConnId, id: u64, asked: &Asked) {
        let &Asked::Repair { extent, first, count, from: (source, boot, other) } = asked else {
            return;
        };
        let donor = self.net.donor_of(conn);
        let Some(epoch) = self.donors[donor].epoch_of(conn) else { return };
        let now_ms = self.net.now.as_millis() as u64;
        let is_silent = self.net.silent_until[source] > self.net.now;
        let states = self.donors[donor].verify(epoch, extent, (first, count), now_ms);
        let pages = states.and_then(|states| {
            let is_damaged = |state: &PageState| matches!(state, PageState::Damaged(_));
            let damaged = (first..).zip(states).filter(|(_, state)| is_damaged(state));
            let read = damaged.map(|(page, _)| {
                if is_silent {
                    return Err(Refusal::NoSource);
                }
                let run = page..page + 1;
                let read = self.donors[source].pages_for(epoch, boot, other, run, now_ms)?;
                Ok((page, read[0]))
            });
            read.collect::<Result<Vec<_>, Refusal>>()
        });
        match pages {
            Ok(pages) => {
                let at = self.net.now + Duration::from_micros(self.dice.below(60_000));
                self.net.schedule(at, Event::Mended { conn, id, extent, pages });
            }
            Err(refusal) => self.answer_fill(conn, id, Err(refusal)),
        }
    }

    fn answer_fill(&mut self, conn: ConnId, id: u64, filled: Result<(), Refusal>) {
        let donor = self.net.donor_of(conn);
        let answered = match filled {
            Ok(()) => Answered::Done,
            Err(refusal) => Answered::Refused(refusal),
        };
        let load = self.donors[donor].load();
        let answer = ToBorrower::Answer { id, answered, load, data: Vec::new() };
        self.net.send_to_borrower(conn, answer, &mut self.dice);
    }

    fn tend(&mut self) {
        let World { borrowers, net, dice, .. } = self;
        borrowers.last_mut().expect("there is always an owner").tend(net, dice);
        self.hear();
    }

    fn drain_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        self.donors[donor].draining = !self.donors[donor].draining;
        self.tally.drains += 1;
    }

    fn set_limit(&mut self, donor: usize, pages: u64) {
        let now_ms = self.net.now.as_millis() as u64;
        self.donors[donor].set_limit(pages, now_ms);
    }

    fn recall_at_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let pages = self.donors[donor].pages();
        let limit = if self.dice.below(2) == 0 { pages } else { self.dice.below(pages) };
        self.set_limit(donor, limit);
        self.tally.recalls += 1;
    }

    /// Programs of a donor's host take memory, or end.
    fn change_a_host(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let pages = self.donors[donor].pages();
        let is_ample = self.dice.below(2) == 0;
        let host_pages = if is_ample { u64::MAX } else { self.dice.below(2 * pages) };
        self.donors[donor].host_pages = host_pages;
        self.tally.hosts_changed += 1;
    }

    /// A donor gets back what others have room for, or have a copy of.
    fn recall_for_good(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        for donor in &self.donors {
            let all = donor.pages();
            assert_eq!(donor.table.limit_pages(), all, "the host has been calm for long");
        }
        let limit = self.dice.below(self.donors[donor].pages() / 2);
        self.set_limit(donor, limit);
        if self.donors[donor].table.excess_pages() == 0 {
            return;
        }
        for step in 0..800 {
            if step % 50 == 0 {
                if self.donors[donor].table.excess_pages() == 0 {
                    self.tally.given_back += 1;
                    return;
                }
                self.renew();
            }
            self.advance(TICK);
            self.tend();
        }
        for lent in self.donors[donor].table.extents().copied().collect::<Vec<_>>() {
            let Whereabouts::Held(group) = self.owner().map.whereabouts(lent.segment) else {
                panic!("segment {} is not held, but its extent is", lent.segment);
            };
            let is_at = |at: usize| group.members().iter().any(|m| m.place.donor.0 as usize == at);
            assert!(is_at(donor), "an extent of segment {} is forgotten", lent.segment);
            assert_eq!(group.whole().count(), 1, "segment {} has another copy", lent.segment);
            for (at, other) in self.donors.iter().enumerate().filter(|(at, _)| !is_at(*at)) {
                let room = other.table.lendable_pages();
                assert!(room < SEGMENT_PAGES, "donor {at} has room for segment {}", lent.segment);
            }
        }
        self.tally.nobody_had_room += 1;
    }

    /// A page goes bad in one copy, or in all of them.
    fn decay(&mut self) {
        let (segment, page) = (self.dice.below(SEGMENTS), self.dice.below(SEGMENT_PAGES) as u32);
        let (wholly, everywhere) = (self.dice.below(4) == 0, self.dice.below(8) == 0);
        let Whereabouts::Held(group) = self.owner().map.whereabouts(segment) else { return };
        let places: Vec<Place> = group.whole().collect();
        let one = self.dice.below(places.len() as u64) as usize;
        for (at, place) in places.into_iter().enumerate() {
            let donor = &mut self.donors[place.donor.0 as usize];
            let is_chosen = everywhere || at == one;
            if is_chosen && donor.boot == place.boot && donor.decay(place.extent, page, wholly) {
                self.tally.decayed += 1;
                if wholly {
                    self.wholly_decayed.insert(segment);
                }
            }
        }
    }

    /// As `Space::scrub`, with what a pager knows of what it has stored.
    fn scrub(&mut self) -> Option<Scrubbed> {
        let World { borrowers, net, dice, oracle, pending, .. } = self;
        let is_leaving = |segment: u64| {
            pending.values().any(|pending| {
                matches!(pending, Pending::Free { .. } | Pending::Discard { .. })
                    && pending.segment() == Some(segment)
            })
        };
        let known = |page: u64| match oracle.certain(page) {
            Some(value) if value != 0 && !is_leaving(page / SEGMENT_PAGES) => Some(sum_of(value)),
            _ => None,
        };
        let owner = borrowers.last_mut().expect("there is always an owner");
        let scrubbed = owner.scrub(&known, net, dice);
        if let Some(Scrubbed::Run(segment, report)) = &scrubbed {
            self.tally.repaired += report.repaired;
            self.tally.found_lost += report.lost;
            if report.wrong.is_some() {
                assert!(self.wholly_decayed.contains(segment), "a copy is accused of nothing");
                self.tally.given_up += 1;
            }
        }
        self.hear();
        scrubbed
    }

    /// Whether a copy has what is stored for a page. None, if that is not certain or a page of zeros.
    fn is_right(&mut self, segment: u64, page: u32, place: Place) -> Option<bool> {
        let value = self.oracle.certain(segment * SEGMENT_PAGES + u64::from(page))?;
        let donor = &mut self.donors[place.donor.0 as usize];
        (value != 0).then(|| donor.stored(place.extent, page).value == value)
    }

    /// With nothing else going on, every page that is right in one copy becomes so in all, and those
    /// that are right in none are found.
    fn compare_everything(&mut self) {
        let (mut rounds, mut before) = (0, BTreeMap::new());
        let mut lost: BTreeMap<u64, u64> = BTreeMap::new();
        for _ in 0..5000 {
            self.advance(TICK);
            if rounds < 2 {
                self.tend();
            }
            match self.scrub() {
                Some(Scrubbed::Round) => {
                    rounds += 1;
                    if rounds == 3 {
                        break;
                    }
                    // A donor that had no source for a copy is heard again.
                    self.renew();
                    (0..10).for_each(|_| self.advance(TICK));
                    before = self.groups();
                    lost.clear();
                }
                Some(Scrubbed::Run(segment, report)) => {
                    *lost.entry(segment).or_default() += report.lost;
                }
                None => {}
            }
        }
        assert_eq!(rounds, 3, "the scrub never ends");
        for (segment, group) in self.groups() {
            let places: Vec<Place> = group.whole().collect();
            let is_as_before = before.get(&segment) == Some(&group);
            // One may have gone with its lease, which its owner does not know yet.
            let map = &self.borrowers.last().expect("there is always an owner").map;
            let is_there = |place: &Place| {
                let donor = &self.donors[place.donor.0 as usize];
                let is_known = map.donor(place.donor).reachable;
                is_known && donor.boot == place.boot && donor.has_extent(place.extent)
            };
            let is_as_before = is_as_before && places.iter().all(is_there);
            if !is_as_before || places.len() < 2 || self.wholly_decayed.contains(&segment) {
                continue;
            }
            let mut right_nowhere = 0;
            for page in 0..SEGMENT_PAGES as u32 {
                let right = places.iter().filter_map(|place| self.is_right(segment, page, *place));
                let right: Vec<bool> = right.collect();
                assert!(
                    right.windows(2).all(|pair| pair[0] == pair[1]),
                    "page {page} of segment {segment} is not repaired"
                );
                right_nowhere += u64::from(right.first() == Some(&false));
            }
            assert_eq!(lost.get(&segment), Some(&right_nowhere), "lost pages of {segment}");
        }
    }

    fn groups(&mut self) -> BTreeMap<u64, Group> {
        let map = &self.owner().map;
        let held = (0..SEGMENTS).filter_map(|segment| match map.whereabouts(segment) {
            Whereabouts::Held(group) => Some((segment, group)),
            _ => None,
        });
        held.collect()
    }

    /// A page came damaged from a donor. As the pager does: it is read from others.
    fn came_damaged(&mut self, segment: u64, page: u32, mut avoid: Vec<DonorIndex>) {
        self.owner().suspect(segment, page);
        let Whereabouts::Held(group) = self.owner().map.whereabouts(segment) else { return };
        let is_decayed = |place: Place| {
            let donor = &mut self.donors[place.donor.0 as usize];
            donor.stored(place.extent, page).value & DECAYED != 0
        };
        if group.whole().all(is_decayed) {
            self.tally.decayed_everywhere += 1;
            self.oracle.decayed(segment * SEGMENT_PAGES + u64::from(page));
        } else {
            // Only those that have sent it since one was mended.
            let surplus = (avoid.len() + 1).saturating_sub(usize::from(self.copies));
            avoid.drain(..surplus);
            self.to_read_again.push((segment, page, avoid));
        }
    }

    /// An extent of the segment is gone. The segment may be lost if that was the last one which the
    /// owner could count on.
    fn note_loss(&mut self, segment: u64) {
        let since = self.oracle.generation_of(segment);
        let is_any_there = |group: Group| {
            group.whole().any(|place| {
                let donor = &self.donors[place.donor.0 as usize];
                donor.boot == place.boot && donor.has_extent(place.extent)
            })
        };
        let mut borrowers = self.borrowers.iter().rev();
        let owner = borrowers.next().expect("there is always an owner");
        let is_left = match owner.map.whereabouts(segment) {
            Whereabouts::Held(group) => is_any_there(group),
            // One of its first extents, perhaps the only one that it gets.
            Whereabouts::Nowhere => !owner.map.is_taking(segment),
            // Not found yet. What its predecessor had given up may go at any moment.
            Whereabouts::Lost(_) => match borrowers.next().map(|b| b.map.whereabouts(segment)) {
                Some(Whereabouts::Held(group)) => is_any_there(group),
                _ => self.donors.iter().any(|donor| donor.has(segment, since)),
            },
        };
        if !is_left {
            self.oracle.losable(segment);
        }
    }

    fn owner(&mut self) -> &mut Borrower {
        self.borrowers.last_mut().expect("there is always an owner")
    }

    fn token(&mut self, pending: Pending) -> u64 {
        self.next_token += 1;
        self.pending.insert(self.next_token, pending);
        self.next_token
    }

    fn is_busy(&self, segment: u64) -> bool {
        self.pending.values().any(|pending| pending.segment() == Some(segment))
    }

    fn is_being_zeroed(&self, segment: u64) -> bool {
        self.pending.values().any(|pending| {
            matches!(pending, Pending::Free { .. } | Pending::Discard { .. })
                && pending.segment() == Some(segment)
        })
    }

    fn work(&mut self) {
        let segment = self.dice.below(SEGMENTS);
        if self.is_being_zeroed(segment) {
            return;
        }
        match self.dice.below(100) {
            0..45 => self.write(segment),
            45..90 => self.read(segment),
            90..95 if !self.is_busy(segment) => self.free(segment),
            95..98 if !self.is_busy(segment) => self.accept_losses(),
            98..100 if !self.is_busy(segment) => self.discard(segment),
            _ => {}
        }
    }

    fn some_pages(&mut self) -> Vec<u32> {
        let first = self.dice.below(SEGMENT_PAGES);
        let count = 1 + self.dice.below(SEGMENT_PAGES - first);
        (first as u32..(first + count) as u32).collect()
    }

    fn write(&mut self, segment: u64) {
        let mut pages = self.some_pages();
        pages.retain(|page| self.oracle.may_write(segment * SEGMENT_PAGES + u64::from(*page)));
        if !pages.is_empty() {
            self.write_pages(segment, pages);
        }
    }

    fn write_pages(&mut self, segment: u64, pages: Vec<u32>) {
        let values: Vec<Value> = pages.iter().map(|_| self.oracle.fresh_value()).collect();
        for (page, value) in pages.iter().zip(&values) {
            self.oracle.write_begins(segment * SEGMENT_PAGES + u64::from(*page), *value);
        }
        let pending = Pending::Write { segment, pages: pages.clone(), values: values.clone() };
        let token = self.token(pending);
        // A page is always written through the same lane: see `SpaceError::Unreachable`.
        let lane = segment as usize % LANES;
        let World { borrowers, net, dice, .. } = self;
        let owner = borrowers.last_mut().expect("there is always an owner");
        let contents = pages.into_iter().zip(values);
        owner.write(lane, token, segment, contents, net, dice);
        self.hear();
    }

    fn read(&mut self, segment: u64) {
        let mut pages = self.some_pages();
        pages.retain(|page| self.oracle.may_read(segment * SEGMENT_PAGES + u64::from(*page)));
        if !pages.is_empty() {
            self.read_pages(segment, pages, Vec::new());
        }
    }

    fn read_pages(&mut self, segment: u64, pages: Vec<u32>, avoid: Vec<DonorIndex>) {
        let numbers: Vec<u64> =
            pages.iter().map(|page| segment * SEGMENT_PAGES + u64::from(*page)).collect();
        let key = self.oracle.read_begins(&numbers);
        let token =
            self.token(Pending::Read { key, segment, pages: pages.clone(), avoid: avoid.clone() });
        let lane = self.dice.below(LANES as u64) as usize;
        let World { borrowers, net, dice, .. } = self;
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.read(lane, token, segment, (&pages, &avoid), net, dice);
        self.hear();
    }

    /// As `Space::free_segment`.
    fn free(&mut self, segment: u64) {
        match self.owner().map.whereabouts(segment) {
            Whereabouts::Nowhere => {}
            Whereabouts::Lost(_) => {
                self.owner().map.freed(segment, &Group::new(Generation::default()));
                self.oracle.freed(segment);
                (0..SEGMENT_PAGES).for_each(|p| self.oracle.zeroed(segment * SEGMENT_PAGES + p));
            }
            Whereabouts::Held(_) => {
                let token = self.token(Pending::Free { segment });
                let World { borrowers, net, dice, .. } = self;
                let owner = borrowers.last_mut().expect("there is always an owner");
                owner.free(token, segment, net, dice);
                self.hear();
            }
        }
    }

    fn accept_losses(&mut self) {
        for segment in 0..SEGMENTS {
            let is_lost = matches!(self.owner().map.whereabouts(segment), Whereabouts::Lost(_));
            if is_lost && !self.is_busy(segment) {
                self.free(segment);
            }
        }
    }

    /// As `Space::discard`.
    fn discard(&mut self, segment: u64) {
        let pages = self.some_pages();
        let (first, count) = (pages[0], pages.len() as u32);
        let token = self.token(Pending::Discard { segment, first, count });
        let World { borrowers, net, dice, .. } = self;
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.discard(token, segment, (first, count), net, dice);
        self.hear();
    }

    fn control(&mut self, donor: usize, job: Job) {
        let World { borrowers, net, dice, .. } = self;
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.control(donor, job, net, dice);
        self.hear();
    }

    fn renew(&mut self) {
        let World { borrowers, net, dice, .. } = self;
        borrowers.last_mut().expect("there is always an owner").renew(net, dice);
        self.hear();
    }

    /// Takes in what the borrowers tell their workloads.
    fn hear(&mut self) {
        let last = self.borrowers.len() - 1;
        // It was given up for others that seemed to be there.
        for segment in self.borrowers[last].take_deserted() {
            match self.borrowers[last].map.whereabouts(segment) {
                // Which by then were found to be gone.
                Whereabouts::Lost(_) => self.oracle.losable(segment),
                _ => self.note_loss(segment),
            }
        }
        for index in 0..=last {
            for told in self.borrowers[index].take_told() {
                self.told(told, index == last);
            }
        }
    }

    fn told(&mut self, told: Told, by_owner: bool) {
        let (token, ended) = match &told {
            Told::Shown { token, from, values, .. } => match &self.pending[token] {
                Pending::Read { pages, .. } => (*token, from + values.len() == pages.len()),
                other => panic!("pages for {other:?}"),
            },
            Told::Written { token, .. }
            | Told::Failed { token, .. }
            | Told::Control { token, .. } => (*token, true),
        };
        let pending = self.pending.get(&token).cloned();
        let pending = pending.unwrap_or_else(|| panic!("told twice of the end: {told:?}"));
        if ended {
            self.pending.remove(&token);
        }
        let why = match &told {
            Told::Failed { why, .. } | Told::Control { outcome: Err(why), .. } => Some(*why),
            _ => None,
        };
        match why {
            Some(Why::Lost { segment }) => {
                let unlisted = self.borrowers.iter().any(|borrower| !borrower.knows_all());
                // An earlier owner's extents are its successor's to give back.
                if by_owner && !unlisted {
                    self.oracle.assert_losable(segment);
                }
                self.tally.lost += 1;
                self.tally.lost_with_copies += u64::from(self.copies > 1);
            }
            Some(Why::Interrupted) => self.tally.interrupted += 1,
            Some(Why::Unreachable) => self.tally.unreachable += 1,
            Some(Why::NoRoom) => self.tally.no_room += 1,
            Some(Why::Fenced) => {
                assert!(!by_owner, "the owner is fenced");
                self.tally.fenced += 1;
            }
            None => {}
        }
        match (pending, told) {
            (
                Pending::Read { key, segment, pages, avoid },
                Told::Shown { from, values, giver, .. },
            ) => {
                let mut damaged = Vec::new();
                for (at, value) in (from..).zip(values) {
                    match value & DECAYED {
                        0 => self.oracle.read_shows(key, at, value, by_owner),
                        _ => damaged.push(pages[at]),
                    }
                }
                self.tally.reads += 1;
                if ended {
                    self.oracle.read_ends(key);
                }
                for page in damaged.into_iter().filter(|_| by_owner) {
                    let avoid = avoid.iter().copied().chain(giver).collect();
                    self.came_damaged(segment, page, avoid);
                }
            }
            (Pending::Read { key, .. }, _) => self.oracle.read_ends(key),
            // What an earlier owner's requests have come to is no longer anybody's business: its
            // pages may be any of their possible values until they are read.
            _ if !by_owner => {}
            (Pending::Write { segment, pages, values }, told) => {
                for (page, value) in pages.iter().zip(values) {
                    let number = segment * SEGMENT_PAGES + u64::from(*page);
                    match told {
                        Told::Written { generation, .. } => {
                            self.oracle.write_stored(number, value);
                            self.oracle.acknowledged(segment, generation);
                        }
                        _ => {
                            let settled = why != Some(Why::Unreachable);
                            self.oracle.write_failed(number, settled);
                        }
                    }
                }
            }
            (Pending::Free { segment }, _) => {
                for page in 0..SEGMENT_PAGES {
                    let number = segment * SEGMENT_PAGES + page;
                    match why {
                        None => self.oracle.zeroed(number),
                        // Freed after all, perhaps: then the next to ask finds it gone.
                        Some(_) => self.oracle.maybe_zeroed(number),
                    }
                }
                match why {
                    None => self.oracle.freed(segment),
                    Some(_) => self.oracle.losable(segment),
                }
            }
            (Pending::Discard { segment, first, count }, told) => {
                if let Told::Control { outcome: Ok(Some(generation)), .. } = told {
                    self.oracle.acknowledged(segment, generation);
                }
                for page in first..first + count {
                    let number = segment * SEGMENT_PAGES + u64::from(page);
                    match why {
                        None => self.oracle.zeroed(number),
                        Some(_) => self.oracle.maybe_zeroed(number),
                    }
                }
            }
            (Pending::FreeAll, _) => assert_eq!(why, None, "not everything was given back"),
        }
    }

    fn restart_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let held: Vec<u64> =
            self.donors[donor].table.extents().map(|extent| extent.segment).collect();
        self.boots += 1;
        self.tally.restarts += 1;
        self.net.sever_all(donor, &mut self.dice);
        let now_ms = self.net.now.as_millis() as u64;
        self.donors[donor].restart(self.boots, now_ms);
        held.into_iter().for_each(|segment| self.note_loss(segment));
    }

    fn silence_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let time = Duration::from_millis(self.dice.below(5000));
        self.net.silent_until[donor] = self.net.now + time;
    }

    /// The owner is dead, or only seems so: another one begins, while the first goes on.
    fn take_over(&mut self) {
        self.epoch += 1;
        self.tally.takeovers += 1;
        let donors = self.donors.len();
        let epoch = Epoch(self.epoch);
        self.settled = false;
        // Done or not, nobody will be told.
        for pending in self.pending.values() {
            let (segment, pages) = match pending {
                Pending::Free { segment } => (*segment, 0..SEGMENT_PAGES as u32),
                Pending::Discard { segment, first, count } => (*segment, *first..first + count),
                _ => continue,
            };
            for page in pages {
                self.oracle.maybe_zeroed(segment * SEGMENT_PAGES + u64::from(page));
            }
        }
        let expected = self.oracle.expected();
        let successor =
            Borrower::new(epoch, LANES, donors, self.copies, Some(&expected), &mut self.dice);
        self.borrowers.push(successor);
        self.advance(Duration::ZERO);
    }

    /// The new owner knows all: nobody else's writes land any more.
    fn settle(&mut self) {
        self.settled = true;
        self.oracle.taken_over();
        // Zombie writes: must never be seen, and are not entered with the oracle.
        let index = self.borrowers.len() - 2;
        for segment in 0..3 {
            let value = self.oracle.fresh_value();
            let pending = Pending::Write { segment, pages: vec![0], values: vec![value] };
            let token = self.token(pending);
            let World { borrowers, net, dice, .. } = self;
            borrowers[index].write(0, token, segment, [(0, value)].into_iter(), net, dice);
            self.hear();
        }
    }

    /// The network is good again; everything that is under way ends.
    fn heal(&mut self) {
        self.net.faults = Faults::default();
        self.net.silent_until.fill(Duration::ZERO);
        for donor in 0..self.donors.len() {
            self.donors[donor].draining = false;
            self.donors[donor].host_pages = u64::MAX;
            self.set_limit(donor, self.donors[donor].pages());
        }
        for _ in 0..500 {
            self.advance(TICK);
            self.tend();
            let told_all = self.borrowers.iter().all(Borrower::is_idle);
            if !self.settled && self.borrowers.last().is_some_and(Borrower::knows_all) {
                self.settle();
            } else if !self.settled {
                self.renew();
            } else if told_all && self.pending.is_empty() {
                break;
            }
        }
        assert!(self.pending.is_empty(), "never ended: {:?}", self.pending);
        self.renew();
        for _ in 0..50 {
            self.advance(TICK);
        }
    }

    fn read_everything(&mut self) {
        // First what failed is written again, once; what is lost or finds no room stays as it is.
        for number in self.oracle.dirty_pages() {
            let page = (number % SEGMENT_PAGES) as u32;
            self.write_pages(number / SEGMENT_PAGES, vec![page]);
        }
        self.drain();
        let before = self.tally.unreachable + self.tally.interrupted;
        for segment in 0..SEGMENTS {
            let pages: Vec<u32> = (0..SEGMENT_PAGES as u32)
                .filter(|page| self.oracle.may_read(segment * SEGMENT_PAGES + u64::from(*page)))
                .collect();
            if !pages.is_empty() {
                self.read_pages(segment, pages, Vec::new());
            }
        }
        self.drain();
        let after = self.tally.unreachable + self.tally.interrupted;
        assert_eq!(before, after, "failures on a good network");
    }

    fn drain(&mut self) {
        for _ in 0..500 {
            self.advance(TICK);
            if self.pending.is_empty() {
                return;
            }
        }
        panic!("never ended: {:?}", self.pending);
    }

    fn release(&mut self) {
        for donor in 0..self.donors.len() {
            let token = self.token(Pending::FreeAll);
            self.control(donor, Job::FreeAll { token });
        }
        self.drain();
        self.advance(TICK);
        for (index, donor) in self.donors.iter().enumerate() {
            assert!(donor.is_all_free(), "donor {index} has not got everything back");
        }
        for borrower in &self.borrowers {
            assert!(borrower.is_idle());
        }
    }
}

#[test]
fn a_read_shows_what_was_written_or_fails_cleanly() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>());
    let number = |name| number(name).transpose().unwrap_or_else(|e| panic!("{name}: {e}"));
    if let Some(seed) = number("HECATON_SEED") {
        let mut world = World::new(seed);
        world.run();
        println!("seed {seed}: {:?}", world.tally);
        return;
    }
    let seeds = number("HECATON_SEEDS").unwrap_or(DEFAULT_SEEDS);
    let mut total = Tally::default();
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            world.run();
            world.tally
        });
        let Ok(tally) = outcome else {
            panic!("seed {seed} fails: run it alone with HECATON_SEED={seed}");
        };
        total.reads += tally.reads;
        total.interrupted += tally.interrupted;
        total.unreachable += tally.unreachable;
        total.lost += tally.lost;
        total.no_room += tally.no_room;
        total.fenced += tally.fenced;
        total.takeovers += tally.takeovers;
        total.restarts += tally.restarts;
        total.expired += tally.expired;
        total.copies_made += tally.copies_made;
        total.lost_with_copies += tally.lost_with_copies;
        total.drains += tally.drains;
        total.recalls += tally.recalls;
        total.hosts_changed += tally.hosts_changed;
        total.given_back += tally.given_back;
        total.nobody_had_room += tally.nobody_had_room;
        total.copies_left += tally.copies_left;
        total.decayed += tally.decayed;
        total.repaired += tally.repaired;
        total.given_up += tally.given_up;
        total.decayed_everywhere += tally.decayed_everywhere;
        total.found_lost += tally.found_lost;
    }
    println!("{seeds} seeds: {total:?}");
    if seeds >= DEFAULT_SEEDS {
        // A simulation in which nothing goes wrong shows nothing.
        let Tally { interrupted, unreachable, lost, no_room, fenced, expired, .. } = total;
        let Tally { copies_made, lost_with_copies, given_back, .. } = total;
        let Tally { nobody_had_room, copies_left, .. } = total;
        let Tally { repaired, given_up, decayed_everywhere, found_lost, .. } = total;
        let reached = [interrupted, unreachable, lost, no_room, fenced, expired];
        let of_moves = [copies_made, lost_with_copies, given_back, nobody_had_room, copies_left];
        let scrubbed = [repaired, given_up, decayed_everywhere, found_lost];
        for reached in reached.into_iter().chain(of_moves).chain(scrubbed) {
            assert!(reached > 0, "the seeds do not reach everything: {total:?}");
        }
    }
}
