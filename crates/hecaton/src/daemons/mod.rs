//! Starts the processes of a cluster, and parses the arguments that they share.

pub(crate) mod agent;
pub(crate) mod announcing;
pub(crate) mod dev;
pub(crate) mod donor;
pub(crate) mod guest;
pub(crate) mod lending;
pub(crate) mod lifetime;
pub(crate) mod manager;
pub(crate) mod node;
pub(crate) mod pager;
pub(crate) mod volume_server;
