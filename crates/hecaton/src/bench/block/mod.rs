//! `bench block`: a volume beside servers that have their data in their own memory.
//!
//! fio is the client of all over NBD, and a driver of this bench's own of those that are drives
//! over vhost-user. Within a round each workload goes to every server in turn, each round beginning
//! with another one; ratios are taken within a round and a front, so that what the machine does
//! meanwhile is in both sides of them.

mod drive;
mod fio;
mod server;

use super::Common;
use crate::bench::measure::busy::Busy;
use crate::bench::measure::stats::{Latencies, Spread};
use crate::bench::measure::wire::{self, Wire};
use crate::bench::world::cluster::Cluster;
use crate::bench::world::interrupt;
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use fio::{Measured, Workload};
use hecaton_memory::{PAGE_SIZE, Size};
use serde::Serialize;
use server::{Kind, Server};
use std::{collections::BTreeMap, net::SocketAddr, path::Path};

/// Arguments of `bench block`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The size of each device, all of which is used.
    #[arg(long, default_value = "512M")]
    size: Size,
    /// How often everything is measured; the medians are reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How long each workload is measured at each server, in each round.
    #[arg(long, value_name = "SECONDS", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measures a volume with `--encrypt` too, beside the one without.
    #[arg(long)]
    encrypt: bool,
    #[command(flatten)]
    common: Common,
}

/// Plain round trips in each round.
const ROUND_TRIPS: u32 = 2000;

/// Bytes sent over a plain TCP stream in each round.
const STREAM_BYTES: u64 = 1 << 30;

/// How long a workload runs before it counts, in seconds.
const RAMP_S: u32 = 1;

/// Protocol that a server speaks; all servers of one protocol are measured by the same client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Front {
    Nbd,
    VhostUser,
}

impl Front {
    /// A server's name, of those that are asked in several ways.
    fn of(self, server: &str) -> String {
        match self {
            Front::Nbd => server.to_owned(),
            Front::VhostUser => format!("{server}, vhost-user"),
        }
    }
}

/// A server, asked in one way.
struct Target<'a> {
    kind: Kind,
    at: Address<'a>,
}

enum Address<'a> {
    Nbd(&'a str),
    VhostUser(&'a Path),
}

impl Target<'_> {
    fn measure(&self, workload: &Workload, bytes: u64, seconds: u32) -> anyhow::Result<Point> {
        let busy = Busy::start()?;
        let measured = match self.at {
            Address::Nbd(uri) => fio::measure(uri, workload, bytes, seconds),
            Address::VhostUser(socket) => drive::measure(socket, workload, bytes, seconds),
        }?;
        let (_, processor_s) = busy.stop()?;
        let requests = measured.per_s * f64::from(RAMP_S + seconds);
        Ok(Point { measured, cpu_us: processor_s / requests * 1e6 })
    }

    fn front(&self) -> Front {
        match self.at {
            Address::Nbd(_) => Front::Nbd,
            Address::VhostUser(_) => Front::VhostUser,
        }
    }
}

#[derive(Serialize)]
struct Report {
    rounds: usize,
    seconds: u32,
    device_bytes: u64,
    /// Medians of plain round trips: 4 KiB over a loopback connection, with blocking sockets.
    tcp_rtt_us: Spread,
    processors_of: usize,
    workloads: Vec<WorkloadReport>,
    /// Servers that were not measured, and why.
    skipped: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct WorkloadReport {
    workload: &'static str,
    block_bytes: u64,
    depth: u32,
    /// Processor time of both ends for so many bytes of one plain TCP stream: what one hop takes at
    /// least.
    hop_cpu_us: f64,
    servers: Vec<ServerReport>,
}

#[derive(Serialize)]
struct ServerReport {
    server: &'static str,
    front: Front,
    requests_per_s: Spread,
    mb_per_s: f64,
    p50_us: Spread,
    p99_us: Spread,
    /// Processor time of the whole machine for each request, the client's included.
    cpu_us: Spread,
    /// Requests of hecaton in a second to those of this server, of each round and over the same
    /// front.
    hecaton_ratio: Option<Spread>,
    /// Excess of hecaton's median request time over this server's, in plain round trips.
    hecaton_round_trips_more: Option<f64>,
}

/// One workload at one server in one round.
#[derive(Clone, Copy, Debug)]
struct Point {
    measured: Measured,
    cpu_us: f64,
}

/// Points of one workload: for each target, one of each round.
type Series = Vec<Vec<Point>>;

/// Medians of plain TCP, with which all servers are compared.
#[derive(Clone, Copy)]
struct Yardstick {
    round_trip_us: f64,
    /// Processor time of both ends of a plain stream.
    cpu_us_per_byte: f64,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let rounds = if common.quick { 1 } else { args.rounds };
    let seconds = if common.quick { 1 } else { args.seconds };
    let bytes = if common.quick { args.size.0.min(64 << 20) } else { args.size.0 };
    ensure!(rounds > 0, "--rounds 0 would measure nothing");
    let is_whole = bytes > 0 && bytes.is_multiple_of(1 << 20);
    ensure!(is_whole, "--size {}: give a multiple of 1M", args.size);
    fio::require_fio()?;
    let scratch = common.scratch()?;
    let kinds = Kind::all(args.encrypt);
    let volumes = kinds.iter().filter(|kind| kind.is_ours()).count() as u64;
    let lent = volumes * bytes / 4 * 5;
    let cluster = Cluster::find_or_start(common.manager.as_deref(), lent, scratch.path())?;
    let mut skipped = BTreeMap::new();
    let mut servers = Vec::new();
    for kind in kinds {
        match Server::start(kind, bytes, &cluster, scratch.path()) {
            Ok(server) => servers.push((kind, server)),
            Err(error) if kind.is_ours() => return Err(error),
            Err(error) => {
                interrupt::check()?;
                common.say(&format!("WITHOUT {}: {error:#}", kind.name()));
                skipped.insert(kind.name(), format!("{error:#}"));
            }
        }
    }
    for (kind, server) in &servers {
        common.say(&format!("filling {}", kind.name()));
        fio::fill(&server.uri, bytes).with_context(|| format!("filling {}", kind.name()))?;
    }
    let targets = targets(&servers)?;
    let wire = wire::serve()?;
    let (mut round_trips, mut streams) = (Vec::new(), Vec::new());
    let mut series: Vec<Series> = vec![vec![Vec::new(); targets.len()]; Workload::ALL.len()];
    for round in 0..rounds {
        round_trips.push(round_trip_us(wire)?);
        streams.push(stream_cpu_us_per_byte(wire)?);
        for (workload, series) in Workload::ALL.iter().zip(&mut series) {
            for turn in 0..targets.len() {
                let at = (turn + round) % targets.len();
                let target = &targets[at];
                let name = target.front().of(target.kind.name());
                common.say(&format!("round {} of {rounds}: {}, {name}", round + 1, workload.name));
                let measured = target.measure(workload, bytes, seconds);
                series[at].push(measured.with_context(|| format!("{} at {name}", workload.name))?);
                interrupt::check()?;
            }
        }
    }
    let tcp_rtt_us = Spread::of(&round_trips).context("there is no round")?;
    let yardstick = Yardstick {
        round_trip_us: tcp_rtt_us.median,
        cpu_us_per_byte: Spread::of(&streams).context("there is no round")?.median,
    };
    let of: Vec<_> = targets.iter().map(|target| (target.kind, target.front())).collect();
    let workloads = Workload::ALL.iter().zip(&series);
    let workloads = workloads.map(|(workload, series)| report(workload, &of, series, yardstick));
    let workloads = workloads.collect::<Option<Vec<_>>>().context("there is no round")?;
    let device_bytes = bytes;
    let processors_of = std::thread::available_parallelism()?.get();
    let report =
        Report { rounds, seconds, device_bytes, tcp_rtt_us, processors_of, workloads, skipped };
    if common.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        show(&report);
    }
    Ok(())
}

/// Each server, and those that are drives once more.
fn targets<'a>(servers: &'a [(Kind, Server<'a>)]) -> anyhow::Result<Vec<Target<'a>>> {
    let mut targets = Vec::new();
    for (kind, server) in servers {
        targets.push(Target { kind: *kind, at: Address::Nbd(&server.uri) });
        if let Some(socket) = &server.drive {
            drive::check(socket).with_context(|| format!("the drive of {}", kind.name()))?;
            targets.push(Target { kind: *kind, at: Address::VhostUser(socket) });
        }
    }
    Ok(targets)
}

/// The median of plain round trips.
fn round_trip_us(wire: SocketAddr) -> anyhow::Result<f64> {
    let mut wire = Wire::connect(wire)?;
    let mut latencies = Latencies::new();
    for _ in 0..ROUND_TRIPS {
        latencies.record(wire.ask(PAGE_SIZE as u64)?);
    }
    Ok(latencies.percentiles().p50_us)
}

/// Processor time of both ends of a plain TCP stream, in µs for each byte.
fn stream_cpu_us_per_byte(wire: SocketAddr) -> anyhow::Result<f64> {
    let mut wire = Wire::connect(wire)?;
    let busy = Busy::start()?;
    wire.ask(STREAM_BYTES)?;
    let (_, processor_s) = busy.stop()?;
    Ok(processor_s / STREAM_BYTES as f64 * 1e6)
}

/// Nothing if there was no round.
fn report(
    workload: &Workload,
    targets: &[(Kind, Front)],
    series: &Series,
    yardstick: Yardstick,
) -> Option<WorkloadReport> {
    let of = |at: usize, value: fn(&Measured) -> f64| -> Vec<f64> {
        series[at].iter().map(|point| value(&point.measured)).collect()
    };
    let Yardstick { round_trip_us, cpu_us_per_byte } = yardstick;
    let mut servers = Vec::new();
    for (at, (kind, front)) in targets.iter().enumerate() {
        let ours = targets.iter().position(|target| *target == (Kind::Hecaton, *front))?;
        let our_p50_us = Spread::of(&of(ours, |measured| measured.p50_us))?.median;
        let requests_per_s = Spread::of(&of(at, |measured| measured.per_s))?;
        let p50_us = Spread::of(&of(at, |measured| measured.p50_us))?;
        let rounds = series[ours].iter().zip(&series[at]);
        let ratios = rounds.map(|(ours, peer)| ours.measured.per_s / peer.measured.per_s);
        let ratios: Vec<f64> = ratios.collect();
        let cpu_us: Vec<f64> = series[at].iter().map(|point| point.cpu_us).collect();
        let is_peer = at != ours;
        servers.push(ServerReport {
            server: kind.name(),
            front: *front,
            mb_per_s: requests_per_s.median * workload.block_bytes as f64 / 1e6,
            requests_per_s,
            p99_us: Spread::of(&of(at, |measured| measured.p99_us))?,
            cpu_us: Spread::of(&cpu_us)?,
            hecaton_ratio: if is_peer { Spread::of(&ratios) } else { None },
            hecaton_round_trips_more: is_peer.then(|| (our_p50_us - p50_us.median) / round_trip_us),
            p50_us,
        });
    }
    let Workload { name, block_bytes, depth, .. } = *workload;
    let hop_cpu_us = cpu_us_per_byte * block_bytes as f64;
    Some(WorkloadReport { workload: name, block_bytes, depth, hop_cpu_us, servers })
}

fn show(report: &Report) {
    println!(
        "Medians of {} rounds of {} s, least and most; devices of {}; a plain round trip takes {:.1} µs; {} processors",
        report.rounds,
        report.seconds,
        Size(report.device_bytes),
        report.tcp_rtt_us.median,
        report.processors_of
    );
    for workload in &report.workloads {
        let (kib, hop) = (workload.block_bytes >> 10, workload.hop_cpu_us);
        println!("\n{kib} KiB {}; a hop takes {hop:.1} µs of processor", workload.workload);
        let mut table = Table::figures([
            "",
            "requests/s",
            "MB/s",
            "p50",
            "p99",
            "CPU",
            "hecaton to it",
            "p50 more",
        ]);
        for server in &workload.servers {
            let Spread { median, min, max } = server.requests_per_s;
            let ratio = server.hecaton_ratio.map_or_else(String::new, |ratio| {
                format!("{:.2} × ({:.2}–{:.2})", ratio.median, ratio.min, ratio.max)
            });
            let more = server.hecaton_round_trips_more;
            table.row([
                server.front.of(server.server),
                format!("{median:.0} ({min:.0}–{max:.0})"),
                format!("{:.0}", server.mb_per_s),
                format!("{:.0} µs", server.p50_us.median),
                format!("{:.0} µs", server.p99_us.median),
                format!("{:.1} µs", server.cpu_us.median),
                ratio,
                more.map_or_else(String::new, |more| format!("{more:.1} round trips")),
            ]);
        }
        print!("{table}");
    }
    println!();
    for (server, why) in &report.skipped {
        println!("Without {server}: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round_and_front() {
        let measured = |per_s, p50_us| {
            let measured = Measured { per_s, p50_us, p99_us: 1.0 };
            Point { measured, cpu_us: p50_us / 2.0 }
        };
        let yardstick = Yardstick { round_trip_us: 10.0, cpu_us_per_byte: 0.25 };
        let series = vec![
            vec![measured(100.0, 30.0), measured(10.0, 30.0), measured(60.0, 30.0)],
            vec![measured(200.0, 10.0), measured(10.0, 10.0), measured(20.0, 10.0)],
            vec![measured(80.0, 40.0); 3],
            vec![measured(40.0, 20.0); 3],
            vec![measured(64.0, 45.0); 3],
        ];
        let targets = [
            (Kind::Hecaton, Front::Nbd),
            (Kind::Nbdkit, Front::Nbd),
            (Kind::Hecaton, Front::VhostUser),
            (Kind::Qemu, Front::VhostUser),
            (Kind::HecatonEncrypted, Front::VhostUser),
        ];
        let report = report(&Workload::ALL[0], &targets, &series, yardstick).unwrap();
        assert_eq!(report.hop_cpu_us, 1024.0);
        let [ours, nbdkit, drive, qemu, encrypted] = &report.servers[..] else {
            panic!("five were measured")
        };
        assert!(ours.hecaton_ratio.is_none() && drive.hecaton_ratio.is_none());
        assert_eq!(nbdkit.hecaton_ratio, Some(Spread { median: 1.0, min: 0.5, max: 3.0 }));
        assert_eq!(nbdkit.hecaton_round_trips_more, Some(2.0));
        assert_eq!(nbdkit.requests_per_s.median, 20.0);
        assert_eq!(drive.cpu_us.median, 20.0);
        assert!((nbdkit.mb_per_s - 20.0 * 4096.0 / 1e6).abs() < 1e-9);
        assert_eq!(qemu.hecaton_ratio, Some(Spread { median: 2.0, min: 2.0, max: 2.0 }));
        assert_eq!(qemu.hecaton_round_trips_more, Some(2.0));
        assert_eq!(encrypted.hecaton_ratio.map(|ratio| ratio.median), Some(1.25));
        assert_eq!(encrypted.hecaton_round_trips_more, Some(-0.5));
        let nothing = vec![vec![]; targets.len()];
        assert!(super::report(&Workload::ALL[0], &targets, &nothing, yardstick).is_none());
    }
}
