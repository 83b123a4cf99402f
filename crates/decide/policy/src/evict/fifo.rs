//! First in, first out: the yardstick, and what a pager without any order would do.

use super::{Installed, Order, rings::Rings};

/// Evicts in the order of installs.
pub struct Fifo(Rings<1>);

impl Fifo {
    /// An empty order.
    pub fn new() -> Self {
        Self(Rings::new())
    }
}

impl Default for Fifo {
    fn default() -> Self {
        Self::new()
    }
}

impl Order for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn installed(&mut self, page: u32, _how: Installed) {
        self.0.push(0, page);
    }

    fn referenced(&mut self, _page: u32) {}

    fn removed(&mut self, page: u32) {
        self.0.remove(page);
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>) {
        let enough = out.len().saturating_add(n);
        while out.len() < enough {
            let Some(page) = self.0.pop(0) else { return };
            if still(page) {
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    fn len(&self) -> usize {
        self.0.live()
    }
}
