//! Decides how the pool holds the consumer's memory.

pub(crate) mod cold;
pub mod placement;
pub(crate) mod scrub;
pub(crate) mod target;
