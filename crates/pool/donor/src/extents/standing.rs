//! How much of its segment an extent has.
//!
//! An extent is whole or is being filled. One that is whole bears the generation of its segment's
//! group: the highest that a write, a discard or a confirmation has brought. A borrower that leaves
//! a member out raises the generation of the others with the next write, and whoever takes the
//! space over later tells by it which extents missed something.
//!
//! While an extent is being filled from another one, the borrower's own writes and discards come in
//! too, and are newer than whatever the other extent has. Written pages are known by their sums;
//! the pages that were discarded are remembered here, or a fill that was read before a discard and
//! stored after it would bring them back.

use hecaton_memory::Generation;
use hecaton_memory::words::SharedWords;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Generation of an extent after a write or a discard.
pub fn after_write(known: Generation, brought: Generation) -> Generation {
    if known == Generation::FILLING { known } else { known.max(brought) }
}

/// Generation of an extent after a confirmation.
pub fn after_confirm(known: Generation, brought: Generation) -> Generation {
    known.max(brought)
}

/// The standing of one extent. Its generation is a word of the ledger.
#[derive(Debug)]
pub(crate) struct Standing {
    words: Arc<SharedWords>,
    at: usize,
    /// A bit for each page, from when the extent was given out to be filled. An extent that a
    /// predecessor of this process gave out has none, and cannot be filled any further.
    discarded: Option<Box<[AtomicU64]>>,
}

impl Standing {
    /// Standing of an extent that a predecessor gave out.
    pub(crate) fn restored(words: Arc<SharedWords>, at: usize) -> Standing {
        Standing { words, at, discarded: None }
    }

    /// Standing of an extent of `pages` pages that is given out now.
    pub(crate) fn fresh(words: Arc<SharedWords>, at: usize, pages: u64) -> Standing {
        let mut standing = Standing::restored(words, at);
        if standing.generation() == Generation::FILLING {
            let words = pages.div_ceil(64);
            standing.discarded = Some((0..words).map(|_| AtomicU64::new(0)).collect());
        }
        standing
    }

    pub(crate) fn generation(&self) -> Generation {
        Generation(self.word().load(Ordering::Acquire))
    }

    /// Before a write's first byte is stored, so that no kill leaves its pages behind without it.
    pub(crate) fn written(&self, brought: Generation) {
        // Mostly it is the same one, and the word is shared with the connection's other threads.
        if after_write(self.generation(), brought) != self.generation() {
            self.word().fetch_max(brought.0, Ordering::AcqRel);
        }
    }

    pub(crate) fn confirmed(&self, brought: Generation) {
        self.word().fetch_max(brought.0, Ordering::AcqRel);
    }

    /// The caller has the extent's contents alone.
    pub(crate) fn discarded(&self, brought: Generation, first: u32, count: u32) {
        self.written(brought);
        if let Some(discarded) = self.filling() {
            for page in first..first + count {
                discarded[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }

    /// Whether the extent is being filled, and may be.
    pub(crate) fn can_be_filled(&self) -> bool {
        self.filling().is_some()
    }

    /// Whether the page was discarded since the extent was given out to be filled.
    pub(crate) fn was_discarded(&self, page: u32) -> bool {
        self.discarded.as_ref().is_some_and(|discarded| {
            discarded[page as usize / 64].load(Ordering::Relaxed) & 1 << (page % 64) != 0
        })
    }

    fn filling(&self) -> Option<&[AtomicU64]> {
        self.discarded.as_deref().filter(|_| self.generation() == Generation::FILLING)
    }

    fn word(&self) -> &AtomicU64 {
        &self.words.wide()[self.at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(generation: u64) -> Standing {
        let words = Arc::new(SharedWords::create("standing", 8, 0).unwrap());
        words.wide()[3].store(generation, Ordering::Relaxed);
        Standing::fresh(words, 3, 100)
    }

    #[test]
    fn a_write_raises_what_is_whole_and_a_confirmation_ends_the_filling() {
        let whole = standing(5);
        whole.written(Generation(4));
        assert_eq!(whole.generation(), Generation(5));
        whole.written(Generation(7));
        assert_eq!(whole.generation(), Generation(7));
        let filling = standing(0);
        filling.written(Generation(9));
        assert_eq!(filling.generation(), Generation::FILLING);
        assert!(filling.can_be_filled() && !whole.can_be_filled());
        filling.confirmed(Generation(8));
        assert_eq!(filling.generation(), Generation(8));
        assert!(!filling.can_be_filled());
    }

    #[test]
    fn discards_are_remembered_while_the_extent_is_filled() {
        let filling = standing(0);
        filling.discarded(Generation(1), 60, 10);
        for (page, expected) in [(59, false), (60, true), (69, true), (70, false)] {
            assert_eq!(filling.was_discarded(page), expected, "page {page}");
        }
        let whole = standing(1);
        whole.discarded(Generation(3), 0, 100);
        assert_eq!(whole.generation(), Generation(3));
        assert!(!whole.was_discarded(0));
    }

    #[test]
    fn what_a_predecessor_was_filling_is_filled_no_further() {
        let words = Arc::new(SharedWords::create("standing", 8, 0).unwrap());
        assert!(!Standing::restored(words, 3).can_be_filled());
    }
}
