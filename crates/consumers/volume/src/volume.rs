//! A volume: a space that is read and written at any byte.
//!
//! Each request locks its pages ([`crate::requests::page_locks`]) for as long as it takes. A write
//! is named in the state before it is sent ([`crate::state`]) and answered when all copies have it.
//! Parts of pages are read, changed and written under the same lock.

use crate::attach::{Attachment, Attachments, Client, Held, Role};
use crate::pool::fetch::{fetch, runs};
use crate::pool::lanes::{Lanes, Lent, MAX_LANES, SWAP_LANES};
use crate::pool::scrub;
use crate::pool::sealing::Sealed;
use crate::pool::settle::{self, Unsettled};
use crate::pool::store::{Attempt, Fate, Item, Writer, fate_of, store};
use crate::readers::{self, Reading, SharedBy};
use crate::requests::buffer::{self, Buffer, Reserved};
use crate::requests::page_locks::{Access, PageLock, PageLocks};
use crate::requests::slots::Slots;
use crate::resize::Watchers;
use crate::snapshot::Copying;
use crate::spilling::places::{Place, Places};
use crate::spilling::{departures, returns, target::Target};
use crate::state::{MAX_PAGES, Page, SEGMENT_PAGES, SLOTS, State, pages_of_segment, word_of};
use crate::stats::{Counters, Stats};
use crate::{BlockError, VolumeError};
use hecaton_memory::{
    Epoch, PAGE_SIZE, PageNo, SpaceId, is_zero, page_sum, pages_for_bytes, pages_to_bytes,
    unix_time_ms,
};
use hecaton_pki::CredentialsDir;
use hecaton_space::seal::Sealer;
use hecaton_space::{
    COPYING_BYTES_PER_S, Directory, FAILOVER, Redundancy, Site, Space, SpaceConfig, SpaceError,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// Most bytes of a volume: 1 TiB.
pub const MAX_VOLUME_BYTES: u64 = 1 << 40;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages that one request has under way at a time: a quarter of all slots.
const ROUND: u64 = SLOTS as u64 / 4;

/// Slots that may be with writes that are not settled; the others are for those that go on.
pub(crate) const MAX_UNSETTLED_SLOTS: usize = SLOTS as usize / 2;

/// Most discards that are not settled.
const MAX_UNSETTLED_DISCARDS: u64 = 64;

/// Time between two lines in the log about requests that failed.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(1);

/// Between two attempts to tell a donor of a discard.
const DISCARD_PAUSE: Duration = Duration::from_millis(100);

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Configuration of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// Its name, for people and clients.
    pub name: String,
    /// Its space, chosen at random.
    pub space: u64,
    /// Its size in pages, when it was created.
    pub pages: u64,
    /// The kernel swaps to it: what it takes to serve it is bounded, and had in advance
    /// ([`crate::requests::reserve`]).
    #[serde(default)]
    pub for_swap: bool,
    /// Copies of each page: 1 to 3.
    pub copies: u8,
    /// Where it is served: nearer donors are taken first.
    pub site: Site,
    /// The only donors that may be used, by name; all if there are none.
    pub donors: Vec<String>,
    /// The directory of its node's certificate: donors are spoken to by TLS, and show their nodes'.
    #[serde(default)]
    pub tls_dir: Option<PathBuf>,
    /// How long donors keep the space when they hear nothing.
    pub lease: Duration,
    /// How long a donor may be away before requests for its pages fail.
    pub donor_patience: Duration,
    /// Bytes that donors read in a second, all together, to compare the copies of pages. 0 compares
    /// only pages that came back wrong.
    #[serde(default)]
    pub scrub_bytes_per_s: u64,
    /// Bytes that donors copy to each other in a second, all together, to make or move copies.
    #[serde(default = "copying")]
    pub copying_bytes_per_s: u64,
    /// How long a donor may be silent before other copies take its place.
    #[serde(default = "failover")]
    pub failover: Duration,
    /// The file for what the pool has no room for.
    #[serde(default)]
    pub spill: Option<PathBuf>,
    /// Most bytes of the pool that all copies together take; the rest goes to that file.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Several clients may write at a time.
    #[serde(default)]
    pub multi_writer: bool,
    /// Writes are answered before donors have them, as long as these are not more bytes
    /// ([`crate::requests::buffer`]).
    #[serde(default)]
    pub write_buffer_bytes: Option<u64>,
    /// Donors and the spill file get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default)]
    pub encrypt: bool,
    /// It is a copy of that volume as of one moment, and nobody may write to it.
    #[serde(default)]
    pub snapshot_of: Option<String>,
    /// It is that node's, and is read here ([`crate::readers`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_from: Option<SharedBy>,
}

fn copying() -> u64 {
    COPYING_BYTES_PER_S
}

fn failover() -> Duration {
    FAILOVER
}

/// Data to write.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// So many zeros.
    Zeros(u64),
}

/// When a write is answered, where there is a write buffer or a spill file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// When the buffer has the write, or the kernel has data for the spill file. A flush waits
    /// until it is stored.
    WriteBack,
    /// When donors, or the spill file, have the write: for clients that cannot flush.
    WriteThrough,
}

/// How some pages are written.
struct How<'a, 'b> {
    /// Zeros, too, are to be kept.
    allocate: bool,
    lock: &'a mut Option<PageLock>,
    /// Room in the buffer, if they are to go there.
    reserved: Option<&'a mut Reserved<'b>>,
}

/// Begins to follow who has a volume that is read here.
pub type Follow = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Whether all of what was read are zeros that nobody keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// It is one hole.
    Hole,
    /// Some of it is data.
    Data,
}

/// A volume that is served by this process.
pub struct Volume {
    config: VolumeConfig,
    pub(crate) state: State,
    pub(crate) space: Arc<Space>,
    pub(crate) locks: Arc<PageLocks>,
    pub(crate) lanes: Arc<Lanes>,
    /// Only for a volume with a spill file.
    pub(crate) places: Option<Places>,
    /// The policy's limit for a volume with a spill file.
    pub(crate) target: Target,
    /// Only for a volume with a write buffer.
    pub(crate) buffer: Option<Buffer>,
    /// Only for an encrypted volume.
    sealer: Option<Box<Sealer>>,
    pub(crate) slots: Slots,
    pub(crate) attachments: Arc<Attachments>,
    /// Only for a volume that another process has.
    pub(crate) reading: Option<Reading>,
    pub(crate) counters: Counters,
    /// Slots with writes that are not settled.
    pub(crate) unsettled_slots: AtomicUsize,
    /// Held by who changes its size.
    pub(crate) resizing: Mutex<()>,
    /// Fronts that are told of another size.
    pub(crate) watchers: Watchers,
    /// Held by who copies it.
    pub(crate) snapshotting: Mutex<()>,
    /// The copy that is on its way.
    pub(crate) copying: RwLock<Option<Arc<Copying>>>,
    complained: Mutex<Option<Instant>>,
    is_over: AtomicBool,
}

impl Volume {
    /// Begins to serve a volume: a new one, or what an earlier process has left in `state`.
    pub fn open(
        config: VolumeConfig,
        directory: Arc<dyn Directory>,
        state: State,
    ) -> Result<Arc<Volume>, VolumeError> {
        let epoch = state.next_epoch();
        let mut space = SpaceConfig::new(SpaceId(config.space), epoch, &config.name, MAX_PAGES);
        space.redundancy = Redundancy::of_copies(config.copies)?;
        space.site = config.site.clone();
        space.credentials = config.tls_dir.clone().map(CredentialsDir::new).map(Arc::new);
        space.lease = config.lease;
        space.failover = config.failover;
        space.give_up = config.donor_patience;
        space.patience = space.patience.min(config.donor_patience);
        let space = match epoch {
            Epoch(1) => Space::create(space, directory)?,
            _ => Space::adopt(space, directory, &state.expected())?,
        };
        space.set_zones(vec![config.donors.clone()]);
        let volume = Volume::assemble(config, state, space);
        volume.count_pages();
        volume.settle_predecessors_writes()?;
        volume.tend()?;
        Ok(volume)
    }

    /// Opens another node's volume, with tables of [`readers::fetch_tables`] or of a predecessor.
    /// First serve and pin its exports ([`Volume::pin`]), then call the returned [`Follow`].
    pub fn open_to_read(
        config: VolumeConfig,
        state: State,
    ) -> Result<(Arc<Volume>, Follow), VolumeError> {
        let (space, named) = readers::follow::space_of(&config)?;
        let volume = Volume::assemble(config, state, space);
        volume.count_pages();
        let followed = Arc::clone(&volume);
        Ok((volume, Box::new(move || readers::follow::begin(&followed, named))))
    }

    fn assemble(config: VolumeConfig, state: State, space: Arc<Space>) -> Arc<Volume> {
        let places = state.spill.as_ref();
        let places = places.map(|_| Places::new(&state, config.copies, config.limit_bytes));
        let most_lanes = if config.for_swap { SWAP_LANES } else { MAX_LANES };
        Arc::new(Volume {
            locks: Arc::default(),
            lanes: Lanes::new(Arc::clone(&space), most_lanes),
            buffer: config.write_buffer_bytes.map(Buffer::new),
            sealer: config.encrypt.then(|| state.seals().sealer()),
            slots: Slots::new(&state),
            attachments: Attachments::resumed(config.multi_writer, &state),
            reading: config.reads_from.clone().map(|from| Reading::new(from, &state)),
            places,
            target: Target::default(),
            counters: Counters::default(),
            unsettled_slots: AtomicUsize::new(0),
            resizing: Mutex::default(),
            watchers: Watchers::default(),
            snapshotting: Mutex::default(),
            copying: RwLock::default(),
            complained: Mutex::default(),
            is_over: AtomicBool::new(false),
            config,
            state,
            space,
        })
    }

    /// Starts what goes on beside requests.
    fn tend(self: &Arc<Self>) -> Result<(), VolumeError> {
        let volume = self;
        let kept = Arc::clone(volume);
        let upkeep = std::thread::Builder::new().name("upkeep".into());
        let copying = volume.config.copying_bytes_per_s;
        upkeep.spawn(move || kept.space.keep_copies(copying, &|| kept.is_over()))?;
        if volume.config.copies > 1 {
            let scrubbed = Arc::clone(volume);
            let thread = std::thread::Builder::new().name("scrub".into());
            let rate = volume.config.scrub_bytes_per_s;
            thread.spawn(move || scrub::run(&scrubbed, rate))?;
        }
        if volume.places.is_some() {
            let brought = Arc::clone(volume);
            let thread = std::thread::Builder::new().name("returns".into());
            thread.spawn(move || returns::run(&brought))?;
            let taken = Arc::clone(volume);
            let thread = std::thread::Builder::new().name("departures".into());
            thread.spawn(move || departures::run(&taken))?;
        }
        if volume.buffer.is_some() {
            let drained = Arc::clone(volume);
            let thread = std::thread::Builder::new().name("drain".into());
            thread.spawn(move || {
                let buffer = drained.buffer.as_ref().expect("it has one");
                buffer::drain(&drained, buffer);
            })?;
        }
        let renewed = Arc::clone(volume);
        let leases = std::thread::Builder::new().name("leases".into());
        leases.spawn(move || renewed.space.keep_leases(&|| renewed.is_over()))?;
        Ok(())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Its size.
    pub fn size_bytes(&self) -> u64 {
        pages_to_bytes(self.state.pages())
    }

    /// Bytes of it that hold data.
    pub fn data_bytes(&self) -> u64 {
        pages_to_bytes(self.counters.data_pages.load(Relaxed))
    }

    /// Pages of it that are in the pool, each counted once.
    pub(crate) fn pool_pages(&self) -> u64 {
        let data = self.counters.data_pages.load(Relaxed);
        data.saturating_sub(self.counters.spilled_pages.load(Relaxed))
    }

    /// Sets the policy's target: bytes of the pool that the volume may hold, each page counted
    /// once. With `None` only its own limit bounds it. `take_back_bytes`: how much of the excess it
    /// moves to its spill file, if idle. A volume without such a file ignores both.
    pub fn set_target(&self, bytes: Option<u64>, take_back_bytes: u64) {
        if self.places.is_some() {
            self.target.set(bytes.map(|bytes| bytes / PAGE), take_back_bytes / PAGE);
        }
    }

    /// Statistics of the volume. The caller counts the `clients`.
    pub fn stats(&self, clients: u64) -> Stats {
        // Before anything is looked at: all of it is at least as new.
        let taken_at_ms = unix_time_ms();
        let counters = &self.counters;
        let mut pool = self.space.status();
        // The space has room to grow.
        pool.pages = self.state.pages();
        pool.segments = pool.pages.div_ceil(SEGMENT_PAGES);
        Stats {
            taken_at_ms,
            size_bytes: self.size_bytes(),
            data_bytes: self.data_bytes(),
            spilled_bytes: pages_to_bytes(counters.spilled_pages.load(Relaxed)),
            unkept_bytes: pages_to_bytes(counters.lost_pages.load(Relaxed)),
            buffered_bytes: self.buffer.as_ref().map_or(0, Buffer::bytes),
            target_bytes: self.target.pages().map(pages_to_bytes),
            puts_total: self.target.puts_total.load(Relaxed),
            puts_succeeded: self.target.puts_succeeded.load(Relaxed),
            gets: self.target.gets.load(Relaxed),
            taken_back_bytes: pages_to_bytes(counters.taken_back_pages.load(Relaxed)),
            clients,
            readers: self.attachments.reading_nodes(),
            is_anothers: self.reading.is_some(),
            unheld: self.why_unheld(),
            writer: self.attachments.writer().map(|client| client.to_string()),
            reads: counters.reads.load(Relaxed),
            read_bytes: counters.read_bytes.load(Relaxed),
            writes: counters.writes.load(Relaxed),
            written_bytes: counters.written_bytes.load(Relaxed),
            dropped_bytes: counters.dropped_bytes.load(Relaxed),
            errors: counters.errors.load(Relaxed),
            unsettled: counters.unsettled.load(Relaxed),
            pool,
        }
    }

    /// Lets a client in, beside those that there are: to be held for as long as it is connected.
    pub fn attach(&self, client: Client, role: Role) -> Result<Attachment, Held> {
        if let Some(reading) = &self.reading {
            return self.attach_reading(reading, client, role);
        }
        let attached = self.attachments.attach(client, role)?;
        if role == Role::Writer {
            // Before the first write: a new edition, so that no reader's tables or lease last.
            self.state.set_edition(self.attachments.edition());
            self.state.set_leased(false);
        }
        Ok(attached)
    }

    pub(crate) fn config(&self) -> &VolumeConfig {
        &self.config
    }

    /// Whether nothing waits for a donor that is away.
    pub(crate) fn is_settled(&self) -> bool {
        self.counters.unsettled.load(Relaxed) == 0 && self.unsettled_slots.load(Acquire) == 0
    }

    /// Refused with the name of a client, if there is one.
    pub(crate) fn check_unattached(&self) -> Result<(), String> {
        match self.attachments.anybody() {
            Some(client) => Err(format!("{client} is attached to it")),
            None => Ok(()),
        }
    }

    /// Whether another process has taken it over, with a higher epoch.
    pub fn is_fenced(&self) -> bool {
        self.space.is_fenced()
    }

    /// Whether another node may have its tables: then it alone may free anything of it.
    pub fn is_given(&self) -> bool {
        self.state.is_given()
    }

    /// Gives all extents back to their donors, and with them all data. To be called when no request
    /// is under way.
    pub fn release(&self) -> Result<(), VolumeError> {
        self.is_over.store(true, Release);
        if let Some(reading) = &self.reading {
            // Its data belong to its owner.
            reading.leave();
            return Ok(());
        }
        if let Some(spill) = &self.state.spill {
            spill.remove();
        }
        Ok(self.space.release()?)
    }

    /// Ends serving it, and leaves all as it is to another process that has its tables.
    pub(crate) fn abandon(&self) {
        self.is_over.store(true, Release);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Acquire) || self.space.is_fenced()
    }

    /// Reads. The error says at which byte the first page begins that could not be read.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<Contents, (u64, BlockError)> {
        let bytes = buffer.len() as u64;
        let read = self.leased(offset, || self.try_read(offset, buffer));
        match &read {
            Ok(_) => self.count_read(bytes),
            Err((_, error)) => self.complain("read", offset, bytes, error),
        }
        read
    }

    fn count_read(&self, bytes: u64) {
        self.counters.reads.fetch_add(1, Relaxed);
        self.counters.read_bytes.fetch_add(bytes, Relaxed);
    }

    /// Writes, and returns when all copies have it, or the buffer has.
    pub fn write(self: &Arc<Self>, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.write_as(Caching::WriteBack, offset, data)
    }

    /// Writes, and returns when `caching` says.
    pub fn write_as(
        self: &Arc<Self>,
        caching: Caching,
        offset: u64,
        data: &[u8],
    ) -> Result<(), BlockError> {
        let written = self.write_from(caching, offset, Source::Bytes(data), false);
        self.counted("write", offset, data.len() as u64, written)
    }

    /// Makes bytes zeros. With `allocate` the pool keeps the zeros, so that they can be overwritten
    /// when it is full; without it whole pages become holes.
    pub fn write_zeroes(
        self: &Arc<Self>,
        offset: u64,
        bytes: u64,
        allocate: bool,
    ) -> Result<(), BlockError> {
        self.write_zeroes_as(Caching::WriteBack, offset, bytes, allocate)
    }

    /// Makes bytes zeros, and returns when `caching` says.
    pub fn write_zeroes_as(
        self: &Arc<Self>,
        caching: Caching,
        offset: u64,
        bytes: u64,
        allocate: bool,
    ) -> Result<(), BlockError> {
        let written = match allocate {
            true => self.write_from(caching, offset, Source::Zeros(bytes), true),
            false => self.make_holes(offset, bytes, Some(caching)),
        };
        self.counted("write of zeros", offset, bytes, written)
    }

    /// Drops whole pages, which are zeros from then on; parts of pages stay what they are.
    pub fn trim(self: &Arc<Self>, offset: u64, bytes: u64) -> Result<(), BlockError> {
        let dropped = self.make_holes(offset, bytes, None);
        if let Err(error) = &dropped {
            self.complain("trim", offset, bytes, error);
        }
        dropped
    }

    /// Returns when what was written before is where it is to be kept: donors have it when it is
    /// answered, or, if there is a buffer, have it now, as the disk of the spill file has.
    pub fn flush(&self) -> Result<(), BlockError> {
        let buffered = self.buffer.as_ref().map_or(Ok(()), Buffer::flush);
        let spilled = || {
            let spill = self.state.spill.as_ref();
            spill.map_or(Ok(()), |spill| spill.flush().map_err(BlockError::from))
        };
        let flushed = buffered.and_then(|()| spilled());
        if let Err(error) = &flushed {
            self.complain("flush", 0, self.size_bytes(), error);
        }
        flushed
    }

    fn counted(
        &self,
        what: &str,
        offset: u64,
        bytes: u64,
        result: Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        match &result {
            Ok(()) => self.count_write(bytes),
            Err(error) => self.complain(what, offset, bytes, error),
        }
        result
    }

    fn count_write(&self, bytes: u64) {
        self.counters.writes.fetch_add(1, Relaxed);
        self.counters.written_bytes.fetch_add(bytes, Relaxed);
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Result<Contents, (u64, BlockError)> {
        let at_start = |error| (offset, error);
        let locked = self.lock(offset, buffer.len() as u64, Access::Shared);
        let (pages, _lock) = locked.map_err(at_start)?;
        let mut wanted = Vec::new();
        let mut lost = None;
        let mut any_buffered = false;
        for page in pages {
            if let Some(contents) = self.buffered(page) {
                let (of_page, within) = part(page, offset, buffer.len() as u64);
                buffer[within].copy_from_slice(&contents[of_page]);
                any_buffered = true;
                continue;
            }
            match self.state.page(page) {
                Page::Data(word) => wanted.push((page, word)),
                Page::Hole => {
                    let (_, within) = part(page, offset, buffer.len() as u64);
                    buffer[within].fill(0);
                }
                Page::Lost => lost = lost.or(Some(page)),
            }
        }
        if wanted.is_empty() && lost.is_none() {
            return Ok(if any_buffered { Contents::Data } else { Contents::Hole });
        }
        let mut failed = lost.map(|page| (page, BlockError::Unkept(page)));
        if !wanted.is_empty() {
            let fetched = self.gather(&mut None, &wanted, &mut |at, contents| {
                let (of_page, within) = part(wanted[at].0, offset, buffer.len() as u64);
                buffer[within].copy_from_slice(&contents[of_page]);
            });
            if let Err((at, error)) = fetched
                && failed.as_ref().is_none_or(|(page, _)| wanted[at].0 < *page)
            {
                failed = Some((wanted[at].0, error));
            }
        }
        match failed {
            None => Ok(Contents::Data),
            Some((page, error)) => Err((pages_to_bytes(page).max(offset), error)),
        }
    }

    fn write_from(
        self: &Arc<Self>,
        caching: Caching,
        offset: u64,
        source: Source<'_>,
        allocate: bool,
    ) -> Result<(), BlockError> {
        let pages = self.pages_of(offset, source.len())?;
        let reserve = |buffer| Buffer::reserve(buffer, &self.slots, pages.end - pages.start);
        let buffer = self.buffer.as_ref().filter(|_| caching == Caching::WriteBack);
        let mut reserved = buffer.and_then(reserve);
        let (pages, lock) = self.lock(offset, source.len(), Access::Exclusive)?;
        let mut lock = Some(lock);
        let (mut first, all) = (pages.start, pages.clone());
        while first < pages.end {
            let round = first..(first + ROUND).min(pages.end);
            first = round.end;
            let how = How { allocate, lock: &mut lock, reserved: reserved.as_mut() };
            self.write_round(round, offset, source, how)?;
        }
        match &self.state.spill {
            Some(spill)
                if caching == Caching::WriteThrough
                    && all.into_iter().any(|page| self.is_spilled(page)) =>
            {
                Ok(spill.flush()?)
            }
            _ => Ok(()),
        }
    }

    /// Writes some pages of a request, with its lock. If they are left to be settled, it takes the
    /// lock away and returns an error.
    fn write_round(
        self: &Arc<Self>,
        pages: Range<PageNo>,
        offset: u64,
        source: Source<'_>,
        how: How<'_, '_>,
    ) -> Result<(), BlockError> {
        let How { allocate, lock, reserved } = how;
        self.preserve(pages.clone());
        let is_whole = |page: &PageNo| part(*page, offset, source.len()).0.len() == PAGE_SIZE;
        let mut lane: Option<Lent> = None;
        // The first page and the last one, if they are written in part.
        let mut parts: Vec<(PageNo, Vec<u8>)> = Vec::new();
        for page in pages.clone().filter(|page| !is_whole(page)) {
            let mut contents = ZEROS.to_vec();
            match (self.buffered(page), self.state.page(page)) {
                (Some(buffered), _) => contents = buffered,
                (None, Page::Hole) => {}
                (None, Page::Lost) => return Err(BlockError::Unkept(page)),
                (None, Page::Data(word)) => {
                    let mut give = |_: usize, old: &[u8]| contents.copy_from_slice(old);
                    let gathered = self.gather(&mut lane, &[(page, word)], &mut give);
                    gathered.map_err(|(_, error)| error)?;
                }
            }
            let (of_page, within) = part(page, offset, source.len());
            contents[of_page].copy_from_slice(source.slice(within));
            parts.push((page, contents));
        }
        let mut items = Vec::with_capacity((pages.end - pages.start) as usize);
        for page in pages {
            let contents = match parts.iter().find(|(part, _)| *part == page) {
                Some((_, contents)) => contents,
                None => source.slice(part(page, offset, source.len()).1),
            };
            // Zeros in a hole are there already.
            let is_hole = self.state.page(page) == Page::Hole && !self.is_buffered(page);
            if allocate || !is_hole || !is_zero(contents) {
                items.push(Item { page, sum: page_sum(contents), contents });
            }
        }
        if items.is_empty() {
            return Ok(());
        }
        if let Some(reserved) = reserved {
            reserved.put(&self.state, &items);
            return Ok(());
        }
        // The lane first: whoever holds slots has one, and does not wait for others.
        self.lane(&mut lane)?;
        let mut lane = lane.expect("it was just taken");
        let mut slots = self.slots.take(items.len());
        for (slot, item) in slots.iter().zip(&items) {
            self.state.fill(*slot, item.page, item.contents);
        }
        let (mut was_sent, mut failed) = (false, None);
        loop {
            let Attempt { pending, failed: now, waiting } =
                self.store(&mut lane, &items, &slots, was_sent, Writer::Client);
            (was_sent, failed) = (true, failed.or(now));
            if pending.is_empty() {
                return failed.map_or(Ok(()), Err);
            }
            items = pending.iter().map(|at| items[*at]).collect();
            slots = pending.into_iter().map(|at| slots[at]).collect();
            if self.may_leave_unsettled(&mut lane, slots.len()) {
                // The buffer's contents are older than what donors may still store.
                items.iter().for_each(|item| self.unbuffer(item.page));
                let locks: Vec<_> = lock.take().into_iter().collect();
                locks.iter().for_each(PageLock::set_stuck);
                let writes = Unsettled::Writes(Box::new(lane), locks, slots, Writer::Client);
                settle::begin(self, writes);
                return Err(failed.or(waiting).unwrap_or(BlockError::Stuck));
            }
            if self.is_over() {
                return Err(BlockError::Over);
            }
        }
    }

    /// Writes the pages that these slots name. A settled page leaves its slot. For `was_sent` see
    /// [`store`]. For seals see [`crate::pool::sealing`].
    pub(crate) fn store(
        &self,
        lane: &mut Lent,
        items: &[Item<'_>],
        slots: &[u32],
        was_sent: bool,
        writer: Writer,
    ) -> Attempt {
        let sealed = self.sealer.as_deref();
        let sealed = sealed.map(|sealer| Sealed::of(items, sealer, self.state.seals()));
        let to_send = sealed.as_ref().map(|sealed| sealed.items(items));
        let items = to_send.as_deref().unwrap_or(items);
        let mut attempt = Attempt::default();
        let mut free = Vec::with_capacity(slots.len());
        let mut settle = |run: Range<usize>, fate| {
            let error = match fate {
                Fate::Stored(generation) => {
                    self.target.put(run.len() as u64, true);
                    self.state.acknowledged(items[run.start].page / SEGMENT_PAGES, generation);
                    None
                }
                Fate::Spilled => {
                    self.kept_out(run.len() as u64);
                    None
                }
                Fate::Pending(error) => {
                    attempt.waiting.get_or_insert(error);
                    return attempt.pending.extend(run);
                }
                Fate::Unchanged(error) => {
                    attempt.failed.get_or_insert(error);
                    match writer {
                        Writer::Client => free.extend(&slots[run]),
                        Writer::Buffer => {}
                        Writer::Predecessor => attempt.pending.extend(run),
                    }
                    return;
                }
                Fate::Unknown(error) => {
                    self.state.begun(items[run.start].page / SEGMENT_PAGES);
                    Some(error)
                }
            };
            for at in run.clone() {
                let Item { page, sum, .. } = items[at];
                let holds = match error {
                    None => Page::Data(word_of(sum)),
                    Some(_) => Page::Lost,
                };
                if let (None, Some(sealed)) = (&error, &sealed) {
                    self.state.seals().set(page, &sealed.seals[at]);
                }
                self.note(page, holds);
            }
            if let Some(buffer) = &self.buffer {
                for at in run.clone() {
                    // After a write past the buffer, the buffer's contents are older.
                    let own = (writer == Writer::Buffer).then_some(slots[at]);
                    free.extend(buffer.forget(&self.state, items[at].page, own));
                }
                if writer != Writer::Client && error.is_some() {
                    buffer.lost();
                }
            }
            attempt.failed = attempt.failed.take().or(error);
            free.extend(&slots[run]);
        };
        for (run, place) in self.placed(items) {
            match (place, &self.state.spill) {
                (Ok(Place::Spill), Some(spill)) => {
                    for at in run {
                        let fate = match spill.write(items[at].page, items[at].contents) {
                            Ok(()) => Fate::Spilled,
                            Err(error) => Fate::Unchanged(error.into()),
                        };
                        settle(at..at + 1, fate);
                    }
                }
                (Ok(_), _) => store(lane, &items[run.clone()], was_sent, |part, fate| {
                    settle(run.start + part.start..run.start + part.end, fate);
                }),
                (Err(error), _) => settle(run, fate_of(error, was_sent)),
            }
        }
        self.leave(&free);
        attempt
    }

    /// The writes in these slots are over.
    fn leave(&self, slots: &[u32]) {
        slots.iter().for_each(|slot| self.state.empty(*slot));
        self.slots.give_back(slots);
    }

    /// Runs of pages that are to go to the same place. Their locks are held.
    fn placed(&self, items: &[Item<'_>]) -> Vec<(Range<usize>, Result<Place, SpaceError>)> {
        let Some(places) = &self.places else { return vec![(0..items.len(), Ok(Place::Pool))] };
        let mut placed: Vec<(Range<usize>, Result<Place, SpaceError>)> = Vec::new();
        for run in runs(items.len(), |at| items[at].page / SEGMENT_PAGES) {
            let segment = items[run.start].page / SEGMENT_PAGES;
            places.touch(segment);
            let place = self.decide(places, segment);
            match (placed.last_mut(), &place) {
                (Some((before, Ok(same))), Ok(place)) if same == place => before.end = run.end,
                _ => placed.push((run, place)),
            }
        }
        placed
    }

    fn decide(&self, places: &Places, segment: u64) -> Result<Place, SpaceError> {
        let began = Instant::now();
        loop {
            let has_room = || self.target.allows(self.pool_pages(), 1);
            match places.decide(segment, &self.state, &self.space, has_room) {
                Err(error)
                    if error.is_transient()
                        && !self.is_over()
                        && began.elapsed() < self.config.donor_patience =>
                {
                    tracing::debug!(segment, %error, "its place is not known yet");
                    std::thread::sleep(DISCARD_PAUSE);
                }
                decided => return decided,
            }
        }
    }

    /// Counts pages in the spill file that would be in the pool if it had room.
    fn kept_out(&self, pages: u64) {
        if self.places.as_ref().is_some_and(|places| !places.is_at_limit()) {
            self.target.put(pages, false);
        }
    }

    fn is_spilled(&self, page: PageNo) -> bool {
        let place = |places: &Places| places.get(page / SEGMENT_PAGES) == Place::Spill;
        self.places.as_ref().is_some_and(place)
    }

    /// Reads different pages from their places, with the words of their sums, and opens sealed
    /// ones. Else like [`fetch`]. Takes a lane if donors have any page. Their locks are held.
    fn gather(
        &self,
        lane: &mut Option<Lent>,
        wanted: &[(PageNo, u32)],
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), (usize, BlockError)> {
        let mut give = |at: usize, contents: &mut [u8]| {
            let is_open = self.opens(wanted[at].0, contents);
            if is_open {
                sink(at, contents);
            }
            is_open
        };
        let Some(places) = &self.places else {
            self.target.got(wanted.len() as u64);
            return fetch(self.lane(lane).map_err(|error| (0, error))?, wanted, &mut give);
        };
        wanted.iter().for_each(|(page, _)| places.touch(page / SEGMENT_PAGES));
        let is_spilled = |at: &usize| self.is_spilled(wanted[*at].0);
        let (spilled, pooled): (Vec<usize>, Vec<usize>) = (0..wanted.len()).partition(is_spilled);
        let mut failed: Option<(usize, BlockError)> = None;
        self.target.got(pooled.len() as u64);
        if !spilled.is_empty() {
            self.kept_out(spilled.len() as u64);
        }
        if let Some(spill) = &self.state.spill {
            let mut contents = [0; PAGE_SIZE];
            for at in spilled {
                let (page, word) = wanted[at];
                let error = match spill.read(page, &mut contents) {
                    Ok(()) if word_of(page_sum(&contents)) == word && give(at, &mut contents) => {
                        continue;
                    }
                    Ok(()) => BlockError::Damaged(page),
                    Err(error) => error.into(),
                };
                failed = Some((at, error));
                break;
            }
        }
        if pooled.is_empty() {
            return failed.map_or(Ok(()), Err);
        }
        let pages: Vec<_> = pooled.iter().map(|at| wanted[*at]).collect();
        let lane = self.lane(lane).map_err(|error| (pooled[0], error))?;
        let fetched = fetch(lane, &pages, &mut |at, contents| give(pooled[at], contents));
        let fetched = fetched.map_err(|(at, error)| (pooled[at], error));
        match (failed, fetched) {
            (Some(spilled), Err(pooled)) => {
                Err(if spilled.0 < pooled.0 { spilled } else { pooled })
            }
            (Some(failed), Ok(())) => Err(failed),
            (None, fetched) => fetched,
        }
    }

    /// Opens a stored page of an encrypted volume. False if it is not what was stored last.
    fn opens(&self, page: PageNo, contents: &mut [u8]) -> bool {
        let Some(sealer) = &self.sealer else { return true };
        sealer.open(page, &self.state.seals().get(page), contents).is_ok()
    }

    /// Contents of pages, one after the other. Their lock is held.
    pub(crate) fn contents_of(&self, pages: &[PageNo]) -> Result<Vec<u8>, BlockError> {
        let mut contents = vec![0; pages.len() * PAGE_SIZE];
        let (mut wanted, mut places) = (Vec::new(), Vec::new());
        for (at, page) in pages.iter().enumerate() {
            if let Some(buffered) = self.buffered(*page) {
                contents[at * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&buffered);
                continue;
            }
            match self.state.page(*page) {
                Page::Hole => {}
                Page::Lost => return Err(BlockError::Unkept(*page)),
                Page::Data(word) => {
                    wanted.push((*page, word));
                    places.push(at);
                }
            }
        }
        if !wanted.is_empty() {
            let mut give = |at: usize, data: &[u8]| {
                contents[places[at] * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(data);
            };
            let gathered = self.gather(&mut None, &wanted, &mut give);
            gathered.map_err(|(_, error)| error)?;
        }
        Ok(contents)
    }

    /// Whether a lane with unsettled writes may be left to another thread, so that this one and
    /// others go on.
    fn may_leave_unsettled(&self, lane: &mut Lent, slots: usize) -> bool {
        let added = self.unsettled_slots.fetch_add(slots, AcqRel) + slots;
        let may = added <= MAX_UNSETTLED_SLOTS && lane.detach();
        if !may {
            self.unsettled_slots.fetch_sub(slots, AcqRel);
        }
        may
    }

    /// Makes whole pages holes. Parts of pages at the ends become zeros if it is said how these are
    /// written.
    fn make_holes(
        self: &Arc<Self>,
        offset: u64,
        bytes: u64,
        parts: Option<Caching>,
    ) -> Result<(), BlockError> {
        self.pages_of(offset, bytes)?;
        let end = offset + bytes;
        let whole = offset.next_multiple_of(PAGE)..end / PAGE * PAGE;
        if whole.start >= whole.end {
            return match parts {
                Some(caching) => self.write_from(caching, offset, Source::Zeros(bytes), false),
                None => Ok(()),
            };
        }
        let pages = whole.start / PAGE..whole.end / PAGE;
        for segment in pages.start / SEGMENT_PAGES..pages.end.div_ceil(SEGMENT_PAGES) {
            let of_segment = pages_of_segment(segment);
            let from = pages.start.max(of_segment.start);
            self.make_holes_in(segment, from..pages.end.min(of_segment.end))?;
        }
        for (from, to) in [(offset, whole.start), (whole.end, end)] {
            if let Some(caching) = parts
                && from < to
            {
                self.write_from(caching, from, Source::Zeros(to - from), false)?;
            }
        }
        self.counters.dropped_bytes.fetch_add(whole.end - whole.start, Relaxed);
        Ok(())
    }

    fn make_holes_in(
        self: &Arc<Self>,
        segment: u64,
        pages: Range<PageNo>,
    ) -> Result<(), BlockError> {
        // All of it, even what is beyond the volume's end at this moment: the segment may go.
        let of_segment = pages_of_segment(segment);
        let lock = self.locks.lock(of_segment.clone(), Access::Exclusive);
        let lock = lock.map_err(|_| BlockError::Stuck)?;
        let is_all =
            pages.start == of_segment.start && pages.end == of_segment.end.min(self.state.pages());
        self.preserve(pages.clone());
        let mut dropped = pages.clone().filter(|page| self.note(*page, Page::Hole) != Page::Hole);
        let is_news = dropped.next().is_some();
        dropped.for_each(drop);
        // A successor must not find it neither here nor there.
        if let Some(buffer) = &self.buffer {
            buffer.within(pages.clone()).into_iter().for_each(|page| self.unbuffer(page));
        }
        // Donors have no unwritten page; but a discard of all makes a lost segment new.
        if !is_news && !is_all {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            let error = match self.discard(pages.clone()) {
                Ok(()) => return Ok(()),
                Err(error) if !error.is_transient() => return Err(error.into()),
                Err(error) => error,
            };
            if self.is_over() {
                return Err(BlockError::Over);
            }
            let may_leave = self.counters.unsettled.load(Relaxed) < MAX_UNSETTLED_DISCARDS;
            if began.elapsed() >= self.config.donor_patience && may_leave {
                settle::begin(self, Unsettled::Discard(lock, pages));
                return Err(error.into());
            }
            std::thread::sleep(DISCARD_PAUSE);
        }
    }

    /// Tells donors of pages of one segment that are holes, while all of the segment is locked.
    pub(crate) fn discard(&self, pages: Range<PageNo>) -> Result<(), SpaceError> {
        let segment = pages.start / SEGMENT_PAGES;
        let is_hole = |page: PageNo| self.state.page(page) == Page::Hole;
        let is_all = pages_of_segment(segment).all(is_hole);
        if let (Some(places), Some(spill)) = (&self.places, &self.state.spill)
            && places.get(segment) == Place::Spill
        {
            spill.discard(&pages);
            if is_all {
                places.set(segment, Place::Nowhere);
                self.state.set_spilled(segment, false);
            }
            return Ok(());
        }
        let told = if is_all {
            self.space.free_segment(segment).map(|()| {
                self.state.freed(segment);
                if let Some(places) = &self.places {
                    places.set(segment, Place::Nowhere);
                }
            })
        } else {
            let discarded = self.space.discard(pages.start, pages.end - pages.start);
            discarded.map(|generations| {
                for (segment, generation) in generations {
                    self.state.acknowledged(segment, generation);
                }
            })
        };
        match told {
            // Then nobody has the pages.
            Err(SpaceError::Lost { .. }) => Ok(()),
            told => told,
        }
    }

    /// Buffered contents of a page, whose lock is held.
    fn buffered(&self, page: PageNo) -> Option<Vec<u8>> {
        self.buffer.as_ref().and_then(|buffer| buffer.copy(&self.state, page))
    }

    pub(crate) fn is_buffered(&self, page: PageNo) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| buffer.has(page))
    }

    /// Whether donors may be about to have other contents of a page than its word says.
    pub(crate) fn is_being_written(&self, page: PageNo) -> bool {
        self.locks.is_exclusive(page) || self.is_buffered(page)
    }

    /// Drops a page, whose lock is held, from the buffer.
    fn unbuffer(&self, page: PageNo) {
        let slot = self.buffer.as_ref().and_then(|buffer| buffer.forget(&self.state, page, None));
        if let Some(slot) = slot {
            self.slots.give_back(&[slot]);
        }
    }

    /// Notes what a page holds from now on, and returns what it held. Its lock is held.
    fn note(&self, page: PageNo, holds: Page) -> Page {
        let held = self.state.set_page(page, holds);
        let counter = |page: Page| match page {
            Page::Hole => None,
            Page::Data(_) => Some(&self.counters.data_pages),
            Page::Lost => Some(&self.counters.lost_pages),
        };
        if let Some(counter) = counter(holds) {
            counter.fetch_add(1, Relaxed);
        }
        if let Some(counter) = counter(held) {
            counter.fetch_sub(1, Relaxed);
        }
        if self.is_spilled(page) {
            let is_data = |page: Page| u64::from(matches!(page, Page::Data(_)));
            self.counters.spilled_pages.fetch_add(is_data(holds), Relaxed);
            self.counters.spilled_pages.fetch_sub(is_data(held), Relaxed);
        }
        held
    }

    pub(crate) fn count_pages(&self) {
        let (mut data, mut spilled, mut lost) = (0, 0, 0);
        let segments = 0..self.state.pages().div_ceil(SEGMENT_PAGES);
        let begun = segments.filter(|segment| self.state.is_begun(*segment));
        for page in begun.flat_map(pages_of_segment) {
            match self.state.page(page) {
                Page::Hole => {}
                Page::Data(_) => {
                    data += 1;
                    spilled += u64::from(self.is_spilled(page));
                }
                Page::Lost => lost += 1,
            }
        }
        self.counters.spilled_pages.store(spilled, Relaxed);
        self.counters.data_pages.store(data, Relaxed);
        self.counters.lost_pages.store(lost, Relaxed);
    }

    /// The lane of a request that may have none yet.
    fn lane<'a>(&self, lane: &'a mut Option<Lent>) -> Result<&'a mut Lent, BlockError> {
        if lane.is_none() {
            *lane = Some(self.lanes.take()?);
        }
        Ok(lane.as_mut().expect("there is one now"))
    }

    /// Locks the pages that hold these bytes.
    fn lock(
        &self,
        offset: u64,
        bytes: u64,
        access: Access,
    ) -> Result<(Range<PageNo>, PageLock), BlockError> {
        let pages = self.pages_of(offset, bytes)?;
        let lock = self.locks.lock(pages.clone(), access).map_err(|_| BlockError::Stuck)?;
        // It may have become smaller while they were waited for.
        self.pages_of(offset, bytes)?;
        Ok((pages, lock))
    }

    /// The pages that hold these bytes.
    pub(crate) fn pages_of(&self, offset: u64, bytes: u64) -> Result<Range<PageNo>, BlockError> {
        if self.is_over() {
            return Err(BlockError::Over);
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.size_bytes() => Ok(offset / PAGE..pages_for_bytes(end)),
            _ => Err(BlockError::Beyond { offset, bytes }),
        }
    }

    /// Counts a request that failed, and says so now and then.
    fn complain(&self, what: &str, offset: u64, bytes: u64, error: &BlockError) {
        self.counters.errors.fetch_add(1, Relaxed);
        let now = Instant::now();
        let mut complained = self.complained.lock().expect("no thread panics with it");
        if complained.is_none_or(|at| now.duration_since(at) >= COMPLAINT_INTERVAL) {
            *complained = Some(now);
            let volume = &self.config.name;
            let error = causes(error);
            tracing::warn!(volume, offset, bytes, error, "a {what} failed");
        }
    }
}

impl<'a> Source<'a> {
    fn len(self) -> u64 {
        match self {
            Source::Bytes(bytes) => bytes.len() as u64,
            Source::Zeros(bytes) => bytes,
        }
    }

    /// A part of it, of a page at most.
    fn slice(self, range: Range<usize>) -> &'a [u8] {
        match self {
            Source::Bytes(bytes) => &bytes[range],
            Source::Zeros(_) => &ZEROS[..range.len()],
        }
    }
}

/// An error with what is behind it, in one line.
fn causes(error: &BlockError) -> String {
    let mut line = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(behind) = cause {
        line.push_str(": ");
        line.push_str(&behind.to_string());
        cause = behind.source();
    }
    line
}

/// The part of a page that a request of so many bytes has, and where that is in the request.
fn part(page: PageNo, offset: u64, bytes: u64) -> (Range<usize>, Range<usize>) {
    let start = pages_to_bytes(page);
    let (from, to) = (start.max(offset), (start + PAGE).min(offset + bytes));
    let (of_page, within) = (from - start..to - start, from - offset..to - offset);
    (of_page.start as usize..of_page.end as usize, within.start as usize..within.end as usize)
}

pub(crate) mod flow;
#[cfg(test)]
pub(crate) mod tests;
