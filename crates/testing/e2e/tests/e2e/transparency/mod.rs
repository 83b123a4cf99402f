//! Runs programs on the pool that do unusual things with memory, and compares with native runs.

mod native;
pub(crate) mod overcommit;
pub(crate) mod pinned;
pub(crate) mod tracers;
pub(crate) mod wiped;
