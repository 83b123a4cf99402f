//! Recorded programs, replayed against every eviction order: why the default order is the default.
//!
//! The replay stands for the pager: it keeps a program's pages within a local memory, stages
//! evicted pages, evicts in batches, and tells the order exactly what a pager would see (see
//! [`crate::evict`]). It costs a fault what it costs the pager, about: see [`FETCH_US`] and
//! [`STAGED_US`].

mod belady;
mod lru;
mod pager;
mod recorded;
pub mod trace;

pub use pager::{Outcome, replay};
pub use recorded::recorded;

use crate::{
    evict,
    prefetch::{Counters, Limits, Prefetcher},
};
use serde::Serialize;
use std::collections::HashMap;
use trace::Reference;

/// A fault that has to go to the pool, in microseconds.
pub const FETCH_US: f64 = 25.0;

/// A fault on a page in the staging cache, in microseconds.
pub const STAGED_US: f64 = 5.0;

/// A trace made ready: pages numbered densely in address order.
pub struct Program {
    /// Name of the recorded program.
    pub name: String,
    /// Page key of each index.
    pages: Vec<u64>,
    /// In order, with the index of the page for the page.
    references: Vec<Reference>,
}

impl Program {
    /// Numbers the pages of `trace`.
    pub fn new(name: impl Into<String>, trace: &[Reference]) -> Self {
        let mut pages: Vec<u64> = trace.iter().map(|reference| reference.page).collect();
        pages.sort_unstable();
        pages.dedup();
        let index: HashMap<u64, u32> =
            pages.iter().enumerate().map(|(at, &page)| (page, at as u32)).collect();
        let references =
            trace.iter().map(|r| Reference { page: index[&r.page].into(), ..*r }).collect();
        Self { name: name.into(), pages, references }
    }

    /// Distinct pages.
    pub fn footprint_pages(&self) -> usize {
        self.pages.len()
    }

    /// References in the trace.
    pub fn references(&self) -> usize {
        self.references.len()
    }

    fn indices(&self) -> Vec<u32> {
        self.references.iter().map(|reference| reference.page as u32).collect()
    }

    /// Misses of Belady's optimum, without first touches.
    pub fn optimal_refetches(&self, capacity_pages: usize) -> u64 {
        belady::refetches(&self.indices(), self.pages.len(), capacity_pages)
    }
}

/// Misses in this share of all references (one in so many) are added to both sides of
/// [`Row::stall_vs_belady`], or a handful of misses where the optimum has none would outweigh all.
const FLOOR_SHARE: usize = 500;

/// One program under one order with one share of its memory local.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The program.
    pub program: String,
    /// Its distinct pages.
    pub footprint_pages: usize,
    /// Entries in its trace.
    pub references: usize,
    /// Local memory, in percent of the footprint.
    pub local_percent: u32,
    /// The order, or one of [`YARDSTICKS`].
    pub order: String,
    /// Pages fetched again after an eviction.
    pub refetches: u64,
    /// Refetches, as a share of all references after a page's first.
    pub miss_ratio: f64,
    /// Faults served from staging.
    pub rescues: u64,
    /// Time lost in faults after first touches, relative to Belady's.
    pub stall_vs_belady: f64,
}

/// Yardsticks for the orders: two see every reference, and one sees the future too.
pub const YARDSTICKS: [&str; 3] = ["clock", "lru", "belady"];

/// Replays every program against every order with `percents` of its memory local. Rows come by
/// program, then percent, then order; [`YARDSTICKS`] last.
pub fn table(programs: &[Program], percents: &[u32]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (program, percent, capacity) in cases(programs, percents) {
        let again = (program.references() - program.footprint_pages()).max(1);
        let floor = (again / FLOOR_SHARE) as f64 * FETCH_US;
        let optimum = program.optimal_refetches(capacity);
        let mut push = |order: &str, refetches: u64, rescues: u64| {
            let stall = refetches as f64 * FETCH_US + rescues as f64 * STAGED_US;
            rows.push(Row {
                program: program.name.clone(),
                footprint_pages: program.footprint_pages(),
                references: program.references(),
                local_percent: percent,
                order: order.to_owned(),
                refetches,
                miss_ratio: refetches as f64 / again as f64,
                rescues,
                stall_vs_belady: (stall + floor) / (optimum as f64 * FETCH_US + floor),
            });
        };
        for mut order in evict::all(capacity) {
            let outcome = replay(program, capacity, order.as_mut(), None);
            push(order.name(), outcome.refetches, outcome.rescues);
        }
        let (references, pages) = (program.indices(), program.footprint_pages());
        let [clock, lru, belady] = YARDSTICKS;
        push(clock, lru::clock_refetches(&references, pages, capacity), 0);
        push(lru, lru::lru_refetches(&references, pages, capacity), 0);
        push(belady, optimum, 0);
    }
    rows
}

/// The geometric mean of [`Row::stall_vs_belady`] over all programs, by order, in the rows' order.
pub fn mean_stalls(rows: &[Row]) -> Vec<(String, f64)> {
    let mut sums: Vec<(String, f64, f64)> = Vec::new();
    for row in rows {
        let log = row.stall_vs_belady.ln();
        match sums.iter_mut().find(|(order, ..)| *order == row.order) {
            Some((_, sum, count)) => (*sum, *count) = (*sum + log, *count + 1.0),
            None => sums.push((row.order.clone(), log, 1.0)),
        }
    }
    sums.into_iter().map(|(order, sum, count)| (order, (sum / count).exp())).collect()
}

/// One program under the default order with one share of its memory local, without and with
/// prefetching.
#[derive(Clone, Debug, Serialize)]
pub struct PrefetchRow {
    /// The program.
    pub program: String,
    /// Local memory, in percent of the footprint.
    pub local_percent: u32,
    /// Faults that had to go to the pool, without prefetching.
    pub plain_fetch_faults: u64,
    /// The same, with it.
    pub fetch_faults: u64,
    /// Faults on trigger pages.
    pub trigger_faults: u64,
    /// Hits and waste.
    pub counters: Counters,
}

/// Replays every program with and without prefetching with `percents` of its memory local.
pub fn prefetch_table(programs: &[Program], percents: &[u32]) -> Vec<PrefetchRow> {
    let row = |(program, local_percent, capacity): (&Program, u32, usize)| {
        let plain = replay(program, capacity, evict::default().as_mut(), None);
        let mut prefetcher = Prefetcher::new(Limits::for_capacity(capacity));
        let mut order = evict::default();
        let ahead = replay(program, capacity, order.as_mut(), Some(&mut prefetcher));
        PrefetchRow {
            program: program.name.clone(),
            local_percent,
            plain_fetch_faults: plain.refetches,
            fetch_faults: ahead.refetches,
            trigger_faults: ahead.trigger_faults,
            counters: prefetcher.counters(),
        }
    };
    cases(programs, percents).map(row).collect()
}

fn cases<'a>(
    programs: &'a [Program],
    percents: &'a [u32],
) -> impl Iterator<Item = (&'a Program, u32, usize)> {
    programs.iter().flat_map(move |program| {
        percents.iter().map(move |&percent| {
            (program, percent, program.footprint_pages() * percent as usize / 100)
        })
    })
}
