//! Serves the node's control socket, and speaks its protocol.

pub mod client;
pub(crate) mod control;
pub mod launcher;
pub mod message;
pub(crate) mod pager_control;
