//! `bench vm`: virtual machines on pool memory beside plain memory and disk swap.
//!
//! Measures the memory figures of the Hecatonchire paper (2014, section 4) with the same guest in
//! one run. Adds two figures that the paper lacks: the latency of a fault, and the cost of one
//! guest's storm to another. The machines of a comparison run at the same time and take turns, so
//! that other load on the host meets all alike.
//!
//! Guests are emulated (TCG): their processors are slow, and so a given amount of paging weighs
//! less beside their work than it would under KVM.

mod copying;
mod fairness;
mod faults;
mod queries;
mod usage;

use super::Common;
use super::machine::kit::{Kit, KitArgs, PROCESSORS};
use super::machine::{Machine, Memory};
use crate::bench::world::cluster::Cluster;
use crate::bench::world::interrupt;
use anyhow::ensure;
use clap::ValueEnum;
use hecaton_memory::Size;
use serde::Serialize;
use std::{collections::BTreeMap, path::Path, time::Duration};

/// Arguments of `bench vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    kit: KitArgs,
    /// Memory of each guest.
    #[arg(long, default_value = "768M")]
    memory: Size,
    /// How often everything is measured; the medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Seconds after which six copies of an overprovisioned guest are given up.
    #[arg(long, default_value_t = 120)]
    limit_s: u64,
    #[command(flatten)]
    common: Common,
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// mbw, as in figure 7 of the Hecatonchire paper.
    Copying,
    /// A database, as in its table 2.
    Queries,
    /// The cost of a fault to a guest.
    Faults,
    /// The cost of one guest's storm to another guest.
    Fairness,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Queries => "queries",
            Self::Faults => "faults",
            Self::Fairness => "fairness",
        }
    }
}

#[derive(Serialize)]
struct Report {
    hypervisor: String,
    accelerator: &'static str,
    processors: u32,
    memory_bytes: u64,
    rounds: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    copying: Option<copying::Copying>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queries: Option<queries::Queries>,
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<faults::Faults>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fairness: Option<fairness::Fairness>,
    /// Parts without a result, and why.
    failures: BTreeMap<&'static str, String>,
}

/// Below this, the guest's kernel and programs are what is measured.
const MIN_MEMORY: u64 = 384 << 20;

/// Shared parameters of all parts.
struct Bench<'a> {
    kit: &'a Kit,
    one_donor: &'a Cluster,
    two_donors: &'a Cluster,
    memory: u64,
    rounds: usize,
    limit: Duration,
    dir: &'a Path,
    common: &'a Common,
}

impl Bench<'_> {
    fn say(&self, what: &str) {
        self.common.say(what);
    }

    fn start<'b>(&self, name: &str, bytes: u64, memory: Memory<'b>) -> anyhow::Result<Machine<'b>> {
        Machine::start(self.kit, name, bytes, memory, self.dir)
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    ensure!(
        common.manager.is_none(),
        "`bench vm` compares one donor with two, on clusters that it starts itself: leave --manager out"
    );
    let memory = if common.quick { args.memory.0.min(512 << 20) } else { args.memory.0 };
    let memory = memory >> 20 << 20;
    ensure!(memory >= MIN_MEMORY, "--memory {} is less than {}", args.memory, Size(MIN_MEMORY));
    let rounds = if common.quick { 1 } else { args.rounds };
    ensure!(rounds > 0, "--rounds 0 would measure nothing");
    let scratch = common.scratch()?;
    let kit = Kit::find(&args.kit, scratch.path())?;
    // At most four guests at a time have their memory in one of them, and what they had may still
    // be on its way back.
    let start = |name: &str, donors| Cluster::start(donors, memory * 4, &scratch.path().join(name));
    let (one_donor, two_donors) = (start("one", 1)?, start("two", 2)?);
    let bench = Bench {
        kit: &kit,
        one_donor: &one_donor,
        two_donors: &two_donors,
        memory,
        rounds,
        limit: Duration::from_secs(args.limit_s),
        dir: scratch.path(),
        common,
    };
    let mut failures = BTreeMap::new();
    let mut parts = Parts { bench: &bench, only: &args.only, failures: &mut failures };
    let copying = parts.run(Part::Copying, copying::run)?;
    let queries = parts.run(Part::Queries, queries::run)?;
    let faults = parts.run(Part::Faults, faults::run)?;
    let fairness = parts.run(Part::Fairness, fairness::run)?;
    let report = Report {
        hypervisor: kit.version.clone(),
        accelerator: "tcg",
        processors: PROCESSORS,
        memory_bytes: memory,
        rounds,
        copying,
        queries,
        faults,
        fairness,
        failures,
    };
    if common.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        show(&report);
    }
    let failed: Vec<_> = report.failures.keys().copied().collect();
    ensure!(failed.is_empty(), "no result of: {}", failed.join(", "));
    Ok(())
}

/// The parts one after the other: one that fails does not take the results of the others along.
struct Parts<'a, 'b> {
    bench: &'a Bench<'b>,
    only: &'a [Part],
    failures: &'a mut BTreeMap<&'static str, String>,
}

impl<'b> Parts<'_, 'b> {
    fn run<T>(
        &mut self,
        part: Part,
        run: impl FnOnce(&Bench<'b>) -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        if !self.only.is_empty() && !self.only.contains(&part) {
            return Ok(None);
        }
        match run(self.bench) {
            Ok(result) => Ok(Some(result)),
            Err(error) => {
                interrupt::check()?;
                self.failures.insert(part.name(), format!("{error:#}"));
                Ok(None)
            }
        }
    }
}

fn show(report: &Report) {
    println!("{}, emulated; {} processors", report.hypervisor, report.processors);
    if let Some(copying) = &report.copying {
        println!();
        copying::show(copying);
    }
    if let Some(queries) = &report.queries {
        println!();
        queries::show(queries);
    }
    if let Some(faults) = &report.faults {
        println!();
        faults::show(faults);
    }
    if let Some(fairness) = &report.fairness {
        println!();
        fairness::show(fairness);
    }
    for (part, why) in &report.failures {
        println!("\n{part}: no result: {why}");
    }
}
