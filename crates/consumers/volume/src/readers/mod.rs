//! Lets several nodes read one volume at once, directly from donors.
//!
//! One process has the volume: it alone sends donors anything but reads. It shares the volume
//! ([`Sharing`]) with readers: processes of other nodes, which fetch its tables and learn where its
//! segments are ([`describe`], `follow`). From then on a reader asks that process for one thing,
//! once a second: to go on. It reads pages from donors, and compares them with the sums in its
//! tables.
//!
//! The sum reveals an overwritten page. But a hole is not asked for, so a reader's tables must not
//! be stale: they are valid while no process writes. `leases` ensures that: many read or one
//! writes, even if a process is killed, stopped or cut off.
//!
//! The clients of a reader may cache what they have read. So the reader replaces its tables only
//! while no client is attached. A client that was attached during a write gets errors from then on.

pub(crate) mod follow;
mod leases;
mod reading;
mod share;
#[cfg(test)]
mod tests;

pub use follow::{Described, describe, fetch_tables};
pub use leases::MAX_READERS;
pub(crate) use leases::{Holder, Leases};
pub(crate) use reading::Reading;
pub use share::Sharing;

use crate::volume::VolumeConfig;
use hecaton_space::{DonorAddress, SegmentAt};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// The version of what is said here.
const VERSION: u16 = 1;

/// Between two renewals of a lease.
const RENEWAL: Duration = Duration::from_secs(1);

/// How long the process that has the volume may take to answer.
const ANSWER: Duration = Duration::from_secs(3);

/// Segments that one answer tells of.
const MAX_SEGMENTS: usize = 64;

/// Node that shares a volume which is read here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBy {
    /// The node.
    pub node: String,
    /// Where its process is asked.
    pub address: SocketAddr,
}

/// Request of a node to read a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Join {
    version: u16,
    volume: String,
    /// The space, of one that was read before: another volume of the same name is another.
    space: Option<u64>,
    /// The node that asks. Its certificate counts more, if it has one.
    node: String,
    /// Drawn by each process.
    session: u64,
}

/// Answer to [`Join`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Joined {
    /// It is this one, of so many pages.
    Volume(Box<VolumeConfig>, u64),
    /// No, and why.
    Refused(String),
}

/// Later request of a reader.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Wish {
    /// A lease, or to have it renewed.
    Lease,
    /// The tables.
    Tables,
    /// Nothing more: it answers nobody any more.
    Leave,
}

/// Answer to [`Wish`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// It may read.
    Granted(Box<Granted>),
    /// The tables of so many pages follow, in so many segments.
    Tables {
        /// The volume's size.
        pages: u64,
        /// Segments that hold anything.
        segments: u64,
    },
    /// It may not, and why.
    Refused(String),
}

/// A lease, and where the volume is.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Granted {
    /// The epoch that a reader shows donors.
    epoch: u64,
    edition: u64,
    /// Changes since the previous answer on this connection.
    segments: Vec<SegmentAt>,
    /// The donors of those.
    donors: Vec<DonorAddress>,
    /// There is more to be told.
    has_more: bool,
}

/// The clock of leases: it goes on while the host sleeps.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
