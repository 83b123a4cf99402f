//! Defines the actions that the broker asks the agent to carry out.

use crate::accounts::cores::Words;
use crate::host::{NodeNo, Order, VmId};
use hecaton_memory::Size;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// An action to carry out. The agent reports the number of an order as `done` once the order was
/// carried out or refused. The broker may repeat any other action while it applies.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Action {
    /// The waiting VM can start with these bytes on each node. From now on it belongs to
    /// [`Host::vms`](crate::Host::vms).
    Admit {
        /// The admitted VM.
        vm: VmId,
        /// Bytes on each node.
        base_bytes: Vec<u64>,
    },
    /// The waiting VM cannot run on this host.
    Refuse {
        /// The refused VM.
        vm: VmId,
        /// The reason.
        why: RefuseWhy,
    },
    /// A harvest VM's device may grow.
    Grow {
        /// The harvest VM.
        vm: VmId,
        /// The VM's device, named by its node.
        node: NodeNo,
        /// The size to ask the guest for: a multiple of the device's block.
        requested_bytes: u64,
        /// This order.
        order: Order,
    },
    /// A harvest VM's device must shrink.
    Shrink {
        /// The harvest VM.
        vm: VmId,
        /// The VM's device, named by its node.
        node: NodeNo,
        /// The size to ask the guest for now, at most one batch less: a multiple of the block.
        requested_bytes: u64,
        /// The final size to ask the guest for, as known now. The guest's applications are told
        /// this size before the first batch.
        target_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Donors of this node may lend up to the limit, which is at least what they have lent.
    Lend {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Donors of this node lent more than the limit, and must recall the excess from borrowers.
    Recall {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Ephemeral pools may hold up to the limit on this node; what they hold beyond it is dropped.
    Ephemeral {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// A harvest VM's minimum is needed: warn the VM of its deadline.
    Warn {
        /// The harvest VM.
        vm: VmId,
        /// When the VM will be killed, on the clock that the steps use.
        deadline: Duration,
    },
    /// The warning is lifted.
    Spare {
        /// The harvest VM.
        vm: VmId,
    },
    /// The last part of the warning: the VM must shut down cleanly.
    ShutDown {
        /// The harvest VM.
        vm: VmId,
        /// When the VM will be killed, on the clock that the steps use.
        deadline: Duration,
    },
    /// Kill the VM. Repeated at each step until the VM is gone.
    Evict {
        /// The harvest VM.
        vm: VmId,
        /// The reason.
        why: EvictWhy,
    },
}

/// Why a harvest VM is killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictWhy {
    /// The VM's minimum is needed, and its warning has expired.
    MinimumNeeded,
    /// The VM stopped giving memory back before it had given enough.
    NotEnough,
    /// The VM gives memory back, but too slowly.
    TooSlow,
    /// The memory that the VM gave back is in pieces.
    NotContiguous,
    /// The memory that the VM gave back is on another node than the waiting VM's.
    WrongNode,
}

impl EvictWhy {
    /// All reasons.
    pub const ALL: [EvictWhy; 5] = [
        EvictWhy::MinimumNeeded,
        EvictWhy::NotEnough,
        EvictWhy::TooSlow,
        EvictWhy::NotContiguous,
        EvictWhy::WrongNode,
    ];
}

impl fmt::Display for EvictWhy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EvictWhy::MinimumNeeded => "its minimum is needed for a regular VM",
            EvictWhy::NotEnough => "it did not give back enough memory",
            EvictWhy::TooSlow => "it did not give memory back fast enough",
            EvictWhy::NotContiguous => "it gave memory back in pieces",
            EvictWhy::WrongNode => "it gave memory back on another NUMA node than was needed",
        })
    }
}

/// Why the broker refuses a waiting VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, thiserror::Error)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum RefuseWhy {
    /// The VM asks for 0 bytes.
    #[error("a virtual machine needs some memory, and 0 bytes were asked for")]
    NoMemory,
    /// The host has no such node.
    #[error("the host has {nodes} NUMA nodes, numbered from 0, and node {node} was asked for")]
    NoSuchNode {
        /// The node that was asked for.
        node: NodeNo,
        /// The host's number of nodes.
        nodes: usize,
    },
    /// Regular VMs leave too little memory, even if all other memory is given back.
    #[error(
        "{} were asked for, and {} are left by the host's system and its regular VMs; choose another host",
        Size(*.bytes), Size(*.reachable_bytes)
    )]
    NoRoom {
        /// Bytes that the VM asks for.
        bytes: u64,
        /// Bytes that the VM could have.
        reachable_bytes: u64,
    },
    /// Regular VMs leave too little memory on the required node, while another node has room.
    #[error(
        "{} were asked for on one NUMA node, and {} are left there by the host's system and its regular VMs; another \
         node of this host has {}",
        Size(*.bytes), Size(*.reachable_bytes), Size(*.elsewhere_bytes)
    )]
    NoRoomOnNode {
        /// Bytes that the VM asks for.
        bytes: u64,
        /// Bytes that the VM could have on the required node.
        reachable_bytes: u64,
        /// Bytes that the VM could have on the node with the most.
        elsewhere_bytes: u64,
    },
    /// The host has fewer cores in all than the VM asks for.
    #[error(
        "it asks for {}, and the host has {} for virtual machines; ask for fewer, or choose another host",
        Words(u64::from(*.cores)), Words(*.total_cores)
    )]
    TooManyCores {
        /// Cores that the VM asks for.
        cores: u32,
        /// Cores that the host has for VMs.
        total_cores: u64,
    },
    /// Regular VMs leave too few cores, even if all harvest VMs are evicted.
    #[error(
        "it asks for {}, and the host's regular VMs leave {}; choose another host",
        Words(u64::from(*.cores)), Words(*.reachable_cores)
    )]
    NoCores {
        /// Cores that the VM asks for.
        cores: u32,
        /// Cores that the VM could have.
        reachable_cores: u64,
    },
    /// Too many VMs wait already.
    #[error("{most} newcomers wait for memory already; try again when some of them have it")]
    TooManyWait {
        /// The most VMs that may wait.
        most: usize,
    },
}
