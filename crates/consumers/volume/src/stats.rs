//! Reports the counters and the state of a volume.

use hecaton_space::SpaceStatus;
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicU64;

/// A volume at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stats {
    /// Time of these figures, in milliseconds of Unix time. Figures shown elsewhere are as old as
    /// the last report.
    #[serde(default)]
    pub taken_at_ms: u64,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Part of `size_bytes` that holds data: pages that are neither holes nor lost.
    pub data_bytes: u64,
    /// Part of `data_bytes` in the spill file.
    #[serde(default)]
    pub spilled_bytes: u64,
    /// Pages whose last write could not be kept. They fail until they are written again.
    pub unkept_bytes: u64,
    /// Writes that are answered and still in the write buffer.
    #[serde(default)]
    pub buffered_bytes: u64,
    /// Target in the pool, each page counted once; none if only the volume's limit and free memory
    /// bound it.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// Pages meant for the pool: written, or read from the spill file.
    #[serde(default)]
    pub puts_total: u64,
    /// Part of `puts_total` that the pool has stored.
    #[serde(default)]
    pub puts_succeeded: u64,
    /// Pages read from the pool.
    #[serde(default)]
    pub gets: u64,
    /// Bytes that the policy took back, and that moved to the spill file.
    #[serde(default)]
    pub taken_back_bytes: u64,
    /// Clients connected.
    pub clients: u64,
    /// Client that is attached as a writer.
    #[serde(default)]
    pub writer: Option<String>,
    /// Nodes that read with a lease.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<String>,
    /// Another node owns the volume, and holds its pool memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_anothers: bool,
    /// Reason why this node cannot read another node's volume at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unheld: Option<String>,
    /// Served reads.
    pub reads: u64,
    /// Bytes that reads asked for.
    pub read_bytes: u64,
    /// Served writes, writes of zeros included.
    pub writes: u64,
    /// Bytes that writes brought.
    pub written_bytes: u64,
    /// Bytes that were trimmed, or made zeros by dropping them.
    pub dropped_bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Writes and discards in retry at an unreachable donor. Their clients have got errors.
    pub unsettled: u64,
    /// State of the volume in the pool.
    pub pool: SpaceStatus,
}

impl Stats {
    /// Bytes of data in the pool. Each page counts once, at the node that owns the volume.
    pub fn pool_bytes(&self) -> u64 {
        match self.is_anothers {
            true => 0,
            false => self.data_bytes.saturating_sub(self.spilled_bytes),
        }
    }
}

/// Counters that requests change.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) data_pages: AtomicU64,
    pub(crate) spilled_pages: AtomicU64,
    pub(crate) lost_pages: AtomicU64,
    pub(crate) taken_back_pages: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) dropped_bytes: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) unsettled: AtomicU64,
}
