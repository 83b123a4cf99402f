//! Virtual machines and containers on the pool, and the agent that divides a host between them.

pub(crate) mod agent;
pub(crate) mod attach;
pub(crate) mod containers;
pub(crate) mod cores;
pub(crate) mod domains;
pub(crate) mod ending;
pub(crate) mod harvest;
pub(crate) mod memory_files;
pub(crate) mod numa_host;
pub(crate) mod vm;
