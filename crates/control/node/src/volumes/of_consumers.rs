//! Deletes volumes that are the disks of consumers' shared memory.
//!
//! The keeper of the shared memory has such a volume created. Keeper and pager may be killed, so the
//! node deletes it: once it serves no such consumer, and nobody uses the files any more.

use super::Volumes;
use crate::causes::with_causes;
use crate::pagers::Pagers;
use std::io;
use std::thread;
use std::time::Duration;

/// Between two looks at the consumers.
const LOOK: Duration = Duration::from_millis(200);

impl Volumes {
    /// Starts the thread that does so until the node stops.
    pub(crate) fn follow_consumers(&self, pagers: &Pagers) -> io::Result<()> {
        let (volumes, pagers) = (self.clone(), pagers.clone());
        let body = move || {
            while !volumes.0.stop.wait(LOOK) {
                volumes.delete_left_behind(&pagers);
            }
        };
        thread::Builder::new().name("shared-memory".into()).spawn(body).map(drop)
    }

    fn delete_left_behind(&self, pagers: &Pagers) {
        let table = self.table();
        let of = table
            .iter()
            .filter_map(|(name, volume)| Some((name.clone(), volume.config.shared_memory_of?)));
        let of: Vec<(String, u64)> = of.collect();
        drop(table);
        for (name, consumer) in of.into_iter().filter(|(_, space)| !pagers.has_space(*space)) {
            if let Err(error) = self.delete(&name) {
                tracing::debug!(volume = name, consumer, error = with_causes(&error), "it stays");
            }
        }
    }
}
