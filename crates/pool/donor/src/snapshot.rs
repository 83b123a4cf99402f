//! A donor's state at one moment, for `status` and for whoever supervises it.

use crate::metrics::Counters;
use hecaton_memory::{Epoch, SpaceId, pages_to_bytes};
use serde::{Deserialize, Serialize};

/// A donor at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The donor's name.
    pub name: String,
    /// Which life of the donor this is. A process that took over its predecessor's memory lives on
    /// in the same one.
    pub boot: u64,
    /// How long this process has been lending.
    pub uptime_ms: u64,
    /// Pages that it lends at most.
    pub pages: u64,
    /// Pages in no extent.
    pub free_pages: u64,
    /// Pages in extents, written or not.
    pub lent_pages: u64,
    /// Pages of extents that went back and are not free yet.
    pub leaving_pages: u64,
    /// Most pages that it lends at present: fewer than it has while some are wanted back.
    #[serde(default)]
    pub limit_pages: u64,
    /// Most bytes that it was told to lend; none if it lends what it has.
    #[serde(default)]
    pub told_limit_bytes: Option<u64>,
    /// Most bytes that it lends to keep some of its host's memory available; none if it need not.
    #[serde(default)]
    pub host_limit_bytes: Option<u64>,
    /// Pages that it would lend now.
    #[serde(default)]
    pub lendable_pages: u64,
    /// Pages that are lent and above the limit: their borrowers are asked to take them away.
    #[serde(default)]
    pub recalled_pages: u64,
    /// The parking; none if the donor does not park.
    #[serde(default)]
    pub park: Option<ParkSnapshot>,
    /// Bytes of memory that the host has really given.
    pub committed_bytes: u64,
    /// Requests in service.
    pub in_service: u32,
    /// Nothing more is lent, and borrowers are told to take away what they have here.
    #[serde(default)]
    pub draining: bool,
    /// The memory by NUMA node.
    pub zones: Vec<ZoneSnapshot>,
    /// The spaces that the donor knows.
    pub spaces: Vec<SpaceSnapshot>,
    /// Counts since the process took up the lending.
    #[serde(flatten)]
    pub counters: Counters,
}

/// Pages that a donor has in its file instead of in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParkSnapshot {
    /// Pages in extents that are parked, written or not, without those that are in memory again.
    pub parked_pages: u64,
    /// Bytes that the file takes on the disk.
    pub file_bytes: u64,
    /// Most that it is to take; none if that is the disk's matter.
    pub limit_bytes: Option<u64>,
    /// Why it took nothing the last time; none if it did.
    pub trouble: Option<String>,
    /// Pages written to it.
    pub pages_stored: u64,
    /// Pages brought back to memory.
    pub pages_fetched: u64,
    /// Pages read from it for borrowers.
    pub pages_read: u64,
    /// Pages read for borrowers that the disk did not give.
    pub pages_unreadable: u64,
}

impl Snapshot {
    /// Pages in extents that are in the file.
    pub fn parked_pages(&self) -> u64 {
        self.park.as_ref().map_or(0, |park| park.parked_pages)
    }

    /// Bytes of memory that are lent, or have gone back and are not the host's again yet.
    pub fn in_use_bytes(&self) -> u64 {
        let pages = self.lent_pages + self.leaving_pages;
        pages_to_bytes(pages.saturating_sub(self.parked_pages()))
    }
}

/// A part of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZoneSnapshot {
    /// The NUMA node that it is bound to; none if the host has only one.
    pub node: Option<u32>,
    /// Pages in it.
    pub pages: u64,
    /// Pages of the zone in no extent.
    pub free_pages: u64,
}

/// A space that the donor knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceSnapshot {
    /// The space.
    pub space: SpaceId,
    /// Its consumer, as its first connection called it.
    pub consumer: String,
    /// The oldest epoch that is served.
    pub fence: Epoch,
    /// Extents lent to it.
    pub extents: u64,
    /// Pages in them.
    pub pages: u64,
    /// Extents that it is asked to give back.
    #[serde(default)]
    pub recalled: u64,
    /// How long nothing was heard of it, give or take a tenth of a second.
    pub silent_ms: u64,
    /// How long its extents stay without a sign of life.
    pub lease_ms: u64,
}
