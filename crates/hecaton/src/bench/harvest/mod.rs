//! `bench harvest`: how fast harvest VMs give their memory back, by the figures 6 and 7 of
//! "Memory-Harvesting VMs in Cloud Platforms" (2022, section 6.2).
//!
//! Ways of asking the same guest take turns within a round. The result is how many times as fast as
//! stock settings each way is. Guests are emulated (TCG): their processors are slow, and their work
//! on memory weighs more than it would under KVM.
//!
//! The host's part is played by the bench itself, with nothing else that an agent does between two
//! looks: no broker, no buffer, nobody who waits.

mod arrivals;
mod fragmentation;
mod guest;
mod loads;
mod plan;
mod reclaim;
mod shrink;
mod together;
mod ways;

use super::Place;
use super::machine::kit::{Kit, KitArgs, PROCESSORS};
use crate::bench::world::interrupt;
use crate::report::{self, plot::escape};
use anyhow::ensure;
use clap::ValueEnum;
use hecaton_memory::Size;
use loads::Load;
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Arguments of `bench harvest`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    kit: KitArgs,
    /// Memory that a guest gives back in each round.
    #[arg(long, default_value = "1G")]
    reclaim: Size,
    /// Memory asked for at once, in ways that have batches.
    #[arg(long, default_value = "256M")]
    batch: Size,
    /// How often everything is measured; the medians are reported.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Only under these loads, of one guest.
    #[arg(long, value_enum, value_delimiter = ',')]
    load: Vec<Load>,
    /// Seconds after which a guest that has not given all is given up; what it gave until then
    /// counts.
    #[arg(long, default_value_t = 60)]
    limit_s: u64,
    /// Seconds that an hour of arrivals is replayed in, for each host and each buffer.
    #[arg(long, default_value_t = 60)]
    hour_s: u32,
    /// Draws the figures of the paper into this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Small sizes and one round: a try, not a measurement.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    place: Place,
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// One guest, in all ways and under all loads.
    Reclaim,
    /// Several guests at the same time.
    Together,
    /// The share of whole huge pages in the memory that an application gives back.
    Fragmentation,
    /// Regular VMs that come and go.
    Arrivals,
}

/// Sizes of a guest's memory, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sizes {
    /// Memory that the guest always has.
    #[serde(rename = "base_bytes")]
    base: u64,
    /// Size of the guest's virtio-mem device, which is full before each measurement.
    #[serde(rename = "device_bytes")]
    device: u64,
    #[serde(rename = "reclaim_bytes")]
    reclaim: u64,
    #[serde(rename = "batch_bytes")]
    batch: u64,
    /// Memory that the application leaves to the rest of the guest.
    #[serde(rename = "reserve_bytes")]
    reserve: u64,
}

impl Sizes {
    /// A guest keeps a third of what it can harvest, so that an application can be full and has
    /// somewhere to go.
    fn of(reclaim: u64, batch: u64) -> anyhow::Result<Self> {
        let (reclaim, batch) = (reclaim / BLOCK * BLOCK, batch / BLOCK * BLOCK);
        ensure!(reclaim >= LEAST, "--reclaim is to be {} at least", Size(LEAST));
        ensure!(
            batch > 0 && batch <= reclaim,
            "--batch is to be from {} to what --reclaim is, {}",
            Size(BLOCK),
            Size(reclaim)
        );
        let device = (reclaim + reclaim / 2).next_multiple_of(MEMORY_BLOCK);
        Ok(Self { base: BASE, device, reclaim, batch, reserve: RESERVE })
    }
}

/// Blocks of the device, and memory blocks of the kernel, in bytes.
const BLOCK: u64 = 2 << 20;
const MEMORY_BLOCK: u64 = 128 << 20;

/// Below this, how long it takes to ask is what is measured.
const LEAST: u64 = 256 << 20;

/// Holds the guest's kernel and programs, which the application must leave their memory.
const BASE: u64 = 768 << 20;
const RESERVE: u64 = 512 << 20;

#[derive(Serialize)]
struct Report {
    hypervisor: String,
    accelerator: &'static str,
    processors: u32,
    #[serde(flatten)]
    sizes: Sizes,
    rounds: usize,
    limit_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaim: Option<reclaim::Reclaim>,
    #[serde(skip_serializing_if = "Option::is_none")]
    together: Option<together::Together>,
    /// Why there is nothing of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    together_failure: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fragmentation: Option<fragmentation::Fragmentation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arrivals: Option<arrivals::Arrivals>,
}

/// Shared parameters of all parts.
struct Bench<'a> {
    kit: &'a Kit,
    loads: &'a [Load],
    sizes: Sizes,
    rounds: usize,
    limit: Duration,
    dir: &'a Path,
}

impl Bench<'_> {
    fn say(&self, what: &str) {
        eprintln!("bench: {what}");
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (rounds, shrunk) = if args.quick { (1, 2) } else { (args.rounds, 1) };
    ensure!(rounds > 0, "--rounds 0 would measure nothing");
    let sizes = Sizes::of(args.reclaim.0 / shrunk, args.batch.0 / shrunk)?;
    let scratch = args.place.scratch()?;
    let kit = Kit::find(&args.kit, scratch.path())?;
    let limit = Duration::from_secs(args.limit_s);
    let bench = Bench { kit: &kit, loads: &args.load, sizes, rounds, limit, dir: scratch.path() };
    let is_wanted = |part: Part| args.only.is_empty() || args.only.contains(&part);
    let reclaim = is_wanted(Part::Reclaim).then(|| reclaim::run(&bench)).transpose()?;
    let (together, together_failure) =
        match is_wanted(Part::Together).then(|| together::run(&bench)).transpose() {
            Ok(together) => (together, None),
            Err(error) => {
                interrupt::check()?;
                (None, Some(format!("{error:#}")))
            }
        };
    let fragmentation =
        is_wanted(Part::Fragmentation).then(|| fragmentation::run(&bench)).transpose()?;
    let hour_s = f64::from(if args.quick { args.hour_s / 2 } else { args.hour_s }.max(1));
    let arrivals = is_wanted(Part::Arrivals).then(|| arrivals::run(&bench, hour_s)).transpose()?;
    let report = Report {
        hypervisor: kit.version.clone(),
        accelerator: "tcg",
        processors: PROCESSORS,
        sizes,
        rounds,
        limit_s: args.limit_s,
        reclaim,
        together,
        together_failure,
        fragmentation,
        arrivals,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        show(&report);
    }
    if let Some(file) = &args.html {
        report::write(file, &page(&report))?;
    }
    let is_whole = report.reclaim.as_ref().is_none_or(reclaim::Reclaim::is_whole)
        && report.together_failure.is_none()
        && report.fragmentation.as_ref().is_none_or(|pages| pages.failure.is_none())
        && report.arrivals.as_ref().is_none_or(|arrivals| arrivals.failure.is_none());
    ensure!(is_whole, "not all could be measured");
    Ok(())
}

fn show(report: &Report) {
    let sizes = &report.sizes;
    println!(
        "{}, emulated; {} processors; {} MiB and {} MiB of virtio-mem, of which {} MiB are given, with batches {} \
         at once",
        report.hypervisor,
        report.processors,
        sizes.base >> 20,
        sizes.device >> 20,
        sizes.reclaim >> 20,
        sizes.batch >> 20
    );
    if let Some(reclaim) = &report.reclaim {
        println!();
        reclaim::show(reclaim);
    }
    if let Some(together) = &report.together {
        println!();
        together::show(together);
    }
    if let Some(why) = &report.together_failure {
        println!("\ntogether: no result: {why}");
    }
    if let Some(fragmentation) = &report.fragmentation {
        println!();
        fragmentation::show(fragmentation);
    }
    if let Some(arrivals) = &report.arrivals {
        println!();
        arrivals::show(arrivals);
    }
}

/// The figures.
fn page(report: &Report) -> String {
    let mut body = format!(
        "<p>After the figures of \u{201c}Memory-Harvesting VMs in Cloud Platforms\u{201d} (2022). Guests of {}, emulated, with {} \
         processors: what counts is how the bars of one figure are to each other.</p>\n",
        escape(&report.hypervisor),
        report.processors
    );
    if let Some(reclaim) = &report.reclaim {
        reclaim::html(reclaim, &mut body);
    }
    if let Some(together) = &report.together {
        together::html(together, &mut body);
    }
    if let Some(fragmentation) = &report.fragmentation {
        fragmentation::html(fragmentation, &mut body);
    }
    if let Some(arrivals) = &report.arrivals {
        arrivals::html(arrivals, &mut body);
    }
    report::page("How harvest VMs give their memory back", &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_such_that_guests_can_have_them() {
        let sizes = Sizes::of(1 << 30, 256 << 20).unwrap();
        assert_eq!((sizes.device >> 20, sizes.reclaim >> 20, sizes.batch >> 20), (1536, 1024, 256));
        let odd = Sizes::of((300 << 20) + 1, (3 << 20) + 1).unwrap();
        assert_eq!((odd.device >> 20, odd.reclaim >> 20, odd.batch >> 20), (512, 300, 2));
        for (reclaim, batch) in [(128 << 20, 64 << 20), (1 << 30, 2 << 30), (1 << 30, 1 << 20)] {
            assert!(Sizes::of(reclaim, batch).is_err(), "{reclaim} {batch}");
        }
    }
}
