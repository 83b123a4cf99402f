//! Describes a host to the broker: its NUMA nodes, VMs and waiting VMs.

use serde::{Deserialize, Serialize};

/// A NUMA node, by its index in [`Host::nodes`].
pub type NodeNo = usize;

/// Identifies a VM, also before it exists. Chosen by the agent, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub u64);

/// The number of an order of one broker. Numbers rise; zero is before all orders.
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
    /// VMs that wait for admission, in order of arrival. An evicted harvest VM is among them as
    /// long as it is wanted back.
    pub waiting: Vec<Newcomer>,
}

/// A NUMA node of the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NumaNode {
    /// All of its memory, in bytes.
    pub total_bytes: u64,
    /// Bytes in use outside of VMs: by the kernel, the agent and other programs. May change.
    pub system_bytes: u64,
    /// The most bytes that donors could lend from this node.
    pub lend_cap_bytes: u64,
    /// Memory that donors hold for other hosts: the limit, and the extents in use.
    pub lent: Elastic,
    /// Memory that ephemeral pools hold; their pages can be dropped at any time.
    pub ephemeral: Elastic,
}

/// Memory under a limit that the broker sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Elastic {
    /// The limit in force, in bytes.
    pub limit_bytes: u64,
    /// Bytes in use. They may exceed the limit while the excess is being reclaimed.
    pub used_bytes: u64,
    /// The last order that was carried out or refused before this snapshot.
    pub done: Order,
}

/// A virtual machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vm {
    /// Its name.
    pub id: VmId,
    /// Bytes on each node that the VM holds as long as it exists: all of a regular VM, the minimum
    /// of a harvest VM.
    pub base_bytes: Vec<u64>,
    /// Cores that the VM holds as long as it exists; 0 if it takes no part in dividing cores.
    pub cores: u32,
    /// None for a regular VM.
    pub harvest: Option<Harvest>,
}

impl Vm {
    /// Bytes on all nodes that the VM holds as long as it exists.
    pub fn base_total(&self) -> u64 {
        self.base_bytes.iter().sum()
    }

    /// The devices by which the VM grows.
    pub fn devices(&self) -> &[Device] {
        self.harvest.as_ref().map_or(&[], |harvest| &harvest.devices)
    }
}

/// The limit and devices of a harvest VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Harvest {
    /// The most bytes that the VM may have, its minimum included.
    pub max_bytes: u64,
    /// One for each node on which the VM can grow. No two devices of a VM are on the same node.
    pub devices: Vec<Device>,
}

/// A device by which a harvest VM grows and shrinks on one node: virtio-mem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// The node that the device's memory must be on.
    pub node: NodeNo,
    /// Sizes are multiples of this.
    pub block_bytes: u64,
    /// The largest size.
    pub max_bytes: u64,
    /// The size that the hypervisor has asked the guest for (`requested-size`).
    pub requested_bytes: u64,
    /// The size that the hypervisor says it has (`size`).
    pub plugged_bytes: u64,
    /// Bytes that the host finds on each node: the greater of what is plugged and what is really in
    /// memory. Shows a guest that keeps memory which it claims to have given back.
    pub held_bytes: Vec<u64>,
    /// Bytes given back in pieces that are no whole chunks: no VM can use them as huge pages.
    pub scattered_bytes: u64,
    /// The last order that was carried out or refused before this snapshot.
    pub done: Order,
    /// Whether the hypervisor answered for this snapshot. If not, sizes are those last heard, or
    /// the most they can be. Then nothing is ordered, and the device counts as asked.
    pub is_heard: bool,
}

impl Device {
    /// Bytes of the device on `node`, or 0 if `node` is the device's own.
    pub fn misplaced(&self, node: NodeNo) -> u64 {
        if node == self.node { 0 } else { self.held_bytes.get(node).copied().unwrap_or(0) }
    }

    /// Bytes to charge to the device on a node, if it may have been asked for `ordered_bytes`
    /// besides what it is known to have been asked for. Memory on a wrong node is charged on both
    /// nodes: a guest that reboots frees it there, and takes it on the right node.
    pub(crate) fn charge(&self, node: NodeNo, ordered_bytes: u64) -> u64 {
        if node != self.node {
            return self.misplaced(node);
        }
        let may_take = self.requested_bytes.max(self.plugged_bytes).max(ordered_bytes);
        let held = self.held_bytes.get(node).copied().unwrap_or(0);
        held.max(may_take).saturating_add(self.scattered_bytes)
    }
}

/// A VM that waits to be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Newcomer {
    /// The identity that the VM will have.
    pub id: VmId,
    /// The VM's priority.
    pub kind: NewcomerKind,
    /// Bytes that the VM must have from its start; a harvest VM's minimum.
    pub bytes: u64,
    /// Cores that the VM must have from its start, likewise; 0 if it gets no share of cores.
    pub cores: u32,
    /// The node that the VM must be on; `None` if any node will do.
    pub node: Option<NodeNo>,
}

/// The priority of a waiting VM, highest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NewcomerKind {
    /// All other uses of memory make room for it.
    Regular,
    /// Low priority: it waits longer before a harvest VM is evicted for it.
    Spot,
    /// Takes what is left over, and no VM is evicted for it.
    Harvest,
}
