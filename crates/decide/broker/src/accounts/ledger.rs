//! Assigns every byte and core of the host to exactly one class.

use crate::accounts::books::Books;
use crate::accounts::cores::CoreLedger;
use crate::admission::Needs;
use serde::{Deserialize, Serialize};

/// A host's memory by NUMA node and class, and its cores by class. Each byte has exactly one class.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Ledger {
    /// Its nodes.
    pub nodes: Vec<NodeLedger>,
    /// Its cores.
    pub cores: CoreLedger,
}

/// A node's memory, in bytes. The classes are in reclaim order: the buffer gives back first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NodeLedger {
    /// The node's whole memory.
    pub total_bytes: u64,
    /// Free and not set aside: harvest VMs have not grown into it yet, or it is too small to use.
    pub unassigned_bytes: u64,
    /// Free, and kept as the buffer for new VMs.
    pub buffer_bytes: u64,
    /// Free, and reserved for waiting VMs until each has enough.
    pub reserved_bytes: u64,
    /// Donors may lend it, and have not lent it yet.
    pub lent_free_bytes: u64,
    /// Ephemeral pools hold it, or may take it.
    pub ephemeral_bytes: u64,
    /// Harvest VMs hold it beyond their minimum, or may take it.
    pub harvested_bytes: u64,
    /// Donors have lent it, and other hosts use it.
    pub lent_used_bytes: u64,
    /// Harvest VMs hold it as their minimum, as long as they exist.
    pub minimum_bytes: u64,
    /// Regular VMs hold it, or were admitted to it.
    pub regular_bytes: u64,
    /// The host itself uses it: the kernel, the agent and other programs.
    pub system_bytes: u64,
    /// Bytes counted twice, because the host's programs or guests took memory of another class.
    /// Zero unless something outside the broker goes wrong.
    pub overdrawn_bytes: u64,
}

impl NodeLedger {
    /// The sum of all classes: the total plus the overdrawn bytes.
    pub fn sum_bytes(&self) -> u64 {
        self.unassigned_bytes
            + self.buffer_bytes
            + self.reserved_bytes
            + self.lent_free_bytes
            + self.ephemeral_bytes
            + self.harvested_bytes
            + self.lent_used_bytes
            + self.minimum_bytes
            + self.regular_bytes
            + self.system_bytes
    }

    /// Bytes that no VM, donor or pool holds or may take.
    pub fn free_bytes(&self) -> u64 {
        self.unassigned_bytes + self.buffer_bytes + self.reserved_bytes
    }
}

impl Ledger {
    /// `needs`: reserved for waiting VMs. `buffer`: target of the buffer on each node, in bytes.
    pub(crate) fn close(books: &Books, needs: &Needs, buffer: &[u64]) -> Ledger {
        let node = |n: usize| {
            let free = books.free(n);
            let reserved_bytes = free.min(needs.of(n));
            let buffer_bytes = (free - reserved_bytes).min(buffer[n]);
            NodeLedger {
                total_bytes: books.total[n],
                unassigned_bytes: free - reserved_bytes - buffer_bytes,
                buffer_bytes,
                reserved_bytes,
                lent_free_bytes: books.lent_free[n],
                ephemeral_bytes: books.ephemeral[n],
                harvested_bytes: books.harvested[n],
                lent_used_bytes: books.lent_used[n],
                minimum_bytes: books.minimum[n],
                regular_bytes: books.regular[n],
                system_bytes: books.system[n],
                overdrawn_bytes: books.overdrawn(n),
            }
        };
        let cores = books.cores.close(needs.cores());
        let ledger = Ledger { nodes: (0..books.nodes()).map(node).collect(), cores };
        for node in &ledger.nodes {
            debug_assert_eq!(node.sum_bytes(), node.total_bytes + node.overdrawn_bytes);
        }
        ledger
    }
}
