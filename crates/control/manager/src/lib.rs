//! The control plane: it knows the nodes of a cluster, and answers commands and nodes.
//!
//! [`registry`] decides and knows neither clock nor network. [`http`] is its API. [`records`] keeps
//! it in a file or in etcd, and elects the manager that leads. [`watching`] derives what the
//! dashboard and `hecaton top` show. The manager is on no data path: without it, pages still move
//! between the nodes that know each other.

mod dashboard;
pub mod etcd;
pub mod harvest;
pub mod http;
mod members;
mod quotas;
pub mod records;
pub mod registry;
pub mod removal;
mod roster;
pub mod watching;

pub use etcd::Etcd;
pub use http::metrics::MetricsServer;
pub use http::server::{ManagerServer, ServeError};
pub use records::ledger::Keep;
pub use registry::{ClusterStatus, MemberState, NodeState, NodeStatus, Registry, RegistryError};
