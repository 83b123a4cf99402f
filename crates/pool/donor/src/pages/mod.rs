//! Guards and describes a donor's pages: access, checksums, copies, NUMA nodes.

pub(crate) mod bits;
pub(crate) mod fill;
pub(crate) mod gate;
pub(crate) mod sums;
pub(crate) mod zones;
