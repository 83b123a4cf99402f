//! Reads and writes whole lists of pages, and waits for them.
//!
//! A [`Lane`](crate::Lane) takes requests of one segment each, and does not wait. The functions
//! here cut a list into such requests, and repeat those that fail for a moment.

mod fetch;
mod store;

pub use fetch::{FetchError, fetch};
pub use store::{Item, StoreError, store};

use hecaton_transport::protocol::MAX_PAGES;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// How long one wait for a lane takes at most.
const WAIT: Duration = Duration::from_secs(1);

/// Cuts a list into runs that fit into one request: pages of one segment, at most [`MAX_PAGES`].
pub fn runs(len: usize, segment_of: impl Fn(usize) -> u64) -> VecDeque<Range<usize>> {
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
