//! Touches random pages one by one, and asks the wire for a page in between.
//!
//! Accesses and round trips alternate in short blocks on the same thread, so that whatever else the
//! machine does meets both alike. Which accesses fault is read from the pagemap beforehand and not
//! guessed from their duration.

use crate::bench::measure::region::{Region, Residency, noise};
use crate::bench::measure::stats::{Latencies, Percentiles};
use crate::bench::measure::wire::{Ends, Wire};
use anyhow::{bail, ensure};
use hecaton_memory::SplitMix;
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, time::Instant};

/// Accesses, then round trips, in one block.
const BLOCK: u64 = 100;

/// Blocks before the measured ones: connections open, and the prefetcher learns that it is of no
/// use here.
const WARM_UP_BLOCKS: u64 = 10;

/// Arguments of `touch`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Pages of the region.
    #[arg(long)]
    pages: u64,
    /// Faults to measure, and round trips as well.
    #[arg(long)]
    samples: u64,
    /// Every odd page is written instead of read, and pages are visited again and again, so that
    /// about half of those that must leave are dirty.
    #[arg(long)]
    dirty: bool,
    /// Pages of other memory that are filled after the region and then unmapped: they push the
    /// region out to the pool and leave its place free.
    #[arg(long, default_value_t = 0)]
    ballast: u64,
    /// Says when the region has been filled and pushed out, and measures after a line of input.
    #[arg(long)]
    hold: bool,
    /// Where the plain TCP server is.
    #[arg(long)]
    wire: SocketAddr,
}

/// Line that announces, with `--hold`, that the region has been pushed out.
pub(in crate::bench) const HELD: &str = "held";

/// Results of a run.
#[derive(Serialize, Deserialize)]
pub(in crate::bench) struct Report {
    pub(in crate::bench) fault: Percentiles,
    /// Both ends where the scheduler puts them.
    pub(in crate::bench) tcp_rtt: Percentiles,
    /// Both ends on one processor.
    pub(in crate::bench) tcp_rtt_together: Percentiles,
    /// The ends on two processors; nothing on a machine that has only one.
    pub(in crate::bench) tcp_rtt_apart: Option<Percentiles>,
    /// Pages that were there without a fault at the moment of their turn: prefetched or kept.
    pub(in crate::bench) hits: u64,
}

/// The first word of a page tells page and generation; the rest is noise.
pub(super) const fn stamp(page: u64, generation: u64) -> u64 {
    page << 20 | generation
}

pub(super) fn run(args: &Args) -> anyhow::Result<Report> {
    ensure!(args.pages > 0, "a region of no pages");
    let residency = Residency::open()?;
    let mut region = Region::new(args.pages)?;
    for page in 0..args.pages {
        region.fill(page, &noise(page));
        region.write(page, stamp(page, 0));
    }
    let mut generations = vec![0_u32; args.pages as usize];
    if args.ballast > 0 {
        push_out(&region, &residency, args.ballast)?;
    }
    if args.hold {
        println!("{HELD}");
        std::io::stdin().read_line(&mut String::new())?;
    }

    let mut wire = Wire::connect(args.wire)?;
    let mut faults = Latencies::new();
    let mut round_trips =
        [Ends::Free, Ends::Together, Ends::Apart].map(|ends| (ends, Latencies::new()));
    let mut order = Order::new(args.pages, !args.dirty);
    let (mut measured, mut hits) = (0, 0);
    let mut block = 0;
    while measured < args.samples {
        let mut faulted = 0;
        while faulted < BLOCK {
            let Some(page) = order.next() else {
                bail!(
                    "{} pages are too few: only {measured} of {} faults, {hits} pages were there \
                     without one",
                    args.pages,
                    args.samples
                );
            };
            let resident = residency.is_resident(&region, page)?;
            let writes = args.dirty && page % 2 == 1;
            let generation = &mut generations[page as usize];
            let expected = stamp(page, u64::from(*generation));
            let (start, found);
            if writes {
                *generation = (*generation + 1) % (1 << 20);
                let next = stamp(page, u64::from(*generation));
                start = Instant::now();
                region.write(page, next);
                found = expected;
            } else {
                start = Instant::now();
                found = region.read(page);
            }
            let latency = start.elapsed();
            ensure!(found == expected, "page {page} holds {found:x} instead of {expected:x}");
            if resident {
                hits += 1;
            } else {
                faulted += 1;
                if block >= WARM_UP_BLOCKS {
                    faults.record(latency);
                }
            }
        }
        for (ends, round_trips) in &mut round_trips {
            wire.ping(*ends, BLOCK, |latency| {
                if block >= WARM_UP_BLOCKS {
                    round_trips.record(latency);
                }
            })?;
        }
        block += 1;
        measured = faults.percentiles().count;
    }
    for (page, generation) in generations.iter().enumerate() {
        let page = page as u64;
        let (found, expected) = (region.read(page), stamp(page, u64::from(*generation)));
        ensure!(found == expected, "page {page} ended as {found:x} instead of {expected:x}");
    }
    let [tcp_rtt, tcp_rtt_together, tcp_rtt_apart] = round_trips.map(|(_, of)| of.percentiles());
    let tcp_rtt_apart = Some(tcp_rtt_apart).filter(|of| of.count > 0);
    Ok(Report { fault: faults.percentiles(), tcp_rtt, tcp_rtt_together, tcp_rtt_apart, hits })
}

/// How often ballast is tried: an eviction order that resists scans keeps what it was shown first.
const PUSHES: usize = 4;

fn push_out(region: &Region, residency: &Residency, ballast: u64) -> anyhow::Result<()> {
    let mut block = noise(ballast);
    for _ in 0..PUSHES {
        let mut other = Region::new(ballast)?;
        for page in 0..ballast {
            block[0] = page;
            other.fill(page, &block);
        }
        if residency.resident_pages(region)? == 0 {
            break;
        }
    }
    Ok(())
}

/// Pages in random order: each of them once, or for ever.
struct Order {
    pages: Vec<u32>,
    next: usize,
    once: bool,
    random: SplitMix,
}

impl Order {
    fn new(pages: u64, once: bool) -> Self {
        let random = SplitMix::new(pages);
        let mut order = Self { pages: (0..pages as u32).collect(), next: 0, once, random };
        order.shuffle();
        order
    }

    fn shuffle(&mut self) {
        for last in (1..self.pages.len()).rev() {
            let other = self.random.draw() % (last as u64 + 1);
            self.pages.swap(last, other as usize);
        }
    }

    fn next(&mut self) -> Option<u64> {
        if !self.once {
            let at = self.random.draw() % self.pages.len() as u64;
            return Some(at);
        }
        let page = self.pages.get(self.next)?;
        self.next += 1;
        Some(u64::from(*page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_visits_every_page_exactly_once() {
        let mut order = Order::new(1000, true);
        let mut seen: Vec<_> = std::iter::from_fn(|| order.next()).collect();
        assert_ne!(seen[..3], [0, 1, 2]);
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1000));
    }

    #[test]
    fn too_few_faults_are_an_error_and_not_a_report() {
        let wire = crate::bench::measure::wire::serve().unwrap();
        let args = Args { pages: 64, samples: 10, dirty: false, ballast: 0, hold: false, wire };
        let error = run(&args).err().expect("all pages are resident");
        assert!(error.to_string().contains("64 pages are too few"), "{error}");
    }
}
