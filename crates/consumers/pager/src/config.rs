//! Defines the messages between a pager and the process that starts it (the node).
//!
//! - Standard input is a socket. The node sends one [`PagerStart`], and [`PagerOrder::LaunchOver`]
//!   when it will start no further program on the pager. Then the pager waits until no process uses
//!   it any more, gives all extents back and ends with status 0. The pager sends [`PagerEvent`]s.
//!   If the pager is killed, or ends with status 101 (it panicked), another one gets what it had
//!   handed over. Any other end is intended.
//! - If that socket ends without the order, the node was killed. The pager pages on, and answers
//!   the node that adopts it (see [`crate::process::adoption`]) with [`PagerLeft`]. The end counts
//!   as the order if no node comes within [`Outlive::patience`], and at once if the pager must not
//!   outlive its node.
//! - The pager prints the line "ready" to standard output once the sockets listen.
//! - The pager pushes statistics to [`PagerConfig::node`] each second, and a last time before the
//!   end. It asks there for donors.

use crate::pool::placement::Placement;
use crate::process::adoption::Outlive;
use hecaton_policy::site::Site;
use hecaton_space::{COPYING_BYTES_PER_S, Cold, FAILOVER, SCRUB_BYTES_PER_S};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The pager's whole configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PagerConfig {
    /// The consumer's name, for people.
    pub consumer: String,
    /// The consumer's space, chosen at random.
    pub space: u64,
    /// Bytes of the consumer's memory that may be local at a time; at least [`MIN_LOCAL_BYTES`].
    pub local_bytes: u64,
    /// Where `libhecaton.so` attaches. The pager's control socket is this path with `.ctl` added.
    pub socket: PathBuf,
    /// A [`hecaton_uffd::handover::Door`] as text. A program that knows it attaches although
    /// `socket` is out of reach, for example as another user.
    #[serde(default)]
    pub key: String,
    /// Where the consumer runs.
    #[serde(default)]
    pub site: Site,
    /// Donors known at the start.
    pub donors: Vec<Donor>,
    /// Number of copies of the memory, and the donors that hold them.
    #[serde(default)]
    pub placement: Placement,
    /// The node's control socket: the pager asks it for donors and reports statistics to it.
    pub node: Option<PathBuf>,
    /// Donors get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default)]
    pub encrypt: bool,
    /// Directory of the node's certificate. Donors use TLS and show their nodes' certificates.
    #[serde(default)]
    pub tls_dir: Option<PathBuf>,
    /// How long donors keep the space of a silent pager.
    pub lease: Duration,
    /// How long a donor may be unreachable before a consumer that wants a page of it is ended.
    pub donor_patience: Duration,
    /// Erasure code of memory that has gone cold. Only where there are copies.
    #[serde(default)]
    pub cold: Option<Cold>,
    /// Bytes that all donors together read in a second to compare the copies of pages. 0: compare
    /// only pages that came back wrong.
    #[serde(default)]
    pub scrub_bytes_per_s: u64,
    /// Bytes that all donors together copy to each other in a second to make or move copies.
    #[serde(default = "copying")]
    pub copying_bytes_per_s: u64,
    /// How long a donor may be silent before other copies take its place.
    #[serde(default = "failover")]
    pub failover: Duration,
    /// Set if the consumer is a VM. Then no process is killed when the memory cannot be kept:
    /// [`crate::Stats::error`] says why, and the VM's supervisor stops it.
    #[serde(default)]
    pub guest: Option<Guest>,
    /// Address of the VM's monitor, if it has one. Only a node that adopts the pager uses it.
    #[serde(default)]
    pub monitor: Option<PathBuf>,
    /// How the pager outlives its node. If absent, no other node finds the pager.
    #[serde(default)]
    pub outlive: Option<Outlive>,
}

/// Default of [`PagerConfig::lease`]: long enough for a pager to restart on a host that is short of
/// everything, short enough that a lost host's pages do not stay.
const LEASE: Duration = Duration::from_secs(60);

/// Default of [`PagerConfig::donor_patience`]. A donor that comes back after the lease may have
/// freed the pages.
const DONOR_PATIENCE: Duration = LEASE;

fn copying() -> u64 {
    COPYING_BYTES_PER_S
}

fn failover() -> Duration {
    FAILOVER
}

impl PagerConfig {
    /// One copy of each page at any donor, for a program that only its pager's parent supervises.
    pub fn new(consumer: String, space: u64, local_bytes: u64, socket: PathBuf) -> PagerConfig {
        PagerConfig {
            consumer,
            space,
            local_bytes,
            socket,
            key: String::new(),
            site: Site::default(),
            donors: Vec::new(),
            placement: Placement::default(),
            node: None,
            encrypt: false,
            tls_dir: None,
            lease: LEASE,
            donor_patience: DONOR_PATIENCE,
            cold: None,
            scrub_bytes_per_s: SCRUB_BYTES_PER_S,
            copying_bytes_per_s: COPYING_BYTES_PER_S,
            failover: FAILOVER,
            guest: None,
            monitor: None,
            outlive: None,
        }
    }
}

/// How a virtual machine's memory is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Guest {
    /// By `libhecaton.so` in QEMU, at [`PagerConfig::socket`].
    Qemu,
    /// By Firecracker, at a stream socket of its own, when it restores a snapshot.
    Firecracker {
        /// The socket, for `mem_backend.backend_path`.
        socket: PathBuf,
        /// The snapshot's memory file. The pager puts it into the pool before it listens.
        image: PathBuf,
    },
}

/// A donor's name and address. Further fields from the node are ignored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Donor {
    /// The donor's name.
    pub name: String,
    /// The donor's node. Donors of one node fail together.
    #[serde(default)]
    pub node: String,
    /// Location of that node, if known.
    #[serde(default)]
    pub location: Option<String>,
    /// Address at which the donor serves the page protocol.
    pub address: SocketAddr,
}

/// Most donors that are remembered.
const MAX_DONORS: usize = 4096;

impl Donor {
    /// Merges two lists: the donors of `now`, then the donors of `before` that `now` does not name.
    pub fn joined(now: Vec<Donor>, before: Vec<Donor>) -> Vec<Donor> {
        let names: BTreeSet<String> = now.iter().map(|donor| donor.name.clone()).collect();
        let others = before.into_iter().filter(|donor| !names.contains(&donor.name));
        now.into_iter().chain(others).take(MAX_DONORS).collect()
    }
}

/// The smallest local memory that a pager works with: room for a few batches.
pub const MIN_LOCAL_BYTES: u64 = 16 << 20;

/// Bytes beyond `local_bytes` that the consumer holds during an eviction: in the program
/// ([`hecaton_uffd::handover::MAX_RUNS`] pages of each process) and in the pager's staging memory.
pub const IN_FLIGHT_BYTES: u64 = (1 << 20) + (crate::state::STAGING_SLOTS as u64) * 4096;

/// The first line to a pager process. The `held` descriptors of the pager before it follow, with
/// lines of JSON lists of their labels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerStart {
    /// The pager's configuration.
    pub config: PagerConfig,
    /// Number of descriptors that follow; 0 for the first pager of a consumer.
    pub held: usize,
}

/// A further line to a pager process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerOrder {
    /// The node will start no further program on this pager.
    LaunchOver,
}

/// Message of a pager to the node that adopts it. [`PagerStart::held`] descriptors follow, with
/// [`PagerEvent::HoldFds`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerLeft {
    /// The message that would start another process in the pager's place.
    pub start: PagerStart,
    /// Number of restarts of the pager.
    pub restarts: u64,
    /// Whether no further program will start on the pager.
    pub launch_over: bool,
    /// Whether a virtual machine is leaving the pool.
    pub leaving: bool,
}

/// A line from a pager process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerEvent {
    /// Keep the descriptors that come along, under these labels, until the consumer has ended.
    /// Replaces what was held under the same labels.
    HoldFds(Vec<String>),
    /// Release the descriptors that are held under these labels.
    DropFds(Vec<String>),
    /// The pager fails, for this reason.
    Failed(String),
    /// The pager ends without a failure.
    Over,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_donor_that_is_not_named_any_more_is_remembered() {
        let donor = |name: &str, port| {
            let (name, node, location) = (name.to_owned(), String::new(), None);
            Donor { name, node, location, address: ([127, 0, 0, 1], port).into() }
        };
        let before = vec![donor("a", 1), donor("b", 2)];
        let joined = Donor::joined(vec![donor("c", 3), donor("a", 4)], before);
        let ports: Vec<_> =
            joined.iter().map(|donor| (donor.name.as_str(), donor.address.port())).collect();
        assert_eq!(ports, [("c", 3), ("a", 4), ("b", 2)]);
        let many = (0..9000).map(|n| donor(&n.to_string(), 1)).collect();
        assert_eq!(Donor::joined(vec![donor("c", 3)], many).len(), MAX_DONORS);
    }
}
