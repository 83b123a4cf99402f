//! Does what [`scrub`](crate::scrub) decides: has the copies of pages compared, and damaged ones
//! mended.

use crate::group::Place;
use crate::scrub::{Ask, Cursor, Inspection, Known, Report, Run};
use crate::{ScrubStatus, Space, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageNo, ZERO_PAGE_SUM};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, PageState, Request};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::{debug, error, warn};

/// Pages of a segment that one call of [`Space::scrub`] compares: 4 MiB at each member, which its donor
/// reads in about a millisecond.
const RUN_PAGES: u32 = 1024;

/// Most runs that wait to be compared out of turn. What is beyond waits for its turn.
const MAX_SUSPECTS: usize = 64;

/// How far the scrub has come, and what it has found.
#[derive(Default)]
pub(crate) struct Scrub {
    cursor: Mutex<Cursor>,
    /// Segments and first pages of runs that are to be compared out of turn.
    suspects: Mutex<VecDeque<(u64, u32)>>,
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

    fn suspects(&self) -> MutexGuard<'_, VecDeque<(u64, u32)>> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
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
        if self.is_fenced() {
            return None;
        }
        let mut cursor = self.scrub.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let run = cursor.next(&self.map(), RUN_PAGES);
        if run.is_none() {
            self.scrub.round_is_over();
        }
        drop(cursor);
        run.map(|run| self.inspect(run, known))
    }

    /// A page came from a donor, and was not what its reader knows to be stored: its copies are to be
    /// compared out of turn.
    pub fn suspect(&self, page: PageNo) {
        let segment = self.segment_of(page);
        let within = (page - segment * self.segment_pages()) as u32;
        let run = (segment, within / RUN_PAGES * RUN_PAGES);
        let mut suspects = self.scrub.suspects();
        if suspects.len() < MAX_SUSPECTS && !suspects.contains(&run) {
            suspects.push_back(run);
        }
    }

    /// As [`Space::scrub`], for a run with a page that is suspected. Does nothing if there is none.
    pub fn scrub_suspects(&self, known: Known<'_>) {
        let next = self.scrub.suspects().pop_front();
        let run =
            next.and_then(|(segment, first)| self.map().run_to_compare(segment, first, RUN_PAGES));
        if let Some(run) = run.filter(|_| !self.is_fenced()) {
            self.inspect(run, known);
        }
    }

    /// Compares a run of pages. Says how many bytes donors have read.
    fn inspect(&self, run: Run, known: Known<'_>) -> u64 {
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
        report.pages * PAGE_SIZE as u64
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
