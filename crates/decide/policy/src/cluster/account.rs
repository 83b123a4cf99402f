//! One consumer's pages at its node: counted, and held to the target (the paper's algorithm 1).

use super::ConsumerId;
use serde::Serialize;

/// One consumer's numbers that a node reports each second (table I of the paper, `memstats.vm[i]`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ConsumerStatistics {
    /// Consumer of these numbers.
    pub id: ConsumerId,
    /// Pool pages that it holds (`tmem_used`).
    pub used_pages: u64,
    /// Pool pages that it may hold (`mm_target`); `None` until a policy has said so.
    pub target_pages: Option<u64>,
    /// Pages that it tried to store in this period (`puts_total_rate`).
    pub puts_total: u64,
    /// Puts that stored their page (`puts_succ_rate`).
    pub puts_succeeded: u64,
    /// Pages that it read back in this period. Not in the paper.
    pub gets: u64,
}

impl ConsumerStatistics {
    /// Puts that found no room in this period (`puts_fail_rate`).
    pub fn puts_failed(&self) -> u64 {
        self.puts_total.saturating_sub(self.puts_succeeded)
    }
}

/// The account of one consumer (the paper's `vm_data_hyp`).
#[derive(Clone, Copy, Debug)]
pub struct Account {
    statistics: ConsumerStatistics,
}

impl Account {
    /// An account without pages, and without a target: until one is set, only free memory limits
    /// it.
    pub fn new(id: ConsumerId) -> Account {
        let statistics = ConsumerStatistics {
            id,
            used_pages: 0,
            target_pages: None,
            puts_total: 0,
            puts_succeeded: 0,
            gets: 0,
        };
        Account { statistics }
    }

    /// Admits pages one by one, each as the paper's `DO_TMEM_PUT` does, and says how many it did
    /// admit. `free_pages`: what the node owns and nobody uses.
    pub fn put_many(&mut self, puts: u64, free_pages: u64) -> u64 {
        let of_target = match self.statistics.target_pages {
            Some(target) => target.saturating_sub(self.statistics.used_pages),
            None => u64::MAX,
        };
        let succeeded = puts.min(of_target).min(free_pages);
        self.statistics.used_pages += succeeded;
        self.statistics.puts_succeeded += succeeded;
        self.statistics.puts_total += puts;
        succeeded
    }

    /// Puts on pages that are stored already: they need no room.
    pub fn overwrite_many(&mut self, puts: u64) {
        self.statistics.puts_total += puts;
        self.statistics.puts_succeeded += puts;
    }

    /// Pages read back, which stay until they are freed.
    pub fn get_many(&mut self, gets: u64) {
        self.statistics.gets += gets;
    }

    /// Pages that leave the pool: flushed, spilled or lost.
    pub fn free_many(&mut self, pages: u64) {
        debug_assert!(pages <= self.statistics.used_pages, "more pages freed than held");
        self.statistics.used_pages = self.statistics.used_pages.saturating_sub(pages);
    }

    /// Sets the target. The consumer keeps pages beyond it, but stores no more.
    pub fn set_target(&mut self, pages: Option<u64>) {
        self.statistics.target_pages = pages;
    }

    /// Pages that it holds.
    pub fn used_pages(&self) -> u64 {
        self.statistics.used_pages
    }

    /// Pages that it may hold.
    pub fn target_pages(&self) -> Option<u64> {
        self.statistics.target_pages
    }

    /// The statistics of the period that ends here; the next one begins.
    pub fn end_period(&mut self) -> ConsumerStatistics {
        let ended = self.statistics;
        self.statistics = ConsumerStatistics { puts_total: 0, puts_succeeded: 0, gets: 0, ..ended };
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The paper's algorithm 1. Whether the put is admitted.
    fn do_tmem_put(vm: &mut ConsumerStatistics, free_tmem: u64) -> bool {
        vm.puts_total += 1;
        let is_at_target = vm.target_pages.is_some_and(|mm_target| vm.used_pages >= mm_target);
        if is_at_target || free_tmem == 0 {
            return false;
        }
        vm.used_pages += 1;
        vm.puts_succeeded += 1;
        true
    }

    #[test]
    fn a_period_ends_with_its_counts_and_the_next_begins_without() {
        let mut account = Account::new(ConsumerId(1));
        assert_eq!(account.put_many(3, 1), 1);
        account.set_target(Some(1));
        assert_eq!(account.put_many(1, 9), 0, "it is at its target");
        let period = account.end_period();
        assert_eq!((period.puts_total, period.puts_succeeded, period.used_pages), (4, 1, 1));
        assert_eq!(period.puts_failed(), 3);
        let next = account.end_period();
        assert_eq!((next.puts_total, next.puts_succeeded, next.used_pages), (0, 0, 1));
    }

    proptest! {
        #[test]
        fn many_puts_are_the_papers_puts_one_by_one(
            held in 0u64..40,
            target in prop::option::of(0u64..60),
            puts in 0u64..40,
            free in 0u64..40,
        ) {
            let mut account = Account::new(ConsumerId(0));
            account.put_many(held, u64::MAX);
            account.set_target(target);
            let mut vm = account.statistics;
            let mut left = free;
            for _ in 0..puts {
                left -= u64::from(do_tmem_put(&mut vm, left));
            }
            prop_assert_eq!(account.put_many(puts, free), free - left);
            prop_assert_eq!(account.end_period(), vm);
        }
    }
}
