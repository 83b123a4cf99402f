//! First in, first out, with a second chance for pages that proved themselves.
//!
//! The segmented FIFO of VAX/VMS (Turner & Levy, "Segmented FIFO Page Replacement", SIGMETRICS
//! 1981) for machines without reference bits: staging is its second segment. A page that was
//! rescued from there, or written to while resident, is passed over once when its turn comes.

use super::{
    Installed, Order,
    rings::{Rings, page_of},
    wrote::WroteBits,
};

/// Marks an entry that is passed over once.
const CHANCE: u32 = super::PAGE_KEY_LIMIT;

/// FIFO with a second chance.
pub struct SecondChance {
    ring: Rings<1>,
    wrote: WroteBits,
}

impl SecondChance {
    /// An empty order.
    pub fn new(capacity_pages: usize) -> Self {
        Self { ring: Rings::new(), wrote: WroteBits::new(capacity_pages) }
    }
}

impl Order for SecondChance {
    fn name(&self) -> &'static str {
        "second-chance"
    }

    fn installed(&mut self, page: u32, how: Installed) {
        let chance = if how == Installed::Rescued { CHANCE } else { 0 };
        self.ring.push(0, page | chance);
    }

    fn referenced(&mut self, page: u32) {
        self.wrote.set(page);
    }

    fn removed(&mut self, page: u32) {
        self.ring.remove(page);
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>) {
        let enough = out.len().saturating_add(n);
        // Each pass over an entry uses up its chance, so the loop ends.
        while out.len() < enough {
            let Some(entry) = self.ring.pop(0) else { return };
            let page = page_of(entry);
            if entry != page || self.wrote.take(page) {
                self.ring.push(0, page);
            } else if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.ring.memory_bytes() + self.wrote.memory_bytes()
    }

    fn len(&self) -> usize {
        self.ring.live()
    }
}
