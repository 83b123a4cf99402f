//! The fault loop: one thread that reads what the kernel says, and what the donors send.
//!
//! It sleeps in one place (epoll) and never waits for anybody elsewhere: a fault is answered from
//! staging at once, or asked for and answered when the page comes; meanwhile other faults are
//! served. That keeps a single random fault at one request and one answer, without a hand-over
//! between threads.

pub(crate) mod source;
mod watched;

use crate::core::{Core, Fault, Fetch};
use crate::error::PagerError;
use crate::fault::fetch::Arrival;
use crate::guest::firecracker::Firecracker;
use crate::guest::{self, detach};
use crate::programs::helper::Helper;
use crate::programs::stage::Stage;
use crate::programs::{attach, fork};
use crate::serve::source::Source;
use crate::serve::watched::Watched;
use crate::shared::Shared;
use crate::state::journal;
use crate::state::tables::Key;
use hecaton_space::group::DonorIndex;
use hecaton_space::{Completion, Space};
use hecaton_transport::vigil::Vigil;
use hecaton_uffd::Uffd;
use hecaton_uffd::abi::*;
use rustix::event::epoll;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How long the loop waits for the helper of a program that has something to say.
const TAKING: Duration = Duration::from_millis(1);

/// Why a consumer cannot go on whose page came back wrong, and wrong again.
const DAMAGED: &str = "a page came back with a wrong checksum";
const ALTERED: &str = "a page came back that does not decrypt and is not what was written";

/// Handling of the faults among the messages that are acted upon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Faults {
    Serve,
    /// They are delivered again when the address space is woken.
    LeaveOut,
}

/// The fault loop.
pub(crate) struct Server {
    pub(crate) shared: Arc<Shared>,
    epoll: Arc<OwnedFd>,
    vigil: Vigil,
    listener: RawFd,
    /// Single pages that a thread waits for, so that no window of prefetched pages is before them.
    demand: Watched<Fetch>,
    prefetch: Watched<Fetch>,
    next_token: u64,
    pub(crate) firecracker: Option<Firecracker>,
    /// Address spaces whose faults are not served while a child of theirs attaches.
    paused: Vec<usize>,
    fetches: Vec<Fetch>,
    damaged: Vec<usize>,
    opened: Vec<bool>,
}

impl Server {
    pub(crate) fn new(
        shared: Arc<Shared>,
        space: &Arc<Space>,
        listener: RawFd,
    ) -> Result<Server, PagerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let epoll = Arc::new(epoll);
        shared.lock().epoll.0 = Some(epoll.clone());
        let server = Server {
            demand: Watched::new(space.lane()?),
            prefetch: Watched::new(space.lane()?),
            shared,
            epoll,
            vigil: Vigil::default(),
            listener,
            next_token: 0,
            firecracker: None,
            paused: Vec::new(),
            fetches: Vec::new(),
            damaged: Vec::new(),
            opened: Vec::new(),
        };
        server.watch(server.listener, Source::Listener, epoll::EventFlags::IN)?;
        server.watch(server.shared.bell.as_raw_fd(), Source::Bell, epoll::EventFlags::IN)?;
        Ok(server)
    }

    pub(crate) fn watch(
        &self,
        fd: RawFd,
        source: Source,
        events: epoll::EventFlags,
    ) -> std::io::Result<()> {
        // SAFETY: the descriptor is open, and is taken out of the set before it is closed.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.encode()), events)?)
    }

    /// Begins to serve an address space: its faults, and the end of its helper.
    pub(crate) fn watch_space(&self, index: usize, uffd: Uffd, helper: Option<RawFd>) {
        let faults = self.watch(uffd.0, Source::Faults(index), epoll::EventFlags::IN);
        let ends = helper.map_or(Ok(()), |fd| self.watch_helper(index, fd));
        if let Err(error) = faults.and(ends)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            self.shared.lock().fail(format!("a program's faults cannot be watched: {error}"));
        }
    }

    /// Begins to serve a hypervisor: its faults, and what it hands over later.
    pub(crate) fn watch_guest(&self, index: usize, uffd: Uffd, socket: Option<RawFd>) {
        self.watch_space(index, uffd, None);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if let Some(Err(error)) = socket.map(|fd| self.watch(fd, Source::Guest(index), flags)) {
            tracing::warn!(%error, "memory that is plugged into the machine later is not paged");
        }
    }

    /// Stops reading what an address space has to say, while a child of its is to come.
    pub(crate) fn pause(&mut self, core: &Core, index: usize) {
        if let Some(uffd) = core.uffd(index) {
            self.unwatch(uffd.0);
            self.paused.push(index);
        }
    }

    /// Reads again what all those have to say whose children have come, or will not.
    pub(crate) fn resume(&mut self, shared: &Shared) {
        if self.paused.is_empty() {
            return;
        }
        let mut core = shared.lock();
        let is_over = |index: &mut usize| !core.is_forked_from(*index);
        let over: Vec<usize> = self.paused.extract_if(.., is_over).collect();
        let spaces: Vec<(usize, Uffd)> =
            over.into_iter().filter_map(|index| Some((index, core.space(index)?.uffd))).collect();
        drop(core);
        for (index, uffd) in spaces {
            self.watch_space(index, uffd, None);
        }
    }

    pub(crate) fn unwatch(&self, fd: RawFd) {
        // SAFETY: the descriptor is open. An error means that it was not watched.
        let _ = epoll::delete(&self.epoll, unsafe { BorrowedFd::borrow_raw(fd) });
    }

    pub(crate) fn watch_child(&self, index: usize, fd: RawFd) -> std::io::Result<()> {
        self.watch(fd, Source::Child(index), epoll::EventFlags::IN)
    }

    pub(crate) fn watch_helper(&self, index: usize, fd: RawFd) -> std::io::Result<()> {
        self.watch(fd, Source::Helper(index), epoll::EventFlags::RDHUP)
    }

    /// Acts upon what a predecessor read and did not finish.
    pub(crate) fn finish_journal(&mut self) {
        let shared = self.shared.clone();
        let mut core = shared.lock();
        let Some(space) = core.state.journal.last_read() else { return };
        self.act(&mut core, space, journal::DEPTH, Faults::LeaveOut);
    }

    /// For a successor: waits until the helper of each program has done all that the predecessor
    /// asked of it. Some of that is reported as events, which must be read for it to go on.
    pub(crate) fn settle_helpers(&mut self) {
        let shared = self.shared.clone();
        let spaces = shared.lock().spaces.len();
        for space in 0..spaces {
            let core = shared.lock();
            let (Some(helper), Some(uffd)) = (core.helper(space), core.uffd(space)) else {
                continue;
            };
            // While a process forks its helper has nothing to do that would raise an event, and the
            // events of its other threads stay unread.
            let events = (!core.is_forked_from(space)).then_some(uffd);
            drop(core);
            let settled = helper.line(uffd).barrier(events, || self.read_events(space));
            if settled.is_err() {
                shared.lock().lose_helper_before_settling(space);
            }
        }
    }

    fn read_events(&mut self, space: usize) {
        let shared = self.shared.clone();
        let mut core = shared.lock();
        let Some(uffd) = core.uffd(space) else { return };
        let Ok(count) = core.state.journal.fill(space, uffd) else { return };
        self.act(&mut core, space, count, Faults::LeaveOut);
    }

    /// Acts upon the first `count` messages in the journal, which are of one address space. Events
    /// first: a fault that was read with one may be on what the event has changed.
    fn act(&mut self, core: &mut Core, space: usize, count: usize, faults: Faults) {
        for of_faults in [false, true] {
            for index in 0..count {
                let Some(message) = core.state.journal.message(index) else { continue };
                if (message.event == UFFD_EVENT_PAGEFAULT) == of_faults {
                    if !of_faults || faults == Faults::Serve {
                        self.message(core, space, &message);
                    }
                    core.state.journal.done(index);
                }
            }
        }
    }

    /// Begins to serve the address spaces that a predecessor has left.
    pub(crate) fn watch_all(&self) {
        let core = self.shared.lock();
        let spaces: Vec<_> = core
            .live_spaces()
            .filter(|(_, space)| space.stage == Stage::Live)
            .map(|(i, space)| (i, space.uffd, space.connection(), space.guest.is_some()))
            .collect();
        drop(core);
        for (index, uffd, connection, is_guest) in spaces {
            if is_guest {
                self.watch_guest(index, uffd, connection);
            } else {
                self.watch_space(index, uffd, connection);
            }
        }
    }

    /// Runs until `over` says that the consumer has ended.
    pub(crate) fn run(&mut self, over: impl Fn(&Core) -> bool) -> std::io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            self.watch_lane(Source::Demand)?;
            self.watch_lane(Source::Prefetch)?;
            self.bring_home();
            self.tend_firecracker()?;
            events.clear();
            self.wait(&mut events)?;
            if events.is_empty() {
                if over(&self.shared.lock()) {
                    return Ok(());
                }
                fork::grant(self, &self.shared.clone());
            }
            for event in &events {
                let source = Source::decode(event.data.u64());
                self.handle(source)?;
            }
        }
    }

    /// Goes on with a detach, if one is under way.
    fn bring_home(&mut self) {
        let wanted = self.shared.detaching.load(Relaxed);
        if !wanted || self.prefetch.requests.len() >= detach::MAX_REQUESTS {
            return;
        }
        let shared = self.shared.clone();
        let mut core = shared.lock();
        let idle = self.prefetch.requests.is_empty() && self.demand.requests.is_empty();
        let progress = core.bring_home(idle, &mut self.fetches);
        if progress == detach::Progress::Done {
            core.finish_detach();
            shared.detaching.store(false, Relaxed);
        }
        drop(core);
        self.send();
    }

    /// Waits for something to do: at first without sleeping, see [`Vigil`].
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> std::io::Result<()> {
        loop {
            let sleep = !self.vigil.looks_again();
            let tv_nsec = if sleep { 50_000_000 } else { 0 };
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if !events.is_empty() {
                self.vigil.keep();
            }
            if sleep || !events.is_empty() {
                return Ok(());
            }
        }
    }

    fn handle(&mut self, source: Source) -> std::io::Result<()> {
        match source {
            Source::Listener => {
                while let Some(fd) = attach::accept(self.listener) {
                    self.watch(fd, Source::Newcomer(fd), epoll::EventFlags::IN)?;
                }
            }
            Source::Newcomer(fd) => {
                self.unwatch(fd);
                attach::newcomer(self, &self.shared.clone(), fd);
            }
            Source::Faults(space) => {
                self.read_faults(space);
            }
            Source::Child(space) => fork::child_speaks(self, &self.shared.clone(), space),
            Source::Bell => {
                let mut rung = [0u8; 8];
                // Nothing is lost when it was not rung after all.
                let _ = rustix::io::read(&self.shared.bell, &mut rung);
                for socket in self.shared.take_admitted() {
                    let fd = socket.into_raw_fd();
                    self.watch(fd, Source::Newcomer(fd), epoll::EventFlags::IN)?;
                }
                fork::grant(self, &self.shared.clone());
            }
            Source::Helper(space) => {
                let mut core = self.shared.lock();
                // A program that has called `exec` or ended. Looked at again, since what was
                // reported may be another's who had the index before.
                if let Some(helper) = core.helper(space).filter(Helper::has_hung_up) {
                    self.unwatch(helper.socket);
                    core.lose_helper(space);
                }
                drop(core);
                self.shared.evict.notify_one();
            }
            Source::Guest(space) => self.hear_guest(space)?,
            Source::FirecrackerListener => self.accept_firecracker()?,
            Source::Firecracker(fd) => self.hear_firecracker(fd)?,
            Source::Demand | Source::Prefetch => self.collect(source),
        }
        Ok(())
    }

    fn hear_guest(&mut self, space: usize) -> std::io::Result<()> {
        let connection = self.shared.lock().space(space).and_then(|space| space.connection());
        let Some(socket) = connection else { return Ok(()) };
        if guest::handover::go_on(&self.shared, space, socket) {
            return Ok(());
        }
        self.unwatch(socket);
        let mut core = self.shared.lock();
        // Descriptors may be closed in a process that lives on, whose memory must be served:
        // letting go of it would give it zeros. Housekeeping notices when it has ended.
        if core.space(space).is_some_and(|space| space.has_ended()) {
            core.end_space(space);
        }
        Ok(())
    }

    fn watch_lane(&mut self, source: Source) -> std::io::Result<()> {
        let watched = if source == Source::Demand { &mut self.demand } else { &mut self.prefetch };
        let generation = Some(watched.lane.generation());
        if watched.generation == generation {
            return Ok(());
        }
        watched.generation = generation;
        let mut fds = Vec::new();
        watched.lane.fds(&mut fds);
        // Those that the lane has closed are out of the set already, and must not be taken out by
        // their numbers: such a number may be that of a userfaultfd by now, which nobody would read
        // any more. For the same reason one that was there before may be another file.
        for fd in fds {
            match self.watch(fd, source, epoll::EventFlags::IN) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads what the kernel has to say of an address space; returns how many messages.
    pub(crate) fn read_faults(&mut self, space: usize) -> usize {
        let shared = self.shared.clone();
        let mut core = shared.lock();
        if core.taking == Some(space) {
            // A helper that is stopped must not stop those that were forked with its program: what
            // is not read yet is reported again.
            core = shared.taken.wait_timeout(core, TAKING).expect("never poisoned").0;
            if core.taking == Some(space) {
                return 0;
            }
        }
        let Some(uffd) = core.uffd(space) else { return 0 };
        let Ok(count) = core.state.journal.fill(space, uffd) else { return 0 };
        self.act(&mut core, space, count, Faults::Serve);
        core.note_peaks();
        let evict = core.wants_eviction();
        drop(core);
        // The page that is waited for is asked for before anything else.
        self.send();
        if evict {
            shared.evict.notify_one();
        }
        count
    }

    fn message(&mut self, core: &mut Core, space: usize, message: &UffdMsg) {
        match message.event {
            UFFD_EVENT_PAGEFAULT => {
                let fault = Fault {
                    key: Key::new(space, message.arg1 >> 12),
                    write: message.arg0 & UFFD_PAGEFAULT_FLAG_WRITE != 0,
                    protected: message.arg0 & UFFD_PAGEFAULT_FLAG_WP != 0,
                    thread: message.arg2 as u32,
                    read_at: Instant::now(),
                };
                core.fault(fault, &mut self.fetches);
            }
            UFFD_EVENT_REMAP if core.is_guest(space) => {
                core.fail("the hypervisor has moved guest RAM to another address".into());
            }
            UFFD_EVENT_REMAP => {
                let (from, to, len) = (message.arg0, message.arg1, message.arg2);
                core.moved_at_fork(space, from, to, len);
                core.remapped(space, from, to, len);
            }
            UFFD_EVENT_REMOVE => core.removed(space, message.arg0, message.arg1),
            UFFD_EVENT_UNMAP => core.unmapped(space, message.arg0, message.arg1),
            _ => {}
        }
    }

    /// Sends the requests that have come up.
    fn send(&mut self) {
        for fetch in std::mem::take(&mut self.fetches) {
            let watched =
                if fetch.demanded_at.is_some() { &mut self.demand } else { &mut self.prefetch };
            self.next_token += 1;
            match watched.lane.read_avoiding(self.next_token, &fetch.pages, &fetch.avoid) {
                Ok(()) => {
                    watched.requests.insert(self.next_token, fetch);
                }
                Err(error) => self.shared.lock().fetch_failed(&fetch, 0, &error),
            }
        }
    }

    /// Takes in what the donors have sent.
    fn collect(&mut self, source: Source) {
        let watched = if source == Source::Demand { &mut self.demand } else { &mut self.prefetch };
        let (shared, requests, damaged) = (&self.shared, &mut watched.requests, &mut self.damaged);
        let opened = &mut self.opened;
        // Each copy is given a chance; one that is alone has a second one.
        let config = watched.lane.space().config();
        let copies = usize::from(config.redundancy.copies());
        // The other pages of a coded stripe count as one more copy.
        let chances = copies.max(2) + usize::from(config.cold.is_some());
        let mut again = Vec::new();
        watched.lane.progress(None, &mut |completion| match completion {
            Completion::Read { token, from, giver, data, .. } => {
                let Some(fetch) = requests.get(&token) else { return };
                damaged.clear();
                // Without the lock: what is awaited still is not written meanwhile.
                if let Some(sealing) = &shared.sealing {
                    sealing.open(&fetch.pages[from..], data, opened);
                }
                let opened = shared.sealing.is_some().then_some(&**opened);
                let came = Arrival { from, data, opened };
                let mut core = shared.lock();
                core.arrived(fetch, &came, damaged);
                let wrong = fetch.avoid.len() + 1;
                if wrong >= chances && !damaged.is_empty() {
                    let what = if opened.is_some() { ALTERED } else { DAMAGED };
                    let often = if wrong == 2 { "twice".into() } else { format!("{wrong} times") };
                    core.fail(format!("{what}, {often}"));
                }
                for &index in damaged.iter().filter(|_| wrong < chances) {
                    // Pages that no donor has are zeros, and come from nobody.
                    let giver = giver.unwrap_or(DonorIndex::UNKNOWN);
                    again.push(Fetch {
                        tag: fetch.tag,
                        keys: vec![fetch.keys[index]],
                        pages: vec![fetch.pages[index]],
                        stamps: vec![fetch.stamps[index]],
                        demanded_at: Some(Instant::now()),
                        write: fetch.write,
                        avoid: fetch.avoid.iter().copied().chain([giver]).collect(),
                        ..Fetch::default()
                    });
                }
                if came.pages().end == fetch.keys.len() {
                    drop(core);
                    requests.remove(&token);
                }
            }
            Completion::Failed { token, from, error } => {
                if let Some(fetch) = requests.remove(&token) {
                    shared.lock().fetch_failed(&fetch, from, &error);
                }
            }
            Completion::Written { .. } => unreachable!("this lane only reads"),
        });
        for fetch in &again {
            watched.lane.space().suspect(fetch.pages[0]);
        }
        if !again.is_empty() {
            self.fetches = again;
            self.send();
        }
    }
}
