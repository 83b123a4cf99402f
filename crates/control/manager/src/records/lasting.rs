//! Holds the registry data that outlive the manager's process, and their changes.
//!
//! Heartbeats bring back everything else that a manager knows.

use crate::harvest::HarvestRecord;
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::donors::DonorReport;
use hecaton_policy::cluster::choice::{Choice, Named};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Stored record of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// Number of the node's last incarnation.
    pub boot: u64,
    /// Process id of the node, for anyone who looks for it.
    pub pid: u32,
    /// Location of the node.
    pub location: Option<String>,
    /// Donors of the node. [`Lasting`] has further entries for them.
    pub donors: Vec<String>,
}

impl NodeRecord {
    /// Record of a node that reports this.
    pub fn of(report: &NodeReport) -> NodeRecord {
        NodeRecord {
            boot: report.boot,
            pid: report.pid,
            location: report.location.clone(),
            donors: report.donors.iter().map(|donor| donor.name.clone()).collect(),
        }
    }

    /// Report of a node that is known only from its record.
    pub fn recalled(self, name: &str) -> NodeReport {
        let donor = |name| DonorReport { name, ..DonorReport::default() };
        NodeReport {
            name: name.to_owned(),
            boot: self.boot,
            pid: self.pid,
            location: self.location,
            donors: self.donors.into_iter().map(donor).collect(),
            ..NodeReport::default()
        }
    }
}

/// All stored data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lasting {
    /// Epoch of the last manager; zero if there was none.
    pub epoch: u64,
    /// Nodes that have not deregistered.
    pub nodes: BTreeMap<String, NodeRecord>,
    /// Donors that drain: they must give back all that they have lent.
    pub draining: BTreeSet<String>,
    /// Most bytes that each donor may lend.
    pub limits: BTreeMap<String, u64>,
    /// Policy that divides the pool; `None`: each consumer has what it gets. A manager of a later
    /// version may have written it: the store keeps what this version does not know of it.
    pub policy: Option<Named>,
    /// Most harvest VMs of the cluster; `None`: as many as hosts have room for.
    pub harvest_quota: Option<u64>,
    /// Grants of nodes from the quota.
    pub harvest_records: BTreeMap<String, HarvestRecord>,
}

/// Changes to write: only the last value of each thing. So there are never more changes than
/// things, however long writes fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Epoch of the manager.
    pub epoch: Option<u64>,
    /// Nodes; `None` for removed ones.
    pub nodes: BTreeMap<String, Option<NodeRecord>>,
    /// Donors that begin to drain, or stop.
    pub draining: BTreeMap<String, bool>,
    /// Limits of donors; `None` for removed ones.
    pub limits: BTreeMap<String, Option<u64>>,
    /// Policy, if it changed; `Some(None)`: removed.
    pub policy: Option<Option<Choice>>,
    /// Quota of harvest VMs, if it changed; `Some(None)`: removed.
    pub harvest_quota: Option<Option<u64>>,
    /// Grants of nodes from the quota; `None` for removed ones.
    pub harvest_records: BTreeMap<String, Option<HarvestRecord>>,
}

impl Changes {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }

    /// Drops the changes that `written` has brought about. What has changed again since stays.
    pub fn settle(&mut self, written: &Changes) {
        let Changes { epoch, nodes, draining, limits, policy, harvest_quota, harvest_records } =
            written;
        self.epoch = self.epoch.filter(|_| self.epoch != *epoch);
        self.nodes.retain(|name, record| nodes.get(name) != Some(record));
        self.draining.retain(|donor, is_draining| draining.get(donor) != Some(is_draining));
        self.limits.retain(|donor, limit| limits.get(donor) != Some(limit));
        self.policy = self.policy.filter(|_| self.policy != *policy);
        self.harvest_quota = self.harvest_quota.filter(|_| self.harvest_quota != *harvest_quota);
        self.harvest_records.retain(|name, record| harvest_records.get(name) != Some(record));
    }
}

impl Lasting {
    /// Applies `changes` as a write would. For tests and simulations, which store data in memory.
    pub fn apply(&mut self, changes: &Changes) {
        self.epoch = changes.epoch.unwrap_or(self.epoch);
        for (name, record) in &changes.nodes {
            match record {
                Some(record) => _ = self.nodes.insert(name.clone(), record.clone()),
                None => _ = self.nodes.remove(name),
            }
        }
        for (name, draining) in &changes.draining {
            match draining {
                true => _ = self.draining.insert(name.clone()),
                false => _ = self.draining.remove(name),
            }
        }
        for (name, limit) in &changes.limits {
            match limit {
                Some(bytes) => _ = self.limits.insert(name.clone(), *bytes),
                None => _ = self.limits.remove(name),
            }
        }
        if let Some(policy) = changes.policy {
            self.policy = policy.map(Named::Known);
        }
        self.harvest_quota = changes.harvest_quota.unwrap_or(self.harvest_quota);
        for (name, record) in &changes.harvest_records {
            match record {
                Some(record) => _ = self.harvest_records.insert(name.clone(), *record),
                None => _ = self.harvest_records.remove(name),
            }
        }
    }
}
