//! What the broker is told of a host.

use serde::{Deserialize, Serialize};

/// A NUMA node, by its place in [`Host::nodes`].
pub type NodeNo = usize;

/// A virtual machine, also while it does not exist yet. Chosen by the agent, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub u64);

/// The number of an order of one broker; they rise. Zero is before all orders.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Order(pub u64);

/// A host at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Host {
    /// Its NUMA nodes; one for a host without NUMA.
    pub nodes: Vec<NumaNode>,
    /// The cores that virtual machines may have, of all nodes together.
    pub cores: u32,
    /// The virtual machines that exist, or were admitted and are being started.
    pub vms: Vec<Vm>,
    /// Those that want to exist, in the order in which they came. A harvest VM that was evicted is among
    /// them, as long as somebody wants it back.
    pub waiting: Vec<Newcomer>,
}

/// A NUMA node of the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NumaNode {
    /// All of its memory, in bytes.
    pub total_bytes: u64,
    /// What of it is no virtual machine's: the kernel's, the agent's, other programs'. May change.
    pub system_bytes: u64,
    /// The most that donors could lend of it.
    pub lend_cap_bytes: u64,
    /// What donors have of it for other hosts: the limit, and the extents that are in use.
    pub lent: Elastic,
    /// What ephemeral pools have of it, whose pages can be dropped at any time.
    pub ephemeral: Elastic,
}

/// Memory under a limit that the broker sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Elastic {
    /// The limit in force, in bytes.
    pub limit_bytes: u64,
    /// What is used. It may be more than the limit while it is being brought back.
    pub used_bytes: u64,
    /// The last order that was carried out, or refused, before this was looked at.
    pub done: Order,
}

/// A virtual machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vm {
    /// Its name.
    pub id: VmId,
    /// Memory that it has as long as it exists, on each node, in bytes: all of a regular VM, the
    /// minimum of a harvest VM.
    pub base_bytes: Vec<u64>,
    /// Cores that it has as long as it exists; 0 for one that takes no part in their division.
    pub cores: u32,
    /// None for a regular VM.
    pub harvest: Option<Harvest>,
}

impl Vm {
    /// What it has as long as it exists.
    pub fn base_total(&self) -> u64 {
        self.base_bytes.iter().sum()
    }

    /// The devices by which it grows.
    pub fn devices(&self) -> &[Device] {
        self.harvest.as_ref().map_or(&[], |harvest| &harvest.devices)
    }
}

/// What makes a virtual machine a harvest VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Harvest {
    /// The most that it may have, its minimum included.
    pub max_bytes: u64,
    /// One for each node on which it can grow. No two of one machine on the same node.
    pub devices: Vec<Device>,
}

/// A device by which a harvest VM grows and shrinks on one node: virtio-mem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// The node whose memory it is to be.
    pub node: NodeNo,
    /// Sizes are multiples of this.
    pub block_bytes: u64,
    /// The largest size.
    pub max_bytes: u64,
    /// The size that the hypervisor has asked the guest for (`requested-size`).
    pub requested_bytes: u64,
    /// The size that the hypervisor says it has (`size`).
    pub plugged_bytes: u64,
    /// What the host finds that it holds on each node: the greater of what is plugged there and
    /// what is really in memory. A guest that says it gave memory back and kept it is seen here.
    pub held_bytes: Vec<u64>,
    /// What it gave back in pieces that are no whole chunks, so that nobody can have it as huge pages.
    pub scattered_bytes: u64,
    /// The last order that was carried out, or refused, before this was looked at.
    pub done: Order,
    /// Whether the hypervisor answered at this look. Otherwise the sizes are what they were when it
    /// last did, or the most that they can be; nothing is ordered, and it counts as asked.
    pub is_heard: bool,
}

impl Device {
    /// What of it is on other nodes than its own.
    pub fn misplaced(&self, node: NodeNo) -> u64 {
        if node == self.node { 0 } else { self.held_bytes.get(node).copied().unwrap_or(0) }
    }

    /// What has to be counted to it on a node when it may have been asked for `ordered_bytes`
    /// besides what it is known to have been asked for. What is on a wrong node counts on both: a
    /// guest that reboots gives it up there, and takes it where it ought to be.
    pub(crate) fn charge(&self, node: NodeNo, ordered_bytes: u64) -> u64 {
        if node != self.node {
            return self.misplaced(node);
        }
        let may_take = self.requested_bytes.max(self.plugged_bytes).max(ordered_bytes);
        let held = self.held_bytes.get(node).copied().unwrap_or(0);
        held.max(may_take).saturating_add(self.scattered_bytes)
    }
}

/// A virtual machine that is to be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Newcomer {
    /// The name that it will have.
    pub id: VmId,
    /// What it is.
    pub kind: NewcomerKind,
    /// Memory that it must have from its start; a harvest VM's minimum.
    pub bytes: u64,
    /// Cores that it must have from its start, in the same way; 0 for one that takes no part in their division.
    pub cores: u32,
    /// The node that it has to be on; none if it is all the same to it.
    pub node: Option<NodeNo>,
}

/// How urgent a newcomer is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NewcomerKind {
    /// What everything else makes room for.
    Regular,
    /// Low-priority itself: it waits longer before anybody is evicted for it.
    Spot,
    /// Takes what is left over, and nobody is evicted for it.
    Harvest,
}
