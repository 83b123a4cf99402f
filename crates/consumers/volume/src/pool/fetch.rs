//! Pages from the donors.

use crate::BlockError;
use crate::state::word_of;
use hecaton_memory::{PageNo, page_sum};
use hecaton_space::Lane;
use hecaton_space::lists;
pub(crate) use hecaton_space::lists::runs;

/// Reads different pages, given with the words of their sums, and hands each to `sink` with its place
/// in the list, where it was received. What `sink` says is not the page is treated as what has another sum.
/// The error says which place is the first that could not be read; all others were.
pub(crate) fn fetch(
    lane: &mut Lane,
    pages: &[(PageNo, u32)],
    sink: &mut dyn FnMut(usize, &mut [u8]) -> bool,
) -> Result<(), (usize, BlockError)> {
    let numbers: Vec<PageNo> = pages.iter().map(|(page, _)| *page).collect();
    let fetched = lists::fetch(lane, &numbers, &mut |at, data| {
        word_of(page_sum(data)) == pages[at].1 && sink(at, data)
    });
    fetched.map_err(|(at, error)| (at, error.into()))
}
