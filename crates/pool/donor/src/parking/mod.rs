//! Parks pages in a file while the host needs the memory.

pub(crate) mod keeper;
pub(crate) mod park;
pub(crate) mod park_file;
