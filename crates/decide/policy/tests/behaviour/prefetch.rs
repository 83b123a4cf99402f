//! Tests which access patterns prefetching follows.
//! The prefetcher finds sequential, strided, interleaved and backward streams in each thread,
//! follows them with few faults, and leaves random access alone.

use hecaton_policy::prefetch::{Limits, PROBE_INTERVAL, Prefetcher, Window};
use proptest::prelude::*;
use std::collections::{HashSet, VecDeque};

/// A pager that starts with nothing resident and evicts only triggers, beyond `STAGED_TRIGGERS`.
struct Pager {
    prefetcher: Prefetcher,
    mapped: HashSet<u64>,
    triggers: VecDeque<u64>,
    faults: u64,
}

const STAGED_TRIGGERS: usize = 32;

impl Pager {
    fn new() -> Self {
        Self::with_limits(Limits { window_pages: 256, ahead_pages: 1 << 16 })
    }

    fn with_limits(limits: Limits) -> Self {
        let prefetcher = Prefetcher::new(limits);
        Self { prefetcher, mapped: HashSet::new(), triggers: VecDeque::new(), faults: 0 }
    }

    fn touch(&mut self, thread: u64, page: u64) {
        if self.mapped.contains(&page) {
            return;
        }
        let staged = self.triggers.iter().position(|&trigger| trigger == page);
        self.mapped.insert(page);
        let window = match staged.and_then(|at| self.triggers.remove(at)) {
            Some(_) => self.prefetcher.on_trigger_hit(thread, page),
            None => {
                self.faults += 1;
                self.prefetcher.on_fault(thread, page)
            }
        };
        if let Some(window) = window {
            self.fetch(window);
        }
    }

    fn fetch(&mut self, window: Window) {
        let missing: Vec<u64> = window
            .pages()
            .filter(|p| !self.mapped.contains(p) && !self.triggers.contains(p))
            .collect();
        let trigger = missing.iter().copied().min_by_key(|p| p.abs_diff(window.trigger_page()));
        self.mapped.extend(missing.iter().filter(|&&page| Some(page) != trigger));
        if let Some(trigger) = trigger {
            self.triggers.push_back(trigger);
            if self.triggers.len() > STAGED_TRIGGERS {
                let dead = self.triggers.pop_front().unwrap();
                self.prefetcher.on_window_dead(dead);
            }
        }
        self.prefetcher.on_window_issued(&window, missing.len() as u32, trigger);
    }
}

#[test]
fn a_sequential_walk_takes_a_fault_or_two() {
    for stride in [1i64, -1] {
        let mut pager = Pager::new();
        (0..20_000i64)
            .for_each(|step| pager.touch(1, (1u64 << 30).wrapping_add_signed(step * stride)));
        assert!(pager.faults <= 3, "stride {stride}: {} faults", pager.faults);
        let counters = pager.prefetcher.counters();
        assert!(counters.hits > 19_000 && counters.waste == 0, "{counters:?}");
        // The window soon doubles from 8 to 256 pages: then one cheap fault per 256 pages.
        assert!(counters.windows < 100, "{counters:?}");
    }
}

#[test]
fn strided_walks_are_found() {
    for stride in [2i64, 7, 63, 64, 100, 1024, -3, -512, 16_384] {
        let mut pager = Pager::new();
        (0..5000i64)
            .for_each(|step| pager.touch(1, (1u64 << 40).wrapping_add_signed(step * stride)));
        assert!(pager.faults <= 6, "stride {stride}: {} faults", pager.faults);
        assert_eq!(pager.prefetcher.counters().waste, 0, "stride {stride}");
    }
}

#[test]
fn interleaved_walks_are_found() {
    // A merge: sixteen inputs read in random turns, and an output.
    let mut pager = Pager::new();
    let mut heads: Vec<u64> = (0..16).map(|input| (1 << 30) + input * 3000).collect();
    let mut random = 1u64;
    for step in 0..40_000u64 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let input = (random >> 33) as usize % heads.len();
        if heads[input] % 3000 < 2500 {
            pager.touch(1, heads[input]);
            heads[input] += 1;
        }
        pager.touch(1, (1 << 35) + step);
    }
    assert!(pager.faults < 100, "{} faults", pager.faults);

    // Columns of a matrix, four at a time.
    let mut pager = Pager::new();
    for row in 0..2000 {
        (0..4).for_each(|column| pager.touch(1, (1 << 30) + row * 300 + column * 70));
    }
    assert!(pager.faults < 40, "{} faults", pager.faults);
}

#[test]
fn threads_do_not_disturb_each_other() {
    let mut pager = Pager::new();
    for step in 0..5000 {
        // Neighbouring areas, walked at the same time in opposite directions.
        (0..8).for_each(|thread| {
            let base = (1 << 30) + thread * 10_000;
            let page = if thread % 2 == 0 { base + step } else { base + 9_999 - step };
            pager.touch(thread, page);
        });
    }
    assert!(pager.faults <= 8 * 3, "{} faults", pager.faults);
}

#[test]
fn random_access_turns_prefetching_off_and_a_walk_turns_it_on() {
    let mut pager = Pager::new();
    let mut random = 1u64;
    let mut draw = |bound: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % bound
    };
    // Pairs of neighbours at random places look like the beginning of a walk every time.
    for _ in 0..20_000 {
        let page = draw(1 << 26) * 4;
        pager.touch(1, page);
        pager.touch(1, page + 1);
    }
    let counters = pager.prefetcher.counters();
    assert!(counters.prefetched < pager.faults / u64::from(PROBE_INTERVAL) * 4, "{counters:?}");

    pager.mapped.clear();
    let before = pager.faults;
    (0..50_000).for_each(|step| pager.touch(1, (1 << 40) + step));
    assert!(pager.faults - before < 500, "{} faults", pager.faults - before);

    // Wholly random access, on the other hand, shows no trend at all.
    let mut pager = Pager::new();
    (0..20_000).for_each(|_| pager.touch(1, draw(1 << 16)));
    let counters = pager.prefetcher.counters();
    assert!(counters.prefetched < pager.faults / 50, "{counters:?} for {} faults", pager.faults);
}

#[test]
fn a_sweep_with_holes_is_followed() {
    let mut pager = Pager::new();
    // Two thirds of the pages are resident, in no pattern.
    pager
        .mapped
        .extend((0u64..30_000).filter(|p| p.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 3 < 2));
    (0..30_000).for_each(|page| pager.touch(1, page));
    assert!(pager.faults < 100, "{} faults", pager.faults);
}

#[test]
fn no_room_and_off_mean_no_windows() {
    for limits in
        [Limits { window_pages: 0, ahead_pages: 100 }, Limits { window_pages: 64, ahead_pages: 0 }]
    {
        let mut pager = Pager::with_limits(limits);
        (0..1000).for_each(|page| pager.touch(1, page));
        assert_eq!((pager.faults, pager.prefetcher.counters().prefetched), (1000, 0));
    }
}

proptest! {
    /// With any faults, windows are well-formed, open windows keep within `ahead_pages`, and the
    /// counters add up.
    #[test]
    fn limits_hold_under_any_faults(
        faults in prop::collection::vec((0u64..3, 0u64..2000, any::<bool>()), 0..2000),
        window_pages in 0u32..=64,
        ahead_pages in 0u32..=256,
    ) {
        let mut prefetcher = Prefetcher::new(Limits { window_pages, ahead_pages });
        let mut open: Vec<Window> = Vec::new();
        for (thread, page, follow) in faults {
            // Sometimes an open window is hit, or dies.
            let window = if follow && !open.is_empty() {
                let window = open.swap_remove(page as usize % open.len());
                if page % 2 == 0 {
                    prefetcher.on_trigger_hit(thread, window.trigger_page())
                } else {
                    prefetcher.on_window_dead(window.trigger_page());
                    None
                }
            } else {
                prefetcher.on_fault(thread, page)
            };
            if let Some(window) = window {
                prop_assert!(window.count >= 1 && window.count <= window_pages);
                prop_assert!(window.stride != 0 && window.trigger < window.count);
                prop_assert!(window.pages().all(|page| page < 1 << 40), "{window:?}");
                open.push(window);
            }
            let counters = prefetcher.counters();
            prop_assert!(counters.hits + counters.waste <= counters.prefetched, "{counters:?}");
            prop_assert!(prefetcher.ahead_pages() <= ahead_pages);
        }
    }
}
