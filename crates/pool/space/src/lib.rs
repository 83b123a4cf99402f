//! Spaces: linear arrays of pages in the pool.
//!
//! A space is cut into segments of equal size, and each segment is held by a group of extents, one
//! per copy or shard. It is thin: the extents of a segment are taken when its first page is
//! written, and a page that was never written reads as zeros without asking anybody.
//!
//! Decisions are apart from actions. These modules decide:
//!
//! - [`map`]: which donors hold which segment, and whom to ask next.
//! - [`upkeep`]: the next step for groups that have lost a member or must move.
//! - [`scrub`]: damage in pages that nobody reads.
//! - [`requests`]: the requests of one thread.
//! - [`flights`]: its requests in flight at each donor, and their end when a connection breaks.
//! - `latency`: whom to read from.
//! - `absence`: whether a silent donor is unreachable or gone.
//! - `recall`: which extents go back to a donor that wants some.
//!
//! None has a clock, a socket or a thread. The seeded simulation in `tests/` drives all of them
//! against the donor's own tables. [`Space`] and [`Lane`] are the same with sockets.
//!
//! Donors need not be trusted with pages: [`seal`] seals them before they leave, where their owner
//! wants that. [`seal::table`] keeps the seals that open them.
//!
//! A space has one owner, who writes. Others may read it: the owner tells them where it is
//! (`reading`).
//!
//! [`lists`] reads and writes whole lists of pages.
//!
//! Threads share the [`Space`] and own a [`Lane`] each. A page request touches its lane, its
//! lane's connection, and one entry of the [`lookup`], which is read without a lock.

mod coded;
mod config;
mod control;
mod copies;
mod error;
mod lane;
pub mod lists;
pub mod map;
pub mod seal;
mod space;
mod status;

pub use coded::code::Code;
pub use coded::recode::Record;
pub use coded::stripe::Coded;
pub use coded::{code, row, stripe};
pub use config::{Cold, Directory, DonorAddress, FAILOVER, Redundancy, SpaceConfig};
pub use copies::tend::COPYING_BYTES_PER_S;
pub use copies::verify::SCRUB_BYTES_PER_S;
pub use copies::{scrub, upkeep};
pub use error::SpaceError;
pub use hecaton_policy::site::Site;
pub use lane::{Completion, Lane, flights, requests};
pub use map::heritage::Heritage;
pub use map::reading::{MemberAt, SegmentAt};
pub use map::{Expected, group, lookup};
pub use space::Space;
pub use status::{DonorStatus, ScrubStatus, SpaceStatus};
