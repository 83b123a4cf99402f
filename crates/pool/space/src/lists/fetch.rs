//! Pages from the donors.

use super::{WAIT, runs};
use crate::group::DonorIndex;
use crate::{Completion, Lane, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageNo};
use hecaton_transport::protocol::MAX_PAGES;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// How often a page is read that comes damaged and has one copy; those that have more, once from
/// each.
const ATTEMPTS: usize = 2;

/// A part of the list that is asked for in one request.
struct Ask {
    run: Range<usize>,
    /// Donors that have sent its only page wrong.
    avoid: Vec<DonorIndex>,
}

/// Why a page of a list could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The pool does not give it.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// It came wrong from every copy, or twice from the only one.
    #[error("page {0} is not what was written, in every copy, or twice in the only one")]
    Damaged(PageNo),
}

/// Reads different pages, and hands each to `sink` with its place in the list, where it was
/// received. What `sink` says is not the page is read again, from another copy if there is one. The
/// error says which place is the first that could not be read; all others were.
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
    let mut numbers = Vec::with_capacity(MAX_PAGES.min(pages.len()));
    loop {
        while let Some(ask) = to_ask.pop_front() {
            numbers.clear();
            numbers.extend(&pages[ask.run.clone()]);
            token += 1;
            match lane.read_avoiding(token, &numbers, &ask.avoid) {
                Ok(()) => {
                    asked.insert(token, ask);
                }
                Err(SpaceError::Busy(_)) => {
                    to_ask.push_front(ask);
                    break;
                }
                Err(why) => fail(ask.run.start, why.into()),
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
                false => fail(ask.run.start, why.into()),
            }
        }
    }
    error.map_or(Ok(()), Err)
}
