//! Defines the host agent's report: memory, cores, machines and waiting machines.

use hecaton_broker::{CoreLedger, Counters, NewcomerKind, NodeLedger, Waits};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The host's memory and cores, and their owners.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    /// The directory of the machines' monitors.
    pub qmp_dir: PathBuf,
    /// Memory to keep free for new machines, in bytes.
    pub buffer_bytes: u64,
    /// The NUMA nodes. Every byte of each is in one class.
    pub nodes: Vec<NodeMemoryReport>,
    /// The cores. Each is in one class.
    #[serde(default)]
    pub cores: CoreReport,
    /// The machines, in the order of their names.
    pub machines: Vec<MachineReport>,
    /// Machines that wait to be created, in the order of their arrival.
    pub waiting: Vec<NewcomerReport>,
    /// Harvest VMs that ended recently to make room for others, in the order of their ends.
    #[serde(default)]
    pub gave_way: Vec<GaveWayReport>,
    /// The broker's counters since this agent began.
    pub counters: Counters,
    /// Its part of the cluster's harvest VM quota, as in force when its machines were counted.
    #[serde(default)]
    pub harvest: HarvestShare,
    /// libvirt, if its domains take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtReport>,
}

/// A libvirt whose domains take part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibvirtReport {
    /// Its connection.
    pub uri: String,
    /// Why libvirt does not answer; none if it does.
    pub failure: Option<String>,
}

impl AgentReport {
    /// How many harvest VMs there are.
    pub fn harvest_vms(&self) -> u64 {
        let harvest = self.machines.iter().filter(|one| one.kind == NewcomerKind::Harvest);
        harvest.count() as u64
    }
}

/// The manager's grant: how many harvest VMs a node may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestGrant {
    /// Most harvest VMs, including those that exist.
    pub machines: u64,
    /// The grant's number; the numbers of one node's grants rise.
    pub number: u64,
    /// The cluster's quota.
    pub quota: u64,
}

/// The limit on harvest VMs that an agent applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HarvestWord {
    /// There is no manager, or no quota.
    #[default]
    Unlimited,
    /// The manager has not said whether there is a quota: no harvest VM is admitted.
    Nothing,
    /// The manager has granted this many.
    Grant(HarvestGrant),
}

impl HarvestWord {
    /// The most harvest VMs under this limit.
    pub fn most(&self) -> usize {
        match self {
            HarvestWord::Unlimited => usize::MAX,
            HarvestWord::Nothing => 0,
            HarvestWord::Grant(grant) => usize::try_from(grant.machines).unwrap_or(usize::MAX),
        }
    }
}

/// A node's part of the cluster's quota of harvest VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestShare {
    /// The limit that the node applies.
    pub word: HarvestWord,
    /// How many more harvest VMs the node could admit.
    pub wanted: u64,
}

/// A NUMA node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeMemoryReport {
    /// The kernel's number for it.
    pub node: u32,
    /// All memory of the node.
    pub host_bytes: u64,
    /// Memory that the agent does not manage.
    pub unmanaged_bytes: u64,
    /// The owners of the rest.
    #[serde(flatten)]
    pub ledger: NodeLedger,
}

impl NodeMemoryReport {
    /// Every byte of the node, by class: the class that gives memory back last comes first.
    /// [Overdrawn](NodeLedger::overdrawn_bytes) bytes are in two classes.
    pub fn classes(&self) -> [(&'static str, u64); 11] {
        let ledger = &self.ledger;
        [
            ("unmanaged", self.unmanaged_bytes),
            ("system", ledger.system_bytes),
            ("regular", ledger.regular_bytes),
            ("minimum", ledger.minimum_bytes),
            ("lent_used", ledger.lent_used_bytes),
            ("harvested", ledger.harvested_bytes),
            ("ephemeral", ledger.ephemeral_bytes),
            ("lent_free", ledger.lent_free_bytes),
            ("reserved", ledger.reserved_bytes),
            ("buffer", ledger.buffer_bytes),
            ("unassigned", ledger.unassigned_bytes),
        ]
    }
}

/// The host's cores, divided among the machines that take part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreReport {
    /// All processors of the host, as the kernel counts them.
    pub host: u64,
    /// Cores that the agent does not manage.
    pub unmanaged: u64,
    /// The owners of the rest.
    #[serde(flatten)]
    pub ledger: CoreLedger,
    /// The parent of the machines' cpu cgroups; it exists while a machine has cores. None if the
    /// kernel has no cpu controller.
    pub group: Option<PathBuf>,
}

impl CoreReport {
    /// Every core, by class, in the same order as [the memory](NodeMemoryReport::classes).
    pub fn classes(&self) -> [(&'static str, u64); 5] {
        let ledger = &self.ledger;
        [
            ("unmanaged", self.unmanaged),
            ("regular", ledger.regular),
            ("minimum", ledger.minimum),
            ("reserved", ledger.reserved),
            ("unallocated", ledger.unallocated),
        ]
    }
}

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// Its monitor has not answered yet.
    Starting,
    /// It runs.
    Running,
    /// Its monitor does not answer.
    Silent,
    /// Its minimum is needed for a regular VM: it will be shut down.
    Warned,
    /// It was told to shut down.
    ShuttingDown,
    /// It is being ended.
    Evicted,
}

/// A machine of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineReport {
    /// Its name.
    pub name: String,
    /// Its kind: regular, spot or harvest.
    pub kind: NewcomerKind,
    /// Its state.
    pub state: MachineState,
    /// Its process; the first process of a container.
    pub pid: u32,
    /// Its memory cgroup, if it is a container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Memory that it keeps while it exists; a harvest VM's minimum.
    pub base_bytes: u64,
    /// The most that it may have.
    pub max_bytes: u64,
    /// The size beyond its minimum that its guest was asked for.
    pub requested_bytes: u64,
    /// The size beyond its minimum that its guest has.
    pub harvested_bytes: u64,
    /// Bytes of all this that are resident on the host.
    pub held_bytes: u64,
    /// Cores that it keeps while it exists (a harvest VM's minimum); 0 if it takes no part.
    #[serde(default)]
    pub cores: u32,
    /// Why it has no cpu cgroup with the weight of its cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores_failure: Option<String>,
    /// How long it waited for memory, in milliseconds: 0 if the agent had enough at its first look.
    /// None for a machine that existed before this agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// Whether the agent waits for the manager inside it: the manager has sent a message, and no
    /// notice has timed out since. None for a machine without a port for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_listens: Option<bool>,
    /// Its memory by NUMA node of the host; empty on a host with one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<MachinePartReport>,
}

/// A machine's memory on one of the host's NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePartReport {
    /// The kernel's number for it.
    pub node: u32,
    /// Memory that the machine keeps there while it exists.
    pub base_bytes: u64,
    /// The size beyond `base_bytes` that its guest was asked for there.
    pub requested_bytes: u64,
    /// The size beyond `base_bytes` that its guest has there.
    pub harvested_bytes: u64,
    /// Bytes of all this that are resident there.
    pub held_bytes: u64,
}

/// A harvest VM that was warned, shut down or killed for others, and has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GaveWayReport {
    /// Its name.
    pub name: String,
    /// The process of the harvest VM.
    pub pid: u32,
    /// Time since it ended, in milliseconds.
    pub since_ms: u64,
}

/// A machine that waits to be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewcomerReport {
    /// The name that it will have.
    pub name: String,
    /// Its kind: regular, spot or harvest.
    pub kind: NewcomerKind,
    /// Memory that it will have from its start.
    pub bytes: u64,
    /// Cores that it will have from its start.
    #[serde(default)]
    pub cores: u32,
    /// How long it has waited, in milliseconds.
    pub waiting_ms: u64,
    /// Why it waits; none before the broker has looked at it.
    pub waits: Option<Waits>,
}
