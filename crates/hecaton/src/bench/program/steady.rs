//! Touches random pages without end, and tells on request how long the accesses since the last
//! request took.
//!
//! Every odd page is written and the others are read, so that faults wait for donors, for room, and
//! for the writes that make room: whatever may hold up a program.

use super::touch::stamp;
use crate::bench::measure::region::{Region, Residency, noise};
use crate::bench::measure::stats::{Latencies, Percentiles};
use anyhow::{Context as _, ensure};
use hecaton_memory::SplitMix;
use serde::{Deserialize, Serialize};
use std::{
    io::BufRead as _,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Arguments of `steady`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Pages of the region.
    #[arg(long)]
    pages: u64,
}

/// The first line, once the region is filled.
#[derive(Serialize, Deserialize)]
pub(in crate::bench) struct Ready {
    /// Where the program's pager listens.
    pub(in crate::bench) pager: PathBuf,
}

/// The answer to each line of standard input; its end ends the program.
#[derive(Serialize, Deserialize)]
pub(in crate::bench) struct Window {
    /// Accesses to pages that were not there.
    pub(in crate::bench) faults: Percentiles,
    /// The longest of all accesses.
    pub(in crate::bench) longest_us: f64,
}

static ASKED: AtomicBool = AtomicBool::new(false);
static ENDED: AtomicBool = AtomicBool::new(false);

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.pages > 0, "a region of no pages");
    let pager = std::env::var_os("HECATON_PAGER").context("it runs without a pager")?.into();
    let residency = Residency::open()?;
    let mut region = Region::new(args.pages)?;
    for page in 0..args.pages {
        region.fill(page, &noise(page));
        region.write(page, stamp(page, 0));
    }
    let mut generations = vec![0_u32; args.pages as usize];
    std::thread::spawn(|| {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            ASKED.store(true, Ordering::Relaxed);
        }
        ENDED.store(true, Ordering::Relaxed);
    });
    super::report(&Ready { pager })?;

    let mut faults = Latencies::new();
    let mut longest = Duration::ZERO;
    let mut random = SplitMix::new(args.pages);
    while !ENDED.load(Ordering::Relaxed) {
        let page = random.draw() % args.pages;
        let is_resident = residency.is_resident(&region, page)?;
        let generation = &mut generations[page as usize];
        let expected = stamp(page, u64::from(*generation));
        let start = Instant::now();
        let found = region.read(page);
        if page % 2 == 1 {
            *generation = (*generation + 1) % (1 << 20);
            region.write(page, stamp(page, u64::from(*generation)));
        }
        let latency = start.elapsed();
        ensure!(found == expected, "page {page} holds {found:x} instead of {expected:x}");
        longest = longest.max(latency);
        if !is_resident {
            faults.record(latency);
        }
        if ASKED.swap(false, Ordering::Relaxed) {
            let longest_us = longest.as_secs_f64() * 1e6;
            super::report(&Window { faults: faults.percentiles(), longest_us })?;
            (faults, longest) = (Latencies::new(), Duration::ZERO);
        }
    }
    for (page, generation) in generations.iter().enumerate() {
        let page = page as u64;
        let (found, expected) = (region.read(page), stamp(page, u64::from(*generation)));
        ensure!(found == expected, "page {page} ended as {found:x} instead of {expected:x}");
    }
    Ok(())
}
