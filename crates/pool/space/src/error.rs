//! Why a space does not do what it was asked.

use hecaton_memory::{Epoch, SpaceId};
use hecaton_transport::protocol::Refusal;
use std::io;
use std::time::Duration;

/// Why a space does not do what it was asked. None of these ever comes with wrong data.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// The configuration has a segment size that no donor carves.
    #[error("a segment of order {order} is too large: the largest is {most}")]
    SegmentOrder {
        /// The order asked for.
        order: u8,
        /// The largest order.
        most: u8,
    },
    /// The configuration has no pages, or more than can be numbered.
    #[error("a space of {pages} pages cannot be: it has 1 to {most}")]
    Pages {
        /// The size asked for.
        pages: u64,
        /// The largest size.
        most: u64,
    },
    /// The configuration wants more copies of each page than are kept, or none.
    #[error("{copies} copies of each page cannot be kept: 1 to {most} can")]
    Copies {
        /// The copies asked for.
        copies: u8,
        /// The most.
        most: u8,
    },
    /// No such erasure code is kept.
    #[error(
        "'{asked}' is no erasure code: give segments of a stripe and parities, as 4+2; 2 to {}, and 1 to {}",
        crate::coded::code::MAX_DATA,
        crate::coded::code::MAX_PARITY
    )]
    Code {
        /// Code asked for.
        asked: String,
    },
    /// An erasure code for memory that is kept in one copy as long as it is not cold.
    #[error(
        "the code {0} is for memory that is kept in copies while it is used: give 2 copies or 3, too"
    )]
    CodeOfOneCopy(crate::coded::code::Code),
    /// The pages are cold and coded, and are being made copies of again so that they can be written
    /// or discarded.
    #[error("segment {segment} of space {space} is coded, and is being made copies of again")]
    Coded {
        /// The space.
        space: SpaceId,
        /// The segment.
        segment: u64,
    },
    /// Not one donor could be reached.
    #[error("no donor can be reached of {0} known: is the cluster running?")]
    NoDonor(usize),
    /// No donor has room for another extent.
    #[error(
        "the pool is full: none of {donors} donors has {pages} free pages left; add donors or end other consumers"
    )]
    NoRoom {
        /// Pages of the extent.
        pages: u64,
        /// Donors that were considered.
        donors: usize,
    },
    /// Another process has taken the space over, with a higher epoch. This one must stop.
    #[error("space {space} has been taken over: its epoch {epoch} is stale")]
    Fenced {
        /// The space.
        space: SpaceId,
        /// The epoch of this borrower.
        epoch: Epoch,
    },
    /// The only copy of a segment is gone: its donor has restarted, or has let the lease run out.
    #[error("segment {segment} of space {space} is lost with donor {donor}")]
    Lost {
        /// The space.
        space: SpaceId,
        /// The segment.
        segment: u64,
        /// The donor that held it.
        donor: String,
    },
    /// The donor did not answer within the space's patience. Its extents may still exist. Whether
    /// an unanswered write was stored is not known. Its pages must be written again through the
    /// same lane before they are read from the pool.
    #[error("donor {donor} has not answered for {patience:?}")]
    Unreachable {
        /// The donor.
        donor: String,
        /// How long was tried.
        patience: Duration,
    },
    /// The donor has left every request for its pages unanswered for so long that it is taken for
    /// gone (see [`crate::SpaceConfig::give_up`]).
    #[error(
        "segment {segment} of space {space} is out of reach: donor {donor} has not answered for {} s",
        away.as_secs()
    )]
    Away {
        /// The space.
        space: SpaceId,
        /// The segment.
        segment: u64,
        /// The donor that holds it.
        donor: String,
        /// How long the donor has been away.
        away: Duration,
    },
    /// The connection broke while a write was under way, and is there again. Whether the write was
    /// stored is not known, but it will not be stored any later: its pages are to be written again.
    #[error("the connection to donor {donor} broke during a write: write the pages again")]
    Interrupted {
        /// The donor.
        donor: String,
    },
    /// The donor does not do this request, and would not do it the next time.
    #[error("donor {donor} refused a request")]
    Refused {
        /// The donor.
        donor: String,
        /// Why.
        #[source]
        refusal: Refusal,
    },
    /// A page beyond the end of the space, pages of several segments, or too many or no pages.
    #[error("bad request for {count} pages from page {first} of a space of {pages}")]
    BadRequest {
        /// The first page asked for.
        first: u64,
        /// How many were asked for.
        count: usize,
        /// Pages in the space.
        pages: u64,
    },
    /// The lane has as much under way as it takes. Call `progress` before asking for more.
    #[error("the lane has {0} pages under way, which is the limit")]
    Busy(usize),
    /// The system gives no descriptor for a lane.
    #[error("cannot make a timer for a lane")]
    Timer(#[source] io::Error),
}

impl SpaceError {
    /// Whether asking again may help, with nothing else changed.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            SpaceError::Interrupted { .. }
                | SpaceError::Unreachable { .. }
                | SpaceError::Busy(_)
                | SpaceError::Coded { .. }
        )
    }
}
