//! One thread's way to the donors: its own connections, its own requests, no lock shared with
//! another thread's.
//!
//! Everything that a lane waits for makes one of its descriptors readable: an answer, the end of an
//! attempt to connect, or the timer. The timer stands for all that is due without a packet, such as
//! pauses and stalls. It is set while requests are in flight, at most once a second. So a page
//! request pays for no clock and no timer call of its own.

mod absence;
mod clock;
pub mod flights;
pub mod requests;
mod timer;

use self::absence::Absences;
use self::clock::Clock;
use self::timer::Timer;
use crate::coded::code::Code;
use crate::coded::decodings::{Decodings, is_sound};
use crate::coded::stripe::Shards;
use crate::lane::flights::{Cause, Limits, Link, Slot};
use crate::lane::requests::{End, Groups, Recipient, Requests, Writing};
use crate::map::group::{DonorIndex, Group, Place};
use crate::map::lookup::Whereabouts;
use crate::{Space, SpaceError};
use hecaton_memory::{Generation, PAGE_SIZE, PageNo, PageSum, page_sum, random_u64};
use hecaton_transport::client::{Connection, ConnectionError, Event};
use hecaton_transport::protocol::{MAX_PAGES, Refusal, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;

/// Longest time between two looks at what is late, while something is under way.
const PULSE: Duration = Duration::from_secs(1);

/// Longest wait of a write for room or for a connection, before it looks at its deadline again.
const WRITE_WAIT: Duration = Duration::from_millis(20);

/// Between two attempts to send what a donor's socket has not taken.
const SEND_PAUSE: Duration = Duration::from_millis(1);

/// Result of a request.
#[derive(Debug)]
pub enum Completion<'a> {
    /// Some of the pages of a read. They come in order; those with the last page end the request.
    Read {
        /// The caller's token.
        token: u64,
        /// Where in the request's list of pages these begin.
        from: usize,
        /// The donor that has sent the pages; none if they were never written.
        /// [`DonorIndex::UNKNOWN`] if they were decoded from several others' pages.
        giver: Option<DonorIndex>,
        /// The sums that the donor keeps for them, one each. Verifying is up to the caller, who has
        /// the sums that it once computed itself; a page that does not match is for
        /// [`Space::suspect`], and is to be read again with [`Lane::read_avoiding`].
        sums: &'a [PageSum],
        /// Their contents, one after another, where they were received: nobody needs them there
        /// afterwards, and they may be opened in place ([`Sealer`](crate::seal::Sealer)).
        data: &'a mut [u8],
    },
    /// The pages of a write are stored, in all copies that the segment has.
    Written {
        /// The caller's token.
        token: u64,
        /// For [`Space::adopt`]: extents with an older one have missed this write.
        generation: Generation,
    },
    /// The request failed: for a read, from page `from` of its list on.
    Failed {
        /// The caller's token.
        token: u64,
        /// Where in the request's list of pages the failure begins.
        from: usize,
        /// Why.
        error: SpaceError,
    },
}

/// A completion that came while a write waited, kept for the next call of [`Lane::progress`].
enum Stashed {
    Read { token: u64, from: usize, giver: Option<DonorIndex>, sums: Vec<PageSum>, data: Vec<u8> },
    Written { token: u64, generation: Generation },
    Failed { token: u64, from: usize, error: SpaceError },
}

impl From<Completion<'_>> for Stashed {
    fn from(completion: Completion<'_>) -> Stashed {
        match completion {
            Completion::Read { token, from, giver, sums, data } => {
                Stashed::Read { token, from, giver, sums: sums.to_vec(), data: data.to_vec() }
            }
            Completion::Written { token, generation } => Stashed::Written { token, generation },
            Completion::Failed { token, from, error } => Stashed::Failed { token, from, error },
        }
    }
}

/// A read of pages that were never written.
struct ZeroRead {
    token: u64,
    pages: usize,
}

/// The lane's connections to one donor, one after another, under one lane id.
struct DonorLink {
    lane: u64,
    connection: Option<Connection>,
    /// When it was begun, by the space's clock.
    begun: Duration,
    /// Whether the donor wanted back some memory, and all of it, when the map was last told.
    wants: (bool, bool),
}

/// One thread's handle to a [`Space`].
///
/// A lane may be moved to another thread but not shared. Every accepted request ends in exactly one
/// of [`Completion::Written`], [`Completion::Failed`], or the [`Completion::Read`] with its last
/// page. The sink of [`Lane::progress`] gets it. A request that was refused with an error ends in
/// nothing.
pub struct Lane {
    space: Arc<Space>,
    requests: Requests,
    absences: Absences,
    links: Vec<DonorLink>,
    stash: VecDeque<Stashed>,
    zeros: VecDeque<ZeroRead>,
    /// Handed over for pages that were never written; whoever gets it may change it.
    zero_page: Box<[u8]>,
    zero_sum: PageSum,
    extent_pages: Vec<u32>,
    clock: Clock,
    timer: Timer,
    pulse: Duration,
    /// Copies of each page. Only where there are several is a donor given up early.
    copies: usize,
    /// Most requests to donors that one of the owner's may come to.
    fan_out: usize,
    decodings: Decodings,
    generation: u64,
}

impl Lane {
    pub(crate) fn new(space: Arc<Space>) -> Result<Lane, SpaceError> {
        let config = space.config();
        let stall = config.connection.answer;
        let limits = Limits { patience: config.patience, stall };
        let copies = usize::from(config.redundancy.copies());
        let code = config.cold.map(|cold| cold.code);
        let mut pulse = PULSE.min(stall / 4).min(config.patience / 4);
        if copies > 1 {
            pulse = pulse.min(config.failover / 4);
        }
        Ok(Lane {
            requests: Requests::new(limits, config.failover),
            absences: Absences::new(config.patience, config.give_up),
            links: Vec::new(),
            stash: VecDeque::new(),
            zeros: VecDeque::new(),
            zero_page: vec![0; PAGE_SIZE].into(),
            zero_sum: page_sum(&[0; PAGE_SIZE]),
            extent_pages: Vec::with_capacity(MAX_PAGES),
            clock: Clock::default(),
            timer: Timer::new()?,
            pulse,
            copies,
            fan_out: (copies + 1).max(1 + code.map_or(0, Code::data)),
            decodings: Decodings::new(code),
            generation: 0,
            space,
        })
    }

    /// The space.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Asks for some pages of one segment, at most [`MAX_PAGES`], and returns without waiting.
    pub fn read(&mut self, token: u64, pages: &[PageNo]) -> Result<(), SpaceError> {
        self.read_avoiding(token, pages, &[])
    }

    /// As [`Lane::read`], but prefers other donors than those in `avoid`, which have sent wrong
    /// pages. It asks these if no others exist.
    pub fn read_avoiding(
        &mut self,
        token: u64,
        pages: &[PageNo],
        avoid: &[DonorIndex],
    ) -> Result<(), SpaceError> {
        let now = self.look();
        match self.enter_read(token, pages, avoid, now)? {
            Some(donor) => self.flush(donor, now),
            None => self.flush_all(now),
        }
        self.read_entered(now);
        Ok(())
    }

    /// As [`Lane::read`], but asks the donor only with the next [`Lane::send`]: so many reads in a
    /// row go to it at once.
    pub fn read_later(&mut self, token: u64, pages: &[PageNo]) -> Result<(), SpaceError> {
        let now = self.look();
        self.enter_read(token, pages, &[], now).map(drop)
    }

    /// Sends the reads and writes that wait for this call.
    pub fn send(&mut self) {
        let now = self.look();
        self.flush_all(now);
        self.read_entered(now);
    }

    /// Enters a read; says which donor it goes to, if it is one.
    fn enter_read(
        &mut self,
        token: u64,
        pages: &[PageNo],
        avoid: &[DonorIndex],
        now: Duration,
    ) -> Result<Option<DonorIndex>, SpaceError> {
        let segment = self.check(pages)?;
        let group = match self.space.whereabouts(segment) {
            Whereabouts::Held(group) => group,
            Whereabouts::Lost(donor) => return Err(self.space.lost_error(segment, donor)),
            Whereabouts::Nowhere => {
                self.zeros.push_back(ZeroRead { token, pages: pages.len() });
                // Nobody will answer, but the owner may be waiting for a descriptor.
                self.arm(Duration::ZERO);
                return Ok(None);
            }
        };
        let mask = self.space.segment_pages() - 1;
        self.space.note_read(segment);
        let extent_pages = pages.iter().map(|page| (page & mask) as u32);
        let mut groups = &*self.space;
        let group = (segment, &group);
        let donor = self.requests.read(token, group, extent_pages, avoid, &mut groups, now);
        self.arm(now + self.pulse);
        self.arm_hedge();
        Ok(donor)
    }

    /// Follows up reads that were entered: connects where needed, and wakes the caller for ends.
    fn read_entered(&mut self, now: Duration) {
        self.connect_where_needed(now);
        if self.requests.has_ends() {
            // The caller may be waiting for a descriptor.
            self.arm(Duration::ZERO);
        }
    }

    /// Stores some different pages of one segment, at most [`MAX_PAGES`]. `data` is their contents,
    /// in the same order, in any number of pieces; `sums` are their checksums. The kernel has the
    /// contents when this returns, but the pages must be kept until [`Completion::Written`]. A
    /// failed write is not retried here: its pages must be written again before they are read from
    /// the pool.
    ///
    /// Waits while the segment's extents are taken, and while a donor's connection is not there or
    /// has no room: for the space's patience at most, or, where another donor gets a copy, for its
    /// failover time. Completions that come meanwhile are kept for the next [`Lane::progress`].
    ///
    /// # Panics
    /// If there are other sums or other bytes than pages.
    pub fn write(
        &mut self,
        token: u64,
        pages: &[PageNo],
        sums: &[PageSum],
        data: &[&[u8]],
    ) -> Result<(), SpaceError> {
        let segment = self.check(pages)?;
        let group = self.space.group_for_write(segment)?;
        let writing = self.requests.write(token, segment, group);
        let outcome = self.send_write(&writing, segment, pages, sums, data);
        if outcome.is_err() && !self.requests.is_sent(&writing) {
            self.requests.forget(&writing);
            self.space.write_ends(segment);
            return outcome;
        }
        let now = self.look();
        self.requests.sent(&writing, &mut &*self.space, now);
        if self.requests.has_ends() {
            // The caller may be waiting for a descriptor.
            self.arm(Duration::ZERO);
        }
        Ok(())
    }

    /// As [`Lane::write`], but never waits, and need not send before the next [`Lane::send`].
    /// False, and nothing is done, if it had to wait: a donor's connection is missing, has no room,
    /// or protects its data.
    ///
    /// # Panics
    /// If there are other sums or other bytes than pages.
    pub fn write_later(
        &mut self,
        token: u64,
        pages: &[PageNo],
        sums: &[PageSum],
        data: &[&[u8]],
    ) -> Result<bool, SpaceError> {
        let segment = self.check(pages)?;
        let mask = self.space.segment_pages() - 1;
        self.extent_pages.clear();
        self.extent_pages.extend(pages.iter().map(|page| (page & mask) as u32));
        let is_entered = self.space.begin_write(segment).is_some_and(|group| {
            let is_entered = self.hold_write((token, segment), group, sums, data);
            if !is_entered {
                self.space.write_ends(segment);
            }
            is_entered
        });
        Ok(is_entered)
    }

    /// Has all members' connections hold a write, or none.
    fn hold_write(
        &mut self,
        (token, segment): (u64, u64),
        group: Group,
        sums: &[PageSum],
        data: &[&[u8]],
    ) -> bool {
        let now = self.look();
        let places = || group.members().iter().map(|member| member.place);
        for place in places() {
            if let Err(error) = self.hold_reads(place.donor, now) {
                self.broke(place.donor, &error, now);
                return false;
            }
            if self.requests.flights.begin_connect(place.donor, now) {
                self.connect(place.donor, now);
            }
            let flights = &mut self.requests.flights;
            let is_next = flights.link_for(place, now) == Link::Good
                && flights.next_to_send(place.donor).is_none();
            let link = self.links.get(place.donor.0 as usize);
            let connection = link.and_then(|link| link.connection.as_ref());
            let request = write_of(place, group.generation, &self.extent_pages, sums);
            let takes =
                |connection: &Connection| !connection.is_secure() && connection.has_room(&request);
            if !is_next || !connection.is_some_and(takes) {
                return false;
            }
        }
        let writing = self.requests.write(token, segment, group);
        let mut broken = Vec::new();
        for place in places() {
            let slot = self.requests.sending(&writing, place, sums.len(), now);
            let request = write_of(place, group.generation, &self.extent_pages, sums);
            let connection = self.links[place.donor.0 as usize].connection.as_mut();
            let held = connection.expect("it has room").hold(slot.0.into(), request, data);
            broken.extend(held.err().map(|error| (place.donor, error)));
        }
        self.arm(now + self.pulse);
        for (donor, error) in broken {
            self.broke(donor, &error, now);
        }
        self.requests.sent(&writing, &mut &*self.space, now);
        true
    }

    /// Sends a write to all members of its group. Gives up members that cannot be reached. An error
    /// says that none could be.
    fn send_write(
        &mut self,
        writing: &Writing,
        segment: u64,
        pages: &[PageNo],
        sums: &[PageSum],
        data: &[&[u8]],
    ) -> Result<(), SpaceError> {
        let known_at = self.look();
        let config = self.space.config();
        let (deadline, failover) = (known_at + config.patience, config.failover);
        let mask = self.space.segment_pages() - 1;
        self.extent_pages.clear();
        self.extent_pages.extend(pages.iter().map(|page| (page & mask) as u32));
        loop {
            let now = self.look();
            let mut waits = false;
            for place in self.requests.unsent(writing) {
                self.flush(place.donor, now);
                if self.space.is_fenced() {
                    self.give_up_unsent(writing, Cause::Fenced);
                    return Err(self.space.fenced_error());
                }
                match self.requests.flights.link_for(place, known_at) {
                    Link::Lost => {
                        // The segment is lost only if nobody has joined its group meanwhile.
                        self.space.map().gone(segment, place);
                        self.requests.give_up(writing, place, Cause::Lost);
                        continue;
                    }
                    Link::Stale => self.broke(place.donor, &ConnectionError::Closed, now),
                    Link::NotOpen => {
                        if self.requests.flights.begin_connect(place.donor, now) {
                            self.connect(place.donor, now);
                        }
                    }
                    Link::Good => {
                        if self.submit_write(writing, place, sums, data, now) {
                            continue;
                        }
                    }
                }
                let is_down = self.requests.flights.is_down(place.donor, now, failover)
                    || known_at + failover <= now;
                if is_down && self.requests.is_sent(writing) {
                    self.requests.give_up(writing, place, Cause::Unreachable);
                } else if now >= deadline {
                    let error = self.unreachable(segment, place.donor, now);
                    self.give_up_unsent(writing, Cause::Unreachable);
                    return Err(error);
                } else {
                    waits = true;
                }
            }
            if !waits {
                return Ok(());
            }
            if !self.step_into_stash() {
                self.wait(WRITE_WAIT);
            }
        }
    }

    /// Sends a write to one member on its open connection, if that has room.
    fn submit_write(
        &mut self,
        writing: &Writing,
        place: Place,
        sums: &[PageSum],
        data: &[&[u8]],
        now: Duration,
    ) -> bool {
        let request = write_of(place, writing.group.generation, &self.extent_pages, sums);
        let is_next = self.requests.flights.next_to_send(place.donor).is_none();
        let Some(connection) = &mut self.links[place.donor.0 as usize].connection else {
            return false;
        };
        if !is_next || !connection.has_room(&request) {
            return false;
        }
        let slot = self.requests.sending(writing, place, sums.len(), now);
        match connection.submit(slot.0.into(), request, data) {
            Ok(()) => {
                let undelivered = connection.has_undelivered();
                self.arm(if undelivered { Duration::ZERO } else { now + self.pulse });
                true
            }
            Err(error) => {
                self.requests.retract(writing, place, slot);
                self.broke(place.donor, &error, now);
                false
            }
        }
    }

    fn give_up_unsent(&mut self, writing: &Writing, cause: Cause) {
        for place in self.requests.unsent(writing) {
            self.requests.give_up(writing, place, cause);
        }
    }

    /// The descriptors to wait on: [`Lane::progress`] is to be called when one is readable. The set
    /// is another one whenever [`Lane::generation`] has changed.
    pub fn fds(&self, out: &mut Vec<RawFd>) {
        out.extend(self.descriptors().map(|fd| fd.as_raw_fd()));
    }

    /// The same, for as long as the lane is not used.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let links = self.links.iter().filter_map(|link| link.connection.as_ref());
        [self.timer.as_fd()].into_iter().chain(links.map(AsFd::as_fd))
    }

    /// Counts the changes of the set of descriptors. A descriptor's number may come back as another
    /// file: whoever keeps them in an epoll set must enter all of them anew.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Zero exactly when nothing is left for [`Lane::progress`] to report. Otherwise the number of
    /// requests under way, and of completions that wait for the next call.
    pub fn in_flight(&self) -> usize {
        self.requests.len() + self.zeros.len() + self.stash.len()
    }

    /// Advances all requests, and hands completions to `sink`. Without `wait` it returns at once,
    /// otherwise with the first completion, or when the time has passed.
    pub fn progress(&mut self, wait: Option<Duration>, sink: &mut dyn FnMut(Completion<'_>)) {
        let deadline = wait.map(|wait| self.space.now() + wait);
        loop {
            let stashed = self.report_stash(sink);
            if self.step(sink) || stashed {
                return;
            }
            let Some(deadline) = deadline else { return };
            let left = deadline.saturating_sub(self.space.now());
            if left.is_zero() {
                return;
            }
            self.wait(left);
        }
    }

    /// One round without waiting. Says whether something was handed over.
    fn step(&mut self, sink: &mut dyn FnMut(Completion<'_>)) -> bool {
        let now = self.look();
        if self.timer.has_gone_off(now) {
            self.tick(now);
        }
        let mut handed_over = self.report_zeros(sink);
        let mut heard = false;
        for busy in [true, false] {
            // A connection without requests is only looked at when no other had anything: all that
            // can come from it is its end.
            if heard {
                break;
            }
            for index in 0..self.links.len() {
                let Some(connection) = &self.links[index].connection else { continue };
                let is_busy = connection.welcome().is_none()
                    || connection.in_flight() > 0
                    || connection.has_undelivered();
                if is_busy == busy {
                    heard |= self.advance(DonorIndex(index as u32), now, sink);
                }
            }
        }
        handed_over |= heard;
        let mut groups = &*self.space;
        // Requests that failed at one donor go to others, even to one that a segment moved to.
        if self.requests.settle(&mut groups, now) {
            self.flush_all(now);
            self.connect_where_needed(now);
        }
        handed_over | self.report_ends(sink)
    }

    fn step_into_stash(&mut self) -> bool {
        let mut stash = std::mem::take(&mut self.stash);
        let handed_over = self.step(&mut |completion| stash.push_back(completion.into()));
        self.stash = stash;
        handed_over
    }

    /// Receives from one donor. Says whether something was handed over.
    fn advance(
        &mut self,
        donor: DonorIndex,
        now: Duration,
        sink: &mut dyn FnMut(Completion<'_>),
    ) -> bool {
        let Some(connection) = &mut self.links[donor.0 as usize].connection else {
            return false;
        };
        let (requests, absences) = (&mut self.requests, &mut self.absences);
        let decodings = &mut self.decodings;
        let mut groups = &*self.space;
        let was_open = connection.welcome().is_some();
        let mut handed_over = false;
        let outcome = connection.progress(&mut |tag, event| {
            let slot = Slot(tag as u32);
            absences.answered(donor);
            match event {
                Event::Pages { from, sums, data } => {
                    if let Some(new) = requests.pages(slot, from, sums.len(), now) {
                        handed_over = true;
                        let (sums, data) = (&sums[new.skip..], &mut data[new.skip * PAGE_SIZE..]);
                        match new.to {
                            Recipient::Owner(token) => {
                                let (from, giver) = (new.from, Some(donor));
                                sink(Completion::Read { token, from, giver, sums, data });
                            }
                            Recipient::Decoding { decoding, shard, .. } if is_sound(sums, data) => {
                                decodings.keep(decoding, shard, new.from, data);
                            }
                            Recipient::Decoding { decoding, shard, place } => {
                                requests.shard_is_damaged(
                                    decoding,
                                    (shard, place),
                                    &mut groups,
                                    now,
                                );
                            }
                        }
                    }
                }
                Event::Done => {
                    handed_over = true;
                    requests.written(slot, &mut groups, now);
                }
                Event::Refused(refusal) => requests.flights.refused(slot, refusal),
                // The connection lets nothing through that was not asked for, and lanes ask for
                // neither extents nor lists.
                Event::Allocated(_) | Event::Held(_) | Event::Verified(_) | Event::Signed(_) => {}
            }
        });
        match outcome {
            Ok(()) => {
                let load = connection.load();
                let boot = connection.welcome().map(|welcome| welcome.boot);
                let link = &mut self.links[donor.0 as usize];
                // A page from a donor, and not only its answer to the upkeep, tells whether it
                // wants memory back.
                let wants = (load.recalled > 0, load.draining);
                let is_news = !was_open || link.wants != wants;
                if let Some(boot) = boot.filter(|_| is_news) {
                    link.wants = wants;
                    let (begun, heard_at) = (link.begun, self.space.now());
                    let is_in_time = self.space.map().heard(donor, boot, load, begun, heard_at);
                    if !was_open {
                        self.generation += 1;
                    }
                    match is_in_time {
                        true if was_open => {}
                        true => self.requests.flights.opened(donor, boot),
                        false => self.broke(donor, &ConnectionError::Closed, now),
                    }
                }
                self.flush(donor, now);
            }
            Err(error) => self.broke(donor, &error, now),
        }
        handed_over
    }

    /// Sends the reads that wait for a donor, within its window, and what its connection holds.
    fn flush(&mut self, donor: DonorIndex, now: Duration) {
        let held = self.hold_reads(donor, now);
        let Some(connection) = self.connection(donor) else { return };
        if let Err(error) = held.and_then(|()| connection.release()) {
            return self.broke(donor, &error, now);
        }
        // Data received while sending makes no descriptor readable, nor does room in a socket.
        let soon = match (connection.has_undelivered(), connection.has_held()) {
            (true, _) => Some(now),
            (false, true) => Some(now + SEND_PAUSE),
            (false, false) => None,
        };
        if let Some(soon) = soon {
            self.arm(soon);
        }
        if self.requests.flights.is_stale(donor) {
            self.broke(donor, &ConnectionError::Closed, now);
        }
    }

    /// Has a donor's connection hold the reads that wait for it, as far as the window allows.
    fn hold_reads(&mut self, donor: DonorIndex, now: Duration) -> Result<(), ConnectionError> {
        let Some(link) = self.links.get_mut(donor.0 as usize) else { return Ok(()) };
        let Some(connection) = &mut link.connection else { return Ok(()) };
        while let Some(next) = self.requests.flights.next_to_send(donor) {
            let request = Request::Read { extent: next.place.extent, pages: next.pages };
            if !connection.has_room(&request) {
                break;
            }
            connection.hold(next.slot.0.into(), request, &[])?;
            self.requests.flights.sent(donor, now);
        }
        Ok(())
    }

    fn connection(&mut self, donor: DonorIndex) -> Option<&mut Connection> {
        self.links.get_mut(donor.0 as usize).and_then(|link| link.connection.as_mut())
    }

    fn connect_where_needed(&mut self, now: Duration) {
        for donor in self.requests.flights.to_connect(now) {
            self.connect(donor, now);
        }
        if let Some(attempt) = self.requests.flights.next_attempt() {
            self.arm(attempt);
        }
    }

    fn connect(&mut self, donor: DonorIndex, now: Duration) {
        let begun = self.space.now();
        while self.links.len() <= donor.0 as usize {
            let link =
                DonorLink { lane: random_u64(), connection: None, begun, wants: (false, false) };
            self.links.push(link);
        }
        let link = &mut self.links[donor.0 as usize];
        let to = self.space.donor(donor).destination(self.space.config().credentials.as_ref());
        let address = to.address;
        let hello = self.space.hello(link.lane);
        let mut options = self.space.config().connection;
        if self.copies > 1 {
            // A donor that takes no data is as silent as one that does not answer.
            options.stall = options.stall.min(self.space.config().failover);
        }
        match Connection::start(to, &hello, &options) {
            Ok(connection) => {
                link.connection = Some(connection);
                link.begun = begun;
                self.generation += 1;
                self.arm(now + self.pulse);
            }
            Err(error) => {
                debug!(%address, %error, "cannot connect to a donor");
                self.requests.flights.broke(donor, now);
                self.fail_over(donor, now);
            }
        }
    }

    /// The connection is over. Its requests are sent again on the next one, or fail.
    fn broke(&mut self, donor: DonorIndex, error: &ConnectionError, now: Duration) {
        let name = &self.space.donor(donor).name;
        debug!(donor = name, %error, "connection lost");
        self.links[donor.0 as usize].connection = None;
        self.generation += 1;
        self.requests.flights.broke(donor, now);
        if let ConnectionError::Refused(Refusal::StaleEpoch(_)) = error {
            self.space.fence();
        }
        if self.space.is_fenced() {
            self.requests.flights.fenced();
        }
        self.fail_over(donor, now);
        self.connect_where_needed(now);
    }

    /// Moves requests that wait for the donor to others that have the same pages.
    fn fail_over(&mut self, donor: DonorIndex, now: Duration) {
        if self.copies > 1 {
            let mut groups = &*self.space;
            self.requests.fail_over(donor, &mut groups, now);
            self.flush_all(now);
        }
    }

    fn flush_all(&mut self, now: Duration) {
        for index in 0..self.links.len() {
            self.flush(DonorIndex(index as u32), now);
        }
    }

    /// Does everything that is due by the clock.
    fn tick(&mut self, now: Duration) {
        let config = self.space.config();
        let (stall, failover) = (config.connection.answer, config.failover);
        for donor in self.requests.flights.tick(now) {
            self.broke(donor, &ConnectionError::TimedOut("answer", stall), now);
        }
        if self.copies > 1 {
            for donor in self.requests.flights.silent(now, failover) {
                self.space.map().overdue(donor);
                self.broke(donor, &ConnectionError::TimedOut("answer", failover), now);
            }
        }
        // A segment of a space with one copy is whole in two places, too, while it moves.
        let mut groups = &*self.space;
        self.requests.hedge(&mut groups, now);
        self.flush_all(now);
        self.connect_where_needed(now);
        if self.requests.flights.needs_clock() {
            self.arm(now + self.pulse);
        }
        self.arm_hedge();
    }

    fn arm_hedge(&mut self) {
        if let Some(due) = self.requests.next_hedge() {
            self.arm(due);
        }
    }

    /// Sees to it that the timer goes off at that time, or earlier.
    fn arm(&mut self, at: Duration) {
        if self.timer.due().is_none_or(|due| at < due) {
            self.timer.set(at, self.clock.now(self.space.now()));
        }
    }

    fn report_stash(&mut self, sink: &mut dyn FnMut(Completion<'_>)) -> bool {
        let any = !self.stash.is_empty();
        for stashed in self.stash.drain(..) {
            match stashed {
                Stashed::Read { token, from, giver, sums, mut data } => {
                    sink(Completion::Read { token, from, giver, sums: &sums, data: &mut data });
                }
                Stashed::Written { token, generation } => {
                    sink(Completion::Written { token, generation });
                }
                Stashed::Failed { token, from, error } => {
                    sink(Completion::Failed { token, from, error });
                }
            }
        }
        any
    }

    fn report_zeros(&mut self, sink: &mut dyn FnMut(Completion<'_>)) -> bool {
        let any = !self.zeros.is_empty();
        while let Some(ZeroRead { token, pages }) = self.zeros.pop_front() {
            for from in 0..pages {
                self.zero_page.fill(0);
                let (sums, data) = (&[self.zero_sum], &mut *self.zero_page);
                sink(Completion::Read { token, from, giver: None, sums, data });
            }
        }
        any
    }

    fn report_ends(&mut self, sink: &mut dyn FnMut(Completion<'_>)) -> bool {
        let any = self.requests.has_ends();
        while let Some(end) = self.requests.next_end() {
            match end {
                End::Decoded { decoding } => self.decode(decoding, sink),
                End::Written { token, generation } => {
                    sink(Completion::Written { token, generation });
                }
                End::Failed { token, from, segment, place, cause } => {
                    let error = self.error_of(segment, place, cause);
                    sink(Completion::Failed { token, from, error });
                }
            }
        }
        self.decodings.retain(|decoding| self.requests.is_decoding(decoding));
        any
    }

    /// Works out the pages of a read from those of other shards.
    fn decode(&mut self, decoding: u64, sink: &mut dyn FnMut(Completion<'_>)) {
        let now = self.look();
        let mut groups = &*self.space;
        let Some(decoded) = self.requests.take_decoded(decoding, &mut groups, now) else {
            // It may be read from elsewhere instead.
            self.flush_all(now);
            return self.connect_where_needed(now);
        };
        let (token, from) = (decoded.token, decoded.from);
        match self.decodings.complete(decoding, &decoded) {
            Some((mut data, sums)) => {
                // Several donors sent the pages: none can be named if they are wrong.
                let giver = Some(DonorIndex::UNKNOWN);
                sink(Completion::Read { token, from, giver, sums: &sums, data: &mut data });
            }
            None => {
                let error = self.unreachable(decoded.segment, DonorIndex::UNKNOWN, now);
                sink(Completion::Failed { token, from, error });
            }
        }
    }

    fn error_of(&mut self, segment: u64, place: Place, cause: Cause) -> SpaceError {
        let donor = place.donor;
        match cause {
            Cause::Lost => self.space.lost_error(segment, donor),
            Cause::Unreachable => {
                let now = self.look();
                self.unreachable(segment, donor, now)
            }
            Cause::Interrupted => {
                SpaceError::Interrupted { donor: self.space.donor(donor).name.clone() }
            }
            Cause::Fenced => self.space.fence(),
            Cause::Refused(refusal) => {
                SpaceError::Refused { donor: self.space.donor(donor).name.clone(), refusal }
            }
        }
    }

    /// A request was not answered in time.
    fn unreachable(&mut self, segment: u64, donor: DonorIndex, now: Duration) -> SpaceError {
        if donor == DonorIndex::UNKNOWN {
            let (donor, patience) = ("of a coded stripe".to_owned(), self.space.config().patience);
            return SpaceError::Unreachable { donor, patience };
        }
        let away = self.absences.unanswered(donor, now);
        let (space, donor) = (self.space.config(), self.space.donor(donor).name.clone());
        match away {
            Some(away) => SpaceError::Away { space: space.id, segment, donor, away },
            None => SpaceError::Unreachable { donor, patience: space.patience },
        }
    }

    /// The segment that all the pages are in, if the lane may take such a request now.
    fn check(&self, pages: &[PageNo]) -> Result<u64, SpaceError> {
        let bad = |first| SpaceError::BadRequest {
            first,
            count: pages.len(),
            pages: self.space.config().pages,
        };
        let first = *pages.first().ok_or_else(|| bad(0))?;
        let segment = self.space.segment_of(first);
        let fits = |page: &PageNo| {
            self.space.segment_of(*page) == segment && *page < self.space.config().pages
        };
        if pages.len() > MAX_PAGES || !pages.iter().all(fits) {
            return Err(bad(first));
        }
        if self.space.is_fenced() {
            return Err(self.space.fenced_error());
        }
        let kept = self.zeros.len() + self.stash.len();
        if kept >= crate::lane::flights::MAX_REQUESTS
            || !self.requests.has_room(pages.len(), self.fan_out)
        {
            return Err(SpaceError::Busy(crate::lane::flights::MAX_PAGES_UNDER_WAY));
        }
        Ok(segment)
    }

    fn wait(&self, longest: Duration) {
        let fds = self.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        // A signal ends the wait early, which the callers' loops put right.
        let _ = poll(&mut fds, Timespec::try_from(longest).ok().as_ref());
    }

    /// The lane's time, by [`Clock`].
    fn look(&mut self) -> Duration {
        // Nothing is late that nobody waits for, however long ago the timer went off.
        let due = self.timer.due().filter(|_| self.requests.flights.needs_clock());
        self.clock.look(self.space.now(), due, self.pulse)
    }
}

fn write_of<'a>(
    place: Place,
    generation: Generation,
    pages: &'a [u32],
    sums: &'a [PageSum],
) -> Request<'a> {
    Request::Write { extent: place.extent, generation, pages, sums }
}

impl Groups for &Space {
    fn whereabouts(&mut self, segment: u64) -> Whereabouts {
        Space::whereabouts(self, segment)
    }

    fn desert(&mut self, segment: u64, place: Place) -> bool {
        Space::desert(self, segment, place)
    }

    fn gone(&mut self, segment: u64, place: Place) {
        self.map().gone(segment, place);
    }

    fn shards(&mut self, segment: u64) -> Option<Shards> {
        self.map().shards(segment)
    }

    fn write_ends(&mut self, segment: u64) {
        Space::write_ends(self, segment);
    }
}
