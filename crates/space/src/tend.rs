//! Does what [`upkeep`](crate::upkeep) decides: makes new copies, and moves those that are in the
//! wrong place.

use crate::control::{Answered, Persistence};
use crate::group::{DonorIndex, Place};
use crate::lookup::Whereabouts;
use crate::upkeep::Step;
use crate::{Space, SpaceError};
use hecaton_memory::PAGE_SIZE;
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, MAX_FILL, Refusal, Request};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Segments that one call of [`Space::tend`] looks at.
const SEGMENTS_AT_A_TIME: usize = 64;

/// Pages that one request copies: 4 MiB, some milliseconds, which is how long the bandwidth may be
/// exceeded.
const FILL_PAGES: u32 = MAX_FILL / 4;

impl Space {
    /// Makes copies that are missing, and moves those that are in the wrong place, for `longest` at
    /// most, copying so many bytes a second at most. To be called again and again by a thread that
    /// may wait. Says whether it did anything.
    pub fn tend(&self, longest: Duration, bytes_per_s: u64) -> bool {
        let began = Instant::now();
        let mut pace = Pace { began, bytes: 0, bytes_per_s: bytes_per_s.max(1) };
        let mut did = false;
        let segments = self.map().segments_to_tend(SEGMENTS_AT_A_TIME);
        for segment in segments {
            if began.elapsed() >= longest || self.is_fenced() {
                break;
            }
            match self.tend_segment(segment, &mut pace) {
                Ok(changed) => did |= changed,
                Err(error) => debug!(segment, %error, "a copy is not made now"),
            }
        }
        if did {
            // The map is let go before the list of donors is looked at: who enters new donors takes the
            // two in the other order.
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

    fn tend_segment(&self, segment: u64, pace: &mut Pace) -> Result<bool, SpaceError> {
        let mut tried = Vec::new();
        let mut changed = false;
        loop {
            let step = self.map().next_step(segment, &tried);
            match step {
                Step::Nothing | Step::Wait => return Ok(changed),
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

    /// Whether a member's donor answers and still has the extent. It may have died since it was heard
    /// last, or have been away for longer than its lease.
    fn is_there(&self, segment: u64, place: Place) -> Result<bool, SpaceError> {
        let donor = self.donor(place.donor);
        let request = Request::Read { extent: place.extent, pages: &[0] };
        match self.call(&donor, Some((segment, place)), request, Persistence::Once)?.outcome {
            Outcome::Pages { .. } => Ok(true),
            Outcome::Refused(Refusal::NoSuchExtent) => Ok(false),
            outcome => Err(self.odd(&donor, outcome)),
        }
    }

    /// Fills a member from another one. False if that cannot be done now.
    fn fill(
        &self,
        segment: u64,
        to: Place,
        from: Place,
        pace: &mut Pace,
    ) -> Result<bool, SpaceError> {
        let (donor, other) = (self.donor(to.donor), self.donor(from.donor));
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
                // Its process was replaced while the copy was made: begun anew, with another extent.
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
        loop {
            let Whereabouts::Held(group) = self.whereabouts(segment) else { return Ok(false) };
            if !group.contains(to) {
                return Ok(false);
            }
            let generation = group.generation;
            let request = Request::Confirm { extent: to.extent, generation };
            match self.ask_member(segment, to, request)? {
                Outcome::Done => {}
                outcome => return Err(self.odd(&donor, outcome)),
            }
            if self.map().filled(segment, to, generation) {
                info!(segment, to = donor.name, from = other.name, "a copy was made");
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
        let donor = self.donor(place.donor);
        let Answered { outcome, .. } =
            self.bulk_call(&donor, Some((segment, place)), request, Persistence::Once)?;
        Ok(outcome)
    }
}

/// Keeps copying below a bandwidth.
struct Pace {
    began: Instant,
    bytes: u64,
    bytes_per_s: u64,
}

impl Pace {
    fn spent(&mut self, bytes: u64) {
        self.bytes += bytes;
        let due = Duration::from_secs_f64(self.bytes as f64 / self.bytes_per_s as f64);
        std::thread::sleep(due.saturating_sub(self.began.elapsed()));
    }
}
