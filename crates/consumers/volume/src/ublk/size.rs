//! Another size for a device that is used: its kernel tells who has it open, as it does of a disk
//! that grows.
//!
//! Drivers since Linux 6.16 can (`UBLK_F_UPDATE_SIZE`); with others the device has the new size
//! when the volume is exported again. A size that changes while nobody serves the device is given
//! to it by the next one who does.

use super::abi::state;
use super::control::{Control, UblkError};
use crate::resize::Watch;
use crate::volume::Volume;
use std::sync::{Arc, Mutex};

/// Gives a device the size of its volume.
pub(super) struct Size {
    volume: Arc<Volume>,
    number: u32,
    control: Control,
    /// Held by who does so. False as long as the device is not started.
    is_there: Mutex<bool>,
}

impl Size {
    pub(super) fn new(volume: Arc<Volume>, number: u32, control: Control) -> Size {
        Size { volume, number, control, is_there: Mutex::new(false) }
    }

    /// The device is there, with the size that it had before or was made with.
    pub(super) fn started(&self) {
        *self.is_there.lock().expect("no thread panics with a size") = true;
        self.resized();
    }

    fn follow(&self) -> Result<(), UblkError> {
        if !self.control.can_resize()? || self.control.info(self.number)?.state != state::LIVE {
            return Ok(());
        }
        self.control.resize(self.number, self.volume.size_bytes())
    }
}

impl Watch for Size {
    fn resized(&self) {
        let is_there = self.is_there.lock().expect("no thread panics with a size");
        if *is_there && let Err(error) = self.follow() {
            let (volume, number) = (self.volume.name(), self.number);
            tracing::warn!(volume, number, %error, "a block device keeps the size that it had");
        }
    }
}
