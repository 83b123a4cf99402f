//! What the owner of a lane has asked for, and the flights that each of it takes.
//!
//! Decisions only; the segments' groups are asked for, and changed, through [`Groups`].
//!
//! - A *write* goes to all members of the segment's group at once. It is stored when all of them have
//!   acknowledged it, and the group has no further ones by then: a member that joined meanwhile has
//!   not got it. A member that cannot be counted on, when another whole one has the write, leaves the
//!   group, so that nobody waits for it; the write then fails as interrupted, and when it is written
//!   again it brings the group's new generation to those that stay.
//! - A *read* goes to the best whole member. When the answer takes longer than that member's answers
//!   usually do, another one is asked as well (Dean and Barroso, "The Tail at Scale", 2013), and at
//!   once when the connection breaks; pages count from whoever brings them first.
//! - A read of a segment that is part of a coded stripe goes to its one member. When that is lost,
//!   silent, or has sent a page wrong, the same pages of other shards are read, of as many as the stripe has segments, and
//!   the owner of the lane works out what was asked for. Whatever comes first counts.
//!
//! So a write that has failed, or that nobody heard the end of, may be with some members and not
//! with others: it is to be written again before the pages are read from the pool.

mod latency;
mod parts;

use self::latency::Latencies;
use self::parts::{Part, worst};
use crate::coded::stripe::Shards;
use crate::lane::flights::{Cause, Failure, Flights, Limits, MAX_REQUESTS, Slot};
use crate::map::group::{DonorIndex, Form, Group, MAX_MEMBERS, Place};
use crate::map::lookup::Whereabouts;
use hecaton_memory::{ExtentId, Generation};
use std::collections::VecDeque;
use std::time::Duration;

/// The groups of a space.
pub trait Groups {
    /// Where a segment is now.
    fn whereabouts(&mut self, segment: u64) -> Whereabouts;
    /// See [`Map::desert`](crate::map::Map::desert).
    fn desert(&mut self, segment: u64, place: Place) -> bool;
    /// See [`Map::gone`](crate::map::Map::gone).
    fn gone(&mut self, segment: u64, place: Place);
    /// The shards of the stripe that a segment is part of, if it is coded.
    fn shards(&mut self, segment: u64) -> Option<Shards>;
    /// Nothing of a write that was entered lands any more where it is looked for.
    fn write_ends(&mut self, segment: u64);
}

/// What has become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All pages of the write are stored.
    Written {
        /// The caller's token.
        token: u64,
        /// The generation that the members have, at least.
        generation: Generation,
    },
    /// Other shards of its stripe have come for a read: they are to be taken by
    /// [`Requests::take_decoded`].
    Decoded {
        /// The decoding.
        decoding: u64,
    },
    /// The request failed, from page `from` of its list on.
    Failed {
        /// The caller's token.
        token: u64,
        /// Where in the request's list of pages the failure begins; what stands before was delivered.
        from: usize,
        /// The segment.
        segment: u64,
        /// Where it was asked for last.
        place: Place,
        /// Why.
        cause: Cause,
    },
}

/// Whom pages are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// The caller, who knows the read by this token.
    Owner(u64),
    /// A page of another shard is worked out from them.
    Decoding {
        /// The decoding.
        decoding: u64,
        /// Which shard they are of.
        shard: usize,
        /// Who has sent them.
        place: Place,
    },
}

/// Pages that have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Whom they are for.
    pub to: Recipient,
    /// Where in the request's list of pages these begin.
    pub from: usize,
    /// How many of those that have come the caller has already.
    pub skip: usize,
}

/// A request, while it is under way. What carries an old one's serial is passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    index: u32,
    serial: u32,
}

impl Key {
    fn token(self) -> u64 {
        u64::from(self.serial) << 32 | u64::from(self.index)
    }

    fn of_token(token: u64) -> Key {
        Key { index: token as u32, serial: (token >> 32) as u32 }
    }
}

/// Which members a read may go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    /// Those that can be counted on: it waits for another one as well.
    Reachable,
    /// All: nobody else is left.
    Anyone,
}

/// Whether a donor will answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hope {
    /// It has until now.
    Good,
    /// Its connection has broken, and nobody has wanted another one since.
    Fair,
    /// It is waited for in vain.
    None,
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    slot: Slot,
    place: Place,
    /// Where in the request's pages it begins.
    from: usize,
    asked: Duration,
}

#[derive(Clone, Copy, Debug)]
enum Doing {
    Nothing,
    Read { given: usize },
    Write { group: Group, parts: [Part; MAX_MEMBERS] },
}

/// Who has asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    Owner(u64),
    /// A read whose pages are worked out from this shard, among others.
    Decoding(Key, usize),
}

/// What has become of a shard in a decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShardState {
    Unasked,
    Asked(Key),
    Come,
    Zeros,
    Failed,
}

/// The pages of a read, being worked out from the same pages of other shards.
#[derive(Debug)]
struct Decoding {
    /// That of the read's own group. A stripe that is made plain gives each of its groups another one.
    generation: Generation,
    /// Where in the read's list of pages it begins.
    from: usize,
    began: Duration,
    wanted: usize,
    needed: usize,
    shards: Vec<ShardState>,
    /// Who has sent pages that have gone bad. Others may have the same shards.
    damaged_at: Vec<Place>,
}

impl Decoding {
    /// Who of a shard's group is left to be asked for it.
    fn left_of(&self, mut group: Group) -> Group {
        self.damaged_at.iter().for_each(|place| group.remove(*place));
        group
    }

    /// How many shards are there.
    fn known(&self) -> usize {
        let is_known = |state: &&ShardState| matches!(state, ShardState::Come | ShardState::Zeros);
        self.shards.iter().filter(is_known).count()
    }

    /// How many are still to be asked.
    fn missing(&self) -> usize {
        let is_asked = |state: &&ShardState| matches!(state, ShardState::Asked(_));
        self.needed.saturating_sub(self.known() + self.shards.iter().filter(is_asked).count())
    }
}

/// What pages are to be worked out from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The caller's token.
    pub token: u64,
    /// The segment.
    pub segment: u64,
    /// Where in the read's list of pages those begin that are to be handed over.
    pub from: usize,
    /// How many of the decoding's pages stand before these.
    pub skip: usize,
    /// How many pages there are with those.
    pub count: usize,
    /// The shard that is to be worked out.
    pub wanted: usize,
    /// Shards that have come.
    pub come: Vec<usize>,
    /// Shards that are zeros.
    pub zeros: Vec<usize>,
    /// Shards of the stripe.
    pub shards: usize,
}

/// The lists stay with the entry, so that its next request allocates nothing.
#[derive(Debug)]
struct Entry {
    serial: u32,
    asker: Asker,
    segment: u64,
    doing: Doing,
    /// What is read.
    pages: Vec<u32>,
    /// Of a read: at most two, the first one and a hedge.
    attempts: Vec<Attempt>,
    /// Of a read: members that were asked and failed.
    tried: Vec<Place>,
    decoding: Option<Box<Decoding>>,
    /// How often one was begun.
    decodings: u8,
}

/// A write that is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writing {
    key: Key,
    /// The group that it is for.
    pub group: Group,
}

/// All requests of one lane.
#[derive(Debug)]
pub struct Requests {
    /// What they have under way. Connections are told of here.
    pub flights: Flights,
    entries: Vec<Entry>,
    free: Vec<u32>,
    latencies: Latencies,
    /// Reads that another member may be asked for as well, with when.
    hedges: VecDeque<(Key, Duration)>,
    ends: VecDeque<End>,
    failover: Duration,
}

impl Requests {
    /// A lane with nothing under way. `failover` is how long a donor may be silent before others that
    /// have the same pages take its place.
    pub fn new(limits: Limits, failover: Duration) -> Requests {
        Requests {
            flights: Flights::new(limits),
            entries: Vec::new(),
            free: Vec::new(),
            latencies: Latencies::default(),
            hedges: VecDeque::new(),
            ends: VecDeque::new(),
            failover,
        }
    }

    /// Requests whose end has not been reported.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len() + self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a request of so many pages may be entered, of which so many copies go out.
    pub fn has_room(&self, pages: usize, copies: usize) -> bool {
        self.len() + self.flights.len() + copies < MAX_REQUESTS
            && self.flights.has_room(pages * copies)
    }

    /// Enters a read of some pages of a segment, which the group holds. Donors in `avoid` are not
    /// asked, unless there is nobody else, and the pages cannot be worked out either. Returns the donor
    /// that it is to be sent to; none if there are several, or none.
    pub fn read(
        &mut self,
        token: u64,
        (segment, group): (u64, &Group),
        pages: impl ExactSizeIterator<Item = u32>,
        avoid: &[DonorIndex],
        groups: &mut dyn Groups,
        now: Duration,
    ) -> Option<DonorIndex> {
        let key = self.enter(Asker::Owner(token), segment, Doing::Read { given: 0 });
        let entry = &mut self.entries[key.index as usize];
        entry.pages.extend(pages);
        let mut others = *group;
        for member in avoid.iter().filter_map(|donor| group.at(*donor)) {
            others.remove(member.place);
            entry.tried.push(member.place);
        }
        if others.whole().next().is_none() {
            if group.form == Form::Coded && self.decode(key, groups, now) {
                return None;
            }
            others = *group;
            self.entries[key.index as usize].tried.clear();
        }
        let Some(place) = self.best_of(&others, now) else {
            let (place, cause) = (NOWHERE, Cause::Unreachable);
            self.ends.push_back(End::Failed { token, from: 0, segment, place, cause });
            self.leave(key);
            return None;
        };
        self.attempt(key, place, now);
        if group.form == Form::Coded && self.flights.is_down(place.donor, now, self.failover) {
            self.decode(key, groups, now);
            return None;
        }
        // Reads that were answered long ago stay in the queue until they would have been due.
        if group.whole().nth(1).is_some() && self.hedges.len() < MAX_REQUESTS {
            self.hedges.push_back((key, now + self.latencies.hedge_after(place.donor)));
        }
        Some(place.donor)
    }

    /// Enters a write to a group. Each of [`Requests::unsent`] is to be sent, or given up.
    pub fn write(&mut self, token: u64, segment: u64, group: Group) -> Writing {
        let doing = Doing::Write { group, parts: [Part::Unsent; MAX_MEMBERS] };
        Writing { key: self.enter(Asker::Owner(token), segment, doing), group }
    }

    /// Members that a write has not been sent to yet.
    pub fn unsent(&self, writing: &Writing) -> impl Iterator<Item = Place> + use<> {
        let parts = match self.doing(writing.key) {
            Doing::Write { parts, .. } => parts,
            Doing::Read { .. } | Doing::Nothing => [Part::Stored; MAX_MEMBERS],
        };
        let group = writing.group;
        (0..group.members().len())
            .filter(move |at| parts[*at] == Part::Unsent)
            .map(move |at| group.members()[at].place)
    }

    /// The write goes to this member right now, on its open connection.
    pub fn sending(
        &mut self,
        writing: &Writing,
        place: Place,
        page_count: usize,
        now: Duration,
    ) -> Slot {
        let segment = self.entries[writing.key.index as usize].segment;
        let token = writing.key.token();
        let slot = self.flights.write(token, segment, place, page_count, now);
        self.set_part(writing, place, Part::Sent(slot));
        slot
    }

    /// It could not be sent after all.
    pub fn retract(&mut self, writing: &Writing, place: Place, slot: Slot) {
        self.flights.retract(slot);
        self.set_part(writing, place, Part::Unsent);
    }

    /// The write is not going to be sent to this member.
    pub fn give_up(&mut self, writing: &Writing, place: Place, cause: Cause) {
        let part = match cause {
            Cause::Unreachable => Part::GivenUp,
            cause => Part::Failed(cause),
        };
        self.set_part(writing, place, part);
    }

    /// The write was sent to nobody and is not going to be: it never was.
    pub fn forget(&mut self, writing: &Writing) {
        self.leave(writing.key);
    }

    /// Whether the write was sent to anybody.
    pub fn is_sent(&self, writing: &Writing) -> bool {
        match self.doing(writing.key) {
            Doing::Write { parts, .. } => {
                parts.iter().any(|part| matches!(part, Part::Sent(_) | Part::Stored))
            }
            _ => false,
        }
    }

    /// Nothing of the write is left to send: its end follows from what becomes of the parts.
    pub fn sent(&mut self, writing: &Writing, groups: &mut dyn Groups, now: Duration) {
        self.judge(writing.key, groups, now);
    }

    /// Pages have come for a flight: so many, `from` being where they begin in what was sent last.
    pub fn pages(
        &mut self,
        slot: Slot,
        from: usize,
        count: usize,
        now: Duration,
    ) -> Option<Delivery> {
        let (token, begin) = self.flights.pages(slot, from, count, now)?;
        let key = Key::of_token(token);
        let entry = &mut self.entries[key.index as usize];
        debug_assert_eq!(entry.serial, key.serial, "a flight without its request");
        let Doing::Read { given } = &mut entry.doing else { return None };
        let attempt = *entry.attempts.iter().find(|attempt| attempt.slot == slot)?;
        let first = attempt.from + begin;
        // Each attempt begins at or before what is still missing, and brings its pages in order.
        let skip = given.saturating_sub(first).min(count);
        let to = match entry.asker {
            Asker::Owner(token) => Recipient::Owner(token),
            Asker::Decoding(of, shard) => {
                Recipient::Decoding { decoding: of.token(), shard, place: attempt.place }
            }
        };
        let delivery = Delivery { to, from: first + skip, skip };
        let asked = entry.pages.len();
        if first + count == asked {
            self.latencies.answered(attempt.place.donor, now.saturating_sub(attempt.asked));
        }
        if skip == count {
            return None;
        }
        *given = first + count;
        if *given == asked {
            for other in entry.attempts.iter().filter(|other| other.slot != slot) {
                self.flights.abandon(other.slot);
            }
            let asker = entry.asker;
            self.stop_decoding(key);
            self.leave(key);
            if let Asker::Decoding(of, shard) = asker {
                self.shard_came(of, shard);
            }
        }
        Some(delivery)
    }

    /// A member has stored its part of a write.
    pub fn written(&mut self, slot: Slot, groups: &mut dyn Groups, now: Duration) {
        let Some(token) = self.flights.written(slot) else { return };
        let key = Key::of_token(token);
        self.replace_part(key, slot, Part::Stored);
        self.judge(key, groups, now);
    }

    /// What the flights have failed at, and what follows from the clock and from connections that
    /// broke. To be called after anything was told to [`Requests::flights`]. True if others may have been
    /// asked for what has failed: there may be something to send.
    pub fn settle(&mut self, groups: &mut dyn Groups, now: Duration) -> bool {
        let any = self.flights.has_failures();
        while let Some(failure) = self.flights.next_failure() {
            self.failed(failure, groups, now);
        }
        any
    }

    /// A donor's connection has broken, or it has been silent: what others have too is asked of them.
    pub fn fail_over(&mut self, donor: DonorIndex, groups: &mut dyn Groups, now: Duration) {
        // A flight that has failed has no slot any more, and its request does not know that yet.
        self.settle(groups, now);
        for index in 0..self.entries.len() as u32 {
            let entry = &self.entries[index as usize];
            let key = Key { index, serial: entry.serial };
            match entry.doing {
                Doing::Read { .. } => {
                    let mut attempts = entry.attempts.iter();
                    let at_donor = attempts.find(|attempt| attempt.place.donor == donor);
                    let Some(attempt) = at_donor.copied() else { continue };
                    let is_asked_elsewhere = entry.attempts.len() > 1;
                    let asker = entry.asker;
                    if is_asked_elsewhere || self.read_elsewhere(key, Whom::Reachable, groups, now)
                    {
                        let entry = &mut self.entries[index as usize];
                        entry.attempts.retain(|other| other.slot != attempt.slot);
                        // Or it could go to and fro between donors that are all away, for ever.
                        for other in &entry.attempts {
                            self.flights.waits_as_long_as(other.slot, attempt.slot);
                        }
                        self.flights.abandon(attempt.slot);
                        continue;
                    }
                    match asker {
                        // The donor may be back before the others have answered.
                        Asker::Owner(_) => _ = self.decode(key, groups, now),
                        Asker::Decoding(of, shard) => {
                            self.replace_shard(of, shard, groups, now);
                        }
                    }
                }
                Doing::Write { .. } => self.judge(key, groups, now),
                Doing::Nothing => {}
            }
        }
    }

    /// Asks other members for the reads that take longer than usual.
    pub fn hedge(&mut self, groups: &mut dyn Groups, now: Duration) {
        self.settle(groups, now);
        while let Some((key, due)) = self.hedges.front().copied() {
            let is_over = !matches!(self.doing(key), Doing::Read { .. });
            if !is_over && due > now {
                return;
            }
            self.hedges.pop_front();
            if !is_over && self.entries[key.index as usize].attempts.len() == 1 {
                self.read_elsewhere(key, Whom::Reachable, groups, now);
            }
        }
    }

    /// When [`Requests::hedge`] is to be called next.
    pub fn next_hedge(&self) -> Option<Duration> {
        self.hedges.front().map(|(_, due)| *due)
    }

    /// An end to report, if there is one.
    pub fn next_end(&mut self) -> Option<End> {
        self.ends.pop_front()
    }

    /// Whether there are ends to report.
    pub fn has_ends(&self) -> bool {
        !self.ends.is_empty()
    }

    fn failed(&mut self, failure: Failure, groups: &mut dyn Groups, now: Duration) {
        let Failure { slot, token, segment, place, cause, .. } = failure;
        if cause == Cause::Lost {
            groups.gone(segment, place);
        }
        let key = Key::of_token(token);
        match self.doing(key) {
            Doing::Read { given: from } => {
                let entry = &mut self.entries[key.index as usize];
                let asker = entry.asker;
                entry.attempts.retain(|attempt| attempt.slot != slot);
                entry.tried.push(place);
                if !entry.attempts.is_empty() || self.read_elsewhere(key, Whom::Anyone, groups, now)
                {
                    return;
                }
                let token = match asker {
                    Asker::Owner(token) => token,
                    Asker::Decoding(of, shard) => {
                        self.leave(key);
                        return self.shard_failed(of, (shard, ShardState::Failed), groups, now);
                    }
                };
                if cause != Cause::Fenced && self.decode(key, groups, now) {
                    return;
                }
                self.stop_decoding(key);
                // Somebody who has not answered may still have it, or it follows from the rest of its
                // stripe, though not within so many decodings.
                let (place, cause) = match groups.whereabouts(segment) {
                    Whereabouts::Held(group) if cause == Cause::Lost => {
                        (group.whole().next().unwrap_or(NOWHERE), Cause::Unreachable)
                    }
                    _ => (place, cause),
                };
                self.ends.push_back(End::Failed { token, from, segment, place, cause });
                self.leave(key);
            }
            Doing::Write { .. } => {
                self.replace_part(key, slot, Part::Failed(cause));
                self.judge(key, groups, now);
            }
            Doing::Nothing => {}
        }
    }

    /// Asks a member that has not been asked yet for what a read still lacks.
    fn read_elsewhere(
        &mut self,
        key: Key,
        whom: Whom,
        groups: &mut dyn Groups,
        now: Duration,
    ) -> bool {
        let entry = &self.entries[key.index as usize];
        let Whereabouts::Held(mut group) = groups.whereabouts(entry.segment) else { return false };
        let asked = entry.attempts.iter().map(|attempt| &attempt.place).chain(&entry.tried);
        asked.for_each(|place| group.remove(*place));
        if whom == Whom::Reachable {
            let is_hopeless =
                |place: &Place| !self.flights.may_answer(place.donor, now, self.failover);
            let hopeless: Vec<Place> = group.whole().filter(is_hopeless).collect();
            hopeless.into_iter().for_each(|place| group.remove(place));
        }
        let Some(place) = self.best_of(&group, now) else { return false };
        self.attempt(key, place, now);
        true
    }

    /// Has a read's pages worked out from other shards of its stripe, as well as what was asked for
    /// already. False if that cannot be done.
    fn decode(&mut self, key: Key, groups: &mut dyn Groups, now: Duration) -> bool {
        let entry = &self.entries[key.index as usize];
        let (Doing::Read { given }, Asker::Owner(_)) = (entry.doing, entry.asker) else {
            return false;
        };
        if entry.decoding.is_some() || entry.decodings == MAX_DECODINGS {
            return entry.decoding.is_some();
        }
        let segment = entry.segment;
        let Whereabouts::Held(group) = groups.whereabouts(segment) else { return false };
        let Some(shards) = groups.shards(segment) else { return false };
        let Shards { wanted, needed, all } = shards;
        let mut states = vec![ShardState::Unasked; all.len()];
        states[wanted] = ShardState::Failed;
        for (state, (_, at)) in states.iter_mut().zip(&all) {
            if *at == Whereabouts::Nowhere {
                *state = ShardState::Zeros;
            }
        }
        let generation = group.generation;
        let (from, began) = (given, now);
        let (shards, damaged_at) = (states, Vec::new());
        let decoding = Decoding { generation, from, began, wanted, needed, shards, damaged_at };
        let entry = &mut self.entries[key.index as usize];
        entry.decoding = Some(Box::new(decoding));
        entry.decodings += 1;
        self.ask_shards(key, &all, now)
    }

    /// Asks as many shards as are still needed, those first whose donors can be counted on. If there are not enough, the
    /// decoding is over; false then.
    fn ask_shards(&mut self, key: Key, all: &[(u64, Whereabouts)], now: Duration) -> bool {
        for hope in [Hope::Good, Hope::Fair, Hope::None] {
            for (shard, (segment, at)) in all.iter().enumerate() {
                let Some(decoding) = &self.entries[key.index as usize].decoding else {
                    return false;
                };
                let (left, from, began) = (decoding.missing(), decoding.from, decoding.began);
                let is_unasked = decoding.shards[shard] == ShardState::Unasked;
                let Whereabouts::Held(group) = *at else { continue };
                let (group, damaged_at) = (decoding.left_of(group), decoding.damaged_at.clone());
                let Some(place) = self.best_of(&group, now).filter(|_| is_unasked && left > 0)
                else {
                    continue;
                };
                if self.hope_of(place, now) != hope {
                    continue;
                }
                let asker = Asker::Decoding(key, shard);
                let part = self.enter(asker, *segment, Doing::Read { given: 0 });
                self.entries[part.index as usize].tried.extend(damaged_at);
                let pages = self.entries[key.index as usize].pages[from..].to_vec();
                self.entries[part.index as usize].pages.extend(pages);
                self.attempt(part, place, now);
                // Shards may take each other's places, but not for ever.
                if let Some(attempt) = self.entries[part.index as usize].attempts.last() {
                    self.flights.waits_since(attempt.slot, began);
                }
                if let Some(decoding) = &mut self.entries[key.index as usize].decoding {
                    decoding.shards[shard] = ShardState::Asked(part);
                }
            }
        }
        let entry = &self.entries[key.index as usize];
        match entry.decoding.as_ref().map(|decoding| decoding.missing()) {
            Some(0) => {
                self.finish_decoding(key);
                true
            }
            _ => {
                self.stop_decoding(key);
                false
            }
        }
    }

    fn hope_of(&self, place: Place, now: Duration) -> Hope {
        let may_answer = self.flights.may_answer(place.donor, now, self.failover);
        match self.flights.is_down(place.donor, now, self.failover) {
            _ if !may_answer => Hope::None,
            true => Hope::Fair,
            false => Hope::Good,
        }
    }

    /// If all shards have come that a decoding needs, it is to be taken.
    fn finish_decoding(&mut self, key: Key) {
        let Some(decoding) = &self.entries[key.index as usize].decoding else { return };
        if decoding.known() >= decoding.needed {
            self.ends.push_back(End::Decoded { decoding: key.token() });
        }
    }

    fn shard_came(&mut self, of: Key, shard: usize) {
        if let Some(decoding) = self.decoding_mut(of) {
            decoding.shards[shard] = ShardState::Come;
            self.finish_decoding(of);
        }
    }

    /// A shard cannot be had. Another one takes its place; if there is none, and nobody else is waited
    /// for, the read fails: as lost, if it is for one page only, which has gone bad in too many shards. Of
    /// several pages, others may be had by themselves.
    fn shard_failed(
        &mut self,
        of: Key,
        (shard, state): (usize, ShardState),
        groups: &mut dyn Groups,
        now: Duration,
    ) {
        let Some(decoding) = self.decoding_mut(of) else { return };
        decoding.shards[shard] = state;
        let is_damaged = !decoding.damaged_at.is_empty();
        let segment = self.entries[of.index as usize].segment;
        let shards = groups.shards(segment);
        if shards.is_some_and(|shards| self.ask_shards(of, &shards.all, now)) {
            return;
        }
        self.stop_decoding(of);
        let entry = &self.entries[of.index as usize];
        let (Doing::Read { given: from }, Asker::Owner(token)) = (entry.doing, entry.asker) else {
            return;
        };
        if entry.attempts.is_empty() {
            // What was to be avoided is better than nothing: who asked knows what it is worth.
            if is_damaged {
                self.entries[of.index as usize].tried.clear();
                if self.read_elsewhere(of, Whom::Anyone, groups, now) {
                    return;
                }
                // It may have gone bad on its way, and be sound where it is.
                if self.decode(of, groups, now) {
                    return;
                }
            }
            let entry = &self.entries[of.index as usize];
            let cause = match groups.whereabouts(segment) {
                Whereabouts::Lost(_) => Cause::Lost,
                _ if is_damaged && entry.pages.len() == 1 => Cause::Lost,
                Whereabouts::Held(_) | Whereabouts::Nowhere => Cause::Unreachable,
            };
            let place = NOWHERE;
            self.ends.push_back(End::Failed { token, from, segment, place, cause });
            self.leave(of);
        }
    }

    /// A shard is waited for in vain. Another one takes its place, if there is one that can be counted
    /// on.
    fn replace_shard(&mut self, of: Key, shard: usize, groups: &mut dyn Groups, now: Duration) {
        let segment = self.entries[of.index as usize].segment;
        let Some(Shards { all, .. }) = groups.shards(segment) else { return };
        let Some(decoding) = self.decoding_mut(of) else { return };
        let ShardState::Asked(part) = decoding.shards[shard] else { return };
        let is_unasked = |at: &usize| decoding.shards[*at] == ShardState::Unasked;
        let held = (0..all.len()).filter(is_unasked).filter_map(|at| match all[at].1 {
            Whereabouts::Held(group) => Some(decoding.left_of(group)),
            Whereabouts::Nowhere | Whereabouts::Lost(_) => None,
        });
        let unasked: Vec<Group> = held.collect();
        let has_other = unasked.iter().any(|group| {
            let place = self.best_of(group, now);
            place.is_some_and(|place| self.hope_of(place, now) != Hope::None)
        });
        if has_other && let Some(decoding) = self.decoding_mut(of) {
            decoding.shards[shard] = ShardState::Failed;
            self.drop_part(part);
            self.ask_shards(of, &all, now);
        }
        // It may be back before another one that has taken its place is known to be away.
        if has_other && let Some(decoding) = self.decoding_mut(of) {
            decoding.shards[shard] = ShardState::Unasked;
        }
    }

    /// A page of a shard came from there, and is not what its donor keeps a sum of: others are asked, who have
    /// the same shard or another one.
    pub fn shard_is_damaged(
        &mut self,
        decoding: u64,
        (shard, place): (usize, Place),
        groups: &mut dyn Groups,
        now: Duration,
    ) {
        let of = Key::of_token(decoding);
        let Some(decoding) = self.decoding_mut(of) else { return };
        decoding.damaged_at.push(place);
        let known = decoding.shards[shard];
        if let ShardState::Asked(part) = known {
            self.drop_part(part);
        }
        self.shard_failed(of, (shard, ShardState::Unasked), groups, now);
    }

    /// What the pages of a read are to be worked out from, which ends the read. None if it has come to nothing:
    /// the read has ended otherwise, or the stripe has been made plain meanwhile, and it is read again.
    pub fn take_decoded(
        &mut self,
        decoding: u64,
        groups: &mut dyn Groups,
        now: Duration,
    ) -> Option<Decoded> {
        let key = Key::of_token(decoding);
        let Decoding { generation, from, wanted, needed, ref shards, .. } =
            *self.decoding_mut(key)?;
        let which = |state| (0..shards.len()).filter(|at| shards[*at] == state).collect();
        let (come, zeros): (Vec<usize>, Vec<usize>) =
            (which(ShardState::Come), which(ShardState::Zeros));
        if come.len() + zeros.len() < needed {
            return None;
        }
        let shards = shards.len();
        self.stop_decoding(key);
        let entry = &self.entries[key.index as usize];
        let (Doing::Read { given }, Asker::Owner(token)) = (entry.doing, entry.asker) else {
            return None;
        };
        let segment = entry.segment;
        let is_as_before = match groups.whereabouts(segment) {
            Whereabouts::Held(group) => group.form == Form::Coded && group.generation == generation,
            Whereabouts::Nowhere | Whereabouts::Lost(_) => false,
        };
        if !is_as_before {
            self.entries[key.index as usize].tried.clear();
            let is_asked = !self.entries[key.index as usize].attempts.is_empty()
                || self.read_elsewhere(key, Whom::Anyone, groups, now)
                || self.decode(key, groups, now);
            if !is_asked {
                let (place, cause) = (NOWHERE, Cause::Unreachable);
                self.ends.push_back(End::Failed { token, from: given, segment, place, cause });
                self.leave(key);
            }
            return None;
        }
        let (skip, count) = (given - from, entry.pages.len() - given);
        for attempt in &entry.attempts {
            self.flights.abandon_if_of(attempt.slot, key.token());
        }
        self.leave(key);
        Some(Decoded { token, segment, from: given, skip, count, wanted, come, zeros, shards })
    }

    /// Whether a decoding is under way: what has come for others is of no use.
    pub fn is_decoding(&self, decoding: u64) -> bool {
        let key = Key::of_token(decoding);
        matches!(self.doing(key), Doing::Read { .. })
            && self.entries[key.index as usize].decoding.is_some()
    }

    fn decoding_mut(&mut self, key: Key) -> Option<&mut Decoding> {
        match self.entries.get_mut(key.index as usize) {
            Some(entry) if entry.serial == key.serial => entry.decoding.as_deref_mut(),
            _ => None,
        }
    }

    fn stop_decoding(&mut self, key: Key) {
        let decoding = self.entries[key.index as usize].decoding.take();
        for shard in decoding.iter().flat_map(|decoding| &decoding.shards) {
            if let ShardState::Asked(part) = *shard {
                self.drop_part(part);
            }
        }
    }

    fn drop_part(&mut self, part: Key) {
        if let Doing::Read { .. } = self.doing(part) {
            for attempt in &self.entries[part.index as usize].attempts {
                self.flights.abandon_if_of(attempt.slot, part.token());
            }
            self.leave(part);
        }
    }

    fn attempt(&mut self, key: Key, place: Place, now: Duration) {
        let entry = &mut self.entries[key.index as usize];
        let Doing::Read { given: from } = entry.doing else { return };
        let missing = entry.pages[from..].iter().copied();
        let slot = self.flights.read(key.token(), entry.segment, place, missing, now);
        entry.attempts.push(Attempt { slot, place, from, asked: now });
    }

    /// The whole member to read from: one that can be counted on, if there is one.
    fn best_of(&mut self, group: &Group, now: Duration) -> Option<Place> {
        let mut places = [None; MAX_MEMBERS];
        let mut count = 0;
        for is_down in [false, true] {
            for place in group.whole() {
                if self.flights.is_down(place.donor, now, self.failover) == is_down {
                    places[count] = Some(place);
                    count += 1;
                }
            }
            if count > 0 {
                break;
            }
        }
        let mut donors = [(DonorIndex::UNKNOWN, 0); MAX_MEMBERS];
        for (at, place) in places.iter().flatten().enumerate() {
            donors[at] = (place.donor, self.flights.queue_at(place.donor));
        }
        places[self.latencies.best(&donors[..count])?]
    }

    /// Ends a write if its end is certain, and lets a member go that holds it up.
    fn judge(&mut self, key: Key, groups: &mut dyn Groups, now: Duration) {
        let Doing::Write { group: asked, mut parts } = self.doing(key) else { return };
        let Entry { segment, asker, .. } = self.entries[key.index as usize];
        let Asker::Owner(token) = asker else { return };
        let part_of = |parts: &[Part; MAX_MEMBERS], place: Place| {
            let at = asked.members().iter().position(|member| member.place == place);
            at.map(|at| parts[at])
        };
        if parts[..asked.members().len()].contains(&Part::Unsent) {
            return;
        }
        if let Whereabouts::Held(group) = groups.whereabouts(segment) {
            let is_safe = group.whole().any(|place| part_of(&parts, place) == Some(Part::Stored));
            for (at, member) in asked.members().iter().enumerate() {
                let Part::Sent(slot) = parts[at] else { continue };
                let is_down = self.flights.is_down(member.place.donor, now, self.failover);
                // Who has left the group already need not be waited for either.
                let is_out = !group.contains(member.place);
                if is_safe && is_down && (is_out || groups.desert(segment, member.place)) {
                    self.flights.abandon(slot);
                    parts[at] = Part::Failed(Cause::Interrupted);
                }
            }
            for (at, member) in asked.members().iter().enumerate() {
                let is_away = matches!(parts[at], Part::Failed(Cause::Unreachable) | Part::GivenUp);
                if is_safe && is_away && groups.desert(segment, member.place) {
                    parts[at] = Part::Failed(Cause::Interrupted);
                }
            }
        }
        if let Doing::Write { parts: kept, .. } = self.doing_mut(key) {
            *kept = parts;
        }
        if parts.iter().any(|part| matches!(part, Part::Sent(_))) {
            return;
        }
        let whereabouts = groups.whereabouts(segment);
        // Also those that have left since, or they would be as good as the others by their generation.
        let is_with_all = parts[..asked.members().len()].iter().all(|part| *part == Part::Stored);
        let end = match whereabouts {
            Whereabouts::Held(group)
                if is_with_all && group.members().iter().all(|m| asked.contains(m.place)) =>
            {
                End::Written { token, generation: asked.generation }
            }
            _ => {
                let (place, cause) = worst(&asked, &parts, whereabouts);
                End::Failed { token, from: 0, segment, place, cause }
            }
        };
        // One that may still land is under way for good: it keeps the segment from being coded.
        let may_land = parts.contains(&Part::Failed(Cause::Unreachable));
        if !may_land || !matches!(end, End::Failed { cause: Cause::Unreachable, .. }) {
            groups.write_ends(segment);
        }
        self.ends.push_back(end);
        self.leave(key);
    }

    fn enter(&mut self, asker: Asker, segment: u64, doing: Doing) -> Key {
        let Some(index) = self.free.pop() else {
            let (pages, attempts, tried) = Default::default();
            let (serial, decoding, decodings) = (0, None, 0);
            let entry = Entry {
                serial,
                asker,
                segment,
                doing,
                pages,
                attempts,
                tried,
                decoding,
                decodings,
            };
            self.entries.push(entry);
            return Key { index: self.entries.len() as u32 - 1, serial: 0 };
        };
        let entry = &mut self.entries[index as usize];
        entry.serial = entry.serial.wrapping_add(1);
        (entry.asker, entry.segment, entry.doing) = (asker, segment, doing);
        entry.pages.clear();
        entry.attempts.clear();
        entry.tried.clear();
        entry.decodings = 0;
        Key { index, serial: entry.serial }
    }

    fn leave(&mut self, key: Key) {
        self.entries[key.index as usize].doing = Doing::Nothing;
        self.free.push(key.index);
    }

    fn doing(&self, key: Key) -> Doing {
        match self.entries.get(key.index as usize) {
            Some(entry) if entry.serial == key.serial => entry.doing,
            _ => Doing::Nothing,
        }
    }

    fn doing_mut(&mut self, key: Key) -> &mut Doing {
        let entry = &mut self.entries[key.index as usize];
        debug_assert_eq!(entry.serial, key.serial, "a flight without its request");
        &mut entry.doing
    }

    fn set_part(&mut self, writing: &Writing, place: Place, part: Part) {
        let at = writing.group.members().iter().position(|member| member.place == place);
        if let (Some(at), Doing::Write { parts, .. }) = (at, self.doing_mut(writing.key)) {
            parts[at] = part;
        }
    }

    fn replace_part(&mut self, key: Key, slot: Slot, part: Part) {
        if let Doing::Write { parts, .. } = self.doing_mut(key)
            && let Some(known) = parts.iter_mut().find(|known| **known == Part::Sent(slot))
        {
            *known = part;
        }
    }
}

/// Most decodings that are begun for one read. It fails after that, and its owner decides.
const MAX_DECODINGS: u8 = 3;

/// Where a segment is that has no member left.
const NOWHERE: Place = Place { donor: DonorIndex::UNKNOWN, boot: 0, extent: ExtentId(0) };

#[cfg(test)]
mod tests;
