//! Runs programs on the pool that do unusual things, and compares with native runs.

pub(crate) mod memory;
mod native;
pub(crate) mod processes;
