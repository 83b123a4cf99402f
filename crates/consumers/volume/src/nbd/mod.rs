//! A server of the network block device protocol, fixed newstyle, with structured replies.
//!
//! The protocol is at <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.
//! [`wire`] decodes the bytes of a client, and knows no socket. [`handshake`] needs no more than
//! something to read and write. `client` runs the handshake, over TLS if that is asked for (`tls`),
//! and `connection` serves the requests.

mod client;
mod connection;
pub mod handshake;
mod outbox;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
pub mod wire;

pub(crate) use client::serve;
