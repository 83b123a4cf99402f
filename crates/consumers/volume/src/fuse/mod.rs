//! A volume as a file: a FUSE mount whose root is no directory but one regular file.
//!
//! | module | what it is about |
//! |---|---|
//! | [`mount`] | the mount, which outlives the processes that serve it |
//! | `file` | what requests are answered with |
//! | `gate` | the end |
//! | [`server`] | threads that answer |
//! | `uring` | requests through io_uring |

mod file;
mod gate;
pub mod mount;
pub mod server;
mod uring;

pub use mount::{Mount, MountError};
pub use server::FileServer;
