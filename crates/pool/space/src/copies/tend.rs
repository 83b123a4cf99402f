//! Does what [`upkeep`](crate::upkeep) decides: makes new copies, and moves those that are in the
//! wrong place.

use crate::control::Persistence;
use crate::copies::upkeep::Step;
use crate::map::group::{DonorIndex, Place};
use crate::map::lookup::Whereabouts;
use crate::{Space, SpaceError};
use hecaton_memory::PAGE_SIZE;
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, MAX_FILL, Refusal, Request};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Segments that one call of [`Space::tend`] looks at.
const SEGMENTS_AT_A_TIME: usize = 64;

/// Copies that are made at a time. While the pages of one are on their way, those of another are
/// compared, or stored by another donor.
const AT_A_TIME: usize = 3;

/// The threads that copy wait most of the time, and make no deep calls.
const STACK_BYTES: usize = 256 << 10;

/// Pages that one request copies: 4 MiB, some milliseconds, which is how long the bandwidth may be
/// exceeded.
const FILL_PAGES: u32 = MAX_FILL / 4;

/// How often each donor is heard at least by who keeps a space.
const LOOK_AROUND: Duration = Duration::from_secs(3);

/// Interval between checks for missing copies.
const UPKEEP: Duration = Duration::from_millis(250);

/// Default limit of copying between donors for a consumer, in bytes a second. It is four fifths of
/// 10 Gbit/s, so that faults find the link free.
pub const COPYING_BYTES_PER_S: u64 = 950 << 20;

impl Space {
    /// Renews the space's leases until `is_over` says so. Work for a thread of its own: a donor
    /// that says nothing is waited for, and copies are to be made meanwhile.
    pub fn keep_leases(&self, is_over: &dyn Fn() -> bool) {
        let renewal = self.renew_interval().min(LOOK_AROUND);
        while !is_over() {
            std::thread::sleep(renewal);
            // Donors that come, that come back, or that want their memory back are noticed here
            // too.
            self.renew();
        }
    }

    /// Makes copies that are missing, and moves those that are in the wrong place, until `is_over`
    /// says so, copying so many bytes a second at most. Work for a thread of its own.
    pub fn keep_copies(&self, bytes_per_s: u64, is_over: &dyn Fn() -> bool) {
        while !is_over() {
            if !self.tend(UPKEEP, bytes_per_s) {
                std::thread::sleep(UPKEEP);
            }
        }
    }

    /// Makes copies that are missing, and moves those that are in the wrong place, for `longest` at
    /// most, copying so many bytes a second at most. To be called again and again by a thread that
    /// may wait. Says whether it did anything.
    pub fn tend(&self, longest: Duration, bytes_per_s: u64) -> bool {
        let pace = Pace::new(bytes_per_s);
        self.watch_temperature();
        let segments = self.map().segments_to_tend(SEGMENTS_AT_A_TIME);
        let waiting = Mutex::new(self.together(segments).into_iter());
        let tend = || {
            let mut did = false;
            // The list is let go before what was taken from it is tended.
            let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
            while pace.began.elapsed() < longest && !self.is_fenced() {
                let Some(together) = next() else { break };
                for segment in together {
                    match self.tend_segment(segment, &pace) {
                        Ok(changed) => did |= changed,
                        Err(error) => debug!(segment, %error, "a copy is not made now"),
                    }
                }
            }
            did
        };
        let more = waiting.lock().map_or(0, |waiting| waiting.len()).clamp(1, AT_A_TIME) - 1;
        let did = std::thread::scope(|scope| {
            let spawn = |_| {
                let thread = std::thread::Builder::new().name("copier".into());
                // Without another one, those that are there do all of it.
                thread.stack_size(STACK_BYTES).spawn_scoped(scope, tend).ok()
            };
            let others: Vec<_> = (0..more).filter_map(spawn).collect();
            let did = tend();
            let joined = others.into_iter().map(|other| other.join());
            joined.fold(did, |did, other| did | other.unwrap_or_else(|panic| resume_unwind(panic)))
        });
        if did {
            // The map is let go before the list of donors is looked at: who enters new donors takes
            // the two in the other order.
            let count = self.map().donors().len() as u32;
            for donor in (0..count).map(|at| self.donor(DonorIndex(at))) {
                let has_strays = {
                    let map = self.map();
                    map.donor(donor.index).reachable && !map.strays_of(donor.index).is_empty()
                };
                if has_strays {
                    self.free_strays(&donor);
                }
            }
        }
        did
    }

    /// Segments in the order in which they are tended, those of one stripe together: what is done
    /// for one changes the others.
    fn together(&self, segments: Vec<u64>) -> Vec<Vec<u64>> {
        let Some(cold) = self.config().cold else {
            return segments.into_iter().map(|segment| vec![segment]).collect();
        };
        let mut stripes: Vec<(u64, Vec<u64>)> = Vec::new();
        for segment in segments {
            let stripe = cold.code.shard_of(segment).0;
            match stripes.iter_mut().find(|(other, _)| *other == stripe) {
                Some((_, together)) => together.push(segment),
                None => stripes.push((stripe, vec![segment])),
            }
        }
        stripes.into_iter().map(|(_, together)| together).collect()
    }

    fn tend_segment(&self, segment: u64, pace: &Pace) -> Result<bool, SpaceError> {
        let mut tried = Vec::new();
        let mut changed = false;
        loop {
            let step = self.map().next_step(segment, &tried);
            match step {
                Step::Nothing | Step::Wait => return Ok(changed),
                Step::Compare { group, leaving } => {
                    if !self.compare(segment, Some(leaving)) {
                        self.map().put_off(segment);
                        return Ok(changed);
                    }
                    self.map().compared(segment, group);
                }
                Step::Rebuild(stripe) => {
                    if !self.rebuild(stripe, pace)? {
                        return Ok(changed);
                    }
                    changed = true;
                }
                Step::Commit(stripe) => {
                    let done = self.commit(stripe);
                    if !matches!(done, Ok(true)) {
                        self.map().put_off(segment);
                        return done.map(|_| changed);
                    }
                    changed = true;
                }
                Step::Thaw(stripe) => {
                    let done = self.thaw(stripe);
                    if !matches!(done, Ok(true)) {
                        self.map().put_off(segment);
                        return done.map(|_| changed);
                    }
                    changed = true;
                }
                Step::Leave { from, kept } => {
                    changed = true;
                    if !self.is_there(segment, kept)? {
                        self.map().gone(segment, kept);
                    } else if self.map().desert(segment, from) {
                        let donor = &self.donor(from.donor).name;
                        info!(segment, donor, "a copy is wanted back that nobody has room for");
                    } else {
                        return Ok(changed);
                    }
                }
                Step::Join(index) => {
                    let donor = self.donor(index);
                    let filling = hecaton_memory::Generation::FILLING;
                    let given = |place| self.map().join(segment, place);
                    match self.allocate(segment, &donor, filling, Persistence::Once, given)? {
                        Ok(true) => changed = true,
                        Ok(false) => return Ok(changed),
                        Err(why) => {
                            self.map().no_join(segment, index, why);
                            tried.push(index);
                        }
                    }
                }
                Step::Fill { to, from } => {
                    if !self.fill(segment, to, from, pace)? {
                        return Ok(changed);
                    }
                    changed = true;
                }
            }
        }
    }

    /// Whether a member's donor answers and still has the extent. It may have died since it was
    /// heard last, or have been away for longer than its lease.
    pub(crate) fn is_there(&self, segment: u64, place: Place) -> Result<bool, SpaceError> {
        let donor = self.donor(place.donor);
        let request = Request::Read { extent: place.extent, pages: &[0] };
        match self.call(&donor, Some((segment, place)), request, Persistence::Once)?.outcome {
            Outcome::Pages { .. } => Ok(true),
            Outcome::Refused(Refusal::NoSuchExtent) => Ok(false),
            outcome => Err(self.odd(&donor, outcome)),
        }
    }

    /// Fills a member from another one. False if that cannot be done now.
    fn fill(&self, segment: u64, to: Place, from: Place, pace: &Pace) -> Result<bool, SpaceError> {
        let (donor, other) = (self.donor(to.donor), self.donor(from.donor));
        match self.admit(segment, from, to) {
            // As when the other donor does not get through to it.
            Err(SpaceError::Unreachable { .. }) => return Ok(false),
            admitted => admitted?,
        }
        let source = FillSource { address: other.address(), boot: from.boot, extent: from.extent };
        let pages = self.segment_pages() as u32;
        let mut first = 0;
        while first < pages {
            let count = FILL_PAGES.min(pages - first);
            let request = Request::Fill { extent: to.extent, first, count, source };
            match self.ask_member(segment, to, request)? {
                Outcome::Done => {}
                Outcome::Refused(Refusal::NoSource) => {
                    self.map().silent(from.donor);
                    return Ok(false);
                }
                // Its process was replaced while the copy was made: begun anew, with another
                // extent.
                Outcome::Refused(Refusal::NotFilling | Refusal::NoSuchExtent) => {
                    return Ok(self.desert(segment, to));
                }
                outcome => return Err(self.odd(&donor, outcome)),
            }
            first += count;
            let bytes = u64::from(count) * PAGE_SIZE as u64;
            self.bytes_filled.fetch_add(bytes, Ordering::Relaxed);
            pace.spent(bytes);
        }
        let is_whole = self.confirm(segment, to)?;
        if is_whole {
            info!(segment, to = donor.name, from = other.name, "a copy was made");
        }
        Ok(is_whole)
    }

    /// Has the donor of one member let that of another one read there, where they can be told
    /// apart: a donor shows its own node's certificate, and the space is this one's.
    pub(crate) fn admit(&self, segment: u64, at: Place, reader: Place) -> Result<(), SpaceError> {
        if self.config().credentials.is_none() {
            return Ok(());
        }
        let (donor, node) = (self.donor(at.donor), self.donor(reader.donor).node());
        let request = Request::Admit { node: &node };
        match self.call(&donor, Some((segment, at)), request, Persistence::Once)?.outcome {
            Outcome::Done => Ok(()),
            outcome => Err(self.odd(&donor, outcome)),
        }
    }

    /// A member has all that its segment has. False if it is none any more.
    pub(crate) fn confirm(&self, segment: u64, to: Place) -> Result<bool, SpaceError> {
        loop {
            let Whereabouts::Held(group) = self.whereabouts(segment) else { return Ok(false) };
            if !group.contains(to) {
                return Ok(false);
            }
            let generation = group.generation;
            let request = Request::Confirm { extent: to.extent, generation };
            match self.ask_member(segment, to, request)? {
                Outcome::Done => {}
                outcome => return Err(self.odd(&self.donor(to.donor), outcome)),
            }
            if self.map().filled(segment, to, generation) {
                return Ok(true);
            }
        }
    }

    /// Asks a member for what may take long.
    pub(crate) fn ask_member(
        &self,
        segment: u64,
        place: Place,
        request: Request<'_>,
    ) -> Result<Outcome, SpaceError> {
        self.ask_member_with(segment, place, request, &[])
    }

    /// As [`Space::ask_member`], with pages that follow the request.
    pub(crate) fn ask_member_with(
        &self,
        segment: u64,
        place: Place,
        request: Request<'_>,
        data: &[&[u8]],
    ) -> Result<Outcome, SpaceError> {
        let donor = self.donor(place.donor);
        let (expected, request) = (Some((segment, place)), (request, data));
        let mut link = donor.bulk_link();
        let answered = link.call_with(self, &donor, expected, request, Persistence::Once)?;
        Ok(answered.outcome)
    }
}

/// Keeps copying below a bandwidth, whoever copies.
pub(crate) struct Pace {
    began: Instant,
    bytes: AtomicU64,
    bytes_per_s: u64,
}

impl Pace {
    fn new(bytes_per_s: u64) -> Pace {
        Pace { began: Instant::now(), bytes: AtomicU64::new(0), bytes_per_s: bytes_per_s.max(1) }
    }

    pub(crate) fn spent(&self, bytes: u64) {
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let due = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        std::thread::sleep(due.saturating_sub(self.began.elapsed()));
    }
}
