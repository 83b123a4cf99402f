//! `hecaton status`: what the cluster holds.

mod notes;

use crate::cluster::ClusterArgs;
use crate::policy;
use crate::terminal::table::Table;
use crate::volume::show as volumes;
use hecaton_donor::Snapshot;
use hecaton_manager::{ClusterStatus, MemberState, NodeState, NodeStatus};
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::cluster::report::{DonorAddress, NodeReport};
use hecaton_node::donors::DonorReport;
use hecaton_node::pagers::ConsumerReport;
use hecaton_pager::Stats;
use serde::Serialize;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Arguments of `hecaton status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// JSON object that `--json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    manager: &'a str,
    #[serde(flatten)]
    status: &'a ClusterStatus,
}

/// JSON object that `--json` prints without a manager.
#[derive(Serialize)]
struct Alone<'a> {
    manager: Option<&'a str>,
    nodes: &'a [NodeStatus],
    donors_known: &'a [DonorAddress],
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Some(manager) = args.cluster.manager()? else { return of_node(args) };
    let status = manager.status()?;
    if args.json {
        let shown = Shown { manager: &manager.url, status: &status };
        println!("{}", serde_json::to_string(&shown)?);
    } else {
        print!("{}", render(&manager.url, &status));
    }
    Ok(ExitCode::SUCCESS)
}

/// Where there is no manager, a node knows itself, and which donors there are.
fn of_node(args: &Args) -> anyhow::Result<ExitCode> {
    let mut node = args.cluster.need_local_node()?;
    let report = node.status()?;
    let known = node.donors()?;
    let nodes = [NodeStatus {
        state: NodeState::Up,
        silent_ms: 0,
        membership: MemberState::Active,
        report,
    }];
    if args.json {
        let shown = Alone { manager: None, nodes: &nodes, donors_known: &known };
        println!("{}", serde_json::to_string(&shown)?);
    } else {
        println!("no manager: this host's node, and the donors that it knows of\n");
        print!("{}\n{}", tables(&nodes), addresses(&known));
    }
    Ok(ExitCode::SUCCESS)
}

fn addresses(known: &[DonorAddress]) -> Table {
    let mut table = Table::new(["KNOWN DONOR", "NODE", "LOCATION", "ADDRESS"]);
    for donor in known {
        let location = donor.location.clone().unwrap_or_else(|| "-".to_owned());
        table.row([donor.name.clone(), donor.node.clone(), location, donor.address.to_string()]);
    }
    table
}

fn render(manager: &str, status: &ClusterStatus) -> String {
    let up = duration(status.uptime_ms / 1000);
    let mut text = format!("manager {manager}, up {up}\n");
    if let Some(policy) = status.policy_in_words() {
        let _ = writeln!(text, "policy {policy}");
    }
    if let Some(harvest) = &status.harvest {
        let _ = writeln!(text, "quota {}", policy::harvest_in_words(Some(harvest)));
    }
    text + "\n" + &tables(&status.nodes)
}

fn tables(reported: &[NodeStatus]) -> String {
    let mut text = String::new();
    let mut nodes = Table::new(["NODE", "STATE", "LOCATION", ">LENDS", ">HOST FREE", ">CONSUMERS"]);
    let mut donors = Table::new([
        "DONOR",
        "NODE",
        "STATE",
        "ADDRESS",
        ">LENDS",
        ">COMMITTED",
        ">FREE",
        ">EXTENTS",
        ">IN SERVICE",
        ">RESTARTS",
    ]);
    let mut consumers = Table::new([
        "CONSUMER",
        "NODE",
        "STATE",
        ">LOCAL",
        ">LIMIT",
        ">POOL",
        ">FAULTS",
        ">P50",
        ">P90",
        ">P99",
        ">PREFETCH",
        ">EVICTED",
        ">RESTARTS",
    ]);
    let (mut any_donor, mut any_consumer) = (false, false);
    let (mut limited, mut at_risk) = (Vec::new(), Vec::new());
    for node in reported {
        let report = &node.report;
        let lends: u64 = report.donors.iter().map(|donor| donor.lend_bytes).sum();
        nodes.row([
            report.name.clone(),
            node_state(node),
            report.location.clone().unwrap_or_else(|| "-".to_owned()),
            size(lends),
            size(report.host.available_bytes),
            report.consumer_count().to_string(),
        ]);
        limited.extend(quota(report));
        at_risk.extend(own_policy(report));
        for donor in &report.donors {
            any_donor = true;
            donors.row(donor_row(&report.name, donor));
            limited.extend(limit(donor).into_iter().chain(parked(donor)));
        }
        at_risk.extend(untold(report));
        for consumer in &report.consumers {
            any_consumer = true;
            consumers.row(consumer_row(&report.name, consumer));
            limited.extend(notes::notes(consumer));
            at_risk.extend(notes::risks(consumer));
        }
    }
    let _ = write!(text, "{nodes}");
    if any_donor {
        let _ = write!(text, "\n{donors}");
    }
    if any_consumer {
        let _ = write!(
            text,
            "\n{consumers}\nP50, P90, P99: microseconds from a fault to its page from the pool. PREFETCH: pages\nfetched ahead that were used.\n"
        );
    }
    let served: Vec<_> = reported
        .iter()
        .flat_map(|node| node.report.volumes.iter().map(|one| (node.report.name.as_str(), one)))
        .collect();
    if !served.is_empty() {
        let _ = write!(text, "\n{}", volumes::table(served.iter().copied()));
        limited.extend(served.iter().filter_map(|(_, volume)| volumes::target(volume)));
        at_risk.extend(served.iter().filter_map(|(_, volume)| volumes::risk(volume)));
    }
    for line in limited.into_iter().chain(at_risk) {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Says how much memory a donor lends at present, if that is not all.
fn limit(donor: &DonorReport) -> Option<String> {
    let stats = donor.stats.as_ref().filter(|stats| stats.limit_pages < stats.pages)?;
    let limit = size(pages_to_bytes(stats.limit_pages));
    let is_hosts =
        stats.host_limit_bytes.is_some_and(|b| b < pages_to_bytes(stats.limit_pages + 1));
    let why = if is_hosts { " for want of memory on its host" } else { "" };
    let text = format!("{}: lends {limit} at most at present{why}", donor.name);
    Some(match stats.recalled_pages {
        0 => text,
        pages => format!("{text}, {} above that is wanted back", size(pages_to_bytes(pages))),
    })
}

/// Says how much of a donor's memory is in a file, and why no more can be.
fn parked(donor: &DonorReport) -> Option<String> {
    let park = donor.stats.as_ref()?.park.as_ref()?;
    let is_shown = park.parked_pages > 0 || park.trouble.is_some();
    let parked = size(pages_to_bytes(park.parked_pages));
    let trouble = park.trouble.as_ref().map(|why| format!(", no more can be: {why}"));
    is_shown.then(|| format!("{}: {parked} is parked{}", donor.name, trouble.unwrap_or_default()))
}

/// Says how much of the pool the policy lets a node's consumers use together.
fn quota(report: &NodeReport) -> Option<String> {
    let quota = size(pages_to_bytes(report.pool.quota_pages?));
    let used = size(pages_to_bytes(report.pool.used_pages));
    Some(format!("{}: may use {quota} of the pool by the policy, uses {used}", report.name))
}

/// Consumers that the manager is told only the sums of.
fn untold(report: &NodeReport) -> Option<String> {
    let untold = report.untold.as_ref()?;
    let held = untold.pool_bytes.map_or_else(|| "some".to_owned(), size);
    let mut text = format!(
        "{}: {} more consumers hold {held} of the pool; they are too many to be told of one by one: \
         the metrics of the node itself have all",
        report.name, untold.consumers
    );
    if untold.in_trouble > 0 {
        let _ = write!(text, "; {} of them need attention", untold.in_trouble);
    }
    Some(text)
}

/// A node of an earlier version than the policy.
fn own_policy(report: &NodeReport) -> Option<String> {
    let own = policy::in_words(report.pool.policy.map(|own| own.to_string()));
    let (name, version) = (&report.name, &report.version);
    let text = || {
        format!(
            "{name}: its version {version} does not know the policy; it goes on by its own, {own}"
        )
    };
    report.pool.is_policy_unknown.then(text)
}

fn donor_row(node: &str, donor: &DonorReport) -> [String; 10] {
    let stats = donor.stats.as_ref();
    let shown = |value: fn(&Snapshot) -> String| stats.map_or_else(|| "-".to_owned(), value);
    [
        donor.name.clone(),
        node.to_owned(),
        match stats {
            Some(stats) if stats.draining => "draining".to_owned(),
            Some(stats) if stats.recalled_pages > 0 => "recalling".to_owned(),
            _ => word(&donor.state),
        },
        donor.address.map_or_else(|| "-".to_owned(), |address| address.to_string()),
        size(donor.lend_bytes),
        shown(|stats| size(stats.committed_bytes)),
        shown(|stats| size(pages_to_bytes(stats.lendable_pages))),
        shown(|stats| extents(stats).to_string()),
        shown(|stats| stats.in_service.to_string()),
        donor.restarts.to_string(),
    ]
}

fn consumer_row(node: &str, consumer: &ConsumerReport) -> [String; 13] {
    let stats = consumer.stats.as_ref();
    let shown = |value: fn(&Stats) -> String| stats.map_or_else(|| "-".to_owned(), value);
    let latency = |value: fn(&Stats) -> f64| match stats {
        Some(stats) if stats.pool_fault_latency.count > 0 => format!("{:.1}", value(stats)),
        _ => "-".to_owned(),
    };
    [
        consumer.name.clone(),
        node.to_owned(),
        word(&consumer.state),
        shown(|stats| size(stats.local_bytes)),
        size(consumer.local_bytes),
        shown(|stats| size(stats.pool_bytes)),
        shown(|stats| stats.faults.to_string()),
        latency(|stats| stats.pool_fault_latency.p50_us),
        latency(|stats| stats.pool_fault_latency.p90_us),
        latency(|stats| stats.pool_fault_latency.p99_us),
        shown(|stats| percentage(stats.prefetch_hits, stats.pages_prefetched)),
        shown(|stats| stats.pages_evicted.to_string()),
        consumer.restarts.to_string(),
    ]
}

fn extents(donor: &Snapshot) -> u64 {
    donor.spaces.iter().map(|space| space.extents).sum()
}

pub(crate) fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

/// Whether a node is heard from, and takes part.
pub(crate) fn node_state(node: &NodeStatus) -> String {
    match node.state {
        NodeState::Up => node.word().to_owned(),
        NodeState::Silent => format!("silent for {}", duration(node.silent_ms / 1000)),
    }
}

/// A unit variant as it stands in JSON.
fn word(state: &impl Serialize) -> String {
    match serde_json::to_value(state) {
        Ok(serde_json::Value::String(word)) => word,
        _ => unreachable!("states are unit variants"),
    }
}

fn percentage(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        whole => format!("{:.0}%", 100.0 * part as f64 / whole as f64),
    }
}

/// A time in one unit.
pub(crate) fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_donor::ParkSnapshot;
    use hecaton_manager::NodeStatus;
    use hecaton_memory::SpaceId;
    use hecaton_node::donors::DonorState;
    use hecaton_node::pagers::PagerState;
    use hecaton_policy::cluster::choice::{Choice, Named};

    fn status() -> ClusterStatus {
        let donor = DonorReport {
            name: "donor-1".to_owned(),
            state: DonorState::Serving,
            address: Some(([127, 0, 0, 1], 7071).into()),
            restarts: 2,
            lend_bytes: 4 << 30,
            ..Default::default()
        };
        let consumer = ConsumerReport {
            name: "sort-9".to_owned(),
            space: SpaceId(1),
            state: PagerState::Serving,
            pid: Some(6),
            restarts: 1,
            local_bytes: 256 << 20,
            held_fds: 0,
            stats: Some(Stats {
                local_bytes: 128 << 20,
                pool_bytes: 1 << 30,
                faults: 812,
                pages_prefetched: 400,
                prefetch_hits: 300,
                restarts: 1,
                ..Stats::default()
            }),
        };
        let report = NodeReport {
            name: "local".to_owned(),
            donors: vec![donor],
            consumers: vec![consumer],
            ..Default::default()
        };
        let node = NodeStatus {
            state: NodeState::Up,
            silent_ms: 20,
            membership: MemberState::Active,
            report,
        };
        ClusterStatus {
            version: String::new(),
            uptime_ms: 61_000,
            epoch: 1,
            policy: None,
            policy_instead: None,
            harvest: None,
            nodes: vec![node],
        }
    }

    #[test]
    fn everything_is_in_the_tables() {
        let text = render("http://m", &status());
        let row = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("{text}")).split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(row("local "), ["local", "up", "-", "4G", "0", "1"]);
        assert_eq!(
            row("donor-1 "),
            ["donor-1", "local", "serving", "127.0.0.1:7071", "4G", "-", "-", "-", "-", "2"]
        );
        assert_eq!(
            row("sort-9 "),
            [
                "sort-9", "local", "serving", "128M", "256M", "1G", "812", "-", "-", "-", "75%",
                "0", "1"
            ]
        );
    }

    #[test]
    fn how_a_node_takes_part_is_its_state() {
        let mut status = status();
        for (membership, word) in [
            (MemberState::Leaving, "leaving"),
            (MemberState::Inactive, "left"),
            (MemberState::Recovery, "recovery"),
        ] {
            status.nodes[0].membership = membership;
            let text = render("http://m", &status);
            let row = text.lines().find(|line| line.starts_with("local ")).expect("a row");
            assert_eq!(row.split_whitespace().nth(1), Some(word), "{text}");
        }
    }

    #[test]
    fn what_is_coded_is_told_with_what_that_saves() {
        let mut status = status();
        assert!(!render("http://m", &status).contains("cold"));
        let stats = status.nodes[0].report.consumers[0].stats.as_mut().unwrap();
        stats.pool.code = Some("4+2".parse().unwrap());
        assert!(!render("http://m", &status).contains("cold"), "nothing is coded yet");
        let stats = status.nodes[0].report.consumers[0].stats.as_mut().unwrap();
        (stats.pool.coded_bytes, stats.pool.saved_bytes) = (64 << 20, 32 << 20);
        let text = render("http://m", &status);
        assert!(text.contains("sort-9: 64M is cold, in code 4+2: 32M saved"), "{text}");
    }

    #[test]
    fn processes_that_are_not_on_the_pool_are_told() {
        let mut status = status();
        assert!(!render("http://m", &status).contains("not on the pool"));
        let stats = status.nodes[0].report.consumers[0].stats.as_mut().unwrap();
        stats.outside.processes = 2;
        stats.outside.peak_bytes = (214 << 20) - 5;
        stats.outside.names = vec!["python3".to_owned(), "env".to_owned()];
        let text = render("http://m", &status);
        let line =
            "sort-9: 2 processes were not on the pool, with 214M of local memory: python3, env";
        assert!(text.lines().any(|found| found == line), "{text}");
    }

    #[test]
    fn what_the_policy_allows_is_told() {
        let mut status = status();
        assert!(!render("http://m", &status).contains("policy"));
        status.policy = Some(Named::Known(Choice::GreedyLocal {}));
        let report = &mut status.nodes[0].report;
        (report.pool.quota_pages, report.pool.used_pages) = (Some(1 << 20), 1 << 18);
        let stats = report.consumers[0].stats.as_mut().expect("it has some");
        stats.target_bytes = Some(2 << 30);
        (stats.puts_total, stats.puts_succeeded) = (9, 7);
        let text = render("http://m", &status);
        for line in [
            "policy greedy-local",
            "local: may use 4G of the pool by the policy, uses 1G",
            "sort-9: may hold 2G of the pool by the policy, holds 1G; 7 of 9 puts were within",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
    }

    #[test]
    fn a_policy_of_a_later_version_is_told_by_its_name() {
        let mut status = status();
        status.policy = Some(Named::Unknown { policy: "fair".to_owned() });
        let report = &mut status.nodes[0].report;
        report.version = "0.1".to_owned();
        report.pool.is_policy_unknown = true;
        let text = render("http://m", &status);
        for line in [
            "policy \"fair\", which this version does not know",
            "local: its version 0.1 does not know the policy; it goes on by its own, none: everybody may \
             hold what it gets",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        status.version = "0.1".to_owned();
        status.policy_instead = Some(Named::Known(Choice::GreedyLocal {}));
        let line = "policy \"fair\", which the manager of version 0.1 does not know: greedy-local in its place";
        let text = render("http://m", &status);
        assert!(text.lines().any(|found| found == line), "{text}");
    }

    #[test]
    fn what_lacks_a_copy_is_told() {
        let mut status = status();
        assert!(!render("http://m", &status).contains("lacks a copy"));
        let stats = status.nodes[0].report.consumers[0].stats.as_mut().expect("it has some");
        stats.pool.extents_bytes = 4 << 30;
        stats.pool.degraded_bytes = 1 << 30;
        stats.pool.to_move_bytes = 2 << 30;
        stats.pool.scrub.lost_pages = 3;
        let text = render("http://m", &status);
        let line = "sort-9: of 4G, 1G lacks a copy, 2G is to be copied or moved, 3 pages are damaged \
                    in every copy";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn what_a_donor_wants_back_is_told() {
        let mut status = status();
        let stats = Snapshot {
            pages: 1 << 20,
            lent_pages: 3 << 18,
            limit_pages: 1 << 19,
            recalled_pages: 1 << 18,
            ..Snapshot::default()
        };
        status.nodes[0].report.donors[0].stats = Some(stats.clone());
        let text = render("http://m", &status);
        assert!(text.contains("donor-1  local  recalling"), "{text}");
        let line = "donor-1: lends 2G at most at present, 1G above that is wanted back";
        assert!(text.contains(line), "{text}");
        let park = ParkSnapshot {
            parked_pages: 1 << 17,
            trouble: Some("No space left on device".to_owned()),
            ..ParkSnapshot::default()
        };
        let parking = Snapshot { park: Some(park), ..stats.clone() };
        status.nodes[0].report.donors[0].stats = Some(parking);
        let text = render("http://m", &status);
        let more = "donor-1: 512M is parked, no more can be: No space left on device";
        assert!(text.contains(&format!("{line}\n{more}\n")), "{text}");
        let all = Snapshot { limit_pages: 1 << 20, recalled_pages: 0, ..stats };
        status.nodes[0].report.donors[0].stats = Some(all);
        assert!(!render("http://m", &status).contains("lends"));
    }

    #[test]
    fn an_idle_cluster_has_no_empty_tables() {
        let mut status = status();
        status.nodes[0].report.consumers.clear();
        status.nodes[0].report.donors.clear();
        let text = render("http://m", &status);
        assert!(!text.contains("CONSUMER ") && !text.contains("DONOR "), "{text}");
    }

    #[test]
    fn json_names_the_manager_beside_the_status() {
        let status = status();
        let shown = Shown { manager: "http://m", status: &status };
        let json = serde_json::to_value(&shown).expect("serialised");
        assert_eq!(json["manager"], "http://m");
        assert_eq!(json["nodes"][0]["donors"][0]["state"], "serving");
        assert_eq!(json["nodes"][0]["consumers"][0]["stats"]["faults"], 812);
    }

    #[test]
    fn durations_are_short() {
        for (seconds, text) in [(5, "5 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 days")] {
            assert_eq!(duration(seconds), text);
        }
    }
}
