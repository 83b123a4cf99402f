//! What the agent says of its host.

use hecaton_broker::{CoreLedger, Counters, NewcomerKind, NodeLedger, Waits};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The host's memory, and who has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    /// The directory of the machines' monitors.
    pub qmp_dir: PathBuf,
    /// What is to be free for newcomers.
    pub buffer_bytes: u64,
    /// The NUMA nodes. Every byte of each is in one class.
    pub nodes: Vec<NodeMemoryReport>,
    /// The cores. Each is in one class.
    #[serde(default)]
    pub cores: CoreReport,
    /// The machines, in the order of their names.
    pub machines: Vec<MachineReport>,
    /// Those that are to be created and wait, in the order in which they came.
    pub waiting: Vec<NewcomerReport>,
    /// Harvest VMs that have ended for others of late, in the order in which they did.
    #[serde(default)]
    pub gave_way: Vec<GaveWayReport>,
    /// What has happened since this agent began.
    pub counters: Counters,
    /// Its part of the cluster's quota of harvest VMs, which was in force when its machines were counted.
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
    /// Why it says nothing, if so.
    pub failure: Option<String>,
}

impl AgentReport {
    /// How many harvest VMs there are.
    pub fn harvest_vms(&self) -> u64 {
        let harvest = self.machines.iter().filter(|one| one.kind == NewcomerKind::Harvest);
        harvest.count() as u64
    }
}

/// How many harvest VMs a node may have, in the manager's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestGrant {
    /// Those that are there included.
    pub machines: u64,
    /// The grant's number; a node's rise.
    pub number: u64,
    /// The cluster's quota.
    pub quota: u64,
}

/// What an agent goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HarvestWord {
    /// There is no manager, or no quota.
    #[default]
    Unlimited,
    /// The manager has not said whether there is a quota: no harvest VM is admitted.
    Nothing,
    /// So many.
    Grant(HarvestGrant),
}

impl HarvestWord {
    /// The most harvest VMs by it.
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
    /// What it goes by.
    pub word: HarvestWord,
    /// How many more it could admit.
    pub wanted: u64,
}

/// A NUMA node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeMemoryReport {
    /// The kernel's number for it.
    pub node: u32,
    /// All that the node has.
    pub host_bytes: u64,
    /// What of it the agent leaves to others.
    pub unmanaged_bytes: u64,
    /// Whose the rest is.
    #[serde(flatten)]
    pub ledger: NodeLedger,
}

impl NodeMemoryReport {
    /// Every byte of the node, by class, and those that give last before those that give first. What is
    /// [overdrawn](NodeLedger::overdrawn_bytes) is in two of them.
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

/// The host's cores, as far as machines take part in their division.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreReport {
    /// All that the host has: processors as the kernel counts them.
    pub host: u64,
    /// What of them the agent leaves to others.
    pub unmanaged: u64,
    /// Whose the rest is.
    #[serde(flatten)]
    pub ledger: CoreLedger,
    /// The cgroup in which the machines' are, which is there as long as one of them has cores. None if the kernel has no
    /// cpu controller.
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

/// What a machine is doing.
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
    /// What it is.
    pub kind: NewcomerKind,
    /// What it is doing.
    pub state: MachineState,
    /// Its process; a container's first.
    pub pid: u32,
    /// Of a container: its memory cgroup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// What it has as long as it exists: a harvest VM's minimum.
    pub base_bytes: u64,
    /// The most that it may have.
    pub max_bytes: u64,
    /// What its guest was asked to have beyond its minimum.
    pub requested_bytes: u64,
    /// What its guest has beyond its minimum.
    pub harvested_bytes: u64,
    /// What of all this is really in memory.
    pub held_bytes: u64,
    /// Cores that it has as long as it exists, a harvest VM's minimum; 0 if it takes no part in their division.
    #[serde(default)]
    pub cores: u32,
    /// Why it has no cpu cgroup with the weight of its cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores_failure: Option<String>,
    /// How long it waited for memory, in milliseconds: 0 if the agent had it when it first looked. None for a machine that
    /// was there before this agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// The same by NUMA node of the host; nothing on a host with one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<MachinePartReport>,
}

/// What a machine has of one of the host's NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePartReport {
    /// The kernel's number for it.
    pub node: u32,
    /// What it has there as long as it exists.
    pub base_bytes: u64,
    /// What its guest was asked to have there beyond that.
    pub requested_bytes: u64,
    /// What its guest has there beyond that.
    pub harvested_bytes: u64,
    /// What of all this is really in memory.
    pub held_bytes: u64,
}

/// A harvest VM that was warned, shut down or killed for others, and has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GaveWayReport {
    /// Its name.
    pub name: String,
    /// The process that it was.
    pub pid: u32,
    /// How long ago.
    pub since_ms: u64,
}

/// A machine that is to be created, and waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewcomerReport {
    /// The name that it will have.
    pub name: String,
    /// What it is.
    pub kind: NewcomerKind,
    /// What it will have from its start.
    pub bytes: u64,
    /// Cores that it will have from its start.
    #[serde(default)]
    pub cores: u32,
    /// For how long.
    pub waiting_ms: u64,
    /// What for; none before it was looked at.
    pub waits: Option<Waits>,
}
