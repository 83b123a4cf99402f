//! Does what [`scrub`](crate::scrub) decides: has the copies of pages compared, and damaged ones
//! mended.

use crate::group::Place;
use crate::scrub::{Ask, Cursor, Inspection, Known, Report};
use crate::{ScrubStatus, Space, SpaceError};
use hecaton_memory::{PAGE_SIZE, ZERO_PAGE_SUM};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, PageState, Request};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::{debug, error, warn};

/// Pages of a segment that one call of [`Space::scrub`] compares: 4 MiB at each member, which its donor
/// reads in about a millisecond.
const RUN_PAGES: u32 = 1024;

/// How far the scrub has come, and what it has found.
#[derive(Default)]
pub(crate) struct Scrub {
    /// Held while a run is compared: one at a time.
    cursor: Mutex<Cursor>,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    status: ScrubStatus,
    /// Pages that are right nowhere, in this round.
    lost: u64,
}

impl Scrub {
    pub(crate) fn status(&self) -> ScrubStatus {
        self.found().status
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn round_is_over(&self) {
        let mut found = self.found();
        found.status.rounds += 1;
        found.status.pages_lost = std::mem::take(&mut found.lost);
    }
}

impl Space {
    /// Compares one run of pages, 4 MiB, between the members of its group, and has pages mended that
    /// have gone bad at one of them. To be called again and again by a thread that may wait, as often
    /// as the bandwidth allows. Donors read their memory; no page crosses the network but those that are
    /// mended. Says how many bytes donors have read; `None` when there is no run left: a round is over,
    /// and the next call begins another.
    ///
    /// `known` says what the caller knows to be stored for a page, if that is certain: acknowledged,
    /// and not being written or discarded.
    pub fn scrub(&self, known: Known<'_>) -> Option<u64> {
        let mut cursor = self.scrub.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_fenced() {
            return None;
        }
        let run = cursor.next(&self.map(), RUN_PAGES);
        let Some(run) = run else {
            self.scrub.round_is_over();
            return None;
        };
        let mut inspection = Inspection::new(run, self.segment_pages(), ZERO_PAGE_SUM);
        let segment = inspection.segment();
        let report = loop {
            match inspection.next(known) {
                Ask::Verify { place, first, count } => {
                    match self.states_of(segment, place, first, count) {
                        Ok(states) => inspection.verified(place, &states),
                        Err(error) => {
                            debug!(segment, %error, "a copy is not verified now");
                            inspection.failed(place.donor);
                        }
                    }
                }
                Ask::Repair { to, from, first, count } => {
                    let address = self.donor(from.donor).address();
                    let source = FillSource { address, boot: from.boot, extent: from.extent };
                    let request = Request::Repair { extent: to.extent, first, count, source };
                    match self.ask_member(segment, to, request) {
                        Ok(Outcome::Done) => inspection.mended(),
                        other => {
                            debug!(segment, ?other, "pages are not mended now");
                            inspection.failed(to.donor);
                        }
                    }
                }
                Ask::Over(report) => break self.map().uphold(&inspection, report),
            }
        };
        self.note(segment, report);
        Some(report.pages * PAGE_SIZE as u64)
    }

    fn note(&self, segment: u64, report: Report) {
        let Report { pages, damaged, repaired, lost, wrong } = report;
        let wrong = wrong.filter(|place| self.desert(segment, *place));
        if damaged > 0 {
            warn!(segment, damaged, repaired, "pages have gone bad in donors' memory");
        }
        if let Some(place) = wrong {
            let donor = &self.donor(place.donor).name;
            warn!(segment, donor, "a copy was not what was stored");
        }
        if lost > 0 {
            error!(segment, lost, "pages are right in no copy");
        }
        let mut found = self.scrub.found();
        found.lost += lost;
        let most = found.lost.max(found.status.pages_lost);
        let status = &mut found.status;
        status.bytes_verified += pages * PAGE_SIZE as u64;
        status.pages_repaired += repaired;
        status.pages_lost = most;
        status.copies_given_up += u64::from(wrong.is_some());
    }

    fn states_of(
        &self,
        segment: u64,
        place: Place,
        first: u32,
        count: u32,
    ) -> Result<Vec<PageState>, SpaceError> {
        let request = Request::Verify { extent: place.extent, first, count };
        match self.ask_member(segment, place, request)? {
            Outcome::Verified(states) => Ok(states),
            outcome => Err(self.odd(&self.donor(place.donor), outcome)),
        }
    }
}
