//! What a pager and whoever starts it (the node) say to each other.
//!
//! - Standard input is a socket. Down it comes one [`PagerStart`], and when no further program will
//!   be started on the pager, [`PagerOrder::LaunchOver`]. Then the pager waits until no process
//!   uses it any more, gives all extents back and ends with status 0. Up it go [`PagerEvent`]s. If
//!   the pager is killed, or ends with status 101 (it panicked), another one is started with what
//!   it had handed over; any other end is meant.
//! - When that socket ends without the order, the node was killed. The pager pages on, and answers
//!   the node that adopts it (see [`crate::process::adoption`]) with [`PagerLeft`]; if none comes
//!   within [`Outlive::patience`], and at once if it is not to outlive its node, the end is as good
//!   as the order.
//! - On standard output it says the line "ready" once the sockets listen.
//! - At [`PagerConfig::node`] statistics are pushed each second, and a last time before the end;
//!   donors are asked for there.

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
    /// As [`hecaton_uffd::handover::Door`] reads it: who knows it attaches although `socket` is out
    /// of reach, as another user.
    #[serde(default)]
    pub key: String,
    /// Where the consumer runs.
    #[serde(default)]
    pub site: Site,
    /// Donors known at the start.
    pub donors: Vec<Donor>,
    /// In how many copies the memory is kept, and with whom.
    #[serde(default)]
    pub placement: Placement,
    /// The node's control socket: asked for donors, told of statistics.
    pub node: Option<PathBuf>,
    /// Donors get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default)]
    pub encrypt: bool,
    /// The directory of its node's certificate: donors are spoken to by TLS, and show their nodes'.
    #[serde(default)]
    pub tls_dir: Option<PathBuf>,
    /// How long donors keep the space when they hear nothing.
    pub lease: Duration,
    /// How long a donor may be away before the consumer is ended that wants a page of it.
    pub donor_patience: Duration,
    /// What is kept in an erasure code when it has gone cold. Only where there are copies.
    #[serde(default)]
    pub cold: Option<Cold>,
    /// Bytes that donors read in a second, all together, to compare the copies of pages; 0: only
    /// those that came back wrong are compared.
    #[serde(default)]
    pub scrub_bytes_per_s: u64,
    /// Bytes that donors copy to each other in a second, all together, when copies are made anew or
    /// moved.
    #[serde(default = "copying")]
    pub copying_bytes_per_s: u64,
    /// How long a donor may be silent before other copies take its place.
    #[serde(default = "failover")]
    pub failover: Duration,
    /// The consumer is a virtual machine. Then nobody is killed when its memory cannot be kept:
    /// [`crate::Stats::error`] says why, and who supervises the machine stops it.
    #[serde(default)]
    pub guest: Option<Guest>,
    /// Where the machine's monitor listens, if it has one: nothing to the pager, but to the node
    /// that adopts it.
    #[serde(default)]
    pub monitor: Option<PathBuf>,
    /// How the pager outlives its node; without it no other node finds it.
    #[serde(default)]
    pub outlive: Option<Outlive>,
}

/// How long donors keep a space whose pager is silent, if the launcher does not say: long enough
/// for a pager to be started again on a host that is short of everything, short enough that a lost
/// host's pages do not stay.
const LEASE: Duration = Duration::from_secs(60);

/// How long a donor may be away before a consumer is ended that wants a page of it, if the launcher
/// does not say. When the donor comes back after the lease, it may have given the pages up.
const DONOR_PATIENCE: Duration = LEASE;

fn copying() -> u64 {
    COPYING_BYTES_PER_S
}

fn failover() -> Duration {
    FAILOVER
}

impl PagerConfig {
    /// One copy of each page at any donor, for a program that nobody but its pager's parent looks
    /// after.
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
        /// The snapshot's memory file; it is put into the pool before the socket is listened to.
        image: PathBuf,
    },
}

/// A donor's name and address. More may be said of it by the node, and is passed over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Donor {
    /// The donor's name.
    pub name: String,
    /// The node that it is a part of: what fails together.
    #[serde(default)]
    pub node: String,
    /// Where that node stands, if that is known.
    #[serde(default)]
    pub location: Option<String>,
    /// Where it serves the page protocol.
    pub address: SocketAddr,
}

/// Most donors that are remembered.
const MAX_DONORS: usize = 4096;

impl Donor {
    /// Those that are named now, with what is said of them now, and after them those that were
    /// named before.
    pub fn joined(now: Vec<Donor>, before: Vec<Donor>) -> Vec<Donor> {
        let names: BTreeSet<String> = now.iter().map(|donor| donor.name.clone()).collect();
        let others = before.into_iter().filter(|donor| !names.contains(&donor.name));
        now.into_iter().chain(others).take(MAX_DONORS).collect()
    }
}

/// The smallest local memory that a pager works with: room for a few batches.
pub const MIN_LOCAL_BYTES: u64 = 16 << 20;

/// Bytes beyond `local_bytes` that are the consumer's for a moment: pages on their way out, in the
/// program ([`hecaton_uffd::handover::MAX_RUNS`] pages of each process) and in the pager's staging
/// memory.
pub const IN_FLIGHT_BYTES: u64 = (1 << 20) + (crate::state::STAGING_SLOTS as u64) * 4096;

/// The first line to a pager process. `held` descriptors follow, those that the pager before it
/// handed over, with lines of JSON lists of their labels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerStart {
    /// What the pager is to be.
    pub config: PagerConfig,
    /// How many descriptors follow; none to the first pager of a consumer.
    pub held: usize,
}

/// A further line to a pager process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerOrder {
    /// No further program will be started on it.
    LaunchOver,
}

/// What a pager tells the node that adopts it. [`PagerStart::held`] descriptors follow, with
/// [`PagerEvent::HoldFds`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerLeft {
    /// What another process in its place would be told.
    pub start: PagerStart,
    /// How often it was started again.
    pub restarts: u64,
    /// Whether no further program will be started on it.
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
    /// Let go of what is held under these labels.
    DropFds(Vec<String>),
    /// Why the pager ends otherwise than in peace.
    Failed(String),
    /// The pager ends in peace.
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
