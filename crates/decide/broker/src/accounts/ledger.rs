//! Whose every byte of the host is, and every core.

use crate::accounts::books::Books;
use crate::accounts::cores::CoreLedger;
use crate::admission::Needs;
use serde::{Deserialize, Serialize};

/// A host's memory, by NUMA node and class, and its cores by class. Every byte of a node is in exactly one class.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Ledger {
    /// Its nodes.
    pub nodes: Vec<NodeLedger>,
    /// Its cores.
    pub cores: CoreLedger,
}

/// A node's memory, in bytes. The classes stand in the order in which they give back: the buffer first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NodeLedger {
    /// All of it.
    pub total_bytes: u64,
    /// Nobody's, and about to be somebody's: harvest VMs have not grown into it yet, or it is too little for anybody.
    pub unassigned_bytes: u64,
    /// Free, and kept for newcomers.
    pub buffer_bytes: u64,
    /// Free, and kept for newcomers that wait until there is enough of it.
    pub reserved_bytes: u64,
    /// Donors may lend it, and have not.
    pub lent_free_bytes: u64,
    /// Ephemeral pools have it, or may take it.
    pub ephemeral_bytes: u64,
    /// Harvest VMs have it beyond their minimum, or may take it.
    pub harvested_bytes: u64,
    /// Other hosts use it.
    pub lent_used_bytes: u64,
    /// Harvest VMs have it as long as they exist.
    pub minimum_bytes: u64,
    /// Regular VMs have it, or were admitted to it.
    pub regular_bytes: u64,
    /// The host's own.
    pub system_bytes: u64,
    /// What is counted twice, because the host's own programs, or guests, have taken what was somebody
    /// else's. Zero unless something goes wrong that is not the broker's doing.
    pub overdrawn_bytes: u64,
}

impl NodeLedger {
    /// The sum of all classes: the total, and what is overdrawn.
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

    /// What nobody has and nobody may take.
    pub fn free_bytes(&self) -> u64 {
        self.unassigned_bytes + self.buffer_bytes + self.reserved_bytes
    }
}

impl Ledger {
    /// `needs`: what newcomers wait for. `buffer`: what the buffer is to be.
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
