//! Random eviction: no memory of anything, and so nothing that a loop can defeat.

use super::{Installed, Order};
use hecaton_memory::SplitMix;
use std::collections::HashMap;

/// Evicts pages drawn by a seeded generator.
pub struct Random {
    pages: Vec<u32>,
    places: HashMap<u32, u32>,
    numbers: SplitMix,
}

impl Random {
    /// An empty order. The same `seed` and calls give the same victims.
    pub fn new(seed: u64) -> Self {
        Self { pages: Vec::new(), places: HashMap::new(), numbers: SplitMix::new(seed) }
    }

    /// Reduced to `0..bound` by multiplication.
    fn draw(&mut self, bound: usize) -> usize {
        ((u128::from(self.numbers.draw()) * bound as u128) >> 64) as usize
    }

    fn take(&mut self, at: usize) -> u32 {
        let page = self.pages.swap_remove(at);
        self.places.remove(&page);
        if let Some(moved) = self.pages.get(at) {
            self.places.insert(*moved, at as u32);
        }
        page
    }
}

impl Order for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn installed(&mut self, page: u32, _how: Installed) {
        self.places.insert(page, self.pages.len() as u32);
        self.pages.push(page);
    }

    fn referenced(&mut self, _page: u32) {}

    fn removed(&mut self, page: u32) {
        if let Some(at) = self.places.get(&page).copied() {
            self.take(at as usize);
        }
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>) {
        let enough = out.len().saturating_add(n);
        while out.len() < enough && !self.pages.is_empty() {
            let at = self.draw(self.pages.len());
            let page = self.take(at);
            if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.pages.capacity() * 4 + self.places.capacity() * 9
    }

    fn len(&self) -> usize {
        self.pages.len()
    }
}
