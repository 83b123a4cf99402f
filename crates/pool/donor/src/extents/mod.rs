//! Tracks a donor's extents: owners, leases, generations, records that outlive the process.

pub(crate) mod layout;
pub(crate) mod ledger;
pub mod owner;
pub mod standing;
pub mod table;
