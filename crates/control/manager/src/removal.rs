//! Whether a node may be taken out of the registry: pure.
//!
//! A node that is gone is forgotten after an hour ([`crate::registry::FORGOTTEN_AFTER`]); an
//! administrator who knows better need not wait. Only borrowers still need the node's memory: their
//! reports say whether they hold any of it.

use crate::registry::{NodeState, NodeStatus};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most borrowers that a refusal names.
const MOST_NAMED: usize = 4;

/// Why a node is not removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemovalError {
    /// There is none of that name.
    #[error("there is no node `{0}`; `hecaton node list` names those there are")]
    Unknown(String),
    /// It runs, and would be back with its next heartbeat.
    #[error(
        "node `{name}` runs (process {pid}): end it there, with SIGTERM, and it leaves by itself; what it \
         lends is taken away before with `hecaton node drain`"
    )]
    Up {
        /// The node.
        name: String,
        /// Its process.
        pid: u32,
    },
    /// This manager has just started.
    #[error(
        "node `{name}` was not heard of in the {} s since this manager began to lead; try again in some \
         seconds, when it may be",
        .since.as_secs()
    )]
    TooEarly {
        /// The node.
        name: String,
        /// For how long it could have been heard.
        since: Duration,
    },
    /// Somebody has memory there.
    #[error(
        "node `{name}` holds memory of {borrowers}: start it again and empty it with `hecaton node drain \
         {name}`, or wait until its borrowers have made other copies, or have ended"
    )]
    Lends {
        /// The node.
        name: String,
        /// Borrowers that hold memory there, joined.
        borrowers: String,
    },
}

/// Whether `name` may be removed, as the nodes are; `after` is the silence from which a node counts
/// as silent.
pub fn check(nodes: &[NodeStatus], name: &str, after: Duration) -> Result<(), RemovalError> {
    let Some(node) = nodes.iter().find(|node| node.report.name == name) else {
        return Err(RemovalError::Unknown(name.to_owned()));
    };
    let name = name.to_owned();
    if node.state == NodeState::Up {
        return Err(RemovalError::Up { name, pid: node.report.pid });
    }
    let silence = Duration::from_millis(node.silent_ms);
    if silence < after {
        return Err(RemovalError::TooEarly { name, since: silence });
    }
    let borrowers = borrowers(nodes, node);
    if borrowers.is_empty() {
        return Ok(());
    }
    let more = borrowers.len().saturating_sub(MOST_NAMED);
    let mut named: Vec<String> = borrowers.into_iter().take(MOST_NAMED).collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    Err(RemovalError::Lends { name, borrowers: named.join(", ") })
}

/// Consumers and volumes of other nodes that hold extents of this one's donors, as they have said
/// last.
fn borrowers(nodes: &[NodeStatus], lender: &NodeStatus) -> BTreeSet<String> {
    let donors: BTreeSet<&str> =
        lender.report.donors.iter().map(|donor| donor.name.as_str()).collect();
    let mut borrowers = BTreeSet::new();
    for node in nodes.iter().filter(|node| node.report.name != lender.report.name) {
        let report = &node.report;
        for consumer in &report.consumers {
            let held = consumer.stats.iter().flat_map(|stats| &stats.pool.donors);
            if held.into_iter().any(|one| one.bytes > 0 && donors.contains(one.name.as_str())) {
                borrowers.insert(format!("`{}` (node `{}`)", consumer.name, report.name));
            }
        }
        let untold = report.untold.iter().flat_map(|untold| &untold.held_pages);
        if untold.into_iter().any(|(donor, pages)| *pages > 0 && donors.contains(donor.as_str())) {
            borrowers.insert(format!("others of node `{}`", report.name));
        }
        for volume in &report.volumes {
            let held = volume.stats.iter().flat_map(|stats| &stats.pool.donors);
            if held.into_iter().any(|one| one.extents > 0 && donors.contains(one.name.as_str())) {
                borrowers.insert(format!("volume `{}` (node `{}`)", volume.name, report.name));
            }
        }
    }
    borrowers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watching::overview::tests::{donor, node, program};
    use hecaton_pager::DonorUse;

    const AFTER: Duration = Duration::from_secs(5);

    /// `b` borrows from `a`, which is silent.
    fn nodes() -> Vec<NodeStatus> {
        let mut sort = program("sort", 1);
        let held = DonorUse { name: "a".to_owned(), bytes: 1 << 24, ..DonorUse::default() };
        sort.stats.as_mut().expect("it has some").pool.donors = vec![held];
        let mut a = node("a", vec![donor("a", 1)], vec![]);
        a.state = NodeState::Silent;
        a.silent_ms = 60_000;
        vec![a, node("b", vec![], vec![sort])]
    }

    fn refusal(nodes: &[NodeStatus], name: &str) -> String {
        check(nodes, name, AFTER).expect_err("refused").to_string()
    }

    #[test]
    fn a_node_that_runs_is_not_removed_nor_one_that_may() {
        let mut nodes = nodes();
        assert!(refusal(&nodes, "x").contains("there is no node `x`"));
        assert!(refusal(&nodes, "b").contains("node `b` runs"), "it would be back in a second");
        nodes[0].silent_ms = 2000;
        assert!(refusal(&nodes, "a").contains("in the 2 s since"));
    }

    #[test]
    fn a_node_is_not_removed_while_somebody_has_memory_there() {
        let mut nodes = nodes();
        let text = refusal(&nodes, "a");
        assert!(
            text.contains("memory of `sort` (node `b`): start it again and empty it"),
            "{text}"
        );
        // It has made its copies elsewhere.
        let stats = nodes[1].report.consumers[0].stats.as_mut().expect("it has some");
        stats.pool.donors[0].bytes = 0;
        assert_eq!(check(&nodes, "a", AFTER), Ok(()));
        nodes[1].report.consumers.clear();
        assert_eq!(check(&nodes, "a", AFTER), Ok(()));
    }

    #[test]
    fn borrowers_that_are_not_told_of_count() {
        let mut nodes = nodes();
        nodes[1].report = nodes[1].report.clone().in_brief(0);
        assert!(refusal(&nodes, "a").contains("others of node `b`"));
    }

    #[test]
    fn a_nodes_own_programs_are_gone_with_it() {
        let mut nodes = nodes();
        let consumers = std::mem::take(&mut nodes[1].report.consumers);
        nodes[0].report.consumers = consumers;
        assert_eq!(check(&nodes, "a", AFTER), Ok(()));
    }

    #[test]
    fn not_more_are_named_than_are_read() {
        let mut nodes = nodes();
        let one = nodes[1].report.consumers[0].clone();
        nodes[1].report.consumers = (0..9)
            .map(|number| hecaton_node::pagers::ConsumerReport {
                name: format!("p{number}"),
                ..one.clone()
            })
            .collect();
        assert!(refusal(&nodes, "a").contains("`p3` (node `b`), 5 more: start"));
    }
}
