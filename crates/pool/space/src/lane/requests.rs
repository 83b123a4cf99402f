//! Splits each request of a lane's caller into flights and decides its outcome.
//!
//! Decisions only: [`Groups`] tells where segments are, and changes their groups.
//!
//! - A *write* goes to all members of the segment's group at once. It is stored when all of them
//!   have acknowledged it, unless a member joined meanwhile, which lacks the write. A member that
//!   is down leaves the group if another whole member has the write, so that no write waits for it.
//!   The write then fails as interrupted. Written again, it brings the group's new generation to
//!   the members that stay.
//! - A *read* goes to the best whole member. Another member is asked too when the answer takes
//!   longer than usual (Dean and Barroso, "The Tail at Scale", 2013), and at once when the
//!   connection breaks. "Usual" is measured per member. The first copy of a page to arrive counts.
//! - A read of a segment in a coded stripe goes to its one member. If that member is lost, silent,
//!   or has sent a damaged page, the read asks other shards for the same pages. It needs as many
//!   shards as the stripe has segments. The lane decodes the pages. The first arrival counts.
//!
//! So a write that failed, or whose outcome is unknown, may be with some members only. It must be
//! written again before its pages are read from the pool.

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
    /// Records that an entered write can no longer land in the segment's group.
    fn write_ends(&mut self, segment: u64);
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All pages of the write are stored.
    Written {
        /// The caller's token.
        token: u64,
        /// Every member has this generation or a later one.
        generation: Generation,
    },
    /// Enough other shards of the stripe arrived to decode a read's pages. The caller must call
    /// [`Requests::take_decoded`].
    Decoded {
        /// The decoding.
        decoding: u64,
    },
    /// The request failed, from page `from` of its list on.
    Failed {
        /// The caller's token.
        token: u64,
        /// Index in the request's pages where the failure begins; earlier pages were delivered.
        from: usize,
        /// The segment.
        segment: u64,
        /// The extent that was asked last.
        place: Place,
        /// Why the request failed.
        cause: Cause,
    },
}

/// Receiver of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// The caller: this is the token of its read.
    Owner(u64),
    /// A decoding, which makes the pages of another shard from them.
    Decoding {
        /// The decoding.
        decoding: u64,
        /// Index of the shard that the pages belong to.
        shard: usize,
        /// The extent that the pages came from.
        place: Place,
    },
}

/// Pages that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Receiver of the pages.
    pub to: Recipient,
    /// Index in the request's pages of the first new page.
    pub from: usize,
    /// Number of the arrived pages that the receiver already has; they come first.
    pub skip: usize,
}

/// An in-flight request. Anything with the serial of an earlier request is ignored.
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

/// Members that a read may go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    /// Members that may answer: the read waits for another member as well.
    Reachable,
    /// All members: the read waits for no other member.
    Anyone,
}

/// Chance that a donor answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hope {
    /// The donor is not down.
    Good,
    /// The connection broke, and no request has needed another one since.
    Fair,
    /// The donor has been silent for the failover time, or its last attempt to connect failed.
    None,
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    slot: Slot,
    place: Place,
    /// Index in the request's pages where the attempt begins.
    from: usize,
    asked: Duration,
}

#[derive(Clone, Copy, Debug)]
enum Doing {
    Nothing,
    Read { given: usize },
    Write { group: Group, parts: [Part; MAX_MEMBERS] },
}

/// Origin of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    Owner(u64),
    /// A read whose pages are decoded from this shard, among others.
    Decoding(Key, usize),
}

/// State of one shard in a decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShardState {
    Unasked,
    Asked(Key),
    Come,
    Zeros,
    Failed,
}

/// Decoding of a read's pages from the same pages of other shards.
#[derive(Debug)]
struct Decoding {
    /// Generation of the read's group. A stripe that turns plain changes it for each of its groups.
    generation: Generation,
    /// Index in the read's pages where the decoding begins.
    from: usize,
    began: Duration,
    wanted: usize,
    needed: usize,
    shards: Vec<ShardState>,
    /// Extents that sent damaged pages. Other extents may hold the same shards.
    damaged_at: Vec<Place>,
}

impl Decoding {
    /// A shard's group without the members that sent damaged pages.
    fn left_of(&self, mut group: Group) -> Group {
        self.damaged_at.iter().for_each(|place| group.remove(*place));
        group
    }

    /// Number of shards that arrived or are zeros.
    fn known(&self) -> usize {
        let is_known = |state: &&ShardState| matches!(state, ShardState::Come | ShardState::Zeros);
        self.shards.iter().filter(is_known).count()
    }

    /// Number of shards that must still be asked for.
    fn missing(&self) -> usize {
        let is_asked = |state: &&ShardState| matches!(state, ShardState::Asked(_));
        self.needed.saturating_sub(self.known() + self.shards.iter().filter(is_asked).count())
    }
}

/// Input for decoding a read's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The caller's token.
    pub token: u64,
    /// The segment.
    pub segment: u64,
    /// Index in the read's pages of the first page to deliver.
    pub from: usize,
    /// Number of the decoding's pages before that page.
    pub skip: usize,
    /// Number of pages to deliver.
    pub count: usize,
    /// Index of the shard to decode.
    pub wanted: usize,
    /// Indices of the shards that arrived.
    pub come: Vec<usize>,
    /// Indices of the shards that are zeros.
    pub zeros: Vec<usize>,
    /// Number of shards in the stripe.
    pub shards: usize,
}

/// The lists stay with the entry, so that its next request allocates nothing.
#[derive(Debug)]
struct Entry {
    serial: u32,
    asker: Asker,
    segment: u64,
    doing: Doing,
    /// Pages of the extent to read.
    pages: Vec<u32>,
    /// A read has at most two: the first one and a hedge.
    attempts: Vec<Attempt>,
    /// Members that a read asked in vain, or must avoid.
    tried: Vec<Place>,
    decoding: Option<Box<Decoding>>,
    /// Number of decodings begun.
    decodings: u8,
}

/// A write that is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writing {
    key: Key,
    /// The group to write to.
    pub group: Group,
}

/// All requests of one lane.
#[derive(Debug)]
pub struct Requests {
    /// In-flight requests per donor. The caller reports connection events here.
    pub flights: Flights,
    entries: Vec<Entry>,
    free: Vec<u32>,
    latencies: Latencies,
    /// Reads that another member may be asked for as well, with the time to ask.
    hedges: VecDeque<(Key, Duration)>,
    ends: VecDeque<End>,
    failover: Duration,
}

impl Requests {
    /// A lane without requests. After a donor is silent for `failover`, other donors with the same
    /// pages take its place.
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

    /// Number of requests whose outcome has not been reported.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len() + self.ends.len()
    }

    /// Whether all outcomes have been reported.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a request of `pages` pages may be entered that goes to `copies` members.
    pub fn has_room(&self, pages: usize, copies: usize) -> bool {
        self.len() + self.flights.len() + copies < MAX_REQUESTS
            && self.flights.has_room(pages * copies)
    }

    /// Enters a read of some pages of a segment, which the group holds. Donors in `avoid` are asked
    /// only if no other member is left and the pages cannot be decoded either. Returns the donor to
    /// send the read to; `None` if it goes to several donors or to none.
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

    /// Enters a write to a group. The caller must send each of [`Requests::unsent`], or give it up.
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

    /// Records that the caller sends the write to this member now, on its open connection.
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

    /// Takes back the send to this member, because it failed.
    pub fn retract(&mut self, writing: &Writing, place: Place, slot: Slot) {
        self.flights.retract(slot);
        self.set_part(writing, place, Part::Unsent);
    }

    /// Records that the write will not be sent to this member.
    pub fn give_up(&mut self, writing: &Writing, place: Place, cause: Cause) {
        let part = match cause {
            Cause::Unreachable => Part::GivenUp,
            cause => Part::Failed(cause),
        };
        self.set_part(writing, place, part);
    }

    /// Removes a write that was sent to no member and will not be. It has no outcome.
    pub fn forget(&mut self, writing: &Writing) {
        self.leave(writing.key);
    }

    /// Whether the write was sent to any member.
    pub fn is_sent(&self, writing: &Writing) -> bool {
        match self.doing(writing.key) {
            Doing::Write { parts, .. } => {
                parts.iter().any(|part| matches!(part, Part::Sent(_) | Part::Stored))
            }
            _ => false,
        }
    }

    /// Records that no part of the write is left to send: the parts' outcomes now decide its own.
    pub fn sent(&mut self, writing: &Writing, groups: &mut dyn Groups, now: Duration) {
        self.judge(writing.key, groups, now);
    }

    /// Records that `count` pages of a flight arrived, starting at `from` of the pages sent last.
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
        // Each attempt begins at or before the first missing page, and brings its pages in order.
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

    /// Records that a member stored its part of a write.
    pub fn written(&mut self, slot: Slot, groups: &mut dyn Groups, now: Duration) {
        let Some(token) = self.flights.written(slot) else { return };
        let key = Key::of_token(token);
        self.replace_part(key, slot, Part::Stored);
        self.judge(key, groups, now);
    }

    /// Handles failed flights, also those that the clock or a broken connection has failed. Must be
    /// called after each report to [`Requests::flights`]. True if any flight failed: other members
    /// may have been asked instead, so there may be something to send.
    pub fn settle(&mut self, groups: &mut dyn Groups, now: Duration) -> bool {
        let any = self.flights.has_failures();
        while let Some(failure) = self.flights.next_failure() {
            self.failed(failure, groups, now);
        }
        any
    }

    /// Asks other members instead of a donor that is silent, or whose connection broke.
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
                        // Otherwise the read could alternate for ever between unreachable donors.
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

    /// Time at which [`Requests::hedge`] must be called next.
    pub fn next_hedge(&self) -> Option<Duration> {
        self.hedges.front().map(|(_, due)| *due)
    }

    /// Takes the next outcome to report.
    pub fn next_end(&mut self) -> Option<End> {
        self.ends.pop_front()
    }

    /// Whether outcomes wait to be reported.
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
                // A silent member may still have the page. Or the rest of its stripe gives it,
                // though not within `MAX_DECODINGS` decodings.
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

    /// Asks a member that was not asked yet for the missing pages of a read. False if none is left.
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

    /// Begins to decode a read's pages from other shards of its stripe, beside the attempts in
    /// flight. False if that is impossible.
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

    /// Asks as many shards as are still needed, those first whose donors most likely answer. If too
    /// few are left, ends the decoding and returns false.
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
                // Shards may replace each other, but the wait counts from the first one.
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

    /// Reports a decoding if all shards that it needs have arrived.
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

    /// Replaces a shard that cannot be read. If no other shard is left and no attempt is in flight,
    /// the read fails. It fails as lost if its only page is damaged in too many shards. If it has
    /// several pages, some of them may succeed in reads of their own.
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
            // An avoided member is better than none: the caller knows what its pages are worth.
            if is_damaged {
                self.entries[of.index as usize].tried.clear();
                if self.read_elsewhere(of, Whom::Anyone, groups, now) {
                    return;
                }
                // The page may be damaged on its way only, and sound at its donor.
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

    /// Replaces a shard whose donor is silent, if the donor of another one may answer.
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
        // The shard's donor may be back before the replacement's donor proves unreachable.
        if has_other && let Some(decoding) = self.decoding_mut(of) {
            decoding.shards[shard] = ShardState::Unasked;
        }
    }

    /// Handles a page of a shard that arrived from `place` and does not match its donor's checksum.
    /// Asks other members that have this shard or another one.
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

    /// Ends a read and returns the input for decoding its pages. `None` if the read has ended
    /// otherwise, or if the stripe turned plain meanwhile: then the pages are read again.
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

    /// Whether a decoding is in progress: pages that arrived for any other one are of no use.
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

    /// The best whole member to read from: one whose donor is not down, if any is left.
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

    /// Ends a write if its outcome is certain, and removes members that delay it from the group.
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
                // A write does not wait for a member that has already left the group either.
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
        // Includes members that left since: their generation makes them look as good as the others.
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
        // A write that may still land counts as in flight for ever: the segment is never coded.
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

/// Maximum of decodings that one read begins. After that the read fails, and its caller decides.
const MAX_DECODINGS: u8 = 3;

/// Place of a segment that has no member left.
const NOWHERE: Place = Place { donor: DonorIndex::UNKNOWN, boot: 0, extent: ExtentId(0) };

#[cfg(test)]
mod tests;
