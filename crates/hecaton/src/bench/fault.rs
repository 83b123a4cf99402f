//! `bench fault`: what a page fault costs, in round trips of plain TCP.
//!
//! One program runs twice. In the first run, other memory pushes the region out to the pool and is
//! then unmapped. The region fits in the room that the other memory leaves. Every page is read once
//! in random order, and nothing is evicted while these faults are measured. In the second run, half
//! of the region may be local and half of the pages are written. Every fault then needs room, and
//! about half of the room is dirty.

use super::Common;
use super::program::touch::{HELD, Report};
use crate::bench::measure::beside::{Beside, Measured};
use crate::bench::measure::stats::Percentiles;
use crate::bench::measure::wire;
use crate::bench::world::cluster::{CODING_PATIENCE, Cluster, PoolMemory};
use crate::bench::world::process::{Guarded, eventually};
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use hecaton_memory::{Size, pages_for_bytes, pages_to_bytes};
use serde::Serialize;
use std::{
    io::Write as _,
    net::SocketAddr,
    process::{Command, Stdio},
};

/// Arguments of `bench fault`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Memory that is touched.
    #[arg(long, default_value = "512M")]
    size: Size,
    /// Faults to measure in each run.
    #[arg(long, default_value_t = 50_000)]
    samples: u64,
    #[command(flatten)]
    beside: Beside,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Result {
    #[serde(flatten)]
    plain: Faults,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted: Option<Compared>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Compared>,
    samples: u64,
    region_bytes: u64,
}

/// Figures of one kind of pool memory.
#[derive(Serialize)]
struct Faults {
    fault_p50_us: f64,
    fault_p90_us: f64,
    fault_p99_us: f64,
    tcp_rtt_p50_us: f64,
    tcp_rtt_p90_us: f64,
    tcp_rtt_p99_us: f64,
    /// Fault to round trip, medians of the run in which nothing is evicted.
    ratio: f64,
    /// The round trip with both ends on one processor, and with the ends on two.
    tcp_rtt_together_p50_us: f64,
    tcp_rtt_apart_p50_us: Option<f64>,
    ratio_together: f64,
    ratio_apart: Option<f64>,
    evicting_fault_p50_us: f64,
    evicting_fault_p90_us: f64,
    evicting_fault_p99_us: f64,
    evicting_tcp_rtt_p50_us: f64,
    /// The same where half of the pages are dirty and being evicted.
    evicting_ratio: f64,
    evicting_tcp_rtt_together_p50_us: f64,
    evicting_tcp_rtt_apart_p50_us: Option<f64>,
}

/// The same with `--encrypt`, or over TLS.
#[derive(Serialize)]
struct Compared {
    #[serde(flatten)]
    faults: Faults,
    /// Fault to fault in the clear, each in round trips of its own run with both ends on one
    /// processor: of all round trips those that change least from run to run. Medians.
    cost: f64,
    evicting_cost: f64,
}

impl Faults {
    fn of(Both { quiet, evicting }: &Both) -> Faults {
        Faults {
            fault_p50_us: quiet.fault.p50_us,
            fault_p90_us: quiet.fault.p90_us,
            fault_p99_us: quiet.fault.p99_us,
            tcp_rtt_p50_us: quiet.tcp_rtt.p50_us,
            tcp_rtt_p90_us: quiet.tcp_rtt.p90_us,
            tcp_rtt_p99_us: quiet.tcp_rtt.p99_us,
            ratio: quiet.fault.p50_us / quiet.tcp_rtt.p50_us,
            tcp_rtt_together_p50_us: quiet.tcp_rtt_together.p50_us,
            tcp_rtt_apart_p50_us: quiet.tcp_rtt_apart.as_ref().map(|of| of.p50_us),
            ratio_together: quiet.fault.p50_us / quiet.tcp_rtt_together.p50_us,
            ratio_apart: quiet.tcp_rtt_apart.as_ref().map(|of| quiet.fault.p50_us / of.p50_us),
            evicting_fault_p50_us: evicting.fault.p50_us,
            evicting_fault_p90_us: evicting.fault.p90_us,
            evicting_fault_p99_us: evicting.fault.p99_us,
            evicting_tcp_rtt_p50_us: evicting.tcp_rtt.p50_us,
            evicting_ratio: evicting.fault.p50_us / evicting.tcp_rtt.p50_us,
            evicting_tcp_rtt_together_p50_us: evicting.tcp_rtt_together.p50_us,
            evicting_tcp_rtt_apart_p50_us: evicting.tcp_rtt_apart.as_ref().map(|of| of.p50_us),
        }
    }

    fn evicting_ratio_together(&self) -> f64 {
        self.evicting_fault_p50_us / self.evicting_tcp_rtt_together_p50_us
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let size = if common.quick { Size(args.size.0.min(128 << 20)) } else { args.size };
    let samples = if common.quick { args.samples.min(10_000) } else { args.samples };
    let pages = pages_for_bytes(size.0);
    ensure!(
        samples + samples / 4 <= pages,
        "{samples} faults need at least {} of memory, not {size}",
        Size(pages_to_bytes(samples + samples / 4))
    );
    let scratch = common.scratch()?;
    let wire = wire::serve()?;
    let both = |cluster: &Cluster, pool: PoolMemory, how: &str| {
        let run = Run { cluster, wire, pages, samples, pool };
        common.say(&format!("faults while nothing is evicted{how}"));
        let quiet = run.quiet()?;
        common.say(&format!("faults while pages are evicted, half of them dirty{how}"));
        Ok(Both { quiet, evicting: run.evicting()? })
    };
    let measured = args.beside.measure(common, size.0 * 4, scratch.path(), both)?;

    let (encrypted, tls) = measured.compare(Compared::of);
    let Measured { plain, .. } = &measured;
    let result = Result {
        encrypted,
        tls,
        plain: Faults::of(plain),
        samples: plain.quiet.fault.count.min(plain.evicting.fault.count),
        region_bytes: size.0,
    };
    if common.json {
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let mut table = Table::figures(["", "p50 µs", "p90 µs", "p99 µs", "max µs", "fault to it"]);
    for (both, how) in measured.each() {
        show(&mut table, both, how);
    }
    print!("{table}");
    for (fault, compared) in
        [("An encrypted fault", &result.encrypted), ("A fault over TLS", &result.tls)]
    {
        if let Some(Compared { cost, evicting_cost, .. }) = compared {
            println!(
                "{fault} takes {cost:.2} × as long as a plain one, each in round trips of its own run; \
                 {evicting_cost:.2} × where half are dirty and evicting."
            );
        }
    }
    Ok(())
}

impl Compared {
    fn of(of: &Both, plain: &Both) -> Compared {
        let (faults, plain) = (Faults::of(of), Faults::of(plain));
        Compared {
            cost: faults.ratio_together / plain.ratio_together,
            evicting_cost: faults.evicting_ratio_together() / plain.evicting_ratio_together(),
            faults,
        }
    }
}

/// Both runs on one kind of pool memory.
struct Both {
    quiet: Report,
    evicting: Report,
}

fn show(table: &mut Table, both: &Both, how: &str) {
    let mut row = |name: &str, of: &Percentiles, ratio: Option<f64>| {
        let us = |value: f64| format!("{value:.1}");
        table.row([
            name.to_owned(),
            us(of.p50_us),
            us(of.p90_us),
            us(of.p99_us),
            us(of.max_us),
            ratio.map(|ratio| format!("{ratio:.2} ×")).unwrap_or_default(),
        ]);
    };
    for (name, report) in [
        ("fault, nothing evicting", &both.quiet),
        ("fault, half dirty and evicting", &both.evicting),
    ] {
        let fault = &report.fault;
        row(&format!("{name}{how}"), fault, None);
        let mut wire_row = |ends: &str, of: &Percentiles| {
            row(&format!("  TCP round trip, {ends}"), of, Some(fault.p50_us / of.p50_us));
        };
        wire_row("as scheduled", &report.tcp_rtt);
        wire_row("on one processor", &report.tcp_rtt_together);
        if let Some(apart) = &report.tcp_rtt_apart {
            wire_row("between two", apart);
        }
    }
}

/// Faults of a program on a cluster while nothing is evicted, with round trips in between.
pub(super) fn quiet(
    cluster: &Cluster,
    wire: SocketAddr,
    pages: u64,
    samples: u64,
) -> anyhow::Result<Report> {
    Run { cluster, wire, pages, samples, pool: PoolMemory::Plain }.quiet()
}

/// Medians in microseconds on one kind of pool memory: of faults while nothing is evicted, and
/// while pages are.
pub(super) fn medians(
    cluster: &Cluster,
    wire: SocketAddr,
    pages: u64,
    samples: u64,
    pool: PoolMemory,
) -> anyhow::Result<(f64, f64)> {
    let run = Run { cluster, wire, pages, samples, pool };
    Ok((run.quiet()?.fault.p50_us, run.evicting()?.fault.p50_us))
}

/// The median in microseconds of faults on memory that is coded, while nothing is evicted.
pub(super) fn coded_median(
    cluster: &Cluster,
    wire: SocketAddr,
    pages: u64,
    samples: u64,
) -> anyhow::Result<f64> {
    let run = Run { cluster, wire, pages, samples, pool: PoolMemory::Coded };
    Ok(run.coded()?.fault.p50_us)
}

struct Run<'a> {
    cluster: &'a Cluster,
    wire: SocketAddr,
    pages: u64,
    samples: u64,
    pool: PoolMemory,
}

impl Run<'_> {
    fn quiet(&self) -> anyhow::Result<Report> {
        let (local, ballast) = self.room();
        self.touch(local, &["--ballast", &ballast.to_string()])
    }

    fn evicting(&self) -> anyhow::Result<Report> {
        self.touch(self.pages / 2, &["--dirty"])
    }

    /// As [`Run::quiet`], once so much of the region is coded as whole stripes can be.
    fn coded(&self) -> anyhow::Result<Report> {
        let (local, ballast) = self.room();
        let mut command = self.command(local, &["--hold", "--ballast", &ballast.to_string()]);
        let mut guarded = Guarded::spawn(command.stdin(Stdio::piped()))?;
        let mut input = guarded.input()?;
        let lines = guarded.lines()?;
        let line = lines.next()?;
        ensure!(line.as_deref() == Some(HELD), "the program that touches pages says {line:?}");
        // Stripes at the ends of the region have memory in them that is in use.
        let wanted = pages_to_bytes(self.pages) / 4 * 3;
        eventually(CODING_PATIENCE, || {
            let nodes = self.cluster.status()?.nodes;
            let consumers = nodes.iter().flat_map(|node| &node.report.consumers);
            let coded =
                consumers.filter_map(|one| Some(one.stats.as_ref()?.pool.coded_bytes)).max();
            let coded = coded.unwrap_or_default();
            ensure!(coded >= wanted, "only {} of the memory are coded", Size(coded));
            Ok(())
        })?;
        writeln!(input)?;
        let line = lines.next()?;
        guarded.finish()?;
        parsed(line)
    }

    /// Returns the pages that may be local, and the pages of ballast that push the region out.
    fn room(&self) -> (u64, u64) {
        // A quarter more than the region, for the program's own heap and for what the pager keeps
        // free; ballast of half as much again than that, so that nothing else has a place.
        let local = self.pages / 4 * 5;
        (local, local / 2 * 3)
    }

    fn touch(&self, local_pages: u64, flags: &[&str]) -> anyhow::Result<Report> {
        let mut guarded = Guarded::spawn(self.command(local_pages, flags).stdin(Stdio::null()))?;
        let line = guarded.lines()?.next()?;
        guarded.finish()?;
        parsed(line)
    }

    fn command(&self, local_pages: u64, flags: &[&str]) -> Command {
        let mut command = self.cluster.run_own(pages_to_bytes(local_pages), self.pool, "touch");
        command
            .args(["--pages", &self.pages.to_string(), "--samples", &self.samples.to_string()])
            .args(["--wire", &self.wire.to_string()])
            .args(flags)
            .stdout(Stdio::piped());
        command
    }
}

fn parsed(line: Option<String>) -> anyhow::Result<Report> {
    let line = line.context("the program that touches pages says nothing")?;
    serde_json::from_str(&line).with_context(|| format!("not a report: {line:?}"))
}
