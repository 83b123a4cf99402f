//! Measures a manager's cost and latency with thousands of nodes.
//!
//! Each node sends a heartbeat every second, by the nodes' own code, over its own connection with
//! mutual TLS. Each thread of this process acts for many nodes in turn. The manager is a separate
//! process, and the kernel's accounting of that process gives its cost. Other load on the machine
//! does not raise this cost; it raises the latencies, as does the work of the nodes.

use crate::bench::Place;
use crate::bench::control::reporter::{Reporter, name};
use crate::bench::measure::stats::{Latencies, Percentiles};
use crate::bench::world::cluster::this_program;
use crate::bench::world::interrupt;
use crate::bench::world::process::Guarded;
use crate::terminal::table::Table;
use anyhow::Context as _;
use hecaton_manager::registry::MAX_NODES;
use hecaton_node::children::limits;
use hecaton_node::children::processes::ProcessUse;
use hecaton_node::cluster::heartbeat::ManagerLink;
use hecaton_pki::{Authority, Credentials, Identity, Role, Wish};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Threads that the nodes share; also the most heartbeats in flight at a time.
const SPEAKERS: usize = 32;

/// Stack size of a speaker's thread.
const STACK_BYTES: usize = 1 << 20;

/// Validity of the certificates: longer than any bench takes.
const DAYS: u32 = 2;

/// Limit in seconds until all nodes know each other.
const MOST_PASSES: u32 = 600;

/// Arguments of `hecaton bench manager`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Nodes, each with a connection and a certificate of its own.
    #[arg(long, value_name = "N", default_value_t = 4000)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=MAX_NODES as i64))]
    nodes: u32,
    /// Consumers of each node.
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    consumers: u32,
    /// Seconds that are measured, once all nodes have joined.
    #[arg(long, value_name = "N", default_value_t = 20)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    seconds: u32,
    #[command(flatten)]
    place: Place,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Figures of the manager's process and of its answers.
#[derive(Serialize)]
struct Figures {
    nodes: u32,
    consumers: u64,
    /// Time until every node has joined over its own connection and all know each other.
    join_s: f64,
    join_processor_s: f64,
    /// Measured time, after all nodes have joined.
    seconds: f64,
    heartbeats: u64,
    /// Heartbeats with an error, or without an answer within 2 s.
    failed: u64,
    processor_s: f64,
    /// From sending a heartbeat to having read its answer.
    latency: Percentiles,
    resident_bytes: u64,
    peak_bytes: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let scratch = args.place.scratch()?;
    let figures = measure(args, scratch.path())?;
    match args.json {
        true => println!("{}", serde_json::to_string(&figures)?),
        false => print!("{}", figures.table()),
    }
    Ok(())
}

/// The line that the manager prints when it is ready.
#[derive(Deserialize)]
struct Ready {
    manager: String,
}

fn measure(args: &Args, dir: &Path) -> anyhow::Result<Figures> {
    limits::raise();
    let authority = Authority::init(&dir.join("pki"))?;
    let issue = |name: &str, role: Role| {
        let hosts = match role {
            Role::Manager => vec!["127.0.0.1".to_owned()],
            _ => Vec::new(),
        };
        let identity = Identity { name: name.to_owned(), role };
        authority.issue(&Wish { identity, hosts, days: DAYS, renew: false })
    };
    let mut command = Command::new(this_program()?);
    command
        .args(["manager", "--json", "--listen", "127.0.0.1:0", "--state"])
        .arg(dir.join("state"));
    command.arg("--tls-dir").arg(issue("manager", Role::Manager)?.dir);
    let mut manager = Guarded::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    // A manager that does not print this line has reported the reason already.
    let ready = manager.lines()?.next()?.context("the manager does not come up")?;
    let Ready { manager: url } = serde_json::from_str(&ready)?;
    let mut nodes = Vec::new();
    for at in 0..args.nodes {
        interrupt::check()?;
        let credentials = Credentials::open(&issue(&name(at), Role::Node)?.dir)?;
        let link = ManagerLink::new(&url, Some(Arc::new(credentials)));
        nodes.push(Node { link, reporter: Reporter::new(at, args.nodes, args.consumers) });
    }

    let pid = manager.id();
    let takes = || ProcessUse::of(pid).context("the manager has ended");
    let before = takes()?;
    let began = Instant::now();
    let mut pass = speak(&mut nodes, Pace::AtOnce, 1)?;
    let mut passes = 0;
    // Until no heartbeat fails and no answer lists further donors.
    while pass.news > 0 || pass.failed > 0 {
        passes += 1;
        anyhow::ensure!(
            passes < MOST_PASSES,
            "after {MOST_PASSES} s nodes hear of others still, or are not answered: {} of them",
            pass.failed
        );
        pass = speak(&mut nodes, Pace::EachSecond, 1)?;
    }
    let (join_s, formed) = (began.elapsed().as_secs_f64(), takes()?);
    let began = Instant::now();
    let spoken = speak(&mut nodes, Pace::EachSecond, args.seconds)?;
    let (seconds, after) = (began.elapsed().as_secs_f64(), takes()?);
    let spent_s = |from: ProcessUse, to: ProcessUse| (to.cpu_ms - from.cpu_ms) as f64 / 1e3;
    Ok(Figures {
        nodes: args.nodes,
        consumers: u64::from(args.nodes) * u64::from(args.consumers),
        join_s,
        join_processor_s: spent_s(before, formed),
        seconds,
        heartbeats: spoken.latencies.percentiles().count,
        failed: spoken.failed,
        processor_s: spent_s(formed, after),
        latency: spoken.latencies.percentiles(),
        resident_bytes: after.resident_bytes,
        peak_bytes: manager.peak_bytes(),
    })
}

/// A simulated node and its link to the manager.
struct Node {
    link: ManagerLink,
    reporter: Reporter,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// As fast as the manager answers.
    AtOnce,
    /// Once a second for each node; a thread spreads its nodes over the second.
    EachSecond,
}

/// Results of a series of heartbeats.
struct Spoken {
    latencies: Latencies,
    failed: u64,
    /// Donors that the answers list.
    news: usize,
}

impl Spoken {
    fn nothing() -> Spoken {
        Spoken { latencies: Latencies::new(), failed: 0, news: 0 }
    }
}

/// Sends `times` heartbeats of each node.
fn speak(nodes: &mut [Node], pace: Pace, times: u32) -> anyhow::Result<Spoken> {
    let each = nodes.len().div_ceil(SPEAKERS);
    let began = Instant::now();
    let spoken: Vec<Spoken> = thread::scope(|scope| {
        let threads = nodes.chunks_mut(each).map(|share| {
            let speaker = move || speak_for(share, pace, times, began);
            thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, speaker)
        });
        let threads = threads.collect::<Result<Vec<_>, _>>().context("cannot start a thread")?;
        let joined = threads.into_iter().map(|one| one.join().expect("no speaker panics"));
        joined.collect::<anyhow::Result<_>>()
    })?;
    if pace == Pace::EachSecond {
        // The last nodes report before the last second ends.
        let end = began + Duration::from_secs(times.into());
        thread::sleep(end.saturating_duration_since(Instant::now()));
    }
    let mut all = Spoken::nothing();
    for one in spoken {
        all.latencies.add(&one.latencies);
        all.failed += one.failed;
        all.news += one.news;
    }
    Ok(all)
}

fn speak_for(nodes: &mut [Node], pace: Pace, times: u32, began: Instant) -> anyhow::Result<Spoken> {
    let mut spoken = Spoken::nothing();
    let count = nodes.len() as u32;
    for time in 0..times {
        for (node, at) in nodes.iter_mut().zip(0..) {
            interrupt::check()?;
            if pace == Pace::EachSecond {
                let due = Duration::from_secs(1) * at / count + Duration::from_secs(time.into());
                thread::sleep((began + due).saturating_duration_since(Instant::now()));
            }
            let says = node.reporter.says().into_owned();
            let sent = Instant::now();
            match node.link.beat(&says) {
                Ok(answer) => {
                    spoken.latencies.record(sent.elapsed());
                    spoken.news += answer.list.donors.len();
                    node.reporter.hear(&answer);
                }
                Err(error) => {
                    tracing::debug!(%error, "a heartbeat was not taken");
                    spoken.failed += 1;
                }
            }
        }
    }
    Ok(spoken)
}

impl Figures {
    fn table(&self) -> String {
        let mut table = Table::figures(["the manager", "figure"]);
        let mut row = |what: &str, figure: String| table.row([what.to_owned(), figure]);
        let heartbeats = self.heartbeats.max(1) as f64;
        row("all nodes join, s", format!("{:.1}", self.join_s));
        row("processor for that, s", format!("{:.1}", self.join_processor_s));
        row("heartbeats a second", format!("{:.0}", self.heartbeats as f64 / self.seconds));
        row("not answered", self.failed.to_string());
        row("processor a second, s", format!("{:.2}", self.processor_s / self.seconds));
        row("processor a heartbeat, µs", format!("{:.0}", self.processor_s / heartbeats * 1e6));
        row("answer, median, ms", format!("{:.1}", self.latency.p50_us / 1e3));
        row("answer, 99 of 100, ms", format!("{:.1}", self.latency.p99_us / 1e3));
        row("answer, longest, ms", format!("{:.1}", self.latency.max_us / 1e3));
        row("resident memory, MiB", (self.resident_bytes >> 20).to_string());
        row("at most, MiB", (self.peak_bytes >> 20).to_string());
        format!(
            "{} nodes with {} consumers, mutual TLS, a connection each, {:.0} s\n{table}",
            self.nodes, self.consumers, self.seconds
        )
    }
}
