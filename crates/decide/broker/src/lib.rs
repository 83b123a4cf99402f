//! One broker for all of a host's memory, and cores, that no regular virtual machine has.
//!
//! After "Memory-Harvesting VMs in Cloud Platforms" (2022), sections 4.3 and 4.4. Harvest VMs, lent
//! extents and ephemeral pools use what is unallocated, and give it back before a regular VM misses
//! it. [`Broker::step`] is told what the host looks like ([`Host`]) and answers with what is to be
//! done ([`Action`]); it does no I/O and has no clock.
//!
//! It looks at levels, not at events: each step begins with the host as it is found, and what the
//! broker remembers between steps is only since when things have been so. That is why an agent that
//! was killed needs no journal of the broker's: the next one finds the sizes that the hypervisor
//! has, and goes on from there. The alternative, a ledger that is kept up by events, has to be
//! right after every event that is lost, late or repeated.
//!
//! Two rules keep the ledger true. Memory is counted to whoever *may* take it, from the moment at
//! which it is told so, and until it is *seen* to be gone: an order to shrink frees nothing. And
//! nobody is given a second order before the first was carried out, so that none is overtaken.

mod accounts;
mod action;
mod admission;
mod broker;
mod eviction;
mod host;
mod overdue;
mod placement;
mod settings;
mod shares;
mod targets;

pub use accounts::cores::CoreLedger;
pub use accounts::ledger::{Ledger, NodeLedger};
pub use action::{Action, EvictWhy, RefuseWhy};
pub use broker::{Broker, Counters, Waits};
pub use host::{
    Device, Elastic, Harvest, Host, Newcomer, NewcomerKind, NodeNo, NumaNode, Order, Vm, VmId,
};
pub use settings::{Settings, SettingsError};
