//! Pages from the donors.

use crate::BlockError;
use crate::state::word_of;
use hecaton_memory::{PageNo, page_sum};
use hecaton_space::Lane;
use hecaton_space::lists;
pub(crate) use hecaton_space::lists::runs;

/// Reads different pages, each given with the word of its sum. `sink` gets each page with its place
/// in the list, in the buffer that received it. A page that `sink` rejects is treated as one with
/// another sum. The error names the first place that could not be read; all others were read.
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
