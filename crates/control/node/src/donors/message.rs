//! Defines what a node and its donors' processes say to each other.

use hecaton_donor::Snapshot;
use hecaton_pager::adoption::Outlive;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The label of the listening socket among the descriptors that go down with [`DonorStart`].
pub const LISTENER: &str = "listener";

/// The kind of memory that a donor lends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorMemory {
    /// The NUMA node whose memory it is; all nodes', if none is named.
    pub numa_node: Option<u32>,
    /// Whether it is in huge pages, which the host must have set aside.
    pub huge_pages: bool,
}

/// Where a donor parks pages, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorPark {
    /// The directory whose file system takes them.
    pub dir: PathBuf,
    /// Most bytes that it takes; none if that is the file system's matter.
    pub limit_bytes: Option<u64>,
}

/// The first line to a donor process, with the descriptors that its labels name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorStart {
    /// Its name.
    pub name: String,
    /// Most bytes that it lends.
    pub lend_bytes: u64,
    /// The kind of memory that it lends.
    pub memory: DonorMemory,
    /// Bytes that its host is to have available, if it sees to that.
    #[serde(default)]
    pub keep_free_bytes: Option<u64>,
    /// Where it parks what it is to give back and nobody can take, if it does.
    #[serde(default)]
    pub park: Option<DonorPark>,
    /// The directory of its node's certificate, if it is to speak TLS.
    #[serde(default)]
    pub tls_dir: Option<PathBuf>,
    /// Whether it is to give back what the process before it has lent.
    #[serde(default)]
    pub draining: bool,
    /// Most bytes that it lends at present, if it was told to lend less.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Whether what it lends, and the donor itself, is to be kept from being swapped out. A donor
    /// of a version that cannot do so says nothing.
    #[serde(default)]
    pub locked: Option<bool>,
    /// How often it was started again.
    #[serde(default)]
    pub restarts: u64,
    /// How it outlives the node; it ends with the node if nothing is said.
    #[serde(default)]
    pub outlive: Option<Outlive>,
    /// [`LISTENER`], then whatever the process before it has sent up.
    pub labels: Vec<String>,
}

/// A further line to a donor process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DonorOrder {
    /// Give back all that is lent, or go on lending.
    Drain(bool),
    /// Lend no more than so many bytes, or again all that it has.
    Limit(Option<u64>),
    /// Keep what is lent, and itself, from being swapped out from now on. Answered with
    /// [`DonorEvent::Locked`].
    Lock,
    /// End.
    Stop,
}

/// A line from a donor process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DonorEvent {
    /// Keep the descriptors that come along, under these labels.
    HoldFds(Vec<String>),
    /// It serves requests.
    Serving,
    /// Statistics at this moment.
    Stats(Box<Snapshot>),
    /// It is locked, as it was told to be; or not, and why.
    Locked(Option<String>),
    /// It cannot go on; the process ends.
    Failed(String),
}
