//! FIFO that turns into a stable set where that is better.
//!
//! A sweep over more than fits misses on every page in any recency order; the optimum keeps some
//! pages still and lets the rest pass (as LIRS does: Jiang & Zhang, SIGMETRICS 2002). But most
//! phases of most programs are served well by FIFO, where a stable set would keep dead pages. So
//! memory is divided between a *passing* queue (FIFO) and a *set* of members that are evicted only
//! when the set must shrink or a better page takes the place. The division moves by what evicted
//! pages turn out to have been worth (see `samples`), the only thing a pager without reference bits
//! can find out:
//!
//! * At first everything passes: plain FIFO.
//! * Each page that comes back is a miss that FIFO caused and a set might have saved: the border
//!   moves by one page in favour of the set, which takes in the oldest passing pages.
//! * A page that came back sooner than members do becomes a member itself, and so does one that was
//!   rescued from staging. Once the set has its full size, its oldest member goes for it.
//! * Every now and then a page that is no better becomes a member too. This ages the set, and
//!   keeps the question asked what members are worth.
//! * If evicted passing pages are worth clearly more than evicted members (they come back soon, and
//!   the members do not: the program has moved on), the border moves back.
//!
//! In a loop all pages are worth the same, so the share shrinks to its least, and the set
//! stays. In a new phase members are worth nothing, and it dissolves within about a memory-full of
//! misses.
//!
//! LIRS, ARC and CLOCK-Pro themselves were not used: all of them live by hits, which a pager does
//! not see. Writes to resident clean pages, which it does see, are ignored: replays showed that
//! they say more about whether a program reads before it writes than about what it will use again.

use super::{
    Installed, Order,
    peak::Peak,
    rings::Rings,
    samples::{BYTES_PER_SAMPLE, Origin, SAMPLES, Samples},
};

/// The passing share of memory is kept in parts of this: fine enough for steps of one page in
/// 2^30, which is 4 TiB, and that times this still fits.
const WHOLE: i64 = 1 << 32;

/// The least passing share. Less would save more of a loop, but pages fetched ahead wait in the
/// passing queue for their use. In the replays anything from a 24th to a sixth does as well.
const MIN_PASSING: i64 = WHOLE / 12;

/// The passing share grows by this with each outcome that speaks for it.
const GROWTH: i64 = WHOLE / 4096;

/// Exchanges per refault, in parts of [`ALWAYS`], where the page is no better than a member.
const MIN_RATE: u32 = 8;
const ALWAYS: u32 = 256;

/// The queues.
const PASSING: usize = 0;
const MEMBERS: usize = 1;

/// The passing queue and the set.
pub struct StableSet {
    rings: Rings<2>,
    peak: Peak,
    samples: Samples,
    /// Share of the passing queue, in parts of [`WHOLE`].
    passing_share: i64,
    /// Right to exchanges that has built up, in parts of [`ALWAYS`].
    credit: u32,
}

impl Default for StableSet {
    fn default() -> Self {
        Self::new()
    }
}

impl StableSet {
    /// An empty order.
    pub fn new() -> Self {
        Self {
            rings: Rings::new(),
            peak: Peak::default(),
            samples: Samples::new(),
            passing_share: WHOLE,
            credit: 0,
        }
    }

    fn learned(&mut self) {
        if self.samples.passing_is_better() {
            self.passing_share = (self.passing_share + GROWTH).min(WHOLE);
        }
    }

    /// Moves the border between the two by one page. Each page that comes back asks for it: either
    /// it joins, and the set must not lose another for it at once, or the set might have saved it.
    fn give_the_set_a_page(&mut self, live: usize) {
        let page = WHOLE / (live as i64 + 1);
        self.passing_share = (self.passing_share - page).max(MIN_PASSING);
    }

    /// A page came back after `distance` evictions: whether it becomes a member.
    fn joins(&mut self, page: u32, distance: u64, live: usize) -> bool {
        if self.samples.returned(page, distance, live) {
            self.learned();
        }
        self.give_the_set_a_page(live);
        self.credit += if self.samples.is_better_than_members(distance, live) {
            ALWAYS
        } else {
            self.samples.gain_in(ALWAYS).max(MIN_RATE)
        };
        let joins = self.credit >= ALWAYS;
        if joins {
            self.credit -= ALWAYS;
        }
        joins
    }
}

impl Order for StableSet {
    fn name(&self) -> &'static str {
        "stable-set"
    }

    fn installed(&mut self, page: u32, how: Installed) {
        // With the page itself, which the samples and the border count as resident.
        let live = self.rings.live() + 1;
        self.peak.rise(live);
        let member = match how {
            Installed::Rescued => {
                if self.samples.returned(page, 0, live) {
                    self.learned();
                }
                self.give_the_set_a_page(live);
                true
            }
            Installed::Refault { distance } | Installed::PrefetchedAgain { distance } => {
                self.joins(page, distance, live)
            }
            Installed::Demand | Installed::Prefetched | Installed::ZeroFill => false,
        };
        self.rings.push(if member { MEMBERS } else { PASSING }, page);
    }

    fn referenced(&mut self, _page: u32) {}

    fn removed(&mut self, page: u32) {
        self.rings.remove(page);
    }

    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>) {
        let enough = out.len().saturating_add(n);
        let memory = self.peak.pages();
        let passing_target = (memory as i64 * self.passing_share / WHOLE) as usize;
        let member_target = memory - passing_target;
        while self.rings.entries(PASSING) > passing_target
            && self.rings.entries(MEMBERS) < member_target
            && let Some(page) = self.rings.pop(PASSING)
        {
            self.rings.push(MEMBERS, page);
        }
        while out.len() < enough {
            let from_set = self.rings.entries(MEMBERS) > member_target;
            let (queue, origin) = if from_set || self.rings.entries(PASSING) == 0 {
                (MEMBERS, Origin::Member)
            } else {
                (PASSING, Origin::Passing)
            };
            let resident = self.rings.live();
            // If all entries of a queue are dead, the other queue is next.
            let Some(page) = self.rings.pop(queue) else {
                if resident == 0 {
                    return;
                }
                continue;
            };
            self.peak.victim(resident - 1);
            if still(page) {
                if self.samples.evicted(page, origin, resident) {
                    self.learned();
                }
                out.push(page);
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.rings.memory_bytes() + SAMPLES * BYTES_PER_SAMPLE
    }

    fn len(&self) -> usize {
        self.rings.live()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_moves_the_border_in_a_memory_of_any_size() {
        for live in [1, 1000, 1 << 20, 1 << 30] {
            let mut order = StableSet::new();
            order.give_the_set_a_page(live);
            assert!(order.passing_share < WHOLE, "{live}");
            assert!(order.passing_share >= MIN_PASSING);
            assert!((live as i64).checked_mul(WHOLE).is_some());
        }
    }

    #[test]
    fn the_set_forms_under_refaults_and_yields_to_better_pages() {
        let mut order = StableSet::new();
        let mut victims = Vec::new();
        let mut turn = |order: &mut StableSet, pages: std::ops::Range<u32>, distance| {
            for page in pages {
                order.installed(page, Installed::Refault { distance });
                if order.len() > 1000 {
                    order.victims(1, &mut |_| true, &mut victims);
                }
            }
        };
        turn(&mut order, 0..4000, 2000);
        assert_eq!(order.passing_share, MIN_PASSING);
        assert!(order.rings.entries(MEMBERS) > 850, "{}", order.rings.entries(MEMBERS));
        // Those pages are never heard of again, while these come back soon.
        for round in 0..200 {
            turn(&mut order, 10_000 + round..10_200 + round, 20);
        }
        let members = std::iter::from_fn(|| order.rings.pop(MEMBERS));
        let stale = members.filter(|&page| page < 10_000).count();
        assert!(stale < 100, "{stale}");
    }
}
