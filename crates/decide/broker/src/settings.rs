//! Holds and checks the operator's settings for the broker.

use crate::shares::{self, Claim};
use std::time::Duration;

/// How the broker decides. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Memory that no VM harvests, so that a new VM need not wait.
    pub buffer_bytes: u64,
    /// Whether the nodes share the buffer evenly, each up to its size; otherwise the first nodes
    /// hold all of it.
    pub even_buffer: bool,
    /// A new VM's memory is a multiple of this: a huge page.
    pub chunk_bytes: u64,
    /// The most that a device is asked to give back at once; `None`: all at once.
    pub batch_bytes: Option<u64>,
    /// Whether several harvest VMs give back at the same time.
    pub parallel: bool,
    /// The least change of a size, unless a VM waits for the memory.
    pub least_change_bytes: u64,
    /// How long a harvest VM may give nothing while another VM waits for its memory.
    pub patience: Duration,
    /// How long a harvest VM may take in all to give what a waiting VM needs.
    pub reclaim_time: Duration,
    /// Factor of `patience` and `reclaim_time` while the waiting VM is a spot VM.
    pub spot_factor: u32,
    /// How long before its eviction a harvest VM is warned that its minimum is needed.
    pub warning: Duration,
    /// The last part of the warning, in which the VM must shut down.
    pub shut_down: Duration,
    /// How long after its eviction a harvest VM must stay away.
    pub replace_after: Duration,
    /// The most harvest VMs on this host: its part of the cluster's quota.
    pub harvest_quota: usize,
    /// Bytes that donors of a node may lend beyond what is lent, before harvest VMs grow.
    pub lend_ahead_bytes: u64,
    /// The most that ephemeral pools may have on a node.
    pub ephemeral_cap_bytes: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            buffer_bytes: 0,
            even_buffer: true,
            chunk_bytes: 2 << 20,
            batch_bytes: Some(1 << 30),
            parallel: true,
            least_change_bytes: 2 << 20,
            patience: Duration::from_secs(5),
            reclaim_time: Duration::from_secs(30),
            spot_factor: 4,
            warning: Duration::from_secs(30),
            shut_down: Duration::from_secs(20),
            replace_after: Duration::from_secs(60),
            harvest_quota: usize::MAX,
            lend_ahead_bytes: 0,
            ephemeral_cap_bytes: 0,
        }
    }
}

/// Why settings are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The chunk is not a power of two, or is smaller than a page.
    #[error("a chunk of {0} bytes cannot be: it is a power of two, of 4096 at least")]
    Chunk(u64),
    /// The batch is smaller than a chunk.
    #[error("a batch of {batch} bytes cannot be: it is {chunk} at least, which is one chunk")]
    Batch {
        /// The given batch, in bytes.
        batch: u64,
        /// The minimum, in bytes: one chunk.
        chunk: u64,
    },
    /// The shutdown takes longer than the whole warning.
    #[error("{shut_down:?} for shutting down do not fit into a warning of {warning:?}")]
    ShutDown {
        /// The given time to shut down.
        shut_down: Duration,
        /// The whole warning.
        warning: Duration,
    },
    /// Spot VMs would be served first.
    #[error("spot newcomers wait 1 time as long as others at least, and not {0} times")]
    SpotFactor(u32),
    /// Harvest VMs and new VMs would have no memory.
    #[error(
        "a buffer of {buffer} bytes does not fit into the {capacity} bytes that the host has for virtual machines; \
         give a smaller one"
    )]
    Buffer {
        /// The given buffer, in bytes.
        buffer: u64,
        /// Bytes that the host has for VMs.
        capacity: u64,
    },
}

impl Settings {
    /// Checks the settings; the error names the first invalid one.
    pub fn check(&self) -> Result<(), SettingsError> {
        let chunk = self.chunk_bytes;
        if !chunk.is_power_of_two() || chunk < hecaton_memory::PAGE_SIZE as u64 {
            return Err(SettingsError::Chunk(chunk));
        }
        if let Some(batch) = self.batch_bytes.filter(|batch| *batch < chunk) {
            return Err(SettingsError::Batch { batch, chunk });
        }
        if self.shut_down > self.warning {
            let (shut_down, warning) = (self.shut_down, self.warning);
            return Err(SettingsError::ShutDown { shut_down, warning });
        }
        if self.spot_factor == 0 {
            return Err(SettingsError::SpotFactor(self.spot_factor));
        }
        Ok(())
    }

    /// Checks that the buffer fits a host that has these bytes for VMs on each node.
    pub fn check_host(&self, capacity_bytes: &[u64]) -> Result<(), SettingsError> {
        let capacity = capacity_bytes.iter().sum();
        if self.buffer_bytes > capacity {
            return Err(SettingsError::Buffer { buffer: self.buffer_bytes, capacity });
        }
        Ok(())
    }

    /// Each node's part of the buffer, in whole chunks.
    pub(crate) fn buffer_parts(&self, capacity_bytes: &[u64]) -> Vec<u64> {
        let chunk = self.chunk_bytes;
        let whole = self.buffer_bytes.next_multiple_of(chunk);
        if self.even_buffer {
            let claim = |capacity: &u64| Claim {
                weight: 1,
                cap_bytes: capacity / chunk * chunk,
                block_bytes: chunk,
            };
            let claims: Vec<Claim> = capacity_bytes.iter().map(claim).collect();
            return shares::divide(whole, &claims);
        }
        let mut left = whole;
        let mut part = |capacity: &u64| {
            let part = left.min(capacity / chunk * chunk);
            left -= part;
            part
        };
        capacity_bytes.iter().map(&mut part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_named() {
        let with = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.check().map_err(|error| error.to_string())
        };
        assert_eq!(with(|_| ()), Ok(()));
        for (change, words) in [
            ((|s| s.chunk_bytes = 3 << 20) as fn(&mut Settings), "a chunk of 3145728 bytes"),
            (|s| s.batch_bytes = Some(1), "a batch of 1 bytes"),
            (|s| s.shut_down = Duration::from_secs(31), "31s for shutting down"),
            (|s| s.spot_factor = 0, "not 0 times"),
        ] {
            let error = with(change).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let settings = Settings { buffer_bytes: 5 << 30, ..Settings::default() };
        assert_eq!(settings.check_host(&[3 << 30, 2 << 30]), Ok(()));
        let error = settings.check_host(&[3 << 30]).unwrap_err().to_string();
        assert!(error.contains("5368709120") && error.contains("3221225472"), "{error}");
    }

    #[test]
    fn the_buffer_is_even_or_at_the_front() {
        let mut settings = Settings { buffer_bytes: 10 << 20, ..Settings::default() };
        assert_eq!(settings.buffer_parts(&[64 << 20, 64 << 20]), [6 << 20, 4 << 20]);
        let parts = settings.buffer_parts(&[2 << 20, 64 << 20, 64 << 20]);
        assert_eq!(parts, [2 << 20, 4 << 20, 4 << 20], "what one has no room for is on the others");
        settings.even_buffer = false;
        assert_eq!(settings.buffer_parts(&[8 << 20, 64 << 20]), [8 << 20, 2 << 20]);
    }
}
