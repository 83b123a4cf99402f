//! `bench failover`: what a program notices when its donors fail, and when copies are made.
//!
//! A program with two copies of each page touches its memory all the time. Meanwhile donors are
//! killed, stopped and cut off one after the other. The bench compares the longest access after a
//! failure with the longest access of an equally long time without one.
//!
//! Each node is on a host of its own, a network namespace, where the machine allows that. Elsewhere
//! an embedded cluster takes their place: no host can be cut off then, and none can lose its
//! memory.

mod copying;
mod failing;
mod mirroring;
mod stalls;
mod steady;

use super::Common;
use crate::bench::measure::stats::Spread;
use crate::bench::measure::wire::{self, Wire};
use crate::bench::world::cluster::Cluster;
use crate::bench::world::hosts::{HOSTS, Hosts, LENDERS};
use crate::bench::world::process::eventually;
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use copying::AtLimit;
use failing::{Donor, Failure};
use hecaton_memory::{Size, pages_for_bytes};
use hecaton_netns::{NetError, Network};
use hecaton_pager::COPYING_BYTES_PER_S;
use mirroring::{Faults, Mirroring};
use serde::Serialize;
use stalls::Stalls;
use std::{net::SocketAddr, path::Path, time::Duration};
use steady::Steady;

/// Arguments of `bench failover`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often a donor fails in each way.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    failures: u16,
    /// Memory of the program; half of it may be local.
    #[arg(long, default_value = "512M")]
    size: Size,
    /// Limits of copying to compare, in bytes a second: what `--copying` of `hecaton run` takes.
    /// One that is never reached shows what donors can do.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "950M,1T")]
    copying: Vec<Size>,
    /// Limits the link of each host to this rate each way, in Gbit/s; without it, the machine's
    /// speed of copying is the limit.
    #[arg(long, value_name = "GBITS", value_parser = clap::value_parser!(u16).range(1..=1000))]
    link: Option<u16>,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Report {
    /// Whether each node was on a host of its own.
    on_hosts: bool,
    /// Rate limit of each host's link, in Gbit/s; `None`: no limit.
    link_gbits: Option<u16>,
    region_bytes: u64,
    copies: u8,
    killed: Stalls,
    stopped: Stalls,
    cut_off: Option<Stalls>,
    copying: Vec<AtLimit>,
    /// One plain TCP stream between two donors' hosts, median.
    tcp_gbps: f64,
    mirroring: Mirroring,
    /// Parts that were not measured, and why.
    skipped: Vec<String>,
}

/// How long a donor that was killed may take to be back.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where it is measured.
struct Site {
    // Before the hosts that it is on.
    cluster: Cluster,
    hosts: Option<Hosts>,
}

impl Site {
    fn start(network: Option<Network>, lend_bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        let Some(network) = network else {
            let donors = LENDERS.len() as u64;
            let cluster = Cluster::start(donors as u32, lend_bytes * donors, &dir.join("cluster"))?;
            return Ok(Self { cluster, hosts: None });
        };
        let hosts = Hosts::start(network, lend_bytes, dir)?;
        Ok(Self { cluster: hosts.cluster()?, hosts: Some(hosts) })
    }

    /// Returns the donors as soon as all of them have a process. The status they come from may be
    /// up to a second old.
    fn donors(&self) -> anyhow::Result<Vec<Donor>> {
        eventually(PATIENCE, || {
            let nodes = self.cluster.status()?.nodes;
            let donors: Vec<_> = nodes
                .into_iter()
                .flat_map(|node| node.report.donors)
                .filter_map(|donor| Some(Donor { name: donor.name, pid: donor.pid? }))
                .filter(|donor| Path::new(&format!("/proc/{}", donor.pid)).exists())
                .collect();
            ensure!(donors.len() == LENDERS.len(), "only {} donors have a process", donors.len());
            Ok(donors)
        })
    }

    /// Answers plain TCP, where the first donor is.
    fn wire(&self) -> anyhow::Result<SocketAddr> {
        let Some(hosts) = &self.hosts else { return wire::serve() };
        let host = hosts.network.host(LENDERS[0]);
        host.namespace().enter(|| wire::serve_at(host.address()))
    }

    /// Asks for plain TCP, where the second donor is.
    fn ask(&self, wire: SocketAddr) -> anyhow::Result<Wire> {
        let Some(hosts) = &self.hosts else { return Wire::connect(wire) };
        hosts.network.host(LENDERS[1]).namespace().enter(|| Wire::connect(wire))
    }
}

/// Bytes of one measurement of the plain stream, and how many measurements are taken.
const STREAM_BYTES: u64 = 512 << 20;
const STREAMS: usize = 5;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    ensure!(
        common.manager.is_none(),
        "`bench failover` kills donors of a cluster that it starts itself: leave --manager out"
    );
    let size = if common.quick { Size(args.size.0.min(128 << 20)) } else { args.size };
    let failures = usize::from(if common.quick { args.failures.min(3) } else { args.failures });
    let mut skipped = Vec::new();
    let network = match Network::new(HOSTS) {
        Ok(network) => Some(network),
        Err(error @ (NetError::NotPermitted(_) | NetError::Missing { .. })) => {
            for what in ["cut_off", "rebuild"] {
                skipped.push(format!("{what}: {error}"));
                common.say(&format!("SKIPPED: {what}: {error}"));
            }
            None
        }
        Err(error) => return Err(error.into()),
    };
    match (&network, args.link) {
        (Some(network), Some(link)) => network.limit(link)?,
        (None, Some(_)) => {
            skipped.push("link: there are no hosts whose links could be limited".into())
        }
        (_, None) => {}
    }
    let link_gbits = args.link.filter(|_| network.is_some());
    let scratch = common.scratch()?;
    // Two copies of everything, on two of three donors, and what is not given back yet.
    let mut site = Site::start(network, size.0 * 2, scratch.path())?;
    let wire = site.wire()?;

    common.say("one plain TCP stream");
    let mut stream = site.ask(wire)?;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(STREAM_BYTES as f64 / stream.ask(STREAM_BYTES)?.as_secs_f64() / 1e9);
    }
    let tcp_gbps = Spread::of(&streams).context("no stream")?.median;

    let pages = pages_for_bytes(size.0);
    let mut program = Steady::start(&site.cluster, pages, Size(COPYING_BYTES_PER_S))?;
    let mut stalls = |what: &str, failure| {
        common.say(&format!("{failures} times: a donor is {what}"));
        stalls::measure(&site, &mut program, failure, failures)
    };
    let killed = stalls("killed", Failure::Killed)?;
    let stopped = stalls("stopped", Failure::Stopped)?;
    let is_on_hosts = site.hosts.is_some();
    let cut_off = is_on_hosts.then(|| stalls("cut off", Failure::CutOff)).transpose()?;
    program.end()?;
    let mut copying = Vec::new();
    for limit in &args.copying {
        common.say(&format!("copying {limit} a second: a donor drains, and one loses its memory"));
        copying.push(copying::at_limit(&mut site, (pages, *limit), tcp_gbps)?);
    }

    common.say("faults with one copy, with two, encrypted, and coded");
    let faults = Faults::new(size, common.quick);
    let mirroring = faults.measure(&site.cluster, wire, scratch.path())?;
    let report = Report {
        on_hosts: is_on_hosts,
        link_gbits,
        region_bytes: size.0,
        copies: 2,
        killed,
        stopped,
        cut_off,
        copying,
        tcp_gbps,
        mirroring,
        skipped,
    };
    match common.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => show(&report),
    }
    Ok(())
}

fn show(report: &Report) {
    let ms = |value: f64| format!("{value:.1}");
    let mut table = Table::figures([
        "longest stall, ms",
        "failures",
        "p50",
        "p99",
        "max",
        "aim",
        "quiet p50",
        "quiet p99",
        "quiet max",
    ]);
    let stalls = [
        ("a donor is killed", Some(&report.killed)),
        ("a donor is stopped", Some(&report.stopped)),
        ("a donor is cut off", report.cut_off.as_ref()),
    ];
    for (name, of) in stalls.into_iter().filter_map(|(name, of)| Some((name, of?))) {
        table.row([
            name.to_owned(),
            of.failures.to_string(),
            ms(of.p50_ms),
            ms(of.p99_ms),
            ms(of.max_ms),
            format!("{:.0}", of.aim_max_ms),
            ms(of.quiet_p50_ms),
            ms(of.quiet_p99_ms),
            ms(of.quiet_max_ms),
        ]);
    }
    println!("{table}");

    let mut table = Table::figures([
        "copying",
        "MB",
        "GB/s",
        "to TCP",
        "aim",
        "limit, GB/s",
        "fault p50 µs",
        "quiet p50 µs",
        "to quiet",
        "aim",
    ]);
    let copying = report.copying.iter().flat_map(|at| {
        let of = [("draining", Some(&at.drain)), ("after a loss", at.rebuild.as_ref())];
        of.into_iter().filter_map(|(name, of)| Some((name, at.limit_gbps, of?)))
    });
    for (name, limit, of) in copying {
        table.row([
            name.to_owned(),
            format!("{:.0}", of.bytes as f64 / 1e6),
            format!("{:.2}", of.gbps),
            format!("{:.2} ×", of.to_tcp),
            format!("{:.1} ×", of.aim_to_tcp),
            format!("{limit:.2}"),
            format!("{:.1}", of.fault_p50_us),
            format!("{:.1}", of.quiet_fault_p50_us),
            format!("{:.2} ×", of.fault_ratio),
            format!("{:.1} ×", of.aim_fault_ratio),
        ]);
    }
    println!("{table}");
    mirroring::show(&report.mirroring);
    for what in &report.skipped {
        println!("\nnot measured: {what}");
    }
}
