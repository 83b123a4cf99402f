//! The words of the page protocol: what may be asked of a donor and what it may answer.
//!
//! A connection belongs to one space. It opens with [`Hello`] and [`Welcome`]; after that the
//! borrower sends requests and the donor answers each of them, in order, with the request's id.
//! All numbers are little-endian. `codec` turns these values into frames and back.

use hecaton_memory::{Epoch, ExtentId, PageSum, SpaceId};
use std::time::Duration;

/// First bytes of a [`Hello`] and a [`Welcome`].
pub const MAGIC: [u8; 4] = *b"HECA";

/// The protocol versions that this build speaks, oldest and newest.
pub const VERSIONS: (u16, u16) = (1, 1);

/// Most pages that one request may name: 1 MiB of payload.
pub const MAX_PAGES: usize = 256;

/// Most lines of one answer to [`Request::List`].
pub const MAX_HELD: usize = 2048;

/// Most bytes of a name in [`Hello`] and [`Welcome`].
pub const MAX_NAME: usize = 64;

/// Opens a connection for one space.
///
/// The epoch belongs to the connection, not to the single request, but the donor compares it with
/// the space's fence on *every* request: a connection that was opened before a [`Request::Fence`]
/// with a higher epoch is refused from then on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest and newest version that the borrower speaks.
    pub versions: (u16, u16),
    /// The space whose extents this connection reads and writes.
    pub space: SpaceId,
    /// The borrower's epoch for that space.
    pub epoch: Epoch,
    /// Names one place of the borrower that opens connections one after another. A donor ends the
    /// earlier connection of a lane before it welcomes the next: what was still under way on the
    /// earlier one can then no longer overtake what comes on the new one. Chosen at random.
    pub lane: u64,
    /// How long the donor keeps the space's extents without hearing from the borrower; carried in
    /// whole milliseconds.
    pub lease: Duration,
    /// The consumer's name, for people; at most [`MAX_NAME`] bytes of UTF-8.
    pub consumer: String,
}

/// Accepts a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both speak from here on.
    pub version: u16,
    /// Which life of the donor this is: its extents do not outlive it.
    pub boot: u64,
    /// The donor's name; at most [`MAX_NAME`] bytes of UTF-8.
    pub donor: String,
    /// What the donor has free, and how busy it is.
    pub load: Load,
}

/// Sent along with every answer, so that placement needs no polling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Pages that the donor could still lend.
    pub free_pages: u64,
    /// Requests in service at the donor at this moment.
    pub in_service: u32,
}

/// What a borrower may ask. Page numbers count from the start of the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The contents of some pages, answered in the order asked.
    Read {
        /// The extent that holds the pages.
        extent: ExtentId,
        /// At least one and at most [`MAX_PAGES`] pages; the same one may stand twice.
        pages: &'a [u32],
    },
    /// New contents for some pages. The page data follow the frame's head, in the same order.
    Write {
        /// The extent that holds the pages.
        extent: ExtentId,
        /// At least one and at most [`MAX_PAGES`] pages, stored in the order given.
        pages: &'a [u32],
        /// What each page must sum to; a page that does not is refused with [`Refusal::Corrupt`].
        sums: &'a [PageSum],
    },
    /// The pages are not needed any more: they read as zeros, and the host has the memory back.
    Discard {
        /// The extent that holds the pages.
        extent: ExtentId,
        /// First page of the run.
        first: u32,
        /// Pages in the run; as many as the extent has, not bounded by [`MAX_PAGES`].
        count: u32,
    },
    /// An extent for one member of one segment. Answered with the extent that the donor already
    /// holds for them, if it does: asking twice is harmless.
    Allocate {
        /// The segment of the connection's space.
        segment: u64,
        /// Which copy or shard of the segment.
        member: u8,
        /// The extent's size as a power of two of pages.
        order: u8,
    },
    /// The extent goes back to its donor.
    Free {
        /// The extent.
        extent: ExtentId,
    },
    /// All extents of the space go back to their donor.
    FreeAll,
    /// The extents that the donor holds for the space, by rising id: how a lost map is rebuilt.
    List {
        /// The lowest id wanted. An answer of [`MAX_HELD`] lines may have a sequel, which begins
        /// after its last line.
        from: ExtentId,
    },
    /// Makes the connection's epoch the oldest that the donor serves for this space.
    Fence,
    /// Nothing but a sign of life; extends the lease as every request does.
    Renew,
}

/// One line of the answer to [`Request::List`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldExtent {
    /// The extent.
    pub extent: ExtentId,
    /// The segment that it serves.
    pub segment: u64,
    /// Which copy or shard of the segment.
    pub member: u8,
    /// The extent's size as a power of two of pages.
    pub order: u8,
    /// How many of its pages were written and not discarded since.
    pub written: u32,
}

/// What a donor answers; [`Load`] stands beside it in every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The sums that came with the pages when they were written; the page data follow. A page
    /// never written reads as zeros.
    Pages(&'a [PageSum]),
    /// Written, discarded, freed, fenced or renewed.
    Done,
    /// The extent that was asked for.
    Allocated(ExtentId),
    /// What the donor holds for the space; at most [`MAX_HELD`] lines.
    Held(&'a [HeldExtent]),
    /// Not done, and why.
    Refused(Refusal),
}

/// Why a donor does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no room for another extent.
    #[error("the donor is full")]
    Full,
    /// The connection's epoch is older than the space's.
    #[error("the epoch is stale: the space is at {0}")]
    StaleEpoch(Epoch),
    /// The extent is not there, or is another space's: its lease may have run out.
    #[error("the donor does not hold that extent for this space")]
    NoSuchExtent,
    /// A page number beyond the extent's end, or an order that the donor does not carve.
    #[error("the request is out of the extent's bounds")]
    OutOfBounds,
    /// The page at this place of the request does not match its sum; none of the pages was written.
    #[error("page {0} of the request does not match its checksum")]
    Corrupt(u32),
    /// The borrower and the donor have no version in common.
    #[error("no common version: the donor speaks {0} to {1}")]
    Version(u16, u16),
    /// The donor has as many connections as it takes, or cannot end the lane's earlier one.
    #[error("the donor takes no more connections")]
    Busy,
}
