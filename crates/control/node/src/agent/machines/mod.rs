//! Finds the machines and containers of the host.

pub(crate) mod container;
pub(crate) mod domain_plan;
pub(crate) mod domains;
pub(crate) mod machine;
pub(crate) mod process;
pub(crate) mod record;
