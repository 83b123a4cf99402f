//! What an operator can choose.

use crate::shares::{self, Claim};
use std::time::Duration;

/// How the broker decides. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Memory that nobody harvests, so that a newcomer need not wait.
    pub buffer_bytes: u64,
    /// Whether each node has its part of the buffer, as far as it is large enough; otherwise the first nodes have all
    /// of it.
    pub even_buffer: bool,
    /// What a newcomer's memory is a multiple of; a huge page.
    pub chunk_bytes: u64,
    /// The most that a device is asked for at once; none for everything at once.
    pub batch_bytes: Option<u64>,
    /// Whether several harvest VMs give back at the same time.
    pub parallel: bool,
    /// Nobody's size is changed by less than this, unless a newcomer waits for it.
    pub least_change_bytes: u64,
    /// How long a harvest VM may give nothing while a newcomer waits for it.
    pub patience: Duration,
    /// How long it may take in all to give what a newcomer waits for.
    pub reclaim_time: Duration,
    /// How many times as long for a newcomer that is low-priority itself.
    pub spot_factor: u32,
    /// How long ahead a harvest VM is warned whose minimum is needed.
    pub warning: Duration,
    /// The last part of the warning, in which it is to shut down.
    pub shut_down: Duration,
    /// How long after its eviction a harvest VM may come back.
    pub replace_after: Duration,
    /// Most harvest VMs on this host; its part of the cluster's quota.
    pub harvest_quota: usize,
    /// What donors have on a node beyond what is lent, before harvest VMs grow.
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

/// Why settings cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// Not a power of two of pages.
    #[error("a chunk of {0} bytes cannot be: it is a power of two, of 4096 at least")]
    Chunk(u64),
    /// Less than a chunk.
    #[error("a batch of {batch} bytes cannot be: it is {chunk} at least, which is one chunk")]
    Batch {
        /// What was given.
        batch: u64,
        /// The least.
        chunk: u64,
    },
    /// The end is longer than the whole.
    #[error("{shut_down:?} for shutting down do not fit into a warning of {warning:?}")]
    ShutDown {
        /// What was given.
        shut_down: Duration,
        /// The whole.
        warning: Duration,
    },
    /// Newcomers of low priority would be served first.
    #[error("spot newcomers wait 1 time as long as others at least, and not {0} times")]
    SpotFactor(u32),
    /// Harvest VMs and newcomers would have nothing.
    #[error(
        "a buffer of {buffer} bytes does not fit into the {capacity} bytes that the host has for virtual machines; \
         give a smaller one"
    )]
    Buffer {
        /// What was given.
        buffer: u64,
        /// What there is.
        capacity: u64,
    },
}

impl Settings {
    /// Says what cannot be.
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

    /// Whether the buffer fits a host that has so much for virtual machines on each node.
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
