//! A space with sockets: what its threads share.

use crate::coded::recode::{Record, Temperature};
use crate::coded::stripe::Coded;
use crate::config::{Directory, Redundancy, SpaceConfig};
use crate::control::{Answered, Donor, DonorPlace, Persistence};
use crate::copies::verify::Scrub;
use crate::map::group::{DonorIndex, Form, Group, Place};
use crate::map::lookup::{Activity, Lookup, Whereabouts};
use crate::map::{Declined, Expected, Map, SegmentCounts, Take};
use crate::{DonorStatus, Lane, SpaceError, SpaceStatus};
use hecaton_memory::{Epoch, Generation, PAGE_SIZE, PageNo};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{Hello, Refusal, Request, VERSIONS};
use std::collections::BTreeMap;
use std::error::Error as _;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tracing::field::display;
use tracing::{debug, info, warn};

/// A linear array of pages in the pool, shared by the threads that use it.
pub struct Space {
    config: SpaceConfig,
    directory: Arc<dyn Directory>,
    /// Whether donors may hold extents from before this process.
    adopted: bool,
    lookup: Lookup,
    map: Mutex<Map>,
    /// Signalled when a segment is no longer being taken.
    taken: Condvar,
    pub(crate) donors: RwLock<Vec<Arc<Donor>>>,
    fenced: AtomicBool,
    /// Everything was given back, or is being: no extent is asked for any more.
    released: AtomicBool,
    pub(crate) bytes_filled: AtomicU64,
    pub(crate) scrub: Scrub,
    /// Records coded stripes. Nothing is coded without it.
    pub(crate) record: OnceLock<Box<dyn Record>>,
    pub(crate) temperature: Mutex<Temperature>,
    /// Held while coded pages are written again, and while a stripe becomes plain. Taken before a
    /// connection.
    pub(crate) mending: Mutex<()>,
    /// Rises whenever the lookup has changed.
    pub(crate) changes: AtomicU64,
    /// Epoch of the owner, if another process owns the space.
    pub(crate) epoch_of_another: OnceLock<AtomicU64>,
    began: Instant,
}

/// While a successor waits for its predecessor's extents to be found.
const FIND_PAUSE: Duration = Duration::from_millis(5);

impl Space {
    /// A new space, with nothing in it. Fails when not one donor can be reached.
    pub fn create(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
    ) -> Result<Arc<Space>, SpaceError> {
        let map = Map::new(config.shape()).at(config.site.clone());
        let space = Space::begin(config, directory, map, false)?;
        // A donor that does not answer now is asked again when the others have no room.
        let greeted =
            space.each_donor(|donor| space.call(donor, None, Request::Renew, Persistence::Once));
        if space.is_fenced() {
            return Err(space.fenced_error());
        }
        if !greeted.iter().any(Result::is_ok) {
            return Err(SpaceError::NoDonor(greeted.len()));
        }
        info!(space = %space.config.id, donors = greeted.len(), "space begins");
        Ok(space)
    }

    /// Takes over a space that another process began, with its id, size, segment order and
    /// redundancy. The map is rebuilt from what the donors hold (see docs/design.md). `expected`
    /// has all segments in which the predecessor had stored pages, and what it knew of them.
    ///
    /// Give it a higher epoch than the predecessor's: the donors then refuse whatever the
    /// predecessor still has in the network, which could otherwise overwrite what this one writes.
    ///
    /// An expected segment that no donor has listed yet fails as lost, reads and writes, until its
    /// donor is reached (for example by [`Space::renew`]). A segment whose pages are gone fails for
    /// good. Donors get back extents of other segments, and extents that have missed a write.
    ///
    /// A page whose last write or discard was not acknowledged to the predecessor may differ
    /// between two copies. It must be written before it is read.
    pub fn adopt(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
        expected: &BTreeMap<u64, Expected>,
    ) -> Result<Arc<Space>, SpaceError> {
        Space::adopt_coded(config, directory, expected, &BTreeMap::new())
    }

    /// As [`Space::adopt`], for a space with coded stripes. `coded` has all stripes that the
    /// predecessor had recorded as coded ([`Record`]).
    pub fn adopt_coded(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
        expected: &BTreeMap<u64, Expected>,
        coded: &BTreeMap<u64, Coded>,
    ) -> Result<Arc<Space>, SpaceError> {
        let map = Map::adopting(config.shape(), expected).with_coded(coded);
        let map = map.at(config.site.clone());
        let space = Space::begin(config, directory, map, true)?;
        // With copies, what is expected is often found before the last donor has answered, and one
        // that is dead is not waited for. (The threads end with the space's patience.)
        let donors = space.donors.read().unwrap_or_else(PoisonError::into_inner).clone();
        let asking = donors.into_iter().map(|donor| {
            let space = space.clone();
            std::thread::spawn(move || {
                let answer = space.call(&donor, None, Request::Renew, Persistence::Patient);
                if let Err(error) = answer {
                    let cause = error.source().map(display);
                    warn!(donor = donor.name, %error, cause, "does not tell what it holds");
                }
            })
        });
        let asking: Vec<_> = asking.collect();
        let is_single = space.config.redundancy.copies() == 1;
        let needs_more = || is_single || space.map().is_missing_any();
        while needs_more() && asking.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(FIND_PAUSE);
        }
        if space.is_fenced() {
            return Err(space.fenced_error());
        }
        let SegmentCounts { held, lost, .. } = space.map().counts();
        info!(
            space = %space.config.id, epoch = %space.config.epoch, held, missing = lost,
            "space is taken over"
        );
        Ok(space)
    }

    pub(crate) fn begin(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
        map: Map,
        adopted: bool,
    ) -> Result<Arc<Space>, SpaceError> {
        config.check()?;
        let parities = config
            .cold
            .map_or(0, |cold| cold.code.stripes(config.segments()) * cold.code.parity() as u64);
        let lookup = Lookup::new(config.segments(), parities);
        let space = Arc::new(Space {
            lookup,
            map: Mutex::new(map),
            taken: Condvar::new(),
            donors: RwLock::default(),
            fenced: AtomicBool::new(false),
            released: AtomicBool::new(false),
            bytes_filled: AtomicU64::new(0),
            scrub: Scrub::default(),
            record: OnceLock::new(),
            temperature: Mutex::default(),
            mending: Mutex::default(),
            changes: AtomicU64::new(0),
            epoch_of_another: OnceLock::new(),
            began: Instant::now(),
            config,
            directory,
            adopted,
        });
        space.ask_directory(adopted);
        Ok(space)
    }

    /// Sets which donors may hold the segments of each zone, by name; an empty list: all.
    /// [`Space::tend`] moves segments that are elsewhere.
    pub fn set_zones(&self, zones: Vec<Vec<String>>) {
        self.map().set_zones(zones);
    }

    /// Puts a segment into a zone; all are in zone 0 before.
    pub fn assign(&self, segment: u64, zone: u16) -> Result<(), SpaceError> {
        self.check_segment(segment)?;
        self.map().assign(segment, zone);
        Ok(())
    }

    /// Which donors hold how many extents of a zone, by name.
    pub fn donors_of_zone(&self, zone: u16) -> BTreeMap<String, u64> {
        let map = self.map();
        let donors = map.donors_of_zone(zone);
        donors.into_iter().map(|(donor, count)| (map.donor(donor).name.clone(), count)).collect()
    }

    /// One thread's handle.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, SpaceError> {
        Lane::new(self.clone())
    }

    /// Configuration of the space.
    pub fn config(&self) -> &SpaceConfig {
        &self.config
    }

    /// Pages in a segment.
    pub fn segment_pages(&self) -> u64 {
        self.config.segment_pages()
    }

    /// The segment that a page is in.
    pub fn segment_of(&self, page: PageNo) -> u64 {
        page >> self.config.segment_order
    }

    /// Takes extents for a segment that has none, so that what is written to it has room.
    pub fn hold(&self, segment: u64) -> Result<(), SpaceError> {
        self.check_segment(segment)?;
        self.group_for_write(segment).map(|_| ())
    }

    /// Gives a segment's extents back to their donors: its pages are zeros again. A segment that is
    /// lost counts as never written from then on. No request for the segment may be under way.
    pub fn free_segment(&self, segment: u64) -> Result<(), SpaceError> {
        self.check_segment(segment)?;
        self.written(segment, || self.free_plain_segment(segment))
    }

    fn free_plain_segment(&self, segment: u64) -> Result<(), SpaceError> {
        let group = match self.map().whereabouts(segment) {
            Whereabouts::Nowhere => return Ok(()),
            Whereabouts::Lost(_) => Group::new(Generation::default()),
            Whereabouts::Held(group) => group,
        };
        let members = group.members();
        let persistence = if members.len() > 1 { Persistence::Once } else { Persistence::Patient };
        for place in members.iter().map(|member| member.place) {
            let donor = self.donor(place.donor);
            let request = Request::Free { extent: place.extent };
            match self.call(&donor, Some((segment, place)), request, persistence) {
                // The second of two attempts finds nothing, and neither does one after the
                // donor's restart: the extent is given back all the same.
                Ok(Answered { outcome: Outcome::Done, .. })
                | Ok(Answered { outcome: Outcome::Refused(Refusal::NoSuchExtent), .. })
                | Err(SpaceError::Lost { .. }) => {}
                Ok(Answered { outcome, .. }) => return Err(self.odd(&donor, outcome)),
                Err(error) if members.len() > 1 && !self.is_fenced() => {
                    debug!(segment, donor = donor.name, %error, "an extent is freed later");
                    self.map().stray(place.donor, segment);
                }
                Err(error) => return Err(error),
            }
        }
        self.map().freed(segment, &group);
        Ok(())
    }

    /// Tells the donors that some pages are not needed any more: they are zeros again, and the
    /// donors' hosts have the memory back. No request for these pages may be in flight. Returns the
    /// least generation of each segment's members, as [`crate::Completion::Written`] does. After an
    /// error the pages may be zeros in only some copies: they must be written before they are read.
    pub fn discard(
        &self,
        first: PageNo,
        count: u64,
    ) -> Result<BTreeMap<u64, Generation>, SpaceError> {
        self.check_range(first, count)?;
        let mut generations = BTreeMap::new();
        let mut page = first;
        while page < first + count {
            let segment = self.segment_of(page);
            let within = page - (segment << self.config.segment_order);
            let run = (self.segment_pages() - within).min(first + count - page);
            page += run;
            if let Some(generation) = self.discard_in(segment, within as u32, run as u32)? {
                generations.insert(segment, generation);
            }
        }
        Ok(generations)
    }

    fn discard_in(
        &self,
        segment: u64,
        first: u32,
        count: u32,
    ) -> Result<Option<Generation>, SpaceError> {
        self.written(segment, || self.discard_in_plain(segment, first, count))
    }

    fn discard_in_plain(
        &self,
        segment: u64,
        first: u32,
        count: u32,
    ) -> Result<Option<Generation>, SpaceError> {
        let mut done: Vec<Place> = Vec::new();
        let mut brought = Generation::default();
        loop {
            let group = match self.whereabouts(segment) {
                Whereabouts::Nowhere => return Ok(None),
                Whereabouts::Lost(donor) => return Err(self.lost_error(segment, donor)),
                Whereabouts::Held(group) => self.map().touch(segment).unwrap_or(group),
            };
            // When a member has left, the others are asked again, with the new generation.
            // Otherwise a successor would take the member that left for as good as them.
            if std::mem::replace(&mut brought, group.generation) != group.generation {
                done.clear();
            }
            // A member that joins meanwhile is found in the next round.
            let next = group.members().iter().find(|member| !done.contains(&member.place));
            let Some(place) = next.map(|member| member.place) else {
                return Ok(Some(group.generation));
            };
            let donor = self.donor(place.donor);
            let (extent, generation) = (place.extent, group.generation);
            let request = Request::Discard { extent, generation, first, count };
            let is_single = group.members().len() == 1;
            let persistence = if is_single { Persistence::Patient } else { Persistence::Once };
            match self.call(&donor, Some((segment, place)), request, persistence) {
                Ok(Answered { outcome: Outcome::Done, .. }) => done.push(place),
                Ok(Answered { outcome: Outcome::Refused(Refusal::NoSuchExtent), .. }) => {
                    self.map().gone(segment, place);
                }
                Ok(Answered { outcome, .. }) => return Err(self.odd(&donor, outcome)),
                // Already told to the map.
                Err(SpaceError::Lost { .. }) => self.map().gone(segment, place),
                Err(error) if is_single || self.is_fenced() => return Err(error),
                // It would give the old pages, and leaves.
                Err(error) if !self.desert(segment, place) => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Whether the donor that holds a segment, if one does, answered when it was last asked.
    pub fn is_reachable(&self, segment: u64) -> bool {
        match self.whereabouts(segment) {
            Whereabouts::Held(group) => {
                let map = self.map();
                let is_reachable = |place: Place| map.donor(place.donor).reachable;
                // A coded segment can be decoded from others, too.
                group.form == Form::Coded || group.whole().any(is_reachable)
            }
            Whereabouts::Nowhere | Whereabouts::Lost(_) => true,
        }
    }

    /// Tells every donor that the space is alive, looks for new donors, and gives back extents that
    /// a donor set aside while it could not be heard. To be called every
    /// [`Space::renew_interval`] by a thread that may wait.
    pub fn renew(&self) {
        self.ask_directory(false);
        self.each_donor(|donor| match self.call(donor, None, Request::Renew, Persistence::Once) {
            Ok(_) => self.free_strays(donor),
            Err(error) => {
                let cause = error.source().map(display);
                warn!(donor = donor.name, %error, cause, "lease not renewed");
            }
        });
    }

    /// How often [`Space::renew`] is to be called: three may fail before the lease runs out.
    pub fn renew_interval(&self) -> Duration {
        self.config.lease / 4
    }

    /// Gives everything back to the donors, for good: nothing can be written any more. May be
    /// repeated. All donors are asked; an error names one that cannot be reached. That donor has
    /// its memory back when the lease ends.
    pub fn release(&self) -> Result<(), SpaceError> {
        // A thread that holds a donor's link is done with it before the donor is told below. Later
        // threads see this.
        self.released.store(true, Ordering::SeqCst);
        self.ask_directory(false);
        let released = self.each_donor(|donor| {
            match self.call(donor, None, Request::FreeAll, Persistence::Once)?.outcome {
                Outcome::Done | Outcome::Refused(Refusal::NoSuchExtent) => Ok(()),
                outcome => Err(self.odd(donor, outcome)),
            }
        });
        self.map().freed_all();
        released.into_iter().collect()
    }

    /// The space's state.
    pub fn status(&self) -> SpaceStatus {
        let donors = self.donors.read().unwrap_or_else(PoisonError::into_inner).clone();
        let map = self.map();
        let (counts, coded) = (map.counts(), map.coded_counts());
        let segment_bytes = self.segment_pages() * PAGE_SIZE as u64;
        let donors = donors.iter().map(|donor| {
            let known = map.donor(donor.index);
            DonorStatus {
                name: donor.name.clone(),
                host: known.site.host.clone(),
                location: known.site.location.clone(),
                addr: donor.address(),
                boot: known.boot,
                reachable: known.reachable,
                overdue: known.is_overdue,
                extents: known.extents,
                bytes_held: known.extents * segment_bytes,
                free_pages: known.load.free_pages,
                in_service: known.load.in_service,
                draining: known.load.draining,
                recalled_bytes: u64::from(known.load.recalled) * segment_bytes,
            }
        });
        SpaceStatus {
            id: self.config.id,
            epoch: self.config.epoch,
            pages: self.config.pages,
            segment_pages: self.segment_pages(),
            segments: self.config.segments(),
            copies: self.config.redundancy.copies(),
            segments_held: counts.held,
            segments_degraded: counts.degraded,
            segments_untended: map.untended(),
            segments_lost: counts.lost,
            code: self.config.cold.map(|cold| cold.code),
            segments_coded: coded.segments,
            bytes_saved: coded.extents_saved * segment_bytes,
            bytes_filled: self.bytes_filled.load(Ordering::Relaxed),
            scrub: self.scrub.status(),
            fenced: self.is_fenced(),
            donors: donors.collect(),
        }
    }

    /// Where a segment is, for reading.
    pub(crate) fn whereabouts(&self, segment: u64) -> Whereabouts {
        self.lookup.get(segment)
    }

    /// Where a segment is, for writing: takes extents if there are none yet, and waits for that.
    /// The write is under way from here on, until [`Space::write_ends`], if this does not fail.
    pub(crate) fn group_for_write(&self, segment: u64) -> Result<Group, SpaceError> {
        if let Some(group) = self.begin_write(segment) {
            return Ok(group);
        }
        self.write_begins(segment);
        let group = self.take(segment);
        if group.is_err() {
            self.write_ends(segment);
        }
        group
    }

    /// As [`Space::group_for_write`], but none if that had to wait.
    pub(crate) fn begin_write(&self, segment: u64) -> Option<Group> {
        self.write_begins(segment);
        match self.lookup.get(segment) {
            // The map must see a segment found after a takeover before it is written.
            Whereabouts::Held(group)
                if group.generation >= Generation::first(self.config.epoch)
                    && group.form == Form::Copies =>
            {
                Some(group)
            }
            _ => {
                self.write_ends(segment);
                None
            }
        }
    }

    /// Does what changes a segment's pages: not while it is part of a stripe that is coded, and so
    /// that no stripe is coded meanwhile.
    fn written<R>(
        &self,
        segment: u64,
        change: impl FnOnce() -> Result<R, SpaceError>,
    ) -> Result<R, SpaceError> {
        self.write_begins(segment);
        let is_allowed = self.map().allow_write(segment);
        let changed = if is_allowed { change() } else { Err(self.coded_error(segment)) };
        // A request without an answer may still take effect.
        if !matches!(changed, Err(SpaceError::Unreachable { .. })) {
            self.write_ends(segment);
        }
        changed
    }

    fn write_begins(&self, segment: u64) {
        if self.config.cold.is_some() {
            self.lookup.activity(segment).write_begins(self.now());
        }
    }

    pub(crate) fn write_ends(&self, segment: u64) {
        if self.config.cold.is_some() {
            self.lookup.activity(segment).write_ends();
        }
    }

    pub(crate) fn note_read(&self, segment: u64) {
        if self.config.cold.is_some() {
            self.lookup.activity(segment).read(self.now());
        }
    }

    pub(crate) fn activity(&self, segment: u64) -> Option<&Activity> {
        self.lookup.known_activity(segment)
    }

    fn coded_error(&self, segment: u64) -> SpaceError {
        SpaceError::Coded { space: self.config.id, segment }
    }

    /// A member has missed something, or is waited for in vain: see [`Map::desert`].
    pub(crate) fn desert(&self, segment: u64, place: Place) -> bool {
        let deserted = self.map().desert(segment, place);
        if deserted {
            let donor = &self.donor(place.donor).name;
            info!(segment, donor, "a copy is given up, and will be made anew");
        }
        deserted
    }

    fn take(&self, segment: u64) -> Result<Group, SpaceError> {
        let mut asked_directory = false;
        let mut take = self.map().begin(segment);
        loop {
            take = match take {
                Take::Held(group) => return Ok(group),
                Take::Lost(donor) => return Err(self.lost_error(segment, donor)),
                Take::Coded => return Err(self.coded_error(segment)),
                Take::NoRoom if asked_directory => {
                    let donors = self.map().donors().len();
                    return Err(SpaceError::NoRoom { pages: self.segment_pages(), donors });
                }
                Take::NoRoom => {
                    // Somebody may have come, or come back.
                    asked_directory = true;
                    self.ask_directory(false);
                    self.each_donor(|donor| {
                        // A donor that does not answer is not asked for an extent.
                        if self.call(donor, None, Request::Renew, Persistence::Once).is_ok() {
                            self.free_strays(donor);
                        }
                    });
                    self.map().begin(segment)
                }
                Take::Wait => {
                    let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
                    let mut map = self
                        .taken
                        .wait_while(map, |map| map.is_taking(segment))
                        .unwrap_or_else(PoisonError::into_inner);
                    map.begin(segment)
                }
                Take::Ask(donor, generation) => {
                    // A fault waits here: no silent donor is waited for while another may have
                    // room.
                    let persistence = match self.config.redundancy {
                        Redundancy::Mirror(_) if !asked_directory => Persistence::Brief,
                        _ => Persistence::Once,
                    };
                    let donor = self.donor(donor);
                    let next = self.ask_for_extent(segment, &donor, generation, persistence);
                    self.taken.notify_all();
                    next?
                }
            };
        }
    }

    fn ask_for_extent(
        &self,
        segment: u64,
        donor: &Donor,
        generation: Generation,
        persistence: Persistence,
    ) -> Result<Take, SpaceError> {
        let given = |place| self.map().allocated(segment, place);
        match self.allocate(segment, donor, generation, persistence, given) {
            Ok(Ok(take)) => Ok(take),
            Ok(Err(declined)) => Ok(self.map().declined(segment, donor.index, declined)),
            Err(error) => {
                self.map().abandon(segment);
                Err(error)
            }
        }
    }

    /// Asks a donor for an extent, and tells `given` of it. An error is final.
    pub(crate) fn allocate<R>(
        &self,
        segment: u64,
        donor: &Donor,
        generation: Generation,
        persistence: Persistence,
        given: impl FnOnce(Place) -> R,
    ) -> Result<Result<R, Declined>, SpaceError> {
        let order = self.config.segment_order;
        let request = Request::Allocate { segment, member: 0, order, generation };
        // Held until the map knows, so that nobody frees the extent as a stray in between.
        let link = match persistence {
            Persistence::Brief => donor.link_within(self.config.failover),
            Persistence::Once | Persistence::Patient => Some(donor.link()),
        };
        let Some(mut link) = link else {
            return Ok(Err(Declined::Busy));
        };
        if self.released.load(Ordering::SeqCst) {
            return Ok(Err(Declined::Full));
        }
        match link.call(self, donor, None, request, persistence) {
            Ok(Answered { outcome: Outcome::Allocated(extent), boot }) => {
                debug!(segment, donor = donor.name, %extent, "extent taken");
                Ok(Ok(given(Place { donor: donor.index, boot, extent })))
            }
            Ok(Answered { outcome, .. }) => {
                debug!(segment, donor = donor.name, ?outcome, "no extent");
                Ok(Err(Declined::Full))
            }
            Err(error @ SpaceError::Fenced { .. }) => Err(error),
            Err(error) => {
                let cause = error.source().map(display);
                warn!(segment, donor = donor.name, %error, cause, "no extent");
                let is_brief = persistence == Persistence::Brief;
                Ok(Err(if is_brief { Declined::Late } else { Declined::Silent }))
            }
        }
    }

    /// Gives back what the donor may hold for segments that are elsewhere. The id is not known, so
    /// it is asked for once more. The donor's link is held throughout, so that two threads do not
    /// free the same stray, and the second of them what was taken in between.
    pub(crate) fn free_strays(&self, donor: &Donor) {
        let mut link = donor.link();
        if self.released.load(Ordering::SeqCst) {
            return;
        }
        let strays = self.map().strays_of(donor.index);
        for segment in strays {
            let order = self.config.segment_order;
            let generation = Generation::FILLING;
            let request = Request::Allocate { segment, member: 0, order, generation };
            let freed = match link.call(self, donor, None, request, Persistence::Once) {
                Ok(Answered { outcome: Outcome::Allocated(extent), .. }) => {
                    let request = Request::Free { extent };
                    link.call(self, donor, None, request, Persistence::Once).is_ok()
                }
                // Full, and so without an extent for the segment.
                Ok(_) => true,
                Err(_) => false,
            };
            if freed {
                self.map().stray_freed(donor.index, segment);
            }
        }
    }

    pub(crate) fn call(
        &self,
        donor: &Donor,
        expected: Option<(u64, Place)>,
        request: Request<'_>,
        persistence: Persistence,
    ) -> Result<Answered, SpaceError> {
        donor.link().call(self, donor, expected, request, persistence)
    }

    /// Enters donors that are new, and addresses that have changed. `unlisted` says that the new
    /// ones may hold extents of which this process knows nothing yet.
    pub(crate) fn ask_directory(&self, unlisted: bool) {
        let addresses = self.directory.donors();
        let mut donors = self.donors.write().unwrap_or_else(PoisonError::into_inner);
        let mut map = self.map();
        for address in addresses {
            let index = map.donor_named(&address.name, &address.site, unlisted);
            let place = DonorPlace { address: address.addr, node: address.site.host };
            match donors.get(index.0 as usize) {
                Some(donor) => donor.set_place(place),
                None => donors.push(Arc::new(Donor::new(index, &address.name, place))),
            }
        }
    }

    /// Does something for all donors at once, since each may keep its caller waiting.
    pub(crate) fn each_donor<R: Send>(&self, work: impl Fn(&Donor) -> R + Sync) -> Vec<R> {
        let donors = self.donors.read().unwrap_or_else(PoisonError::into_inner).clone();
        let (Some((last, others)), work) = (donors.split_last(), &work) else {
            return Vec::new();
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                others.iter().map(|donor| scope.spawn(move || work(donor))).collect();
            let last = work(last);
            let joined = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            joined.chain([last]).collect()
        })
    }

    pub(crate) fn donor(&self, donor: DonorIndex) -> Arc<Donor> {
        self.donors.read().unwrap_or_else(PoisonError::into_inner)[donor.0 as usize].clone()
    }

    /// The map, whose changes are published when the guard goes.
    pub(crate) fn map(&self) -> MapGuard<'_> {
        MapGuard {
            map: self.map.lock().unwrap_or_else(PoisonError::into_inner),
            lookup: &self.lookup,
            changes: &self.changes,
        }
    }

    /// The clock of the map. Lanes keep time by it.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn hello(&self, lane: u64) -> Hello {
        Hello {
            versions: VERSIONS,
            space: self.config.id,
            epoch: self.epoch(),
            lane,
            lease: self.config.lease,
            consumer: self.config.consumer.clone(),
        }
    }

    /// The epoch that donors are told.
    fn epoch(&self) -> Epoch {
        let another = self.epoch_of_another.get();
        another.map_or(self.config.epoch, |epoch| Epoch(epoch.load(Ordering::Acquire)))
    }

    /// Whether another borrower has taken the space over.
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    pub(crate) fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Another borrower has taken the space over: nothing goes on from here.
    pub(crate) fn fence(&self) -> SpaceError {
        // A reader is told of the owner's next process, and goes on.
        let is_owner = self.epoch_of_another.get().is_none();
        if is_owner && !self.fenced.swap(true, Ordering::AcqRel) {
            warn!(space = %self.config.id, epoch = %self.config.epoch, "fenced: the space has another owner");
        }
        self.fenced_error()
    }

    pub(crate) fn fenced_error(&self) -> SpaceError {
        SpaceError::Fenced { space: self.config.id, epoch: self.epoch() }
    }

    pub(crate) fn lost_error(&self, segment: u64, donor: DonorIndex) -> SpaceError {
        let donor = match donor {
            DonorIndex::UNKNOWN => "of an earlier time".to_owned(),
            known => self.donor(known).name.clone(),
        };
        SpaceError::Lost { space: self.config.id, segment, donor }
    }

    /// An answer that the request cannot have, or a refusal that nobody can do anything about.
    pub(crate) fn odd(&self, donor: &Donor, outcome: Outcome) -> SpaceError {
        let refusal = match outcome {
            Outcome::Refused(refusal) => refusal,
            _ => Refusal::OutOfBounds,
        };
        SpaceError::Refused { donor: donor.name.clone(), refusal }
    }

    pub(crate) fn check_segment(&self, segment: u64) -> Result<(), SpaceError> {
        self.check_range(segment.saturating_mul(self.segment_pages()), 1)
    }

    fn check_range(&self, first: PageNo, count: u64) -> Result<(), SpaceError> {
        match first.checked_add(count) {
            Some(end) if count > 0 && end <= self.config.pages => Ok(()),
            _ => Err(SpaceError::BadRequest {
                first,
                count: count as usize,
                pages: self.config.pages,
            }),
        }
    }
}

/// The locked map. Its changes are in the lookup before anyone else sees the map.
pub(crate) struct MapGuard<'a> {
    map: MutexGuard<'a, Map>,
    lookup: &'a Lookup,
    changes: &'a AtomicU64,
}

impl Deref for MapGuard<'_> {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

impl DerefMut for MapGuard<'_> {
    fn deref_mut(&mut self) -> &mut Map {
        &mut self.map
    }
}

impl Drop for MapGuard<'_> {
    fn drop(&mut self) {
        let changed = self.map.take_changed();
        for segment in &changed {
            self.lookup.set(*segment, self.map.whereabouts(*segment));
        }
        if !changed.is_empty() {
            self.changes.fetch_add(1, Ordering::Release);
        }
    }
}
