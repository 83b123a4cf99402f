//! The local memory's size as an eviction order sees it: the most pages resident lately.
//!
//! A pager evicts in batches, so the number of the moment goes up and down; shares taken of it
//! would move pages to and fro with each batch. And the limit may be changed while the program
//! runs, so it cannot be a constant.

/// An epoch takes at least this many victims: more than any batch.
const MIN_EPOCH_VICTIMS: usize = 1024;

/// The most pages in this epoch and the one before.
#[derive(Default)]
pub(super) struct Peak {
    of_last_epoch: usize,
    of_this_epoch: usize,
    victims: usize,
}

impl Peak {
    /// `live` pages are resident.
    pub(super) fn rise(&mut self, live: usize) {
        self.of_this_epoch = self.of_this_epoch.max(live);
    }

    /// One was evicted, `live` are left.
    pub(super) fn victim(&mut self, live: usize) {
        self.victims += 1;
        if self.victims > live / 4 + MIN_EPOCH_VICTIMS {
            *self = Self { of_last_epoch: self.of_this_epoch, of_this_epoch: live, victims: 0 };
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.of_last_epoch.max(self.of_this_epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_do_not_show_and_a_lower_limit_does() {
        let mut peak = Peak::default();
        let mut run = |limit: usize| {
            for _ in 0..200 {
                peak.rise(limit);
                (0..64).for_each(|victim| peak.victim(limit - 1 - victim));
            }
            peak.pages()
        };
        assert_eq!(run(10_000), 10_000);
        assert_eq!(run(5000), 5000);
    }
}
