//! Two queues with ghost distances: a small one for newcomers, a large one for the proven.
//!
//! S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023) without hit
//! counts, which a pager does not get. A newcomer proves itself by being rescued, or by refaulting
//! within the distance that the large queue covers. That replaces S3-FIFO's ghost queue: evicted
//! pages carry stamps.

use super::{
    Installed, Order,
    rings::{Rings, page_of},
    wrote::WroteBits,
};

/// Marks an entry of the main queue that is passed over once.
const CHANCE: u32 = super::PAGE_KEY_LIMIT;

/// The newcomers' share of memory: one part in this many, as in the paper.
const SMALL_SHARE: usize = 10;

/// The queues.
const SMALL: usize = 0;
const MAIN: usize = 1;

/// S3-FIFO by refault distance.
pub struct TwoQueue {
    rings: Rings<2>,
    wrote: WroteBits,
}

impl TwoQueue {
    /// An empty order.
    pub fn new(capacity_pages: usize) -> Self {
        Self { rings: Rings::new(), wrote: WroteBits::new(capacity_pages) }
    }
}

impl Order for TwoQueue {
    fn name(&self) -> &'static str {
        "two-queue"
    }

    fn installed(&mut self, page: u32, how: Installed) {
        match how {
            Installed::Rescued => self.rings.push(MAIN, page | CHANCE),
            Installed::Refault { distance } | Installed::PrefetchedAgain { distance }
                if distance <= self.rings.live() as u64 =>
            {
                self.rings.push(MAIN, page);
            }
            _ => self.rings.push(SMALL, page),
        }
    }

    fn referenced(&mut self, page: u32) {
        self.wrote.set(page);
    }

    fn removed(&mut self, page: u32) {
        self.rings.remove(page);
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>) {
        let enough = out.len().saturating_add(n);
        while out.len() < enough {
            let small = self.rings.entries(SMALL);
            let from_small =
                small > self.rings.live() / SMALL_SHARE || self.rings.entries(MAIN) == 0;
            let queue = if from_small { SMALL } else { MAIN };
            // If all entries of a queue are dead, the other queue is next.
            let Some(entry) = self.rings.pop(queue) else {
                if self.rings.live() == 0 {
                    return;
                }
                continue;
            };
            let page = page_of(entry);
            if entry != page || self.wrote.take(page) {
                self.rings.push(MAIN, page);
            } else if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.rings.memory_bytes() + self.wrote.memory_bytes()
    }

    fn len(&self) -> usize {
        self.rings.live()
    }
}
