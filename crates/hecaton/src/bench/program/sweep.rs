//! Sweeps over a region from its first page to its last, and streams the same bytes over plain TCP.

use crate::bench::measure::busy::Busy;
use crate::bench::measure::region::{Region, Residency, noise};
use crate::bench::measure::wire::Wire;
use anyhow::ensure;
use hecaton_memory::pages_to_bytes;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Arguments of `sweep`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Pages of the region.
    #[arg(long)]
    pages: u64,
    /// How often everything is measured.
    #[arg(long)]
    rounds: u32,
    /// Where the plain TCP server is.
    #[arg(long)]
    wire: SocketAddr,
}

/// Gigabytes (10⁹ bytes) per second, one number for each round.
#[derive(Default, Serialize, Deserialize)]
pub(in crate::bench) struct Report {
    /// Fresh memory filled from its start to its end.
    pub(in crate::bench) write_gbps: Vec<f64>,
    /// All bytes of it read.
    pub(in crate::bench) read_gbps: Vec<f64>,
    /// All bytes of it overwritten: each page must come in before it goes out again.
    pub(in crate::bench) rewrite_gbps: Vec<f64>,
    /// The stream.
    pub(in crate::bench) tcp_gbps: Vec<f64>,
    /// Microseconds of processors, of all that the machine has, for each page: by [`Phase`].
    pub(in crate::bench) cpu_us: [Vec<f64>; 4],
    /// Processors that were busy meanwhile: by [`Phase`].
    pub(in crate::bench) processors: [Vec<f64>; 4],
}

impl Report {
    /// A phase in which so many pages crossed the wire took so many seconds, and so many of
    /// processors. Gives its speed.
    fn phase(&mut self, which: Phase, pages: u64, (elapsed, used): (f64, f64)) -> f64 {
        self.cpu_us[which as usize].push(used * 1e6 / pages as f64);
        self.processors[which as usize].push(used / elapsed);
        pages_to_bytes(pages) as f64 / elapsed / 1e9
    }
}

/// Measured phases of a round.
#[derive(Clone, Copy)]
pub(in crate::bench) enum Phase {
    Write,
    Read,
    Rewrite,
    Tcp,
}

/// Only what crosses the wire is counted: pages that stay behind after writing, or are still there
/// before reading, are taken off.
pub(super) fn run(args: &Args) -> anyhow::Result<Report> {
    ensure!(args.pages > 0, "a region of no pages");
    let residency = Residency::open()?;
    let mut wire = Wire::connect(args.wire)?;
    let mut report = Report::default();
    for round in 0..u64::from(args.rounds) {
        let mut region = Region::new(args.pages)?;

        // Every page its own, and none of them all zero: such pages would never be sent.
        let mut block = noise(round + 1);
        let base = block[1..].iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
        let busy = Busy::start()?;
        for page in 0..args.pages {
            block[0] = page;
            region.fill(page, &block);
        }
        let taken = busy.stop()?;
        let stayed = residency.resident_pages(&region)?;
        ensure!(
            stayed < args.pages,
            "all {} pages are local: run the sweep with less local memory",
            args.pages
        );
        let speed = report.phase(Phase::Write, args.pages - stayed, taken);
        report.write_gbps.push(speed);

        let busy = Busy::start()?;
        wire.ask(pages_to_bytes(args.pages))?;
        let speed = report.phase(Phase::Tcp, args.pages, busy.stop()?);
        report.tcp_gbps.push(speed);

        let stayed = residency.resident_pages(&region)?;
        let busy = Busy::start()?;
        for page in 0..args.pages {
            let (found, expected) = (region.sum(page), base.wrapping_add(page));
            ensure!(found == expected, "page {page} sums to {found:x} instead of {expected:x}");
        }
        let speed = report.phase(Phase::Read, args.pages - stayed, busy.stop()?);
        report.read_gbps.push(speed);

        let stayed = residency.resident_pages(&region)?;
        let busy = Busy::start()?;
        for page in 0..args.pages {
            block[0] = !page;
            region.fill(page, &block);
        }
        let speed = report.phase(Phase::Rewrite, args.pages - stayed, busy.stop()?);
        report.rewrite_gbps.push(speed);
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_that_stays_local_is_an_error() {
        let wire = crate::bench::measure::wire::serve().unwrap();
        let error = run(&Args { pages: 64, rounds: 1, wire }).err().expect("all is local");
        assert!(error.to_string().contains("all 64 pages are local"), "{error}");
    }
}
