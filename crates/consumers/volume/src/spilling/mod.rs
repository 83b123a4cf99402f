//! Spills segments to a file when the pool has no room.

pub(crate) mod departures;
pub(crate) mod places;
pub(crate) mod returns;
pub mod spill;
pub(crate) mod target;
