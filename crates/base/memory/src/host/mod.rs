//! Asks the kernel: memory files, huge pages, locked memory, NUMA nodes, cgroups, clock and random
//! numbers.

pub mod cgroup;
pub(crate) mod clock;
pub mod huge_pages;
pub mod locked;
pub mod memfd;
pub mod meminfo;
pub mod numa;
pub(crate) mod random;
