//! Pages of an encrypted volume are sealed before they leave this process, and opened when they
//! come back ([`hecaton_space::seal`]).
//!
//! # What is sealed
//!
//! Donors and the spill file hold sealed pages, and a page's word is that of the sealed page's sum.
//! So segments move between the two as they are, and copies are made and compared, without a key.
//! Contents of slots are not sealed: slots are memory of this host, as a client's own memory is.
//!
//! # Which seal a page has
//!
//! Pages are sealed in memory just before they are sent. A page gets its new seal and its new word
//! only when it is known to be stored, and while a slot still names it. So:
//!
//! - After a write that has changed nothing, the page opens with the seal that it had.
//! - While the outcome of a write is unknown, its pages are locked, or read from the buffer.
//! - A process may be killed with only the seal, only the word or a part of them noted. Its
//!   successor seals and writes the slot's contents before it allows any read of the page.
//!
//! A reader holds the page's lock. The lock keeps writers out, except the drain of the buffer,
//! which changes only pages that are still in the buffer.
//!
//! A page that a donor altered, swapped or kept of an older version does not open, even if its sum
//! fits. It is treated as a page with another sum.
//!
//! # Versions
//!
//! Each sealing has a version of its own, also of contents that are sent again. So a second attempt
//! sends other bytes than the first one. If the first one arrived later, the page would not open.
//! That cannot happen: a second attempt uses the same lane ([`crate::pool::settle`]), and a
//! successor writes after its predecessor is fenced. So both are like two writes of the same page.

use crate::pool::store::Item;
use hecaton_memory::{PAGE_SIZE, page_sum};
use hecaton_space::seal::table::SealTable;
use hecaton_space::seal::{Seal, Sealer};

/// Pages as they are to be stored.
pub(crate) struct Sealed {
    bytes: Vec<u8>,
    /// One seal for each page, in the same order.
    pub(crate) seals: Vec<Seal>,
}

impl Sealed {
    /// Seals pages; `table` is where versions are counted.
    pub(crate) fn of(items: &[Item<'_>], sealer: &Sealer, table: SealTable<'_>) -> Sealed {
        let mut bytes = Vec::with_capacity(items.len() * PAGE_SIZE);
        let seal = |item: &Item<'_>| {
            let at = bytes.len();
            bytes.extend_from_slice(item.contents);
            sealer.seal(item.page, table.draw_version(), &mut bytes[at..])
        };
        let seals = items.iter().map(seal).collect();
        Sealed { bytes, seals }
    }

    /// The pages that these were, sealed.
    pub(crate) fn items(&self, of: &[Item<'_>]) -> Vec<Item<'_>> {
        let pages = of.iter().map(|item| item.page);
        let sealed = pages.zip(self.bytes.chunks_exact(PAGE_SIZE));
        sealed.map(|(page, contents)| Item { page, sum: page_sum(contents), contents }).collect()
    }
}
