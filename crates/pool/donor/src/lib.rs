//! Lends extents of this host's memory and serves page requests.
//!
//! From the bottom up:
//! - `table` decides who has what: extents, owners, leases, fences. Pure.
//! - `ledger` (with `layout` and `sums`) keeps the table's records and the pages' sums in memory
//!   that outlives the process.
//! - `gate` lets page requests pass without the table's lock; `owner` says from which nodes.
//! - `park` knows which pages are in a file instead of in memory; `park_file` is that file.
//! - `lender` puts these and the memory together; `server` answers requests with it, and `keeper`
//!   moves extents to the file and back.
//! - `donor` opens, serves and stops.

mod bits;
mod config;
mod donor;
mod fill;
mod gate;
mod host;
mod keeper;
mod layout;
mod ledger;
mod lender;
mod metrics;
pub mod owner;
mod park;
mod park_file;
mod prometheus;
mod server;
mod snapshot;
pub mod standing;
mod stop;
mod sums;
pub mod table;
mod zones;

pub use config::{DonorConfig, DonorError};
pub use donor::{
    ARENA_LABEL, Donor, DonorFds, LEDGER_LABEL, PARK_LABEL, Serving, check_numa_node, listen, run,
};
pub use ledger::LedgerError;
pub use metrics::{BUCKETS_US, Counters, Refusals, ServiceTimes};
pub use park_file::{ParkConfig, ParkError};
pub use prometheus::prometheus_text;
pub use snapshot::{ParkSnapshot, Snapshot, SpaceSnapshot, ZoneSnapshot};
pub use stop::StopHandle;
pub use zones::ZoneError;
