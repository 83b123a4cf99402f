//! The control plane: which nodes there are, and how commands and nodes ask about them.
//!
//! [`registry`] decides and knows neither clock nor network; [`api`] is HTTP around it; [`server`]
//! binds and runs it. [`overview`] and [`watch`] make of what is known what people look at, in a
//! browser or with `hecaton top`. The manager is on no data path: with it away, pages go on moving between
//! the nodes that know each other.

mod alarms;
pub mod api;
pub mod book;
mod dashboard;
pub mod election;
pub mod etcd;
pub mod events;
pub mod harvest;
pub mod lasting;
mod ledger;
mod members;
pub mod metrics;
mod openapi;
pub mod overview;
mod own_metrics;
pub mod pen;
pub mod permission;
mod quotas;
pub mod registry;
pub mod removal;
mod roster;
pub mod server;
pub mod store;
mod tls;
pub mod watch;

pub use etcd::Etcd;
pub use ledger::Keep;
pub use metrics::MetricsServer;
pub use registry::{ClusterStatus, MemberState, NodeState, NodeStatus, Registry, RegistryError};
pub use server::{ManagerServer, ServeError};
