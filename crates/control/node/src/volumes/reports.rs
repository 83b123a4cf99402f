//! Tells how the volumes are.

use super::{Volume, VolumeReport, Volumes};

impl Volumes {
    /// All volumes as they are now.
    pub fn reports(&self) -> Vec<VolumeReport> {
        self.table().values().map(|volume| volume.report.clone()).collect()
    }

    /// The volumes that clients are connected to, as of their last statistics, or whose files are
    /// used.
    pub fn in_use(&self) -> Vec<String> {
        self.used(|_| true)
    }

    /// The same, without the disks of shared memory, which go with their consumers.
    pub fn in_use_by_clients(&self) -> Vec<String> {
        self.used(|volume| volume.config.shared_memory_of.is_none())
    }

    fn used(&self, is_meant: impl Fn(&Volume) -> bool) -> Vec<String> {
        let is_used = |volume: &&Volume| {
            volume
                .report
                .stats
                .as_ref()
                .is_some_and(|stats| stats.clients > 0 || !stats.readers.is_empty())
                || volume.entrances.iter().any(|entrance| entrance.file_in_use().is_some())
        };
        let table = self.table();
        let used = table.values().filter(|volume| is_meant(volume)).filter(is_used);
        used.map(|volume| volume.report.name.clone()).collect()
    }
}
