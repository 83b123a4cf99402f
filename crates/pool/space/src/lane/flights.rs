//! What one thread has under way at each of its donors, and what becomes of it when a connection
//! breaks.
//!
//! A flight is one request at one donor. What the owner of a lane asks for may need several:
//! [`requests`](crate::requests).
//!
//! Decisions only, like [`map`](crate::map); the clock comes in as a duration since any fixed
//! moment. The rules:
//!
//! - A *read* changes nothing, so that it is simply sent again on the next connection, from the
//!   first page that is still missing, as long as the donor's life is the one that gave the extent.
//! - A *write* is not kept (its pages were handed to the kernel without a copy), so that it cannot
//!   be sent again from here. Its failure is reported only once the next connection is welcomed:
//!   the donor has then ended the earlier one, and nothing of the write can land any more. Before
//!   that, the caller's second attempt could be overtaken by the first.
//! - What has waited for longer than the patience fails as unreachable.
//! - A connection whose oldest request has had no answer for longer than the stall limit is given
//!   up like one that broke.

use crate::map::group::{DonorIndex, Place};
use hecaton_transport::protocol::Refusal;
use std::collections::VecDeque;
use std::time::Duration;

/// Most requests that a lane has under way.
pub const MAX_REQUESTS: usize = 1024;

/// Most pages that those may name together: 16 MiB.
pub const MAX_PAGES_UNDER_WAY: usize = 4096;

/// Pauses between attempts to connect: none after a connection that worked, then doubling.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// After so long without an attempt a lane forgets that its last one failed: the donor may be back.
/// A lane that remembered it would give up the copies of a healthy donor with its next write.
const FORGOTTEN: Duration = LONGEST_PAUSE;

/// A request's place in its lane, while it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u32);

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From when a request made its last progress until it fails.
    pub patience: Duration,
    /// From when a request was sent, or a connection begun, until the connection is given up.
    pub stall: Duration,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The extent is gone, and the segment with it.
    Lost,
    /// The donor has not answered in time.
    Unreachable,
    /// A write was under way when its connection broke. It will not land any more; whether it has
    /// is not known.
    Interrupted,
    /// The space has another owner.
    Fenced,
    /// The donor will not do it.
    Refused(Refusal),
}

/// A request that failed, from its page `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The request that failed.
    pub slot: Slot,
    /// The caller's token.
    pub token: u64,
    /// Where in the request's list of pages the failure begins; what stands before was delivered.
    pub from: usize,
    /// The segment.
    pub segment: u64,
    /// Where it was asked for.
    pub place: Place,
    /// Why.
    pub cause: Cause,
}

/// A read that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToSend<'a> {
    /// The request.
    pub slot: Slot,
    /// Where to.
    pub place: Place,
    /// The pages of the extent that are still missing.
    pub pages: &'a [u32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

#[derive(Debug)]
struct Flight {
    kind: Kind,
    token: u64,
    segment: u64,
    place: Place,
    /// A read's pages within the extent. The buffer stays with the slot.
    pages: Vec<u32>,
    page_count: usize,
    /// Pages delivered.
    given: usize,
    /// Pages delivered when the read was last sent: the donor's answer counts from there.
    sent_from: usize,
    entered: Duration,
    /// Last sign of progress.
    since: Duration,
    /// Nobody wants to hear of it any more. It stays in its place until its answer has come.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { not_before: Duration },
    Opening { begun: Duration },
    Open { begun: Duration, boot: u64 },
}

/// What a donor's connection is good for, for an extent of a certain life of the donor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing yet: it is not open.
    NotOpen,
    /// It leads to the life that gave the extent.
    Good,
    /// It leads to another life, and was begun before the extent was asked for: the life may be an
    /// earlier one. To be given up; the next connection will tell.
    Stale,
    /// It leads to a later life: the extent is gone.
    Lost,
}

#[derive(Debug)]
struct LinkState {
    state: State,
    /// Attempts in a row that brought no welcome.
    attempts: u32,
    /// A connection has broken or could not be made, and none has been welcomed since.
    broken: bool,
    /// Reads to be sent, in the order asked.
    waiting: VecDeque<Slot>,
    /// Sent on the open connection, in that order, with the time.
    sent: VecDeque<(Slot, Duration)>,
    /// Writes of an earlier connection, whose end is not certain yet.
    unsettled: Vec<Slot>,
}

impl LinkState {
    /// Whether something waits for a connection.
    fn is_wanted(&self) -> bool {
        !self.waiting.is_empty() || !self.unsettled.is_empty()
    }

    /// Begins a connection. One was allowed from `not_before` on.
    fn open(&mut self, not_before: Duration, now: Duration) {
        if now >= not_before + FORGOTTEN {
            self.broken = false;
            self.attempts = 0;
        }
        self.state = State::Opening { begun: now };
    }
}

/// Everything that one lane has under way.
#[derive(Debug)]
pub struct Flights {
    limits: Limits,
    flights: Vec<Flight>,
    free: Vec<Slot>,
    links: Vec<LinkState>,
    failures: VecDeque<Failure>,
    pages_under_way: usize,
}

impl Flights {
    /// A lane with nothing under way.
    pub fn new(limits: Limits) -> Flights {
        Flights {
            limits,
            flights: Vec::new(),
            free: Vec::new(),
            links: Vec::new(),
            failures: VecDeque::new(),
            pages_under_way: 0,
        }
    }

    /// Requests whose end has not been reported.
    pub fn len(&self) -> usize {
        self.flights.len() - self.free.len() + self.failures.len()
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether [`Flights::tick`] has anything to watch: requests, or a connection that is not welcomed
    /// yet, which a write may be waiting for that is not entered before.
    pub fn needs_clock(&self) -> bool {
        let is_opening = |link: &LinkState| matches!(link.state, State::Opening { .. });
        !self.is_empty() || self.links.iter().any(is_opening)
    }

    /// Whether a request of so many pages may be entered.
    pub fn has_room(&self, pages: usize) -> bool {
        self.len() < MAX_REQUESTS && self.pages_under_way + pages <= MAX_PAGES_UNDER_WAY
    }

    /// Enters a read; [`Flights::next_to_send`] will name it.
    pub fn read(
        &mut self,
        token: u64,
        segment: u64,
        place: Place,
        pages: impl ExactSizeIterator<Item = u32>,
        now: Duration,
    ) -> Slot {
        let slot = self.enter(Kind::Read, token, segment, place, pages.len(), now);
        self.flights[slot.0 as usize].pages.extend(pages);
        self.link(place.donor).waiting.push_back(slot);
        slot
    }

    /// Enters a write of so many pages, which the caller sends right now on the open connection.
    pub fn write(
        &mut self,
        token: u64,
        segment: u64,
        place: Place,
        page_count: usize,
        now: Duration,
    ) -> Slot {
        let slot = self.enter(Kind::Write, token, segment, place, page_count, now);
        self.link(place.donor).sent.push_back((slot, now));
        slot
    }

    /// Takes back the write that was entered last, because it could not be sent.
    pub fn retract(&mut self, slot: Slot) {
        self.unsend(slot);
        self.leave(slot);
    }

    /// What the donor's connection is good for, for an extent that was known at that time.
    pub fn link_for(&self, place: Place, known_at: Duration) -> Link {
        match self.links.get(place.donor.0 as usize).map(|link| link.state) {
            Some(State::Open { boot, .. }) if boot == place.boot => Link::Good,
            Some(State::Open { begun, .. }) if begun < known_at => Link::Stale,
            Some(State::Open { .. }) => Link::Lost,
            Some(State::Closed { .. } | State::Opening { .. }) | None => Link::NotOpen,
        }
    }

    /// The read that is to go to the donor next. Those whose extent is gone fail here. There is none
    /// while the connection is stale: see [`Flights::is_stale`].
    pub fn next_to_send(&mut self, donor: DonorIndex) -> Option<ToSend<'_>> {
        loop {
            let slot = *self.link(donor).waiting.front()?;
            let Flight { place, entered, .. } = self.flights[slot.0 as usize];
            match self.link_for(place, entered) {
                Link::NotOpen | Link::Stale => return None,
                Link::Good => {
                    let flight = &self.flights[slot.0 as usize];
                    return Some(ToSend { slot, place, pages: &flight.pages[flight.given..] });
                }
                Link::Lost => {
                    self.link(donor).waiting.pop_front();
                    self.fail(slot, Cause::Lost);
                }
            }
        }
    }

    /// Whether the donor's connection is to be given up, because the read that waits for it was
    /// meant for another life of the donor.
    pub fn is_stale(&self, donor: DonorIndex) -> bool {
        let front = self.links.get(donor.0 as usize).and_then(|link| link.waiting.front());
        front.is_some_and(|slot| {
            let Flight { place, entered, .. } = self.flights[slot.0 as usize];
            self.link_for(place, entered) == Link::Stale
        })
    }

    /// The read that [`Flights::next_to_send`] named is on its way.
    pub fn sent(&mut self, donor: DonorIndex, now: Duration) {
        if let Some(slot) = self.link(donor).waiting.pop_front() {
            let flight = &mut self.flights[slot.0 as usize];
            flight.sent_from = flight.given;
            self.link(donor).sent.push_back((slot, now));
        }
    }

    /// Pages of a read have come: so many, `from` being where they begin in what was sent last.
    /// Returns the token, and where they begin in the caller's list; `None` if the read was abandoned.
    pub fn pages(
        &mut self,
        slot: Slot,
        from: usize,
        count: usize,
        now: Duration,
    ) -> Option<(u64, usize)> {
        let flight = &mut self.flights[slot.0 as usize];
        let begin = flight.sent_from + from;
        debug_assert_eq!((flight.kind, flight.given), (Kind::Read, begin));
        flight.given = begin + count;
        flight.since = now;
        let told = (!flight.abandoned).then_some((flight.token, begin));
        if flight.given == flight.page_count {
            self.settle(slot);
        }
        told
    }

    /// A write is stored. Returns its token; `None` if it was abandoned.
    pub fn written(&mut self, slot: Slot) -> Option<u64> {
        let flight = &self.flights[slot.0 as usize];
        let told = (!flight.abandoned).then_some(flight.token);
        self.settle(slot);
        told
    }

    /// A request takes the place of another one that nothing has come of, and is not waited for any
    /// longer than that.
    pub fn waits_as_long_as(&mut self, slot: Slot, other: Slot) {
        let since = self.flights[other.0 as usize].since;
        let flight = &mut self.flights[slot.0 as usize];
        flight.since = flight.since.min(since);
    }

    /// A request is part of what is waited for since then.
    pub fn waits_since(&mut self, slot: Slot, since: Duration) {
        let flight = &mut self.flights[slot.0 as usize];
        flight.since = flight.since.min(since);
    }

    /// Nobody wants to hear of the request any more. It is not begun if it has not been, nor repeated.
    pub fn abandon(&mut self, slot: Slot) {
        let donor = self.flights[slot.0 as usize].place.donor;
        let link = self.link(donor);
        let before = link.waiting.len() + link.unsettled.len();
        link.waiting.retain(|other| *other != slot);
        link.unsettled.retain(|other| *other != slot);
        if link.waiting.len() + link.unsettled.len() < before {
            self.leave(slot);
        } else {
            self.flights[slot.0 as usize].abandoned = true;
        }
    }

    /// As [`Flights::abandon`], of a request that may have failed already without its owner knowing: then
    /// the slot may be another's by now.
    pub fn abandon_if_of(&mut self, slot: Slot, token: u64) {
        if self.flights[slot.0 as usize].token == token {
            self.abandon(slot);
        }
    }

    /// Whether a donor cannot be counted on: its connection is broken, or has been waited for longer
    /// than `failover`.
    pub fn is_down(&self, donor: DonorIndex, now: Duration, failover: Duration) -> bool {
        let Some(link) = self.links.get(donor.0 as usize) else { return false };
        link.broken || self.waited_since(link).is_some_and(|since| since + failover <= now)
    }

    /// Whether it is worth asking a donor: it may be down only because nobody has wanted a connection
    /// since the last one broke.
    pub fn may_answer(&self, donor: DonorIndex, now: Duration, failover: Duration) -> bool {
        let Some(link) = self.links.get(donor.0 as usize) else { return true };
        match link.state {
            State::Closed { not_before } => not_before <= now,
            State::Opening { .. } | State::Open { .. } => {
                self.waited_since(link).is_none_or(|since| now < since + failover)
            }
        }
    }

    /// Donors whose connection has been waited for longer than `failover`.
    pub fn silent(&self, now: Duration, failover: Duration) -> Vec<DonorIndex> {
        let is_silent =
            |link: &LinkState| self.waited_since(link).is_some_and(|since| since + failover <= now);
        let links = self.links.iter().enumerate().filter(|(_, link)| is_silent(link));
        links.map(|(index, _)| DonorIndex(index as u32)).collect()
    }

    /// Since when something is expected of a donor, and nothing has come.
    fn waited_since(&self, link: &LinkState) -> Option<Duration> {
        match link.state {
            State::Opening { begun } => Some(begun),
            // A long read that makes progress is not stalled.
            State::Open { .. } => {
                let (slot, at) = link.sent.front()?;
                Some((*at).max(self.flights[slot.0 as usize].since))
            }
            State::Closed { .. } => None,
        }
    }

    /// Requests that a donor has to answer, or that wait to be sent to it.
    pub fn queue_at(&self, donor: DonorIndex) -> usize {
        let link = self.links.get(donor.0 as usize);
        link.map_or(0, |link| link.waiting.len() + link.sent.len() + link.unsettled.len())
    }

    /// A request was refused.
    pub fn refused(&mut self, slot: Slot, refusal: Refusal) {
        self.unsend(slot);
        let cause = match refusal {
            Refusal::StaleEpoch(_) => Cause::Fenced,
            Refusal::NoSuchExtent => Cause::Lost,
            // Turned over on the way, and none of it stored: as good as a broken connection.
            Refusal::Corrupt(_) => Cause::Interrupted,
            other => Cause::Refused(other),
        };
        self.fail(slot, cause);
    }

    /// Donors to which a connection is to be begun now: something waits for them.
    pub fn to_connect(&mut self, now: Duration) -> Vec<DonorIndex> {
        let mut donors = Vec::new();
        for (index, link) in self.links.iter_mut().enumerate() {
            if let State::Closed { not_before } = link.state
                && link.is_wanted()
                && not_before <= now
            {
                link.open(not_before, now);
                donors.push(DonorIndex(index as u32));
            }
        }
        donors
    }

    /// As [`Flights::to_connect`], for one donor, whether something waits for it or not: true when a
    /// connection is to be begun now.
    pub fn begin_connect(&mut self, donor: DonorIndex, now: Duration) -> bool {
        let link = self.link(donor);
        match link.state {
            State::Closed { not_before } if not_before <= now => {
                link.open(not_before, now);
                true
            }
            State::Closed { .. } | State::Opening { .. } | State::Open { .. } => false,
        }
    }

    /// The donor has welcomed a connection.
    pub fn opened(&mut self, donor: DonorIndex, boot: u64) {
        let link = self.link(donor);
        if let State::Opening { begun } = link.state {
            link.state = State::Open { begun, boot };
        }
        link.attempts = 0;
        link.broken = false;
        for slot in std::mem::take(&mut link.unsettled) {
            let same_life = self.flights[slot.0 as usize].place.boot == boot;
            self.fail(slot, if same_life { Cause::Interrupted } else { Cause::Lost });
        }
    }

    /// The connection broke, or could not be made.
    pub fn broke(&mut self, donor: DonorIndex, now: Duration) {
        let link = self.link(donor);
        let pause = match link.state {
            State::Open { .. } => Duration::ZERO,
            State::Opening { .. } | State::Closed { .. } => {
                let doubled = FIRST_PAUSE * 2u32.pow(link.attempts.min(8));
                link.attempts += 1;
                doubled.min(LONGEST_PAUSE)
            }
        };
        link.state = State::Closed { not_before: now + pause };
        link.broken = true;
        while let Some((slot, _)) = self.link(donor).sent.pop_back() {
            let flight = &self.flights[slot.0 as usize];
            match flight.kind {
                _ if flight.abandoned => self.leave(slot),
                Kind::Read => self.link(donor).waiting.push_front(slot),
                Kind::Write => self.link(donor).unsettled.push(slot),
            }
        }
    }

    /// The donor refuses the connection because of the space's epoch.
    pub fn fenced(&mut self) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let mut slots: Vec<Slot> = link.waiting.drain(..).collect();
            slots.append(&mut link.unsettled);
            slots.into_iter().for_each(|slot| self.fail(slot, Cause::Fenced));
        }
    }

    /// Fails what has waited too long, and names the donors whose connection is to be given up: the
    /// caller closes those and tells [`Flights::broke`].
    pub fn tick(&mut self, now: Duration) -> Vec<DonorIndex> {
        let mut stalled = Vec::new();
        for index in 0..self.links.len() {
            let late =
                |slot: &Slot| self.flights[slot.0 as usize].since + self.limits.patience <= now;
            let link = &self.links[index];
            let expired: Vec<Slot> =
                link.waiting.iter().chain(&link.unsettled).copied().filter(late).collect();
            if self.waited_since(link).is_some_and(|since| since + self.limits.stall <= now) {
                stalled.push(DonorIndex(index as u32));
            }
            let link = &mut self.links[index];
            link.waiting.retain(|slot| !expired.contains(slot));
            link.unsettled.retain(|slot| !expired.contains(slot));
            expired.into_iter().for_each(|slot| self.fail(slot, Cause::Unreachable));
        }
        stalled
    }

    /// The next moment at which [`Flights::to_connect`] would name a donor that it does not name
    /// yet, if there is one.
    pub fn next_attempt(&self) -> Option<Duration> {
        let wanted = self.links.iter().filter(|link| link.is_wanted());
        let paused = wanted.filter_map(|link| match link.state {
            State::Closed { not_before } => Some(not_before),
            State::Opening { .. } | State::Open { .. } => None,
        });
        paused.min()
    }

    /// A failure to report, if there is one.
    pub fn next_failure(&mut self) -> Option<Failure> {
        self.failures.pop_front()
    }

    /// Whether there are failures to report.
    pub fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    fn link(&mut self, donor: DonorIndex) -> &mut LinkState {
        let index = donor.0 as usize;
        while self.links.len() <= index {
            self.links.push(LinkState {
                state: State::Closed { not_before: Duration::ZERO },
                attempts: 0,
                broken: false,
                waiting: VecDeque::new(),
                sent: VecDeque::new(),
                unsettled: Vec::new(),
            });
        }
        &mut self.links[index]
    }

    fn enter(
        &mut self,
        kind: Kind,
        token: u64,
        segment: u64,
        place: Place,
        page_count: usize,
        now: Duration,
    ) -> Slot {
        self.pages_under_way += page_count;
        let mut flight = Flight {
            kind,
            token,
            segment,
            place,
            pages: Vec::new(),
            page_count,
            given: 0,
            sent_from: 0,
            entered: now,
            since: now,
            abandoned: false,
        };
        let Some(slot) = self.free.pop() else {
            self.flights.push(flight);
            return Slot(self.flights.len() as u32 - 1);
        };
        let before = &mut self.flights[slot.0 as usize];
        flight.pages = std::mem::take(&mut before.pages);
        flight.pages.clear();
        *before = flight;
        slot
    }

    /// The request is answered in full. Answers come in order, so that it is the oldest one sent.
    fn settle(&mut self, slot: Slot) {
        let donor = self.flights[slot.0 as usize].place.donor;
        let front = self.link(donor).sent.pop_front();
        debug_assert_eq!(front.map(|(slot, _)| slot), Some(slot));
        self.leave(slot);
    }

    fn unsend(&mut self, slot: Slot) {
        let donor = self.flights[slot.0 as usize].place.donor;
        self.link(donor).sent.retain(|(sent, _)| *sent != slot);
    }

    fn fail(&mut self, slot: Slot, cause: Cause) {
        let flight = &self.flights[slot.0 as usize];
        if flight.abandoned {
            return self.leave(slot);
        }
        self.failures.push_back(Failure {
            slot,
            token: flight.token,
            from: flight.given,
            segment: flight.segment,
            place: flight.place,
            cause,
        });
        self.leave(slot);
    }

    fn leave(&mut self, slot: Slot) {
        self.pages_under_way -= self.flights[slot.0 as usize].page_count;
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests;
