//! The behaviour of the page protocol: its bytes, and its sockets.

mod codec;
mod malformed;
mod sockets;
