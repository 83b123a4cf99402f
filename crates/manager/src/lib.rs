//! The control plane: which nodes there are, and how commands and nodes ask about them.
//!
//! [`registry`] decides and knows neither clock nor network; [`api`] is HTTP around it; [`server`]
//! binds and runs it. The manager is on no data path: with it away, pages go on moving between
//! the nodes that know each other.

pub mod api;
pub mod metrics;
pub mod registry;
pub mod server;

pub use metrics::MetricsServer;
pub use registry::{ClusterStatus, NodeState, NodeStatus, Registry, RegistryError};
pub use server::{ManagerServer, ServeError};
