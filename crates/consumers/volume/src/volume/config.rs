//! Defines the configuration of a volume.

use crate::readers::SharedBy;
use hecaton_space::{COPYING_BYTES_PER_S, FAILOVER, Site};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Configuration of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// Its name, for people and clients.
    pub name: String,
    /// Its space, chosen at random.
    pub space: u64,
    /// Its size in pages, when it was created.
    pub pages: u64,
    /// The kernel swaps to it: what it takes to serve it is bounded, and had in advance
    /// ([`crate::requests::reserve`]).
    #[serde(default)]
    pub for_swap: bool,
    /// Copies of each page: 1 to 3.
    pub copies: u8,
    /// Where it is served: nearer donors are taken first.
    pub site: Site,
    /// The only donors that may be used, by name; all if there are none.
    pub donors: Vec<String>,
    /// The directory of its node's certificate: donors are spoken to by TLS, and show their nodes'.
    #[serde(default)]
    pub tls_dir: Option<PathBuf>,
    /// How long donors keep the space when they hear nothing.
    pub lease: Duration,
    /// How long a donor may be away before requests for its pages fail.
    pub donor_patience: Duration,
    /// Bytes that donors read in a second, all together, to compare the copies of pages. 0 compares
    /// only pages that came back wrong.
    #[serde(default)]
    pub scrub_bytes_per_s: u64,
    /// Bytes that donors copy to each other in a second, all together, to make or move copies.
    #[serde(default = "copying")]
    pub copying_bytes_per_s: u64,
    /// How long a donor may be silent before other copies take its place.
    #[serde(default = "failover")]
    pub failover: Duration,
    /// The file for what the pool has no room for.
    #[serde(default)]
    pub spill: Option<PathBuf>,
    /// Most bytes of the pool that all copies together take; the rest goes to that file.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Several clients may write at a time.
    #[serde(default)]
    pub multi_writer: bool,
    /// Writes are answered before donors have them, as long as these are not more bytes
    /// ([`crate::requests::buffer`]).
    #[serde(default)]
    pub write_buffer_bytes: Option<u64>,
    /// Donors and the spill file get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default)]
    pub encrypt: bool,
    /// It is a copy of that volume as of one moment, and nobody may write to it.
    #[serde(default)]
    pub snapshot_of: Option<String>,
    /// It is the disk for the shared memory of the consumer with this space. The kernel takes a page
    /// for clean although its write failed, and would show its old contents later. So such a page
    /// is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory_of: Option<u64>,
    /// It is that node's, and is read here ([`crate::readers`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_from: Option<SharedBy>,
}

fn copying() -> u64 {
    COPYING_BYTES_PER_S
}

fn failover() -> Duration {
    FAILOVER
}
