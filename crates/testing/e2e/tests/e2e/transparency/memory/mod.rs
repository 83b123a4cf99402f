//! Runs programs that use memory in unusual ways.

pub(crate) mod core_files;
pub(crate) mod interfaces;
pub(crate) mod locked;
pub(crate) mod overcommit;
pub(crate) mod pinned;
pub(crate) mod wiped;
