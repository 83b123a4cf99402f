//! The cluster at a glance: what the dashboard and `hecaton top` show, worked out once for both.
//!
//! Pure. A value that no report tells is `None` here and absent in JSON, never zero. So a donor
//! whose process has not reported yet lends an unknown amount, and sums with it are unknown. Lists
//! are bounded, so that one overview of a large cluster stays a few hundred kilobytes. `left_out`
//! counts the rest.

use crate::registry::{ClusterStatus, MemberState, NodeState, NodeStatus};
use hecaton_memory::{PAGE_SIZE, SpaceId};
use hecaton_node::cluster::report::{Holder, NodeReport};
use hecaton_node::donors::{DonorReport, DonorState};
use hecaton_node::pagers::{ConsumerReport, PagerState};
use hecaton_node::volumes::{VolumeReport, VolumeState};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// Most donors, consumers and flows of each that an [`Overview`] lists.
pub const MAX_LISTED: usize = 512;

/// All that is shown of a cluster at one moment; the answer to `GET /v1/overview`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Overview {
    /// The manager's version.
    pub version: String,
    /// Milliseconds since the manager started; times of alarms are on this scale.
    pub uptime_ms: u64,
    /// The number of the latest sample in the [`History`](crate::watching::watch::History).
    pub tick: u64,
    /// Policy as `hecaton policy set` takes it; none: each consumer holds what it gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Sums over the cluster.
    pub totals: Totals,
    /// The machines, by the names of their nodes.
    pub hosts: Vec<HostView>,
    /// The donors, by name.
    pub donors: Vec<DonorView>,
    /// The consumers, those with most faults first.
    pub consumers: Vec<ConsumerView>,
    /// Memory of consumers at donors, the largest first.
    pub flows: Vec<Flow>,
    /// Donors, consumers and flows that are not listed because there are more than [`MAX_LISTED`].
    pub left_out: usize,
    /// Conditions that need an administrator, the worst first.
    pub alarms: Vec<Alarm>,
    /// Recent events, the latest first.
    pub happenings: Vec<Happening>,
}

/// Sums over the nodes that are heard from. Where nodes are known and none is, there are no sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Nodes that are heard from.
    pub nodes_up: usize,
    /// Nodes that are remembered.
    pub nodes: usize,
    /// Consumers of nodes that are up.
    pub consumers: usize,
    /// Most that the donors may lend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lend_bytes: Option<u64>,
    /// Extents that are lent, written or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lent_bytes: Option<u64>,
    /// Bytes that donors would lend now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lendable_bytes: Option<u64>,
    /// Bytes of consumers in the pool, each page counted once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_bytes: Option<u64>,
    /// Faults of all programs and machines in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_per_s: Option<f64>,
}

/// A machine, with what its memory does. The parts add up to `memory_bytes`, `borrowed_bytes` comes
/// on top of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostView {
    /// The names of its nodes, joined.
    pub name: String,
    /// Whether one of its nodes is heard from; if not, all of this is as of when one was.
    pub is_up: bool,
    /// Milliseconds since the latest heartbeat of any of its nodes.
    pub silent_ms: u64,
    /// `leaving`, `left` or `recovery`, if one of its nodes does not take part as others do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub membership: Option<String>,
    /// Where it stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Memory that it has.
    pub memory_bytes: u64,
    /// Memory that is in use for anything but the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_bytes: Option<u64>,
    /// The local part of programs and machines whose other part is in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_bytes: Option<u64>,
    /// Lent and written to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lent_bytes: Option<u64>,
    /// Available, and would be lent if somebody asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lendable_bytes: Option<u64>,
    /// Available, and not to be lent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Bytes of its consumers in the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrowed_bytes: Option<u64>,
    /// Its quota in the pool, in bytes, each copy counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// Used bytes of the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_used_bytes: Option<u64>,
}

impl HostView {
    /// The parts of a bar, in their order: uses of the host's own memory, then memory elsewhere.
    pub fn parts(&self) -> [Option<u64>; 6] {
        [
            self.system_bytes,
            self.local_bytes,
            self.lent_bytes,
            self.lendable_bytes,
            self.free_bytes,
            self.borrowed_bytes,
        ]
    }
}

/// A donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DonorView {
    /// Its name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// `serving`, `starting`, `stopping`, `draining`, `recalling` or `silent`.
    pub state: String,
    /// Times that its process was started again.
    pub restarts: u64,
    /// Most that it may lend.
    pub lend_bytes: u64,
    /// Extents that are lent, written or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lent_bytes: Option<u64>,
    /// Bytes that it would lend now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lendable_bytes: Option<u64>,
    /// Most that it was told to lend, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub told_limit_bytes: Option<u64>,
    /// Bytes that it wants back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recalled_bytes: Option<u64>,
    /// Lent bytes that are parked on its disk; none if it does not park.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked_bytes: Option<u64>,
    /// Whether it gives back all that it has lent.
    pub draining: bool,
}

/// Kind of a consumer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConsumerKind {
    /// A program and what it forks.
    #[default]
    Program,
    /// A virtual machine.
    Machine,
    /// A volume.
    Volume,
}

/// Whatever has memory in the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConsumerView {
    /// Unlike any other's, for as long as it lives.
    pub id: String,
    /// Its name, one of its kind and node.
    pub name: String,
    /// Its node.
    pub node: String,
    /// Program, machine or volume.
    pub kind: ConsumerKind,
    /// State that its node reports; `silent` if the node is not heard from.
    pub state: String,
    /// Memory on its own host; volumes have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_bytes: Option<u64>,
    /// Most memory that may be there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_limit_bytes: Option<u64>,
    /// Memory in the pool, each page counted once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_bytes: Option<u64>,
    /// Target of the policy for memory in the pool, each page counted once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_bytes: Option<u64>,
    /// Copies that each page is to have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// Faults in a second; of a volume, requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_per_s: Option<f64>,
    /// Half of the faults that a donor served took no longer, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99 of 100 took no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
}

/// Memory of a consumer that is with a donor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// The donor.
    pub donor: String,
    /// Its host, as [`HostView::name`].
    pub from: String,
    /// The consumer's name; of consumers that are told of in sums, how many they are.
    pub consumer: String,
    /// Its host; none if no node says that the consumer is its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// How much.
    pub bytes: u64,
}

/// How much something matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Memory is lost or out of reach, or is about to be.
    Critical,
    /// Something is not as it is to be.
    Warning,
    /// Good to know.
    #[default]
    Notice,
}

/// Something that holds at this moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alarm {
    /// How much it matters.
    pub severity: Severity,
    /// Name of a node, a donor or a consumer; or `pool`.
    pub subject: String,
    /// Condition, and the way out.
    pub text: String,
    /// When it was first so, by the manager's clock.
    pub since_ms: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happening {
    /// How much it matters.
    pub severity: Severity,
    /// Name of a node, a donor or a consumer; or `pool`.
    pub subject: String,
    /// Description of the event.
    pub text: String,
    /// When it was noticed, by the manager's clock.
    pub at_ms: u64,
}

/// Faults in a second by consumer, as [`ConsumerView::id`] names it.
pub(crate) type Rates = HashMap<String, f64>;

/// The parts of an overview that one status tells, with what a
/// [`Watch`](crate::watching::watch::Watch) knows of rates.
pub(crate) fn overview(status: &ClusterStatus, rates: &Rates) -> Overview {
    let hosts = Hosts::of(status);
    let mut donors: Vec<_> = each(status, |node| &node.report.donors)
        .map(|(node, donor)| donor_view(node, donor))
        .collect();
    donors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut consumers = consumers(status, rates);
    consumers.sort_by(|a, b| {
        let busy = |one: &ConsumerView| one.faults_per_s.unwrap_or(-1.0);
        let size = |one: &ConsumerView| one.pool_bytes.unwrap_or(0);
        busy(b).total_cmp(&busy(a)).then(size(b).cmp(&size(a))).then(a.id.cmp(&b.id))
    });
    let mut flows = flows(status, &hosts);
    let mut left_out = 0;
    left_out += cut(&mut donors) + cut(&mut consumers) + cut(&mut flows);
    Overview {
        version: status.version.clone(),
        uptime_ms: status.uptime_ms,
        policy: status.policy_in_words(),
        totals: totals(status, rates),
        hosts: hosts.views(),
        donors,
        consumers,
        flows,
        left_out,
        ..Overview::default()
    }
}

fn cut<T>(list: &mut Vec<T>) -> usize {
    let over = list.len().saturating_sub(MAX_LISTED);
    list.truncate(MAX_LISTED);
    over
}

/// The entries of one kind, of all nodes.
pub(crate) fn each<'a, T: 'a>(
    status: &'a ClusterStatus,
    list: fn(&NodeStatus) -> &Vec<T>,
) -> impl Iterator<Item = (&'a NodeStatus, &'a T)> {
    status.nodes.iter().flat_map(move |node| list(node).iter().map(move |one| (node, one)))
}

/// A sum that is known if all of its parts are. Whatever a node says, it is a number.
fn sum(mut parts: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    parts.try_fold(0u64, |sum, part| Some(sum.saturating_add(part?)))
}

/// Bytes in so many pages, of which somebody else says how many they are.
pub(crate) fn bytes_of(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_SIZE as u64)
}

fn lent_bytes(donor: &DonorReport) -> Option<u64> {
    let stats = donor.stats.as_ref()?;
    Some(bytes_of(stats.lent_pages.saturating_add(stats.leaving_pages)))
}

fn lendable_bytes(donor: &DonorReport) -> Option<u64> {
    donor.stats.as_ref().map(|stats| bytes_of(stats.lendable_pages))
}

fn totals(status: &ClusterStatus, rates: &Rates) -> Totals {
    let up = || status.nodes.iter().filter(|node| node.state == NodeState::Up);
    let reports = || up().map(|node| &node.report);
    let donors = || reports().flat_map(|report| &report.donors);
    let programs = || reports().flat_map(|report| &report.consumers);
    let volumes = || reports().flat_map(|report| &report.volumes);
    let untold = || reports().filter_map(|report| report.untold.as_ref());
    let pool = programs()
        .map(|one| one.stats.as_ref().map(|stats| stats.pool_bytes))
        .chain(untold().map(|untold| untold.pool_bytes))
        .chain(volumes().map(|one| one.stats.as_ref().map(|stats| stats.pool_bytes())));
    let faults = up().flat_map(|node| {
        let told = node.report.consumers.iter();
        let told = told.map(|one| rates.get(&consumer_id(node, one)).copied());
        // The rate of consumers that a node reports only as a sum is not known.
        told.chain(node.report.untold.iter().map(|_| None))
    });
    let counts = Totals {
        nodes_up: up().count(),
        nodes: status.nodes.len(),
        consumers: reports().map(NodeReport::consumer_count).sum::<usize>() + volumes().count(),
        ..Totals::default()
    };
    if counts.nodes > 0 && counts.nodes_up == 0 {
        return counts;
    }
    Totals {
        lend_bytes: sum(donors().map(|donor| Some(donor.lend_bytes))),
        lent_bytes: sum(donors().map(lent_bytes)),
        lendable_bytes: sum(donors().map(lendable_bytes)),
        pool_bytes: sum(pool),
        faults_per_s: faults.sum(),
        ..counts
    }
}

/// The nodes by the machine that they run on. Two nodes on one host, as in tests or in containers,
/// see the same memory: it is shown once.
struct Hosts<'a>(BTreeMap<String, Vec<&'a NodeStatus>>);

impl<'a> Hosts<'a> {
    fn of(status: &'a ClusterStatus) -> Hosts<'a> {
        let mut by_boot = BTreeMap::<&str, Vec<&NodeStatus>>::new();
        for node in &status.nodes {
            by_boot.entry(&node.report.host.boot_id).or_default().push(node);
        }
        let named = |nodes: Vec<&'a NodeStatus>| {
            let names: Vec<_> = nodes.iter().map(|node| node.report.name.as_str()).collect();
            (names.join(", "), nodes)
        };
        Hosts(by_boot.into_values().map(named).collect())
    }

    /// The host of each node, by the nodes' names.
    fn names(&self) -> HashMap<&str, &str> {
        let nodes =
            self.0.iter().flat_map(|(host, nodes)| nodes.iter().map(move |node| (host, node)));
        nodes.map(|(host, node)| (node.report.name.as_str(), host.as_str())).collect()
    }

    fn views(&self) -> Vec<HostView> {
        self.0.iter().map(|(name, nodes)| host_view(name, nodes)).collect()
    }
}

fn host_view(name: &str, nodes: &[&NodeStatus]) -> HostView {
    let latest = nodes.iter().min_by_key(|node| node.silent_ms);
    let latest = latest.expect("a host is where a node is");
    let host = &latest.report.host;
    // Reports of silent nodes are outdated, and count only if all of the host's nodes are silent.
    let is_up = latest.state == NodeState::Up;
    let now = || nodes.iter().filter(|node| node.state == latest.state).map(|node| &node.report);
    let donors = || now().flat_map(|report| &report.donors);
    let consumers = || now().flat_map(|report| &report.consumers);
    let volumes = || now().flat_map(|report| &report.volumes);
    let untold = || now().filter_map(|report| report.untold.as_ref());
    let used = host.memory_bytes.saturating_sub(host.available_bytes);
    let lent = sum(donors().map(|one| one.stats.as_ref().map(|stats| stats.committed_bytes)));
    let local = consumers()
        .map(|one| one.stats.as_ref().map(|stats| stats.local_bytes))
        .chain(untold().map(|untold| untold.local_bytes));
    let local = sum(local);
    // The reports are up to a second older than the host's own figures. The parts must add up, so
    // what is lent comes first and the rest has what is left.
    let lent = lent.map(|bytes| bytes.min(used));
    let local = local.zip(lent).map(|(bytes, lent)| bytes.min(used - lent));
    let system = local.zip(lent).map(|(local, lent)| used - lent - local);
    let lendable = sum(donors().map(lendable_bytes)).map(|bytes| bytes.min(host.available_bytes));
    let borrowed = consumers()
        .map(|one| one.stats.as_ref().map(|stats| stats.pool_bytes))
        .chain(untold().map(|untold| untold.pool_bytes))
        .chain(volumes().map(|one| one.stats.as_ref().map(|stats| stats.pool_bytes())));
    let shares = || now().map(|report| &report.pool).filter(|share| share.quota_pages.is_some());
    let quota = shares().map(|share| share.quota_pages.map(bytes_of));
    let quota_used = shares().map(|share| Some(bytes_of(share.used_pages)));
    let is_divided = shares().next().is_some();
    HostView {
        name: name.to_owned(),
        is_up,
        silent_ms: latest.silent_ms,
        membership: nodes
            .iter()
            .find(|node| node.state == NodeState::Up && node.membership != MemberState::Active)
            .map(|node| node.word().to_owned()),
        location: latest.report.location.clone(),
        memory_bytes: host.memory_bytes,
        system_bytes: system,
        local_bytes: local,
        lent_bytes: lent,
        lendable_bytes: lendable,
        free_bytes: lendable.map(|bytes| host.available_bytes - bytes),
        borrowed_bytes: sum(borrowed),
        quota_bytes: sum(quota).filter(|_| is_divided),
        quota_used_bytes: sum(quota_used).filter(|_| is_divided),
    }
}

fn donor_view(node: &NodeStatus, donor: &DonorReport) -> DonorView {
    let stats = donor.stats.as_ref();
    let recalled = stats.map(|stats| bytes_of(stats.recalled_pages));
    let park = stats.and_then(|stats| stats.park.as_ref());
    let draining = stats.is_some_and(|stats| stats.draining);
    let state = match donor.state {
        _ if node.state == NodeState::Silent => "silent",
        DonorState::Starting => "starting",
        DonorState::Stopping => "stopping",
        DonorState::Serving if draining => "draining",
        DonorState::Serving if recalled > Some(0) => "recalling",
        DonorState::Serving => "serving",
    };
    DonorView {
        name: donor.name.clone(),
        node: node.report.name.clone(),
        state: state.to_owned(),
        restarts: donor.restarts,
        lend_bytes: donor.lend_bytes,
        lent_bytes: lent_bytes(donor),
        lendable_bytes: lendable_bytes(donor),
        told_limit_bytes: stats.and_then(|stats| stats.told_limit_bytes),
        recalled_bytes: recalled,
        parked_bytes: park.map(|park| bytes_of(park.parked_pages)),
        draining,
    }
}

pub(crate) fn consumer_id(node: &NodeStatus, consumer: &ConsumerReport) -> String {
    format!("{}/{}", node.report.name, consumer.name)
}

/// No consumer has this name: `:` is in none.
pub(crate) fn volume_id(node: &NodeStatus, volume: &VolumeReport) -> String {
    format!("{}/volume:{}", node.report.name, volume.name)
}

fn consumers(status: &ClusterStatus, rates: &Rates) -> Vec<ConsumerView> {
    let mut views = Vec::new();
    for (node, consumer) in each(status, |node| &node.report.consumers) {
        views.push(consumer_view(node, consumer, rates));
    }
    for (node, volume) in each(status, |node| &node.report.volumes) {
        views.push(volume_view(node, volume, rates));
    }
    views
}

fn state(node: &NodeStatus, state: &str) -> String {
    let state = if node.state == NodeState::Silent { "silent" } else { state };
    state.to_owned()
}

fn consumer_view(node: &NodeStatus, consumer: &ConsumerReport, rates: &Rates) -> ConsumerView {
    let id = consumer_id(node, consumer);
    let machine = node.report.vms.iter().find(|vm| vm.name == consumer.name);
    let stats = consumer.stats.as_ref();
    let latency = stats.map(|stats| stats.pool_fault_latency).filter(|latency| latency.count > 0);
    let pager = match consumer.state {
        PagerState::Starting => "starting",
        // Its launcher has done its part, and the program goes on.
        PagerState::Serving | PagerState::Ending => "running",
    };
    ConsumerView {
        name: consumer.name.clone(),
        node: node.report.name.clone(),
        kind: if machine.is_some() { ConsumerKind::Machine } else { ConsumerKind::Program },
        state: match machine {
            Some(vm) => state(node, &format!("{:?}", vm.state).to_lowercase()),
            None => state(node, pager),
        },
        local_bytes: stats.map(|stats| stats.local_bytes),
        local_limit_bytes: Some(consumer.local_bytes),
        pool_bytes: stats.map(|stats| stats.pool_bytes),
        target_bytes: stats.and_then(|stats| stats.target_bytes),
        copies: stats.map(|stats| stats.pool.copies).filter(|copies| *copies > 0),
        faults_per_s: rates.get(&id).copied(),
        p50_us: latency.map(|latency| latency.p50_us),
        p99_us: latency.map(|latency| latency.p99_us),
        id,
    }
}

fn volume_view(node: &NodeStatus, volume: &VolumeReport, rates: &Rates) -> ConsumerView {
    let id = volume_id(node, volume);
    let stats = volume.stats.as_ref();
    let word = match volume.state {
        VolumeState::Starting => "starting",
        VolumeState::Serving => "serving",
        VolumeState::Ending => "ending",
    };
    ConsumerView {
        name: volume.name.clone(),
        node: node.report.name.clone(),
        kind: ConsumerKind::Volume,
        state: state(node, word),
        pool_bytes: stats.map(|stats| stats.pool_bytes()),
        target_bytes: stats.and_then(|stats| stats.target_bytes),
        copies: Some(volume.copies),
        faults_per_s: rates.get(&id).copied(),
        id,
        ..ConsumerView::default()
    }
}

/// Donors report pages by space, nodes the owner of each. If nodes sum some consumers up, donors
/// report only their largest spaces, maybe of unreported owners: then nodes' reports count.
fn flows(status: &ClusterStatus, hosts: &Hosts<'_>) -> Vec<Flow> {
    let host_of = hosts.names();
    let is_in_brief = status.nodes.iter().any(|node| node.report.untold.is_some());
    let mut flows = match is_in_brief {
        true => flows_to_nodes(status, &host_of),
        false => flows_from_donors(status, &host_of),
    };
    flows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.donor.cmp(&b.donor)));
    flows
}

fn flows_from_donors(status: &ClusterStatus, host_of: &HashMap<&str, &str>) -> Vec<Flow> {
    let mut owners = HashMap::<SpaceId, (&str, &str)>::new();
    for (node, consumer) in each(status, |node| &node.report.consumers) {
        owners.insert(consumer.space, (&node.report.name, &consumer.name));
    }
    for (node, volume) in each(status, |node| &node.report.volumes) {
        if let Some(stats) = &volume.stats {
            owners.insert(stats.pool.id, (&node.report.name, &volume.name));
        }
    }
    let mut flows = Vec::new();
    for (node, donor) in each(status, |node| &node.report.donors) {
        let spaces = donor.stats.iter().flat_map(|stats| &stats.spaces);
        for space in spaces.filter(|space| space.pages > 0) {
            let owner = owners.get(&space.space);
            flows.push(Flow {
                donor: donor.name.clone(),
                from: host_of[node.report.name.as_str()].to_owned(),
                consumer: owner.map_or(space.consumer.as_str(), |(_, name)| name).to_owned(),
                to: owner.map(|(node, _)| host_of[node].to_owned()),
                bytes: bytes_of(space.pages),
            });
        }
    }
    flows
}

/// Those that a node does not tell of one by one have one flow together from each donor.
fn flows_to_nodes(status: &ClusterStatus, host_of: &HashMap<&str, &str>) -> Vec<Flow> {
    let donors = each(status, |node| &node.report.donors);
    let home_of: HashMap<&str, &str> =
        donors.map(|(node, donor)| (donor.name.as_str(), node.report.name.as_str())).collect();
    let mut flows = Vec::new();
    for node in &status.nodes {
        for (who, donor, pages) in node.report.held_by_whom() {
            // No node has this donor, so its host is unknown.
            let Some(home) = home_of.get(donor) else { continue };
            flows.push(Flow {
                donor: donor.to_owned(),
                from: host_of[home].to_owned(),
                consumer: match who {
                    Holder::One(name) => name.to_owned(),
                    Holder::Others(count) => format!("{count} others of {}", node.report.name),
                },
                to: Some(host_of[node.report.name.as_str()].to_owned()),
                bytes: bytes_of(pages),
            });
        }
    }
    flows
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use hecaton_donor::{Snapshot, SpaceSnapshot};
    use hecaton_memory::Epoch;
    use hecaton_node::cluster::report::{Host, NodeReport};
    use hecaton_pager::{DonorUse, Stats};
    use hecaton_policy::cluster::choice::{Choice, Named};
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    /// Pages in a gibibyte.
    const GIB_PAGES: u64 = GIB >> 12;

    pub(crate) fn donor(name: &str, lent_gib: u64) -> DonorReport {
        let space = SpaceSnapshot {
            space: SpaceId(7),
            consumer: "sort".to_owned(),
            fence: Epoch(1),
            extents: lent_gib,
            pages: lent_gib * GIB_PAGES,
            recalled: 0,
            silent_ms: 0,
            lease_ms: 60_000,
        };
        DonorReport {
            name: name.to_owned(),
            state: DonorState::Serving,
            lend_bytes: 4 * GIB,
            stats: Some(Snapshot {
                name: name.to_owned(),
                pages: 4 * GIB_PAGES,
                limit_pages: 4 * GIB_PAGES,
                lent_pages: lent_gib * GIB_PAGES,
                lendable_pages: (4 - lent_gib) * GIB_PAGES,
                committed_bytes: lent_gib * GIB,
                spaces: vec![space],
                ..Snapshot::default()
            }),
            ..DonorReport::default()
        }
    }

    pub(crate) fn program(name: &str, pool_gib: u64) -> ConsumerReport {
        ConsumerReport {
            name: name.to_owned(),
            space: SpaceId(7),
            state: PagerState::Serving,
            pid: Some(1),
            restarts: 0,
            local_bytes: GIB,
            held_fds: 0,
            stats: Some(Stats { local_bytes: GIB, pool_bytes: pool_gib * GIB, ..Stats::default() }),
        }
    }

    /// A node on a host of its own: 16 GiB, 10 of them available.
    pub(crate) fn node(
        name: &str,
        donors: Vec<DonorReport>,
        consumers: Vec<ConsumerReport>,
    ) -> NodeStatus {
        let host = Host {
            boot_id: format!("boot of {name}"),
            memory_bytes: 16 * GIB,
            available_bytes: 10 * GIB,
        };
        let report =
            NodeReport { name: name.to_owned(), host, donors, consumers, ..NodeReport::default() };
        NodeStatus { state: NodeState::Up, silent_ms: 0, membership: MemberState::Active, report }
    }

    pub(crate) fn status(nodes: Vec<NodeStatus>) -> ClusterStatus {
        ClusterStatus {
            version: "1".to_owned(),
            uptime_ms: 60_000,
            epoch: 1,
            policy: None,
            policy_instead: None,
            harvest: None,
            nodes,
        }
    }

    #[test]
    fn a_hosts_bar_says_what_its_memory_does() {
        let nodes = vec![node("a", vec![donor("a", 2)], vec![program("sort", 3)])];
        let view = overview(&status(nodes), &Rates::new());
        assert_eq!(view.hosts[0].parts(), [3, 1, 2, 2, 8, 3].map(|gib| Some(gib * GIB)));
    }

    #[test]
    fn what_is_not_told_is_missing_and_not_zero() {
        let mut silent_donor = donor("a", 2);
        silent_donor.stats = None;
        let nodes = vec![node("a", vec![silent_donor, donor("b", 1)], vec![program("sort", 3)])];
        let view = overview(&status(nodes), &Rates::new());
        let host = &view.hosts[0];
        assert_eq!((host.lent_bytes, host.system_bytes, host.free_bytes), (None, None, None));
        assert_eq!(view.totals.lent_bytes, None);
        let json = serde_json::to_value(&view).expect("serialised");
        assert!(json["hosts"][0].get("lent_bytes").is_none());
        assert!(json["consumers"][0].get("faults_per_s").is_none());
        assert_eq!(json["hosts"][0]["borrowed_bytes"], 3 * GIB);
    }

    #[test]
    fn a_host_says_how_its_nodes_take_part() {
        let mut nodes = vec![node("a", vec![], vec![]), node("b", vec![], vec![])];
        nodes[0].membership = MemberState::Leaving;
        let said = |nodes: &[NodeStatus]| {
            let view = overview(&status(nodes.to_vec()), &Rates::new());
            view.hosts.into_iter().map(|host| host.membership).collect::<Vec<_>>()
        };
        assert_eq!(said(&nodes), [Some("leaving".to_owned()), None]);
        nodes[0].membership = MemberState::Recovery;
        assert_eq!(said(&nodes)[0].as_deref(), Some("recovery"));
        nodes[0].state = NodeState::Silent;
        assert_eq!(said(&nodes), [None, None], "that was so");
    }

    #[test]
    fn sums_are_the_same_in_brief() {
        let programs = vec![program("sort", 3), program("join", 2)];
        let mut nodes = vec![node("a", vec![donor("a", 2)], programs)];
        let rates = Rates::from([("a/sort".to_owned(), 5.0), ("a/join".to_owned(), 1.0)]);
        let whole = overview(&status(nodes.clone()), &rates);
        nodes[0].report = nodes[0].report.clone().in_brief(1);
        let brief = overview(&status(nodes), &rates);
        assert_eq!((whole.consumers.len(), brief.consumers.len()), (2, 1));
        assert_eq!(brief.hosts, whole.hosts);
        assert_eq!(whole.totals.faults_per_s, Some(6.0));
        assert_eq!(brief.totals, Totals { faults_per_s: None, ..whole.totals });
    }

    #[test]
    fn what_the_policy_allows_stands_beside_what_is_used() {
        let nodes = vec![node("a", vec![donor("a", 2)], vec![program("sort", 3)])];
        let mut status = status(nodes);
        let view = overview(&status, &Rates::new());
        assert_eq!((view.policy, view.hosts[0].quota_bytes), (None, None));
        assert_eq!(view.consumers[0].target_bytes, None);
        status.policy = Some(Named::Known(Choice::GreedyRemote { request_pages: 1024 }));
        let report = &mut status.nodes[0].report;
        (report.pool.quota_pages, report.pool.used_pages) = (Some(8 * GIB_PAGES), 6 * GIB_PAGES);
        let stats = report.consumers[0].stats.as_mut().expect("it has some");
        stats.target_bytes = Some(4 * GIB);
        let view = overview(&status, &Rates::new());
        assert_eq!(view.policy.as_deref(), Some("greedy-remote --request 4M"));
        let host = &view.hosts[0];
        assert_eq!((host.quota_bytes, host.quota_used_bytes), (Some(8 * GIB), Some(6 * GIB)));
        let consumer = &view.consumers[0];
        let held = (consumer.pool_bytes, consumer.target_bytes);
        assert_eq!(held, (Some(3 * GIB), Some(4 * GIB)));
    }

    #[test]
    fn two_nodes_of_one_host_share_its_memory() {
        let mut nodes = vec![node("a", vec![donor("a", 1)], vec![]), node("b", vec![], vec![])];
        nodes[1].report.host.boot_id = nodes[0].report.host.boot_id.clone();
        let view = overview(&status(nodes), &Rates::new());
        assert_eq!(view.hosts.len(), 1);
        assert_eq!((view.hosts[0].name.as_str(), view.hosts[0].memory_bytes), ("a, b", 16 * GIB));
    }

    #[test]
    fn a_flow_goes_from_the_donors_host_to_the_borrowers() {
        let nodes = vec![
            node("a", vec![donor("a", 2)], vec![]),
            node("b", vec![donor("b", 1)], vec![program("sort", 3)]),
        ];
        let view = overview(&status(nodes), &Rates::new());
        let flows: Vec<_> =
            view.flows.iter().map(|flow| (&*flow.from, flow.to.as_deref())).collect();
        assert_eq!(flows, [("a", Some("b")), ("b", Some("b"))], "the largest first");
        // A borrower whose node is not known is not made up.
        let view = overview(&status(vec![node("a", vec![donor("a", 2)], vec![])]), &Rates::new());
        assert_eq!((view.flows[0].to.as_deref(), &*view.flows[0].consumer), (None, "sort"));
    }

    #[test]
    fn a_flow_to_those_told_of_in_sums_goes_to_their_host() {
        let at_a = |name: &str, gib: u64| {
            let mut program = program(name, gib);
            let held = DonorUse { name: "a".to_owned(), bytes: gib * GIB, ..DonorUse::default() };
            program.stats.as_mut().expect("it has some").pool.donors = vec![held];
            program
        };
        let programs = vec![at_a("sort", 3), at_a("join", 2), at_a("scan", 2)];
        let mut nodes = vec![node("a", vec![donor("a", 2)], vec![]), node("b", vec![], programs)];
        nodes[1].report = nodes[1].report.clone().in_brief(1);
        let view = overview(&status(nodes), &Rates::new());
        let flow = |consumer: &str, bytes| Flow {
            donor: "a".to_owned(),
            from: "a".to_owned(),
            consumer: consumer.to_owned(),
            to: Some("b".to_owned()),
            bytes,
        };
        assert_eq!(view.flows, [flow("2 others of b", 4 * GIB), flow("sort", 3 * GIB)]);
    }

    #[test]
    fn silent_nodes_are_not_counted_in() {
        let mut nodes =
            vec![node("a", vec![donor("a", 2)], vec![]), node("b", vec![donor("b", 1)], vec![])];
        nodes[0].state = NodeState::Silent;
        nodes[0].silent_ms = 9000;
        let view = overview(&status(nodes), &Rates::new());
        assert_eq!((view.totals.nodes_up, view.totals.nodes), (1, 2));
        assert_eq!(view.totals.lent_bytes, Some(GIB));
        assert_eq!(view.donors[0].state, "silent");
        assert!(!view.hosts[0].is_up);
        let mut silent = node("a", vec![donor("a", 2)], vec![program("sort", 1)]);
        silent.state = NodeState::Silent;
        let totals = overview(&status(vec![silent]), &Rates::new()).totals;
        assert_eq!((totals.lent_bytes, totals.faults_per_s), (None, None), "nobody tells");
    }

    #[test]
    fn lists_are_bounded_and_say_so() {
        let donors = (0..MAX_LISTED + 3).map(|number| donor(&format!("d{number}"), 0)).collect();
        let view = overview(&status(vec![node("a", donors, vec![])]), &Rates::new());
        assert_eq!((view.donors.len(), view.left_out), (MAX_LISTED, 3));
    }

    proptest! {
        /// Whatever a host and its children say, who are not asked at one moment: the parts of the
        /// bar are the host's memory, no more and no less.
        #[test]
        fn the_parts_add_up(
            memory in 0u64..1 << 40,
            available in 0u64..1 << 40,
            committed in 0u64..1 << 41,
            lendable_pages in 0u64..1 << 29,
            local in 0u64..1 << 41,
        ) {
            let mut host = node("a", vec![donor("a", 1)], vec![program("p", 1)]);
            host.report.host.memory_bytes = memory;
            host.report.host.available_bytes = available.min(memory);
            let stats = host.report.donors[0].stats.as_mut().expect("it has some");
            stats.committed_bytes = committed;
            stats.lendable_pages = lendable_pages;
            host.report.consumers[0].stats.as_mut().expect("it has some").local_bytes = local;
            let view = overview(&status(vec![host]), &Rates::new());
            let [own @ .., _borrowed] = view.hosts[0].parts();
            prop_assert_eq!(sum(own.into_iter()), Some(memory));
        }
    }
}
