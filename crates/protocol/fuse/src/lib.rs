//! FUSE, the kernel's protocol for file systems in user space.
//!
//! The protocol is implemented here and not by a library, for three reasons:
//!
//! - A process takes over the mount of one that was killed. Libraries begin with a handshake, which
//!   has been made by then.
//! - Swap is written through the mount, and nothing may be allocated for that.
//! - A file system with one file has little to do.
//!
//! | module | what it is about |
//! |---|---|
//! | [`wire`] | messages of the kernel |
//! | [`device`] | reads and answers them |
//! | [`mapping`] | memory for them, mapped in advance |

pub mod device;
pub mod mapping;
pub mod wire;
