//! Pages from the donors.

use super::{WAIT, runs};
use crate::map::group::DonorIndex;
use crate::{Completion, Lane, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageNo};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// How often a page with one copy is read when it comes damaged. Pages with more copies are read
/// once from each.
const ATTEMPTS: usize = 2;

/// A part of the list that is asked for in one request.
struct Ask {
    run: Range<usize>,
    /// Donors that sent its only page wrong.
    avoid: Vec<DonorIndex>,
}

/// Why a page of a list could not be read.
#[derive(Debug)]
pub enum FetchError {
    /// The pool did not give it.
    Space(SpaceError),
    /// Every copy was wrong, or the only one was wrong twice.
    Damaged(PageNo),
}

/// Reads pages, all different. `sink` gets the place of each in the list and its contents, in the
/// buffer that received them, and says whether they are the page's. If not, the page is read again,
/// from another copy if there is one. The error names the first place that could not be read; the
/// others were read.
pub fn fetch(
    lane: &mut Lane,
    pages: &[PageNo],
    sink: &mut dyn FnMut(usize, &mut [u8]) -> bool,
) -> Result<(), (usize, FetchError)> {
    let space = lane.space().clone();
    let attempts = ATTEMPTS.max(space.config().redundancy.copies().into());
    let all = runs(pages.len(), |at| space.segment_of(pages[at]));
    let mut to_ask: VecDeque<Ask> =
        all.into_iter().map(|run| Ask { run, avoid: Vec::new() }).collect();
    let mut asked: BTreeMap<u64, Ask> = BTreeMap::new();
    let mut error: Option<(usize, FetchError)> = None;
    let mut fail = |at: usize, why: FetchError| {
        if error.as_ref().is_none_or(|(first, _)| at < *first) {
            error = Some((at, why));
        }
    };
    let mut token = 0;
    loop {
        while let Some(ask) = to_ask.pop_front() {
            token += 1;
            match lane.read_avoiding(token, &pages[ask.run.clone()], &ask.avoid) {
                Ok(()) => {
                    asked.insert(token, ask);
                }
                Err(SpaceError::Busy(_)) => {
                    to_ask.push_front(ask);
                    break;
                }
                Err(why) => fail(ask.run.start, FetchError::Space(why)),
            }
        }
        if to_ask.is_empty() && lane.in_flight() == 0 {
            break;
        }
        let mut damaged: Vec<Ask> = Vec::new();
        let mut failed: Vec<(Ask, SpaceError)> = Vec::new();
        lane.progress(Some(WAIT), &mut |completion| match completion {
            Completion::Read { token, from, giver, data, .. } => {
                let Some(Ask { run, avoid }) = asked.get(&token) else { return };
                for (at, data) in (run.start + from..).zip(data.chunks_exact_mut(PAGE_SIZE)) {
                    if !sink(at, data) {
                        // Pages that no donor has are zeros, and come from nobody.
                        let giver = giver.unwrap_or(DonorIndex::UNKNOWN);
                        let avoid = avoid.iter().copied().chain([giver]).collect();
                        damaged.push(Ask { run: at..at + 1, avoid });
                    }
                }
                if run.start + from + data.len() / PAGE_SIZE == run.end {
                    asked.remove(&token);
                }
            }
            Completion::Failed { token, from, error } => {
                if let Some(Ask { run, avoid }) = asked.remove(&token) {
                    failed.push((Ask { run: run.start + from..run.end, avoid }, error));
                }
            }
            Completion::Written { .. } => {}
        });
        for ask in damaged {
            let (page, times) = (pages[ask.run.start], ask.avoid.len());
            tracing::warn!(page, times, "a page came back that is not what was written");
            space.suspect(page);
            match times < attempts {
                true => to_ask.push_back(ask),
                false => fail(ask.run.start, FetchError::Damaged(page)),
            }
        }
        for (ask, why) in failed {
            match why.is_transient() {
                true => to_ask.push_back(ask),
                false => fail(ask.run.start, FetchError::Space(why)),
            }
        }
    }
    error.map_or(Ok(()), Err)
}
