//! The host daemon: supervises donors, pagers and volumes.
//!
//! Nothing here is on the path of a page. The node starts the processes that are, holds what must
//! outlive them, starts them again when they die, and reports. It is plain threads: a handful of
//! children and connections, descriptors passed along, and waits for processes, none of which an
//! async runtime makes simpler.
//!
//! [`node`] puts the parts together: [`children`] runs any child; [`donors`], [`pagers`] and
//! [`volumes`] run each kind, and [`agent`] divides the host's memory among machines; [`cluster`]
//! talks to the manager, [`announce`] to nodes nearby, [`socket`] to commands on this host.

pub mod agent;
pub mod announce;
mod causes;
pub mod children;
pub mod cluster;
mod division;
pub mod donors;
pub mod node;
pub mod node_dir;
pub mod pagers;
pub mod socket;
pub mod stop;
pub mod vms;
pub mod volumes;

pub use causes::with_causes;
pub use hecaton_pager::{adoption, channel};
pub use node::{Node, NodeConfig, NodeError};
pub use node_dir::{DirectoryError, NodeDir, NodePaths};
