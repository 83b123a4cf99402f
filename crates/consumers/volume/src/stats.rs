//! What a volume has counted.

use hecaton_space::SpaceStatus;
use serde::{Deserialize, Serialize};
use std::sync::atomic::AtomicU64;

/// A volume at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stats {
    /// When these figures were taken: milliseconds of Unix time. What is shown of a volume elsewhere is
    /// a report old.
    #[serde(default)]
    pub taken_at_ms: u64,
    /// Its size.
    pub size_bytes: u64,
    /// Of that, what holds data: pages that are neither holes nor lost.
    pub data_bytes: u64,
    /// Of the data, what is in the spill file.
    #[serde(default)]
    pub spilled_bytes: u64,
    /// Pages whose last write could not be kept, which fail until they are written again.
    pub unkept_bytes: u64,
    /// What was answered and is in the write buffer.
    #[serde(default)]
    pub buffered_bytes: u64,
    /// Bytes of the pool that it may hold, each page counted once; none if nothing but its limit and free memory
    /// bounds it.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// Pages that were to be in the pool: written, or read from the spill file.
    #[serde(default)]
    pub puts_total: u64,
    /// Of those, the ones that are there.
    #[serde(default)]
    pub puts_succeeded: u64,
    /// Pages read from the pool.
    #[serde(default)]
    pub gets: u64,
    /// Bytes that the policy took back: they went to the spill file.
    #[serde(default)]
    pub taken_back_bytes: u64,
    /// Clients connected.
    pub clients: u64,
    /// The one of them that writes, or may.
    #[serde(default)]
    pub writer: Option<String>,
    /// Nodes that read it by themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<String>,
    /// Another node has it, and is who has memory of the pool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_anothers: bool,
    /// Of a volume that another node has: why it cannot be read here at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unheld: Option<String>,
    /// Reads that were served.
    pub reads: u64,
    /// Bytes that they asked for.
    pub read_bytes: u64,
    /// Writes that were served, those of zeros included.
    pub writes: u64,
    /// Bytes that they brought.
    pub written_bytes: u64,
    /// Bytes that were trimmed, or made zeros by dropping them.
    pub dropped_bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Writes that wait for a donor that is away, and were given up by their clients.
    pub unsettled: u64,
    /// How the pool holds it.
    pub pool: SpaceStatus,
}

impl Stats {
    /// Of its data, what is in the pool; each page counted once, and at the node that has it.
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
