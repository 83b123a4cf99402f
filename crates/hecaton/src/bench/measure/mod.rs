//! Measures loads, processors and statistics; plain TCP is the yardstick.

pub(crate) mod beside;
pub(crate) mod busy;
pub(crate) mod redis_client;
pub(crate) mod region;
pub(crate) mod stats;
pub(crate) mod wire;
