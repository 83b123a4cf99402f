//! FUSE, the kernel's protocol for file systems in user space.
//!
//! The protocol is spoken here and not by a library, for three reasons: a process takes over the
//! mount of one that was killed, and libraries begin with a handshake that has been made by then;
//! swap is written through it, and nothing may be allocated for that; and a file system with one
//! file has little to do.
//!
//! | module | what it is about |
//! |---|---|
//! | [`wire`] | messages of the kernel |
//! | [`device`] | reads and answers them |
//! | [`mapping`] | memory for them, mapped in advance |

pub mod device;
pub mod mapping;
pub mod wire;
