//! Accounts for the host's cores by class.
//!
//! A harvest VM has its minimum of cores as long as it exists, and no other VM is promised those.
//! Unlike memory, cores beyond the minimum need no order to come or go. At its next tick, the
//! scheduler gives a processor to a VM with more right to it. So harvested cores are no class here,
//! and no VM is asked to give any back.

use crate::host::Host;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A host's cores, by class. Every one is in exactly one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CoreLedger {
    /// All that virtual machines may have.
    pub total: u64,
    /// Nobody's: harvest VMs use them.
    pub unallocated: u64,
    /// Nobody's, and kept for newcomers that wait.
    pub reserved: u64,
    /// Harvest VMs have them as long as they exist.
    pub minimum: u64,
    /// Regular VMs have them, or were admitted to them.
    pub regular: u64,
    /// Cores that are counted twice, because the host has fewer than its machines were promised.
    pub overdrawn: u64,
}

impl CoreLedger {
    /// The sum of all classes: the total, and what is overdrawn.
    pub fn sum(&self) -> u64 {
        self.unallocated + self.reserved + self.minimum + self.regular
    }
}

/// Cores by class, as one step sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cores {
    pub(crate) total: u64,
    pub(crate) regular: u64,
    pub(crate) minimum: u64,
}

impl Cores {
    pub(crate) fn open(host: &Host) -> Cores {
        let sum = |is_harvest: bool| {
            let vms = host.vms.iter().filter(|vm| vm.harvest.is_some() == is_harvest);
            vms.map(|vm| u64::from(vm.cores)).sum()
        };
        Cores { total: u64::from(host.cores), regular: sum(false), minimum: sum(true) }
    }

    fn charged(&self) -> u64 {
        self.regular + self.minimum
    }

    /// Cores that no VM was promised.
    pub(crate) fn free(&self) -> u64 {
        self.total.saturating_sub(self.charged())
    }

    /// Further cores that regular VMs could have if all harvest VMs were evicted.
    pub(crate) fn reach(&self) -> u64 {
        self.total.saturating_sub(self.regular)
    }

    /// `reserved`: what newcomers wait for.
    pub(crate) fn close(&self, reserved: u64) -> CoreLedger {
        let reserved = self.free().min(reserved);
        let ledger = CoreLedger {
            total: self.total,
            unallocated: self.free() - reserved,
            reserved,
            minimum: self.minimum,
            regular: self.regular,
            overdrawn: self.charged().saturating_sub(self.total),
        };
        debug_assert_eq!(ledger.sum(), ledger.total + ledger.overdrawn);
        ledger
    }
}

/// A number of cores, in words.
pub(crate) struct Words(pub(crate) u64);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 core"),
            number => write!(f, "{number} cores"),
        }
    }
}
