//! The cluster's quota of harvest VMs, and what of it each node has been granted.
//!
//! A harvest VM sees memory that others used before, so the operator limits the number of harvest
//! VMs (section 4.4 of the memory-harvesting paper). A node admits one only under a grant. A grant
//! counts from before the node can hear of it, until the node says that it goes by a lower one. The
//! manager writes down what counts for each node. So neither a restarted manager nor an unreachable
//! node causes a place to be granted twice.

use crate::registry::SILENT_AFTER;
use hecaton_node::agent::{HarvestGrant, HarvestWord};
use hecaton_node::cluster::report::NodeReport;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Grant of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestRecord {
    /// Most harvest VMs that it is to have.
    pub machines: u64,
    /// The number of that grant. A node's rise.
    pub number: u64,
    /// Most that it can have by all that it was told; none: it may not have heard of a quota yet.
    pub counted: Option<u64>,
}

/// How the quota stands; in `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestStatus {
    /// Most harvest VMs of all nodes together.
    pub quota: u64,
    /// Harvest VMs that count against the quota: nodes have them, or may admit them without asking.
    pub counted: u64,
    /// Nodes that may not have heard of the quota yet: until they have, nobody is granted another
    /// one.
    #[serde(default)]
    pub unheard: Vec<String>,
}

/// The cluster's quota, and the grants of its nodes.
#[derive(Debug, Default)]
pub(crate) struct HarvestQuota {
    quota: Option<u64>,
    records: BTreeMap<String, HarvestRecord>,
}

/// A record that has changed: what it is now, if anything.
pub(crate) type Changed = (String, Option<HarvestRecord>);

impl HarvestQuota {
    pub(crate) fn new(quota: Option<u64>, records: BTreeMap<String, HarvestRecord>) -> Self {
        HarvestQuota { quota, records }
    }

    pub(crate) fn quota(&self) -> Option<u64> {
        self.quota
    }

    /// Sets the quota, or lifts it. `nodes`: those that are known, each with whether it can have an
    /// agent that knows of no quota.
    pub(crate) fn choose<'a>(
        &mut self,
        quota: Option<u64>,
        nodes: impl Iterator<Item = (&'a str, bool)>,
    ) -> Vec<Changed> {
        self.quota = quota;
        let mut changed = Vec::new();
        match quota {
            // Without a quota, a node may have any number of harvest VMs.
            None => {
                let records = std::mem::take(&mut self.records);
                changed.extend(records.into_keys().map(|name| (name, None)));
            }
            Some(_) => {
                for (name, may_have_any) in nodes {
                    if !self.records.contains_key(name) {
                        let counted = if may_have_any { None } else { Some(0) };
                        let record = HarvestRecord { machines: 0, number: 0, counted };
                        changed.push(self.note(name, record));
                    }
                }
            }
        }
        changed
    }

    /// Hears what a node has, and grants it what it may have from now on.
    pub(crate) fn hear(&mut self, now: Duration, report: &NodeReport) -> Option<Changed> {
        let quota = self.quota?;
        let before = self.records.get(&report.name).copied();
        let Some(agent) = &report.agent else {
            // It has none, or that has not looked yet, and has admitted nobody then.
            let nothing = HarvestRecord { machines: 0, number: 0, counted: Some(0) };
            return before.is_none().then(|| self.note(&report.name, nothing));
        };
        let there = agent.harvest_vms();
        let mut record =
            before.unwrap_or(HarvestRecord { machines: there, number: 0, counted: None });
        record.counted = match agent.harvest.word {
            // All of it was seen after the grant was in force.
            HarvestWord::Grant(grant) if grant.number == record.number && record.number > 0 => {
                Some(record.machines.max(there))
            }
            // An agent that has just begun.
            HarvestWord::Nothing if before.is_none() => Some(record.machines.max(there)),
            _ => record.counted.map(|counted| counted.max(there)),
        };
        let said = match agent.harvest.word {
            HarvestWord::Grant(grant) => grant.number,
            HarvestWord::Nothing | HarvestWord::Unlimited => 0,
        };
        let others = self.counted_without(&report.name);
        let is_over = others.saturating_add(record.counted.unwrap_or(u64::MAX)) > quota;
        let wanted = match is_over {
            true => there,
            false => there.saturating_add(agent.harvest.wanted),
        };
        let most = match wanted > record.machines {
            // A manager that has started anew hears all nodes first.
            true if now < SILENT_AFTER => record.machines,
            true => wanted.min(quota.saturating_sub(others)).max(record.machines),
            false => wanted,
        };
        if most != record.machines || record.number == 0 {
            record.machines = most;
            record.number = record.number.max(said) + 1;
            record.counted = record.counted.map(|counted| counted.max(most));
        }
        (before != Some(record)).then(|| self.note(&report.name, record))
    }

    /// Grant of a node; `None` without a quota.
    pub(crate) fn of(&self, node: &str) -> Option<HarvestGrant> {
        let quota = self.quota?;
        // One without an agent has nothing to keep to.
        let record = self.records.get(node).filter(|record| record.number > 0);
        let record = record.map_or((0, 0), |record| (record.machines, record.number));
        Some(HarvestGrant { machines: record.0, number: record.1, quota })
    }

    /// A node has gone. Its machines may run on: what it was granted stays so until it comes back,
    /// or is removed.
    pub(crate) fn gone(&mut self, node: &str) -> Option<Changed> {
        let record = self.records.get(node)?;
        (record.counted == Some(0)).then(|| self.forget(node)).flatten()
    }

    /// Nobody has anything there any more.
    pub(crate) fn forget(&mut self, node: &str) -> Option<Changed> {
        self.records.remove(node).map(|_| (node.to_owned(), None))
    }

    pub(crate) fn knows(&self, node: &str) -> bool {
        self.records.contains_key(node)
    }

    pub(crate) fn status(&self) -> Option<HarvestStatus> {
        let quota = self.quota?;
        let counts = self.records.values().filter_map(|record| record.counted);
        let unheard = self.records.iter().filter(|(_, record)| record.counted.is_none());
        Some(HarvestStatus {
            quota,
            counted: counts.fold(0, u64::saturating_add),
            unheard: unheard.map(|(name, _)| name.clone()).collect(),
        })
    }

    fn note(&mut self, node: &str, record: HarvestRecord) -> Changed {
        self.records.insert(node.to_owned(), record);
        (node.to_owned(), Some(record))
    }

    fn counted_without(&self, node: &str) -> u64 {
        let others = self.records.iter().filter(|(name, _)| *name != node);
        others.fold(0, |sum, (_, record)| {
            u64::saturating_add(sum, record.counted.unwrap_or(u64::MAX))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::lasting::Lasting;
    use crate::registry::Registry;
    use hecaton_node::agent::{AgentReport, HarvestShare, MachineReport};
    use serde_json::json;

    /// A node whose agent goes by what it was told, as the real one does.
    struct Node {
        name: &'static str,
        word: HarvestWord,
        machines: u64,
        waiting: u64,
    }

    impl Node {
        fn new(name: &'static str, machines: u64, waiting: u64) -> Node {
            Node { name, word: HarvestWord::Nothing, machines, waiting }
        }

        fn report(&self) -> NodeReport {
            let machine = json!({
                "name": "m", "kind": "harvest", "state": "running", "pid": 1, "base_bytes": 1, "max_bytes": 1,
                "requested_bytes": 0, "harvested_bytes": 0, "held_bytes": 0,
            });
            let machine: MachineReport = serde_json::from_value(machine).expect("a machine");
            let agent = AgentReport {
                machines: vec![machine; self.machines as usize],
                harvest: HarvestShare { word: self.word, wanted: self.waiting.min(1) },
                ..AgentReport::default()
            };
            NodeReport { name: self.name.into(), boot: 1, agent: Some(agent), ..Default::default() }
        }

        /// A heartbeat whose answer is heard, and who waits is admitted then.
        fn beat(&mut self, registry: &mut Registry, at: u64) {
            let answer = registry.heartbeat(s(at), self.name, self.report()).expect("taken");
            self.word = answer.harvest.map_or(HarvestWord::Unlimited, HarvestWord::Grant);
            self.admit();
        }

        fn admit(&mut self) {
            let may = match self.word {
                HarvestWord::Nothing => 0,
                HarvestWord::Unlimited => u64::MAX,
                HarvestWord::Grant(grant) => grant.machines,
            };
            while self.waiting > 0 && self.machines < may {
                (self.waiting, self.machines) = (self.waiting - 1, self.machines + 1);
            }
        }
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Registry that the next manager reads.
    fn restarted(registry: &Registry, kept: &mut Lasting) -> Registry {
        kept.apply(registry.changes());
        Registry::new(kept.clone())
    }

    #[test]
    fn no_more_are_admitted_than_the_quota_whoever_asks() {
        let mut registry = Registry::default();
        registry.set_harvest_quota(Some(3));
        let mut nodes = [Node::new("a", 0, 9), Node::new("b", 0, 9)];
        for at in 5..20 {
            nodes.iter_mut().for_each(|node| node.beat(&mut registry, at));
            assert!(nodes.iter().map(|node| node.machines).sum::<u64>() <= 3);
        }
        assert_eq!(nodes.iter().map(|node| node.machines).sum::<u64>(), 3);
        assert!(nodes.iter().all(|node| node.machines > 0), "in turns");
        // One ends, and the other node has its place.
        (nodes[0].machines, nodes[0].waiting) = (0, 0);
        for at in 20..30 {
            nodes.iter_mut().for_each(|node| node.beat(&mut registry, at));
        }
        assert_eq!(nodes[1].machines, 3);
        let status = registry.status(s(30)).harvest.expect("it is told");
        assert_eq!((status.quota, status.counted, status.unheard), (3, 3, vec![]));
    }

    /// Its answer may have been heard, and what it granted taken.
    #[test]
    fn what_was_granted_to_a_node_that_is_away_counts_also_with_the_next_manager() {
        let (mut registry, mut kept) = (Registry::default(), Lasting::default());
        registry.set_harvest_quota(Some(2));
        let (mut a, mut b) = (Node::new("a", 0, 1), Node::new("b", 0, 9));
        a.beat(&mut registry, 5);
        let lost = registry.heartbeat(s(6), "a", a.report()).expect("taken");
        assert_eq!(a.machines, 1);
        assert_eq!(lost.harvest.unwrap().machines, 1);
        for round in 0..3 {
            registry = restarted(&registry, &mut kept);
            for at in 5..5000 {
                b.beat(&mut registry, at);
            }
            assert_eq!(
                b.machines, 1,
                "round {round}: `a` has the other one, though it is forgotten"
            );
        }
        registry.remove(s(5000), "a").expect("who knows better says so");
        for at in 5000..5010 {
            b.beat(&mut registry, at);
        }
        assert_eq!(b.machines, 2);
    }

    /// Less counts when the node has said so, and not when it was told.
    #[test]
    fn a_grant_that_is_taken_back_counts_until_the_node_goes_by_the_lower_one() {
        let mut registry = Registry::default();
        registry.set_harvest_quota(Some(1));
        let (mut a, mut b) = (Node::new("a", 0, 1), Node::new("b", 0, 1));
        let granted = registry.heartbeat(s(5), "a", a.report()).unwrap().harvest.unwrap();
        assert_eq!(granted.machines, 1);
        a.word = HarvestWord::Grant(granted);
        // The waiting VM has gone. The answer that takes its place back is lost.
        a.waiting = 0;
        let lower = registry.heartbeat(s(6), "a", a.report()).unwrap().harvest.unwrap();
        assert_eq!(lower.machines, 0);
        b.beat(&mut registry, 6);
        assert_eq!(b.machines, 0, "`a` may still admit one");
        a.waiting = 1;
        a.admit();
        assert_eq!(a.machines, 1);
        a.beat(&mut registry, 7);
        b.beat(&mut registry, 7);
        assert_eq!((a.machines, b.machines), (1, 0));
    }

    #[test]
    fn a_quota_of_a_running_cluster_evicts_nobody_and_waits_until_all_have_heard() {
        let mut registry = Registry::default();
        let (mut a, mut b) = (Node::new("a", 0, 2), Node::new("b", 0, 1));
        a.beat(&mut registry, 5);
        b.beat(&mut registry, 5);
        assert_eq!((a.machines, b.machines), (2, 1), "without one, nobody waits");
        registry.set_harvest_quota(Some(4));
        b.waiting = 9;
        b.beat(&mut registry, 6);
        b.beat(&mut registry, 7);
        assert_eq!(b.machines, 1, "`a` may have admitted any number");
        assert_eq!(registry.status(s(7)).harvest.unwrap().unheard, ["a"]);
        for at in 8..12 {
            a.beat(&mut registry, at);
            b.beat(&mut registry, at);
        }
        assert_eq!((a.machines, b.machines), (2, 2));
        registry.set_harvest_quota(Some(1));
        a.beat(&mut registry, 12);
        assert_eq!((a.machines, registry.status(s(12)).harvest.unwrap().counted), (2, 4));
        registry.set_harvest_quota(None);
        b.beat(&mut registry, 13);
        assert_eq!((b.waiting, registry.status(s(13)).harvest), (0, None));
    }

    #[test]
    fn a_manager_whose_registry_is_lost_learns_the_quota_from_nodes() {
        let mut registry = Registry::default();
        registry.set_harvest_quota(Some(1));
        let mut a = Node::new("a", 0, 2);
        (5..9).for_each(|at| a.beat(&mut registry, at));
        let mut next = Registry::default();
        (0..9).for_each(|at| a.beat(&mut next, at));
        assert_eq!((a.machines, next.harvest_quota()), (1, Some(1)));
    }
}
