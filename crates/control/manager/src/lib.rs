//! The control plane: it knows the nodes of a cluster, and answers commands and nodes.
//!
//! [`registry`] decides and knows neither clock nor network; [`http`] is the API around it;
//! [`records`] keeps it in a file or in etcd, and elects the manager that leads; [`watching`] makes
//! of it what people look at, in a browser or with `hecaton top`. The manager is on no data path:
//! with it away, pages go on moving between the nodes that know each other.

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
