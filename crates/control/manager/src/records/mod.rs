//! Stores the registry in a file or in etcd, and elects the leader.

pub mod book;
pub mod election;
pub mod lasting;
pub(crate) mod ledger;
pub mod pen;
pub mod store;
