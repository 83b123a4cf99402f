//! The kernel's side of a file system in user space (FUSE).
//!
//! The protocol is spoken here and not by a library, for three reasons: a process takes over the
//! mount of one that was killed, and libraries begin with a handshake that has been made by then;
//! swap is written through it, and nothing may be allocated for that; and of file systems with one
//! file, or with files that have no directories, there is little to do.
//!
//! | module | what it is about |
//! |---|---|
//! | [`wire`] | the kernel's messages |
//! | [`device`] | where they are read and answered |
//! | [`mapping`] | memory for requests, there in advance |

pub mod device;
pub mod mapping;
pub mod wire;
