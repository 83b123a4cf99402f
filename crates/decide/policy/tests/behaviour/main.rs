//! The behaviour of the policies: properties, scenarios and recorded programs.

mod eviction;
mod membership;
mod prefetch;
mod recorded;
mod simulation;
mod targets;
