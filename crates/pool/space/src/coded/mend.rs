//! Does what [`row`](crate::row) decides: has the pages of coded stripes compared with their
//! parities, and writes again those that have gone bad.

use crate::coded::code;
use crate::coded::row::{RowPage, Rows, Said, settle, wrong_rows};
use crate::control::Persistence;
use crate::copies::scrub::Known;
use crate::copies::verify::RUN_PAGES;
use crate::map::group::Place;
use crate::{Space, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageSignature, PageSum, ZERO_PAGE_SUM, page_sum};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{Refusal, Request};
use std::sync::PoisonError;
use tracing::{debug, error, info, warn};

/// Checks that an inspection of a stripe makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    /// Whether the segments' pages are what they were.
    Segments,
    /// Whether the parities belong to them, too.
    All,
}

/// Result of an inspection of rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowReport {
    /// Pages that donors have read, some of them twice.
    pub(crate) pages: u64,
    /// Pages that were written again.
    pub(crate) repaired: u64,
    /// Pages that cannot be worked out.
    pub(crate) lost: u64,
}

impl Space {
    /// Compares some rows of a coded stripe with the code, and mends what has gone bad.
    pub(crate) fn inspect_rows(&self, rows: &Rows, known: Known<'_>, what: Compared) -> RowReport {
        let mut report = RowReport::default();
        if let Err(error) = self.mend_rows(rows, known, what, &mut report) {
            debug!(stripe = rows.stripe, %error, "coded pages are not compared now");
        }
        report
    }

    fn mend_rows(
        &self,
        rows: &Rows,
        known: Known<'_>,
        what: Compared,
        report: &mut RowReport,
    ) -> Result<(), SpaceError> {
        let Some(code) = self.config().cold.map(|cold| cold.code) else { return Ok(()) };
        let mut said = Vec::with_capacity(rows.shards.len());
        for &(segment, place) in &rows.shards {
            let is_left_out = what == Compared::Segments && code::is_parity(segment);
            let Some(place) = place.filter(|_| !is_left_out) else {
                said.push(Said::nothing(rows.count));
                continue;
            };
            let states = self.states_of(segment, place, rows.first, rows.count)?;
            report.pages += u64::from(rows.count);
            let signatures = match what {
                Compared::Segments => Vec::new(),
                Compared::All => self.signatures_of(segment, place, rows)?,
            };
            report.pages += signatures.len() as u64;
            said.push(Said { states, signatures });
        }
        let wrong = wrong_rows(code, rows, &said, self.segment_pages(), known);
        for page in wrong {
            self.mend_row(rows, page, known, report)?;
        }
        Ok(())
    }

    /// Mends what has gone bad in a stripe that is warming, and in the copies that were made of it:
    /// when it is plain, there is nothing more to work it out from. As far as the donors answer: a
    /// stripe that is to be written cannot wait for those that do not.
    pub(crate) fn mend_before_thaw(&self, stripe: u64, known: Known<'_>) {
        let (mut first, mut repaired) = (0, 0);
        loop {
            let rows = self.map().rows(stripe, first, RUN_PAGES);
            let Some(rows) = rows.filter(|_| !self.is_fenced()) else { break };
            let report = self.inspect_rows(&rows, known, Compared::Segments);
            self.note_rows(&rows, report);
            repaired += report.repaired;
            first += rows.count;
        }
        if repaired == 0 {
            return;
        }
        let Some(code) = self.config().cold.map(|cold| cold.code) else { return };
        for segment in code.segments_of(stripe).filter(|at| *at < self.config().segments()) {
            // Copies took their sums from the keepers, so these sums tell which pages are damaged.
            self.compare(segment, None);
        }
    }

    fn signatures_of(
        &self,
        segment: u64,
        place: Place,
        rows: &Rows,
    ) -> Result<Vec<PageSignature>, SpaceError> {
        let request = Request::Sign { extent: place.extent, first: rows.first, count: rows.count };
        match self.ask_member(segment, place, request)? {
            Outcome::Signed(signatures) => Ok(signatures),
            outcome => Err(self.odd_of_shard(segment, place, outcome)),
        }
    }

    /// Reads a row, and writes again those of its pages that are not what they were.
    ///
    /// The stripe stays coded meanwhile. The owner cannot write before the stripe is thawed, so no
    /// repair overwrites a newer write. A request that was given up may still be in flight after
    /// that. But it uses the connection over which [`Space::thaw`] asks whether the page's extent
    /// exists. A donor answers nothing on a new connection before it has ended the previous one.
    fn mend_row(
        &self,
        rows: &Rows,
        page: u32,
        known: Known<'_>,
        report: &mut RowReport,
    ) -> Result<(), SpaceError> {
        let _is_kept_coded = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(code) = self.config().cold.map(|cold| cold.code) else { return Ok(()) };
        if self.is_fenced() || !self.map().is_still(rows) {
            return Ok(());
        }
        let mut pages = Vec::with_capacity(rows.shards.len());
        for &(segment, place) in &rows.shards {
            let (data, sum) = match place {
                Some(place) => self.read_of_shard(segment, place, page)?,
                None => (vec![0; PAGE_SIZE], ZERO_PAGE_SUM),
            };
            let is_parity = code::is_parity(segment);
            let number = segment.wrapping_mul(self.segment_pages()).wrapping_add(page.into());
            let known = if is_parity { None } else { known(number) };
            pages.push(RowPage { data, sum, known });
        }
        let Some(row) = settle(code, &code.coder(), &pages) else {
            let is_lost =
                |page: &&RowPage| page.known.is_some_and(|known| known != page_sum(&page.data));
            report.lost += pages.iter().filter(is_lost).count() as u64;
            error!(stripe = rows.stripe, page, "pages have gone bad in too many shards");
            return Ok(());
        };
        for ((&(segment, place), found), right) in rows.shards.iter().zip(&pages).zip(&row) {
            let sum = page_sum(right);
            if found.data == *right && found.sum == sum {
                continue;
            }
            // Zeros without an extent are part of the code, too.
            let Some(place) = place else { continue };
            self.write_of_shard(rows, (segment, place), page, (right, sum))?;
            report.repaired += 1;
            let donor = &self.donor(place.donor).name;
            info!(segment, page, donor, "a coded page was not what was stored, and is again");
        }
        Ok(())
    }

    fn read_of_shard(
        &self,
        segment: u64,
        place: Place,
        page: u32,
    ) -> Result<(Vec<u8>, PageSum), SpaceError> {
        let request = Request::Read { extent: place.extent, pages: &[page] };
        match self.ask_member(segment, place, request)? {
            Outcome::Pages { sums, data } if sums.len() == 1 => Ok((data, sums[0])),
            outcome => Err(self.odd_of_shard(segment, place, outcome)),
        }
    }

    fn write_of_shard(
        &self,
        rows: &Rows,
        (segment, place): (u64, Place),
        page: u32,
        (data, sum): (&[u8], PageSum),
    ) -> Result<(), SpaceError> {
        let (extent, generation) = (place.extent, rows.generation);
        let request = Request::Write { extent, generation, pages: &[page], sums: &[sum] };
        let donor = self.donor(place.donor);
        let expected = Some((segment, place));
        let mut link = donor.link();
        let answered =
            link.call_with(self, &donor, expected, (request, &[data]), Persistence::Once)?;
        drop(link);
        match answered.outcome {
            Outcome::Done => Ok(()),
            outcome => Err(self.odd_of_shard(segment, place, outcome)),
        }
    }

    fn odd_of_shard(&self, segment: u64, place: Place, outcome: Outcome) -> SpaceError {
        if let Outcome::Refused(Refusal::NoSuchExtent) = outcome {
            self.map().gone(segment, place);
        }
        self.odd(&self.donor(place.donor), outcome)
    }

    /// Counts what was found.
    pub(crate) fn note_rows(&self, rows: &Rows, report: RowReport) {
        if report.repaired > 0 {
            warn!(stripe = rows.stripe, repaired = report.repaired, "coded pages had gone bad");
        }
        self.scrub.note(report.pages, report.repaired, report.lost, false);
    }
}
