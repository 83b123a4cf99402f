//! Another size for a drive whose guest is running.
//!
//! A monitor keeps the size that it has read, and shows that one to its guest. It reads it when it
//! makes the drive, and again when it is told to. Told it is only while a queue is served: what it
//! is told at other times QEMU does not heed, and older ones take for granted that the device runs.
//! So a size that changes meanwhile is told when the first queue is. One that connects again does
//! not read it of itself: it is told in any case, as nobody knows what it has read from a
//! predecessor.

use super::backend_channel::BackendChannel;
use crate::resize::Watch;
use crate::volume::Volume;
use std::sync::{Arc, Mutex};

/// The size of a drive, and what a monitor knows of it.
pub(super) struct Size {
    volume: Arc<Volume>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    channel: Option<BackendChannel>,
    /// Queues are served.
    is_running: bool,
    /// The size that the volume had when the monitor last read it, or was told to.
    bytes: Option<u64>,
}

impl Known {
    /// Whether the monitor is to be told, of a drive of so many bytes.
    fn is_due(&self, bytes: u64) -> bool {
        self.is_running && self.bytes != Some(bytes)
    }
}

impl Size {
    pub(super) fn new(volume: Arc<Volume>) -> Size {
        Size { volume, known: Mutex::default() }
    }

    /// Changes what is known, and tells the monitor if it is to be told.
    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock().expect("no thread panics with a size");
        change(&mut known);
        let bytes = self.volume.size_bytes();
        if !known.is_due(bytes) {
            return;
        }
        let Some(channel) = &known.channel else { return };
        match channel.config_has_changed() {
            Ok(()) => known.bytes = Some(bytes),
            // It is going: whoever comes next is told.
            Err(error) => {
                let volume = self.volume.name();
                tracing::debug!(volume, %error, "a machine is not told of another size");
                known.channel = None;
            }
        }
    }

    /// The monitor gives a channel.
    pub(super) fn set_channel(&self, channel: Option<BackendChannel>) {
        self.change(|known| known.channel = channel);
    }

    /// The monitor is about to get this size.
    pub(super) fn set_read(&self, bytes: u64) {
        self.change(|known| known.bytes = Some(bytes));
    }

    /// Whether queues are served.
    pub(super) fn set_running(&self, is_running: bool) {
        self.change(|known| known.is_running = is_running);
    }
}

impl Watch for Size {
    fn resized(&self) {
        self.change(|_| {});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_and_knows_another_size_is_told() {
        let known = |is_running, bytes| Known { channel: None, is_running, bytes };
        assert!(known(true, Some(1)).is_due(2) && known(true, None).is_due(2));
        assert!(!known(true, Some(2)).is_due(2));
        assert!(!known(false, Some(1)).is_due(2) && !known(false, None).is_due(2));
    }
}
