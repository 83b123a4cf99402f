//! Volumes: spaces of the pool that clients use as disks.
//!
//! [`Volume`] is the disk: bytes are read and written at any offset, in pages of the pool. [`Server`]
//! serves it to clients of the network block device protocol ([`nbd`]), and to machine monitors as a
//! drive of their guests (`vhost_user`). It is a file, too ([`fuse`]), and a block device of this host ([`ublk`]).
//!
//! A write is answered when all copies of its pages have it, so there is no cache to be flushed and
//! nothing to lose between connections, but for volumes that are created with a write buffer. What the process that serves a volume knows of it is in
//! memory that outlives the process ([`State`]): which pages hold data, their sums, and the contents
//! of writes under way. A successor writes those once more, because a write that nobody heard the end
//! of may be in one copy and not in another.
//!
//! | module | what it is about |
//! |---|---|
//! | [`volume`] | reads, writes, holes |
//! | `volume::flow` | short requests that are under way together |
//! | [`state`] | what outlives the process |
//! | [`attach`] | who may use it beside whom |
//! | [`extents`] | which bytes are stored |
//! | [`spill`], `places`, `returns`, `departures` | the file for what the pool has no room for; what is there; the way back, and the way there |
//! | `target` | what the cluster's policy lets it have of the pool |
//! | [`hand_over`] | it goes to another node |
//! | [`readers`] | other nodes read it, each by its own process |
//! | `resize` | another size |
//! | [`snapshot`] | a copy as of one moment |
//! | `sealing` | pages that donors can neither read nor alter |
//! | `page_locks` | who may touch which pages |
//! | `lanes` | the connections to donors, shared by the requests |
//! | `fetch`, `store` | pages from the donors, and to them |
//! | [`buffer`] | writes that are answered before donors have them |
//! | `settle` | writes whose end is not known |
//! | [`server`] | all clients of a volume |
//! | [`nbd`] | the network block device protocol |
//! | `vhost_user` | the drive of a virtual machine |
//! | [`fuse`] | a file |
//! | [`holders`] | who uses it |
//! | [`ublk`] | a block device of this host |
//! | [`reserve`] | memory in advance, for swap |

pub mod attach;
pub mod buffer;
mod departures;
mod error;
pub mod extents;
mod fetch;
pub mod fuse;
pub mod hand_over;
pub mod holders;
mod lanes;
pub mod nbd;
mod page_locks;
mod places;
pub mod readers;
pub mod reserve;
mod resize;
mod returns;
mod scrub;
mod sealing;
pub mod server;
mod settle;
mod slots;
pub mod snapshot;
mod spare;
pub mod spill;
pub mod state;
pub mod stats;
mod store;
mod target;
pub mod ublk;
mod vhost_user;
pub mod volume;

pub use error::{BlockError, ResizeError, SnapshotError, VolumeError};
pub use extents::Extent;
pub use server::{Front, Server, Terms};
pub use snapshot::Snapshot;
pub use spill::Spill;
pub use state::State;
pub use stats::Stats;
pub use volume::{Caching, Volume, VolumeConfig};
