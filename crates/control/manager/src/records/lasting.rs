//! What of the registry outlives the manager's process, and what of that has changed.
//!
//! Everything else a manager knows comes back with the next heartbeats.

use crate::harvest::HarvestRecord;
use hecaton_policy::cluster::choice::{Choice, Named};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What is kept of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// Its last life.
    pub boot: u64,
    /// Its process, for whoever looks for it.
    pub pid: u32,
    /// Where it stands.
    pub location: Option<String>,
    /// Its donors, which have words of their own below.
    pub donors: Vec<String>,
}

/// All that is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lasting {
    /// The epoch of the last manager; zero if there was none.
    pub epoch: u64,
    /// The nodes that have not said farewell.
    pub nodes: BTreeMap<String, NodeRecord>,
    /// Donors that are to give back all that they have lent.
    pub draining: BTreeSet<String>,
    /// Most bytes that donors are to lend.
    pub limits: BTreeMap<String, u64>,
    /// Who may hold how much of the pool; `None`: everybody what it gets. A manager of a later version may have
    /// written it: what this one does not know of it stays where it is kept.
    pub policy: Option<Named>,
    /// Most harvest VMs of the cluster; `None`: as many as hosts have room for.
    pub harvest_quota: Option<u64>,
    /// What nodes have been granted of it.
    pub harvest_records: BTreeMap<String, HarvestRecord>,
}

/// What is to be written down: the last word on each thing, so that there is no more of it than there
/// are things, however long it cannot be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The epoch.
    pub epoch: Option<u64>,
    /// Nodes; `None` for those that are forgotten.
    pub nodes: BTreeMap<String, Option<NodeRecord>>,
    /// Donors that are to drain, or not any more.
    pub draining: BTreeMap<String, bool>,
    /// Limits of donors; `None` for those that were lifted.
    pub limits: BTreeMap<String, Option<u64>>,
    /// The policy, if it is another one; `Some(None)`: none any more.
    pub policy: Option<Option<Choice>>,
    /// The quota of harvest VMs, if it is another one; `Some(None)`: none any more.
    pub harvest_quota: Option<Option<u64>>,
    /// What nodes have been granted of it; `None` for those that are forgotten.
    pub harvest_records: BTreeMap<String, Option<HarvestRecord>>,
}

impl Changes {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }
}

impl Lasting {
    /// What is kept once `changes` are written. For tests and simulations, which keep it in memory.
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
