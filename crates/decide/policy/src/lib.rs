//! Decisions: placement, prefetch, eviction order, who may hold how much; no I/O, no clock, no
//! threads.
//!
//! Everything that chooses lives here, and is told what it needs to know: the daemons, the
//! simulations in the tests and the fleet simulator drive the same code (decision 1 of the design).

pub mod cluster;
pub mod cold;
pub mod evict;
pub mod parking;
pub mod placement;
pub mod prefetch;
pub mod pressure;
pub mod recall;
pub mod replay;
pub mod simulation;
pub mod site;
