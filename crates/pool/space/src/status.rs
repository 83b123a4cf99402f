//! A space's state, for people and for metrics.

use crate::coded::code::Code;
use hecaton_memory::{Epoch, SpaceId};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A space's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpaceStatus {
    /// The space.
    pub id: SpaceId,
    /// The epoch of this borrower.
    pub epoch: Epoch,
    /// Pages in the space.
    pub pages: u64,
    /// Pages in a segment.
    pub segment_pages: u64,
    /// Segments in the space.
    pub segments: u64,
    /// Copies that each segment is to have.
    pub copies: u8,
    /// Segments that hold extents.
    pub segments_held: u64,
    /// Held segments with fewer copies than they are to have.
    pub segments_degraded: u64,
    /// Segments whose copies wait to be made or moved, the degraded ones among them.
    pub segments_untended: u64,
    /// Segments whose last copy is gone.
    pub segments_lost: u64,
    /// The erasure code of segments that have gone cold, if they are coded.
    pub code: Option<Code>,
    /// Segments that are coded.
    pub segments_coded: u64,
    /// Bytes in extents that the coded segments would take in copies, less what they and their
    /// parities take.
    pub bytes_saved: u64,
    /// Bytes that were copied between donors, for new copies and moves.
    pub bytes_filled: u64,
    /// Results of the scrub.
    pub scrub: ScrubStatus,
    /// Whether another borrower has taken the space over.
    pub fenced: bool,
    /// The donors that the space knows.
    pub donors: Vec<DonorStatus>,
}

/// Results of comparing a space's copies: see [`Space::scrub`](crate::Space::scrub).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// Bytes that donors have read for it, of all copies.
    pub bytes_verified: u64,
    /// Pages that had gone bad in one copy and were mended from another.
    pub pages_repaired: u64,
    /// Pages that no copy has as they were stored: found in the latest round, or in this one so far
    /// if those are more.
    pub pages_lost: u64,
    /// Copies that were not what was stored, and are made anew.
    pub copies_given_up: u64,
    /// How many times all segments were looked at.
    pub rounds: u64,
}

/// A donor, as one space sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DonorStatus {
    /// Its name.
    pub name: String,
    /// Where it takes page connections.
    pub addr: SocketAddr,
    /// The donor's life that was heard last, if any: a life begins without any extent.
    #[serde(default)]
    pub boot: Option<u64>,
    /// The host that it is on.
    pub host: String,
    /// Where that stands, if that is known.
    pub location: Option<String>,
    /// Whether it answered when it was last asked.
    pub reachable: bool,
    /// Whether requests have waited for it for so long that other copies serve in its place.
    #[serde(default)]
    pub overdue: bool,
    /// Whether it wants its memory back.
    pub draining: bool,
    /// Bytes in the extents that it wants back, as it said last.
    pub recalled_bytes: u64,
    /// Extents of this space that it holds.
    pub extents: u64,
    /// Bytes in those extents.
    pub bytes_held: u64,
    /// Pages that it could still lend, as it said last.
    pub free_pages: u64,
    /// Requests that it had in service, as it said last.
    pub in_service: u32,
}
