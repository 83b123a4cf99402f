//! The queues that orders are made of: pages in the order in which they came, and lazy removal.
//!
//! All queues of an order draw their memory from one stock of blocks, so that together they take
//! four bytes for each page, however the pages are divided among them. (Two ring buffers would each
//! come to be as large as local memory.)
//!
//! A removed page's entry stays until it is met. The queues count how often each page was removed
//! and not met yet. That makes removal exact without an index from page to entry. However often a
//! page is unmapped and installed anew, it has exactly one entry more than dead ones while it is
//! resident. Which of several equal entries survives does not matter.

use super::PAGE_KEY_LIMIT;
use std::collections::{HashMap, VecDeque};

/// Entries in a block: 4 KiB of them.
const BLOCK_ENTRIES: usize = 1024;

/// Below this many, dead entries are not worth a compaction.
const MIN_TO_COMPACT: usize = 256;

/// Dead entries, as a share of the live ones (one in so many), that make a compaction due. It costs
/// a pass over that many entries for each page that is removed.
const DEAD_SHARE: usize = 8;

type Block = Box<[u32; BLOCK_ENTRIES]>;

/// One queue: from `first` in the first block up to `end` in the last one.
#[derive(Default)]
struct Queue {
    blocks: VecDeque<Block>,
    first: usize,
    end: usize,
}

impl Queue {
    fn len(&self) -> usize {
        match self.blocks.len() {
            0 => 0,
            blocks => (blocks - 1) * BLOCK_ENTRIES + self.end - self.first,
        }
    }

    fn push(&mut self, entry: u32, stock: &mut Vec<Block>) {
        if self.blocks.is_empty() || self.end == BLOCK_ENTRIES {
            self.blocks.push_back(stock.pop().unwrap_or_else(|| Box::new([0; BLOCK_ENTRIES])));
            self.end = 0;
        }
        if let Some(last) = self.blocks.back_mut() {
            last[self.end] = entry;
            self.end += 1;
        }
    }

    fn pop(&mut self, stock: &mut Vec<Block>) -> Option<u32> {
        if self.len() == 0 {
            return None;
        }
        let entry = self.blocks.front()?[self.first];
        self.first += 1;
        if self.first == BLOCK_ENTRIES || self.len() == 0 {
            stock.extend(self.blocks.pop_front());
            self.first = 0;
        }
        Some(entry)
    }
}

/// `N` queues. An entry is a page key, and above [`PAGE_KEY_LIMIT`] what the order likes to note.
pub(super) struct Rings<const N: usize> {
    queues: [Queue; N],
    stock: Vec<Block>,
    /// Entries that have died, by page.
    dead: HashMap<u32, u32>,
    dead_total: usize,
    live: usize,
}

/// The page of an entry.
pub(super) fn page_of(entry: u32) -> u32 {
    entry & (PAGE_KEY_LIMIT - 1)
}

impl<const N: usize> Rings<N> {
    pub(super) fn new() -> Self {
        Self {
            queues: std::array::from_fn(|_| Queue::default()),
            stock: Vec::new(),
            dead: HashMap::new(),
            dead_total: 0,
            live: 0,
        }
    }

    /// Pages in all queues.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Entries in a queue, with the dead ones.
    pub(super) fn entries(&self, queue: usize) -> usize {
        self.queues[queue].len()
    }

    /// Puts an entry at the end of a queue.
    pub(super) fn push(&mut self, queue: usize, entry: u32) {
        self.queues[queue].push(entry, &mut self.stock);
        self.live += 1;
    }

    /// Takes the first entry of a queue that is not dead.
    pub(super) fn pop(&mut self, queue: usize) -> Option<u32> {
        loop {
            let entry = self.queues[queue].pop(&mut self.stock)?;
            if !self.bury(entry) {
                self.live -= 1;
                return Some(entry);
            }
        }
    }

    /// The page has gone, from whichever queue it is in.
    pub(super) fn remove(&mut self, page: u32) {
        self.live -= 1;
        *self.dead.entry(page).or_default() += 1;
        self.dead_total += 1;
        if self.dead_total > MIN_TO_COMPACT && self.dead_total > self.live / DEAD_SHARE {
            self.compact();
        }
    }

    /// Whether the entry that was just met is a dead one, which it then is no more.
    fn bury(&mut self, entry: u32) -> bool {
        if self.dead_total == 0 {
            return false;
        }
        let Some(count) = self.dead.get_mut(&page_of(entry)) else { return false };
        *count -= 1;
        if *count == 0 {
            self.dead.remove(&page_of(entry));
        }
        self.dead_total -= 1;
        true
    }

    fn compact(&mut self) {
        for queue in 0..N {
            for _ in 0..self.queues[queue].len() {
                let entry = self.queues[queue].pop(&mut self.stock);
                if let Some(entry) = entry.filter(|&entry| !self.bury(entry)) {
                    self.queues[queue].push(entry, &mut self.stock);
                }
            }
        }
        // A rest would be of pages that were in no queue.
        self.dead.clear();
        self.dead_total = 0;
        let blocks: usize = self.queues.iter().map(|queue| queue.blocks.len()).sum();
        self.stock.truncate(blocks / DEAD_SHARE + N);
    }

    /// Bytes of the blocks, and of the map: a slot is a key, a count and a control byte.
    pub(super) fn memory_bytes(&self) -> usize {
        let blocks: usize = self.queues.iter().map(|queue| queue.blocks.len()).sum();
        (blocks + self.stock.len()) * size_of::<[u32; BLOCK_ENTRIES]>() + self.dead.capacity() * 9
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn queues_keep_their_order(
            steps in prop::collection::vec((0usize..2, 0u8..5, 1usize..500), 0..100),
        ) {
            let mut rings = Rings::<2>::new();
            let mut model: [VecDeque<u32>; 2] = Default::default();
            let mut next = 0;
            for (queue, action, times) in steps {
                for _ in 0..times {
                    if action < 3 {
                        rings.push(queue, next | PAGE_KEY_LIMIT);
                        model[queue].push_back(next);
                        next += 1;
                    } else {
                        let popped = rings.pop(queue).map(page_of);
                        prop_assert_eq!(popped, model[queue].pop_front());
                    }
                }
                prop_assert_eq!(rings.entries(queue), model[queue].len());
            }
        }

        /// A page that went comes out no more, and any other comes out once.
        #[test]
        fn what_was_removed_is_gone(
            steps in prop::collection::vec((0usize..2, 0u32..600, 0u8..8), 0..6000),
        ) {
            let mut rings = Rings::<2>::new();
            let mut model = std::collections::BTreeSet::new();
            for (queue, page, action) in steps {
                match action {
                    0..5 if model.insert(page) => rings.push(queue, page),
                    5 | 6 if model.remove(&page) => rings.remove(page),
                    7 => {
                        if let Some(popped) = rings.pop(queue) {
                            prop_assert!(model.remove(&popped), "{popped}");
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(rings.live(), model.len());
            }
            while let Some(page) = rings.pop(0).or_else(|| rings.pop(1)) {
                prop_assert!(model.remove(&page), "{page}");
            }
            prop_assert!(model.is_empty(), "{model:?}");
        }
    }

    #[test]
    fn four_bytes_for_each_page_however_they_move() {
        let pages = 100_000;
        let mut rings = Rings::<2>::new();
        (0..pages).for_each(|page| rings.push(0, page));
        for step in 0..10 * pages {
            // All of them pass to the other queue, and back.
            let from = (step / pages % 2) as usize;
            if let Some(entry) = rings.pop(from) {
                rings.push(1 - from, entry);
            }
        }
        assert_eq!(rings.live(), pages as usize);
        assert!(rings.memory_bytes() < pages as usize * 4 + 6 * 4096, "{}", rings.memory_bytes());
    }
}
