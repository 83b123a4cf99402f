//! The page protocol over TCP, with TLS or without.
//!
//! No lock is shared. Every thread of a borrower opens its own [`client::Connection`] to each
//! donor, and every connection has its own thread at the donor. Requests of two threads meet only
//! in the donor's memory. This costs sockets (threads times donors), which [`server::Limits`]
//! bounds. It saves a lock, a queue and a wake-up on every page fault.

pub mod client;
pub mod codec;
pub mod fault;
mod inbox;
pub mod protocol;
mod seldom;
pub mod server;
mod socket;
pub mod tls;
pub mod vigil;
pub mod window;
