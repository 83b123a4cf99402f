//! Two queues with ghost distances: a small one for newcomers, a large one for the proven.
//!
//! S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023) without hit
//! counts, which a pager does not get: a newcomer proves itself by being rescued, or by refaulting
//! within the distance that the large queue covers, which is what S3-FIFO's ghost queue stands
//! for and needs no queue here, since evicted pages carry stamps.

use super::{Installed, Order, tombstones::Tombstones, wrote::WroteBits};
use std::collections::VecDeque;

/// Marks an entry of the main queue that is passed over once.
const CHANCE: u64 = super::PAGE_KEY_LIMIT;

/// The newcomers' share of memory: one part in this many, as in the paper.
const SMALL_SHARE: usize = 10;

/// S3-FIFO by refault distance.
pub struct TwoQueue {
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    tombstones: Tombstones,
    wrote: WroteBits,
    live: usize,
}

impl TwoQueue {
    /// An empty order.
    pub fn new(capacity_pages: usize) -> Self {
        Self {
            small: VecDeque::with_capacity(capacity_pages / SMALL_SHARE),
            main: VecDeque::with_capacity(capacity_pages),
            tombstones: Tombstones::default(),
            wrote: WroteBits::new(capacity_pages),
            live: 0,
        }
    }
}

impl Order for TwoQueue {
    fn name(&self) -> &'static str {
        "two-queue"
    }

    fn installed(&mut self, page: u64, how: Installed) {
        self.live += 1;
        match how {
            Installed::Rescued => self.main.push_back(page | CHANCE),
            Installed::Refault { distance } | Installed::PrefetchedAgain { distance }
                if distance < self.live as u64 =>
            {
                self.main.push_back(page);
            }
            _ => self.small.push_back(page),
        }
    }

    fn referenced(&mut self, page: u64) {
        self.wrote.set(page);
    }

    fn removed(&mut self, page: u64) {
        self.live -= 1;
        if self.tombstones.bury(page, self.live) {
            self.small.retain(|&entry| !self.tombstones.collect(entry & !CHANCE));
            self.main.retain(|&entry| !self.tombstones.collect(entry & !CHANCE));
            self.tombstones.clear();
        }
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u64) -> bool, out: &mut Vec<u64>) {
        let enough = out.len() + n;
        while out.len() < enough {
            let from_small = self.small.len() > self.live / SMALL_SHARE || self.main.is_empty();
            let popped = if from_small { self.small.pop_front() } else { self.main.pop_front() };
            let Some(entry) = popped else { return };
            let page = entry & !CHANCE;
            if self.tombstones.collect(page) {
                continue;
            }
            if entry != page || self.wrote.take(page) {
                self.main.push_back(page);
                continue;
            }
            self.live -= 1;
            if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        (self.small.capacity() + self.main.capacity()) * 8
            + self.wrote.memory_bytes()
            + self.tombstones.memory_bytes()
    }

    fn len(&self) -> usize {
        self.live
    }
}
