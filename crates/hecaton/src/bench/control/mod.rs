//! Benches of the control plane: thousands of nodes that report to one manager.

pub(crate) mod manager;
pub(crate) mod policy;
pub(crate) mod reporter;
