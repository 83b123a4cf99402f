//! The host daemon: supervises donors, pagers and volumes.
//!
//! Nothing here is on the path of a page. The node starts the processes that are, holds what must
//! outlive them, starts them again when they die, and reports. It is plain threads: a handful of
//! children and connections, descriptors passed along, and waits for processes, none of which an
//! async runtime makes simpler.

pub mod adopt;
pub mod agent;
pub mod announce;
pub mod brief;
mod causes;
pub mod child;
pub mod client;
mod control;
mod division;
pub mod donor_directory;
pub mod donor_list;
pub mod donors;
pub mod endpoints;
pub mod heartbeat;
pub mod held;
pub mod launcher;
pub mod limits;
pub mod membership;
pub mod message;
pub mod metrics;
pub mod node;
pub mod node_dir;
mod pager_control;
pub mod pagers;
pub mod processes;
pub mod report;
pub mod restart;
pub mod stop;
pub mod vms;
pub mod volumes;

pub use causes::with_causes;
pub use hecaton_pager::{adoption, channel};
pub use node::{Node, NodeConfig, NodeError};
pub use node_dir::{DirectoryError, NodeDir, NodePaths};
