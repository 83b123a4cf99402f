//! Volumes: spaces of the pool that clients use as disks.
//!
//! [`Volume`] is the disk: bytes are read and written at any offset, in pages of the pool.
//! [`Server`] serves it to clients of the network block device protocol ([`nbd`]), and to machine
//! monitors as a drive of their guests (`vhost_user`). It is a file, too ([`fuse`]), and a block
//! device of this host ([`ublk`]).
//!
//! A write is answered when all copies of its pages have it, so there is no cache to be flushed and
//! nothing to lose between connections. Only volumes with a write buffer answer earlier. The
//! process that serves a volume keeps its knowledge in memory that outlives it ([`State`]): which
//! pages hold data, their sums, and the contents of writes under way. A successor writes those once
//! more, because a write whose end nobody heard may be in one copy and not in another.
//!
//! | module | content |
//! |---|---|
//! | [`volume`] | reads, writes, holes; `flow`: short requests that are under way together |
//! | [`state`] | memory that outlives the process |
//! | [`attach`] | clients that may use the volume beside each other |
//! | [`extents`] | the bytes that are stored |
//! | [`requests`] | locks of pages, slots of writes, the write buffer, memory in advance for swap |
//! | `pool` | pages to the donors and from them, sealed if the volume is encrypted |
//! | [`spilling`] | the file for segments that find no room in the pool; the way there and back |
//! | [`hand_over`] | the volume goes to another node |
//! | [`readers`] | other nodes read it, each by its own process |
//! | `resize` | another size |
//! | [`snapshot`] | a copy as of one moment |
//! | [`server`] | all clients of a volume |
//! | [`nbd`] | the network block device protocol |
//! | `vhost_user` | the drive of a virtual machine |
//! | [`fuse`] | a file |
//! | [`ublk`] | a block device of this host |
//! | [`holders`] | the processes that use the file or the block device |

pub mod attach;
mod error;
pub mod extents;
pub mod fuse;
pub mod hand_over;
pub mod holders;
pub mod nbd;
mod pool;
pub mod readers;
pub mod requests;
mod resize;
pub mod server;
pub mod snapshot;
pub mod spilling;
pub mod state;
pub mod stats;
pub mod ublk;
mod vhost_user;
pub mod volume;

pub use error::{BlockError, ResizeError, SnapshotError, VolumeError};
pub use extents::Extent;
pub use server::{Front, Server, Terms};
pub use snapshot::Snapshot;
pub use spilling::spill::Spill;
pub use state::State;
pub use stats::Stats;
pub use volume::{Caching, Volume, VolumeConfig};
