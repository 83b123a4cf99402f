//! The registry in etcd, for several managers of which one leads.
//!
//! Uses etcd's JSON gateway, which every etcd serves at its client address. The manager sends a
//! handful of requests once or twice a second. A gRPC client would need a compiler of protocol
//! buffers for each build.
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
//! Each write is conditional on the leader's key that this manager has made. A write that a manager
//! sent before another one began to lead has no effect.

mod client;
mod seat;
mod store;

pub use client::EtcdError;
pub(crate) use seat::{Campaign, Seat};
pub use store::{Etcd, LEASE};

/// Prefix of this project's keys.
pub const PREFIX: &str = "/hecaton/1/";
