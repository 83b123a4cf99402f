//! Starts the cluster and the child processes of a bench.

pub(crate) mod certified;
pub(crate) mod cluster;
pub(crate) mod hosts;
pub(crate) mod interrupt;
pub(crate) mod process;
