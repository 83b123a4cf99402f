//! First in, first out, with a second chance for pages that proved themselves.
//!
//! The segmented FIFO of VAX/VMS (Turner & Levy, "Segmented FIFO Page Replacement", SIGMETRICS
//! 1981) for machines without reference bits: staging is its second segment. A page that was
//! rescued from there, or written to while resident, is passed over once when its turn comes.

use super::{Installed, Order, tombstones::Tombstones, wrote::WroteBits};
use std::collections::VecDeque;

/// Marks an entry that is passed over once.
const CHANCE: u64 = super::PAGE_KEY_LIMIT;

/// FIFO with a second chance.
pub struct SecondChance {
    ring: VecDeque<u64>,
    tombstones: Tombstones,
    wrote: WroteBits,
    live: usize,
}

impl SecondChance {
    /// An empty order.
    pub fn new(capacity_pages: usize) -> Self {
        Self {
            ring: VecDeque::with_capacity(capacity_pages),
            tombstones: Tombstones::default(),
            wrote: WroteBits::new(capacity_pages),
            live: 0,
        }
    }
}

impl Order for SecondChance {
    fn name(&self) -> &'static str {
        "second-chance"
    }

    fn installed(&mut self, page: u64, how: Installed) {
        let chance = if how == Installed::Rescued { CHANCE } else { 0 };
        self.ring.push_back(page | chance);
        self.live += 1;
    }

    fn referenced(&mut self, page: u64) {
        self.wrote.set(page);
    }

    fn removed(&mut self, page: u64) {
        self.live -= 1;
        if self.tombstones.bury(page, self.live) {
            self.ring.retain(|&entry| !self.tombstones.collect(entry & !CHANCE));
            self.tombstones.clear();
        }
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u64) -> bool, out: &mut Vec<u64>) {
        let enough = out.len() + n;
        // Each pass over an entry uses up its chance, so the loop ends.
        while out.len() < enough {
            let Some(entry) = self.ring.pop_front() else { return };
            let page = entry & !CHANCE;
            if self.tombstones.collect(page) {
                continue;
            }
            if entry != page || self.wrote.take(page) {
                self.ring.push_back(page);
                continue;
            }
            self.live -= 1;
            if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.ring.capacity() * 8 + self.wrote.memory_bytes() + self.tombstones.memory_bytes()
    }

    fn len(&self) -> usize {
        self.live
    }
}
