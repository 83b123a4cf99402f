//! Lends extents of this host's memory and serves page requests.
//!
//! From the bottom up:
//! - [`extents`]: the `table` decides whose each extent is: owners, leases, fences. Pure. The
//!   `ledger` keeps its records in memory that outlives the process.
//! - `pages`: a `gate` lets requests pass without the table's lock; `sums` keeps the pages' sums.
//! - `parking`: pages that are in a file instead of in memory, and the thread that moves them.
//! - `lender` puts these and the memory together; `server` answers requests with it.
//! - `donor` opens, serves and stops.

mod config;
mod donor;
pub mod extents;
mod host;
mod lender;
mod metrics;
mod pages;
mod parking;
mod prometheus;
mod server;
mod snapshot;
mod stop;

pub use config::{DonorConfig, DonorError};
pub use donor::{
    ARENA_LABEL, Donor, DonorFds, LEDGER_LABEL, PARK_LABEL, Serving, check_numa_node, listen, run,
};
pub use extents::ledger::LedgerError;
pub use metrics::{BUCKETS_US, Counters, Refusals, ServiceTimes};
pub use pages::zones::ZoneError;
pub use parking::park_file::{ParkConfig, ParkError};
pub use prometheus::prometheus_text;
pub use snapshot::{ParkSnapshot, Snapshot, SpaceSnapshot, ZoneSnapshot};
pub use stop::StopHandle;
