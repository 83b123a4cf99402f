//! `bench stream`: a sequential sweep over pool memory beside one plain TCP stream.

use super::Common;
use super::program::sweep::{Phase, Report};
use crate::bench::measure::beside::Beside;
use crate::bench::measure::stats::Spread;
use crate::bench::measure::wire;
use crate::bench::world::cluster::{Cluster, PoolMemory};
use crate::bench::world::process::Guarded;
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use hecaton_memory::{Size, pages_for_bytes};
use serde::Serialize;
use std::process::{Command, Stdio};

/// Arguments of `bench stream`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Memory that is swept over; a quarter of it may be local.
    #[arg(long, default_value = "1G")]
    size: Size,
    /// How often everything is measured; the medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    #[command(flatten)]
    beside: Beside,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Result<'a> {
    #[serde(flatten)]
    plain: &'a Sweeps,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted: Option<Compared<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Compared<'a>>,
    rounds: u32,
    region_bytes: u64,
    local_bytes: u64,
    processors_of: usize,
}

/// Figures of one kind of pool memory.
#[derive(Serialize)]
struct Sweeps {
    read_gbps: f64,
    write_gbps: f64,
    rewrite_gbps: f64,
    tcp_gbps: f64,
    read_ratio: f64,
    write_ratio: f64,
    /// The smaller of reading and writing, each against the plain stream.
    ratio: f64,
    spread: Spreads,
    /// Microseconds of processors for each page, medians: of all that the machine has.
    cpu_us_per_page: Costs,
    /// Processors that were busy, medians; the machine has `processors_of` of them.
    processors_busy: Costs,
}

/// The same with `--encrypt`, or over TLS.
#[derive(Serialize)]
struct Compared<'a> {
    #[serde(flatten)]
    sweeps: &'a Sweeps,
    /// Time of a sweep to that of one in the clear, each in plain streams of its own run.
    read_cost: f64,
    write_cost: f64,
}

#[derive(Serialize)]
struct Costs {
    read: f64,
    write: f64,
    rewrite: f64,
    tcp: f64,
}

#[derive(Serialize)]
struct Spreads {
    read: Spread,
    write: Spread,
    rewrite: Spread,
    tcp: Spread,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let size = if common.quick { Size(args.size.0.min(256 << 20)) } else { args.size };
    let rounds = if common.quick { args.rounds.min(3) } else { args.rounds };
    ensure!(rounds > 0, "--rounds 0 would measure nothing");
    let local = size.0 / 4;
    let scratch = common.scratch()?;
    let wire = wire::serve()?;

    let sweeps = |cluster: &Cluster, pool: PoolMemory, how: &str| {
        let local_size = Size(local);
        common
            .say(&format!("{rounds} rounds of sweeps over {size}, {local_size} of it local{how}"));
        let mut command = cluster.run_own(local, pool, "sweep");
        command
            .args(["--pages", &pages_for_bytes(size.0).to_string()])
            .args(["--rounds", &rounds.to_string(), "--wire", &wire.to_string()])
            .stdout(Stdio::piped());
        sweep(&mut command)
    };
    // One region may still be on its way back to the donors when the next is filled.
    let measured = args.beside.measure(common, size.0 * 2, scratch.path(), sweeps)?;
    let (encrypted, tls) = measured.compare(Compared::of);
    let result = Result {
        encrypted,
        tls,
        plain: &measured.plain,
        rounds,
        region_bytes: size.0,
        local_bytes: local,
        processors_of: std::thread::available_parallelism()?.get(),
    };
    if common.json {
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let mut table =
        Table::figures(["", "GB/s", "least", "most", "to TCP", "CPU µs a page", "CPUs busy"]);
    for (sweeps, how) in measured.each() {
        show(&mut table, sweeps, result.processors_of, how);
    }
    print!("{table}");
    for (how, compared) in [("Encrypted", &result.encrypted), ("Over TLS", &result.tls)] {
        if let Some(Compared { read_cost, write_cost, .. }) = compared {
            println!(
                "{how}, reading takes {read_cost:.2} × as long as without, and writing \
                 {write_cost:.2} ×, each in plain streams of its own run."
            );
        }
    }
    Ok(())
}

impl<'a> Compared<'a> {
    fn of(sweeps: &'a Sweeps, plain: &Sweeps) -> Compared<'a> {
        Compared {
            read_cost: plain.read_ratio / sweeps.read_ratio,
            write_cost: plain.write_ratio / sweeps.write_ratio,
            sweeps,
        }
    }
}

/// Runs the program that sweeps.
fn sweep(command: &mut Command) -> anyhow::Result<Sweeps> {
    let mut guarded = Guarded::spawn(command)?;
    let output = guarded.lines()?.next()?;
    guarded.finish()?;
    let output = output.context("the program that sweeps says nothing")?;
    let report: Report =
        serde_json::from_str(&output).with_context(|| format!("not a report: {output:?}"))?;

    let of = |values: &[f64]| Spread::of(values).context("a report without rounds");
    let spread = Spreads {
        read: of(&report.read_gbps)?,
        write: of(&report.write_gbps)?,
        rewrite: of(&report.rewrite_gbps)?,
        tcp: of(&report.tcp_gbps)?,
    };
    let costs = |of_phases: &[Vec<f64>; 4]| -> anyhow::Result<Costs> {
        let median = |phase: Phase| of(&of_phases[phase as usize]).map(|spread| spread.median);
        Ok(Costs {
            read: median(Phase::Read)?,
            write: median(Phase::Write)?,
            rewrite: median(Phase::Rewrite)?,
            tcp: median(Phase::Tcp)?,
        })
    };
    let read_ratio = spread.read.median / spread.tcp.median;
    let write_ratio = spread.write.median / spread.tcp.median;
    Ok(Sweeps {
        read_gbps: spread.read.median,
        write_gbps: spread.write.median,
        rewrite_gbps: spread.rewrite.median,
        tcp_gbps: spread.tcp.median,
        read_ratio,
        write_ratio,
        ratio: read_ratio.min(write_ratio),
        cpu_us_per_page: costs(&report.cpu_us)?,
        processors_busy: costs(&report.processors)?,
        spread,
    })
}

fn show(table: &mut Table, sweeps: &Sweeps, processors: usize, how: &str) {
    let (cpu, busy) = (&sweeps.cpu_us_per_page, &sweeps.processors_busy);
    for (name, of, cpu, busy) in [
        (format!("read{how}"), &sweeps.spread.read, cpu.read, busy.read),
        (format!("write{how}"), &sweeps.spread.write, cpu.write, busy.write),
        (
            format!("overwrite (in and out again){how}"),
            &sweeps.spread.rewrite,
            cpu.rewrite,
            busy.rewrite,
        ),
        ("one plain TCP stream".to_owned(), &sweeps.spread.tcp, cpu.tcp, busy.tcp),
    ] {
        let number = |value: f64| format!("{value:.2}");
        table.row([
            name,
            number(of.median),
            number(of.min),
            number(of.max),
            format!("{:.2} ×", of.median / sweeps.tcp_gbps),
            number(cpu),
            format!("{busy:.1} of {processors}"),
        ]);
    }
}
