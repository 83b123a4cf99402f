//! The page protocol over TCP, with TLS or without.
//!
//! There is no lock to share: every thread of a borrower opens a [`client::Connection`] of its own
//! to each donor that it talks to, and every connection has a thread of its own at the donor. A
//! request meets another thread's only in the donor's memory. What that costs is sockets (threads
//! times donors), and [`server::Limits`] bounds them; what it saves is a lock, a queue and a
//! wake-up on every page fault.

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
