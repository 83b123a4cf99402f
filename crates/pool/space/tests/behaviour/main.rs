//! The behaviour of spaces on real donors.

mod coded;
mod coding_race;
mod common;
mod mirror;
mod recall;
mod secure;
mod sockets;
mod standstill;
