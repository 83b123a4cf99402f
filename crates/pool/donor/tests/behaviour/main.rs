//! The behaviour of a donor, through its sockets.

#[path = "../common/mod.rs"]
mod common;
mod filling;
mod late;
mod lending;
mod owning;
mod parking;
mod recall;
mod restart;
mod verifying;
