//! First in, first out: the yardstick, and what a pager without any order would do.

use super::{Installed, Order, tombstones::Tombstones};
use std::collections::VecDeque;

/// Evicts in the order of installs.
pub struct Fifo {
    ring: VecDeque<u64>,
    tombstones: Tombstones,
    live: usize,
}

impl Fifo {
    /// An empty order.
    pub fn new(capacity_pages: usize) -> Self {
        let ring = VecDeque::with_capacity(capacity_pages);
        Self { ring, tombstones: Tombstones::default(), live: 0 }
    }
}

impl Order for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn installed(&mut self, page: u64, _how: Installed) {
        self.ring.push_back(page);
        self.live += 1;
    }

    fn referenced(&mut self, _page: u64) {}

    fn removed(&mut self, page: u64) {
        self.live -= 1;
        if self.tombstones.bury(page, self.live) {
            self.ring.retain(|&page| !self.tombstones.collect(page));
            self.tombstones.clear();
        }
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u64) -> bool, out: &mut Vec<u64>) {
        let enough = out.len() + n;
        while out.len() < enough {
            let Some(page) = self.ring.pop_front() else { return };
            if self.tombstones.collect(page) {
                continue;
            }
            self.live -= 1;
            if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.ring.capacity() * 8 + self.tombstones.memory_bytes()
    }

    fn len(&self) -> usize {
        self.live
    }
}
