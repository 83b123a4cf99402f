//! Reports the node to its manager, and learns of donors.

pub mod brief;
pub mod donor_directory;
pub mod donor_list;
pub mod endpoints;
pub mod heartbeat;
pub mod membership;
pub mod metrics;
pub mod report;
