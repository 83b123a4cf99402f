//! Pages from the donors.

use crate::BlockError;
use crate::state::word_of;
use hecaton_memory::{PAGE_SIZE, PageNo, page_sum};
use hecaton_space::group::DonorIndex;
use hecaton_space::{Completion, Lane, SpaceError};
use hecaton_transport::protocol::MAX_PAGES;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// How long a lane is waited for before it is looked at again.
pub(crate) const WAIT: Duration = Duration::from_secs(1);

/// How often a page is read that comes damaged and has one copy; those that have more, once from each.
const ATTEMPTS: usize = 2;

/// A part of the list that is asked for in one request.
struct Ask {
    run: Range<usize>,
    /// Donors that have sent its only page wrong.
    avoid: Vec<DonorIndex>,
}

/// Reads different pages, given with the words of their sums, and hands each to `sink` with its place
/// in the list, where it was received. What `sink` says is not the page is treated as what has another sum.
/// The error says which place is the first that could not be read; all others were.
pub(crate) fn fetch(
    lane: &mut Lane,
    pages: &[(PageNo, u32)],
    sink: &mut dyn FnMut(usize, &mut [u8]) -> bool,
) -> Result<(), (usize, BlockError)> {
    let space = lane.space().clone();
    let attempts = ATTEMPTS.max(space.config().redundancy.copies().into());
    let all = runs(pages.len(), |at| space.segment_of(pages[at].0));
    let mut to_ask: VecDeque<Ask> =
        all.into_iter().map(|run| Ask { run, avoid: Vec::new() }).collect();
    let mut asked: BTreeMap<u64, Ask> = BTreeMap::new();
    let mut error: Option<(usize, BlockError)> = None;
    let mut fail = |at: usize, why: BlockError| {
        if error.as_ref().is_none_or(|(first, _)| at < *first) {
            error = Some((at, why));
        }
    };
    let mut token = 0;
    let mut numbers = Vec::with_capacity(MAX_PAGES.min(pages.len()));
    loop {
        while let Some(ask) = to_ask.pop_front() {
            numbers.clear();
            numbers.extend(pages[ask.run.clone()].iter().map(|(page, _)| *page));
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
                    if word_of(page_sum(data)) != pages[at].1 || !sink(at, data) {
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
            let (page, times) = (pages[ask.run.start].0, ask.avoid.len());
            tracing::warn!(page, times, "a page came back that is not what was written");
            space.suspect(page);
            match times < attempts {
                true => to_ask.push_back(ask),
                false => fail(ask.run.start, BlockError::Damaged(page)),
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

/// Cuts a list into runs that one request may have: of one segment, and not too many.
pub(crate) fn runs(len: usize, segment_of: impl Fn(usize) -> u64) -> VecDeque<Range<usize>> {
    let mut runs = VecDeque::new();
    let mut start = 0;
    for at in 1..=len {
        let is_over = at == len || at - start == MAX_PAGES || segment_of(at) != segment_of(start);
        if is_over {
            runs.push_back(start..at);
            start = at;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_all_of_it_within_segments(
            pages in prop::collection::btree_set(0u64..4000, 0..1500),
        ) {
            let pages: Vec<u64> = pages.into_iter().collect();
            let mut next = 0;
            for run in runs(pages.len(), |at| pages[at] / 1000) {
                prop_assert_eq!(run.start, next);
                prop_assert!(!run.is_empty() && run.len() <= MAX_PAGES);
                prop_assert_eq!(pages[run.start] / 1000, pages[run.end - 1] / 1000);
                next = run.end;
            }
            prop_assert_eq!(next, pages.len());
        }
    }
}
