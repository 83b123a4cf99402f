//! Keeps copies: makes new ones, moves them, compares them, and gives them back to their donors.

pub(crate) mod recall;
pub mod scrub;
pub(crate) mod tend;
pub mod upkeep;
pub(crate) mod verify;
