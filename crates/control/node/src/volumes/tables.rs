//! Keeps the tables of a volume to which the kernel swaps in memory.
//!
//! The process that serves the volume has them locked; when it dies, nobody has. The kernel could
//! then swap them out to the very volume that cannot be served without them, and the next process
//! would wait for them in the kernel for ever. So the node locks them, too.

use super::{STATE, Volumes};
use crate::causes::with_causes;
use hecaton_memory::memfd::{MemoryError, SharedMemory};
use std::os::fd::OwnedFd;

/// The tables of one volume, mapped in the node for as long as it has the volume.
#[derive(Default)]
pub(super) struct LockedTables(Option<SharedMemory>);

impl LockedTables {
    fn lock(&mut self, tables: OwnedFd) -> Result<(), MemoryError> {
        let memory = match self.0.take() {
            Some(memory) => memory,
            None => SharedMemory::from_fd(tables)?,
        };
        let bytes = memory.bytes() as u64;
        let locked = memory.lock();
        self.0 = Some(memory);
        locked.map_err(|source| MemoryError::Call { what: "lock", bytes, source })
    }
}

impl Volumes {
    /// Whether the kernel swaps to one of them.
    pub(crate) fn are_swapped_to(&self) -> bool {
        self.table().values().any(|volume| volume.config.for_swap)
    }

    /// Locks what a volume's tables have by now, if the kernel swaps to it.
    pub(super) fn lock_tables(&self, name: &str, locked: &mut LockedTables) {
        let held = self.with(name, |volume| {
            let (_, tables) = volume.held.iter().find(|(label, _)| *label == STATE)?;
            volume.config.for_swap.then(|| tables.try_clone_to_owned())
        });
        let Ok(Some(Ok(tables))) = held else { return };
        // Not while all volumes wait: what is swapped out takes as long as the volume does.
        if let Err(error) = locked.lock(tables) {
            let error = with_causes(&error);
            tracing::warn!(volume = name, error, "the volume's tables may be swapped out");
        }
    }
}
