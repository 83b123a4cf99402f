//! The registry in etcd, for several managers of which one leads.
//!
//! Through etcd's own JSON gateway, which every etcd serves at its client address: what is asked of
//! it is a handful of requests once or twice a second, and a client of the gRPC API would need a
//! compiler of protocol buffers for each build.
//!
//! | key, after [`PREFIX`] | value |
//! |---|---|
//! | `leader` | the leader's instance and address; goes with its lease |
//! | `format`, `epoch` | numbers |
//! | `node/NAME` | the node's record, as JSON |
//! | `draining/DONOR` | nothing |
//! | `limit/DONOR` | bytes |
//! | `stamp` | left by the last write for the next to find ([`pen`](crate::records::pen)) |
//!
//! Everything is written on the condition that the leader's key is the one that this manager has
//! made: what a manager sent before another one began to lead comes to nothing.

mod client;
mod seat;
mod store;

pub use client::EtcdError;
pub(crate) use seat::{Campaign, Seat};
pub use store::{Etcd, LEASE};

/// What the keys of this project begin with.
pub const PREFIX: &str = "/hecaton/1/";
