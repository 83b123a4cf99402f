//! The pager's state under its one lock, and what every part of it does to a page.
//!
//! Each page is in one place at a time (see [`Entry`]); each change of place is a method here.
//! The kernel reports events to `fault` and `event`; `evict` chooses and settles batches. The lock
//! is held for table look-ups and for the ioctls that map pages: so the table and the kernel's
//! mappings change together. It is never held across a wait for a donor, a helper or a disk.

use crate::evict::own_reads::OwnReads;
use crate::evict::staging::Staging;
use crate::evict::turn::Turn;
use crate::fault::emptied::Emptied;
use crate::guest::Ram;
use crate::guest::detach::Detach;
use crate::guest::memory_file::MemoryFile;
use crate::process::guard::Guard;
use crate::programs::address_space::AddressSpace;
use crate::programs::fork::ForkRequest;
use crate::programs::helper::Helper;
use crate::programs::stage::Stage;
use crate::shared::EpollSet;
use crate::state::CHUNK_PAGES;
use crate::state::entry::{Entry, Place, TAG_MASK};
use crate::state::record::Record;
use crate::state::space_pages::SpacePages;
use crate::state::tables::{Key, Tables};
use crate::state::{MAX_SPACES, State};
use crate::stats::{LatencyRecorder, Stats};
use hecaton_memory::PageSum;
use hecaton_policy::evict::{self, EvictionClock, Installed, Order};
use hecaton_policy::prefetch::{FillAhead, Limits, Prefetcher};
use hecaton_space::group::DonorIndex;
use hecaton_uffd::Uffd;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// A fault as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) key: Key,
    /// The access was a write.
    pub(crate) write: bool,
    /// The page is there, but write-protected.
    pub(crate) protected: bool,
    pub(crate) thread: u32,
    pub(crate) read_at: Instant,
}

/// Pages to be read from the space: all of one segment, in one request.
#[derive(Debug, Default)]
pub(crate) struct Fetch {
    pub(crate) tag: u32,
    pub(crate) keys: Vec<Key>,
    pub(crate) pages: Vec<u64>,
    /// When a fault on the first page was read, if it was asked for by one.
    pub(crate) demanded_at: Option<Instant>,
    /// When each page was evicted.
    pub(crate) stamps: Vec<u32>,
    /// The page that stays unmapped, as the sign that the program follows the stream.
    pub(crate) trigger: Option<Key>,
    /// Map writable: the stream writes.
    pub(crate) write: bool,
    /// Donors that have sent the page with a wrong checksum.
    pub(crate) avoid: Vec<DonorIndex>,
}

/// A page in the eviction batch under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchItem {
    /// Where the page was when the batch began, or when it was about to be taken.
    pub(crate) key: Key,
    /// Where it is now: a program may `mremap` it meanwhile.
    pub(crate) now_at: Key,
}

/// The helper was told to drop these pages, and how often the kernel has reported each as removed.
///
/// The helper's own `madvise` is reported like the program's, in as many parts as there are
/// mappings. So reports are counted by page: one is the helper's; a page with more was freed by the
/// program at the same time. Which report was whose does not matter, because faults on these pages
/// wait until the batch is settled.
pub(crate) type OwnDrop = HashMap<Key, u32>;

/// All that is under the lock.
pub(crate) struct Core {
    pub(crate) state: State,
    pub(crate) guard: Arc<Guard>,
    pub(crate) epoll: EpollSet,
    pub(crate) tables: Tables,
    pub(crate) pages: SpacePages,
    pub(crate) staging: Staging,
    pub(crate) spaces: Vec<Option<AddressSpace>>,
    pub(crate) order: Box<dyn Order>,
    pub(crate) clock: EvictionClock,
    pub(crate) prefetcher: Prefetcher,
    pub(crate) fill_ahead: FillAhead,
    /// Pages that may be resident.
    pub(crate) limit: u64,
    /// Pages above the limit that may be resident, because nothing more can be evicted.
    pub(crate) excess: u64,
    /// Pages of the pool that the consumer may hold; `None`: what it gets.
    pub(crate) target: Option<u64>,
    /// Pages resident in charged address spaces.
    pub(crate) resident: u64,
    /// Pages on their way in.
    pub(crate) fetching: u64,
    pub(crate) batch: Vec<BatchItem>,
    /// The program whose helper is moving pages away, by their addresses. Nothing is read of its
    /// userfaultfd meanwhile: see [`crate::evict`].
    pub(crate) taking: Option<usize>,
    /// Programs that want to fork, in the order in which they said so.
    pub(crate) fork_requests: VecDeque<ForkRequest>,
    /// Whether forks or evictions are next.
    pub(crate) turn: Turn,
    /// For a successor: pages of a batch that was copied and not settled, and their slots.
    pub(crate) unsettled: HashMap<Key, u32>,
    pub(crate) own_drop: OwnDrop,
    pub(crate) emptied: Emptied,
    pub(crate) own_reads: OwnReads,
    /// Ranges whose waiting threads fault again once the batch is settled.
    pub(crate) parked: Vec<Key>,
    /// The same, once there is room.
    pub(crate) starved: VecDeque<Key>,
    /// Trigger pages in staging, by slot; and those still on their way.
    pub(crate) triggers: HashMap<u32, Key>,
    pub(crate) coming_triggers: HashSet<Key>,
    pub(crate) next_tag: u32,
    pub(crate) stats: Stats,
    pub(crate) pool_latency: LatencyRecorder,
    pub(crate) local_latency: LatencyRecorder,
    /// Evict down to this many pages, although there is room.
    pub(crate) evict_to: Option<u64>,
    /// The consumer has ended: the evictor ends too.
    pub(crate) over: bool,
    /// Files of guest RAM that was unmapped, until no batch can name them.
    pub(crate) unmapped_files: Vec<MemoryFile>,
    /// Nothing can be taken away from the machine's memory: the limit is not kept.
    pub(crate) limit_is_advisory: bool,
    /// A machine is being detached.
    pub(crate) detach: Option<Detach>,
    /// Action for a consumer that cannot go on.
    pub(crate) on_loss: OnLoss,
    /// Nothing more is served: the reason, for the consumer.
    pub(crate) failed: Option<String>,
}

/// Action for a consumer whose memory cannot be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OnLoss {
    /// Its processes are killed.
    Kill,
    /// The supervisor is told, and stops the consumer. Until then faults on lost pages wait, and
    /// all others are served.
    Report,
}

/// Pages kept free for faults and prefetching, of `limit`, below the target.
pub(crate) fn reserve(limit: u64) -> u64 {
    (limit / 16).clamp(64, 4096)
}

impl Core {
    pub(crate) fn new(state: State, guard: Arc<Guard>, limit: u64) -> Core {
        let tables = Tables::load(&state);
        let capacity = limit as usize;
        Core {
            state,
            guard,
            epoll: EpollSet::default(),
            tables,
            pages: SpacePages::new(),
            staging: Staging::new(),
            spaces: Vec::new(),
            order: evict::default(),
            clock: EvictionClock::new(capacity),
            prefetcher: Prefetcher::new(Limits::for_capacity(capacity)),
            fill_ahead: FillAhead::new(capacity),
            limit,
            excess: 0,
            target: None,
            resident: 0,
            fetching: 0,
            batch: Vec::new(),
            taking: None,
            fork_requests: VecDeque::new(),
            turn: Turn::default(),
            unsettled: HashMap::new(),
            own_drop: OwnDrop::new(),
            emptied: Emptied::default(),
            own_reads: OwnReads::default(),
            parked: Vec::new(),
            starved: VecDeque::new(),
            triggers: HashMap::new(),
            coming_triggers: HashSet::new(),
            next_tag: 0,
            stats: Stats::default(),
            pool_latency: LatencyRecorder::new(),
            local_latency: LatencyRecorder::new(),
            evict_to: None,
            over: false,
            unmapped_files: Vec::new(),
            limit_is_advisory: false,
            detach: None,
            on_loss: OnLoss::Kill,
            failed: None,
        }
    }

    pub(crate) fn get(&mut self, key: Key) -> Entry {
        self.tables.get(&self.state, key)
    }

    pub(crate) fn set(&mut self, key: Key, entry: Entry) {
        self.tables.set(&self.state, key, entry);
    }

    pub(crate) fn space(&mut self, index: usize) -> Option<&mut AddressSpace> {
        self.spaces.get_mut(index)?.as_mut().filter(|space| !space.gone)
    }

    pub(crate) fn is_guest(&self, index: usize) -> bool {
        self.spaces.get(index).and_then(Option::as_ref).is_some_and(|space| space.guest.is_some())
    }

    pub(crate) fn uffd(&self, index: usize) -> Option<Uffd> {
        self.spaces.get(index)?.as_ref().map(|space| space.uffd)
    }

    /// Where the next address space goes; `None` when there are too many.
    pub(crate) fn free_space(&self) -> Option<usize> {
        let free = self.spaces.iter().position(Option::is_none);
        Some(free.unwrap_or(self.spaces.len())).filter(|&index| index < MAX_SPACES)
    }

    /// A new address space; `None` when there are too many.
    pub(crate) fn add_space(&mut self, mut space: AddressSpace) -> Option<usize> {
        if space.serial == 0 {
            space.serial = self.state.next_serial();
        }
        let index = self.free_space()?;
        space.save(&self.state, index);
        if index == self.spaces.len() {
            self.spaces.push(None);
        }
        self.spaces[index] = Some(space);
        Some(index)
    }

    pub(crate) fn live_spaces(&self) -> impl Iterator<Item = (usize, &AddressSpace)> {
        let spaces = self.spaces.iter().enumerate();
        spaces.filter_map(|(i, space)| Some((i, space.as_ref()?))).filter(|(_, s)| !s.gone)
    }

    /// A page has come into a program's memory.
    pub(crate) fn count_in(&mut self, key: Key, how: Installed) {
        let space = self.spaces[key.space()].as_mut().expect("pages belong to an address space");
        space.resident += 1;
        if space.charged {
            self.resident += 1;
            self.order.installed(self.tables.place_of(&self.state, key), how);
        }
    }

    /// A page has left a program's memory. `in_order`: the eviction order still has it.
    pub(crate) fn count_out(&mut self, key: Key, in_order: bool) {
        let Some(space) = self.spaces[key.space()].as_mut() else { return };
        // A successor that finishes its predecessor's journal has counted nothing yet; what is left
        // then, it counts afterwards.
        let Some(rest) = space.resident.checked_sub(1) else { return };
        space.resident = rest;
        if space.charged {
            self.resident -= 1;
            if in_order {
                self.order.removed(self.tables.place_of(&self.state, key));
            }
        }
    }

    /// Pages of the address space count against local memory from now on.
    pub(crate) fn charge(&mut self, index: usize) {
        let Some(space) = self.spaces[index].as_mut().filter(|space| !space.charged) else {
            return;
        };
        space.charged = true;
        self.resident += space.resident;
        space.save(&self.state, index);
        for first in self.tables.chunks_in(index, crate::state::tables::ALL_PAGES) {
            for key in (0..crate::state::CHUNK_PAGES).map(|i| first.plus(i)) {
                let entry = self.get(key);
                if entry.place() == Place::Resident && !entry.is_busy() {
                    self.order.installed(self.tables.place_of(&self.state, key), Installed::Demand);
                }
            }
        }
    }

    /// A staging slot to fill; a prefetched window whose trigger lay there is over.
    pub(crate) fn take_slot(&mut self) -> Option<u32> {
        let slot = self.staging.take(&self.state, &self.pages)?;
        self.end_trigger(slot);
        Some(slot)
    }

    /// The contents of a page, which are in `slot`, belong to a space page of their own from now
    /// on. Returns that.
    pub(crate) fn stage_out(&mut self, key: Key, entry: Entry, slot: u32, sum: PageSum) -> u64 {
        let page = self.new_page(key);
        let record = Record::FREE.with_refs(1).with_slot(Some(slot)).with_sum(sum);
        self.pages.set_record(&self.state, page, record);
        self.staging.publish(&self.state, slot, page, false);
        let out = entry.with_place(Place::Out).with_dirty(false);
        self.set(key, out.with_space_page(Some(page)));
        page
    }

    /// A space page for the contents of `key`: where a machine's RAM has its place, or anywhere.
    pub(crate) fn new_page(&mut self, key: Key) -> u64 {
        let ram = self.spaces.get(key.space()).and_then(|space| space.as_ref()?.guest.as_ref());
        let position = ram.and_then(|ram| ram.position(key.address()));
        let wanted =
            position.map(|at| (at / (CHUNK_PAGES * hecaton_memory::PAGE_SIZE as u64)) as u32);
        self.pages.allocate(&self.state, key, wanted)
    }

    fn end_trigger(&mut self, slot: u32) {
        if let Some(key) = self.triggers.remove(&slot) {
            self.prefetcher.on_window_dead(key.0);
        }
    }

    /// One entry less names the space page.
    pub(crate) fn release_page(&mut self, page: u64) {
        if let Some(record) = self.pages.release(&self.state, page)
            && let Some(slot) = record.slot()
        {
            self.end_trigger(slot);
            self.staging.forget(&self.state, slot);
        }
    }

    /// The contents of a page are gone: it was freed by the program.
    pub(crate) fn discard(&mut self, key: Key) {
        let entry = self.get(key);
        match entry.place() {
            Place::Zero => return,
            // Busy: it left the order when the batch claimed it, and is counted until the batch is
            // settled, which will find it zero.
            Place::Resident if entry.is_busy() => {}
            Place::Resident => self.count_out(key, true),
            Place::Out => {}
            Place::Fetching => self.end_fetch(key),
        }
        self.set(key, Entry::ZERO.with_busy(entry.is_busy()));
        if let Some(page) = entry.space_page() {
            self.release_page(page);
        }
    }

    /// Whatever arrives for the page is not wanted any more.
    pub(crate) fn end_fetch(&mut self, key: Key) {
        self.fetching -= 1;
        if self.coming_triggers.remove(&key) {
            self.prefetcher.on_window_dead(key.0);
        }
    }

    pub(crate) fn new_tag(&mut self) -> u32 {
        self.next_tag = (self.next_tag + 1) & TAG_MASK;
        self.next_tag
    }

    /// The address space has ended. Its pages are given up now, or once the batch is settled.
    pub(crate) fn end_space(&mut self, index: usize) {
        let Some(space) = self.spaces.get_mut(index).and_then(Option::as_mut) else { return };
        space.gone = true;
        if !self.batch.iter().any(|item| item.key.space() == index) {
            self.tear_down(index);
        }
    }

    fn tear_down(&mut self, index: usize) {
        self.forget_parent(index);
        for first in self.tables.chunks_in(index, crate::state::tables::ALL_PAGES) {
            for i in 0..crate::state::CHUNK_PAGES {
                self.discard(first.plus(i));
            }
            self.tables.free_chunk(&self.state, first);
        }
        let space = self.spaces[index].take().expect("torn down once");
        debug_assert_eq!(space.resident, 0);
        AddressSpace::erase(&self.state, index);
        self.guard.release(space.serial);
        if let Some(ram) = &space.guest {
            ram.erase(&self.state);
            self.guard.release_labels(ram.held().into_iter().map(|(label, _)| label).collect());
        }
        for (_, fd) in space.held() {
            self.epoll.forget(fd);
            close(fd);
        }
        self.emptied.forget(index);
        self.parked.retain(|key| key.space() != index);
        self.starved.retain(|key| key.space() != index);
    }

    /// Tears down what ended while a batch named it.
    pub(crate) fn tear_down_gone(&mut self) {
        for index in 0..self.spaces.len() {
            if self.spaces[index].as_ref().is_some_and(|space| space.gone) {
                self.tear_down(index);
            }
        }
    }

    /// Lets the threads fault again that wait for what has just become possible.
    pub(crate) fn wake_waiting(&mut self) {
        let starved = if self.room() > 0 { self.starved.drain(..).collect() } else { Vec::new() };
        for key in self.parked.drain(..).chain(starved) {
            if let Some(Some(space)) = self.spaces.get(key.space()) {
                // An error means that the process has ended.
                let _ = space.uffd.wake(key.address(), hecaton_memory::PAGE_SIZE as u64);
            }
        }
    }

    /// The consumer cannot go on: pages are lost, or there is nowhere to put them. It is ended with
    /// the reason, rather than given wrong data or left to wait for ever; a machine is left to who
    /// supervises it, see [`OnLoss`].
    pub(crate) fn fail(&mut self, reason: String) {
        if self.failed.is_some() {
            return;
        }
        tracing::error!(reason, "the consumer cannot go on");
        self.failed = Some(reason);
        if self.on_loss == OnLoss::Kill {
            self.kill_all();
        }
    }

    /// The pager is about to end: nobody may run on without it.
    pub(crate) fn terminate(&mut self, reason: &str) {
        self.on_loss = OnLoss::Kill;
        match self.failed {
            Some(_) => self.kill_all(),
            None => self.fail(reason.into()),
        }
    }

    fn kill_all(&self) {
        for (_, space) in self.live_spaces() {
            space.kill();
        }
    }

    /// The helper of a page's program, if something may be evicted there.
    pub(crate) fn helper(&self, index: usize) -> Option<Helper> {
        let space = self.spaces.get(index)?.as_ref()?;
        space.helper.filter(|_| !space.gone && space.stage == Stage::Live)
    }

    /// The statistics, complete.
    pub(crate) fn snapshot(&mut self) -> Stats {
        let bytes = hecaton_memory::pages_to_bytes;
        let counters = self.prefetcher.counters();
        let mut stats = self.stats.clone();
        stats.local_limit_bytes = bytes(self.limit);
        stats.local_bytes = bytes(self.resident);
        stats.pool_bytes = bytes(self.pages.in_use());
        stats.target_bytes = self.target.map(bytes);
        stats.processes = self.live_spaces().count() as u64;
        let guests = || self.live_spaces().filter_map(|(_, space)| space.guest.as_ref());
        stats.limit_is_advisory = self.limit_is_advisory;
        stats.guest_ram_bytes = guests().map(Ram::bytes).sum();
        stats.memory_file_bytes = guests().map(Ram::allocated_bytes).sum();
        stats.pages_prefetched = counters.prefetched;
        stats.prefetch_hits = counters.hits;
        stats.prefetch_waste = counters.waste;
        stats.pool_fault_latency = self.pool_latency.latency();
        stats.local_fault_latency = self.local_latency.latency();
        stats.error.clone_from(&self.failed);
        stats
    }

    /// Notes the highest water marks.
    pub(crate) fn note_peaks(&mut self) {
        let bytes = hecaton_memory::pages_to_bytes;
        self.stats.local_peak_bytes = self.stats.local_peak_bytes.max(bytes(self.resident));
        self.stats.pool_peak_bytes = self.stats.pool_peak_bytes.max(bytes(self.pages.in_use()));
    }
}

pub(crate) fn close(fd: std::os::fd::RawFd) {
    // SAFETY: the caller owns the descriptor and does not use it again.
    unsafe { libc::close(fd) };
}
