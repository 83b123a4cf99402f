//! Tracks the cluster's nodes from their heartbeats.
//!
//! Pure: time comes in as an argument, on one monotonic scale of the caller's choice. Every node
//! reports all of itself once a second. A restarted manager must know [`Changes`] before that; the
//! caller writes them before it answers.

use crate::harvest::{HarvestQuota, HarvestStatus};
use crate::members::Members;
use crate::quotas::Quotas;
use crate::records::lasting::{Changes, Lasting, NodeRecord};
use crate::removal::{self, RemovalError};
use crate::roster::Roster;
use hecaton_node::cluster::report::{DonorAddress, HeartbeatAnswer};
use hecaton_node::cluster::report::{NameError, NodeReport, check_name};
use hecaton_node::{agent::HarvestWord, pagers::MAX_PAGERS};
use hecaton_policy::cluster::choice::{Choice, Named};
pub use hecaton_policy::cluster::membership::NodeState as MemberState;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most nodes that are remembered.
pub const MAX_NODES: usize = 10_240;

/// Most consumers that all nodes together report one by one each second: some 25 MB of reports.
const MAX_TOLD: usize = 16_384;

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
    /// The node has followed a later manager than this one.
    #[error(
        "this manager's registry is of epoch {own}, and the node has followed one of epoch {newer}: \
         another manager runs, or the registry is an old copy; stop one of the two managers, or move \
         the old registry aside and start this one again"
    )]
    Superseded {
        /// This manager's epoch.
        own: u64,
        /// The one that the node has followed.
        newer: u64,
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
    /// Milliseconds since its last heartbeat, or since the manager started if it heard none yet.
    pub silent_ms: u64,
    /// Whether it takes part, leaves, has left, or recovers.
    #[serde(default)]
    pub membership: MemberState,
    /// Last report of the node.
    #[serde(flatten)]
    pub report: NodeReport,
}

impl NodeStatus {
    /// In a word, but for how long it was silent.
    pub fn word(&self) -> &'static str {
        match (self.state, self.membership) {
            (NodeState::Silent, _) => "silent",
            (NodeState::Up, MemberState::Active) => "up",
            (NodeState::Up, MemberState::Leaving) => "leaving",
            (NodeState::Up, MemberState::Inactive) => "left",
            (NodeState::Up, MemberState::Recovery) => "recovery",
        }
    }
}

/// All that the manager knows; the answer to `GET /v1/status`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The manager's version.
    pub version: String,
    /// Milliseconds since the manager started.
    pub uptime_ms: u64,
    /// Which of the cluster's managers it is: each has a higher number than those before it.
    #[serde(default)]
    pub epoch: u64,
    /// Policy that divides the pool; none: each consumer holds what it gets.
    #[serde(default)]
    pub policy: Option<Named>,
    /// Policy in use while the manager is of an earlier version than `policy` and does not know it;
    /// none then: the manager still listens to what nodes have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_instead: Option<Named>,
    /// How the quota of harvest VMs stands; none: there are as many as hosts have room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harvest: Option<HarvestStatus>,
    /// The nodes, by name.
    pub nodes: Vec<NodeStatus>,
}

impl ClusterStatus {
    /// The policy, for people: as `hecaton policy set` takes it, if the manager knows it.
    pub fn policy_in_words(&self) -> Option<String> {
        let policy = self.policy.as_ref()?;
        let Some(instead) = &self.policy_instead else { return Some(policy.to_string()) };
        let name = match policy {
            Named::Known(choice) => choice.name(),
            Named::Unknown { policy } => policy,
        };
        Some(format!(
            "{name:?}, which the manager of version {} does not know: {instead} in its place",
            self.version
        ))
    }
}

/// The nodes that were heard from.
#[derive(Debug)]
pub struct Registry {
    epoch: u64,
    /// Nothing was known when this manager started: what nodes know of the epoch counts.
    is_new: bool,
    nodes: BTreeMap<String, Entry>,
    /// Nodes that are up or may just have fallen silent, and silent ones: by last heartbeat.
    fresh: BTreeSet<(Duration, String)>,
    silent: BTreeSet<(Duration, String)>,
    roster: Roster,
    /// Consumers of all nodes.
    consumers: u64,
    /// Donors that are to give back all that they have lent.
    draining: BTreeSet<String>,
    /// Most bytes that donors are to lend.
    limits: BTreeMap<String, u64>,
    /// Where the nodes stand: told by themselves.
    members: Members,
    quotas: Quotas,
    /// Whether this manager, or the one before it, knows if there is a policy.
    policy_is_known: bool,
    harvest: HarvestQuota,
    /// Whether it, or the one before, knows if there is a quota of harvest VMs.
    harvest_is_known: bool,
    /// Changes that are not written down yet.
    changes: Changes,
}

#[derive(Debug)]
struct Entry {
    /// `None` if only the record of it is known, from the manager before this one.
    heard: Option<Duration>,
    report: NodeReport,
}

impl Entry {
    fn state(&self, now: Duration) -> NodeState {
        match self.heard {
            Some(heard) if now.saturating_sub(heard) < SILENT_AFTER => NodeState::Up,
            _ => NodeState::Silent,
        }
    }

    fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard.unwrap_or_default())
    }

    /// No more than a node takes, whatever it says.
    fn consumers(&self) -> u64 {
        self.report.consumer_count().min(MAX_PAGERS) as u64
    }

    fn donor_names(&self) -> impl Iterator<Item = &str> {
        self.report.donors.iter().map(|donor| donor.name.as_str())
    }
}

impl Default for Registry {
    fn default() -> Registry {
        Registry::new(Lasting::default())
    }
}

impl Registry {
    /// Goes on where the previous manager ended, in its own epoch. Its clock begins at zero.
    pub fn new(lasting: Lasting) -> Registry {
        let Lasting { epoch: before, nodes, draining, limits, policy, .. } = lasting;
        let harvest = HarvestQuota::new(lasting.harvest_quota, lasting.harvest_records);
        let nodes = nodes.into_iter().map(|(name, record)| {
            let report = record.recalled(&name);
            (name, Entry { heard: None, report })
        });
        let nodes: BTreeMap<String, Entry> = nodes.collect();
        let mut roster = Roster::new();
        for (name, entry) in &nodes {
            roster.belong(name, [].into_iter(), entry.donor_names());
        }
        let epoch = before + 1;
        Registry {
            epoch,
            is_new: before == 0,
            fresh: BTreeSet::new(),
            silent: nodes.keys().map(|name| (Duration::ZERO, name.clone())).collect(),
            nodes,
            roster,
            consumers: 0,
            draining,
            limits,
            members: Members::default(),
            quotas: Quotas::new(policy),
            policy_is_known: before > 0,
            harvest,
            harvest_is_known: before > 0,
            changes: Changes { epoch: Some(epoch), ..Changes::default() },
        }
    }

    /// Changes that are not written down yet. The caller writes them before any answer leaves, and
    /// then calls [`Registry::written`].
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// All of [`Registry::changes`] is written down.
    pub fn written(&mut self) {
        self.changes = Changes::default();
    }

    /// So much of [`Registry::changes`] is written down: what it said at an earlier moment.
    pub(crate) fn settle(&mut self, written: &Changes) {
        self.changes.settle(written);
    }

    /// Takes a node's heartbeat, and answers with what the node should know.
    pub fn heartbeat(
        &mut self,
        now: Duration,
        name: &str,
        report: NodeReport,
    ) -> Result<HeartbeatAnswer, RegistryError> {
        self.note_silence(now);
        check_name(name)?;
        if report.name != name {
            return Err(RegistryError::OtherName(name.to_owned(), report.name));
        }
        self.check_free(now, &report)?;
        self.check_epoch(report.followed_epoch)?;
        if !self.nodes.contains_key(name) && self.nodes.len() >= MAX_NODES {
            return Err(RegistryError::TooManyNodes);
        }
        if !self.nodes.contains_key(name) {
            // This manager has restarted, or the node was silent for very long: orders to its
            // donors go on.
            for donor in &report.donors {
                if donor.is_told_to_drain {
                    self.set_draining(&donor.name, true);
                }
                if donor.managers_limit_bytes.is_some() {
                    self.set_limit(&donor.name, donor.managers_limit_bytes);
                }
            }
        }
        if !self.policy_is_known
            && let Some(choice) = report.pool.policy
        {
            self.choose(Some(choice));
        }
        if !self.harvest_is_known
            && let Some(agent) = &report.agent
            && let HarvestWord::Grant(grant) = agent.harvest.word
        {
            self.set_harvest_quota(Some(grant.quota));
        }
        let granted = self.harvest.hear(now, &report);
        self.changes.harvest_records.extend(granted);
        let record_now = NodeRecord::of(&report);
        let is_recorded = |entry: &Entry| NodeRecord::of(&entry.report) == record_now;
        if !self.nodes.get(name).is_some_and(is_recorded) {
            self.changes.nodes.insert(name.to_owned(), Some(record_now));
        }
        let own = report.donors.iter().map(|donor| &donor.name);
        let draining = own.clone().filter(|name| self.draining.contains(*name)).cloned();
        let limits = own.filter_map(|name| Some((name.clone(), *self.limits.get(name)?)));
        let (draining, limits) = (draining.collect(), limits.collect());
        // Earlier lending counts, be it of another directory, or of this host before its boot.
        let is_replaced = self.nodes.get(name).is_some_and(|before| {
            before.report.boot != report.boot && !before.report.donors.is_empty()
        });
        let known = report.donors_version;
        self.enter(now, report);
        let report = &self.nodes[name].report;
        let silent = self.silent.iter().map(|(_, name)| name.as_str());
        let home = |donor: &str| self.roster.homes(donor).next_back();
        let orders = self.members.heartbeat(report, is_replaced, home, silent);
        self.quotas.hear(report);
        if self.quotas.is_due(now) {
            let up = self.nodes.values().filter(|entry| entry.state(now) == NodeState::Up);
            self.quotas.divide(now, up.map(|entry| &entry.report));
        }
        let policy = self.quotas.told();
        let quota_pages = self.quotas.of(name);
        let harvest = self.harvest.of(name);
        let list = self.roster.since(now, name, known);
        let (epoch, most_told) = (self.epoch, self.most_told());
        Ok(HeartbeatAnswer {
            list,
            draining,
            limits,
            epoch,
            orders,
            policy,
            quota_pages,
            harvest,
            most_told,
        })
    }

    /// Takes a node's report in place of the one before.
    fn enter(&mut self, now: Duration, report: NodeReport) {
        let name = report.name.clone();
        let entry = Entry { heard: Some(now), report };
        let before = self.nodes.remove(&name);
        let (last, names) = match &before {
            Some(before) => (before.heard.unwrap_or_default(), before.donor_names().collect()),
            None => (Duration::ZERO, Vec::new()),
        };
        self.consumers -= before.as_ref().map_or(0, Entry::consumers);
        self.consumers += entry.consumers();
        // Most of the time they are the same.
        if !entry.donor_names().eq(names.iter().copied()) {
            self.roster.belong(&name, names.iter().copied(), entry.donor_names());
        }
        self.roster.offer(&name, names.into_iter(), entry.report.donor_addresses());
        let known = (last, name.clone());
        self.fresh.remove(&known);
        self.silent.remove(&known);
        self.fresh.insert((now, name.clone()));
        self.nodes.insert(name, entry);
    }

    /// Most consumers that each node reports one by one; none: all.
    fn most_told(&self) -> Option<u32> {
        let each = MAX_TOLD / self.nodes.len().max(1);
        (self.consumers > MAX_TOLD as u64).then_some(each.max(1) as u32)
    }

    /// The policy, if there is one.
    pub fn policy(&self) -> Option<&Named> {
        self.quotas.policy()
    }

    /// Policy that divides the pool in place of one that this version does not know.
    pub fn policy_instead(&self) -> Option<Choice> {
        self.quotas.instead()
    }

    /// Divides the pool by another policy from now on, or by none.
    pub fn choose(&mut self, choice: Option<Choice>) {
        self.policy_is_known = true;
        if choice.map(Named::Known).as_ref() != self.policy() {
            self.quotas.choose(choice);
            self.changes.policy = Some(choice);
        }
    }

    /// Most harvest VMs of the cluster, if there is a quota.
    pub fn harvest_quota(&self) -> Option<u64> {
        self.harvest.quota()
    }

    /// Sets how many harvest VMs the cluster may have from now on, or that it may have any number.
    pub fn set_harvest_quota(&mut self, quota: Option<u64>) {
        self.harvest_is_known = true;
        if quota != self.harvest.quota() {
            // A node that was not heard yet may have an agent.
            let may_have_any =
                |entry: &Entry| entry.heard.is_none() || entry.report.agent.is_some();
            let nodes = self.nodes.iter().map(|(name, entry)| (name.as_str(), may_have_any(entry)));
            let changed = self.harvest.choose(quota, nodes);
            self.changes.harvest_quota = Some(quota);
            self.changes.harvest_records.extend(changed);
        }
    }

    /// Takes a node's farewell: it is forgotten at once. One from an earlier life of the node, or
    /// about a node that is not known, changes nothing.
    pub fn farewell(&mut self, name: &str, boot: u64) {
        let is_it = self.nodes.get(name).is_some_and(|entry| entry.report.boot == boot);
        if is_it {
            self.forget(name);
        }
    }

    /// Forgets a node that is gone, and in which nobody has memory any more.
    pub fn remove(&mut self, now: Duration, name: &str) -> Result<(), RemovalError> {
        // Whoever asks again waits until it is written that the node is forgotten.
        let is_being_forgotten = self.changes.nodes.get(name) == Some(&None);
        // Harvest VMs may still count for a node that was forgotten long ago.
        let is_known = self.nodes.contains_key(name) || !self.harvest.knows(name);
        if is_known && !is_being_forgotten {
            removal::check(&self.status(now).nodes, name, SILENT_AFTER)?;
        }
        self.forget(name);
        self.changes.harvest_records.extend(self.harvest.forget(name));
        Ok(())
    }

    /// Asks a donor to give back all that it has lent, or to go on lending. False if no such donor
    /// is known.
    pub fn drain(&mut self, donor: &str, draining: bool) -> bool {
        let exists = self.has_donor(donor);
        if exists || !draining {
            self.set_draining(donor, draining);
        }
        exists
    }

    /// Asks a donor to lend no more than so many bytes and to have the rest back, or to lend again
    /// all that it has. False if there is no such donor.
    pub fn limit(&mut self, donor: &str, limit_bytes: Option<u64>) -> bool {
        let exists = self.has_donor(donor);
        if exists || limit_bytes.is_none() {
            self.set_limit(donor, limit_bytes);
        }
        exists
    }

    fn set_draining(&mut self, donor: &str, draining: bool) {
        let changed = match draining {
            true => self.draining.insert(donor.to_owned()),
            false => self.draining.remove(donor),
        };
        if changed {
            self.changes.draining.insert(donor.to_owned(), draining);
        }
    }

    pub(crate) fn set_limit(&mut self, donor: &str, limit_bytes: Option<u64>) {
        let before = match limit_bytes {
            Some(bytes) => self.limits.insert(donor.to_owned(), bytes),
            None => self.limits.remove(donor),
        };
        if before != limit_bytes {
            self.changes.limits.insert(donor.to_owned(), limit_bytes);
        }
    }

    /// Forgets a node, and what its donors were told.
    fn forget(&mut self, name: &str) {
        let Some(entry) = self.nodes.remove(name) else { return };
        self.consumers -= entry.consumers();
        let known = (entry.heard.unwrap_or_default(), name.to_owned());
        self.fresh.remove(&known);
        self.silent.remove(&known);
        self.roster.offer(name, entry.donor_names(), [].into_iter());
        self.roster.belong(name, entry.donor_names(), [].into_iter());
        self.members.forget(name);
        self.quotas.forget(name);
        self.changes.harvest_records.extend(self.harvest.gone(name));
        self.changes.nodes.insert(name.to_owned(), None);
        for donor in entry.report.donors {
            self.set_draining(&donor.name, false);
            self.set_limit(&donor.name, None);
        }
    }

    /// A manager that knew nothing takes a higher epoch than a node has followed. Any other manager
    /// that is behind must not lead.
    fn check_epoch(&mut self, followed: u64) -> Result<(), RegistryError> {
        if followed > self.epoch {
            if !self.is_new {
                return Err(RegistryError::Superseded { own: self.epoch, newer: followed });
            }
            self.epoch = followed + 1;
            self.changes.epoch = Some(self.epoch);
        }
        Ok(())
    }

    fn has_donor(&self, donor: &str) -> bool {
        self.roster.homes(donor).next().is_some()
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
            silent_ms: entry.silence(now).as_millis() as u64,
            membership: self.members.state(&entry.report.name),
            report: entry.report.clone(),
        });
        ClusterStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: now.as_millis() as u64,
            epoch: self.epoch,
            policy: self.policy().cloned(),
            policy_instead: self.policy_instead().map(Named::Known),
            harvest: self.harvest.status(),
            nodes: nodes.collect(),
        }
    }

    /// Whether no other node that is up has the report's name, or one of its donors' names.
    fn check_free(&self, now: Duration, report: &NodeReport) -> Result<(), RegistryError> {
        let up =
            |name: &str| self.nodes.get(name).filter(|entry| entry.state(now) == NodeState::Up);
        if let Some(entry) = up(&report.name)
            && entry.report.boot != report.boot
        {
            let (name, pid) = (report.name.clone(), entry.report.pid);
            return Err(RegistryError::NameTaken { name, pid });
        }
        for donor in &report.donors {
            let mut others = self.roster.homes(&donor.name).filter(|home| *home != report.name);
            if let Some(node) = others.find(|home| up(home).is_some()) {
                let (donor, node) = (donor.name.clone(), node.to_owned());
                return Err(RegistryError::DonorTaken { donor, node });
            }
        }
        Ok(())
    }

    /// Withdraws donors of nodes that have fallen silent; forgets nodes that are silent for long.
    fn note_silence(&mut self, now: Duration) {
        let is_past = |heard: Duration, time| now.saturating_sub(heard) >= time;
        while let Some((heard, _)) = self.fresh.first()
            && is_past(*heard, SILENT_AFTER)
            && let Some((heard, name)) = self.fresh.pop_first()
        {
            let names = self.nodes[&name].donor_names();
            self.roster.offer(&name, names, [].into_iter());
            self.silent.insert((heard, name));
        }
        while let Some((heard, name)) = self.silent.first()
            && is_past(*heard, FORGOTTEN_AFTER)
        {
            let name = name.clone();
            self.forget(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_donor::Snapshot;
    use hecaton_node::cluster::donor_list::{DonorList, ListVersion};
    use hecaton_node::cluster::report::MemberReport;
    use hecaton_node::donors::{DonorReport, DonorState};
    use hecaton_node::pagers::ConsumerReport;
    use hecaton_policy::cluster::member::Phase;
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
        draining.donors[0].is_told_to_drain = true;
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
        // A restarted manager learns it from the donor; the limit of the host's agent is separate.
        let mut limited = report("a", 1, &["d", "e"]);
        limited.donors[0].managers_limit_bytes = Some(1 << 30);
        let stats = Snapshot { told_limit_bytes: Some(0), ..Snapshot::default() };
        limited.donors.iter_mut().for_each(|donor| donor.stats = Some(stats.clone()));
        let mut successor = Registry::default();
        assert_eq!(beat(&mut successor, limited), told);
        assert!(registry.limit("d", None));
        assert!(beat(&mut registry, report("a", 1, &["d"])).is_empty());
    }

    /// Registry of a manager that starts after `registry`'s death.
    fn successor(registry: &mut Registry, lasting: &mut Lasting) -> Registry {
        lasting.apply(registry.changes());
        registry.written();
        Registry::new(lasting.clone())
    }

    #[test]
    fn the_next_manager_knows_what_this_one_has_promised() {
        let (mut lasting, mut registry) = (Lasting::default(), Registry::default());
        registry.heartbeat(START, "a", report("a", 1, &["d", "e"])).expect("taken");
        assert!(registry.drain("d", true) && registry.limit("e", Some(7)));
        let mut next = successor(&mut registry, &mut lasting);
        let found = &next.status(Duration::ZERO).nodes[0];
        assert_eq!((found.state, found.report.boot), (NodeState::Silent, 1));
        assert!(offered(&mut next, Duration::ZERO).is_empty(), "where they are, they will say");
        // The donors were not told yet, and say so.
        let mut untold = report("a", 1, &["d", "e"]);
        untold.donors[0].stats = Some(Snapshot::default());
        let told = next.heartbeat(START, "a", untold.clone()).expect("taken");
        assert_eq!((told.draining, told.limits), (vec!["d".into()], [("e".into(), 7)].into()));
        assert!(next.status(START).epoch > registry.status(START).epoch);

        // A donor that has not heard of a cancelled order does not bring the order back.
        assert!(next.drain("d", false) && next.limit("e", None));
        let mut last = successor(&mut next, &mut lasting);
        untold.donors[0].is_told_to_drain = true;
        let told = last.heartbeat(START, "a", untold).expect("taken");
        assert!(told.draining.is_empty() && told.limits.is_empty());
        last.farewell("a", 1);
        assert!(successor(&mut last, &mut lasting).status(START).nodes.is_empty());
        assert_eq!((&lasting.draining, &lasting.limits), (&BTreeSet::new(), &BTreeMap::new()));
    }

    #[test]
    fn a_heartbeat_without_news_is_not_written_down() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &["d"])).expect("taken");
        assert!(!registry.changes().is_empty());
        registry.written();
        registry.heartbeat(START, "a", report("a", 1, &["d"])).expect("taken");
        assert!(registry.changes().is_empty());
        assert!(registry.drain("d", false) && registry.limit("d", None));
        assert!(registry.changes().is_empty(), "that was so before");
        registry.heartbeat(START, "a", report("a", 1, &["d", "e"])).expect("taken");
        assert_eq!(registry.changes().nodes.len(), 1);
    }

    #[test]
    fn of_two_managers_the_later_one_leads() {
        let follower = |epoch| NodeReport { followed_epoch: epoch, ..report("a", 1, &[]) };
        // A manager that knows nothing, as its registry was moved aside, takes a higher epoch.
        let mut anew = Registry::default();
        assert_eq!(anew.heartbeat(START, "a", follower(7)).expect("taken").epoch, 8);
        assert_eq!(anew.changes().epoch, Some(8));
        // A manager with an old copy does not.
        let mut old = Registry::new(Lasting { epoch: 3, ..Lasting::default() });
        let refused = old.heartbeat(START, "a", follower(7));
        assert_eq!(refused, Err(RegistryError::Superseded { own: 4, newer: 7 }));
        assert_eq!(old.heartbeat(START, "a", follower(4)).expect("taken").epoch, 4);
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

    fn names(list: &DonorList) -> Vec<String> {
        list.donors.iter().map(|donor| donor.name.clone()).collect()
    }

    /// Donors that a node without a list hears of.
    fn offered(registry: &mut Registry, now: Duration) -> Vec<String> {
        registry.note_silence(now);
        let mut up = registry.donors(now);
        up.sort_by(|one, other| one.name.cmp(&other.name));
        let list = registry.roster.since(now, "n", ListVersion::default());
        assert_eq!(list.donors, up);
        names(&list)
    }

    #[test]
    fn the_donors_of_all_live_nodes_are_offered() {
        let mut registry = Registry::default();
        registry.heartbeat(START, "a", report("a", 1, &["a-1", "a-2"])).expect("taken");
        let answer = registry.heartbeat(START, "b", report("b", 2, &["b-1"])).expect("taken");
        assert_eq!(names(&answer.list), ["a-1", "a-2", "b-1"]);
        // A node that knows the list hears of no more.
        let known = NodeReport { donors_version: answer.list.version, ..report("b", 2, &["b-1"]) };
        let answer = registry.heartbeat(START, "b", known).expect("taken");
        assert!(answer.list.donors.is_empty() && answer.list.since.is_some());

        let later = START + SILENT_AFTER;
        registry.heartbeat(later, "b", report("b", 2, &["b-1"])).expect("taken");
        assert_eq!(offered(&mut registry, later), ["b-1"]);
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
        assert_eq!(offered(&mut registry, START), ["x"]);
        registry.farewell("a", 1);
        assert!(registry.status(START).nodes.is_empty());
    }

    #[test]
    fn a_node_that_is_removed_is_forgotten_with_its_orders() {
        let (mut lasting, mut registry) = (Lasting::default(), Registry::default());
        registry.heartbeat(START, "a", report("a", 1, &["x"])).expect("taken");
        assert!(registry.drain("x", true) && registry.limit("x", Some(7)));
        let up = registry.remove(START, "a");
        assert_eq!(up, Err(RemovalError::Up { name: "a".into(), pid: 1 }));
        let mut next = successor(&mut registry, &mut lasting);
        let early = next.remove(Duration::from_secs(1), "a");
        assert!(matches!(early, Err(RemovalError::TooEarly { .. })), "{early:?}");
        next.remove(START, "a").expect("it is gone");
        assert!(next.status(START).nodes.is_empty());
        next.remove(START, "a").expect("whoever asks again waits until it is written");
        lasting.apply(next.changes());
        next.written();
        assert_eq!(next.remove(START, "a"), Err(RemovalError::Unknown("a".into())));
        let nothing = Lasting { epoch: 2, ..Lasting::default() };
        assert_eq!(lasting, nothing);
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
        // Nodes hear nothing of nodes that have left: to tell them takes most of the time.
        let member = MemberReport { phase: Phase::Inactive, ..MemberReport::default() };
        for number in 0..MAX_NODES {
            let name = format!("n{number}");
            let left = NodeReport { member, ..report(&name, 1, &[]) };
            registry.heartbeat(START, &name, left).expect("taken");
        }
        let one_more = registry.heartbeat(START, "more", report("more", 1, &[]));
        assert_eq!(one_more, Err(RegistryError::TooManyNodes));
        let later = START + FORGOTTEN_AFTER;
        registry.heartbeat(later, "more", report("more", 1, &[])).expect("the rest is forgotten");
        assert_eq!(registry.status(later).nodes.len(), 1);
    }

    #[test]
    fn of_too_many_consumers_each_node_tells_of_some() {
        let mut registry = Registry::default();
        let mut beat = |node: usize, consumers: usize| {
            let consumers = vec![ConsumerReport::default(); consumers];
            let name = format!("n{node}");
            let report = NodeReport { consumers, ..report(&name, 1, &[]) };
            registry.heartbeat(START, &name, report.in_brief(16)).expect("taken").most_told
        };
        let full = MAX_TOLD / MAX_PAGERS;
        for node in 0..full {
            assert_eq!(beat(node, MAX_PAGERS), None);
        }
        let each = Some((MAX_TOLD / (full + 1)) as u32);
        assert_eq!(beat(full, 1), each);
        // One that says it has more is believed as many as a node takes.
        assert_eq!(beat(0, MAX_TOLD), each);
        assert_eq!(beat(0, MAX_PAGERS - 1), None);
        assert_eq!(beat(full, 2), each);
        registry.farewell(&format!("n{full}"), 1);
        assert_eq!(registry.consumers, MAX_TOLD as u64 - 1);
    }

    proptest! {
        /// Wherever a manager is killed, its successor has the same nodes and orders.
        #[test]
        fn all_that_lasts_is_handed_out_to_be_written(
            steps in prop::collection::vec((0u8..5, 0usize..3, 0usize..4, 0u64..3), 1..60),
        ) {
            let (node_names, donor_names) = (["a", "b", "c"], ["u", "v", "w", "x"]);
            let (mut lasting, mut registry) = (Lasting::default(), Registry::default());
            let mut now = START;
            for (what, node, donor, number) in steps {
                let (name, donor) = (node_names[node], donor_names[donor]);
                now += Duration::from_secs(number);
                match what {
                    0 => _ = registry.heartbeat(now, name, report(name, number, &[donor])),
                    1 => registry.farewell(name, number),
                    2 => _ = registry.drain(donor, number > 0),
                    3 => _ = registry.limit(donor, (number > 0).then_some(number)),
                    _ => now += FORGOTTEN_AFTER,
                }
                let next = successor(&mut registry, &mut lasting);
                let boots = |registry: &Registry| -> Vec<(String, u64)> {
                    let nodes = registry.status(now).nodes.into_iter();
                    nodes.map(|node| (node.report.name, node.report.boot)).collect()
                };
                prop_assert_eq!(boots(&next), boots(&registry));
                prop_assert_eq!(&next.draining, &registry.draining);
                prop_assert_eq!(&next.limits, &registry.limits);
            }
        }

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
                let offered = offered(&mut registry, now);
                let up = registry.status(now).nodes.into_iter();
                let up = up.filter(|node| node.state == NodeState::Up).count();
                prop_assert_eq!(up, offered.len());
            }
        }
    }
}
