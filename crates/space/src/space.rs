//! A space with sockets: what its threads share.

use crate::config::{Directory, SpaceConfig};
use crate::control::{Answered, Donor, Persistence};
use crate::lookup::{Lookup, Whereabouts};
use crate::map::{Declined, DonorIndex, Map, Place, Take};
use crate::{DonorStatus, Lane, SpaceError, SpaceStatus};
use hecaton_memory::{PAGE_SIZE, PageNo};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{Hello, Refusal, Request, VERSIONS};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
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
    donors: RwLock<Vec<Arc<Donor>>>,
    fenced: AtomicBool,
    began: Instant,
}

impl Space {
    /// A new space, with nothing in it. Fails when not one donor can be reached.
    pub fn create(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
    ) -> Result<Arc<Space>, SpaceError> {
        Space::begin(config, directory, false)
    }

    /// Takes over a space that another process began, with its id, size and segment order. The map
    /// is rebuilt from what the donors hold (see docs/design.md).
    ///
    /// Give it a higher epoch than the predecessor's: the donors then refuse whatever the
    /// predecessor still has in the network, which could otherwise overwrite what this one writes.
    ///
    /// A donor that cannot be reached may hold any segment that no other donor holds: those fail as
    /// lost, reads and writes, until the donor is reached (by [`Space::renew`], for one).
    ///
    /// A donor that has restarted knows nothing of what it held. Tell [`Space::expect`] of the
    /// segments that there should be, or what was lost before the takeover reads as zeros. That
    /// includes a segment whose extent was lost while another donor, which could not be heard when
    /// it was asked, still has one set aside for it: nothing was written there.
    pub fn adopt(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
    ) -> Result<Arc<Space>, SpaceError> {
        Space::begin(config, directory, true)
    }

    fn begin(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
        adopted: bool,
    ) -> Result<Arc<Space>, SpaceError> {
        config.check()?;
        let space = Arc::new(Space {
            lookup: Lookup::new(config.segments()),
            map: Mutex::new(Map::new(config.segments(), config.segment_pages())),
            taken: Condvar::new(),
            donors: RwLock::default(),
            fenced: AtomicBool::new(false),
            began: Instant::now(),
            config,
            directory,
            adopted,
        });
        space.ask_directory(adopted);
        // A successor must know what there is; for a new space, who does not answer at once will
        // when there is no room elsewhere.
        let persistence = if adopted { Persistence::Patient } else { Persistence::Once };
        let greeted =
            space.each_donor(|donor| space.call(donor, None, Request::Renew, persistence));
        if space.is_fenced() {
            return Err(space.fenced_error());
        }
        if !greeted.iter().any(Result::is_ok) {
            return Err(SpaceError::NoDonor(greeted.len()));
        }
        info!(
            space = %space.config.id, epoch = %space.config.epoch, pages = space.config.pages,
            donors = greeted.len(), adopted, "space begins"
        );
        Ok(space)
    }

    /// Says that `pages` pages of a segment were stored, or more, in a space that was adopted; before
    /// any is written again. If no donor holds an extent with as many, the segment is lost.
    pub fn expect(&self, segment: u64, pages: u32) -> Result<(), SpaceError> {
        self.check_segment(segment)?;
        self.map().expect(segment, pages);
        Ok(())
    }

    /// One thread's handle.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, SpaceError> {
        Lane::new(self.clone())
    }

    /// What the space is made of.
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

    /// Gives a segment's extents back to their donors: its pages are zeros again. A segment that is
    /// lost counts as never written from then on. No request for the segment may be under way.
    pub fn free_segment(&self, segment: u64) -> Result<(), SpaceError> {
        self.check_segment(segment)?;
        let whereabouts = self.map().whereabouts(segment);
        match whereabouts {
            Whereabouts::Nowhere => return Ok(()),
            Whereabouts::Lost(_) => {}
            Whereabouts::Held(place) => {
                let donor = self.donor(place.donor);
                let request = Request::Free { extent: place.extent };
                let expected = Some((segment, place));
                match self.call(&donor, expected, request, Persistence::Patient) {
                    // The second of two attempts finds nothing, and neither does one after the
                    // donor's restart: the extent is given back all the same.
                    Ok(Answered { outcome: Outcome::Done, .. })
                    | Ok(Answered { outcome: Outcome::Refused(Refusal::NoSuchExtent), .. })
                    | Err(SpaceError::Lost { .. }) => {}
                    Ok(Answered { outcome, .. }) => return Err(self.odd(&donor, outcome)),
                    Err(error) => return Err(error),
                }
            }
        }
        self.map().freed(segment);
        Ok(())
    }

    /// Tells the donors that some pages are not needed any more: they are zeros again, and the
    /// donors' hosts have the memory back. No request for these pages may be under way.
    pub fn discard(&self, first: PageNo, count: u64) -> Result<(), SpaceError> {
        self.check_range(first, count)?;
        let mut page = first;
        while page < first + count {
            let segment = self.segment_of(page);
            let within = page - (segment << self.config.segment_order);
            let run = (self.segment_pages() - within).min(first + count - page);
            page += run;
            let place = match self.lookup.get(segment) {
                Whereabouts::Nowhere => continue,
                Whereabouts::Lost(donor) => return Err(self.lost_error(segment, donor)),
                Whereabouts::Held(place) => place,
            };
            let donor = self.donor(place.donor);
            let request =
                Request::Discard { extent: place.extent, first: within as u32, count: run as u32 };
            let expected = Some((segment, place));
            match self.call(&donor, expected, request, Persistence::Patient)?.outcome {
                Outcome::Done => {}
                Outcome::Refused(Refusal::NoSuchExtent) => {
                    return Err(self.gone(segment, place));
                }
                outcome => return Err(self.odd(&donor, outcome)),
            }
        }
        Ok(())
    }

    /// Whether the donor that holds a segment, if one does, answered when it was last asked.
    pub fn is_reachable(&self, segment: u64) -> bool {
        match self.whereabouts(segment) {
            Whereabouts::Held(place) => self.map().donor(place.donor).reachable,
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
            Err(error) => warn!(donor = donor.name, %error, "lease not renewed"),
        });
    }

    /// How often [`Space::renew`] is to be called: three may fail before the lease runs out.
    pub fn renew_interval(&self) -> Duration {
        self.config.lease / 4
    }

    /// Gives everything back to the donors. May be repeated. A donor that cannot be reached is
    /// named in the error after all others were asked; it has its memory back when the lease ends.
    pub fn release(&self) -> Result<(), SpaceError> {
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
        let (segments_held, segments_lost) = map.counts();
        let donors = donors.iter().map(|donor| {
            let known = map.donor(donor.index);
            DonorStatus {
                name: donor.name.clone(),
                addr: donor.address(),
                reachable: known.reachable,
                extents: known.extents,
                bytes_held: known.extents * self.segment_pages() * PAGE_SIZE as u64,
                free_pages: known.load.free_pages,
                in_service: known.load.in_service,
            }
        });
        SpaceStatus {
            id: self.config.id,
            epoch: self.config.epoch,
            pages: self.config.pages,
            segment_pages: self.segment_pages(),
            segments: self.config.segments(),
            segments_held,
            segments_lost,
            fenced: self.is_fenced(),
            donors: donors.collect(),
        }
    }

    /// Where a segment is, for reading.
    pub(crate) fn whereabouts(&self, segment: u64) -> Whereabouts {
        self.lookup.get(segment)
    }

    /// Where a segment is, for writing: takes an extent if there is none yet, and waits for that.
    pub(crate) fn place_for_write(&self, segment: u64) -> Result<Place, SpaceError> {
        match self.lookup.get(segment) {
            Whereabouts::Held(place) => Ok(place),
            Whereabouts::Nowhere | Whereabouts::Lost(_) => self.take(segment),
        }
    }

    fn take(&self, segment: u64) -> Result<Place, SpaceError> {
        let mut asked_directory = false;
        let mut take = self.map().begin(segment);
        loop {
            take = match take {
                Take::Held(place) => return Ok(place),
                Take::Lost(donor) => return Err(self.lost_error(segment, donor)),
                Take::NoRoom if asked_directory => {
                    let donors = self.map().donors().len();
                    return Err(SpaceError::NoRoom { pages: self.segment_pages(), donors });
                }
                Take::NoRoom => {
                    // Somebody may have come, or come back.
                    asked_directory = true;
                    self.ask_directory(false);
                    self.each_donor(|donor| {
                        // Who does not answer is not asked for an extent.
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
                Take::Ask(donor) => {
                    let next = self.ask_for_extent(segment, &self.donor(donor));
                    self.taken.notify_all();
                    next?
                }
            };
        }
    }

    fn ask_for_extent(&self, segment: u64, donor: &Donor) -> Result<Take, SpaceError> {
        let request = Request::Allocate { segment, member: 0, order: self.config.segment_order };
        // Held until the map knows, so that nobody frees the extent as a stray in between.
        let mut link = donor.link();
        match link.call(self, donor, None, request, Persistence::Once) {
            Ok(Answered { outcome: Outcome::Allocated(extent), boot }) => {
                let place = Place { donor: donor.index, boot, extent };
                debug!(segment, donor = donor.name, %extent, "extent taken");
                Ok(self.map().allocated(segment, place))
            }
            Ok(Answered { outcome, .. }) => {
                debug!(segment, donor = donor.name, ?outcome, "no extent");
                Ok(self.map().declined(segment, donor.index, Declined::Full))
            }
            Err(error @ SpaceError::Fenced { .. }) => {
                self.map().abandon(segment);
                Err(error)
            }
            Err(error) => {
                warn!(segment, donor = donor.name, %error, "no extent");
                Ok(self.map().declined(segment, donor.index, Declined::Silent))
            }
        }
    }

    /// Gives back what the donor may hold for segments that are elsewhere. The id is not known, so
    /// it is asked for once more. The donor's link is held throughout, so that two threads do not
    /// free the same stray, and the second of them what was taken in between.
    fn free_strays(&self, donor: &Donor) {
        let mut link = donor.link();
        let strays = self.map().strays_of(donor.index);
        for segment in strays {
            let order = self.config.segment_order;
            let request = Request::Allocate { segment, member: 0, order };
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

    fn call(
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
    fn ask_directory(&self, unlisted: bool) {
        let addresses = self.directory.donors();
        let mut donors = self.donors.write().unwrap_or_else(PoisonError::into_inner);
        let mut map = self.map();
        for address in addresses {
            let index = map.donor_named(&address.name, unlisted);
            match donors.get(index.0 as usize) {
                Some(donor) => donor.set_address(address.addr),
                None => donors.push(Arc::new(Donor::new(index, &address.name, address.addr))),
            }
        }
    }

    /// Does something for all donors at once, since each may keep its caller waiting.
    fn each_donor<R: Send>(&self, work: impl Fn(&Donor) -> R + Sync) -> Vec<R> {
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
        }
    }

    /// The clock of the map and of all lanes.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn hello(&self, lane: u64) -> Hello {
        Hello {
            versions: VERSIONS,
            space: self.config.id,
            epoch: self.config.epoch,
            lane,
            lease: self.config.lease,
            consumer: self.config.consumer.clone(),
        }
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
        if !self.fenced.swap(true, Ordering::AcqRel) {
            warn!(space = %self.config.id, epoch = %self.config.epoch, "fenced: the space has another owner");
        }
        self.fenced_error()
    }

    pub(crate) fn fenced_error(&self) -> SpaceError {
        SpaceError::Fenced { space: self.config.id, epoch: self.config.epoch }
    }

    pub(crate) fn lost_error(&self, segment: u64, donor: DonorIndex) -> SpaceError {
        let donor = match donor {
            DonorIndex::UNKNOWN => "of an earlier time".to_owned(),
            known => self.donor(known).name.clone(),
        };
        SpaceError::Lost { space: self.config.id, segment, donor }
    }

    /// The donor says that it does not hold the extent.
    pub(crate) fn gone(&self, segment: u64, place: Place) -> SpaceError {
        self.map().gone(segment, place);
        self.lost_error(segment, place.donor)
    }

    /// An answer that the request cannot have, or a refusal that nobody can do anything about.
    fn odd(&self, donor: &Donor, outcome: Outcome) -> SpaceError {
        let refusal = match outcome {
            Outcome::Refused(refusal) => refusal,
            _ => Refusal::OutOfBounds,
        };
        SpaceError::Refused { donor: donor.name.clone(), refusal }
    }

    fn check_segment(&self, segment: u64) -> Result<(), SpaceError> {
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

/// The locked map. What was changed in it is in the lookup before anyone else sees the map.
pub(crate) struct MapGuard<'a> {
    map: MutexGuard<'a, Map>,
    lookup: &'a Lookup,
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
        for segment in self.map.take_changed() {
            self.lookup.set(segment, self.map.known(segment));
        }
        self.lookup.set_unlisted(self.map.unlisted());
    }
}
