//! `hecaton node list` and `remove`: which nodes there are, and that one of them is gone for good.

use crate::cluster::ClusterArgs;
use crate::status::{node_state, size};
use crate::terminal::failure::usage;
use crate::terminal::table::Table;
use hecaton_manager::{MemberState, NodeState, NodeStatus};
use hecaton_memory::pages_to_bytes;
use hecaton_node::cluster::report::check_name;
use serde::Serialize;
use std::process::ExitCode;

/// Arguments of `hecaton node list`.
#[derive(clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `hecaton node remove`.
#[derive(clap::Args)]
pub(crate) struct RemoveArgs {
    /// The node
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A node, in short.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    state: NodeState,
    silent_ms: u64,
    membership: MemberState,
    #[serde(skip)]
    shown: String,
    location: Option<&'a str>,
    pid: u32,
    version: &'a str,
    donors: Vec<&'a str>,
    /// Memory that it lends to whoever wants it.
    lend_bytes: u64,
    /// Lent memory that borrowers hold; `None` until every donor has reported.
    lent_bytes: Option<u64>,
    consumers: usize,
    volumes: usize,
    /// Memory of the pool that they hold; none while one has not said so.
    pool_bytes: Option<u64>,
}

/// JSON object that `--json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    manager: &'a str,
    nodes: Vec<Row<'a>>,
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let manager = args.cluster.need_manager()?;
    let status = manager.status()?;
    let nodes: Vec<Row<'_>> = status.nodes.iter().map(row).collect();
    match args.json {
        true => println!("{}", serde_json::to_string(&Shown { manager: &manager.url, nodes })?),
        false => print!("{}", table(&nodes)),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn remove(args: &RemoveArgs) -> anyhow::Result<ExitCode> {
    if let Err(error) = check_name(&args.name) {
        usage!("{error}");
    }
    args.cluster.need_manager()?.remove(&args.name)?;
    Ok(ExitCode::SUCCESS)
}

fn row(node: &NodeStatus) -> Row<'_> {
    let report = &node.report;
    let lent = report.donors.iter().map(|donor| {
        donor.stats.as_ref().map(|stats| pages_to_bytes(stats.lent_pages + stats.leaving_pages))
    });
    let programs = report.consumers.iter().map(|one| one.stats.as_ref().map(|s| s.pool_bytes));
    let untold = report.untold.iter().map(|untold| untold.pool_bytes);
    let volumes = report.volumes.iter().map(|one| one.stats.as_ref().map(|s| s.pool_bytes()));
    Row {
        name: &report.name,
        state: node.state,
        silent_ms: node.silent_ms,
        membership: node.membership,
        shown: node_state(node),
        location: report.location.as_deref(),
        pid: report.pid,
        version: &report.version,
        donors: report.donors.iter().map(|donor| donor.name.as_str()).collect(),
        lend_bytes: report.donors.iter().map(|donor| donor.lend_bytes).sum(),
        lent_bytes: lent.sum(),
        consumers: report.consumer_count(),
        volumes: report.volumes.len(),
        pool_bytes: programs.chain(untold).chain(volumes).sum(),
    }
}

fn table(nodes: &[Row<'_>]) -> Table {
    let mut table = Table::new([
        "NODE",
        "STATE",
        "LOCATION",
        ">LENDS",
        ">LENT",
        ">CONSUMERS",
        ">VOLUMES",
        ">BORROWED",
        "VERSION",
    ]);
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    for node in nodes {
        table.row([
            node.name.to_owned(),
            node.shown.clone(),
            or_dash(node.location.unwrap_or_default()),
            size(node.lend_bytes),
            known(node.lent_bytes),
            node.consumers.to_string(),
            node.volumes.to_string(),
            known(node.pool_bytes),
            or_dash(node.version),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_donor::Snapshot;
    use hecaton_node::cluster::report::NodeReport;
    use hecaton_node::donors::DonorReport;

    #[test]
    fn a_node_is_a_line() {
        let stats = Snapshot { lent_pages: 1 << 18, leaving_pages: 1 << 18, ..Snapshot::default() };
        let donor = DonorReport {
            name: "a".to_owned(),
            lend_bytes: 4 << 30,
            stats: Some(stats),
            ..DonorReport::default()
        };
        let report = NodeReport {
            name: "a".to_owned(),
            location: Some("rack1".to_owned()),
            donors: vec![donor.clone()],
            ..NodeReport::default()
        };
        let mut node = NodeStatus {
            state: NodeState::Up,
            silent_ms: 10,
            membership: MemberState::Active,
            report,
        };
        let line = |node: &NodeStatus| {
            let text = table(&[row(node)]).to_string();
            let line = text.lines().nth(1).expect("a row").to_owned();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(line(&node), ["a", "up", "rack1", "4G", "2G", "0", "0", "0", "-"]);
        // The memory of a donor that has not reported is unknown.
        node.report.donors.push(DonorReport { stats: None, ..donor });
        node.state = NodeState::Silent;
        node.silent_ms = 9000;
        let words = ["a", "silent", "for", "9", "s", "rack1", "8G", "-", "0", "0", "0", "-"];
        assert_eq!(line(&node), words);
    }
}
