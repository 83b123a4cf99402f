//! The nodes of the cluster, as far as they have been heard from.
//!
//! Pure: time comes in as an argument, on one monotonic scale of the caller's choice. Nothing here
//! is durable, because nothing needs to be: every node says everything about itself once a second.

use hecaton_node::report::{DonorAddress, HeartbeatAnswer, NameError, NodeReport, check_name};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most nodes that are remembered.
pub const MAX_NODES: usize = 1024;

/// A node that was silent for this long is not offered to borrowers any more.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);

/// A node that was silent for this long is forgotten.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Whether a node is heard from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Its last heartbeat is fresh.
    Up,
    /// It missed several heartbeats: it, or the way to it, may be down.
    Silent,
}

/// Why a heartbeat is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The path names one node, the report another.
    #[error("the heartbeat of node `{0}` calls itself `{1}`")]
    OtherName(String, String),
    /// Another node of that name is up.
    #[error("the name `{name}` is taken by a node that is up (process {pid}); choose another one")]
    NameTaken {
        /// The name.
        name: String,
        /// The process that has it.
        pid: u32,
    },
    /// A donor of that name belongs to another node that is up.
    #[error("the donor name `{donor}` is taken by node `{node}`; choose another one")]
    DonorTaken {
        /// The donor's name.
        donor: String,
        /// The node that has it.
        node: String,
    },
    /// There are [`MAX_NODES`].
    #[error("the manager knows {MAX_NODES} nodes, and takes no more")]
    TooManyNodes,
}

/// A node in [`ClusterStatus`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Whether it is heard from.
    pub state: NodeState,
    /// Milliseconds since its last heartbeat.
    pub silent_ms: u64,
    /// What it said then.
    #[serde(flatten)]
    pub report: NodeReport,
}

/// All that the manager knows; the answer to `GET /v1/status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The manager's version.
    pub version: String,
    /// Milliseconds since the manager started.
    pub uptime_ms: u64,
    /// The nodes, by name.
    pub nodes: Vec<NodeStatus>,
}

/// The nodes that were heard from.
#[derive(Debug, Default)]
pub struct Registry {
    nodes: BTreeMap<String, Entry>,
    /// Donors that are to give back all that they have lent.
    draining: BTreeSet<String>,
    /// Most bytes that donors are to lend.
    limits: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Entry {
    heard: Duration,
    report: NodeReport,
}

impl Entry {
    fn state(&self, now: Duration) -> NodeState {
        match now.saturating_sub(self.heard) >= SILENT_AFTER {
            true => NodeState::Silent,
            false => NodeState::Up,
        }
    }
}

impl Registry {
    /// Takes a node's heartbeat, and answers with what the node should know.
    pub fn heartbeat(
        &mut self,
        now: Duration,
        name: &str,
        report: NodeReport,
    ) -> Result<HeartbeatAnswer, RegistryError> {
        self.forget_long_silent(now);
        check_name(name)?;
        if report.name != name {
            return Err(RegistryError::OtherName(name.to_owned(), report.name));
        }
        self.check_free(now, &report)?;
        if !self.nodes.contains_key(name) && self.nodes.len() >= MAX_NODES {
            return Err(RegistryError::TooManyNodes);
        }
        if !self.nodes.contains_key(name) {
            // This manager has started anew, or the node was silent for very long: what was asked of
            // its donors goes on.
            for donor in &report.donors {
                let Some(stats) = &donor.stats else { continue };
                if stats.draining {
                    self.draining.insert(donor.name.clone());
                }
                if let Some(limit_bytes) = stats.told_limit_bytes {
                    self.limits.insert(donor.name.clone(), limit_bytes);
                }
            }
        }
        let own = report.donors.iter().map(|donor| &donor.name);
        let draining = own.clone().filter(|name| self.draining.contains(*name)).cloned();
        let limits = own.filter_map(|name| Some((name.clone(), *self.limits.get(name)?)));
        let (draining, limits) = (draining.collect(), limits.collect());
        self.nodes.insert(name.to_owned(), Entry { heard: now, report });
        Ok(HeartbeatAnswer { donors: self.donors(now), draining, limits })
    }

    /// Takes a node's farewell: it is forgotten at once. One from an earlier life of the node, or
    /// about a node that is not known, changes nothing.
    pub fn farewell(&mut self, name: &str, boot: u64) {
        let is_it = self.nodes.get(name).is_some_and(|entry| entry.report.boot == boot);
        if let Some(entry) = is_it.then(|| self.nodes.remove(name)).flatten() {
            for donor in entry.report.donors {
                self.draining.remove(&donor.name);
                self.limits.remove(&donor.name);
            }
        }
    }

    /// Asks a donor to give back all that it has lent, or to go on lending. False if there is no such
    /// donor.
    pub fn drain(&mut self, donor: &str, draining: bool) -> bool {
        let exists = self.has_donor(donor);
        match draining {
            true if exists => _ = self.draining.insert(donor.to_owned()),
            true => {}
            false => _ = self.draining.remove(donor),
        }
        exists
    }

    /// Asks a donor to lend no more than so many bytes and to have the rest back, or to lend again
    /// all that it has. False if there is no such donor.
    pub fn limit(&mut self, donor: &str, limit_bytes: Option<u64>) -> bool {
        let exists = self.has_donor(donor);
        match limit_bytes {
            Some(limit_bytes) if exists => {
                _ = self.limits.insert(donor.to_owned(), limit_bytes);
            }
            Some(_) => {}
            None => _ = self.limits.remove(donor),
        }
        exists
    }

    fn has_donor(&self, donor: &str) -> bool {
        let mut donors = self.nodes.values().flat_map(|entry| &entry.report.donors);
        donors.any(|known| known.name == donor)
    }

    /// The donors of the nodes that are up.
    pub fn donors(&self, now: Duration) -> Vec<DonorAddress> {
        let up = self.nodes.values().filter(|entry| entry.state(now) == NodeState::Up);
        up.flat_map(|entry| entry.report.donor_addresses()).collect()
    }

    /// All nodes that are remembered.
    pub fn status(&self, now: Duration) -> ClusterStatus {
        let nodes = self.nodes.values().map(|entry| NodeStatus {
            state: entry.state(now),
            silent_ms: now.saturating_sub(entry.heard).as_millis() as u64,
            report: entry.report.clone(),
        });
        ClusterStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: now.as_millis() as u64,
            nodes: nodes.collect(),
        }
    }

    /// Whether no other node that is up has the report's name, or one of its donors' names.
    fn check_free(&self, now: Duration, report: &NodeReport) -> Result<(), RegistryError> {
        let up = self.nodes.iter().filter(|(_, entry)| entry.state(now) == NodeState::Up);
        for (name, entry) in up {
            if *name == report.name {
                if entry.report.boot != report.boot {
                    let pid = entry.report.pid;
                    return Err(RegistryError::NameTaken { name: name.clone(), pid });
                }
                continue;
            }
            let theirs = &entry.report.donors;
            let taken = |name: &str| theirs.iter().any(|donor| donor.name == name);
            if let Some(donor) = report.donors.iter().find(|donor| taken(&donor.name)) {
                let (donor, node) = (donor.name.clone(), name.clone());
                return Err(RegistryError::DonorTaken { donor, node });
            }
        }
        Ok(())
    }

    fn forget_long_silent(&mut self, now: Duration) {
        self.nodes.retain(|_, entry| now.saturating_sub(entry.heard) < FORGOTTEN_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_donor::Snapshot;
    use hecaton_node::donors::{DonorReport, DonorState};
    use proptest::prelude::*;

    #[test]
    fn a_donor_drains_until_that_is_cancelled() {
        let mut registry = Registry::default();
        let now = Duration::ZERO;
        let beat = |registry: &mut Registry, report| {
            registry.heartbeat(now, "a", report).unwrap().draining
        };
        assert!(beat(&mut registry, report("a", 1, &["d"])).is_empty());
        assert!(!registry.drain("x", true), "there is none");
        assert!(registry.drain("d", true));
        assert_eq!(beat(&mut registry, report("a", 1, &["d"])), ["d"]);
        assert!(registry.drain("d", false));
        assert!(beat(&mut registry, report("a", 1, &["d"])).is_empty());
        // A manager that starts anew learns of it from the donor.
        let mut draining = report("a", 1, &["d", "e"]);
        draining.donors[0].stats = Some(Snapshot { draining: true, ..Snapshot::default() });
        let mut successor = Registry::default();
        assert_eq!(beat(&mut successor, draining), ["d"]);
    }

    #[test]
    fn a_donor_lends_less_until_that_is_cancelled() {
        let mut registry = Registry::default();
        let now = Duration::ZERO;
        let beat =
            |registry: &mut Registry, report| registry.heartbeat(now, "a", report).unwrap().limits;
        assert!(beat(&mut registry, report("a", 1, &["d", "e"])).is_empty());
        assert!(!registry.limit("x", Some(1)), "there is none");
        assert!(registry.limit("d", Some(1 << 30)));
        let told = BTreeMap::from([("d".to_owned(), 1 << 30)]);
        assert_eq!(beat(&mut registry, report("a", 1, &["d", "e"])), told);
        // A manager that starts anew learns of it from the donor.
        let mut limited = report("a", 1, &["d", "e"]);
        let stats = Snapshot { told_limit_bytes: Some(1 << 30), ..Snapshot::default() };
        limited.donors[0].stats = Some(stats);
        let mut successor = Registry::default();
        assert_eq!(beat(&mut successor, limited), told);
        assert!(registry.limit("d", None));
        assert!(beat(&mut registry, report("a", 1, &["d"])).is_empty());
    }

    fn report(name: &str, boot: u64, donors: &[&str]) -> NodeReport {
        let donor = |name: &&str| DonorReport {
            name: (*name).to_owned(),
            state: DonorState::Serving,
            address: Some(([127, 0, 0, 1], 7000).into()),
            ..Default::default()
        };
        NodeReport {
            name: name.to_owned(),
            boot,
            pid: boot as u32,
            donors: donors.iter().map(donor).collect(),
            ..Default::default()
        }
    }

    const START: Duration = Duration::from_secs(100);

    fn names(donors: Vec<DonorAddress>) -> Vec<String> {
        donors.into_iter().map(|donor| donor.name).collect()
    }

    #[test]
    fn the_donors_of_all_live_nodes_are_offered() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &["a-1", "a-2"])).expect("taken");
        let answer = registry.heartbeat(START, "b", report("b", 2, &["b-1"])).expect("taken");
        assert_eq!(names(answer.donors), ["a-1", "a-2", "b-1"]);

        let later = START + SILENT_AFTER;
        registry.heartbeat(later, "b", report("b", 2, &["b-1"])).expect("taken");
        assert_eq!(names(registry.donors(later)), ["b-1"]);
        let states: Vec<_> = registry.status(later).nodes.iter().map(|node| node.state).collect();
        assert_eq!(states, [NodeState::Silent, NodeState::Up]);
    }

    #[test]
    fn a_name_belongs_to_the_node_that_is_up() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &[])).expect("taken");
        let other = registry.heartbeat(START, "a", report("a", 2, &[]));
        assert_eq!(other, Err(RegistryError::NameTaken { name: "a".into(), pid: 1 }));
        registry
            .heartbeat(START + SILENT_AFTER, "a", report("a", 2, &[]))
            .expect("the first one is silent");
    }

    #[test]
    fn a_donor_name_belongs_to_one_node() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &["x"])).expect("taken");
        let other = registry.heartbeat(START, "b", report("b", 2, &["x"]));
        assert_eq!(other, Err(RegistryError::DonorTaken { donor: "x".into(), node: "a".into() }));
    }

    #[test]
    fn a_farewell_counts_only_from_the_life_that_is_known() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &["x"])).expect("taken");
        registry.farewell("a", 7);
        registry.farewell("b", 1);
        assert_eq!(names(registry.donors(START)), ["x"]);
        registry.farewell("a", 1);
        assert!(registry.status(START).nodes.is_empty());
    }

    #[test]
    fn wrong_names_are_refused() {
        let mut registry = Registry::default();
        assert!(matches!(
            registry.heartbeat(START, "a b", report("a b", 1, &[])),
            Err(RegistryError::Name(_))
        ));
        assert!(matches!(
            registry.heartbeat(START, "a", report("b", 1, &[])),
            Err(RegistryError::OtherName(..))
        ));
    }

    #[test]
    fn the_number_of_nodes_is_bounded() {
        let mut registry = Registry::default();
        for number in 0..MAX_NODES {
            let name = format!("n{number}");
            registry.heartbeat(START, &name, report(&name, 1, &[])).expect("taken");
        }
        let one_more = registry.heartbeat(START, "more", report("more", 1, &[]));
        assert_eq!(one_more, Err(RegistryError::TooManyNodes));
        let later = START + FORGOTTEN_AFTER;
        registry.heartbeat(later, "more", report("more", 1, &[])).expect("the rest is forgotten");
        assert_eq!(registry.status(later).nodes.len(), 1);
    }

    proptest! {
        /// Whatever heartbeats come, from whichever lives: no two live nodes offer one donor name,
        /// and the donors offered are those of the nodes shown as up.
        #[test]
        fn the_directory_is_unambiguous(
            beats in prop::collection::vec((0u64..3000, 0usize..4, 0u64..2, 0usize..6), 1..60),
        ) {
            let node_names = ["a", "b", "c", "d"];
            let donor_names = ["u", "v", "w", "x", "y", "z"];
            let mut registry = Registry::default();
            let mut now = START;
            for (passed_ms, node, boot, donor) in beats {
                now += Duration::from_millis(passed_ms);
                let name = node_names[node];
                let _ = registry.heartbeat(now, name, report(name, boot, &[donor_names[donor]]));
                let mut offered = names(registry.donors(now));
                let up = registry.status(now).nodes.into_iter();
                let up = up.filter(|node| node.state == NodeState::Up).count();
                prop_assert_eq!(up, offered.len());
                offered.sort();
                let count = offered.len();
                offered.dedup();
                prop_assert_eq!(count, offered.len());
            }
        }
    }
}
