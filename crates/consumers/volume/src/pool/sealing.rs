//! Pages of an encrypted volume are sealed before they leave this process, and opened when they come back
//! ([`hecaton_space::seal`]).
//!
//! # What is sealed
//!
//! What donors and the spill file have; and a page's word is that of the sealed page's sum. So segments go
//! from the one to the other as they are, copies are compared and made, and all of that takes no key. What slots
//! hold is not sealed: that is memory of this host, as a client's own is.
//!
//! # Which seal a page has
//!
//! Pages are sealed in memory just before they are sent. A page has its new seal only when it is known to be
//! stored, together with its new word, and while a slot still names it. So
//!
//! - after a write that has changed nothing the page opens with the seal that it had;
//! - while it is not known what became of a write, nobody reads its pages: they are locked, or read from
//!   the buffer;
//! - whenever a process is killed, with one of seal and word noted or a part of them, its successor seals
//!   and writes what the slot holds before it lets anybody read there.
//!
//! Whoever reads holds the page's lock. That keeps writers out, but for the one that writes out the buffer; and
//! of a page that is not in the buffer, or no longer, that one changes nothing.
//!
//! What a donor altered, swapped or kept of an older version, be it with a sum that fits, does not open. That is
//! as if it had another sum.
//!
//! # Versions
//!
//! Each sealing has a version of its own, also of contents that are sent once more. So what a
//! second attempt sends is not what the first one did, and if that came after it, the page would
//! not open. It cannot: a second attempt is made on the same lane ([`crate::pool::settle`]), and a
//! successor's when its predecessor is fenced, so that it is no different from two writes of the
//! same page.

use crate::pool::store::Item;
use hecaton_memory::{PAGE_SIZE, page_sum};
use hecaton_space::seal::table::SealTable;
use hecaton_space::seal::{Seal, Sealer};

/// Pages as they are to be stored.
pub(crate) struct Sealed {
    bytes: Vec<u8>,
    /// What opens them, one each.
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
