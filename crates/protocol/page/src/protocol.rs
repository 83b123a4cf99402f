//! The words of the page protocol: what may be asked of a donor and what it may answer.
//!
//! A connection belongs to one space. It opens with [`Hello`] and [`Welcome`]; after that the
//! borrower sends requests and the donor answers each of them, in order, with the request's id.
//! All numbers are little-endian. `codec` turns these values into frames and back.

use hecaton_memory::{Epoch, ExtentId, Generation, PageSignature, PageSum, SpaceId};
use std::net::SocketAddr;
use std::time::Duration;

/// First bytes of a [`Hello`] and a [`Welcome`].
pub const MAGIC: [u8; 4] = *b"HECA";

/// The protocol versions that this build speaks, oldest and newest.
pub const VERSIONS: (u16, u16) = (2, 4);

/// The first version in which a space belongs to a node: that of [`Request::Admit`] and
/// [`Refusal::OtherNode`].
pub const OWNERS_SINCE: u16 = 3;

/// The first version in which a space's owner can name another node that takes it over: that of
/// [`Request::Bequeath`].
pub const HEIRS_SINCE: u16 = 4;

/// Most pages that one request may name: 1 MiB of payload.
pub const MAX_PAGES: usize = 256;

/// Most pages that one [`Request::Fill`] may copy: 16 MiB.
pub const MAX_FILL: u32 = 4096;

/// Most pages that one [`Request::Verify`], [`Request::Sign`] or [`Request::Repair`] may look at:
/// 16 MiB.
pub const MAX_VERIFY: u32 = 4096;

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
    /// The donor's free pages, and how busy it is.
    pub load: Load,
}

/// Sent along with every answer, so that placement needs no polling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Pages that the donor could still lend.
    pub free_pages: u64,
    /// Requests in service at the donor at this moment; 2^16 - 1 stands for more too.
    pub in_service: u32,
    /// The donor wants all of its memory back: borrowers are to move what it holds elsewhere.
    pub draining: bool,
    /// How many of the extents that the space of this connection has at the donor it wants back;
    /// 2^15 - 1 stands for more too. Which ones they are is the borrower's choice.
    pub recalled: u32,
}

/// A borrower's request. Page numbers count from the start of the extent.
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
        /// That of the segment's group, which the extent's is raised to, unless it is being filled.
        generation: Generation,
        /// At least one and at most [`MAX_PAGES`] pages, stored in the order given.
        pages: &'a [u32],
        /// The sum of each page; a page that does not match is refused with [`Refusal::Corrupt`].
        sums: &'a [PageSum],
    },
    /// The pages are not needed any more: they read as zeros, and the host has the memory back.
    Discard {
        /// The extent that holds the pages.
        extent: ExtentId,
        /// As in [`Request::Write`].
        generation: Generation,
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
        /// That of the segment's group; [`Generation::FILLING`] for an extent that is to be filled
        /// from another one. An extent that is there already keeps its own.
        generation: Generation,
    },
    /// Copies a run of pages from another donor's extent, but for those that were written or
    /// discarded here since the extent was allocated: what is here is newer. Only for an extent
    /// that is being filled. The donor asks the other one with the space and epoch of this
    /// connection.
    Fill {
        /// The extent that is being filled.
        extent: ExtentId,
        /// First page of the run.
        first: u32,
        /// Pages in the run; at most [`MAX_FILL`].
        count: u32,
        /// Where to copy from.
        source: FillSource,
    },
    /// The extent has all that the segment had in this generation: it is not being filled any more.
    Confirm {
        /// The extent.
        extent: ExtentId,
        /// That of the segment's group. A lower one than the extent's changes nothing.
        generation: Generation,
    },
    /// Whether some pages still are what was stored: the donor computes their sums anew.
    Verify {
        /// The extent.
        extent: ExtentId,
        /// First page of the run.
        first: u32,
        /// Pages in the run; at least one and at most [`MAX_VERIFY`].
        count: u32,
    },
    /// The signatures of some pages, as they are in the donor's memory now, be they what was stored
    /// or not: whether pages of a coded stripe belong together.
    Sign {
        /// The extent.
        extent: ExtentId,
        /// First page of the run.
        first: u32,
        /// Pages in the run; at least one and at most [`MAX_VERIFY`].
        count: u32,
    },
    /// Mends the pages of a run that do not match their sums, as far as another donor's extent has
    /// contents that do. Whatever matches its sum stays as it is, so that no write is undone. The
    /// donor asks the other one with the space and epoch of this connection.
    Repair {
        /// The extent.
        extent: ExtentId,
        /// First page of the run.
        first: u32,
        /// Pages in the run; at least one and at most [`MAX_VERIFY`].
        count: u32,
        /// Where to copy from.
        source: FillSource,
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
    /// The donors of that node may read the space's extents here from now on: the borrower is about
    /// to have them copy from this one. Needed where nodes have certificates, since such a donor
    /// shows another one than the borrower. It does not outlive the donor's process. Since version
    /// [`OWNERS_SINCE`]: in an earlier one a donor keeps nobody out.
    Admit {
        /// The node's name; at most [`MAX_NAME`] bytes.
        node: &'a str,
    },
    /// That node, and no other, may take the space over from its owner, who asks this: by a Fence
    /// of a higher epoch, with which the space is its own. Until then all stays as it is. Another
    /// node takes the place of one that was named before. It does not outlive the donor's process.
    /// Since version [`HEIRS_SINCE`].
    Bequeath {
        /// The node's name; at most [`MAX_NAME`] bytes.
        node: &'a str,
    },
}

impl Request<'_> {
    /// The first version that has it.
    pub fn since(&self) -> u16 {
        match self {
            Request::Admit { .. } => OWNERS_SINCE,
            Request::Bequeath { .. } => HEIRS_SINCE,
            _ => VERSIONS.0,
        }
    }
}

/// The extent that a [`Request::Fill`] or a [`Request::Repair`] copies from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillSource {
    /// Where its donor takes page connections.
    pub address: SocketAddr,
    /// The life of the donor in which the extent was given.
    pub boot: u64,
    /// The extent.
    pub extent: ExtentId,
}

/// A page, as its donor finds it: one line of the answer to [`Request::Verify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Never written, or discarded since: it reads as zeros.
    Unwritten,
    /// It matches the sum that came with it.
    Sound(PageSum),
    /// It does not match the sum that came with it, which is this one.
    Damaged(PageSum),
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
    /// The latest that a write, a discard or a confirmation brought; [`Generation::FILLING`] for an
    /// extent that does not have all of its segment's pages.
    pub generation: Generation,
}

/// A donor's answer; [`Load`] stands beside it in every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The sums that came with the pages when they were written; the page data follow. A page
    /// never written reads as zeros.
    Pages(&'a [PageSum]),
    /// Written, discarded, filled, confirmed, repaired, freed, fenced or renewed.
    Done,
    /// The extent that was asked for.
    Allocated(ExtentId),
    /// The extents that the donor holds for the space; at most [`MAX_HELD`] lines.
    Held(&'a [HeldExtent]),
    /// The pages of a run, in order; as many as were asked for.
    Verified(&'a [PageState]),
    /// The signatures of the pages of a run, in order; as many as were asked for.
    Signed(&'a [PageSignature]),
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
    /// The extent is not being filled, or no longer since its donor's process was replaced.
    #[error("the extent is not being filled")]
    NotFilling,
    /// The donor that was to be copied from does not answer, or does not hold the extent.
    #[error("the source of the copy cannot be read")]
    NoSource,
    /// The space is another node's, or has admitted this one to no more than reading.
    #[error(
        "the space belongs to another node; one that goes by a new name needs its former name and certificate for \
         what it ran before"
    )]
    OtherNode,
}

impl Refusal {
    /// As it is said in a version, which may not have it: to try again later is the best that there
    /// is then.
    pub(crate) fn in_version(self, version: u16) -> Refusal {
        match self {
            Refusal::OtherNode if version < OWNERS_SINCE => Refusal::Busy,
            refusal => refusal,
        }
    }
}
