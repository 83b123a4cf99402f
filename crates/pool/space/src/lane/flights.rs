//! Tracks a lane's in-flight requests per donor and decides which are resent or fail.
//!
//! A flight is one request at one donor. An operation of the lane's owner may need several: see
//! [`requests`](crate::requests).
//!
//! Decisions only, like [`map`](crate::map); the time comes in as a duration since any fixed
//! moment. The rules:
//!
//! - A *read* changes nothing. It is resent on the next connection if one breaks, from the first
//!   page that is still missing, as long as the donor is in the incarnation that gave the extent.
//! - A *write* is not kept: its pages were handed to the kernel without a copy, so it cannot be
//!   resent from here. It fails only once the donor welcomes the next connection. By then the donor
//!   has ended the earlier connection, and nothing of the write can land any more. An earlier
//!   report would let the first attempt land after the caller's second one.
//! - A request that waits for longer than the patience fails as unreachable.
//! - A connection whose oldest request has no answer for longer than the stall limit is treated as
//!   broken.

use crate::map::group::{DonorIndex, Place};
use hecaton_transport::protocol::Refusal;
use std::collections::VecDeque;
use std::time::Duration;

/// Maximum of in-flight requests of a lane.
pub const MAX_REQUESTS: usize = 1024;

/// Maximum of pages that these requests name together: 16 MiB.
pub const MAX_PAGES_UNDER_WAY: usize = 4096;

/// Back-off between attempts to connect: none after a working connection, then doubling.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Without an attempt for this long, a lane forgets that its last one failed: the donor may be
/// back. Otherwise the lane's next write would give up the copies of a healthy donor.
const FORGOTTEN: Duration = LONGEST_PAUSE;

/// Index of an in-flight request in its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u32);

/// Time limits of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From a request's last progress until the request fails.
    pub patience: Duration,
    /// From the send of a request, or the start of a connection, until the connection is closed.
    pub stall: Duration,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The extent is lost, and the segment too if it has no other copy.
    Lost,
    /// The donor has not answered in time.
    Unreachable,
    /// The connection broke during a write. The write will not land any more, but may have landed
    /// before.
    Interrupted,
    /// The space has another owner.
    Fenced,
    /// The donor refused the request.
    Refused(Refusal),
}

/// A request that failed, from its page `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The request that failed.
    pub slot: Slot,
    /// The caller's token.
    pub token: u64,
    /// Index in the request's pages where the failure begins; earlier pages were delivered.
    pub from: usize,
    /// The segment.
    pub segment: u64,
    /// The extent that was asked.
    pub place: Place,
    /// Why the request failed.
    pub cause: Cause,
}

/// A read to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToSend<'a> {
    /// The request.
    pub slot: Slot,
    /// The extent to read from.
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
    /// The caller wants no report. The slot stays taken until the answer or a broken connection.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { not_before: Duration },
    Opening { begun: Duration },
    Open { begun: Duration, boot: u64 },
}

/// Whether a donor's connection serves an extent that one incarnation of the donor gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The connection is not open.
    NotOpen,
    /// It leads to the incarnation that gave the extent.
    Good,
    /// It leads to another incarnation, maybe an earlier one: it began before the extent was asked
    /// for. The caller must close it; the next connection will tell.
    Stale,
    /// It leads to a later incarnation: the extent is lost.
    Lost,
}

#[derive(Debug)]
struct LinkState {
    state: State,
    /// Consecutive attempts without a welcome.
    attempts: u32,
    /// A connection has broken or could not be made, and none has been welcomed since.
    broken: bool,
    /// Reads to send, in the order asked.
    waiting: VecDeque<Slot>,
    /// Requests sent on the open connection, oldest first, with the time of sending.
    sent: VecDeque<(Slot, Duration)>,
    /// Writes of a broken connection that may still land.
    unsettled: Vec<Slot>,
}

impl LinkState {
    /// Whether a request waits for a connection.
    fn is_wanted(&self) -> bool {
        !self.waiting.is_empty() || !self.unsettled.is_empty()
    }

    /// Begins a connection, which was allowed from `not_before` on.
    fn open(&mut self, not_before: Duration, now: Duration) {
        if now >= not_before + FORGOTTEN {
            self.broken = false;
            self.attempts = 0;
        }
        self.state = State::Opening { begun: now };
    }
}

/// All in-flight requests of one lane.
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
    /// A lane without requests.
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

    /// Number of requests whose outcome has not been reported.
    pub fn len(&self) -> usize {
        self.flights.len() - self.free.len() + self.failures.len()
    }

    /// Whether all outcomes have been reported.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether [`Flights::tick`] has anything to watch: requests, or a connection without a
    /// welcome. A write that is not entered yet may wait for that connection.
    pub fn needs_clock(&self) -> bool {
        let is_opening = |link: &LinkState| matches!(link.state, State::Opening { .. });
        !self.is_empty() || self.links.iter().any(is_opening)
    }

    /// Whether a request of `pages` pages may be entered.
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

    /// Enters a write of `page_count` pages, which the caller sends now on the open connection.
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

    /// State of the donor's connection for an extent that was known at `known_at`.
    pub fn link_for(&self, place: Place, known_at: Duration) -> Link {
        match self.links.get(place.donor.0 as usize).map(|link| link.state) {
            Some(State::Open { boot, .. }) if boot == place.boot => Link::Good,
            Some(State::Open { begun, .. }) if begun < known_at => Link::Stale,
            Some(State::Open { .. }) => Link::Lost,
            Some(State::Closed { .. } | State::Opening { .. }) | None => Link::NotOpen,
        }
    }

    /// The next read to send to the donor. Reads whose extent is lost fail here. Returns `None`
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

    /// Whether the caller must close the donor's connection, because the read that waits for it is
    /// for another incarnation of the donor.
    pub fn is_stale(&self, donor: DonorIndex) -> bool {
        let front = self.links.get(donor.0 as usize).and_then(|link| link.waiting.front());
        front.is_some_and(|slot| {
            let Flight { place, entered, .. } = self.flights[slot.0 as usize];
            self.link_for(place, entered) == Link::Stale
        })
    }

    /// Records that the read that [`Flights::next_to_send`] named was sent.
    pub fn sent(&mut self, donor: DonorIndex, now: Duration) {
        if let Some(slot) = self.link(donor).waiting.pop_front() {
            let flight = &mut self.flights[slot.0 as usize];
            flight.sent_from = flight.given;
            self.link(donor).sent.push_back((slot, now));
        }
    }

    /// Records that `count` pages of a read arrived, starting at `from` of the pages sent last.
    /// Returns the token and their start in the caller's list; `None` if the read was abandoned.
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

    /// Records that a write is stored. Returns its token; `None` if it was abandoned.
    pub fn written(&mut self, slot: Slot) -> Option<u64> {
        let flight = &self.flights[slot.0 as usize];
        let told = (!flight.abandoned).then_some(flight.token);
        self.settle(slot);
        told
    }

    /// Lets a request inherit the wait of `other`, which it replaces and which had no answer: the
    /// request must not wait for longer.
    pub fn waits_as_long_as(&mut self, slot: Slot, other: Slot) {
        let since = self.flights[other.0 as usize].since;
        let flight = &mut self.flights[slot.0 as usize];
        flight.since = flight.since.min(since);
    }

    /// Counts the wait of a request from `since`, because it is part of an older wait.
    pub fn waits_since(&mut self, slot: Slot, since: Duration) {
        let flight = &mut self.flights[slot.0 as usize];
        flight.since = flight.since.min(since);
    }

    /// Drops the report of a request. An unsent request is not sent, and none is resent.
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

    /// Like [`Flights::abandon`], for a request that may have failed already without its owner
    /// knowing. Its slot may then belong to another request.
    pub fn abandon_if_of(&mut self, slot: Slot, token: u64) {
        if self.flights[slot.0 as usize].token == token {
            self.abandon(slot);
        }
    }

    /// Whether a donor cannot be counted on: its connection is broken, or has been silent for
    /// `failover` or longer.
    pub fn is_down(&self, donor: DonorIndex, now: Duration, failover: Duration) -> bool {
        let Some(link) = self.links.get(donor.0 as usize) else { return false };
        link.broken || self.waited_since(link).is_some_and(|since| since + failover <= now)
    }

    /// Whether asking a donor is worthwhile: it may be down only because no request has needed a
    /// connection since the last one broke.
    pub fn may_answer(&self, donor: DonorIndex, now: Duration, failover: Duration) -> bool {
        let Some(link) = self.links.get(donor.0 as usize) else { return true };
        match link.state {
            State::Closed { not_before } => not_before <= now,
            State::Opening { .. } | State::Open { .. } => {
                self.waited_since(link).is_none_or(|since| now < since + failover)
            }
        }
    }

    /// Donors whose connection has been silent for `failover` or longer.
    pub fn silent(&self, now: Duration, failover: Duration) -> Vec<DonorIndex> {
        let is_silent =
            |link: &LinkState| self.waited_since(link).is_some_and(|since| since + failover <= now);
        let links = self.links.iter().enumerate().filter(|(_, link)| is_silent(link));
        links.map(|(index, _)| DonorIndex(index as u32)).collect()
    }

    /// Since when a donor owes an answer or a welcome, without progress.
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

    /// Number of requests that a donor must answer, or that wait to be sent to it.
    pub fn queue_at(&self, donor: DonorIndex) -> usize {
        let link = self.links.get(donor.0 as usize);
        link.map_or(0, |link| link.waiting.len() + link.sent.len() + link.unsettled.len())
    }

    /// Records that a request was refused, and fails it.
    pub fn refused(&mut self, slot: Slot, refusal: Refusal) {
        self.unsend(slot);
        let cause = match refusal {
            Refusal::StaleEpoch(_) => Cause::Fenced,
            Refusal::NoSuchExtent => Cause::Lost,
            // A bit flipped on the way and nothing was stored: treat it as a broken connection.
            Refusal::Corrupt(_) => Cause::Interrupted,
            other => Cause::Refused(other),
        };
        self.fail(slot, cause);
    }

    /// Returns the donors to connect to now, because requests wait for them.
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

    /// Like [`Flights::to_connect`] for one donor, even if no request waits for it. True if the
    /// caller must begin a connection now.
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

    /// Records a donor's welcome, and fails the writes of its earlier connection.
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

    /// Records that a connection broke or could not be made.
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

    /// Fails all waiting requests: a donor refused the connection because of the space's epoch.
    pub fn fenced(&mut self) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let mut slots: Vec<Slot> = link.waiting.drain(..).collect();
            slots.append(&mut link.unsettled);
            slots.into_iter().for_each(|slot| self.fail(slot, Cause::Fenced));
        }
    }

    /// Fails requests that have waited too long. Returns the donors with stalled connections: the
    /// caller closes these and calls [`Flights::broke`].
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

    /// The next moment at which [`Flights::to_connect`] names another donor, if one will be named.
    pub fn next_attempt(&self) -> Option<Duration> {
        let wanted = self.links.iter().filter(|link| link.is_wanted());
        let paused = wanted.filter_map(|link| match link.state {
            State::Closed { not_before } => Some(not_before),
            State::Opening { .. } | State::Open { .. } => None,
        });
        paused.min()
    }

    /// Takes the next failure to report, if any.
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

    /// Ends a fully answered request. Answers come in order, so it is the oldest one sent.
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
