//! Runs programs on the pool that do unusual things with memory, and compares with native runs.

pub(crate) mod identity;
pub(crate) mod interfaces;
pub(crate) mod locked;
mod native;
pub(crate) mod overcommit;
pub(crate) mod pinned;
pub(crate) mod sandboxes;
pub(crate) mod tracers;
pub(crate) mod wiped;
