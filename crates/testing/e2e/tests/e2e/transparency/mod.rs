//! Runs programs on the pool that do unusual things with memory, and compares with native runs.

pub(crate) mod core_files;
pub(crate) mod followed;
pub(crate) mod limits;
mod native;
pub(crate) mod overcommit;
pub(crate) mod pinned;
pub(crate) mod runtimes;
pub(crate) mod tracers;
pub(crate) mod wiped;
