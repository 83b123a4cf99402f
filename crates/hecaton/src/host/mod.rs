//! `hecaton host`: who has which part of this host's memory.

mod course;
mod plot;

use crate::cluster::ClusterArgs;
use crate::terminal::table::Table;
use anyhow::Context as _;
use clap::Subcommand;
use course::Sample;
use hecaton_broker::{NewcomerKind, Waits};
use hecaton_memory::Size;
use hecaton_node::agent::{
    AgentReport, HarvestWord, MachinePartReport, MachineReport, MachineState,
};
use std::fmt::Write as _;
use std::io::{IsTerminal as _, stdout};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// How often `watch` looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Puts the terminal's cursor into its corner, and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// The commands about this host.
#[derive(Subcommand)]
pub(crate) enum Host {
    /// Shows every byte of this host's memory by who has it, the machines, and those that wait
    Status(StatusArgs),
    /// Shows the same every second, until it is interrupted
    Watch(WatchArgs),
    /// Draws what `watch --json` has recorded: the memory over time by who has it, and the machines
    Plot(plot::Args),
}

/// Arguments of `hecaton host status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton host watch`.
#[derive(clap::Args)]
pub(crate) struct WatchArgs {
    /// Prints one JSON object a line, with the time: a recording for `hecaton host plot`
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(host: &Host) -> anyhow::Result<ExitCode> {
    match host {
        Host::Status(args) => {
            let report = look(&args.cluster)?;
            match args.json {
                true => println!("{}", serde_json::to_string(&report)?),
                false => print!("{}", text(&report)),
            }
            Ok(ExitCode::SUCCESS)
        }
        Host::Watch(args) => watch(args),
        Host::Plot(args) => plot::run(args),
    }
}

/// Also over the kill of the node: a recording goes on with the next one.
fn watch(args: &WatchArgs) -> anyhow::Result<ExitCode> {
    let clears = stdout().is_terminal() && !args.json;
    let mut report = Ok(look(&args.cluster)?);
    let mut complaint = String::new();
    loop {
        match report {
            Ok(report) => {
                complaint.clear();
                match (clears, args.json) {
                    (true, _) => print!("{CLEAR}{}", text(&report)),
                    (false, true) => println!("{}", serde_json::to_string(&Sample::now(report))?),
                    (false, false) => println!("{}", text(&report)),
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error != complaint {
                    eprintln!("hecaton: {error}");
                    complaint = error;
                }
            }
        }
        thread::sleep(INTERVAL);
        report = look(&args.cluster);
    }
}

fn look(cluster: &ClusterArgs) -> anyhow::Result<AgentReport> {
    let report = cluster.need_local_node()?.status()?;
    report.agent.with_context(|| {
        format!(
            "node {} has no agent, or not looked yet; start it with --agent --qmp-dir DIR",
            report.name
        )
    })
}

fn text(report: &AgentReport) -> String {
    let mut heading = vec!["MEMORY".to_owned()];
    heading.extend(report.nodes.iter().map(|node| format!("NUMA {}", node.node)));
    heading.push("HOST".to_owned());
    let mut table = Table::figures(heading);
    let mut row = |name: &str, cells: Vec<u64>| {
        let sum = cells.iter().sum();
        let cells = cells.into_iter().chain([sum]).map(|bytes| Size(bytes).to_string());
        table.row(std::iter::once(name.to_owned()).chain(cells));
    };
    let classes: Vec<_> = report.nodes.iter().map(|node| node.classes()).collect();
    let names = classes.first().into_iter().flatten().map(|(name, _)| *name);
    for (at, name) in names.enumerate() {
        row(&name.replace('_', " "), classes.iter().map(|classes| classes[at].1).collect());
    }
    let overdrawn: Vec<u64> = report.nodes.iter().map(|node| node.ledger.overdrawn_bytes).collect();
    if overdrawn.iter().any(|bytes| *bytes > 0) {
        row("counted twice", overdrawn);
    }
    row("all", report.nodes.iter().map(|node| node.host_bytes).collect());
    let mut text = table.to_string();
    let _ = writeln!(text, "\n{}", cores(report));
    if report.counters.spanning > 0 {
        let _ = writeln!(text, "\nspread over NUMA nodes: {}", report.counters.spanning);
    }
    if !report.machines.is_empty() {
        let mut table = Table::new([
            "MACHINE",
            "KIND",
            "STATE",
            ">BASE",
            ">HARVESTED",
            ">ASKED",
            ">MAX",
            ">IN MEMORY",
            ">CORES",
            "GUEST",
            "OF NUMA NODES",
        ]);
        for machine in &report.machines {
            let size = |bytes| Size(bytes).to_string();
            table.row([
                machine.name.clone(),
                match machine.cgroup {
                    Some(_) => format!("{} container", kind(machine.kind)),
                    None => kind(machine.kind).to_owned(),
                },
                state(machine.state).to_owned(),
                size(machine.base_bytes),
                size(machine.harvested_bytes),
                size(machine.requested_bytes),
                size(machine.max_bytes),
                size(machine.held_bytes),
                some(machine.cores),
                guest(machine).to_owned(),
                of_nodes(machine),
            ]);
        }
        let _ = write!(text, "\n{table}");
    }
    if let Some(libvirt) = &report.libvirt
        && let Some(failure) = &libvirt.failure
    {
        let _ = writeln!(text, "\nlibvirt at {} says nothing: {failure}", libvirt.uri);
    }
    if !report.waiting.is_empty() {
        let mut table = Table::new(["WAITING", "KIND", ">SIZE", ">CORES", ">SECONDS", "FOR"]);
        for newcomer in &report.waiting {
            table.row([
                newcomer.name.clone(),
                kind(newcomer.kind).to_owned(),
                Size(newcomer.bytes).to_string(),
                some(newcomer.cores),
                (newcomer.waiting_ms / 1000).to_string(),
                waits(newcomer.waits, report.harvest.word),
            ]);
        }
        let _ = write!(text, "\n{table}");
    }
    if !report.gave_way.is_empty() {
        let mut table = Table::new(["ENDED FOR OTHERS", ">PID", ">SECONDS AGO"]);
        for one in &report.gave_way {
            table.row([one.name.clone(), one.pid.to_string(), (one.since_ms / 1000).to_string()]);
        }
        let _ = write!(text, "\n{table}");
    }
    text
}

/// Returns the cores of each class in one line, and a line for each fault.
fn cores(report: &AgentReport) -> String {
    let cores = &report.cores;
    let classes = cores.classes().map(|(class, number)| format!("{number} {class}"));
    let mut text = format!("cores: {} of the host: {}", cores.host, classes.join(", "));
    if cores.ledger.overdrawn > 0 {
        let _ = write!(text, "\ncores that are counted twice: {}", cores.ledger.overdrawn);
    }
    for machine in &report.machines {
        if let Some(failure) = &machine.cores_failure {
            let _ = write!(text, "\nnothing enforces the cores of {}: {failure}", machine.name);
        }
    }
    text
}

/// Cores of one that takes part in their division.
fn some(cores: u32) -> String {
    if cores == 0 { "-".to_owned() } else { cores.to_string() }
}

/// Says whether the agent hears the manager inside the machine.
fn guest(machine: &MachineReport) -> &'static str {
    match machine.guest_listens {
        Some(true) => "listens",
        Some(false) => "unheard",
        None => "-",
    }
}

/// Lists the machine's memory on each NUMA node, if there are several.
fn of_nodes(machine: &MachineReport) -> String {
    let part = |part: &MachinePartReport| {
        format!("{}: {}", part.node, Size(part.base_bytes + part.harvested_bytes))
    };
    let parts: Vec<String> = machine.nodes.iter().map(part).collect();
    if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
}

fn kind(kind: NewcomerKind) -> &'static str {
    match kind {
        NewcomerKind::Regular => "regular",
        NewcomerKind::Spot => "spot",
        NewcomerKind::Harvest => "harvest",
    }
}

fn state(state: MachineState) -> &'static str {
    match state {
        MachineState::Starting => "starting",
        MachineState::Running => "running",
        MachineState::Silent => "silent",
        MachineState::Warned => "warned",
        MachineState::ShuttingDown => "shutting down",
        MachineState::Evicted => "evicted",
    }
}

fn waits(waits: Option<Waits>, word: HarvestWord) -> String {
    match waits {
        Some(Waits::ForMemory { missing_bytes }) => format!("{} of others", Size(missing_bytes)),
        Some(Waits::ForCores { missing_cores: 1 }) => "1 core".to_owned(),
        Some(Waits::ForCores { missing_cores }) => format!("{missing_cores} cores"),
        Some(Waits::ForRoom) => "room".to_owned(),
        Some(Waits::ForQuota) if word == HarvestWord::Nothing => {
            "the manager, which knows how many harvest VMs there may be".to_owned()
        }
        Some(Waits::ForQuota) => "a harvest VM to end".to_owned(),
        Some(Waits::AfterEviction) => "some time after its eviction".to_owned(),
        None => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_broker::{CoreLedger, Counters, NodeLedger};
    use hecaton_node::agent::{
        CoreReport, GaveWayReport, HarvestShare, LibvirtReport, NewcomerReport, NodeMemoryReport,
    };

    #[test]
    fn every_byte_is_in_a_row() {
        let ledger = NodeLedger {
            total_bytes: 6 << 30,
            regular_bytes: 3 << 30,
            harvested_bytes: 2 << 30,
            buffer_bytes: 1 << 30,
            ..NodeLedger::default()
        };
        let node =
            |node| NodeMemoryReport { node, host_bytes: 8 << 30, unmanaged_bytes: 2 << 30, ledger };
        let part = |node, base_bytes, harvested_bytes| MachinePartReport {
            node,
            base_bytes,
            requested_bytes: 0,
            harvested_bytes,
            held_bytes: 0,
        };
        let report = AgentReport {
            qmp_dir: "/run/vms".into(),
            buffer_bytes: 2 << 30,
            nodes: vec![node(0), node(1)],
            cores: CoreReport {
                host: 8,
                unmanaged: 3,
                ledger: CoreLedger { total: 5, minimum: 2, reserved: 3, ..CoreLedger::default() },
                group: None,
            },
            machines: vec![MachineReport {
                name: "h".into(),
                kind: NewcomerKind::Harvest,
                state: MachineState::ShuttingDown,
                pid: 7,
                cgroup: Some("/sys/fs/cgroup/hecaton-vm-h".into()),
                base_bytes: 1 << 30,
                max_bytes: 4 << 30,
                requested_bytes: 1 << 30,
                harvested_bytes: 2 << 30,
                held_bytes: 3 << 30,
                cores: 2,
                cores_failure: Some("no cpu controller".into()),
                nodes: vec![part(0, 1 << 30, 512 << 20), part(1, 0, 1536 << 20)],
                waited_ms: Some(1500),
                guest_listens: Some(true),
            }],
            waiting: vec![
                NewcomerReport {
                    name: "r".into(),
                    kind: NewcomerKind::Regular,
                    bytes: 2 << 30,
                    cores: 0,
                    waiting_ms: 1500,
                    waits: Some(Waits::ForMemory { missing_bytes: 1 << 30 }),
                },
                NewcomerReport {
                    name: "s".into(),
                    kind: NewcomerKind::Spot,
                    bytes: 2 << 30,
                    cores: 4,
                    waiting_ms: 2500,
                    waits: Some(Waits::ForCores { missing_cores: 3 }),
                },
            ],
            gave_way: vec![GaveWayReport { name: "e".into(), pid: 9, since_ms: 61_000 }],
            libvirt: Some(LibvirtReport {
                uri: "qemu:///system".into(),
                failure: Some("no".into()),
            }),
            counters: Counters { spanning: 2, ..Counters::default() },
            harvest: HarvestShare::default(),
        };
        for node in &report.nodes {
            let sum: u64 = node.classes().iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(sum, node.host_bytes);
        }
        let text = text(&report);
        let line = |words: &str| {
            let is_it = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") == words;
            assert!(text.lines().any(is_it), "{words}:\n{text}");
        };
        line("MEMORY NUMA 0 NUMA 1 HOST");
        line("unmanaged 2G 2G 4G");
        line("all 8G 8G 16G");
        line("h harvest container shutting down 1G 2G 1G 4G 3G 2 listens 0: 1.5G, 1: 1.5G");
        line("r regular 2G - 1 1G of others");
        line("s spot 2G 4 2 3 cores");
        line("cores: 8 of the host: 3 unmanaged, 0 regular, 2 minimum, 3 reserved, 0 unallocated");
        line("nothing enforces the cores of h: no cpu controller");
        line("e 9 61");
        line("spread over NUMA nodes: 2");
        assert!(!text.contains("counted twice"));
        let json = serde_json::to_string(&report).unwrap();
        let again: AgentReport = serde_json::from_str(&json).unwrap();
        assert_eq!(again, report);
    }
}
