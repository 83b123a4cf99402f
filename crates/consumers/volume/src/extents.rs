//! Which bytes of a volume are stored: what a client may pass over that copies it, or looks for
//! room.

use crate::BlockError;
use crate::state::{Page, SEGMENT_PAGES, State, pages_of_segment};
use crate::volume::{Contents, Volume};
use hecaton_memory::{PageNo, pages_to_bytes};
use std::ops::Range;

/// Bytes that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many.
    pub bytes: u64,
    /// Data or hole. Lost pages count as data: reading them is an error.
    pub contents: Contents,
}

impl Volume {
    /// The extents of these bytes, from the first one on: no more than `most`, so that they may end
    /// earlier. Nobody is waited for: of pages that are being written either is told.
    pub fn extents(&self, offset: u64, bytes: u64, most: usize) -> Result<Vec<Extent>, BlockError> {
        let found = self.leased(offset, || {
            self.extents_now(offset, bytes, most).map_err(|error| (offset, error))
        });
        found.map_err(|(_, error)| error)
    }

    fn extents_now(&self, offset: u64, bytes: u64, most: usize) -> Result<Vec<Extent>, BlockError> {
        let pages = self.pages_of(offset, bytes)?;
        let buffered = self.buffer.as_ref().map(|buffer| buffer.within(pages.clone()));
        let buffered = buffered.unwrap_or_default();
        let mut extents = Vec::new();
        let mut first = pages.start;
        while first < pages.end && extents.len() < most {
            let (run, contents) = run_from(&self.state, &buffered, first..pages.end);
            let from = pages_to_bytes(run.start).max(offset);
            let to = pages_to_bytes(run.end).min(offset + bytes);
            extents.push(Extent { bytes: to - from, contents });
            first = run.end;
        }
        Ok(extents)
    }
}

/// The pages at the start of a range, of which there are some, that are alike. Those that are
/// buffered, sorted, are data.
fn run_from(state: &State, buffered: &[PageNo], pages: Range<PageNo>) -> (Range<PageNo>, Contents) {
    let contents_of = |page| match state.page(page) {
        Page::Hole if buffered.binary_search(&page).is_err() => Contents::Hole,
        Page::Hole | Page::Data(_) | Page::Lost => Contents::Data,
    };
    let next_buffered = |after: PageNo| {
        let at = buffered.partition_point(|page| *page <= after);
        buffered.get(at).copied().unwrap_or(pages.end)
    };
    let contents = contents_of(pages.start);
    let mut end = pages.start;
    while end < pages.end && contents_of(end) == contents {
        let segment = end / SEGMENT_PAGES;
        end = match state.is_begun(segment) || contents == Contents::Data {
            true => end + 1,
            false => pages_of_segment(segment).end.min(pages.end).min(next_buffered(end)),
        };
    }
    (pages.start..end, contents)
}
