//! What the broker wants done.

use crate::accounts::cores::Words;
use crate::host::{NodeNo, Order, VmId};
use hecaton_memory::Size;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// Something to be done. Orders are numbered, and the number is told back as `done` once an order was carried out or
/// refused; everything else may be said again as long as it is so.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Action {
    /// The newcomer can be started with this much on each node. From now on it belongs to
    /// [`Host::vms`](crate::Host::vms).
    Admit {
        /// Whom.
        vm: VmId,
        /// How much on which node, in bytes.
        base_bytes: Vec<u64>,
    },
    /// The newcomer cannot be had on this host.
    Refuse {
        /// Whom.
        vm: VmId,
        /// Why not.
        why: RefuseWhy,
    },
    /// A harvest VM's device may become larger.
    Grow {
        /// Whose.
        vm: VmId,
        /// Which of its devices, by its node.
        node: NodeNo,
        /// The size to ask the guest for: a multiple of the device's block.
        requested_bytes: u64,
        /// This order.
        order: Order,
    },
    /// A harvest VM's device is to become smaller.
    Shrink {
        /// Whose.
        vm: VmId,
        /// Which of its devices, by its node.
        node: NodeNo,
        /// The size to ask the guest for now, one batch less than it has: a multiple of the device's block.
        requested_bytes: u64,
        /// The size that it will be asked for in the end, as far as is known: what the guest's
        /// applications are told before the first batch.
        target_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Donors of this node may lend so much and not more. What is lent stays: the limit is no less.
    Lend {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Donors of this node have lent more than this, and are to have it back from their borrowers.
    Recall {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// Ephemeral pools may have so much on this node; what they have beyond is dropped.
    Ephemeral {
        /// The node.
        node: NodeNo,
        /// The limit.
        limit_bytes: u64,
        /// This order.
        order: Order,
    },
    /// A harvest VM's minimum is needed: tell it that it has until then.
    Warn {
        /// Whom.
        vm: VmId,
        /// When it will be killed, on the clock of the steps.
        deadline: Duration,
    },
    /// The warning is lifted.
    Spare {
        /// Whom.
        vm: VmId,
    },
    /// The warning's last part: it is to shut down, cleanly.
    ShutDown {
        /// Whom.
        vm: VmId,
        /// When it will be killed, on the clock of the steps.
        deadline: Duration,
    },
    /// Kill it. Said again until it is gone.
    Evict {
        /// Whom.
        vm: VmId,
        /// What for.
        why: EvictWhy,
    },
}

/// Why a harvest VM is killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictWhy {
    /// Its minimum is needed, and the time of the warning is over.
    MinimumNeeded,
    /// It has stopped giving back before it had given enough.
    NotEnough,
    /// It gives back, and has not done so fast enough.
    TooSlow,
    /// What it gave back is in pieces.
    NotContiguous,
    /// What it gave back is on another node than the newcomer's.
    WrongNode,
}

impl EvictWhy {
    /// All of them.
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

/// Why a newcomer cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, thiserror::Error)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum RefuseWhy {
    /// It asks for nothing.
    #[error("a virtual machine needs some memory, and 0 bytes were asked for")]
    NoMemory,
    /// There is no such node.
    #[error("the host has {nodes} NUMA nodes, numbered from 0, and node {node} was asked for")]
    NoSuchNode {
        /// The node that was asked for.
        node: NodeNo,
        /// How many there are.
        nodes: usize,
    },
    /// The regular VMs that are there leave too little, whoever else gives back.
    #[error(
        "{} were asked for, and {} are left by the host's system and its regular VMs; choose another host",
        Size(*.bytes), Size(*.reachable_bytes)
    )]
    NoRoom {
        /// What it asked for.
        bytes: u64,
        /// What it could have.
        reachable_bytes: u64,
    },
    /// The same for the node that it has to be on, while another one has room.
    #[error(
        "{} were asked for on one NUMA node, and {} are left there by the host's system and its regular VMs; another \
         node of this host has {}",
        Size(*.bytes), Size(*.reachable_bytes), Size(*.elsewhere_bytes)
    )]
    NoRoomOnNode {
        /// What it asked for.
        bytes: u64,
        /// What it could have there.
        reachable_bytes: u64,
        /// What it could have on the node with most of it.
        elsewhere_bytes: u64,
    },
    /// The host has never so many cores.
    #[error(
        "it asks for {}, and the host has {} for virtual machines; ask for fewer, or choose another host",
        Words(u64::from(*.cores)), Words(*.total_cores)
    )]
    TooManyCores {
        /// What it asked for.
        cores: u32,
        /// What there is.
        total_cores: u64,
    },
    /// The regular VMs that are there leave too few cores, whoever is evicted.
    #[error(
        "it asks for {}, and the host's regular VMs leave {}; choose another host",
        Words(u64::from(*.cores)), Words(*.reachable_cores)
    )]
    NoCores {
        /// What it asked for.
        cores: u32,
        /// What it could have.
        reachable_cores: u64,
    },
    /// Too many wait.
    #[error("{most} newcomers wait for memory already; try again when some of them have it")]
    TooManyWait {
        /// How many may.
        most: usize,
    },
}
