//! Does what [`scrub`](crate::scrub) decides: has the copies of pages compared, and damaged ones
//! mended.

use crate::coded::mend::Compared;
use crate::coded::row::{self, Rows};
use crate::copies::scrub::{Ask, Cursor, Inspection, Known, Report, Run};
use crate::map::Map;
use crate::map::group::Place;
use crate::{ScrubStatus, Space, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageNo, ZERO_PAGE_SUM};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, PageState, Refusal, Request};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{debug, error, warn};

/// Pages of a segment that one call of [`Space::scrub`] compares: 4 MiB at each member, which its
/// donor reads in about a millisecond.
pub(crate) const RUN_PAGES: u32 = 1024;

/// Most runs that wait to be compared out of turn. Further runs wait for their regular turn.
const MAX_SUSPECTS: usize = 64;

/// How far the scrub has come, and what it has found.
#[derive(Default)]
pub(crate) struct Scrub {
    round: Mutex<Round>,
    /// Segments and first pages of runs that are to be compared out of turn.
    suspects: Mutex<VecDeque<(u64, u32)>>,
    found: Mutex<Found>,
}

/// Position in a round: first segments with copies, then coded stripes.
#[derive(Default)]
struct Round {
    copies: Cursor,
    rows: row::Cursor,
    has_seen_copies: bool,
}

/// Next part to inspect.
enum Part {
    Copies(Run),
    Rows(Rows),
}

impl Round {
    /// `None` at the end of a round.
    fn next(&mut self, map: &Map) -> Option<Part> {
        if !self.has_seen_copies {
            if let Some(run) = self.copies.next(map, RUN_PAGES) {
                return Some(Part::Copies(run));
            }
            self.has_seen_copies = true;
        }
        let rows = self.rows.next(map, RUN_PAGES).map(Part::Rows);
        self.has_seen_copies = rows.is_some();
        rows
    }
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

    /// Pages were looked at, and these were mended, or are lost.
    pub(crate) fn note(&self, pages: u64, repaired: u64, lost: u64, is_given_up: bool) {
        let mut found = self.found();
        found.lost += lost;
        let most = found.lost.max(found.status.pages_lost);
        let status = &mut found.status;
        status.bytes_verified += pages * PAGE_SIZE as u64;
        status.pages_repaired += repaired;
        status.pages_lost = most;
        status.copies_given_up += u64::from(is_given_up);
    }

    fn round_is_over(&self) {
        let mut found = self.found();
        found.status.rounds += 1;
        found.status.pages_lost = std::mem::take(&mut found.lost);
    }
}

/// Between two rounds, however little there is to compare.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(1);

/// How soon pages are looked at that came back wrong.
const TICK: Duration = Duration::from_millis(100);

/// How fast copies are compared, in bytes a second, if nothing else is said: 1 GiB in two copies
/// once a minute.
pub const SCRUB_BYTES_PER_S: u64 = 32 << 20;

impl Space {
    /// Has the copies of all pages compared, over and over, until `is_over` says so; donors read so
    /// many bytes a second for it at most, all of them together, but for a few MiB. With 0 only
    /// what came back wrong is compared. Work for a thread of its own; [`Space::scrub`] says what
    /// `known` is.
    pub fn keep_scrubbed(&self, known: Known<'_>, bytes_per_s: u64, is_over: &dyn Fn() -> bool) {
        let mut due = Instant::now();
        while !is_over() {
            self.scrub_suspects(known);
            let now = Instant::now();
            if bytes_per_s > 0 && due <= now {
                due = now
                    + match self.scrub(known) {
                        Some(bytes) => Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64),
                        None => BETWEEN_ROUNDS,
                    };
            }
            let wait = due.saturating_duration_since(Instant::now());
            std::thread::sleep(if bytes_per_s > 0 { wait.min(TICK) } else { TICK });
        }
    }

    /// Compares one run of pages, 4 MiB, between the members of its group, or the shards of its
    /// stripe with its parities, and has pages mended that have gone bad at one of them. To be
    /// called again and again by a thread that may wait, as often as the bandwidth allows. Donors
    /// read their memory; no page crosses the network but those that are mended. Says how many
    /// bytes donors have read; `None` when there is no run left: a round is over, and the next call
    /// begins another.
    ///
    /// `known` says what the caller knows to be stored for a page, if that is certain:
    /// acknowledged, and not being written or discarded.
    pub fn scrub(&self, known: Known<'_>) -> Option<u64> {
        if self.is_fenced() {
            return None;
        }
        let mut round = self.scrub.round.lock().unwrap_or_else(PoisonError::into_inner);
        let part = round.next(&self.map());
        if part.is_none() {
            self.scrub.round_is_over();
        }
        drop(round);
        let pages = match part? {
            Part::Copies(run) => self.inspect(run, known).pages,
            Part::Rows(rows) => self.compare_rows(&rows, known),
        };
        Some(pages * PAGE_SIZE as u64)
    }

    /// Compares all pages of a segment, and repairs pages that are right in one of its copies. With
    /// `leaving`, it compares only what must be safe before that member leaves. False if a donor
    /// could not be asked.
    pub(crate) fn compare(&self, segment: u64, leaving: Option<Place>) -> bool {
        let pages = self.segment_pages() as u32;
        let mut first = 0;
        while first < pages {
            let run = self.map().run_to_compare(segment, first, RUN_PAGES);
            let Some(run) = run.filter(|_| !self.is_fenced()) else { return false };
            first += run.count;
            let run = match leaving {
                Some(leaving) => run.before_leaving(leaving),
                None => run,
            };
            // The copies' own sums suffice here. The scrub finds members that are wrong otherwise.
            if self.inspect(run, &|_| None).is_cut_short {
                return false;
            }
        }
        true
    }

    /// A page came from a donor, and was not what its reader knows to be stored: its copies are to
    /// be compared out of turn.
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
        let Some((segment, first)) = next.filter(|_| !self.is_fenced()) else { return };
        let (run, rows) = {
            let map = self.map();
            let stripe = map.coded_stripe_of(segment);
            let rows = stripe.and_then(|stripe| map.rows(stripe, first, RUN_PAGES));
            (map.run_to_compare(segment, first, RUN_PAGES), rows)
        };
        match (rows, run) {
            (Some(rows), _) => _ = self.compare_rows(&rows, known),
            (None, Some(run)) => _ = self.inspect(run, known),
            (None, None) => {}
        }
    }

    /// Compares rows of a coded stripe. Says how many pages donors have read.
    fn compare_rows(&self, rows: &Rows, known: Known<'_>) -> u64 {
        let report = self.inspect_rows(rows, known, Compared::All);
        self.note_rows(rows, report);
        report.pages
    }

    /// Compares a run of pages.
    fn inspect(&self, run: Run, known: Known<'_>) -> Report {
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
                    let admitted = self.admit(segment, from, to);
                    match admitted.and_then(|()| self.ask_member(segment, to, request)) {
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
        report
    }

    fn note(&self, segment: u64, report: Report) {
        let Report { pages, damaged, repaired, lost, wrong, .. } = report;
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
        self.scrub.note(pages, repaired, lost, wrong.is_some());
    }

    pub(crate) fn states_of(
        &self,
        segment: u64,
        place: Place,
        first: u32,
        count: u32,
    ) -> Result<Vec<PageState>, SpaceError> {
        let request = Request::Verify { extent: place.extent, first, count };
        match self.ask_member(segment, place, request)? {
            Outcome::Verified(states) => Ok(states),
            outcome @ Outcome::Refused(Refusal::NoSuchExtent) => {
                self.map().gone(segment, place);
                Err(self.odd(&self.donor(place.donor), outcome))
            }
            outcome => Err(self.odd(&self.donor(place.donor), outcome)),
        }
    }
}
