//! Random eviction: no memory of anything, and so nothing that a loop can defeat.

use super::{Installed, Order, tombstones::Tombstones};

/// Evicts pages drawn by a seeded generator.
pub struct Random {
    pages: Vec<u64>,
    tombstones: Tombstones,
    live: usize,
    state: u64,
}

impl Random {
    /// An empty order. The same `seed` and calls give the same victims.
    pub fn new(capacity_pages: usize, seed: u64) -> Self {
        let pages = Vec::with_capacity(capacity_pages);
        Self { pages, tombstones: Tombstones::default(), live: 0, state: seed }
    }

    /// splitmix64 (Steele, Lea, Flood, 2014), reduced to `0..bound` by multiplication.
    fn draw(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * bound as u128) >> 64) as usize
    }
}

impl Order for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn installed(&mut self, page: u64, _how: Installed) {
        self.pages.push(page);
        self.live += 1;
    }

    fn referenced(&mut self, _page: u64) {}

    fn removed(&mut self, page: u64) {
        self.live -= 1;
        if self.tombstones.bury(page, self.live) {
            self.pages.retain(|&page| !self.tombstones.collect(page));
            self.tombstones.clear();
        }
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u64) -> bool, out: &mut Vec<u64>) {
        let enough = out.len() + n;
        while out.len() < enough && !self.pages.is_empty() {
            let at = self.draw(self.pages.len());
            let page = self.pages.swap_remove(at);
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
        self.pages.capacity() * 8 + self.tombstones.memory_bytes()
    }

    fn len(&self) -> usize {
        self.live
    }
}
