//! A volume as a file: a FUSE mount whose root is no directory but one regular file.
//!
//! The protocol is spoken here and not by a library, for three reasons: a process takes over the mount
//! of one that was killed, and libraries begin with a handshake that has been made by then; swap is
//! written through it, and nothing may be allocated for that; and of a file system with one file
//! there is little to do.
//!
//! | module | what it is about |
//! |---|---|
//! | `wire` | the kernel's messages |
//! | [`mount`] | the mount, which outlives the processes that serve it |
//! | `file` | what requests are answered with |
//! | `gate` | the end |
//! | `mapping` | memory for requests, there in advance |
//! | [`server`] | threads that answer |
//! | `uring` | requests through io_uring |

mod file;
mod gate;
mod mapping;
pub mod mount;
pub mod server;
mod uring;
mod wire;

pub use mount::{Mount, MountError};
pub use server::FileServer;
