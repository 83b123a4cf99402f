//! Pages, extents and ids: the words that every other crate speaks.
//!
//! Everything here is either a plain value or a thin owner of memory; nothing here talks to a
//! network, and only what is in `host` talks to the kernel: [`cgroup`], [`memfd`], [`meminfo`],
//! [`numa`], [`huge_pages`] and [`random_u64`].

pub mod arena;
mod bitmap;
pub mod buddy;
pub mod checksum;
mod host;
pub mod ids;
mod signature;
pub mod size;
mod split_mix;
pub mod words;

pub use checksum::{PageSum, ZERO_PAGE_SUM, is_zero, page_sum};
pub use host::clock::unix_time_ms;
pub use host::random::random_u64;
pub use host::{cgroup, huge_pages, locked, memfd, meminfo, numa};
pub use ids::{Epoch, ExtentId, Generation, PageNo, SpaceId};
pub use signature::{PageSignature, page_signature};
pub use size::{ParseSizeError, Size};
pub use split_mix::SplitMix;

/// Bytes in a page, the unit of fault and transfer.
pub const PAGE_SIZE: usize = 4096;

/// Bytes in a page, as a shift.
pub const PAGE_SHIFT: u32 = 12;

/// Pages that hold `bytes`, rounded up.
pub const fn pages_for_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE as u64)
}

/// Bytes in `pages` pages.
pub const fn pages_to_bytes(pages: u64) -> u64 {
    pages << PAGE_SHIFT
}
